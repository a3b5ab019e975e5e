"""What programs write into the documents is what they would write now: pages, tables, pictures."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.documents import DOCUMENTS, ROOT, page

PICTURES = ROOT / "docs/pictures"


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without those of a crawl, which differ each time."""
    path = tmp_path_factory.mktemp("drawn")
    command = [sys.executable, "-m", "benchmarks.pictures", "--output", str(path)]
    subprocess.run([*command, "--no-crawls"], cwd=ROOT, check=True, timeout=300)
    return path


def texts_of(picture: Path) -> list[str]:
    """Return each text in it: matplotlib notes the text next to the curves of its letters."""
    return re.findall(r"<!-- (.+?) -->", picture.read_text("utf-8"))


def test_the_drawing_is_what_the_program_draws(drawn: Path) -> None:
    drawing = PICTURES / "memory.svg"
    assert texts_of(drawn / drawing.name) == texts_of(drawing)
    assert len(texts_of(drawing)) > 10
    assert "prefers-color-scheme:dark" in drawing.read_text("utf-8")
    assert drawing.stat().st_size < 100_000


def test_each_picture_is_shown() -> None:
    shown = {
        Path(target).name
        for document in DOCUMENTS
        for target in re.findall(r"!\[[^]]*\]\((.+?)\)", document.read_text())
    }
    assert {path.name for path in PICTURES.iterdir()} <= shown


def test_each_line_of_what_survives_is_a_test() -> None:
    claims, proofs = (
        dict(re.findall(r"^\| ([A-Z].+?) \| (.+) \|$", text, re.MULTILINE))
        for text in (
            page(name).split("\n## What survives\n")[1].split("\n## ")[0]
            for name in ("crash-safety.md", "testing.md")
        )
    )
    assert list(claims) == list(proofs)
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for row in proofs.values():
        for name in re.findall(r"`(\w+)`", row):
            assert f"def {name}(" in tests, name


PAGES = ("benchmarks", "benchmarks-jobs", "benchmarks-server")


def test_the_pages_are_those_of_the_results(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "--page", "--output"]
    made = tmp_path / "benchmarks.md"
    subprocess.run([*command, str(made)], cwd=ROOT, check=True, timeout=300)
    assert {page.stem for page in tmp_path.glob("*.md")} == set(PAGES)
    for name in PAGES:
        made, kept = (place / f"{name}.md" for place in (tmp_path, ROOT / "docs"))
        assert made.read_text("utf-8") == kept.read_text("utf-8")
        images = [{image.name for image in page.with_suffix("").glob("*")} for page in (made, kept)]
        assert images[0] == images[1]

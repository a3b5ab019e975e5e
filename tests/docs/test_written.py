"""What programs write into the documents is what they would write now: pages, tables, pictures."""

import json
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.backends import local_backend
from tests.support.documents import DOCUMENTS, ROOT, page
from tests.support.machine import REQUIRED

PICTURES = ROOT / "docs/pictures"
CHROMIUM = any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of them, of a small job."""
    path = tmp_path_factory.mktemp("drawn")
    backend = local_backend(path / "job/bloom", capacity=1000, error_rate=1e-9)
    backend.open()
    backend.add(b"page")
    backend.close()
    command = [sys.executable, "-m", "benchmarks.pictures", "--output", str(path)]
    command += ["--no-watch"]  # its picture differs each time
    if CHROMIUM or "chromium" in REQUIRED:
        command += ["--job", str(path / "job")]
    else:
        command += ["--no-report"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
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


def test_the_watch_is_drawn() -> None:
    kept = PICTURES / "watch.svg"
    assert kept.stat().st_size < 200_000
    assert "pages/s" in kept.read_text("utf-8").replace("&#160;", " ")


def size(png: Path) -> tuple[int, int]:
    data = png.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_the_report_is_photographed(drawn: Path) -> None:
    if not (drawn / "report.png").exists():
        pytest.skip("there is no Chromium here")
    kept = PICTURES / "report.png"
    assert size(drawn / "report.png") == size(kept)
    assert (drawn / "report.png").stat().st_size > 20_000
    assert kept.stat().st_size < 200_000


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


SAVE_AGAIN = """
import sys
from pathlib import Path
from benchmarks.shared import results
from benchmarks.__main__ import BENCHMARKS
for result in results.load(BENCHMARKS):
    results.save(result, Path(sys.argv[1]))
"""


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", SAVE_AGAIN, str(tmp_path)], cwd=ROOT, check=True, timeout=300
    )
    kept = sorted((ROOT / "benchmarks/results").iterdir())
    assert kept
    assert [path.name for path in kept] == [path.name for path in sorted(tmp_path.iterdir())]
    for path in kept:
        assert path.read_text("utf-8") == (tmp_path / path.name).read_text("utf-8")
        assert not json.loads(path.read_text("utf-8"))["quick"]

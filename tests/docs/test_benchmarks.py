"""The pages of measurements are what the program makes of the results that are kept."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


PAGES = ("benchmarks", "benchmarks-jobs")


def test_the_pages_are_those_of_the_results(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "--page", "--output"]
    made = tmp_path / "benchmarks.md"
    subprocess.run([*command, str(made)], cwd=ROOT, check=True, timeout=60)
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
        [sys.executable, "-c", SAVE_AGAIN, str(tmp_path)], cwd=ROOT, check=True, timeout=60
    )
    kept = sorted((ROOT / "benchmarks/results").iterdir())
    assert kept
    assert [path.name for path in kept] == [path.name for path in sorted(tmp_path.iterdir())]
    for path in kept:
        assert path.read_text("utf-8") == (tmp_path / path.name).read_text("utf-8")
        assert not json.loads(path.read_text("utf-8"))["quick"]

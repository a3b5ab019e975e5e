"""The plan of the house: which package may import which, and the table of it."""

import re
import subprocess
import sys
from pathlib import Path

import scrapy_bloom

ROOT = Path(__file__).parents[2]
PACKAGE = Path(scrapy_bloom.__file__).parent


def test_the_contracts_are_kept() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    ran = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stdout
    assert "0 broken" in ran.stdout


def test_the_table_has_the_floors_of_the_contract() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.split("| floor | package | knows |")[1].split("\n\n")[0]
    drawn: dict[int, set[str]] = {}
    for floor, names in re.findall(r"^\| (\d) \| (.+?) \|", table, re.MULTILINE):
        drawn.setdefault(int(floor), set()).update(re.findall(r"`(\w+)`", names))
    layers = (ROOT / "pyproject.toml").read_text().split("\nlayers = [")[1].split("]")[0]
    floors = [set(re.findall(r"\w+", line)) for line in layers.strip().splitlines()]
    assert drawn == dict(enumerate(reversed(floors)))


def test_few_rooms_stand_outside_of_the_packages() -> None:
    names = {path.stem for path in PACKAGE.glob("*.py")}
    assert names == {"__init__", "exceptions", "settings", "text"}

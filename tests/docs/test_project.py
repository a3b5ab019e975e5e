"""The project's own files: what other machines run, as far as it can be shown here; imports."""

import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

import scrapy_bloom

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest needs it there

ROOT = Path(__file__).parents[2]
TESTED_EXTRAS = ["redis", "report", "test"]


def test_the_oldest_dependencies_are_the_bounds_of_the_project() -> None:
    """`tox run -e oldest` tests what pyproject.toml promises."""
    read = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    extras = read["project"]["optional-dependencies"]
    promised = [read["project"]["dependencies"], *(extras[name] for name in TESTED_EXTRAS)]
    bounds = {}
    for requirement in map(Requirement, chain.from_iterable(promised)):
        if requirement.name != "scrapy-bloom":  # with other extras of its own
            (bound,) = requirement.specifier
            assert bound.operator == ">="
            bounds[requirement.name] = Version(bound.version)
    oldest = map(Requirement, read["tool"]["tox"]["env"]["oldest"]["deps"])
    pins = {
        entry.name: Version(pin.version)
        for entry in oldest
        for pin in entry.specifier
        if pin.operator == "=="
    }
    assert bounds == {name: pins.get(name) for name in bounds}
    assert len(bounds) >= 13


# Which package may import which, and the table of it.


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


def test_few_modules_are_outside_of_the_packages() -> None:
    names = {path.stem for path in Path(scrapy_bloom.__file__).parent.glob("*.py")}
    assert names == {"__init__", "copying", "exceptions", "settings", "text"}

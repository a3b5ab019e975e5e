"""The plan of the house: which package may import which, and the picture of it."""

import re
import subprocess
import sys
from pathlib import Path

import grimp

import scrapy_bloom

ROOT = Path(__file__).parents[2]
PACKAGE = Path(scrapy_bloom.__file__).parent


def package(module: str) -> str:
    """The package or top-level module that a module belongs to."""
    return module.split(".")[1] if "." in module else ""


def imports() -> set[tuple[str, str]]:
    """Which package imports which."""
    graph = grimp.build_graph("scrapy_bloom", cache_dir=None)
    pairs = {
        (package(module), package(imported))
        for module in graph.modules
        for imported in graph.find_modules_directly_imported_by(module)
    }
    return {(a, b) for a, b in pairs if a != b and "" not in {a, b} and a != "fingerprinting"}


def reached(start: str, arrows: set[tuple[str, str]]) -> set[str]:
    found: set[str] = set()
    waiting = {start}
    while waiting:
        at = waiting.pop()
        new = {b for a, b in arrows if a == at} - found
        found |= new
        waiting |= new
    return found


def test_the_contracts_are_kept() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    ran = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stdout
    assert "0 broken" in ran.stdout


def test_the_picture_shows_the_imports() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    picture = page.split("```mermaid")[1].split("```")[0]
    drawn = set(re.findall(r"^ +(\w+) --> (\w+)$", picture, re.MULTILINE))
    arrows = imports()
    needed = {(a, b) for a, b in arrows if b not in reached(a, arrows - {(a, b)})}
    assert drawn == needed


def test_the_table_names_every_package() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.split("| package | knows |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| (.+?) \|", table, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    rooms = {path.stem for path in PACKAGE.iterdir() if not path.name.startswith(("_", "py."))}
    assert named == rooms - {"fingerprinting"}


def test_few_rooms_stand_outside_of_the_packages() -> None:
    names = {path.stem for path in PACKAGE.glob("*.py")}
    assert names == {"__init__", "exceptions", "fingerprinting", "text"}


# Modules that may be longer than 300 lines, and why. Whoever mends one takes it out.
LONG: dict[str, str] = {}


def lines(path: Path) -> int:
    return path.read_text("utf-8").count("\n")


def test_no_module_is_long() -> None:
    modules = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    assert {name for name, path in modules.items() if lines(path) > 300} == set(LONG)


def test_no_test_module_is_long() -> None:
    modules = (ROOT / "tests").rglob("*.py")
    assert not [path.name for path in modules if lines(path) > 500]

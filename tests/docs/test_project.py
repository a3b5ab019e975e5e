"""The project's own files: what other machines run, as far as it can be shown here; imports."""

import ast
import re
import shutil
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import scrapy_bloom

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest needs it there

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests/support"
TESTED_EXTRAS = ["redis", "report", "test"]
NOT_ON_WINDOWS = {"fcntl", "grp", "pty", "pwd", "resource", "termios"}


def modules_of_the_portable_tests() -> list[Path]:
    section = (ROOT / "pyproject.toml").read_text("utf-8").partition("[tool.tox.env.portable]")[2]
    places = [
        ROOT / place for place in re.findall(r'"(tests/[^"]+)"', section.partition("\n\n")[0])
    ]
    assert len(places) > 5
    assert all(place.exists() for place in places)
    directories = {place if place.is_dir() else place.parent for place in places}
    tests = [
        module for place in places for module in ([place], place.rglob("test_*.py"))[place.is_dir()]
    ]
    conftests = [each / "conftest.py" for each in {ROOT / "tests", *directories}]
    return [*tests, *(each for each in conftests if each.exists())]


def imported(module: Path) -> set[str]:
    """The modules that are imported whenever this one is; those of tests.support by their names."""
    names = set()
    for node in ast.parse(module.read_text("utf-8")).body:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            package, _, name = node.module.partition("tests.support")
            if package:
                names.add(package.partition(".")[0])
            else:
                names |= {name.strip(".")} if name else {alias.name for alias in node.names}
    return names


def test_the_portable_tests_import_nothing_that_windows_lacks() -> None:
    waiting, seen = modules_of_the_portable_tests(), set()
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        names = imported(module)
        assert not names & NOT_ON_WINDOWS, module
        waiting += [path for name in names if (path := SUPPORT / f"{name}.py").exists()]
    assert SUPPORT / "crawls.py" in seen  # conftest's


@pytest.mark.parametrize(
    ("tag", "cited", "heading", "error"),
    [
        ("v1.2.3", "1.2.3", "[1.2.3] - 2026-11-23", ""),
        ("", "1.2.3", "[Unreleased]", ""),
        ("v1.2.3", "1.2.3", "[Unreleased]", "CHANGELOG.md has no line"),
        ("v1.2.4", "1.2.3", "[1.2.3] - 2026-11-23", "the version 1.2.3: tag it v1.2.3"),
        ("1.2.3", "1.2.3", "[1.2.3] - 2026-11-23", "tag it v1.2.3"),
        ("", "1.2.2", "[Unreleased]", "CITATION.cff is of version 1.2.2"),
    ],
)
def test_a_release_is_of_one_version(
    tag: str, cited: str, heading: str, error: str, tmp_path: Path
) -> None:
    (tmp_path / ".ci").mkdir()
    script = shutil.copy(ROOT / ".ci/check-release", tmp_path / ".ci")
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n', "utf-8")
    (tmp_path / "CITATION.cff").write_text(f"cff-version: 1.2.0\nversion: {cited}\n", "utf-8")
    (tmp_path / "CHANGELOG.md").write_text(f"# Changes\n\n## {heading}\n", "utf-8")
    ended = subprocess.run(
        [sys.executable, script, *filter(None, [tag])],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == bool(error)
    assert error in ended.stderr
    assert bool(ended.stderr) == bool(error)


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
        each.name: Version(pin.version)
        for each in oldest
        for pin in each.specifier
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
    assert names == {"__init__", "exceptions", "pictures", "settings", "text"}

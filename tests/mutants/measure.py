"""Change the code in small ways, one at a time, and see whether the tests notice it.

python tests/mutants/measure.py [PART ...]: writes tests/mutants/baseline.json and the tables of
docs/testing.md. It needs mutmut (`tox run -e mutants` brings it), and works in build/mutants.
"""

import argparse
import ast
import difflib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from page import BASELINE, ROOT, write_page
from prepare import prepare

WORK = ROOT / "build" / "mutants"
_KILLED = {1: "failed", 3: "failed", -24: "timeout", 24: "timeout", 36: "timeout", 152: "timeout"}


@dataclass(frozen=True, kw_only=True)
class Part:
    """Modules, and the tests that are to notice what changes in them."""

    modules: list[str]
    tests: list[str]
    but: str = ""  # as pytest's -k


_LOCAL = "not redis and not valkey and not cluster and not mirror"
PARTS = {
    "filters": Part(
        modules=["filters/*"], tests=["tests/filters"], but="not error_rate_is_what_was_asked_for"
    ),
    "files": Part(
        modules=["files/*"],
        tests=[
            "tests/files",
            "tests/generations/test_growth.py",
            "tests/generations/test_windows.py",
            "tests/generations/test_forgotten.py",
            "tests/generations/test_backend_contract.py",
        ],
        but=_LOCAL,
    ),
    "generations": Part(
        modules=["generations/*"],
        tests=["tests/generations"],
        but=f"{_LOCAL} and not kill and not crawled_once",
    ),
    "fingerprinting": Part(
        modules=["crawl/fingerprinting.py"], tests=["tests/crawl/test_fingerprinting.py"]
    ),
    "queues": Part(
        modules=["queues/*"],
        tests=["tests/queues"],
        but="not redis] and not cluster",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--again", action="store_true", help="also what is measured already")
    options = parser.parse_args()
    for name in options.parts:
        run(name, options.processes, again=options.again)
        keep(name)
    write_page()


def run(name: str, processes: int, *, again: bool) -> None:
    """Let mutmut run the tests of a part on each of its mutants."""
    work = WORK / name
    if again:
        shutil.rmtree(work, ignore_errors=True)
    # There before Python starts: it never looks again into a path that was not.
    (work / "mutants").mkdir(parents=True, exist_ok=True)
    prepare(ROOT / "scrapy_bloom", work / "scrapy_bloom")
    shutil.copytree(
        ROOT / "tests",
        work / "tests",
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("__pycache__", "mutants"),
    )
    (work / "pyproject.toml").write_text(_settings(PARTS[name]), "utf-8")
    # Processes that the tests start run the mutant, too.
    environment = {**os.environ, "PYTHONPATH": os.fspath(work / "mutants")}
    command = [Path(sys.executable).with_name("mutmut"), "run", "--max-children", str(processes)]
    subprocess.run(command, cwd=work, env=environment, check=True)


def _settings(part: Part) -> str:
    settings = {
        "source_paths": ["scrapy_bloom"],
        "only_mutate": [f"scrapy_bloom/{each}" for each in part.modules],
        "do_not_mutate": ["scrapy_bloom/queues/scripts.py"],  # Lua, in texts
        "pytest_add_cli_args_test_selection": part.tests,
        "pytest_add_cli_args": [
            *("-n", "0", "-p", "no:cacheprovider", "--hypothesis-profile=mutants"),
            *(["-k", part.but] if part.but else []),
        ],
        "timeout_multiplier": 4.0,
        "timeout_constant": 4.0,
        "on_dependency_change": "ignore",
        "track_dependencies": False,
    }
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    return "\n".join([text, "[tool.mutmut]", *lines, ""])


def keep(name: str) -> None:
    """Write down what became of the mutants, with the reasons that survivors had before."""
    work = WORK / name
    baseline: dict[str, Any] = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    known = {
        (module, survivor["function"], survivor["change"]): survivor["reason"]
        for module, figures in baseline.items()
        for survivor in figures["survivors"]
    }
    for meta in sorted((work / "mutants").rglob("*.py.meta")):
        module = os.fspath(meta.relative_to(work / "mutants/scrapy_bloom")).removesuffix(".meta")
        codes: dict[str, int | None] = json.loads(meta.read_text())["exit_code_by_key"]
        if not codes:
            continue
        changes = _changes(meta.with_suffix(""))
        survivors = [
            (function, change)
            for key, code in codes.items()
            if code not in _KILLED
            for function, change in [changes[key.rpartition(".")[2]]]
        ]
        baseline[module] = {
            "mutants": len(codes),
            "survivors": [
                {
                    "function": function,
                    "change": change,
                    "reason": known.get((module, function, change), ""),
                }
                for function, change in survivors
            ],
        }
    BASELINE.write_text(json.dumps(dict(sorted(baseline.items())), indent=1) + "\n")


def _changes(path: Path) -> dict[str, tuple[str, str]]:
    """Return what each mutant of a module changes: the function, and the lines before and after."""
    texts = {}
    source = path.read_text("utf-8")
    lines = source.split("\n")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and "__mutmut_" in node.name:
            texts[node.name] = [line.strip() for line in lines[node.lineno : node.end_lineno]]
    found = {}
    for name, after in texts.items():
        function, _, number = name.rpartition("__mutmut_")
        if number == "orig":
            continue
        before = texts[f"{function}__mutmut_orig"]
        diff = list(difflib.unified_diff(before, after, lineterm="", n=0))[2:]
        change = "\n".join(line for line in diff if not line.startswith("@@"))
        found[name] = (function.strip("xǁ_").replace("ǁ", "."), change)
    return found


if __name__ == "__main__":
    begun = time.monotonic()
    main()
    print(f"{(time.monotonic() - begun) / 60:.0f} minutes")

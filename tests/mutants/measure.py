"""Change the code in small ways, one at a time, and see whether the tests notice it.

python tests/mutants/measure.py [PART ...]: prints the score of each module, and what the surviving
mutants change. It needs mutmut (`tox run -e mutants` installs it). It works in build/mutants and
continues with what is there; remove that directory to start over.
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prepare import prepare

ROOT = Path(__file__).parents[2]
WORK = ROOT / "build" / "mutants"
_SAMPLE = "369"  # mutants whose number ends in one of these
_KILLED = {1: "failed", 3: "failed", -24: "timeout", 24: "timeout", 36: "timeout", 152: "timeout"}


@dataclass(frozen=True, kw_only=True)
class Part:
    """Modules, and the tests that are to notice what changes in them."""

    modules: list[str]
    tests: list[str]
    but: str = ""  # tests whose names have that


# Left out is what others show in less time: a survivor costs as long as all of its tests.
_SLOW = " and ".join(
    f"not {name}"
    for name in (
        *("error_rate_is_what", "error_rate_holds", "is_the_sum", "any_sequence", "crawled_once"),
        *("of_four", "lost_reply", "kill_9", "kills", "killed_run_had", "big_filter", "sooner"),
        *(
            "another_thread",
            "sleeps_in",
            "shared_filter",
            "go_to_the_new",
            "[redis",
            "cluster",
            "mirror",
        ),
    )
)
_LOCAL_QUEUE = ("serialized", "database", "handed_over", "sqlite_queue", "sqlite_store")
PARTS = {
    "filters": Part(modules=["filters/*"], tests=["tests/filters"]),
    "files": Part(
        modules=["files/*"],
        tests=[
            "tests/files",
            "tests/generations/test_growth.py",
            "tests/generations/test_windows.py",
        ],
        but="valkey",
    ),
    "generations": Part(
        modules=["generations/*"],
        tests=[
            "tests/generations",
            "tests/redis/test_making.py",
            "tests/redis/test_redis_windows.py",
        ],
        but="contract",
    ),
    "fingerprinting": Part(
        modules=["crawl/fingerprinting.py"], tests=["tests/crawl/test_fingerprinting.py"]
    ),
    "queues": Part(
        modules=[f"queues/{name}.py" for name in _LOCAL_QUEUE],
        tests=["tests/queues"],
        but="shared and not valkey",
    ),
    "shared-queues": Part(
        modules=["queues/collected.py", "queues/redis_store.py", "queues/redis_queue.py"],
        tests=["tests/queues"],
        but="parts or simulation",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--survivors", action="store_true", help="only those of the last run")
    parser.add_argument("--sample", action="store_true", help="three of ten, and what is there")
    options = parser.parse_args()
    for name in options.parts:
        run(name, options.processes, only_survivors=options.survivors, only_some=options.sample)
        show(name)


def run(name: str, processes: int, *, only_survivors: bool, only_some: bool) -> None:
    """Let mutmut run the tests of a part on each of its mutants."""
    work = WORK / name
    results = [each for _, codes in _results(work) for each in codes.items()]
    chosen = []
    if only_survivors:
        chosen = [
            key for key, code in results if code is not None and _KILLED.get(code) != "failed"
        ]
    elif only_some:
        chosen = [key for key, code in results if code is None and key[-1] in _SAMPLE]
        chosen = chosen or [f"*__mutmut_*{digit}" for digit in _SAMPLE]
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
    subprocess.run([*command, *chosen], cwd=work, env=environment, check=True)


def _results(work: Path) -> Iterator[tuple[Path, dict[str, int | None]]]:
    """Yield each mutated module of a part, and the exit codes of the tests of its mutants."""
    for meta in sorted((work / "mutants").rglob("*.py.meta")):
        if codes := json.loads(meta.read_text())["exit_code_by_key"]:
            yield meta.with_suffix(""), codes


def _settings(part: Part) -> str:
    settings = {
        "source_paths": ["scrapy_bloom"],
        "only_mutate": [f"scrapy_bloom/{each}" for each in part.modules],
        "pytest_add_cli_args_test_selection": part.tests,
        "pytest_add_cli_args": [
            *("-n", "0", "-p", "no:cacheprovider", "--hypothesis-seed=0"),
            *("-k", f"{_SLOW} and not {part.but}" if part.but else _SLOW),
        ],
        # Of the time that the tests take while mutmut notes what they run: three times as long.
        "timeout_multiplier": 1.0,
        "timeout_constant": 20.0,
        "on_dependency_change": "ignore",
        "track_dependencies": False,
    }
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    return "\n".join([text, "[tool.mutmut]", *lines, ""])


def show(name: str) -> None:
    """Print how many mutants of each module the tests killed, and what the others change."""
    for path, codes in _results(WORK / name):
        done = {key: code for key, code in codes.items() if code is not None}
        if not any(done.values()):
            continue
        survivors = [key for key, code in done.items() if code not in _KILLED]
        killed = len(done) - len(survivors)
        module = path.relative_to(WORK / name / "mutants/scrapy_bloom")
        print(f"{module}: killed {killed} of {len(done)}, {killed / len(done):.1%}")
        print(f"  ({len(codes)} mutants in all)")
        changes = _changes(path)
        for key in survivors:
            function, change = changes[key.rpartition(".")[2]]
            print(f"  survived in {function}:", *change.split("\n"), sep="\n    ")


def _changes(path: Path) -> dict[str, tuple[str, str]]:
    """Return what each mutant of a module changes: the function, and the lines before and after."""
    texts = {}
    source = path.read_text("utf-8")
    lines = source.split("\n")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and "__mutmut_" in node.name:
            own = "\n".join(lines[node.lineno - 1 : node.end_lineno]).replace(node.name, "")
            texts[node.name] = [line.strip() for line in own.split("\n")]
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

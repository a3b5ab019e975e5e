"""Two lists of millions of URLs: which are in both? By `scrapy bloom import` and `check`."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from benchmarks.shared import samples
from benchmarks.shared.report import Section, Table, at_most
from scrapy_bloom.filters.sizing import block_error_rate, choose_geometry

DEFAULT, LOOSE = 1e-9, 1e-4
RATES = (LOOSE, 1e-6, DEFAULT, 1e-12, 1e-14)  # of the computed table
MANY = 100_000_000
GIGABYTE_MB = 1000.0
TIMEOUT_SECS = 3600.0
_LOOK_SECS = 0.1


@dataclass(frozen=True)
class _Lists:
    """Two lists of URLs, in files: which numbers of `samples.url` each has."""

    path: Path
    a: range
    b: range

    @property
    def shared(self) -> range:
        return range(self.b.start, self.a.stop)

    def write(self) -> None:
        for name, numbers in {"a.txt": self.a, "b.txt": self.b}.items():
            with (self.path / name).open("w") as file:
                file.writelines(f"{samples.url(number)}\n" for number in numbers)


@dataclass(frozen=True)
class _Step:
    """One command of the recipe: what it did, and what that took."""

    what: str
    secs: float
    peak_mb: float


@dataclass(frozen=True)
class _Answer:
    """What was told to be in both lists at an error rate, and what that took.

    Attributes:
        error_rate: of the filter.
        filter_mb: its size.
        steps: the commands.
        wrong: URLs told by the first two commands that are in the second list only.
        wrong_in_the_end: likewise, after the second pass.
        missing: URLs that are in both, and were not told in the end.
    """

    error_rate: float
    filter_mb: float
    steps: list[_Step]
    wrong: int
    wrong_in_the_end: int
    missing: int

    @property
    def beyond_mb(self) -> float:
        """Of the two commands that have the large filter."""
        return max(step.peak_mb for step in self.steps[:2]) - self.filter_mb


def run(quick: bool) -> Section:  # noqa: FBT001 - every benchmark is called like this
    lines = 20_000 if quick else 10_000_000
    with tempfile.TemporaryDirectory() as directory:
        lists = _Lists(
            Path(directory), range(lines), range(lines - lines // 10, 2 * lines - lines // 10)
        )
        lists.write()
        answers = [_answer(lists, error_rate) for error_rate in (DEFAULT, LOOSE)]
    default, loose = answers
    only_b = lines - len(lists.shared)
    beyond_mb = max(each.beyond_mb for each in answers)
    return Section(
        title="Which URLs are in both lists?",
        method=(
            f"Two files of {lines:,} URLs each, of 80 to 96 characters; {len(lists.shared):,} are "
            "in both. [The recipe](lists.md#two-lists-of-100-million-urls-which-are-in-both), "
            "each command in a process of its own, timed from outside with the start of Python and "
            "Scrapy, at the default error rate and at one that errs. Memory is the most of all "
            "processes of the command together, looked at ten times a second, where a page that "
            "several share counts once (PSS), with Python, Scrapy and the pages of the filter. "
            "Each answer is compared with what is known of the lists."
        ),
        checks=[
            at_most(
                "URLs in both that were not told", max(a.missing for a in answers), 0, "{:.0f}"
            ),
            at_most(f"wrong answers at {DEFAULT:g}", default.wrong, 0, "{:.0f}"),
            at_most(
                f"wrong answers at {LOOSE:g}, of {only_b:,} URLs",
                loose.wrong,
                LOOSE * only_b,
                "{:,.0f}",
            ),
            at_most(
                "wrong answers after the second pass",
                max(a.wrong_in_the_end for a in answers),
                0,
                "{:.0f}",
            ),
            at_most(
                f"MB for {MANY:,} + {MANY:,} at {DEFAULT:g}, computed",
                _size_mb(MANY, DEFAULT) + beyond_mb,
                GIGABYTE_MB,
                "{:.0f}",
            ),
        ],
        tables=[_measured(answers), _computed(beyond_mb)],
        notes=(
            f"The second table is computed: the size that a filter for {MANY:,} URLs gets, and the "
            f"{beyond_mb:.0f} MB that a command took beyond its filter here. Wrong answers are "
            f"those to be expected if none of {MANY:,} URLs is in the other list.\n"
            "`sort` takes as much memory as it is allowed, here 200 MB twice, and the disk for the "
            "rest.\n"
            "A list is read from the start to the end, and nothing of it is kept: the time grows "
            "with the number of lines."
        ),
    )


def _measured(answers: list[_Answer]) -> Table:
    return Table(
        ("error rate", "command", "seconds", "peak MB", "filter MB", "wrong answers"),
        [
            (
                f"{answer.error_rate:g}",
                step.what,
                f"{step.secs:.1f}",
                f"{step.peak_mb:.0f}",
                f"{answer.filter_mb:.1f}" if number == 0 else "",
                {1: f"{answer.wrong:,}", len(answer.steps) - 1: f"{answer.wrong_in_the_end:,}"}.get(
                    number, ""
                ),
            )
            for answer in answers
            for number, step in enumerate(answer.steps)
        ],
    )


def _computed(beyond_mb: float) -> Table:
    rows = []
    for error_rate in RATES:
        size = _size_mb(MANY, error_rate)
        wrong = MANY * _full_error_rate(MANY, error_rate)
        shown = f"{wrong:,.0f}" if wrong >= 10 else f"{wrong:.1g}"
        rows.append((f"{error_rate:g}", f"{size:.0f}", f"{size + beyond_mb:.0f}", shown))
    return Table(("error rate", "filter MB", "MB in all", "wrong answers"), rows)


def _answer(lists: _Lists, error_rate: float) -> _Answer:
    """Run the recipe, and remove its files."""
    first, second = f"first-{error_rate:g}", f"second-{error_rate:g}"
    path, told, back, exact = lists.path, "in-both.txt", "back.txt", "exact.txt"
    steps = [
        _bloom(path, "import the first", "import", "a.txt", first, "-p", f"{error_rate:g}"),
        _bloom(path, "check the second", "check", first, "b.txt", "--seen", output=told),
        _bloom(path, "import the answers", "import", told, second, "-p", f"{error_rate:g}"),
        _bloom(path, "check the first", "check", second, "a.txt", "--seen", output=back),
        _sorted(path, told, back, exact),
    ]
    numbers, in_the_end = (set(_numbers(path / name)) for name in (told, exact))
    shared = set(lists.shared)
    assert all(number in lists.b for number in numbers)
    return _Answer(
        error_rate=error_rate,
        filter_mb=sum(each.stat().st_size for each in (path / first).glob("*.bloom")) / 1e6,
        steps=steps,
        wrong=len(numbers - shared),
        wrong_in_the_end=len(in_the_end - shared),
        missing=len(shared - in_the_end),
    )


def _bloom(path: Path, what: str, *arguments: str, output: str = "printed.txt") -> _Step:
    scrapy = str(Path(sys.executable).with_name("scrapy"))
    return _timed(path, what, [scrapy, "bloom", *arguments], output)


def _sorted(path: Path, told: str, back: str, output: str) -> _Step:
    command = f"export LC_ALL=C; comm -12 <(sort -u -S 200M {told}) <(sort -u -S 200M {back})"
    return _timed(path, "compare the answers", ["bash", "-c", command], output)


def _timed(path: Path, what: str, command: list[str], output: str) -> _Step:
    """Run a command, and look at its memory and that of its children meanwhile."""
    begun, peak = time.perf_counter(), 0
    with (
        (path / output).open("wb") as file,
        subprocess.Popen(command, cwd=path, stdout=file, stderr=subprocess.DEVNULL) as process,
    ):
        while process.poll() is None:
            peak = max(peak, _memory(process.pid))
            if time.perf_counter() > begun + TIMEOUT_SECS:
                process.kill()
            try:
                process.wait(_LOOK_SECS)
            except subprocess.TimeoutExpired:
                continue
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return _Step(what, time.perf_counter() - begun, peak / 1e6)


def _memory(pid: int) -> int:
    """Bytes of a process and all that it started; 0 of one that has ended."""
    total = 0
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for each in processes:
        try:
            total += each.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue
    return total


def _numbers(path: Path) -> Iterator[int]:
    """The numbers of `samples.url` in a list."""
    with path.open() as file:
        for line in file:
            yield int(line.partition("/product-")[2].partition(".html")[0])


def _size_mb(count: int, error_rate: float) -> float:
    """Of a filter made with that error rate: half of it is kept for growth."""
    return choose_geometry(count, error_rate / 2).nbytes / 1e6


def _full_error_rate(count: int, error_rate: float) -> float:
    num_blocks, num_hashes, _ = choose_geometry(count, error_rate / 2)
    return block_error_rate(num_blocks, num_hashes, count)

"""How memory, disk, time and opening grow with what is recorded, beside what else could do it.

Two sections of the page, from one set of filled filters.
"""

import gc
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from time import perf_counter

from benchmarks.shared import contenders, peer_env, samples
from benchmarks.shared.contenders import FILE, LIVE, MEMORY, MMAP, RUST, SEEN, SQLITE
from benchmarks.shared.machine import in_fresh_process, resident_bytes
from benchmarks.shared.peer_env import PYBLOOM_LIVE, PYBLOOMFILTER, RBLOOM
from benchmarks.shared.report import Plot, Section, Table
from benchmarks.shared.timing import timed

ERROR_RATE = 1e-6
ALL = (FILE, MEMORY, MMAP, RUST, LIVE, SEEN, SQLITE)
PERSISTENT = (FILE, MMAP, RUST, LIVE, SEEN, SQLITE)
PARTS = 5
TIMEOUT_SECS = 600


@dataclass(frozen=True)
class Grown:
    """A contender with n fingerprints.

    Attributes:
        resident: bytes by which the process grew.
        stored: bytes on the disk after it was closed.
        micros: for each of the last new ones.
    """

    resident: float
    stored: float
    micros: float


@dataclass(frozen=True)
class Filled:
    """All of them.

    Attributes:
        place: where those of the largest number are.
        grown: by name and number.
    """

    place: tempfile.TemporaryDirectory[str]
    grown: Mapping[tuple[str, int], Grown]


def run(quick: bool) -> Section:  # noqa: FBT001 - every benchmark is called like this
    """Memory, disk and time by the number of fingerprints."""
    numbers = _numbers(quick=quick)
    grown = _filled(quick=quick).grown
    names = contenders.present(*ALL)

    def table(what: str, figure: Callable[[Grown], float], form: str) -> Table:
        rows = [(name, *(form.format(figure(grown[name, n])) for n in numbers)) for name in names]
        return Table((what, *(f"n = {n:,}" for n in numbers)), rows)

    def plot(name: str, title: str, y: str, figure: Callable[[Grown], float]) -> Plot:
        series = {
            each: [(float(n), shown) for n in numbers if (shown := figure(grown[each, n])) > 0]
            for each in names
        }
        return Plot(name, title, "fingerprints recorded", y, series)

    last = numbers[-1]
    per_fingerprint = Table(
        (f"bytes per fingerprint, n = {last:,}", "memory", "disk"),
        [
            (
                name,
                f"{grown[name, last].resident / last:.2f}",
                f"{grown[name, last].stored / last:.2f}",
            )
            for name in names
        ],
    )
    return Section(
        title="How each grows",
        method=(
            f"Each made for n fingerprints at error rate {ERROR_RATE:g} and given as many, in a "
            "fresh process. Memory is how much that process grew (RSS), disk what is there after "
            f"closing. Time is that of the last tenth of n, or of the last 50,000: the median of "
            f"{PARTS} parts, and of {_repetitions(numbers[0])} processes up to n = 100,000. "
            f"Peers: {peer_env.versions(PYBLOOMFILTER, RBLOOM, PYBLOOM_LIVE)}."
        ),
        tables=[
            per_fingerprint,
            table("memory, MB", lambda each: each.resident / 1e6, "{:,.2f}"),
            table("disk, MB", lambda each: each.stored / 1e6, "{:,.2f}"),
            table("new, µs", lambda each: each.micros, "{:.2f}"),
        ],
        notes="\n".join(
            (
                "A few hundred kilobytes more or less are the interpreter's own, in each row.",
                (
                    f"{FILE} and {MMAP}: RSS counts the pages of the mapped file that were "
                    "touched, which the system can take back. SQLite keeps its own few megabytes, "
                    "and leaves the rest of its file to the system's cache, which RSS does not "
                    "count."
                ),
                (
                    f"{contenders.SQLITE_TEXT}. All but the rows that are timed were written "
                    "beforehand, in order."
                ),
                (
                    f"{RUST} and {LIVE}: nothing is on the disk before they are saved, here at "
                    f"the end. {MEMORY} is not saved. What servers need is in the section on Redis."
                ),
                *peer_env.notes(PYBLOOMFILTER, RBLOOM, PYBLOOM_LIVE),
            )
        ),
        plots=[
            plot("growth-memory", "Memory", "MB", lambda each: each.resident / 1e6),
            plot("growth-time", "Time for a new fingerprint", "µs", lambda each: each.micros),
        ],
    )


def run_opening(quick: bool) -> Section:  # noqa: FBT001 - every benchmark is called like this
    """Opening the largest of them."""
    count, repetitions = _numbers(quick=quick)[-1], 1 if quick else 5
    place = Path(_filled(quick=quick).place.name)
    names = contenders.present(*PERSISTENT)
    opened: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(repetitions):
        for name in names:
            opened[name].append(in_fresh_process(TIMEOUT_SECS, _open, name, place / name, count))
    rows = []
    for name in names:
        secs, growth = ([each[i] for each in opened[name]] for i in range(2))
        rows.append(
            (
                name,
                *(f"{1000 * each:,.1f}" for each in (min(secs), median(secs), max(secs))),
                f"{median(growth) / 1e6:,.2f}",
            )
        )
    return Section(
        title="Opening what was recorded",
        method=(
            f"{count:,} fingerprints, recorded and closed by another process. Time until it is "
            "open and has found the last of them; memory is how much the process (RSS) grew "
            f"meanwhile. In turn, {repetitions} of each, each in a fresh process."
        ),
        tables=[Table(("", "lowest, ms", "median, ms", "highest, ms", "memory, MB"), rows)],
        notes="\n".join(
            (
                (
                    "The filters alone; for a whole dupefilter see the section on resuming. The "
                    "files were written shortly before, so the system still has them in its memory."
                ),
                f"{PYBLOOMFILTER} and SQLite open at once, too; the others are read as a whole.",
                *peer_env.notes(PYBLOOMFILTER, RBLOOM, PYBLOOM_LIVE),
            )
        ),
    )


def _numbers(*, quick: bool) -> Sequence[int]:
    return (10**3, 10**4) if quick else (10**4, 10**5, 10**6, 10**7)


def _repetitions(number: int) -> int:
    return 3 if number <= 10**5 else 1


@cache
def _filled(*, quick: bool) -> Filled:
    """All of them, filled in turn; what they leave is there as long as this process."""
    place = tempfile.TemporaryDirectory()
    numbers = _numbers(quick=quick)
    grown = {}
    for number in numbers:
        repetitions = 1 if quick else _repetitions(number)
        found: dict[str, list[Grown]] = {name: [] for name in contenders.present(*ALL)}
        for _ in range(repetitions):
            for name, known in found.items():
                where = Path(place.name, name)
                shutil.rmtree(where, ignore_errors=True)
                if name == SQLITE:
                    before = number - _timed_part(number)
                    in_fresh_process(TIMEOUT_SECS, _prepare_sqlite, where, before)
                known.append(in_fresh_process(TIMEOUT_SECS, _fill, name, where, number))
        for name, known in found.items():
            grown[name, number] = Grown(
                median(each.resident for each in known),
                median(each.stored for each in known),
                median(each.micros for each in known),
            )
    return Filled(place, grown)


def _timed_part(number: int) -> int:
    return min(number // 10, 50_000)


def _prepare_sqlite(place: Path, number: int) -> None:
    contenders.fill_sqlite(place, samples.fingerprints(0, number))


def _fill(name: str, place: Path, number: int) -> Grown:
    contenders.imported(name)
    gc.collect()
    before = resident_bytes()
    contender = contenders.made(name, place, number, ERROR_RATE)
    record, part = contender.record, _timed_part(number)
    if name != SQLITE:
        for fingerprint in samples.fingerprints(0, number - part):
            record(fingerprint)
    micros = []
    size = part // PARTS
    for start in range(number - part, number, size):
        fingerprints = list(samples.fingerprints(start, size))
        secs, answers = timed(record, fingerprints)
        micros.append(secs / size * 1e6)
        assert contender.count_new(answers, size) >= 0.99 * size, (name, answers)
        del fingerprints
    gc.collect()
    resident = resident_bytes() - before
    contender.end()
    stored = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    return Grown(resident, stored, median(micros))


def _open(name: str, place: Path, count: int) -> tuple[float, float]:
    """Seconds that it took, and bytes by which this process grew."""
    (last,) = samples.fingerprints(count - 1, 1)
    contenders.imported(name)
    gc.collect()
    before = resident_bytes()
    begun = perf_counter()
    contender = contenders.made(name, place, count, ERROR_RATE)
    assert contender.has is not None
    found = contender.has(last)
    secs = perf_counter() - begun
    growth = resident_bytes() - before
    assert found, f"{name} is not what was recorded"
    contender.end()
    return secs, growth

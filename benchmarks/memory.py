"""How memory, disk and time grow with what is recorded, beside what else could do it."""

import gc
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.shared import contenders, peer_env, samples
from benchmarks.shared.contenders import FILE, LIVE, MEMORY, MMAP, RUST, SEEN, SQLITE
from benchmarks.shared.machine import in_fresh_process, resident_bytes, timed
from benchmarks.shared.peer_env import PYBLOOM_LIVE, PYBLOOMFILTER, RBLOOM
from benchmarks.shared.report import Plot, Section, Table, at_least

ERROR_RATE = 1e-6
TIMES_LESS = 20
ALL = (FILE, MEMORY, MMAP, RUST, LIVE, SEEN, SQLITE)
PARTS = 5
TIMEOUT_SECS = 600


@dataclass(frozen=True)
class Grown:
    """A contender with n fingerprints."""

    resident: float  # bytes by which the process grew
    stored: float  # bytes on the disk after it was closed
    micros: float  # for each of the last new ones


def run(quick: bool) -> Section:  # noqa: FBT001 - every benchmark is called like this
    numbers = (10**3, 10**4) if quick else (10**4, 10**5, 10**6, 10**7)
    names = contenders.present(*ALL)
    grown = {
        (name, number): entry
        for number in numbers
        for name, entry in _grown(names, number, 1 if quick else _repetitions(number)).items()
    }
    last = numbers[-1]

    def table(what: str, figure: Callable[[Grown], float], form: str) -> Table:
        rows = [(name, *(form.format(figure(grown[name, n])) for n in numbers)) for name in names]
        return Table((what, *(f"n = {n:,}" for n in numbers)), rows)

    def plot(name: str, title: str, y: str, figure: Callable[[Grown], float]) -> Plot:
        series = {
            each_name: [
                (float(n), shown) for n in numbers if (shown := figure(grown[each_name, n])) > 0
            ]
            for each_name in names
        }
        return Plot(name, title, "fingerprints recorded", y, series)

    return Section(
        title="Memory and time by size",
        method=(
            f"Each made for n fingerprints at error rate {ERROR_RATE:g} and given as many, in a "
            "fresh process. Memory is how much that process grew (RSS), disk what is there after "
            f"closing. Time is that of the last tenth of n, or of the last 50,000: the median of "
            f"{PARTS} parts, and of {_repetitions(numbers[0])} processes up to n = 100,000. "
            f"Peers: {peer_env.versions(PYBLOOMFILTER, RBLOOM, PYBLOOM_LIVE)}."
        ),
        checks=[
            at_least(
                f"times less memory than RFPDupeFilter, n = {last:,}",
                grown[SEEN, last].resident / grown[FILE, last].resident,
                TIMES_LESS,
            )
        ],
        tables=[
            Table(
                (f"bytes per fingerprint, n = {last:,}", "memory", "disk"),
                [
                    (name, f"{entry.resident / last:.2f}", f"{entry.stored / last:.2f}")
                    for name in names
                    for entry in (grown[name, last],)
                ],
            ),
            table("memory, MB", lambda entry: entry.resident / 1e6, "{:,.2f}"),
            table("disk, MB", lambda entry: entry.stored / 1e6, "{:,.2f}"),
            table("new, µs", lambda entry: entry.micros, "{:.2f}"),
        ],
        notes="\n".join(
            (
                "A few hundred kilobytes more or less are the interpreter's own, in each row.",
                (
                    f"{MMAP}: RSS counts the pages of the mapped file that were touched, which the "
                    "system can take back. SQLite keeps its own few megabytes, and leaves the rest "
                    "of its file to the system's cache, which RSS does not count."
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
                (
                    f"{PYBLOOMFILTER} and rbloom are compiled as a whole, and faster than any "
                    "filter in Python while they fit into the processor's cache. In a large one, "
                    "each of the k bits of theirs is in a page of its own, and all of ours are in "
                    "one or two."
                ),
                f"{contenders.RBLOOM_TEXT}.",
            )
        ),
        plots=[
            plot("growth-memory", "Memory", "MB", lambda entry: entry.resident / 1e6),
            plot("growth-time", "Time for a new fingerprint", "µs", lambda entry: entry.micros),
        ],
    )


def _repetitions(number: int) -> int:
    return 3 if number <= 10**5 else 1


def _grown(names: Sequence[str], number: int, repetitions: int) -> Mapping[str, Grown]:
    """Fill all of them, in turn."""
    found: dict[str, list[Grown]] = {name: [] for name in names}
    for _ in range(repetitions):
        for name in names:
            with tempfile.TemporaryDirectory() as place:
                if name == SQLITE:
                    before = number - _timed_part(number)
                    in_fresh_process(TIMEOUT_SECS, _prepare_sqlite, Path(place), before)
                found[name].append(in_fresh_process(TIMEOUT_SECS, _fill, name, Path(place), number))
    return {
        name: Grown(
            median(entry.resident for entry in these),
            median(entry.stored for entry in these),
            median(entry.micros for entry in these),
        )
        for name, these in found.items()
    }


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

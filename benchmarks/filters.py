"""The filters alone: what it takes to remember a fingerprint, beside what else could do it."""

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

from benchmarks.shared import contenders, peer_env, samples
from benchmarks.shared.contenders import (
    FILE,
    LIVE,
    MEMORY,
    MMAP,
    RUST,
    SET,
    SQLITE,
    Contender,
)
from benchmarks.shared.peer_env import PYBLOOM_LIVE, PYBLOOMFILTER, RBLOOM
from benchmarks.shared.report import Check, Section, Table, at_most, quartiles
from benchmarks.shared.timing import PASSES, Times, timed

ERROR_RATE = 1e-6
FIRST_LIMIT, WARM_LIMIT = 1.0, 1.3
ALL = (FILE, MEMORY, MMAP, RUST, LIVE, SET, SQLITE)


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        fillings: capacity, rounds, and fingerprints in each, of filters that begin empty.
        large: the capacity that is not filled up.
        touching: fingerprints that touch all of its pages, but for one in a thousand.
        kept: fingerprints that the set and the table begin with there.
        rounds: with all pages touched.
        per_round: fingerprints.
        files: new ones that are touched for the first time.
        first: fingerprints recorded in them, cumulative; the limit is for the last but one.
        cold: in files that were dropped from memory.
    """

    fillings: Sequence[tuple[int, int, int]]
    large: int
    touching: int
    kept: int
    rounds: int
    per_round: int
    files: int
    first: Sequence[int]
    cold: int


FULL = Sizes(
    fillings=((10**4, 20, 500), (10**6, 20, 20_000)),
    large=10**8,
    touching=400_000,
    kept=10**7,
    rounds=12,
    per_round=50_000,
    files=6,
    first=(10_000, 30_000, 100_000, 300_000),
    cold=2_000,
)
QUICK = Sizes(
    fillings=((10**4, 2, 500),),
    large=10**6,
    touching=4_000,
    kept=10_000,
    rounds=2,
    per_round=2_000,
    files=2,
    first=(1_000, 5_000),
    cold=200,
)


def run(quick: bool) -> Section:  # noqa: FBT001 - every benchmark is called like this
    sizes = QUICK if quick else FULL
    names = contenders.present(*ALL)
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        for capacity, rounds, per_round in sizes.fillings:
            with _made(names, place / f"{capacity}", capacity) as made:
                times = _in_turn(made, rounds, per_round)
            rows += _rows(f"{capacity:,}", times, names)
        large = _warm_filters(place / "large", names, sizes)
        rows += _rows(f"{sizes.large:,}, warm", large, names)
        checks, tables = _against_pybloomfilter(place, sizes) if MMAP in names else ((), ())
    head = ("capacity", "", "new, µs", f"times {FILE}", "duplicate, µs", f"times {FILE}")
    return Section(
        title="Filters alone",
        method=_method(sizes),
        checks=checks,
        tables=[Table(head, rows), *tables],
        notes="\n".join(_notes(sizes)),
    )


def _method(sizes: Sizes) -> str:
    (_, rounds, _), *_ = sizes.fillings
    return (
        "Recording fingerprints of 20 bytes, made beforehand: new ones, and the same again. "
        f"Filters made for error rate {ERROR_RATE:g} and the capacity of the table; {rounds} "
        f"rounds, which begin with empty ones; for {sizes.large:,}, {sizes.rounds} rounds of "
        f"{sizes.per_round:,}, after {sizes.touching:,} others that touched the pages of all "
        f"filters; the set and the table of SQLite begin with {sizes.kept:,} there. Each round "
        "times all on the same fingerprints and begins with the next of them. New files: "
        f"{sizes.files} of each filter, one after the other, made for {sizes.large:,}; the time "
        "is that from the first fingerprint on. Files on the disk: the same, closed, dropped from "
        "the system's memory (fsync, POSIX_FADV_DONTNEED) and opened again. Peers: "
        f"{peer_env.versions(PYBLOOMFILTER, RBLOOM, PYBLOOM_LIVE)}."
    )


def _notes(sizes: Sizes) -> Iterator[str]:
    yield (
        f"{PYBLOOMFILTER} and rbloom are compiled as a whole, and faster than any filter in Python "
        "while they fit into the processor's cache. In a large one, each of the k bits of theirs "
        "is in a page of its own, and all of ours are in one or two."
    )
    yield (
        "A page that is touched for the first time costs far more than all else. Of a new file, "
        "ours touches two pages a request, and all of them only after many requests; the other "
        "has touched all of its pages after some ten thousand. So what is measured depends on how "
        "many requests are: the more, the closer is the ratio to that of warm pages. For a file "
        "on the disk, the system reads ahead of what is asked, with either."
    )
    yield (
        "Making a new file is a row of its own: ours reserves its space on the disk then, so that "
        "a full disk is told at once; the other one gets its space block by block, when it is "
        "touched. The files are on the file system of the temporary directory."
    )
    yield (
        "Every 30 seconds (BLOOM_SYNC_SECS) LocalBackend writes its file out, against a power "
        "loss, and after that the first change to each page takes longer. The first table, whose "
        "rounds take minutes, has that in it; the rows 'warm' of the second one, which take "
        "seconds, have not."
    )
    yield f"{contenders.RBLOOM_TEXT}."
    yield (
        f"{contenders.SQLITE_TEXT}. At {sizes.large:,}, its rows were written beforehand in order."
    )
    yield (
        f"LocalBackend is what a crawl uses: it grows, and its first file has half of the error "
        f"rate, so it sets a bit more than the others: k is 21 there, and 19 or 20 in "
        f"{PYBLOOMFILTER}, rbloom and {PYBLOOM_LIVE}. {PYBLOOM_LIVE} refuses what is added beyond "
        "its capacity."
    )
    yield from peer_env.notes(PYBLOOMFILTER, RBLOOM, PYBLOOM_LIVE)


def _rows(label: str, times: Times, names: Sequence[str]) -> list[Sequence[str]]:
    return [
        (
            *(label, name),
            *(
                text
                for what in PASSES
                for text in (
                    f"{median(times.micros[name, what]):.2f}",
                    f"{median(times.ratios(name, FILE, what)):.2f}",
                )
            ),
        )
        for name in names
    ]


def _in_turn(made: Mapping[str, Contender], rounds: int, size: int, start: int = 0) -> Times:
    """Rounds of so many new ones and then duplicates, each for all contenders."""
    times = Times()
    order = list(made)
    for number in range(rounds):
        values = list(samples.fingerprints(start + number * size, size))
        for what in PASSES:
            for name in order:
                secs, answers = timed(made[name].record, values)
                times.note(name, what, secs / size * 1e6)
                new = made[name].count_new(answers, size)
                assert new == 0 if what == "duplicate" else new >= 0.99 * size, (name, what, new)
        order.append(order.pop(0))
    return times


def _warm_filters(place: Path, names: Sequence[str], sizes: Sizes) -> Times:
    if SQLITE in names:
        contenders.fill_sqlite(place / SQLITE, samples.fingerprints(0, sizes.kept))
    with _made(names, place, sizes.large) as made:
        for fingerprint in samples.fingerprints(0, sizes.kept):
            made[SET].record(fingerprint)
        _touch(made, sizes)
        return _in_turn(made, sizes.rounds, sizes.per_round, sizes.kept)


def _touch(made: Mapping[str, Contender], sizes: Sizes) -> None:
    for name in made.keys() - {SET, SQLITE}:
        for fingerprint in samples.fingerprints(samples.UNUSED, sizes.touching):
            made[name].record(fingerprint)


def _first_touched(place: Path, names: Sequence[str], sizes: Sizes) -> Times:
    """Of each new file, the mean from the first on, up to each of the steps.

    Then the file is closed, written out and dropped from the system's memory, and opened again:
    the mean of the first ones then.
    """
    times = Times()
    order = list(names)
    for number in range(sizes.files):
        made = {}
        for name in order:
            begun = perf_counter()
            made[name] = _make(name, place / f"{number}", sizes.large)
            times.note(name, "made", 1e3 * (perf_counter() - begun))
        secs = dict.fromkeys(order, 0.0)
        for done, step in zip((0, *sizes.first), sizes.first, strict=False):
            values = list(samples.fingerprints(done, step - done))
            for name in order:
                took, _ = timed(made[name].record, values)
                secs[name] += took
                times.note(name, f"{step}", secs[name] / step * 1e6)
        for contender in made.values():
            contender.end()
        values = list(samples.fingerprints(sizes.first[-1], sizes.cold))
        for name in order:
            _drop(place / f"{number}" / name)
            contender = _make(name, place / f"{number}", sizes.large)
            took, _ = timed(contender.record, values)
            times.note(name, "cold", took / sizes.cold * 1e6)
            contender.end()
        shutil.rmtree(place / f"{number}")
        order.append(order.pop(0))
    return times


def _drop(place: Path) -> None:
    """Write files out, and drop them from the system's memory, as far as it can do that."""
    for path in place.rglob("*"):
        if path.is_file():
            with path.open("r+b") as file:
                os.fsync(file.fileno())
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _make(name: str, place: Path, capacity: int) -> Contender:
    return contenders.made(name, place / name, capacity, ERROR_RATE)


@contextmanager
def _made(names: Iterable[str], place: Path, capacity: int) -> Iterator[Mapping[str, Contender]]:
    made = {name: _make(name, place, capacity) for name in names}
    yield made
    for contender in made.values():
        contender.end()


def _against_pybloomfilter(place: Path, sizes: Sizes) -> tuple[Sequence[Check], Sequence[Table]]:
    names = (FILE, MMAP)
    first = _first_touched(place / "first", names, sizes)
    with _made(names, place / "alone", sizes.large) as made:
        _touch(made, sizes)
        warm = _in_turn(made, sizes.rounds, sizes.per_round)
    cold = f"the first {sizes.cold:,}"
    measured = [
        ("new file", "making it, ms in all", first, "made"),
        *(("new file", f"the first {step:,}", first, f"{step}") for step in sizes.first),
        ("a file on the disk", cold, first, "cold"),
        *(("warm", what, warm, what) for what in PASSES),
    ]
    rows = [
        (
            *(state, label),
            *(f"{median(times.micros[name, what]):.2f}" for name in names),
            *(f"{ratio:.3f}" for ratio in quartiles(times.ratios(*names, what))),
        )
        for state, label, times, what in measured
    ]
    head = (
        *(f"capacity {sizes.large:,}", "", "ours, µs", f"{PYBLOOMFILTER}, µs"),
        *("ratio, 25 %", "median", "75 %"),
    )
    step = sizes.first[-2]
    limits = (
        (f"the first {step:,} of a new file", first, f"{step}", FIRST_LIMIT),
        (f"{cold} of a file on the disk", first, "cold", FIRST_LIMIT),
        ("new, warm", warm, "new", WARM_LIMIT),
    )
    checks = [
        at_most(
            f"filter: {what}, time relative to {PYBLOOMFILTER}",
            median(times.ratios(*names, key)),
            limit,
        )
        for what, times, key, limit in limits
    ]
    return checks, [Table(head, rows)]

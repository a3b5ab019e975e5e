"""The filters alone: what it takes to remember a fingerprint, beside what else could do it."""

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

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
from benchmarks.shared.report import Section, Table
from benchmarks.shared.timing import PASSES, Times, timed

ERROR_RATE = 1e-6
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
    """

    fillings: Sequence[tuple[int, int, int]]
    large: int
    touching: int
    kept: int
    rounds: int
    per_round: int


FULL = Sizes(
    fillings=((10**4, 20, 500), (10**6, 20, 20_000)),
    large=10**8,
    touching=400_000,
    kept=10**7,
    rounds=12,
    per_round=50_000,
)
QUICK = Sizes(
    fillings=((10**4, 2, 500),),
    large=10**6,
    touching=4_000,
    kept=10_000,
    rounds=2,
    per_round=2_000,
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
    head = ("capacity", "", "new, µs", f"times {FILE}", "duplicate, µs", f"times {FILE}")
    return Section(
        title="Filters alone",
        method=_method(sizes),
        tables=[Table(head, rows)],
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
        "times all on the same fingerprints and begins with the next of them. Peers: "
        f"{peer_env.versions(PYBLOOMFILTER, RBLOOM, PYBLOOM_LIVE)}."
    )


def _notes(sizes: Sizes) -> Iterator[str]:
    yield (
        f"{PYBLOOMFILTER} and rbloom are compiled as a whole, and faster than any filter in Python "
        "while they fit into the processor's cache. In a large one, each of the k bits of theirs "
        "is in a page of its own, and all of ours are in one or two."
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


def _make(name: str, place: Path, capacity: int) -> Contender:
    return contenders.made(name, place / name, capacity, ERROR_RATE)


@contextmanager
def _made(names: Iterable[str], place: Path, capacity: int) -> Iterator[Mapping[str, Contender]]:
    made = {name: _make(name, place, capacity) for name in names}
    yield made
    for contender in made.values():
        contender.end()

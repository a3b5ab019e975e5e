"""How often each takes a fingerprint for seen that it never saw: full, and far over that."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

from bitarray import bitarray

from benchmarks.shared import contenders, peer_env, samples
from benchmarks.shared.contenders import LIVE, LIVE_SCALABLE, MMAP, RUST, Contender
from benchmarks.shared.peer_env import PYBLOOM_LIVE, PYBLOOMFILTER, RBLOOM, REDIS_BLOOM
from benchmarks.shared.report import Section, Table, at_most
from scrapy_bloom.filters.sizing import classic_error_rate
from scrapy_bloom.generations.memory import MemoryBackend
from scrapy_bloom.generations.policy import Origin, Policy

ERROR_RATE = 1e-3
TIMES_OVER = 10
OURS = "scrapy_bloom, memory"
HASHES = 6  # of scrapy-redis-bloomfilter, by default


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    capacity: int  # what the filters are made for
    queries: int  # for fingerprints that were never added
    slow_capacity: int  # for scrapy-redis-bloomfilter, whose hash is slow
    slow_queries: int  # likewise
    # powers of two, its BLOOMFILTER_BIT: one as many per fingerprint as others have, and its
    # default
    slow_bits: Sequence[int]


FULL = Sizes(100_000, 500_000, 20_000, 50_000, (18, 30))
QUICK = Sizes(2_000, 5_000, 200, 500, (12, 20))


def run(quick: bool) -> Section:  # noqa: FBT001 - every benchmark is called like this
    sizes = QUICK if quick else FULL
    rates: dict[str, Sequence[float | None]] = {}
    with tempfile.TemporaryDirectory() as directory:
        for name, make in _makers(Path(directory), sizes.capacity).items():
            rates[name] = _measured(make(), sizes.capacity, sizes.queries)
    rows = [(name, *_cells(found, sizes.queries)) for name, found in rates.items()]
    if REDIS_BLOOM not in peer_env.missing():
        for bit in sizes.slow_bits:
            found = _measured(_redis_bloom(bit), sizes.slow_capacity, sizes.slow_queries)
            rows.append(
                (f"{REDIS_BLOOM}, BLOOMFILTER_BIT = {bit}", *_cells(found, sizes.slow_queries))
            )
            theory = [
                classic_error_rate(1 << bit, HASHES, n * sizes.slow_capacity)
                for n in (1, TIMES_OVER)
            ]
            label = f"the textbook's for 2**{bit} bits and {HASHES} hashes"
            rows.append((label, *(f"{rate:.3g}" for rate in theory)))
    grown = rates[OURS][1]
    assert grown is not None
    return Section(
        title="False positives, full and over",
        method=(
            f"Filters made for {sizes.capacity:,} fingerprints at error rate {ERROR_RATE:g} are "
            f"given as many, and then {TIMES_OVER} times as many; each time they are asked for "
            f"{sizes.queries:,} that were never added. {REDIS_BLOOM}, whose hash is slow: "
            f"{sizes.slow_capacity:,}, and {sizes.slow_queries:,} asked for, its class as it is, "
            "over an array of bits in this process that answers GETBIT and SETBIT. Peers: "
            f"{peer_env.versions(PYBLOOMFILTER, RBLOOM, PYBLOOM_LIVE, REDIS_BLOOM)}."
        ),
        checks=[
            at_most(
                f"ours at {TIMES_OVER} times the capacity, relative to {ERROR_RATE:g}",
                grown / ERROR_RATE,
                1.0,
            )
        ],
        tables=[Table(("", "at the capacity", f"at {TIMES_OVER} times the capacity"), rows)],
        notes="\n".join(_notes(sizes)),
    )


def _notes(sizes: Sizes) -> Iterator[str]:
    yield (
        "± is twice the standard error of counting so many. Our filter grows: its first generation "
        "has half of the error rate."
    )
    yield (
        f"{PYBLOOM_LIVE} has a filter that raises IndexError when it is full, and a scalable one, "
        "which is made for an error rate of each of its filters, not of their sum. The others do "
        "not grow and do not tell."
    )
    yield (
        f"{REDIS_BLOOM} multiplies and adds the characters, and takes the lowest bits; its first "
        f"hash is their mere sum. BLOOMFILTER_BIT = {sizes.slow_bits[0]} is "
        f"{(1 << sizes.slow_bits[0]) / sizes.slow_capacity:.1f} bits per fingerprint, where the "
        "textbook takes 14.4 for this error rate; by default it is 30, 128 MiB. The textbook's "
        "rate is that of hashes that are even and independent."
    )
    yield "A set and a table in SQLite keep the fingerprints themselves, and never err."
    yield from peer_env.notes(PYBLOOMFILTER, RBLOOM, PYBLOOM_LIVE, REDIS_BLOOM)


def _makers(place: Path, capacity: int) -> Mapping[str, Callable[[], Contender]]:
    def ours() -> Contender:
        backend = MemoryBackend(Policy(expected=capacity, error_rate=ERROR_RATE), Origin())
        backend.open()
        return Contender(backend.add, True, backend.__contains__)

    def other(name: str) -> Callable[[], Contender]:
        return lambda: contenders.made(name, place / name, capacity, ERROR_RATE)

    others = contenders.present(MMAP, RUST, LIVE, LIVE_SCALABLE)
    return {OURS: ours, **{name: other(name) for name in others}}


def _measured(contender: Contender, capacity: int, queries: int) -> Sequence[float | None]:
    """Rates at the capacity and over it; None if it refuses to take so many."""
    rates: list[float | None] = []
    done = 0
    for count in (capacity, TIMES_OVER * capacity):
        try:
            for fingerprint in samples.fingerprints(done, count - done):
                contender.record(fingerprint)
        except IndexError:
            rates.append(None)
            continue
        done = count
        assert contender.has is not None
        wrong = sum(map(contender.has, samples.fingerprints(samples.UNUSED, queries)))
        rates.append(wrong / queries)
    return rates


def _cells(rates: Sequence[float | None], queries: int) -> Iterator[str]:
    for rate in rates:
        if rate is None:
            yield "refuses"
        else:
            yield f"{rate:.2e} ± {2 * sqrt(rate * (1 - rate) / queries):.0e}"


class _Bits:
    """Answers like a server."""

    def __init__(self, number: int) -> None:
        self._bits = bitarray(number)

    def getbit(self, _key: str, offset: int) -> int:
        """GETBIT."""
        return self._bits[offset]

    def setbit(self, _key: str, offset: int, value: int) -> None:
        """SETBIT."""
        self._bits[offset] = value


def _redis_bloom(bit: int) -> Contender:
    kind: Any = peer_env.module(REDIS_BLOOM).BloomFilter
    bloom = kind(_Bits(1 << bit), "", bit, HASHES)

    def record(fingerprint: bytes) -> bool:
        bloom.insert(fingerprint.hex())
        return True

    return Contender(record, True, lambda fingerprint: bool(bloom.exists(fingerprint.hex())))

"""Compute the figures of a report: how full a filter is, how it filled, and a forecast."""

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, count
from typing import NamedTuple

from scrapy_bloom.filters.sizing import Contents, classic_fill_ratio
from scrapy_bloom.generations.backend import FilterStatus, combined_rate
from scrapy_bloom.generations.policy import Generation, Policy

SCRAPY_SET_BYTES = 91  # per request, as docs/benchmarks.md has measured
_POINTS = 240  # of a curve: one per four pixels of a wide page


class Measured(NamedTuple):
    """A generation whose bits were counted."""

    figures: Generation  # as the crawl has counted
    contents: Contents  # as the bits have it

    @property
    def fill_when_full(self) -> float:
        """The share of bits that is set at its capacity, 0 to 1."""
        geometry = self.figures.geometry
        return classic_fill_ratio(geometry.num_bits, geometry.num_hashes, self.figures.capacity)


def count_bits(
    generations: Sequence[Generation],
    block_fills: Iterable[Iterable[float]],
    advance: Callable[[int], None],
) -> list[Measured]:
    """Count the bits of generations, block by block: they may be larger than the memory.

    `advance` gets the number of blocks done.
    """
    blocks = count(1)

    def counted(fills: Iterable[float]) -> Iterator[float]:
        for fill in fills:
            yield fill
            if (done := next(blocks)) % 100 == 0:
                advance(done)

    return [
        Measured(each, Contents.of(counted(fills), each.geometry.num_hashes))
        for each, fills in zip(generations, block_fills, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class Report:
    """A filter, and the settings that decide how it grows."""

    location: str  # for people
    spider: str  # may be empty
    fingerprinter: str  # import path; may be empty
    state: str  # whether a crawl uses it, for people
    names: Sequence[str]  # of the generations' files, or of their keys in Redis
    generations: Sequence[Measured]  # oldest first, at least one
    policy: Policy  # how it will grow
    asked: float  # the error rate when the filter was made

    @property
    def live(self) -> list[Generation]:
        """The generations as the crawl has counted them."""
        return [generation.figures for generation in self.generations]

    @cached_property
    def status(self) -> FilterStatus:
        """The figures that follow from the counts of the crawl."""
        return FilterStatus.of(self.location, self.live, self.asked)

    @property
    def error_rate(self) -> float:
        """The false-positive rate of all generations together, 0 to 1, by the bits that are set."""
        return combined_rate(generation.contents.error_rate for generation in self.generations)

    @property
    def fill_ratio(self) -> float:
        """The share of all bits that are set, 0 to 1, counted."""
        sizes = [generation.figures.geometry.num_bits for generation in self.generations]
        fills = [generation.contents.fill_ratio for generation in self.generations]
        return math.fsum(map(operator.mul, sizes, fills)) / sum(sizes)

    def forecast(self) -> list[Generation]:
        """Return the generations that the filter will have at four times its capacity."""
        now = self.status.count
        return grown(self.live, self.policy, max(4 * self.status.capacity, now + now // 4))


class Point(NamedTuple):
    """A filter at one moment of its crawl."""

    requests: int  # recorded until then
    error_rate: float  # 0 to 1
    nbytes: int


def grown(live: Sequence[Generation], policy: Policy, until: int) -> list[Generation]:
    """Return the generations of a filter once `until` requests are recorded in it.

    The result has copies of the live generations, with their future counts, and the new ones.
    """
    live = [replace(generation) for generation in live]
    missing = until - sum(generation.count for generation in live)
    while missing > 0:
        newest = live[-1]
        room = min(max(policy.grow_at(live) - newest.count, 0), missing)
        newest.count += int(room)
        missing -= int(room)
        if missing > 0:
            live.append(
                Generation.of(
                    policy.next(live),
                    newest.number + 1,
                    newest.created_at,
                    open_until=newest.open_until,
                )
            )
    return live


def course(generations: Sequence[Generation]) -> list[Point]:
    """Return points of the curve along which a filter fills, one generation after the other.

    They go from 0 to all requests, and include the last request of each generation and the first
    request of the next one.
    """
    ends = list(accumulate(generation.count for generation in generations))
    total = ends[-1]
    # The rate rises by many powers of ten at first.
    at = {round(total * step / _POINTS) for step in range(_POINTS + 1)}
    at |= {round(total * 0.97**step) for step in range(_POINTS)}
    at |= {end + step for end in ends for step in (0, 1) if end + step <= total}
    return [after(generations, requests) for requests in sorted(at)]


def after(generations: Sequence[Generation], requests: int) -> Point:
    """Return the rate and the size of a filter when it had `requests` requests."""
    then: list[Generation] = []
    left = requests
    for generation in generations:
        if left <= 0 and then:
            break
        then.append(replace(generation, count=min(left, generation.count)))
        left -= generation.count
    return Point(
        requests,
        combined_rate(generation.error_rate_now for generation in then),
        sum(generation.geometry.nbytes for generation in then),
    )

"""The figures of a report: how full a filter is, how it filled up, and how it will go on."""

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

SCRAPY_SET_BYTES = 91  # for each request; measured, see docs/benchmarks.md
_POINTS = 240  # of a curve: one for each four pixels of a wide page


class Measured(NamedTuple):
    """A generation whose bits were counted."""

    figures: Generation  # as the crawl wrote them down
    contents: Contents  # as the bits tell

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

    `advance` is told how many blocks are done.
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
    """A filter as it is, and what is asked of it."""

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
        """The generations as the crawl wrote them down."""
        return [generation.figures for generation in self.generations]

    @cached_property
    def status(self) -> FilterStatus:
        """The figures that follow from what the crawl wrote down."""
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
        """Return the generations that there will be at four times the capacity; see `grown`."""
        now = self.status.count
        return grown(self.live, self.policy, max(4 * self.status.capacity, now + now // 4))


class Point(NamedTuple):
    """A filter at one moment of its crawl."""

    requests: int  # recorded until then
    error_rate: float  # 0 to 1
    nbytes: int


def grown(live: Sequence[Generation], policy: Policy, until: int) -> list[Generation]:
    """Return copies of generations, and those that will follow, when so many are recorded in all.

    They have the counts of then. None that is there loses any.
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
    """Return how a filter fills: one generation after the other, each up to its count.

    The points go from 0 requests to all of them, close enough for a curve, and with the one before
    and the one after each beginning of a generation.
    """
    ends = list(accumulate(generation.count for generation in generations))
    total = ends[-1]
    # The rate rises by many powers of ten at first.
    at = {round(total * step / _POINTS) for step in range(_POINTS + 1)}
    at |= {round(total * 0.97**step) for step in range(_POINTS)}
    at |= {end + step for end in ends for step in (0, 1) if end + step <= total}
    return [after(generations, requests) for requests in sorted(at)]


def after(generations: Sequence[Generation], requests: int) -> Point:
    """Return a point of a filter's course: that many requests are recorded; see `course`."""
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

"""The figures of a report: how full a filter is, how it filled up, and how it will go on."""

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from scrapy_bloom.filters.sizing import (
    BLOCK_BITS,
    Contents,
    Geometry,
    block_load,
    classic_fill_ratio,
)
from scrapy_bloom.generations.backend import FilterStatus, any_errs
from scrapy_bloom.generations.policy import Generation, Policy

SCRAPY_SET_BYTES = 91  # for each request; measured, see docs/benchmarks.md
_POINTS = 240  # of a curve: one for each four pixels of a wide page


class Measured(NamedTuple):
    """A generation whose bits were counted."""

    figures: Generation  # as the crawl wrote them down
    contents: Contents  # as the bits tell
    loads: Mapping[int, int]  # how many blocks hold so many fingerprints, by that estimate

    @property
    def fill_when_full(self) -> float:
        """The share of bits that is set at its capacity, 0 to 1."""
        geometry = self.figures.geometry
        return classic_fill_ratio(geometry.num_bits, geometry.num_hashes, self.figures.capacity)


def measure(
    figures: Generation,
    block_fills: Iterable[float],
    advance: Callable[[int], None],
    before: int = 0,
) -> Measured:
    """Count the bits of a generation, block by block: it may be larger than the memory.

    `advance` is told how many blocks are done, with those that were done before.
    """
    num_blocks, num_hashes = figures.geometry
    loads: Counter[int] = Counter()

    def fills() -> Iterator[float]:
        for done, fill in enumerate(block_fills, 1):
            yield fill
            loads[round(block_load(fill, num_hashes))] += 1
            if done % 100 == 0 or done == num_blocks:
                advance(before + done)

    return Measured(figures, Contents.of(fills(), num_hashes), loads)


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
    asked: float  # the error rate, as the filter has it; 0: not said

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
        return any_errs(generation.contents.error_rate for generation in self.generations)

    @property
    def fill_ratio(self) -> float:
        """The share of all bits that are set, 0 to 1, counted."""
        sizes = [generation.figures.geometry.num_bits for generation in self.generations]
        fills = [generation.contents.fill_ratio for generation in self.generations]
        return math.fsum(map(operator.mul, sizes, fills)) / sum(sizes)

    def forecast(self) -> list[Generation]:
        """Return the generations that there will be at four times the capacity; see `grown`."""
        count = self.status.count
        return grown(self.live, self.policy, max(4 * self.status.capacity, count + count // 4))


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
        any_errs(generation.error_rate_now for generation in then),
        sum(generation.geometry.nbytes for generation in then),
    )


class Spread:
    """The spread of fingerprints over blocks by a hash that prefers none.

    A load is binomial; and it is estimated from the bits of the block, which adds an error of its
    own, of variance (B / k^2) (e^t - t - 1) with t = k n / B for a load of n (K.-Y. Whang,
    B. T. Vander-Zanden, H. M. Taylor, "A linear-time probabilistic counting algorithm for database
    applications", ACM TODS 15(2), 1990, for k = 1).

    Args:
        count: fingerprints in all blocks, at least 1.
        geometry: blocks and hashes.

    Attributes:
        mean: load of a block.
        deviation: standard deviation of what is estimated.
    """

    def __init__(self, count: int, geometry: Geometry) -> None:
        num_blocks, num_hashes = geometry
        share = 1 / num_blocks
        self.mean = count * share
        filled = min(num_hashes * self.mean / BLOCK_BITS, 30.0)  # beyond, all bits are set anyway
        error = BLOCK_BITS / num_hashes**2 * (math.expm1(filled) - filled)
        variance = self.mean * (1 - share)
        self.deviation = math.sqrt(variance + error)
        self._num_blocks = num_blocks
        self._error = max(math.sqrt(error), 1e-3)
        reach = 8 * math.sqrt(variance) + 8
        lowest, highest = max(0, int(self.mean - reach)), min(count, int(self.mean + reach))
        self._chances = [
            (load, math.exp(_log_binomial(count, load, share)))
            for load in range(lowest, highest + 1)
        ]

    def below(self, load: float) -> float:
        """Return how many blocks are expected to seem to hold less."""
        scale = self._error * math.sqrt(2)
        return self._num_blocks * math.fsum(
            chance * (1 + math.erf((load - each) / scale)) / 2 for each, chance in self._chances
        )


def _log_binomial(count: int, load: int, share: float) -> float:
    if share == 1:
        return 0.0 if load == count else -math.inf
    ways = math.lgamma(count + 1) - math.lgamma(load + 1) - math.lgamma(count - load + 1)
    return ways + load * math.log(share) + (count - load) * math.log1p(-share)

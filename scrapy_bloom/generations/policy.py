"""The rules of growth and time windows: the sizes of generations, and when they expire.

A filter is a list of generations, each a Bloom filter with its own size and error rate. A
fingerprint is a duplicate if any live generation has it; a new fingerprint is recorded in the
newest generation.

The first generation gets half of the configured error rate, and each further generation half of the
rate that is left, so that the sum stays below the configured rate. A filter with a window has
several parts, each with an equal part of the rate, which the generations of the part divide.
docs/architecture.md has the reasons.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import takewhile
from typing import Any, TypeVar

from scrapy_bloom.filters import sizing
from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.filters.sizing import (
    MAX_CAPACITY,
    MAX_HASHES,
    SMALLEST_ERROR_RATE,
    Geometry,
    check_size,
    choose_geometry,
    classic_error_rate,
)
from scrapy_bloom.text import counted

_PARTS = 8  # of a window: each begins with a run, at least so much after the part before
MOST_PARTS = _PARTS + 1  # that are live at the same time
_EXPIRES_AFTER = 23 / 24  # of a window: a nightly run may begin a little earlier than the last one


@dataclass(kw_only=True)
class Generation:
    """The figures of one generation of a filter; times are in seconds since 1970.

    A generation that is added within a run has the begin of that run as both times.
    """

    number: int  # 1 for the first generation, 2 for the next, and so on
    geometry: Geometry
    capacity: int  # for how many fingerprints it is sized
    error_rate: float  # when it has so many fingerprints
    first_run: float  # when the first run began that recorded in it
    last_run: float  # when the last such run began
    count: int = 0  # how many fingerprints are recorded

    @classmethod
    def of(cls: type["_G"], size: "Size", number: int, run_at: float, **more: Any) -> "_G":
        """Return a new generation of a run that began at `run_at`; `more` are further fields."""
        more |= vars(size)
        more |= {"first_run": run_at, "last_run": run_at}
        return cls(number=number, geometry=size.geometry, **more)

    @property
    def figures(self) -> "Generation":
        """Return a copy of the current figures, without the fields of subclasses."""
        return Generation(**{each.name: getattr(self, each.name) for each in fields(Generation)})

    @property
    def offered(self) -> int:
        """Return how many new requests came: the recorded ones and the expected false positives."""
        return sizing.expected_offered(self.geometry.num_bits, self.geometry.num_hashes, self.count)

    @property
    def fill_ratio(self) -> float:
        """Return the share of set bits, 0 to 1, estimated from the count."""
        return sizing.classic_fill_ratio(
            self.geometry.num_bits, self.geometry.num_hashes, self.offered
        )

    @property
    def error_rate_now(self) -> float:
        """Return the current false-positive rate, 0 to 1."""
        return sizing.block_error_rate(*self.geometry, self.offered)

    @property
    def expected_false_positives(self) -> float:
        """Return the expected number of false positives while the generation filled."""
        return sizing.expected_false_positives(*self.geometry, self.offered)


_G = TypeVar("_G", bound=Generation)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Properties that all generations of a filter share: source of the fingerprints, and salt."""

    salt: bytes | None = None  # 16 bytes, mixed into every hash; None: random, once it is made
    fingerprinter: str = ""  # import path of what makes the fingerprints
    spider: str = ""  # the name of the spider, for information
    error_rate: float = 0.0  # as configured when the filter was created


ANY_ORIGIN = Origin()


@dataclass(frozen=True, kw_only=True)
class Size:
    """The capacity and the error rate of a new generation."""

    capacity: int
    error_rate: float

    @property
    def geometry(self) -> Geometry:
        """Return the smallest geometry that keeps the error rate."""
        return choose_geometry(self.capacity, self.error_rate)

    def filter(self, salt: bytes | None) -> BloomFilter:
        """Make a filter in memory."""
        return BloomFilter(self.capacity, self.error_rate, salt=salt)


def with_headroom(imported: int) -> int:
    """Return the capacity of a filter for an import, which is not full at the next request."""
    return imported + imported // 4


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Decides the sizes of generations, and when they expire."""

    expected: int  # how many requests the crawl is expected to record (BLOOM_EXPECTED_REQUESTS)
    error_rate: float  # the highest sum over all live generations (BLOOM_ERROR_RATE)
    window: float = 0.0  # seconds until requests expire; 0: never (BLOOM_WINDOW_SECS)
    is_endless: bool = False  # whether workers go on without runs, so that the time begins them

    def first(self, at_least: int = 0) -> Size:
        """Return the size of the first generation.

        Args:
            at_least: for how many requests it must have room.
        """
        return self._first_of_part(max(self.expected, at_least))

    def after_turn(self, expiring: Sequence[Generation]) -> Size:
        """Return the size of the first generation in the next part of the window.

        Args:
            expiring: generations that expire at this moment, so their pages are crawled again.
        """
        again = with_headroom(sum(each.count for each in expiring))
        return self._first_of_part(max(self.expected // _PARTS, again))

    def next(self, live: Sequence[Generation]) -> Size:
        """Return the size of the generation after the newest of `live`, which is full."""
        newest = live[-1]
        left = self.error_rate - sum(each.error_rate for each in live)
        # Nothing is left if a higher rate was configured before, or within a part of a window.
        used_up = self.window or left <= 0
        share = min(newest.error_rate, self.error_rate) / 2 if used_up else left / 2
        missing = 0 if self.window else self.expected - sum(each.capacity for each in live)
        return self._size(max(2 * newest.capacity, missing), share)

    def is_turn(self, newest: Generation, run_at: float) -> bool:
        """Return whether a run that begins at `run_at` needs a generation after the newest."""
        return 0 < self.window <= _PARTS * (run_at - newest.first_run)

    def expired(self, live: Sequence[_G], run_at: float) -> Sequence[_G]:
        """Return the oldest generations, which expire when a run begins at `run_at`."""
        if not self.window:
            return []
        latest = run_at - _EXPIRES_AFTER * self.window
        return list(takewhile(lambda each: each.last_run <= latest, live))

    def next_begin(self, newest: Generation) -> float:
        """Return when the time begins the next run; infinite if processes begin runs."""
        has_begins = self.is_endless and self.window
        return newest.last_run + (1 - _EXPIRES_AFTER) * self.window if has_begins else math.inf

    def _first_of_part(self, capacity: int) -> Size:
        return self._size(capacity, self.error_rate / (2 * (MOST_PARTS if self.window else 1)))

    def _size(self, capacity: int, error_rate: float) -> Size:
        return Size(
            capacity=min(max(capacity, 1), MAX_CAPACITY),
            error_rate=max(error_rate, SMALLEST_ERROR_RATE),
        )


@dataclass(frozen=True, kw_only=True)
class FilterStatus:
    """A filter's figures at one moment."""

    location: str  # where the filter is stored, for messages: a path, or "memory"
    generations: Sequence[Generation]  # live generations, oldest first, at least one
    error_rate: float  # the configured rate (p), or the sum over all generations if it is higher
    errors: int = 0  # failures of the storage so far
    failure: str = ""  # text of the last failure
    expired: int = 0  # requests that expired in this run
    more: Mapping[str, int] = field(default_factory=dict)  # further figures, by names of stats

    @classmethod
    def of(cls, location: str, live: Sequence[Generation], asked: float) -> "FilterStatus":
        """Return the figures of a filter.

        Args:
            location: where the filter is stored, for messages.
            live: its live generations, oldest first.
            asked: the configured error rate.
        """
        return cls(
            location=location,
            generations=[each.figures for each in live],
            error_rate=rate_asked(live, asked),
        )

    @property
    def capacity(self) -> int:
        """Return for how many requests all generations together are sized."""
        return sum(each.capacity for each in self.generations)

    @property
    def count(self) -> int:
        """Return how many requests are recorded and have not expired."""
        return sum(each.count for each in self.generations)

    @property
    def nbytes(self) -> int:
        """Return the size of all bits, in bytes."""
        return sum(each.geometry.nbytes for each in self.generations)

    @property
    def fill_ratio(self) -> float:
        """Return the share of set bits, 0 to 1, estimated from the counts."""
        set_bits = math.fsum(each.geometry.num_bits * each.fill_ratio for each in self.generations)
        return set_bits / sum(each.geometry.num_bits for each in self.generations)

    @property
    def error_rate_now(self) -> float:
        """Return the current false-positive rate, 0 to 1."""
        return combined_rate(each.error_rate_now for each in self.generations)

    @property
    def expected_false_positives(self) -> float:
        """Return the expected number of false positives while the live generations filled."""
        # While one generation filled, each older generation had its final false-positive rate.
        drops = before = 0.0
        for each in self.generations:
            drops += each.expected_false_positives + before * each.count
            before += each.error_rate_now
        return drops


def combined_rate(rates: Iterable[float]) -> float:
    """Return the probability that at least one of several filters has a false positive.

    It is 1 - (1 - p1) (1 - p2) ..., which is close to the sum of small rates.

    >>> combined_rate([0.5, 0.5]), combined_rate([1e-20, 1e-20])
    (0.75, 2e-20)
    """
    return abs(math.expm1(math.fsum(math.log1p(-min(rate, 1 - 1e-15)) for rate in rates)))


def kept_settings(policy: Policy, live: Sequence[Generation]) -> list[str]:
    """Describe the properties in which an existing filter differs from the settings.

    Args:
        policy: as the settings of the crawl ask for it.
        live: the live generations of the filter.
    """
    kept = []
    capacity = sum(each.capacity for each in live)
    if not policy.window and policy.first().capacity > capacity:
        kept.append(f"room for {counted(capacity, 'request')}")
    error_rate = sum(each.error_rate for each in live)
    if error_rate > policy.error_rate * (1 + 1e-9):  # a sum of floats may be a little larger
        kept.append(f"an error rate of {error_rate:.2g}")
    return kept


def rate_asked(live: Sequence[Generation], asked: float) -> float:
    """Return the error rate that a filter keeps, however far it grows.

    It is the rate that was configured when the filter was created, or a higher rate if
    BLOOM_ERROR_RATE was raised later.
    """
    # Rounded, because a sum of floats may be a little larger than the exact sum.
    return float(f"{max(asked, sum(each.error_rate for each in live)):.9g}")


_MOST_GENERATIONS = 2**32 - 1  # the largest number that fits in a file
_LAST_TIME = 253_402_300_799  # of the year 9999


def check_generation(generation: Generation, oldest: int = 1) -> None:
    """Raise ValueError if a generation with these figures cannot be ours.

    Args:
        generation: the stored figures.
        oldest: the number of the filter's oldest generation, if it is stored.
    """
    if not 1 <= oldest <= generation.number <= _MOST_GENERATIONS:
        raise ValueError(f"its number is {generation.number}, that of the oldest one {oldest}")
    check_size(generation.capacity, generation.error_rate)
    if not _fits(generation.geometry, generation.capacity, generation.error_rate):
        raise ValueError(
            f"its {generation.geometry} does not fit a capacity of {generation.capacity} and an "
            f"error_rate of {generation.error_rate}"
        )
    check_time("first_run", generation.first_run)
    check_time("last_run", generation.last_run)
    # Each recorded request sets at least one bit. A request may be counted again if it was lost and
    # recorded again, but not as often as this allows.
    most = 16 * max(generation.geometry.num_bits, generation.capacity)
    if not 0 <= generation.count <= most:
        raise ValueError(f"its count is {generation.count}; it has room for {generation.capacity}")


def _fits(geometry: Geometry, capacity: int, error_rate: float) -> bool:
    num_blocks, num_hashes = geometry
    if num_blocks < 1 or not 1 <= num_hashes <= MAX_HASHES:
        return False
    # 1 % is allowed for rounding. A filter may be larger, because its blocks fill unevenly.
    if classic_error_rate(geometry.num_bits, num_hashes, capacity) > 1.01 * error_rate:
        return False
    half = classic_error_rate(geometry.num_bits // 2, num_hashes, capacity)
    return num_blocks <= 2 or half >= error_rate


def check_asked(error_rate: float) -> None:
    """Raise ValueError if a value is not a configured error rate, or 0."""
    if not 0 <= error_rate < 1:
        raise ValueError(f"the configured error_rate is {error_rate}")


def check_time(name: str, value: float) -> None:
    """Raise ValueError if a value is not a time in seconds since 1970."""
    if not 0 <= value <= _LAST_TIME:
        raise ValueError(f"{name} is {value}, which is not a time")

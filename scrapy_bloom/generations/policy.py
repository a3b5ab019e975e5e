"""Growth and time windows: which filter takes the next fingerprint, and which ones expire.

A filter is a list of generations, each a Bloom filter of its own size and error rate. Seen is what
any live one holds; what is new goes to the newest.

Growth: a full generation is followed by one of twice the capacity. The sizes double, so there are
few of them; each takes half of the error rate that is left, the first one half of all, so the sum
over all of them stays below what was asked, however far the crawl goes (P. S. Almeida, C. Baquero,
N. Preguiça, D. Hutchison, "Scalable Bloom Filters", 2007).

Windows: each generation is open for a quarter of the window and counts for one more window after
its end. So what was recorded less than a window ago is always found, and what was recorded more
than 1.25 windows ago never is. At most six quarters are live at a time, and each has a twelfth of
the error rate, and as much again if it grows.

Runs: what a run records shall not expire within it, or a run that is longer than the window would
crawl its pages in a loop. So with a window, a run also remembers in memory what it has scheduled
(`scrapy_bloom.crawl.this_run`). Where many workers share a queue, the run is the life of that:
until the crawl ends, its first generation stays open, and grows, and neither it nor a later one
expires.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise, takewhile
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

ROTATIONS = 4  # in one window
LIVE_QUARTERS = ROTATIONS + 2  # the open one, and those that ended within a window before


@dataclass(kw_only=True)
class Generation:
    """The figures of a filter among others; times are in seconds since 1970."""

    number: int  # 1 for the first, and counting on
    geometry: Geometry
    capacity: int  # fingerprints it is sized for
    error_rate: float  # at that number
    created_at: float
    open_until: float = 0.0  # nothing is recorded in it after this time; 0: no end
    count: int = 0  # fingerprints recorded in it

    @classmethod
    def of(cls: type["_G"], size: "Size", number: int, created_at: float, **more: Any) -> "_G":
        """Return a new generation, sized like that; `more` are its other fields."""
        more |= vars(size)
        return cls(number=number, geometry=size.geometry, created_at=created_at, **more)

    @property
    def figures(self) -> "Generation":
        """A copy of the figures, which stays as it is now, and holds nothing else."""
        return Generation(**{field.name: getattr(self, field.name) for field in fields(Generation)})

    @property
    def offered(self) -> int:
        """Requests that came: those recorded, and the expected false positives."""
        return sizing.expected_offered(self.geometry.num_bits, self.geometry.num_hashes, self.count)

    @property
    def fill_ratio(self) -> float:
        """Share of its bits that are set, 0 to 1; expected, without reading them."""
        return sizing.classic_fill_ratio(
            self.geometry.num_bits, self.geometry.num_hashes, self.offered
        )

    @property
    def error_rate_now(self) -> float:
        """Its false-positive rate with what is recorded now, 0 to 1."""
        return sizing.block_error_rate(*self.geometry, self.offered)

    @property
    def expected_false_positives(self) -> float:
        """Expected false positives while it filled."""
        return sizing.expected_false_positives(*self.geometry, self.offered)


_G = TypeVar("_G", bound=Generation)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Source of a filter's fingerprints, and its salt: the same for all of its generations."""

    salt: bytes | None = None  # 16 bytes, mixed into every hash; None: random ones for a new filter
    fingerprinter: str = ""  # import path of what makes the fingerprints
    spider: str = ""  # its name, for information
    error_rate: float = 0.0  # as asked for when the filter was made


ANY_ORIGIN = Origin()


@dataclass(frozen=True, kw_only=True)
class Size:
    """Holds what a new generation is sized for."""

    capacity: int
    error_rate: float

    @property
    def geometry(self) -> Geometry:
        """Return the smallest geometry that keeps the error rate."""
        return choose_geometry(self.capacity, self.error_rate)

    def filter(self, salt: bytes | None) -> BloomFilter:
        """Make a filter in memory."""
        return BloomFilter(self.capacity, self.error_rate, salt=salt)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Decides how generations are sized, and when they end."""

    expected: int  # requests that the crawl is expected to record (BLOOM_EXPECTED_REQUESTS)
    error_rate: float  # the highest sum over all live generations (BLOOM_ERROR_RATE)
    on_full: str = "grow"  # or "warn", or "close" (BLOOM_ON_FULL)
    window: float = 0.0  # seconds a request is remembered for; 0: for ever (BLOOM_WINDOW_SECS)

    def first(self, at_least: int = 0) -> Size:
        """Return the size of the first generation, or of the first in its quarter of a window.

        Args:
            at_least: requests that it must have room for.
        """
        if not self.window:
            # "close" keeps the other half for when the setting has been raised.
            share = self.error_rate if self.on_full == "warn" else self.error_rate / 2
            return self._size(max(self.expected, at_least), share)
        capacity = self.expected // ROTATIONS if self.on_full == "grow" else self.expected
        return self._size(max(capacity, at_least), self.error_rate / (2 * LIVE_QUARTERS))

    def next(self, live: Sequence[Generation]) -> Size:
        """Return the size of the generation that follows a full one, the last of the live."""
        newest = live[-1]
        left = self.error_rate - sum(each.error_rate for each in live)
        # Nothing is left if less was asked for before, or within a quarter of a window.
        used_up = self.window or left <= 0
        share = min(newest.error_rate, self.error_rate) / 2 if used_up else left / 2
        return self._size(max(2 * newest.capacity, self._missing(live)), share)

    def is_exceeded(self, error_rate: float) -> bool:
        """Return whether generations made for that error rate err more often than asked for."""
        # Six sixths of a float add up to a little more than it.
        return error_rate > self.error_rate * (1 + 1e-9)

    def grow_at(self, live: Sequence[Generation]) -> float:
        """Return the count at which another generation must follow; infinite if none may."""
        # It may, too, if more requests are expected now than when the generations were made.
        may_grow = self.on_full == "grow" or self._missing(live) > 0
        return live[-1].capacity if may_grow else float("inf")

    def _missing(self, live: Sequence[Generation]) -> int:
        """Count the expected requests for which there is no room yet."""
        if not self.window:
            return self.expected - sum(each.capacity for each in live)
        # Within a window, only quarters that may not grow are sized for all of them.
        return 0 if self.on_full == "grow" else self.expected - live[-1].capacity

    def open_until(self, created_at: float) -> float:
        """Return when a generation made at that time ends; 0: no end."""
        return created_at + self.window / ROTATIONS if self.window else 0.0

    def expired(self, live: Sequence[Generation], now: float) -> int:
        """Count the oldest generations that have ended more than a window ago.

        The newest one is never among them: something must take the next request.
        """
        if not self.window:
            return 0
        ends = (_end(each, following) for each, following in pairwise(live))
        return len(list(takewhile(lambda end: end + self.window < now, ends)))

    def next_expiry(self, live: Sequence[Generation]) -> float:
        """Return when the oldest generation expires; infinite if none does."""
        if self.window and len(live) > 1:
            return _end(live[0], live[1]) + self.window
        return float("inf")

    def _size(self, capacity: int, error_rate: float) -> Size:
        return Size(
            capacity=min(max(capacity, 1), MAX_CAPACITY),
            error_rate=max(error_rate, SMALLEST_ERROR_RATE),
        )


def window_of(live: Sequence[Generation]) -> float:
    """Return the time window that a filter's generations were made with, in seconds; 0: none."""
    if not live[-1].open_until:
        return 0.0
    # The longest: what was made by growth within a quarter is open for the rest of it only.
    return round(ROTATIONS * max(each.open_until - each.created_at for each in live), 2)


def rate_asked(live: Sequence[Generation], asked: float) -> float:
    """Return the error rate that a filter's generations keep, however far it grows.

    That is the rate which was asked for when the filter was made, or more if the setting has been
    raised since then.
    """
    # The sum of halves, without what floats add to it.
    return float(f"{max(asked, sum(each.error_rate for each in live)):.9g}")


def unexpired(live: Sequence[_G], now: float, window: float = 0.0) -> list[_G]:
    """Return the generations that have not expired, though no crawl has removed the others yet.

    A window of 0 is the one that they were made with.
    """
    newest = live[-1]
    if not newest.open_until:
        return list(live)
    window = window or window_of(live)
    ends = [_end(each, following) for each, following in pairwise(live)] + [newest.open_until]
    return [each for each, end in zip(live, ends, strict=True) if now <= end + window]


def _end(each: Generation, following: Generation) -> float:
    """Return the time after which nothing was recorded in a generation."""
    if each.open_until:
        return min(each.open_until, following.created_at)
    return following.created_at


_MOST_GENERATIONS = 2**32 - 1  # what a file has room for
_LAST_TIME = 253_402_300_799  # of the year 9999


def check_generation(generation: Generation, oldest: int = 1) -> None:
    """Check that a filter of ours may have a generation with these figures, or raise ValueError.

    Args:
        generation: as it was stored.
        oldest: the number of the filter's oldest generation that it names, if it does.
    """
    if not 1 <= oldest <= generation.number <= _MOST_GENERATIONS:
        raise ValueError(f"its number is {generation.number}, that of the oldest one {oldest}")
    _check_geometry(generation)
    check_time("created_at", generation.created_at)
    check_time("open_until", generation.open_until)
    # Who records a request sets a bit. What was lost and recorded again may have been counted
    # again, but not that often.
    most = 16 * max(generation.geometry.num_bits, generation.capacity)
    if not 0 <= generation.count <= most:
        raise ValueError(f"its count is {generation.count}; it has room for {generation.capacity}")


def _check_geometry(generation: Generation) -> None:
    """Check that a filter of that shape keeps its error rate, and is not far too large for it."""
    capacity, error_rate = generation.capacity, generation.error_rate
    check_size(capacity, error_rate)
    num_blocks, num_hashes = generation.geometry
    num_bits = generation.geometry.num_bits
    shape = f"num_blocks is {num_blocks} and num_hashes {num_hashes}"
    if num_blocks < 1 or not 1 <= num_hashes <= MAX_HASHES:
        raise ValueError(f"{shape}; allowed are 1 to {MAX_HASHES} hashes, and at least one block")
    # A hundredth more, for other roundings; that blocks are filled unevenly makes a filter larger.
    rate = classic_error_rate(num_bits, num_hashes, capacity)
    half = classic_error_rate(num_bits // 2, num_hashes, capacity)
    if rate > 1.01 * error_rate or (num_blocks > 2 and half < error_rate):
        raise ValueError(
            f"{shape}, which does not fit a capacity of {capacity} and an error_rate of "
            f"{error_rate}"
        )


def check_asked(error_rate: float) -> None:
    """Check that a value is an error rate that was asked for, or 0, or raise ValueError."""
    if not 0 <= error_rate < 1:
        raise ValueError(f"the error_rate that was asked for is {error_rate}")


def check_time(name: str, value: float) -> None:
    """Check that a value is a time, in seconds since 1970, or raise ValueError."""
    if not 0 <= value <= _LAST_TIME:
        raise ValueError(f"{name} is {value}, which is no time")

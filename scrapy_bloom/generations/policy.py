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
import operator
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from scrapy_bloom.filters import sizing
from scrapy_bloom.filters.hashing import SALT_BYTES, checked_salt
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


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Properties that all generations of a filter share: source of the fingerprints, and salt."""

    salt: bytes = field(default_factory=lambda: secrets.token_bytes(SALT_BYTES))  # of all hashes
    fingerprinter: str = ""  # import path of what makes the fingerprints
    spider: str = ""  # the name of the spider, for information
    error_rate: float = 0.0  # as configured when the filter was created

    def __post_init__(self) -> None:
        checked_salt(self.salt)
        if not 0 <= self.error_rate < 1:
            raise ValueError(f"the configured error_rate is {self.error_rate}")


def with_headroom(imported: int) -> int:
    """Return the capacity of a filter for an import, which is not full at the next request."""
    return imported + imported // 4


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Decides the sizes of generations, and when they expire; runs begin at `run_at`."""

    expected: int  # how many requests the crawl is expected to record (BLOOM_EXPECTED_REQUESTS)
    error_rate: float  # the highest sum over all live generations (BLOOM_ERROR_RATE)
    window: float = 0.0  # seconds until requests expire; 0: never (BLOOM_WINDOW_SECS)
    is_endless: bool = False  # whether workers go on without runs, so that the time begins them

    def first(self, run_at: float = 0.0, at_least: int = 0) -> Generation:
        """Return the first generation, with room for at least so many requests."""
        return self._first_of_part(1, max(self.expected, at_least), run_at)

    def after_turn(
        self, newest: Generation, expiring: Sequence[Generation], run_at: float
    ) -> Generation:
        """Return the first generation in the next part of the window.

        Others expire at this moment, so their pages are crawled again.
        """
        again = with_headroom(sum(generation.count for generation in expiring))
        room = max(self.expected // _PARTS, again)
        return self._first_of_part(newest.number + 1, room, run_at)

    def next(self, live: Sequence[Generation]) -> Generation:
        """Return the generation after the newest of `live`, which is full, in the same run."""
        newest = live[-1]
        left = self.error_rate - sum(generation.error_rate for generation in live)
        # Nothing is left if a higher rate was configured before, or within a part of a window.
        used_up = self.window or left <= 0
        share = min(newest.error_rate, self.error_rate) / 2 if used_up else left / 2
        missing = 0 if self.window else self.expected - sum(map(_capacity, live))
        room = max(2 * newest.capacity, missing)
        return _sized(newest.number + 1, room, share, newest.last_run)

    def is_turn(self, newest: Generation, run_at: float) -> bool:
        """Return whether a run that begins at `run_at` needs a generation after the newest."""
        return 0 < self.window <= _PARTS * (run_at - newest.first_run)

    def expired(self, live: Sequence[Generation], run_at: float) -> Sequence[Generation]:
        """Return the oldest generations, which expire when a run begins at `run_at`."""
        if not self.window:
            return []
        latest = run_at - _EXPIRES_AFTER * self.window
        return list(takewhile(lambda generation: generation.last_run <= latest, live))

    def next_begin(self, newest: Generation) -> float:
        """Return when the time begins the next run; infinite if processes begin runs."""
        has_begins = self.is_endless and self.window
        return newest.last_run + (1 - _EXPIRES_AFTER) * self.window if has_begins else math.inf

    def _first_of_part(self, number: int, room: int, run_at: float) -> Generation:
        share = self.error_rate / (2 * (MOST_PARTS if self.window else 1))
        return _sized(number, room, share, run_at)


def _capacity(generation: Generation) -> int:
    return generation.capacity


def _sized(number: int, room: int, share: float, run_at: float) -> Generation:
    capacity, error_rate = min(max(room, 1), MAX_CAPACITY), max(share, SMALLEST_ERROR_RATE)
    return Generation(
        number=number,
        geometry=choose_geometry(capacity, error_rate),
        capacity=capacity,
        error_rate=error_rate,
        first_run=run_at,
        last_run=run_at,
    )


@dataclass(frozen=True, kw_only=True)
class FilterStatus:
    """A filter's figures at one moment."""

    location: str  # where the filter is stored, for messages: a path, or "memory"
    generations: Sequence[Generation]  # live generations, oldest first, at least one
    configured_rate: float  # BLOOM_ERROR_RATE
    errors: int = 0  # failures of the storage so far
    failure: str = ""  # text of the last failure
    expired: int = 0  # requests that expired in this run
    more: Mapping[str, int] = field(default_factory=dict)  # further figures, by names of stats

    @property
    def error_rate(self) -> float:
        """Return the rate that the filter keeps, however far it grows.

        It is the configured rate, or a higher one that was configured earlier.
        """
        # Rounded, because a sum of floats may be a little larger than the exact sum.
        total = sum(generation.error_rate for generation in self.generations)
        return float(f"{max(self.configured_rate, total):.9g}")

    @property
    def capacity(self) -> int:
        """Return for how many requests all generations together are sized."""
        return sum(map(_capacity, self.generations))

    @property
    def count(self) -> int:
        """Return how many requests are recorded and have not expired."""
        return sum(generation.count for generation in self.generations)

    @property
    def nbytes(self) -> int:
        """Return the size of all bits, in bytes."""
        return sum(generation.geometry.nbytes for generation in self.generations)

    @property
    def fill_ratio(self) -> float:
        """Return the share of set bits, 0 to 1, estimated from the counts."""
        sizes = [generation.geometry.num_bits for generation in self.generations]
        fills = [generation.fill_ratio for generation in self.generations]
        return math.fsum(map(operator.mul, sizes, fills)) / sum(sizes)

    @property
    def error_rate_now(self) -> float:
        """Return the current false-positive rate, 0 to 1."""
        return combined_rate(generation.error_rate_now for generation in self.generations)

    @property
    def expected_false_positives(self) -> float:
        """Return the expected number of false positives while the live generations filled."""
        # While one generation filled, each older generation had its final false-positive rate.
        drops = before = 0.0
        for generation in self.generations:
            drops += generation.expected_false_positives + before * generation.count
            before += generation.error_rate_now
        return drops


def combined_rate(rates: Iterable[float]) -> float:
    """Return the probability that at least one of several filters has a false positive.

    It is 1 - (1 - p1) (1 - p2) ..., which is close to the sum of small rates.

    >>> combined_rate([0.5, 0.5]), combined_rate([1e-20, 1e-20])
    (0.75, 2e-20)
    """
    return abs(math.expm1(math.fsum(math.log1p(-min(rate, 1 - 1e-15)) for rate in rates)))


def kept_settings(policy: Policy, live: Sequence[Generation]) -> list[str]:
    """Describe the properties in which an existing filter differs from the settings."""
    kept = []
    capacity = sum(map(_capacity, live))
    if not policy.window and policy.first().capacity > capacity:
        kept.append(f"room for {counted(capacity, 'request')}")
    error_rate = sum(generation.error_rate for generation in live)
    if error_rate > policy.error_rate * (1 + 1e-9):  # a sum of floats may be a little larger
        kept.append(f"an error rate of {error_rate:.2g}")
    return kept


_MOST_GENERATIONS = 2**32 - 1  # the largest number that fits in a file
_LAST_TIME = 253_402_300_799  # of the year 9999


def check_generation(generation: Generation) -> None:
    """Raise ValueError if a generation with these stored figures cannot be ours."""
    if not 1 <= generation.number <= _MOST_GENERATIONS:
        raise ValueError(f"its number is {generation.number}")
    check_size(generation.capacity, generation.error_rate)
    if not _fits(generation.geometry, generation.capacity, generation.error_rate):
        raise ValueError(
            f"its {generation.geometry} does not fit a capacity of {generation.capacity} and an "
            f"error_rate of {generation.error_rate}"
        )
    for name in ("first_run", "last_run"):
        if not 0 <= (time := getattr(generation, name)) <= _LAST_TIME:
            raise ValueError(f"{name} is {time}, which is not a time")
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

"""The rules of growth and time windows: sizes of generations, when one is added, when they expire.

A filter is a list of generations, each a Bloom filter with its own size and error rate. A
fingerprint is a duplicate if any live generation has it; a new fingerprint is recorded in the
newest generation. The rules are the same for all storages; docs/architecture.md has the reasons.
"""

import logging
import math
import operator
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.filters import sizing
from scrapy_bloom.filters.hashing import SALT_BYTES, checked_salt
from scrapy_bloom.filters.sizing import Geometry
from scrapy_bloom.text import counted

logger = logging.getLogger(__name__)

_PARTS = 8  # of a window: each begins with a run, at least so much after the part before
MOST_PARTS = _PARTS + 1  # that are live at the same time
_EXPIRES_AFTER = 23 / 24  # of a window: a nightly run may begin a little earlier than the last one


@dataclass(kw_only=True)
class Generation:
    """The figures of one generation of a filter; times are in seconds since 1970."""

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
        """Return the first generation of a part, when others expire and are crawled again."""
        again = with_headroom(sum(generation.count for generation in expiring))
        room = max(self.expected // _PARTS, again)
        return self._first_of_part(newest.number + 1, room, run_at)

    def next(self, live: Sequence[Generation]) -> Generation:
        """Return the generation after the newest of `live`, which is full, in the same run."""
        newest = live[-1]
        rest = self.error_rate - sum(generation.error_rate for generation in live)
        if self.window or rest <= 0:  # within a part, or if a higher rate was configured before
            rest = min(newest.error_rate, self.error_rate)
        missing = 0 if self.window else self.expected - _total_capacity(live)
        room = max(2 * newest.capacity, missing)
        return _sized(newest.number + 1, room, rest / 2, newest.last_run)

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


def _total_capacity(generations: Iterable[Generation]) -> int:
    return sum(generation.capacity for generation in generations)


def _sized(number: int, room: int, share: float, run_at: float) -> Generation:
    capacity = min(max(room, 1), sizing.MAX_CAPACITY)
    error_rate = max(share, sizing.SMALLEST_ERROR_RATE)
    return Generation(
        number=number,
        geometry=sizing.choose_geometry(capacity, error_rate),
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
        """Return the configured rate, or a higher one that was configured earlier."""
        # Rounded, because a sum of floats may be a little larger than the exact sum.
        total = sum(generation.error_rate for generation in self.generations)
        return float(f"{max(self.configured_rate, total):.9g}")

    @property
    def capacity(self) -> int:
        """Return for how many requests all generations together are sized."""
        return _total_capacity(self.generations)

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
    differences = []
    capacity = _total_capacity(live)
    if not policy.window and policy.first().capacity > capacity:
        differences.append(f"room for {counted(capacity, 'request')}")
    error_rate = sum(generation.error_rate for generation in live)
    if error_rate > policy.error_rate * (1 + 1e-9):  # a sum of floats may be a little larger
        differences.append(f"an error rate of {error_rate:.2g}")
    return differences


_MOST_GENERATIONS = 2**32 - 1  # the largest number that fits in a file
_LAST_TIME = 253_402_300_799  # of the year 9999


def check_generation(generation: Generation) -> None:
    """Raise ValueError if a generation with these stored figures cannot be ours."""
    if not 1 <= generation.number <= _MOST_GENERATIONS:
        raise ValueError(f"its number is {generation.number}")
    sizing.check_size(generation.capacity, generation.error_rate)
    if not _fits(generation.geometry, generation.capacity, generation.error_rate):
        raise ValueError(
            f"its {generation.geometry} does not fit a capacity of {generation.capacity} and an "
            f"error_rate of {generation.error_rate}"
        )
    for name in ("first_run", "last_run"):
        if not 0 <= (time := getattr(generation, name)) <= _LAST_TIME:
            raise ValueError(f"{name} is {time}, which is not a time")
    # Each recorded request sets at least one bit, and few are lost and counted again.
    most = 16 * max(generation.geometry.num_bits, generation.capacity)
    if not 0 <= generation.count <= most:
        raise ValueError(f"its count is {generation.count}; it has room for {generation.capacity}")


def _fits(geometry: Geometry, capacity: int, error_rate: float) -> bool:
    num_blocks, num_hashes = geometry
    if num_blocks < 1 or not 1 <= num_hashes <= sizing.MAX_HASHES:
        return False
    # 1 % is allowed for rounding. A filter may be larger, because its blocks fill unevenly.
    if sizing.classic_error_rate(geometry.num_bits, num_hashes, capacity) > 1.01 * error_rate:
        return False
    half = sizing.classic_error_rate(geometry.num_bits // 2, num_hashes, capacity)
    return num_blocks <= 2 or half >= error_rate


class NoRoomError(StorageError):
    """The storage has no room for another generation."""


class LifeCycle(ABC):
    """A storage of generations, which adds and removes them when that is due.

    The storage calls `plan` after each change of `live`.
    """

    live: Sequence[Generation]  # the generations that have not expired, oldest first
    location: str  # where they are, for messages
    grow_at: float  # the count of the newest generation at which `grow` must be called
    due_at: float  # the time at which `turn` must be called with it; usually infinite

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._expired = 0  # how many requests have expired
        self._times_no_room = 0
        self._failure = ""  # why there was no room, the last time
        self._has_room = True

    @abstractmethod
    def update(self, run_at: float, new: Generation | None = None, expired: int = 0) -> bool:
        """Have a new generation, or the newest, record for a run; remove the oldest; in one step.

        Returns False, without a change, if another crawl has changed them. Raises NoRoomError.
        """

    def plan(self) -> None:
        """Plan when the next changes are due, after a change of the generations."""
        newest = self.live[-1]
        self.grow_at, self.due_at = newest.capacity, self._policy.next_begin(newest)

    def is_full(self) -> bool:
        """Return whether a new request needs another generation."""
        return self.live[-1].count >= self.grow_at

    def grow(self) -> None:
        """Add the next generation, unless there is no room, or another crawl has added it."""
        full = self.live[-1]
        try:
            if self.update(full.last_run, self._policy.next(self.live)):
                self._log_growth()
        except NoRoomError as error:
            self.grow_at = full.count + max(1, full.capacity // 20)
            self._log_no_room(
                "The crawl continues with the full filter, whose false-positive rate rises, and "
                "tries again after some more requests",
                error,
            )

    def turn(self, run_at: float) -> bool:
        """Do what is due when a run begins; if another crawl was faster, return False: call again.

        If another run began later, for example because the clock was set back, nothing is due.
        """
        policy = self._policy
        *older, newest = self.live
        if run_at <= newest.last_run:
            return True
        new, expired = None, policy.expired(older, run_at)
        if policy.is_turn(newest, run_at):
            expired = policy.expired(self.live, run_at)
            new = policy.after_turn(newest, expired, run_at)
        try:
            is_done = self.update(run_at, new, len(expired))
            self._has_room = self._has_room or new is not None
        except NoRoomError as error:
            self._log_no_room("Requests stay recorded for longer than BLOOM_WINDOW_SECS", error)
            expired = policy.expired(older, run_at)
            is_done = self.update(run_at, None, len(expired))
        if is_done:
            self._log_expiry(sum(generation.count for generation in expired))
        return is_done

    def log_kept_settings(self) -> None:
        """Log in which properties the filter differs from the settings."""
        if kept := kept_settings(self._policy, self.live):
            logger.info(
                "%s was created with other settings and keeps them: %s. The settings of this crawl "
                "apply to new generations only",
                self.location,
                ", ".join(kept),
            )

    def _log_no_room(self, consequence: str, error: NoRoomError) -> None:
        self._times_no_room += 1
        self._failure = f"the filter is full, and there is no room for another generation: {error}"
        if self._has_room:  # logged once, until there is room again
            self._has_room = False
            logger.error("No room for a new generation: %s. %s", error, consequence)

    def _log_growth(self) -> None:
        self._has_room = True
        live = self.live
        newest = live[-1]
        logger.info(
            "The filter is full with %s and grows: generation %d has room for %s more at a "
            "false-positive rate of %.2g, in %s bytes",
            counted(sum(generation.count for generation in live), "request"),
            newest.number,
            f"{newest.capacity:,}",
            newest.error_rate,
            f"{newest.geometry.nbytes:,}",
        )

    def _log_expiry(self, count: int) -> None:
        self._expired += count
        if count:
            logger.info(
                "%s expired after BLOOM_WINDOW_SECS (%s): they are crawled again if the crawl "
                "finds a link to them",
                counted(count, "request has", "requests have"),
                f"{self._policy.window:,.0f} s",
            )

    def status(self) -> FilterStatus:
        """Return the current figures of the filter, or of the one that is created next."""
        live = self.live or [self._policy.first()]
        return FilterStatus(
            location=self.location,
            generations=[replace(generation) for generation in live],
            configured_rate=self._policy.error_rate,
            errors=self._times_no_room,
            failure=self._failure,
            expired=self._expired,
        )

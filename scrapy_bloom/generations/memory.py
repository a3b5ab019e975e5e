"""The interface of backends, and the backend in memory, from which `LocalBackend` inherits."""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.filters.hashing import make_hasher
from scrapy_bloom.generations.lifecycle import LifeCycle, NoRoomError
from scrapy_bloom.generations.policy import (
    ANY_ORIGIN,
    FilterStatus,
    Generation,
    Origin,
    Policy,
    Size,
)

logger = logging.getLogger(__name__)

# Many times more than the navigation links of a large site, in at most 0.4 MB.
_MOST_RECENT = 2048


class Recent(set[bytes]):
    """A cache of recent duplicates; it must be cleared when the generations change.

    A link that is on every page is found here, without reading its bits.

    Args:
        most: the largest size. A full cache is cleared, because frequent links soon return.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def add(self, fingerprint: bytes) -> None:
        """Add a duplicate."""
        if len(self) >= self._most:
            self.clear()
        super().add(fingerprint)


class Lookup:
    """Looks up fingerprints in all live generations, oldest first, with one hash computation.

    That is possible because the generations have the same salt, and a generation with fewer hashes
    uses the first of them.
    """

    def __init__(self, live: Sequence[BloomFilter]) -> None:
        self.newest = live[-1]
        # The newest of the others comes first: it is the largest, and has most of the duplicates.
        self._others = list(reversed(live[:-1]))
        self._num_hashes = self.newest.num_hashes
        most = max(each.num_hashes for each in live)
        self._exact = most == self._num_hashes
        self._locate = make_hasher(self.newest.salt, most)

    def add(self, fingerprint: bytes) -> bool:
        """Record a fingerprint in the newest generation; return whether it was new to all."""
        block_hash, positions = self._locate(fingerprint)
        for each in self._others:
            if each.has_hashed(block_hash, positions):
                return False
        if not self._exact:
            positions = positions[: self._num_hashes]
        return self.newest.add_hashed(block_hash, positions)

    def __contains__(self, fingerprint: bytes) -> bool:
        block_hash, positions = self._locate(fingerprint)
        if self.newest.has_hashed(block_hash, positions):
            return True
        # Usually there are no others, and a generator would take longer than this check.
        return bool(self._others) and any(
            each.has_hashed(block_hash, positions) for each in self._others
        )


class Recorded(Protocol):
    """A collection of recorded fingerprints."""

    def add(self, fingerprint: bytes) -> bool:
        """Record a fingerprint; return whether it was new."""

    def __contains__(self, fingerprint: bytes) -> bool: ...


class LocalGeneration(Generation):
    """A generation whose bits are in this process."""

    filter: BloomFilter
    unapplied = 0  # how many requests of its count are only in the log, and not in its bits yet
    is_closed = False  # whether its bits were released


class Backend(Protocol):
    """Keeps a filter of fingerprints for a crawl.

    The methods are called in this order: `open`, `begin`, `add` any number of times, `close`.

    Attributes:
        sample: a text that is stored with the filter, some time after it was set; from `open` on.
    """

    sample: str

    def open(self) -> None:
        """Open the filter, or create it if there is none; raises BloomError."""

    def begin(self) -> None:
        """Begin the crawl: from now on until `close`, an end counts as unclean."""

    def add(self, fingerprint: bytes) -> bool:
        """Record a fingerprint; return whether it was new."""

    def __contains__(self, fingerprint: bytes) -> bool:
        """Return whether a fingerprint is recorded, with false positives."""

    def is_duplicate(self, fingerprint: bytes) -> bool:
        """Return whether `add` would certainly return False, without asking a server or a disk."""

    def status(self) -> FilterStatus:
        """Return the filter's current figures; after `close`, the last figures."""

    def close(self) -> None:
        """Write all changes to the disk, and end; raises BloomError."""


class MemoryBackend:
    """A Bloom filter in memory: a `Backend`, and the `Generations` of its own life cycle.

    Args:
        policy: the size of the filter, and when it grows and expires.
        origin: the fingerprinter, the spider and the salt.

    Attributes:
        live: its generations, oldest first; at least one after `open`.
        kept_from: the number of the first generation that must not end, because this run recorded
            in it. From `begin` on, it is the number of the newest generation at that time, or a
            lower number that the caller has set before, if this process continues a run.
    """

    errors = 0  # how many disk errors there were
    failure = ""  # the text of the last error
    sample = ""

    def __init__(self, policy: Policy, origin: Origin = ANY_ORIGIN) -> None:
        self.live: list[LocalGeneration] = []
        self._policy = policy
        self._origin = replace(origin, error_rate=policy.error_rate)
        self._clock = time.time
        self._life = LifeCycle(policy, self)
        self._has_begun = False
        self.kept_from: float = math.inf
        self._next_save: float = math.inf  # at this count of the newest, save the figures
        self._last_status: FilterStatus | None = None
        self._recent = Recent(_MOST_RECENT)
        self._newest: LocalGeneration
        self._recorded: Recorded

    def open(self) -> None:
        """Make the first generation; raises a StorageError if there is no memory for it."""
        self._make_first()
        self._use_live()

    def begin(self) -> None:
        """Begin the crawl; `add` calls this, too. What it records does not expire in this run."""
        if self._has_begun:
            return
        self._has_begun = True
        self._mark_as_used()
        if self._policy.window:
            self._warn_if_the_clock_went_back()
            # If the window was shortened, the current quarter ends earlier, too.
            self.extend(min(self._newest.open_until, self._policy.open_until(self.now())))
            self._life.turn()
        elif self._newest.open_until:
            self.extend(0.0)  # the window was removed from the settings
        # Last, because a new run does not continue a quarter that has ended.
        self.kept_from = min(self.kept_from, self._newest.number)

    def add(self, fingerprint: bytes) -> bool:
        """Record a fingerprint; return whether it was new."""
        life = self._life
        if not self._has_begun:
            self.begin()
        if life.has_window and self._clock() >= life.due_at:
            life.turn()
        if fingerprint in self._recent:
            return False
        if self._newest.count >= life.grow_at:
            if fingerprint in self._recorded:
                return False
            life.grow()
        if not self._recorded.add(fingerprint):
            self._recent.add(fingerprint)
            return False
        newest = self._newest
        newest.count += 1
        if newest.count >= self._next_save:
            self._save()
        return True

    def add_many(self, fingerprints: Sequence[bytes]) -> int:
        """Record fingerprints; return how many were new."""
        return sum(map(self.add, fingerprints))

    def __contains__(self, fingerprint: bytes) -> bool:
        life = self._life
        if life.has_window and self._has_begun and self._clock() >= life.due_at:
            life.turn()
        return fingerprint in self._recorded

    def is_duplicate(self, fingerprint: bytes) -> bool:
        """Return whether `add` would certainly return False, without asking a disk."""
        life = self._life
        if life.has_window and self._clock() >= life.due_at:
            return False
        if fingerprint not in self._recent:
            if fingerprint not in self._recorded:
                return False
            self._recent.add(fingerprint)
        return True

    def status(self) -> FilterStatus:
        """Return the filter's current figures; after `close`, the last figures."""
        if self._last_status is not None:
            return self._last_status
        found = self._life.status(self.location, self.live)
        return replace(
            found, errors=found.errors + self.errors, failure=found.failure or self.failure
        )

    @property
    def location(self) -> str:
        """Return where the filter is stored, for messages; also after the close."""
        return "memory"

    def close(self) -> None:
        """Keep the last figures."""
        self._last_status = self.status()

    # The methods of `Generations`.

    def now(self) -> float:
        """Return the time in seconds since 1970, never before the newest was created."""
        # If the clock was set back, the time does not change until the clock has caught up: a
        # request may stay recorded for longer than the window, but never for less.
        newest = self.live[-1].created_at if self.live else 0.0
        return max(self._clock(), newest)

    def ends(self, newest: Generation) -> float:
        """Return when the newest generation ends, with a window."""
        return newest.open_until

    def append(self, size: Size, created_at: float, open_until: float) -> bool:
        """Add a generation for new requests, or extend the newest if it is empty.

        Raises NoRoomError if there is no memory or no disk space.
        """
        full = self.live[-1]
        if not full.count:
            self.extend(open_until)
            return True
        self._save()  # the final figures of the full generation
        try:
            new = self._make(size, full.number + 1, created_at, open_until)
        except (StorageError, MemoryError) as error:
            raise NoRoomError(str(error)) from error
        self.live.append(new)
        self._use_live()
        return True

    def extend(self, open_until: float) -> None:
        """Set the end of the newest generation, in seconds since 1970; 0: it does not end."""
        self.live[-1].open_until = open_until
        self._use_live()

    def expire(self, number: int) -> None:
        """Remove the `number` oldest generations."""
        del self.live[:number]
        self._use_live()

    def _make_first(self) -> None:
        size = self._policy.first()
        try:
            now = self.now()
            self.live.append(self._make(size, 1, now, self._policy.open_until(now)))
        except MemoryError:
            raise StorageError(
                f"there is not enough memory for a filter of {size.geometry.nbytes:,} bytes; lower "
                "BLOOM_EXPECTED_REQUESTS, or set JOBDIR to keep it in a file"
            ) from None

    def _make(
        self, size: Size, number: int, created_at: float, open_until: float
    ) -> LocalGeneration:
        new = LocalGeneration.of(size, number, created_at, open_until=open_until)
        new.filter = size.filter(self.live[0].filter.salt if self.live else self._origin.salt)
        return new

    def _use_live(self) -> None:
        """Look up and record in the generations that are live now."""
        self._recent.clear()
        self._newest = newest = self.live[-1]
        filters = [each.filter for each in self.live]
        self._recorded = Lookup(filters) if len(filters) > 1 else newest.filter
        self._life.plan()
        if self._has_begun:
            self._save()

    def _mark_as_used(self) -> None:
        """Mark the filter on the disk as in use; a filter in memory has none."""

    def _save(self) -> None:
        """Write the figures of the newest generation to the disk; a filter in memory has none."""

    def _warn_if_the_clock_went_back(self) -> None:
        behind = self._newest.created_at - self._clock()
        if behind > 1:
            logger.warning(
                "The clock is %.0f seconds behind the time when the filter was last extended: "
                "requests stay recorded for that much longer than BLOOM_WINDOW_SECS",
                behind,
            )

"""The interface of backends, and the backend in memory, from which `LocalBackend` inherits."""

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
        self._next_save: float = math.inf  # at this count of the newest, save the figures
        self._last_status: FilterStatus | None = None
        self._recent = Recent(_MOST_RECENT)
        self._newest: LocalGeneration
        self._recorded: Recorded

    def open(self) -> None:
        """Make the first generation; raises a StorageError if there is no memory for it."""
        self._make_first()
        self._use_live()

    def begin(self, run_at: float | None = None) -> None:
        """Begin the crawl; `add` calls this, too.

        Args:
            run_at: when its run began, in seconds since 1970; None: it begins now.
        """
        if self._has_begun:
            return
        self._has_begun = True
        self._mark_as_used()
        self._life.begin_run(self._clock() if run_at is None else run_at)

    def add(self, fingerprint: bytes) -> bool:
        """Record a fingerprint; return whether it was new."""
        life = self._life
        if not self._has_begun:
            self.begin()
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
        return fingerprint in self._recorded

    def is_duplicate(self, fingerprint: bytes) -> bool:
        """Return whether `add` would certainly return False, without asking a disk."""
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

    def update(self, run_at: float, size: Size | None = None, expired: int = 0) -> bool:
        """Change the generations, as `Generations.update` says; always return True."""
        live = self.live[expired:]
        if size is None:
            self._newest.last_run = run_at
        else:
            self._save()  # the final figures of the newest
            number = self._newest.number + 1
            oldest = live[0].number if live else number
            try:
                live.append(self._make(size, number, run_at, oldest))
            except (StorageError, MemoryError) as error:
                raise NoRoomError(str(error)) from error
        self.live = live
        self._use_live()
        return True

    def _make_first(self) -> None:
        size = self._policy.first()
        try:
            self.live.append(self._make(size, 1, self._clock(), 1))
        except MemoryError:
            raise StorageError(
                f"there is not enough memory for a filter of {size.geometry.nbytes:,} bytes; lower "
                "BLOOM_EXPECTED_REQUESTS, or set JOBDIR to keep it in a file"
            ) from None

    def _make(self, size: Size, number: int, run_at: float, oldest: int) -> LocalGeneration:  # noqa: ARG002 - for files
        """Make a generation; `oldest` is the number of the oldest one that is live with it."""
        new = LocalGeneration.of(size, number, run_at)
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

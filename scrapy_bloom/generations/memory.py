"""The backend in memory, from which `LocalBackend` inherits."""

import time
from collections.abc import Sequence
from dataclasses import replace

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.filters.hashing import Hashed, make_hasher
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
_MOST_HASHED = 1024  # about as many as the requests of a batch, in at most 1 MB


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
    """Looks up and records fingerprints in all live generations, with one hash computation.

    That is possible because the generations have the same salt, and a generation with fewer hashes
    uses the first of them. A fingerprint that is new is usually looked up again, and then recorded:
    its hash is kept until then.
    """

    def __init__(self, live: Sequence[BloomFilter]) -> None:
        self._newest = newest = live[-1]
        # The newest of the others comes first: it is the largest, and has most of the duplicates.
        self._others = list(reversed(live[:-1]))
        most = max(each.num_hashes for each in live)
        self._num_hashes = newest.num_hashes if newest.num_hashes < most else None
        self._locate = make_hasher(newest.salt, most)
        self._hashed: dict[bytes, Hashed] = {}  # of fingerprints that were new

    def __contains__(self, fingerprint: bytes) -> bool:
        hashed = self._hashed.get(fingerprint) or self._locate(fingerprint)
        if self._newest.has_hashed(*hashed):
            return True
        for each in self._others:
            if each.has_hashed(*hashed):
                return True
        if len(self._hashed) >= _MOST_HASHED:
            self._hashed.clear()
        self._hashed[fingerprint] = hashed
        return False

    def add(self, fingerprint: bytes) -> bool:
        """Record a fingerprint in the newest generation; return whether it was new to that."""
        hashed = self._hashed.pop(fingerprint, None)
        block_hash, positions = hashed or self._locate(fingerprint)
        return self._newest.add_hashed(block_hash, positions[: self._num_hashes])

    def in_newest(self, fingerprint: bytes) -> bool:
        """Return whether the newest generation has a fingerprint."""
        return self._newest.has_hashed(*self._locate(fingerprint))


class LocalGeneration(Generation):
    """A generation whose bits are in this process."""

    filter: BloomFilter


class MemoryBackend:
    """A Bloom filter in memory, and the `Generations` of its own life cycle.

    `RedisBackend` has the same methods. They are called in this order: `open`, `begin`, `add` any
    number of times, `close`.

    Args:
        policy: the size of the filter, and when it grows and expires.
        origin: the fingerprinter, the spider and the salt.

    Attributes:
        live: its generations, oldest first; at least one after `open`.
        sample: a text that is stored with the filter, some time after it was set; from `open` on.
    """

    sample = ""

    def __init__(self, policy: Policy, origin: Origin = ANY_ORIGIN) -> None:
        self.live: list[LocalGeneration] = []
        self._policy = policy
        self._origin = replace(origin, error_rate=policy.error_rate)
        self._clock = time.time
        self._life = LifeCycle(policy, self)
        self._has_begun = False
        self._last_status: FilterStatus | None = None
        self._recent = Recent(_MOST_RECENT)
        self._newest: LocalGeneration
        self._recorded: Lookup

    def open(self) -> None:
        """Make the first generation; raises a StorageError if there is no memory for it."""
        self._make_first(self._policy.first())
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
        if fingerprint in self._recorded:
            self._recent.add(fingerprint)
            return False
        if self._newest.count >= life.grow_at:
            life.grow()
        self._recorded.add(fingerprint)
        self._newest.count += 1
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
        return self._life.status(self.location, self.live)

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
            try:
                live.append(self._make(size, self._newest.number + 1, run_at))
            except (StorageError, MemoryError) as error:
                raise NoRoomError(str(error)) from error
        self.live = live
        self._use_live()
        return True

    def _make_first(self, size: Size) -> None:
        try:
            self.live.append(self._make(size, 1, self._clock()))
        except MemoryError:
            raise StorageError(
                f"there is not enough memory for a filter of {size.geometry.nbytes:,} bytes; lower "
                "BLOOM_EXPECTED_REQUESTS"
            ) from None

    def _make(self, size: Size, number: int, run_at: float) -> LocalGeneration:
        new = LocalGeneration.of(size, number, run_at)
        new.filter = size.filter(self.live[0].filter.salt if self.live else self._origin.salt)
        return new

    def _use_live(self) -> None:
        """Look up and record in the generations that are live now."""
        self._recent.clear()
        self._newest = self.live[-1]
        self._recorded = Lookup([each.filter for each in self.live])
        self._life.plan()

    def _mark_as_used(self) -> None:
        """Mark the filter on the disk as in use; a filter in memory has none."""

"""The backend in memory, from which `LocalBackend` inherits."""

import time
from collections.abc import Sequence
from dataclasses import replace

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.filters.bloom import BloomFilter, Load
from scrapy_bloom.filters.hashing import Hashed, make_hasher
from scrapy_bloom.generations.policy import (
    Generation,
    LifeCycle,
    NoRoomError,
    Origin,
    Policy,
)

_MOST_RECENT = 2048  # more than the navigation links of a large site, in at most 0.4 MB
_MOST_HASHED = 1024  # about as many as the requests of a batch, in at most 1 MB


class Lookup:
    """Looks up and records fingerprints in the filters of generations, with one hash computation.

    The generations have the same salt, and one with fewer hashes uses the first of them. The hash
    of a new fingerprint is cached until it is recorded, and so are recent duplicates, such as the
    links that are on every page. A full cache is cleared, because frequent links soon return.
    """

    def __init__(
        self,
        salt: bytes,
        generations: Sequence[Generation],
        filters: Sequence[BloomFilter],
        most_recent: int = _MOST_RECENT,
    ) -> None:
        # The newest comes first: it is the largest, and has most of the duplicates.
        self._filters = filters[::-1]
        most = max((generation.geometry.num_hashes for generation in generations), default=1)
        self._locate = make_hasher(salt, most)
        self._hashed: dict[bytes, Hashed] = {}  # of fingerprints that were new
        self._recent: set[bytes] = set()
        self._most_recent = most_recent

    def __contains__(self, fingerprint: bytes) -> bool:
        if fingerprint in self._recent:
            return True
        hashed = self._hashed.get(fingerprint) or self._locate(fingerprint)
        for bits in self._filters:  # usually one, for which any() would double the time
            if bits.has_hashed(*hashed):
                if len(self._recent) >= self._most_recent:
                    self._recent.clear()
                self._recent.add(fingerprint)
                return True
        if len(self._hashed) >= _MOST_HASHED:
            self._hashed.clear()
        self._hashed[fingerprint] = hashed
        return False

    def add(self, fingerprint: bytes, bits: BloomFilter) -> bool:
        """Record a fingerprint in one of the filters; return whether it was new to that."""
        hashed = self._hashed.pop(fingerprint, None)
        block_hash, positions = hashed or self._locate(fingerprint)
        return bits.add_hashed(block_hash, positions[: bits.num_hashes])

    def hashed(self, fingerprint: bytes) -> Hashed:
        """Return the hash of a fingerprint, for the generation with the most hashes."""
        return self._hashed.get(fingerprint) or self._locate(fingerprint)


class LocalGeneration(Generation):
    """A generation whose bits are in this process."""

    filter: BloomFilter

    @classmethod
    def of(cls, figures: Generation, salt: bytes, load: Load | None = None) -> "LocalGeneration":
        """Return a generation with some figures, whose blocks are loaded when they are needed."""
        new = cls(**vars(figures))
        new.filter = BloomFilter(
            new.capacity, new.error_rate, salt=salt, geometry=new.geometry, load=load
        )
        return new


class MemoryBackend(LifeCycle):
    """A Bloom filter in memory.

    Its methods, which `RedisBackend` has, too, are called in this order: `open`, `begin`, `add`
    any number of times, `close`.

    Attributes:
        live: its generations, oldest first; at least one after `open`.
        sample: a text that is stored with the filter, some time after it was set; from `open` on.
    """

    sample = ""
    location = "memory"  # for messages

    def __init__(self, policy: Policy, origin: Origin) -> None:
        super().__init__(policy)
        self.live: list[LocalGeneration] = []
        self._origin = replace(origin, error_rate=policy.error_rate)
        self._clock = time.time
        self._has_begun = False
        self._newest: LocalGeneration
        self._recorded: Lookup

    def open(self) -> None:
        """Make the first generation; raises a StorageError if there is no memory for it."""
        self._make_first(self._policy.first(self._clock()))
        self._use_live()

    def clear(self) -> None:
        """Remove all fingerprints."""
        self.live = []
        self.open()

    def begin(self, run_at: float | None = None) -> None:
        """Begin the crawl, in a run that began at `run_at`; None: now. `add` calls this, too."""
        if self._has_begun:
            return
        self._has_begun = True
        self.turn(self._clock() if run_at is None else run_at)

    def add(self, fingerprint: bytes) -> bool:
        """Record a fingerprint; return whether it was new."""
        if not self._has_begun:
            self.begin()
        if fingerprint in self._recorded:
            return False
        if self._newest.count >= self.grow_at:
            self.grow()
        self._recorded.add(fingerprint, self._newest.filter)
        self._newest.count += 1
        return True

    def add_many(self, fingerprints: Sequence[bytes]) -> int:
        """Record fingerprints; return how many were new."""
        return sum(map(self.add, fingerprints))

    def __contains__(self, fingerprint: bytes) -> bool:
        return fingerprint in self._recorded

    is_duplicate = __contains__  # a filter in Redis may have to ask its server

    def close(self) -> None:
        """Close the filter; its figures stay."""

    def update(self, run_at: float, new: Generation | None = None, expired: int = 0) -> bool:
        """Change the generations, as `LifeCycle.update` says; always return True."""
        live = self.live[expired:]
        if new is None:
            self._newest.last_run = run_at
        else:
            try:
                live.append(LocalGeneration.of(new, self._origin.salt))
            except MemoryError as error:
                raise NoRoomError(str(error)) from error
        self.live = live
        self._use_live()
        return True

    def _make_first(self, new: Generation) -> None:
        try:
            self.live.append(LocalGeneration.of(new, self._origin.salt))
        except MemoryError:
            raise StorageError(
                f"there is not enough memory for a filter of {new.geometry.nbytes:,} bytes; lower "
                "BLOOM_EXPECTED_REQUESTS"
            ) from None

    def _use_live(self) -> None:
        """Look up and record in the generations that are live now."""
        self._newest = self.live[-1]
        filters = [generation.filter for generation in self.live]
        self._recorded = Lookup(self._origin.salt, self.live, filters)
        self.plan()

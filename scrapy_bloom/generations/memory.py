"""The filter of one process, in memory; `scrapy_bloom.files` keeps it in files."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.filters.hashing import make_hasher
from scrapy_bloom.generations.backend import FilterStatus
from scrapy_bloom.generations.forgotten import Forgotten, ForgottenStore, MemoryForgotten
from scrapy_bloom.generations.lifecycle import LifeCycle, NoRoomError
from scrapy_bloom.generations.policy import ANY_ORIGIN, Generation, Origin, Policy, Size

logger = logging.getLogger(__name__)

# Many times the navigation links of a large site, in at most 0.4 MB.
_MOST_RECENT = 2048


class Recent(set[bytes]):
    """Recent duplicates, which are recorded; to be emptied when the generations change.

    A link that is on every page is found here, without a look at its bits.

    Args:
        most: how many; then it is emptied, since frequent ones soon return.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def add(self, fingerprint: bytes) -> None:
        """Add a fingerprint that is recorded."""
        if len(self) >= self._most:
            self.clear()
        super().add(fingerprint)


class Lookup:
    """The filters of all live generations, oldest first, asked at once.

    A fingerprint is hashed once for all of them: they have one salt, and those with fewer hashes
    take the first ones.
    """

    def __init__(self, live: Sequence[BloomFilter]) -> None:
        self.newest = live[-1]
        # The newest of the others first: it is the largest, and holds most of what is asked for.
        self._others = list(reversed(live[:-1]))
        self._num_hashes = self.newest.num_hashes
        most = max(each.num_hashes for each in live)
        self._exact = most == self._num_hashes
        self._locate = make_hasher(self.newest.salt, most)

    def add(self, fingerprint: bytes) -> bool:
        """Record a fingerprint in the newest generation, unless any holds it; True if new."""
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
        # Mostly there are none, and a generator takes longer than this look.
        return bool(self._others) and any(
            each.has_hashed(block_hash, positions) for each in self._others
        )


class Recorded(Protocol):
    """Tells whether a fingerprint is recorded."""

    def __contains__(self, fingerprint: bytes) -> bool: ...


class LocalGeneration(Generation):
    """A generation whose bits are in this process.

    Attributes:
        unapplied: how many of those in its count are in the log only, and not in its bits yet.
        is_closed: its bits are gone.
    """

    filter: BloomFilter
    unapplied = 0
    is_closed = False

    def sync(self) -> None:
        """Write all changes so far to the disk; in memory, there is none."""


class MemoryBackend:
    """A Bloom filter in memory: a `Backend`, and the `Generations` of its own life cycle.

    Args:
        policy: how large it is, and when it grows and expires.
        origin: what it holds, and whose.
        forgotten: where its forgotten requests are kept; in memory if None.
        clock: seconds since 1970, for tests.

    Attributes:
        forgotten: the requests that are to be crawled again.
        live: its generations, oldest first; there is one once it is open.
    """

    errors = 0  # of the disk
    failure = ""  # the last of them
    kept_from = math.inf  # no other crawl uses the generations, so all may end

    def __init__(
        self,
        policy: Policy,
        origin: Origin = ANY_ORIGIN,
        *,
        forgotten: ForgottenStore | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.live: list[LocalGeneration] = []
        self.forgotten = Forgotten(MemoryForgotten() if forgotten is None else forgotten)
        self._policy = policy
        self._origin = replace(origin, error_rate=policy.error_rate)
        self._clock = clock
        self._life = LifeCycle(policy, self, self.forgotten)
        self._has_begun = False
        self._next_save: float = math.inf  # at this count of the newest generation, it is due
        self._last_status: FilterStatus | None = None
        self._recent = Recent(_MOST_RECENT)
        self._newest: LocalGeneration
        self._recorded: Recorded
        self._record: Callable[[bytes], bool]
        self._record_in_newest: Callable[[bytes], object]

    def open(self) -> None:
        """Make the first generation; raises a StorageError if there is no memory for it."""
        self.forgotten.open()
        self._make_first()
        self._use_live()

    def begin(self) -> None:
        """Begin the crawl; `add` does so itself."""
        if self._has_begun:
            return
        self._has_begun = True
        self._mark_as_used()
        if self._policy.window:
            self._warn_if_the_clock_went_back()
            # If the window was shortened, so is what is left of the quarter.
            self.extend(min(self._newest.open_until, self._policy.open_until(self.now())))
            self._life.turn()
        elif self._newest.open_until:
            self.extend(0.0)  # there is no window any more

    def add(self, fingerprint: bytes) -> bool:
        """Record a fingerprint; return whether it was new."""
        life = self._life
        if not self._has_begun:
            self.begin()
        if life.has_window and self._clock() >= life.due_at:
            life.turn()
        if fingerprint in self._recent:
            return self._was_forgotten(fingerprint)
        if self._newest.count >= life.grow_at:
            if fingerprint in self._recorded:
                return self._was_forgotten(fingerprint)
            life.grow()
        if not self._record(fingerprint):
            self._recent.add(fingerprint)
            return self._was_forgotten(fingerprint)
        if not self.forgotten.is_empty:
            self.forgotten.take(fingerprint)  # it is new in any case, and only once
        newest = self._newest
        newest.count += 1
        if newest.count >= self._next_save:
            self._save()
        return True

    def add_many(self, fingerprints: Sequence[bytes]) -> int:
        """Record fingerprints; return how many were new."""
        return sum(map(self.add, fingerprints))

    def _was_forgotten(self, fingerprint: bytes) -> bool:
        """Return whether a recorded fingerprint was forgotten, and is to be new once."""
        if not self.forgotten.take(fingerprint):
            return False
        self.record_again(fingerprint)
        return True

    def record_again(self, fingerprint: bytes) -> None:
        """Record what an older generation has in the newest one, too: for a window from now on."""
        if self._policy.window and fingerprint not in self._newest.filter:
            self._record_in_newest(fingerprint)
            self._newest.count += 1

    def __contains__(self, fingerprint: bytes) -> bool:
        life = self._life
        if life.has_window and self._has_begun and self._clock() >= life.due_at:
            life.turn()
        return fingerprint in self._recorded and fingerprint not in self.forgotten

    def status(self) -> FilterStatus:
        """Return the filter's figures now; after `close`, the last ones."""
        if self._last_status is not None:
            return self._last_status
        return self._life.status(self.location, self.live, errors=self.errors, failure=self.failure)

    @property
    def location(self) -> str:
        """Return where the filter is, for people; also after the close."""
        return "memory"

    def close(self) -> None:
        """End; raises StorageError."""
        self._last_status = self.status()
        self.forgotten.close()

    # The methods of `Generations`.

    def now(self) -> float:
        """Return the time in seconds since 1970; never before the newest generation's."""
        # If the clock was set back, time stands still until it has caught up: a request may be
        # remembered for longer, but never for less than the window.
        newest = self.live[-1].created_at if self.live else 0.0
        return max(self._clock(), newest)

    def ends(self, newest: Generation) -> float:
        """Return when the newest generation ends, with a window."""
        return newest.open_until

    def append(self, size: Size, created_at: float, open_until: float) -> bool:
        """Let another generation take what is new, or the newest one if it is still empty.

        Raises a NoRoomError if there is no memory, or no disk space.
        """
        full = self.live[-1]
        if not full.count:
            self.extend(open_until)
            return True
        self._save()  # the last figures of the full one
        try:
            new = self._make(size, full.number + 1, created_at, open_until)
        except (StorageError, MemoryError) as error:
            raise NoRoomError(str(error)) from error
        self.live.append(new)
        self._use_live()
        return True

    def extend(self, open_until: float) -> None:
        """Keep the newest generation open until then; 0: for ever."""
        self.live[-1].open_until = open_until
        self._use_live()

    def expire(self, number: int) -> None:
        """Remove so many of the oldest generations."""
        del self.live[:number]
        self._use_live()

    def _make_first(self) -> None:
        size = self._policy.first()
        try:
            now = self.now()
            self.live.append(self._make(size, 1, now, self._policy.open_until(now)))
        except MemoryError:
            raise StorageError(
                f"there is no memory for a filter of {size.geometry.nbytes:,} bytes; lower "
                "BLOOM_EXPECTED_REQUESTS, or set BLOOM_DIR or JOBDIR to keep it in a file"
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
        lookup = Lookup([each.filter for each in self.live])
        self._recorded, self._record_in_newest = lookup, newest.filter.add
        self._record = lookup.add if len(self.live) > 1 else newest.filter.add
        self._life.plan()
        if self._has_begun:
            self._save()

    def _mark_as_used(self) -> None:
        """Write to the disk that a crawl uses the filter; in memory, there is none."""

    def _save(self) -> None:
        """Write down the figures of the newest generation; in memory, they are."""

    def _warn_if_the_clock_went_back(self) -> None:
        behind = self._newest.created_at - self._clock()
        if behind > 1:
            logger.warning(
                "The clock is %.0f seconds behind the time when the filter was last extended: "
                "requests are remembered for that much longer than BLOOM_WINDOW_SECS",
                behind,
            )


class RecordCrawled:
    """Records what was crawled, not what was scheduled (BLOOM_RECORD_ON).

    It is two backends in one: new requests go into memory, crawled ones are kept for later runs.

    So later runs filter neither what a killed run had queued, nor what failed. A forgotten request
    that is crawled again stays forgotten until then.

    Attributes:
        stored: what is kept for later runs.
        scheduled: how many requests were new in this run.
    """

    def __init__(self, stored: MemoryBackend, volatile: MemoryBackend) -> None:
        self.scheduled = 0
        self.stored = stored
        self._volatile = volatile
        self.forgotten = stored.forgotten
        self._once_more: set[bytes] = set()  # forgotten, and under way in this run
        self.begin = stored.begin

    def open(self) -> None:
        """Open both."""
        self._volatile.open()
        self.stored.open()

    def add(self, fingerprint: bytes) -> bool:
        """Record a fingerprint for this run; True if it was new to this and all earlier ones."""
        if fingerprint in self.forgotten:
            if fingerprint in self._once_more:
                return False
            self._volatile.add(fingerprint)  # if it is not there
            self._once_more.add(fingerprint)
        elif fingerprint in self.stored or not self._volatile.add(fingerprint):
            return False
        self.scheduled += 1
        return True

    def record(self, fingerprint: bytes) -> bool:
        """Record a fingerprint for later runs; True if it was not yet, or had been forgotten."""
        self._once_more.discard(fingerprint)
        return self.stored.add(fingerprint)

    def forget(self, fingerprints: Sequence[bytes]) -> None:
        """Let failed requests be new once more, in this run or a later one."""
        self._once_more.difference_update(fingerprints)
        self.forgotten.add(fingerprints)

    def __contains__(self, fingerprint: bytes) -> bool:
        if fingerprint in self.forgotten:
            return fingerprint in self._once_more
        return fingerprint in self.stored or fingerprint in self._volatile

    def status(self) -> FilterStatus:
        """Return the figures of what is stored, with the error rate of both."""
        stored, volatile = self.stored.status(), self._volatile.status()
        return replace(
            stored,
            volatile=volatile.generations,
            error_rate=stored.error_rate + volatile.error_rate,
        )

    def close(self) -> None:
        """Close both; raises BloomError."""
        self._volatile.close()
        self.stored.close()


def practically_exact_set() -> MemoryBackend:
    """Make an opened filter in memory that has practically no false positives.

    It takes 10 MB for a million fingerprints.
    """
    new = MemoryBackend(Policy(expected=20_000, error_rate=1e-12))
    new.open()
    return new

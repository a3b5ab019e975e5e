"""The generations of a shared filter, as one crawler takes part in them."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.filters.hashing import Hashed, block_of
from scrapy_bloom.generations.lifecycle import NoRoomError
from scrapy_bloom.generations.policy import Generation, Size
from scrapy_bloom.job.requests_seen import import_seen, open_seen
from scrapy_bloom.redis.counts import SharedCounts
from scrapy_bloom.redis.keys.lock import LEASE_SECS, Patience
from scrapy_bloom.redis.keys.meta import CHUNK_BLOCKS, FilterInfo, RedisGeneration, Stored
from scrapy_bloom.redis.keys.store import RedisStore
from scrapy_bloom.redis.known import KnownGenerations
from scrapy_bloom.redis.recovery import Recovery
from scrapy_bloom.redis.wanted import Wanted


class SharedGenerations:
    """Joins a shared filter, and keeps up with its generations.

    Other crawlers change them at any time. Nothing tells us so but the marks of a key: whoever
    finds one sealed calls `follow`, whoever finds one lost calls `lost`.

    Args:
        store: the keys.
        wanted: what the settings ask of the filter.
        mirror: whether to keep a mirror of each generation.
        queue_is_shared: see `RedisBackend`.
        clock: seconds since 1970; None: the server's.
        changed: called when the generations are others than before.

    Attributes:
        known: the generations, as far as they are known here.
        counts: how many requests they hold.
        recovery: makes lost keys anew.
    """

    def __init__(
        self,
        store: RedisStore,
        wanted: Wanted,
        *,
        mirror: bool,
        queue_is_shared: bool = False,
        clock: Callable[[], float] | None,
        changed: Callable[[], None],
    ) -> None:
        self.store = store
        self.wanted = wanted
        self.queue_is_shared = queue_is_shared
        self.known = KnownGenerations(wanted.policy, mirror=mirror)
        self.counts = SharedCounts(store, self.known)
        self.recovery = Recovery(store, self.known)
        self._patience = Patience(store.server, store.lock, store.name)
        self._clock_offset = 0.0
        self._clock = clock or (lambda: time.monotonic() + self._clock_offset)
        self._changed = changed

    def join(self, importable: Path | None = None, *, tell: bool = False) -> None:
        """Take part in the filter; create what is missing of it.

        Args:
            importable: a requests.seen that a new filter shall begin with.
            tell: log how the filter differs from the settings.
        """
        self.set_clock()
        name, created, was_gone = self.store.name, False, False
        end = time.monotonic() + LEASE_SECS + self._patience.secs
        while True:  # again, if another crawler removes it meanwhile
            if time.monotonic() > end:
                raise StorageError(f"{name} is removed each time it is made; start again")
            stored = self.store.read()
            if stored.info is None:
                was_gone = was_gone or not stored.was_reset
                self.store.define(self._new_info())
                continue
            self.wanted.check(stored.info, name)
            self.store.remove_left_over(stored)
            if stored.generations:
                break
            created = self._create_first(stored.info, importable)
        self.recovery.replace_void(stored, was_gone=was_gone)
        self._adopt(stored)
        self._patience.restore()
        if tell and not created:
            self.wanted.log_differences(stored.info, self.known.live, name)

    def _create_first(self, info: FilterInfo, importable: Path | None) -> bool:
        """Make the first generation, or wait until another crawler has; whether we made it."""
        policy = self.wanted.policy
        size, content, count = policy.first(), None, 0
        if importable is not None:
            seen = open_seen(importable)
            size = policy.first(at_least=seen.count())
            content = size.filter(bytes.fromhex(info.salt))
            count = import_seen(seen, content.add)
        try:
            with self._locked():
                stored = self.store.read()
                if stored.info != info or stored.generations:
                    return False
                new = self._sized(size, 1, count=count)
                return self.store.add(info.epoch, new, self.now, content=content)
        except NoRoomError as error:
            raise StorageError(
                f"{self.store.server.address}: {error}; give it more, or lower "
                "BLOOM_EXPECTED_REQUESTS"
            ) from error

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Wait until no other crawler makes generations; the lock of a dead one ends by itself."""
        self._patience.wait_until(self.store.lock.take)
        try:
            yield
        finally:
            self.store.lock.release()

    def _adopt(self, stored: Stored) -> None:
        self.known.adopt(stored)
        self.counts.plan()
        self._changed()

    def _forget(self) -> None:
        self.known.forget()
        self.counts.drop()

    def clear(self, *, and_wait: float = 0.0) -> None:
        """Remove the filter, for all crawlers; `join` begins a new one.

        Args:
            and_wait: seconds to wait then, and the others for as long again: only we can begin the
                new one in that time.
        """
        if and_wait:
            self._patience.wait_until(self.store.lock.take)
        self.known.info = self._new_info()
        self.store.redefine(self.known.info)
        self.store.remove_left_over(self.store.read())
        self._forget()
        if and_wait:
            time.sleep(and_wait)
            self.store.lock.release(after=and_wait)

    @property
    def epoch(self) -> str:
        """Return the epoch of the filter that is used now."""
        return self.known.info.epoch

    def set_aside(self, stored: Stored) -> str:
        """Keep the filter under another name, for all crawlers; where it is now, for people."""
        self.set_clock()  # it is not joined yet
        name = self.store.set_aside(stored, self._new_info())
        return f"the key {name!r} of {self.store.server.address}"

    def leave(self) -> None:
        """Leave nothing behind of a filter that was cleared."""
        if not self.known.live:
            self.store.undefine(self.known.info)
            self.store.lock.release()

    def count(self) -> None:
        """Count one more in the newest generation."""
        if not self.counts.add_one():
            self.refresh()

    def refresh(self) -> None:
        """Look at the generations that there are, and take part in these."""
        self.counts.tell()  # before the newest one is left
        stored = self.store.read()
        if self.recovery.is_lost(stored):
            if self.queue_is_shared:
                self.begin_anew()
                return
            stored = self._written_back()
            if self.recovery.is_lost(stored):  # again already: whoever asks next finds that
                return
        if stored.generations:
            self._adopt(stored)
        else:  # it was cleared, or reset
            self._forget()
            self.join()

    def _written_back(self) -> Stored:
        """Write back what is known here, unless another was first; what there is then."""
        with self._locked():
            self.store.define(self.known.info)
            if self.known.are_of(self.store.read()):
                self.recovery.write_back()
                self.counts.drop()
        return self.store.read()

    def follow(self, sealed: RedisGeneration) -> None:
        """Go on to the generation after the newest that we know; make it, unless another does."""
        size = self.wanted.policy.next(self.known.live)

        def is_followed() -> bool:
            if not self.append(size, sealed.open_until):
                self.refresh()
            return self.known.newest is not sealed

        self._patience.wait_until(is_followed)

    def append(self, size: Size, open_until: float) -> bool:
        """See `Generations`; whether the newest is another."""
        ended = self.known.newest
        if open_until:
            self.set_clock()
        if not self.store.lock.take():
            return False
        try:
            self.refresh()
            if self.known.newest is not ended:
                return True
            new = self._sized(size, ended.number + 1, open_until)
            self.store.add(self.epoch, new, self.now, after=ended)
        finally:
            self.store.lock.release()
        self.refresh()
        return self.known.newest is not ended

    def _sized(
        self, size: Size, number: int, open_until: float = 0.0, count: int = 0
    ) -> RedisGeneration:
        now = self.now()
        open_until = open_until or self.wanted.policy.open_until(now)
        return RedisGeneration.of(size, number, now, open_until=open_until, count=count)

    def extend(self, open_until: float) -> None:
        """Keep the newest generation open for longer, for all crawlers."""
        self.known.newest.open_until = open_until
        self.store.rewrite(self.epoch, self.known.newest)

    def expire(self, number: int) -> None:
        """Remove so many of the oldest generations."""
        for each in self.known.live[:number]:
            self.store.expire(self.epoch, each)
        self.refresh()

    def lost(self, generation: RedisGeneration, hashed: Hashed) -> None:
        """Mend a fingerprint's key that was evicted or removed, or find that all is gone."""
        stored, blocks = self.store.read(), self.store.blocks
        ids = [each.id for each in stored.generations]
        chunk = block_of(hashed[0], generation.geometry.num_blocks) // CHUNK_BLOCKS
        if not self.recovery.is_lost(stored):
            if generation.id in ids:
                blocks.restore(generation, chunk, sealed=generation.id != ids[-1])
                if self.queue_is_shared and self.recovery.is_lost(self.store.read()):
                    # All has gone meanwhile: a key that looks alive would hide that.
                    blocks.drop(generation, chunk)
                    self.begin_anew()
                    return
                self.recovery.log_loss(1)
            else:  # the filter was cleared, or the generation has expired
                blocks.drop(generation, chunk)
        if ids != [each.id for each in self.known.live]:
            self.refresh()

    def begin_anew(self) -> None:
        """Drop all that is known here, and take part in what is there, however old it is.

        The queue is as old, or as empty: what is known here may be of requests that are in no
        queue any more.
        """
        self.recovery.note_void()
        self._forget()
        self.join()

    def _new_info(self) -> FilterInfo:
        return self.wanted.info(self.now())

    @property
    def live(self) -> Sequence[RedisGeneration]:
        """Return the generations that count, oldest first."""
        return self.known.live

    @property
    def kept(self) -> Sequence[RedisGeneration]:
        """Return those that have expired, but that this run has recorded in."""
        return self.known.kept

    def ends(self, newest: Generation) -> float:
        """Return when the newest is over; the window may have been changed since it was made."""
        own = self.wanted.policy.open_until(newest.created_at)
        return min(newest.open_until or own, own)

    def now(self) -> float:
        """Return the time for all crawlers; never before the newest generation's."""
        newest = self.known.live[-1].created_at if self.known.live else 0.0
        return max(self._clock(), newest)

    def set_clock(self) -> None:
        """Ask the server for the time."""
        # One clock for all: a crawler's own may be wrong. Monotonic time goes on from there.
        self._clock_offset = self.store.server.now() - time.monotonic()

"""The generations of a shared filter, as one crawler takes part in them."""

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from scrapy_bloom.exceptions import FingerprinterMismatchError, StorageError
from scrapy_bloom.filters.hashing import Hashed, block_of
from scrapy_bloom.generations.lifecycle import NoRoomError, Run
from scrapy_bloom.generations.policy import Generation, Origin, Policy, Size
from scrapy_bloom.job.requests_seen import import_seen, open_seen
from scrapy_bloom.redis.counts import SharedCounts
from scrapy_bloom.redis.keys.lock import LEASE_SECS
from scrapy_bloom.redis.keys.meta import CHUNK_BLOCKS, FilterInfo, RedisGeneration, Stored
from scrapy_bloom.redis.keys.store import RedisStore
from scrapy_bloom.redis.recovery import Recovery
from scrapy_bloom.redis.view import View


class SharedGenerations:
    """Joins a shared filter, and keeps up with its generations: `LifeCycle` lets them grow.

    Other crawlers change them at any time, and only the marks of a key tell: a caller that finds a
    key sealed calls `follow`, one that finds it lost calls `lost`. `changed` is called when the
    list of generations has changed; `RedisBackend` has the other arguments.
    """

    def __init__(
        self,
        store: RedisStore,
        policy: Policy,
        origin: Origin,
        *,
        mirror: bool,
        queue_is_shared: bool,
        clock: Callable[[], float] | None,
        changed: Callable[[], None],
    ) -> None:
        self.store = store
        self.queue_is_shared = queue_is_shared
        self.view = View(FilterInfo.of(origin, 0.0))
        self.voided = 0  # how often all that was known here turned out to be void
        self.recovery = Recovery(store)
        self.run = Run(policy)
        self._policy = policy
        self._origin = origin
        self._counts = SharedCounts(store)
        self._mirror = mirror
        self._clock = clock
        self._server_ahead = 0.0  # its clock, of our monotonic one
        self._changed = changed

    def join(self, importable: Path | None = None) -> bool:
        """Take part in the filter, and create what is missing of it; return whether it is new.

        A new one begins with the requests.seen that is `importable`.
        """
        self._set_clock()
        name, created, was_gone = self.store.name, False, False
        end = time.monotonic() + LEASE_SECS + self.store.lock.patience_secs
        while True:  # again, if another crawler removes it meanwhile
            if time.monotonic() > end:
                raise StorageError(f"{name} is removed each time it is made; start again")
            stored = self.store.read()
            if stored.info is None:
                was_gone = was_gone or not stored.was_reset
                self.store.define(self._new_info())
                continue
            there, here = stored.info.fingerprinter, self._origin.fingerprinter
            if there != here:
                otherwise = "another BLOOM_REDIS_KEY"
                raise FingerprinterMismatchError.of(name, there, here, otherwise)
            self.store.remove_left_over(stored)
            if stored.generations:
                break
            created = self._create_first(stored.info, importable)
        self.recovery.replace_void(stored, was_gone=was_gone)
        self._adopt(stored)
        self.store.lock.restore_patience()
        return created

    def _create_first(self, info: FilterInfo, importable: Path | None) -> bool:
        """Make the first generation, or wait until another crawler has; return whether we did."""
        size, content, count = self._policy.first(), None, 0
        if importable is not None:
            seen = open_seen(importable)
            size = self._policy.first(at_least=seen.count())
            content = size.filter(bytes.fromhex(info.salt))
            count = import_seen(seen, content.add)
        try:
            with self.store.lock.held():
                stored = self.store.read()
                if stored.info != info or stored.generations:
                    return False
                now = self.now()
                end = self._policy.open_until(now)
                new = RedisGeneration.of(
                    size, 1, now, open_until=end, count=count, epoch=info.epoch
                )
                return self.store.add(new, self.now, content=content)
        except NoRoomError as error:
            raise StorageError(
                f"{self.store.server.address}: {error}; give it more, or lower "
                "BLOOM_EXPECTED_REQUESTS"
            ) from error

    def begin_run(self) -> None:
        """Keep what this run records from now on, also when it expires."""
        self.run.begin(self.view.newest.number if self.view.live else 1, self.now())

    def clear(self, *, and_wait: float = 0.0) -> None:
        """Remove the filter, for all crawlers; `join` begins a new one.

        Args:
            and_wait: seconds to wait then. The others wait for twice as long: until then, only we
                can begin the new filter.
        """
        if and_wait:
            self.store.lock.wait_until(self.store.lock.take)
        info = self._new_info()
        self.store.redefine(info)
        self.store.remove_left_over(self.store.read())
        self._forget(info)
        if and_wait:
            time.sleep(and_wait)
            self.store.lock.release(after=and_wait)

    def refresh(self) -> None:
        """Read which generations there are, and take part in them."""
        self.tell_count()  # before the newest one is left
        stored = self.store.read()
        if self.view.is_lost(stored):
            if self.queue_is_shared:
                self.begin_anew()
                return
            stored = self._written_back()
            if self.view.is_lost(stored):  # again already: whoever asks next finds that
                return
        if stored.generations:
            self._adopt(stored)
        else:  # it was cleared, or reset
            self._forget()
            self.join()

    def _written_back(self) -> Stored:
        """Write back what is known here, unless another was first; return what is stored."""
        with self.store.lock.held():
            self.store.define(self.view.info)
            if self.view.is_of(self.store.read()):
                self.recovery.write_back(self.view)
                self._counts.drop()
        return self.store.read()

    def lost(self, generation: RedisGeneration, hashed: Hashed) -> None:
        """Mend a fingerprint's key that was evicted or removed, or find that all is gone."""
        stored, blocks = self.store.read(), self.store.blocks
        ids = [each.id for each in stored.generations]
        chunk = block_of(hashed[0], generation.geometry.num_blocks) // CHUNK_BLOCKS
        if not self.view.is_lost(stored):
            if generation.id in ids:
                blocks.restore(generation, chunk, sealed=generation.id != ids[-1])
                if self.queue_is_shared and self.view.is_lost(self.store.read()):
                    # All has gone meanwhile: a key that looks alive would hide that.
                    blocks.drop(generation, chunk)
                    self.begin_anew()
                    return
                self.recovery.note_loss(self.view, 1)
            else:  # the filter was cleared, or the generation has expired
                blocks.drop(generation, chunk)
        if ids != [each.id for each in self.view.live]:
            self.refresh()

    def begin_anew(self) -> None:
        """Drop all that is known here, and take part in the stored filter, however old it is."""
        # The queue is as old, or as empty: what is known may be of requests that are in none.
        self.recovery.note_void(self.view)
        self._forget()
        self.join()

    def _adopt(self, stored: Stored) -> None:
        if self.view.live and not self.view.is_of(stored):
            self._forget()
        self.view = self.view.then(stored, self.run, mirror=self._mirror)
        self._counts.plan(self.view.newest)
        self._changed()

    def _forget(self, info: FilterInfo | None = None) -> None:
        self.view = View(info or self.view.info)
        self.voided += 1
        self.run.begin_anew()
        self._counts.drop()

    def count(self) -> None:
        """Count one more in the newest generation."""
        if self._counts.add_one(self.view.newest) and not self.tell_count():
            self.refresh()

    def tell_count(self, *, patient: bool = True) -> bool:
        """Tell all crawlers what was counted here; False if the newest generation is gone."""
        view = self.view
        return not view.live or self._counts.tell(view.newest, patient=patient)

    def learn_counts(self) -> None:
        """Learn at the close what all crawlers have recorded, unless there is an outage."""
        with contextlib.suppress(StorageError):
            stored = self.store.read(patient=False)
            if self.view.is_of(stored) and stored.generations:
                self.view = View(self.view.info, stored.generations, self.view.kept)

    @property
    def live(self) -> Sequence[RedisGeneration]:
        """Return the generations that count, oldest first."""
        return self.view.live

    @property
    def kept(self) -> Sequence[RedisGeneration]:
        """Return those that have expired, but that this run has recorded in."""
        return self.view.kept

    def follow(self, sealed: RedisGeneration) -> None:
        """Go on to the next generation; make it, unless another does; raises NoRoomError."""
        size = self._policy.next(self.live)

        def is_followed() -> bool:
            if not self.append(size, self.now(), sealed.open_until):
                self.refresh()
            return self.view.newest is not sealed

        self.store.lock.wait_until(is_followed)

    def append(self, size: Size, created_at: float, open_until: float) -> bool:
        """Add a generation; False if another crawler is about to. Raises NoRoomError."""
        ended = self.view.newest
        if open_until:
            self._set_clock()
        if not self.store.lock.take():
            return False
        try:
            self.refresh()
            if self.view.newest is not ended:
                return True
            end = open_until or self._policy.open_until(created_at)
            new = RedisGeneration.of(
                size, ended.number + 1, created_at, open_until=end, epoch=ended.epoch
            )
            self.store.add(new, self.now, after=ended)
        finally:
            self.store.lock.release()
        self.refresh()
        return self.view.newest is not ended

    def extend(self, open_until: float) -> None:
        """Keep the newest generation open for longer, for all crawlers."""
        self.view.newest.open_until = open_until
        self.store.rewrite(self.view.newest)

    def expire(self, number: int) -> None:
        """Remove so many of the oldest generations."""
        for each in self.live[:number]:
            self.store.expire(each)
        self.refresh()

    def ends(self, newest: Generation) -> float:
        """Return when the newest is over; the window may have been changed since it was made."""
        own = self._policy.open_until(newest.created_at)
        return min(newest.open_until or own, own)

    def now(self) -> float:
        """Return the time for all crawlers; never before the newest generation's."""
        now = self._clock() if self._clock else time.monotonic() + self._server_ahead
        return max(now, self.view.newest.created_at if self.view.live else 0.0)

    def _set_clock(self) -> None:
        self._server_ahead = self.store.server.now() - time.monotonic()

    def _new_info(self) -> FilterInfo:
        return FilterInfo.of(self._origin, self.now())

"""The generations of a shared filter, as one crawler takes part in them."""

import contextlib
import logging
import math
import mmap
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from scrapy_bloom.exceptions import FingerprinterMismatchError, StorageError
from scrapy_bloom.filters import BloomFilter
from scrapy_bloom.generations import Policy, Size
from scrapy_bloom.hashing import SALT_BYTES, block_of, make_hasher
from scrapy_bloom.importing import import_seen, open_seen
from scrapy_bloom.redis_blocks import NoRoomError
from scrapy_bloom.redis_lock import LEASE_SECS, Patience
from scrapy_bloom.redis_meta import CHUNK_BLOCKS, FilterInfo, RedisGeneration, Stored
from scrapy_bloom.redis_store import RedisStore

logger = logging.getLogger(__name__)

MAX_MIRROR_BYTES = 1 << 30  # of all generations together; what is beyond is asked for each time

_LONGEST_BATCH = 1000  # requests counted here before all are told
_COUNTS_SECS = 1.0  # at the latest, if there are new ones: a small crawl has no whole batch
_TELL_AGAIN_SECS = 600.0  # of lost keys


class SharedGenerations:
    """Which generations there are, which one takes what is new, and how many requests they hold.

    Other crawlers change them at any time. Nothing tells us so but the marks of a key: whoever
    finds one sealed calls `follow`, whoever finds one lost calls `lost`.

    Args:
        store: the keys.
        policy: sizes and ends of new generations.
        salt: 16 bytes for a new filter; None: random.
        fingerprinter: import path of what makes the fingerprints.
        spider: the spider's name, kept with a new filter for information.
        mirror: whether to keep a mirror of each generation.
        queue_is_shared: see `RedisBackend`.
        clock: seconds since 1970; None: the server's.
        changed: called when the generations are others than before.

    Attributes:
        live: oldest first; empty before `join`, and after `clear`. Another list, whenever they are
            others than before, or had to be looked at.
        newest: the last one.
        older: the others, newest first.
        kept: expired, with a mirror, and this run has recorded in them: it asks their mirrors.
        mirrors: of all that have one, newest first.
        locate: hashes a fingerprint for all of them; see `scrapy_bloom.hashing`.
        lost_keys: keys that were found lost.
        voided: how often all that was known here turned out to be void.
    """

    def __init__(
        self,
        store: RedisStore,
        policy: Policy,
        *,
        salt: bytes | None,
        fingerprinter: str,
        spider: str,
        mirror: bool,
        queue_is_shared: bool = False,
        clock: Callable[[], float] | None,
        changed: Callable[[], None],
    ) -> None:
        self.live: list[RedisGeneration] = []
        self.older: list[RedisGeneration] = []
        self.kept: list[RedisGeneration] = []
        self.mirrors: list[BloomFilter] = []
        self.newest: RedisGeneration
        self.locate: Callable[[bytes], tuple[int, list[int]]]
        self.lost_keys = self.voided = 0
        self._store = store
        self._place = f"the filter {store.key!r} in {store.server.address}"
        self._patience = Patience(store.server, store.lock, self._place)
        self._policy = policy
        self._salt = salt
        self._fingerprinter = fingerprinter
        self._spider = spider
        self._with_mirror = mirror
        self._queue_is_shared = queue_is_shared
        self._clock = clock or self._server_clock
        self._clock_offset = 0.0
        self._changed = changed
        self._info: FilterInfo
        self._first: float = math.inf  # the number of the generation that this run began with
        self._begun_at = 0.0
        self._uncounted = 0  # recorded here, and not told the others yet
        self._count_at: float = math.inf  # with so many of them, tell
        self._tell_at = math.inf  # by then, too; on a monotonic clock
        self._told_of_loss = -math.inf
        self._void: list[RedisGeneration] = []  # what was live before `begin_anew`

    # Taking part.

    def join(self, importable: Path | None = None, *, tell: bool = False) -> None:
        """Take part in the filter; create what is missing of it.

        Args:
            importable: a requests.seen that a new filter shall begin with.
            tell: log how the filter differs from the settings.
        """
        self.set_clock()
        created = was_gone = False
        end = time.monotonic() + LEASE_SECS + self._patience.secs
        while True:  # again, if another crawler removes it meanwhile
            if time.monotonic() > end:
                raise StorageError(f"{self._place} is removed each time it is made; start again")
            stored = self._store.read()
            if stored.info is None:
                was_gone = was_gone or not stored.was_reset
                self._store.define(self._new_info())
                continue
            self._check_fingerprinter(stored.info)
            if stored.left_over or stored.drafts:
                self._store.remove_left_over(stored)
            if stored.generations:
                break
            created = self._create_first(stored.info, importable)
        if self._void:
            self._replace_void(stored, was_gone=was_gone)
        self._adopt(stored)
        self._patience.restore()
        if tell and not created:
            self._tell_what_is_joined()

    def _create_first(self, info: FilterInfo, importable: Path | None) -> bool:
        """Make the first generation, or wait until another crawler has; whether we made it."""
        size, content, count = self._policy.first(), None, 0
        if importable is not None:
            seen = open_seen(importable)
            size = self._policy.first(at_least=seen.count())
            content = size.filter(bytes.fromhex(info.salt))
            count = import_seen(seen, content)
        self._patience.wait_until(self._store.lock.take)
        try:
            stored = self._store.read()
            if stored.info != info or stored.generations:
                return False
            return self._published(info, size, 1, 0.0, content=content, count=count)
        except NoRoomError as error:
            raise StorageError(
                f"{self._store.server.address}: {error}; give it more, or lower "
                "BLOOM_EXPECTED_REQUESTS"
            ) from error
        finally:
            self._store.lock.release()

    def refresh(self) -> None:
        """Look at the generations that there are, and take part in these."""
        stored = self._store.read()
        if stored.info is not None and stored.generations:
            self._adopt(stored)
        elif self._is_gone(stored) or self._is_ours(stored):
            self._publish_again()
        else:
            self._forget()
            self.join()  # it was cleared, or reset

    def _adopt(self, stored: Stored) -> None:
        """From now on, the generations are these."""
        assert stored.info is not None
        if self.live and not self._is_ours(stored):
            self._forget()
        known = {each.id: each for each in self.live}
        found = {each.id: each for each in stored.generations}
        if self._uncounted and found.keys() >= {self.newest.id}:
            # Before a generation that was the newest is left, too.
            self._store.add_count(stored.info.epoch, self.newest, self._uncounted)
            found[self.newest.id].count += self._uncounted
        self._uncounted = 0
        self._info = stored.info
        self._keep(gone=[each for each in self.live if each.id not in found])
        for each in stored.generations:
            if each.id in known:
                known[each.id].count = each.count
                known[each.id].open_until = each.open_until
        self.live = [known.get(each.id, each) for each in stored.generations]
        self.newest = self.live[-1]
        self.older = self.live[-2::-1]
        self._mirror()
        most = max(each.geometry.num_hashes for each in [*self.kept, *self.live])
        self.locate = make_hasher(bytes.fromhex(stored.info.salt), most)
        self._plan_to_tell()
        self._changed()

    def _mirror(self) -> None:
        """Give a mirror to each new generation, as long as there is room for it."""
        asked = [*self.kept, *self.live]
        used = sum(each.geometry.nbytes for each in asked if each.mirror is not None)
        for each in reversed(self.live):
            nbytes = each.geometry.nbytes
            fits = used + nbytes <= MAX_MIRROR_BYTES
            if each.mirror is None and self._with_mirror and fits:
                used += nbytes
                each.mirror = BloomFilter.over(
                    memoryview(mmap.mmap(-1, nbytes)),
                    each.geometry,
                    capacity=each.capacity,
                    error_rate=each.error_rate,
                    salt=bytes.fromhex(self._info.salt),
                )
                each.complete = bytearray(each.geometry.num_blocks)
        self.mirrors = [each.mirror for each in reversed(asked) if each.mirror is not None]

    def begin_run(self) -> None:
        """Keep what is recorded from now on, also when it expires."""
        self._first = self.newest.number if self.live else 1
        self._begun_at = self.now()

    def _keep(self, gone: Iterable[RedisGeneration]) -> None:
        self.kept += [
            each
            for each in gone
            if each.mirror is not None and self._policy.is_kept(each, self._first, self._begun_at)
        ]

    def _forget(self) -> None:
        self.live, self.older, self.kept, self.mirrors = [], [], [], []
        self.voided += 1
        self._uncounted = 0
        self._first = min(self._first, 1)  # all of a new filter is recorded in this run, if in any

    def clear(self, *, and_wait: float = 0.0) -> None:
        """Remove the filter, for all crawlers; `join` begins a new one.

        Args:
            and_wait: seconds to wait then, and the others for as long again: only we can begin the
                new one in that time.
        """
        if and_wait:
            self._patience.wait_until(self._store.lock.take)
        self._info = self._new_info()
        self._store.redefine(self._info)
        self._store.remove_left_over(self._store.read())
        self._forget()
        if and_wait:
            time.sleep(and_wait)
            self._store.lock.release(after=and_wait)

    @property
    def epoch(self) -> str:
        """Of the filter that is used now."""
        return self._info.epoch

    def set_aside(self, stored: Stored) -> str:
        """Keep the filter under another name, for all crawlers; where it is now, for people."""
        name = self._store.set_aside(stored, self._new_info())
        return f"the key {name!r} of {self._store.server.address}"

    def leave(self) -> None:
        """Leave nothing behind of a filter that was cleared."""
        if not self.live:
            self._store.undefine(self._info)
            self._store.lock.release()

    # How many requests they hold.

    def count(self) -> None:
        """One more was recorded in the newest generation.

        After some of them, tell all crawlers how many were recorded here, and learn what they have.
        """
        self.newest.count += 1
        self._uncounted += 1
        if self._uncounted < self._count_at and time.monotonic() < self._tell_at:
            return
        count = self._store.add_count(self._info.epoch, self.newest, self._uncounted)
        self._uncounted = 0
        if count is None:
            self.lost(self.newest)
        else:
            self.newest.count = count
        self._plan_to_tell()

    def tell_counts(self, *, patient: bool = True) -> None:
        """Tell all crawlers how many requests were recorded here and not told yet.

        Args:
            patient: wait out an outage.
        """
        if self.live and self._uncounted:
            self._store.add_count(
                self._info.epoch, self.newest, self._uncounted, patient=patient
            )  # if it is gone, another crawler has removed it at its end: so be it
            self._uncounted = 0

    def learn_counts(self) -> None:
        """Learn at the close what all crawlers have recorded, unless there is an outage."""
        with contextlib.suppress(StorageError):
            stored = self._store.read(patient=False)
            if self._is_ours(stored) and stored.generations:
                self.live = list(stored.generations)

    def _plan_to_tell(self) -> None:
        newest = self.newest
        room = newest.capacity - newest.count
        # Often when it is nearly full: all crawlers shall find that out in time.
        batch = room // 64 if room > 0 else newest.capacity // 256
        # And never many: others may fill that room while we are slow.
        self._count_at = max(1, min(batch, newest.capacity // 500, _LONGEST_BATCH))
        self._tell_at = time.monotonic() + _COUNTS_SECS

    # The next generation.

    def follow(self, ended: RedisGeneration, size: Size, open_until: float) -> None:
        """Go on to the generation after one that is over; make it, unless another crawler does.

        Args:
            ended: the newest as far as we know.
            size: of the next one, if we make it.
            open_until: of the next one; see `Generation`.

        Raises:
            NoRoomError: the server's memory is full.
        """

        def is_followed() -> bool:
            if not self.append(size, open_until):
                self.refresh()
            return self.newest is not ended

        self._patience.wait_until(is_followed)

    def append(self, size: Size, open_until: float) -> bool:
        """Add a generation, unless another crawler is about to; whether the newest is another.

        Raises:
            NoRoomError: the server's memory is full.
        """
        ended = self.newest
        if not self._store.lock.take():
            return False
        try:
            self.refresh()
            if self.newest is not ended:
                return True
            self._published(self._info, size, ended.number + 1, open_until, after=ended)
        finally:
            self._store.lock.release()
        self.refresh()
        return self.newest is not ended

    def _published(
        self,
        info: FilterInfo,
        size: Size,
        number: int,
        open_until: float,
        *,
        after: RedisGeneration | None = None,
        content: BloomFilter | None = None,
        count: int = 0,
    ) -> bool:
        """Make a generation, seal the one before it, and let all know of it."""
        now = self.now()
        new = RedisGeneration(
            number=number,
            id=secrets.token_hex(4),
            geometry=size.geometry,
            capacity=size.capacity,
            error_rate=size.error_rate,
            created_at=now,
            open_until=open_until or self._policy.open_until(now),
            count=count,
        )
        self._store.create(new, content)
        if after is not None:
            # All of it, before the next one is known: who sees that one finds here all that was
            # recorded, and who still records here is told that it is too late.
            self._store.blocks.seal(after)
            self._drop_if_gone(after)
            new.created_at = self.now()  # meanwhile others may have recorded in that one
        if self._store.publish(info.epoch, new):
            if new.count:
                self._store.set_count(info.epoch, new)
            return True
        self._store.discard(new.id, new.num_chunks)
        return False

    def _drop_if_gone(self, sealed: RedisGeneration) -> None:
        """Sealing makes keys, too, if they were removed meanwhile: then nobody knows of them."""
        if sealed.id not in {each.id for each in self._store.read().generations}:
            self._store.discard(sealed.id, sealed.num_chunks)

    def extend(self, open_until: float) -> None:
        """Keep the newest generation open for longer, for all crawlers."""
        self.newest.open_until = open_until
        self._store.rewrite(self._info.epoch, self.newest)

    def expire(self, number: int) -> int:
        """Remove so many of the oldest generations; how many requests were in them."""
        gone = self.live[:number]
        for each in gone:
            self._store.expire(self._info.epoch, each)
        self.refresh()
        return sum(each.count for each in gone)

    # Keys that were lost.

    def lost(self, generation: RedisGeneration, block_hash: int | None = None) -> None:
        """A key is not what we left there: it was evicted, or removed, or all is gone."""
        stored = self._store.read()
        if self._is_lost(stored, generation):
            self._publish_again()
            return
        chunk = None
        if block_hash is not None:
            block = block_of(block_hash, generation.geometry.num_blocks)
            chunk = block // CHUNK_BLOCKS
        if generation.id not in {each.id for each in stored.generations}:
            # Not lost: the filter was cleared, or the generation has expired.
            if chunk is not None:
                self._store.blocks.drop(generation, chunk)
            self.refresh()
            return
        if chunk is not None:
            is_newest = generation.id == stored.generations[-1].id
            self._store.blocks.restore(generation, chunk, sealed=not is_newest)
            if self._queue_is_shared and self._is_lost(self._store.read(), generation):
                # All has gone meanwhile: a key that looks alive would hide that.
                self._store.blocks.drop(generation, chunk)
                self.begin_anew()
                return
            self._tell_of_loss(1)
        if [each.id for each in stored.generations] != [each.id for each in self.live]:
            self._adopt(stored)

    def _is_lost(self, stored: Stored, generation: RedisGeneration) -> bool:
        return self._is_gone(stored) or self._is_behind(stored, generation)

    def _is_ours(self, stored: Stored) -> bool:
        return stored.info is not None and stored.info.epoch == self._info.epoch

    @staticmethod
    def _is_gone(stored: Stored) -> bool:
        """Whether nothing is left, and nobody said that it should be so."""
        return stored.info is None and not stored.was_reset

    def _is_behind(self, stored: Stored, generation: RedisGeneration) -> bool:
        """Whether a crawler that knows fewer generations has written back what was lost."""
        newest = stored.generations[-1].number if stored.generations else 0
        is_live = generation.id in {each.id for each in self.live}
        return self._is_ours(stored) and is_live and generation.number > newest

    def _publish_again(self) -> None:
        """Everything is gone: write back what is known here, unless another was first."""
        if self._queue_is_shared:
            self.begin_anew()
            return
        self._patience.wait_until(self._store.lock.take)
        try:
            self._store.define(self._info)
            stored = self._store.read()
            is_ours = stored.info is None or stored.info.epoch == self._info.epoch
            if is_ours:
                self._write_back()
        finally:
            self._store.lock.release()
        if not is_ours:
            self._forget()
            self.join()
            return
        stored = self._store.read()
        if stored.info is not None and stored.generations:  # not gone again already
            self._adopt(stored)

    def begin_anew(self) -> None:
        """Drop all that is known here, and take part in what is there, however old it is.

        The queue is as old, or as empty: what is known here may be of requests that are in no
        queue any more.
        """
        self._void = self._void or self.live  # the first, if the server is away in between
        self._forget()
        self.join()

    def _replace_void(self, stored: Stored, *, was_gone: bool) -> None:
        """Tell that all that was known is void, and remove what was recorded on top of it."""
        kept = {each.id for each in stored.generations}
        for each in self._void:
            if each.id in kept:
                continue
            if was_gone:
                self._store.blocks.unlink(each.id, each.num_chunks)
            else:  # it may have been set aside, with all of its keys
                self._store.blocks.unlink_strays(each)
        self._void = []
        if self._is_ours(stored):
            logger.info(
                "%s has been restarted, or replaced by another: from now on, what it says of %s "
                "counts, and no more what this crawl knew of it",
                self._store.server.address,
                self._place,
            )
            return
        logger.warning(
            "%s was lost: flushed, or not saved before a restart. The queue is taken to have been "
            "lost with it: an empty filter was begun, and pages are crawled again, so that none is "
            "left out. Check persistence (appendonly yes) and maxmemory-policy (noeviction)",
            self._place[0].upper() + self._place[1:],
        )

    def _write_back(self) -> None:
        number = 0
        for each in self.live:
            if each.mirror is None:
                each.count = 0
            for chunk in range(each.num_chunks):
                self._store.blocks.restore(each, chunk, sealed=each is not self.newest)
            if not self._store.publish(self._info.epoch, each):
                # Another crawler has gone another way from there.
                self._store.discard(each.id, each.num_chunks)
                break
            self._store.set_count(self._info.epoch, each)
            number += each.num_chunks
        self._uncounted = 0
        self._tell_of_loss(number)

    def _tell_of_loss(self, number: int) -> None:
        self.lost_keys += number
        if time.monotonic() - self._told_of_loss < _TELL_AGAIN_SECS:
            return
        self._told_of_loss = time.monotonic()
        logger.warning(
            "Keys of %s were lost: evicted, flushed, or not saved before a restart. They were made "
            "anew%s; other pages recorded in them may be crawled again. Check maxmemory-policy "
            "(noeviction) and persistence (appendonly yes)",
            self._place,
            " with what this crawl knows of them" if self.mirrors else ", empty",
        )

    # Small helpers.

    def _new_info(self) -> FilterInfo:
        return FilterInfo(
            salt=(self._salt or secrets.token_bytes(SALT_BYTES)).hex(),
            fingerprinter=self._fingerprinter,
            spider=self._spider,
            created_at=self.now(),
        )

    def _check_fingerprinter(self, info: FilterInfo) -> None:
        if info.fingerprinter != self._fingerprinter:
            raise FingerprinterMismatchError(
                f"{self._place} was recorded with REQUEST_FINGERPRINTER_CLASS = "
                f"{info.fingerprinter!r}, and this crawl has {self._fingerprinter!r}: no request "
                "would be found in it; set "
                "REQUEST_FINGERPRINTER_CLASS back, or use another BLOOM_REDIS_KEY"
            )

    def _tell_what_is_joined(self) -> None:
        policy = self._policy
        differences = []
        if self._salt not in {None, bytes.fromhex(self._info.salt)}:
            differences.append("its own salt (BLOOM_SALT is for a new one)")
        capacity = sum(each.capacity for each in self.live)
        if not policy.window and policy.first().capacity > capacity:
            differences.append(f"room for {capacity:,} requests")
        error_rate = sum(each.error_rate for each in self.live)
        if policy.is_exceeded(error_rate):
            differences.append(f"an error rate of {error_rate:.2g}")
        if bool(policy.window) != bool(self.newest.open_until):
            differences.append("a time window" if self.newest.open_until else "no time window")
        if differences:
            logger.info(
                "This crawl joins %s, which was made with other settings and stays as it is: %s. "
                "The settings count for further generations; all crawlers that share a filter "
                "should have the same",
                self._place,
                ", ".join(differences),
            )

    def now(self) -> float:
        """The time for all crawlers, seconds since 1970; never before the newest generation's."""
        newest = self.live[-1].created_at if self.live else 0.0
        return max(self._clock(), newest)

    def set_clock(self) -> None:
        """Ask the server for the time."""
        # One clock for all: a crawler's own may be wrong. Monotonic time goes on from there.
        self._clock_offset = self._store.server.now() - time.monotonic()

    def _server_clock(self) -> float:
        return time.monotonic() + self._clock_offset

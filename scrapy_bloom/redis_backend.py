"""One filter for many crawlers, in Redis or Valkey."""

import logging
import math
import mmap
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from filelock import FileLock

from scrapy_bloom.directory import filter_files, lock_directory
from scrapy_bloom.exceptions import FingerprinterMismatchError, StorageError
from scrapy_bloom.filters import BloomFilter
from scrapy_bloom.generations import Policy, Size
from scrapy_bloom.hashing import SALT_BYTES, block_of, make_hasher
from scrapy_bloom.importing import SeenFile, import_seen
from scrapy_bloom.job import Job
from scrapy_bloom.redis_server import RedisServer
from scrapy_bloom.redis_store import (
    ALIVE,
    CHUNK_BLOCKS,
    SEALED,
    FilterInfo,
    NoRoomError,
    RedisGeneration,
    RedisStore,
    Stored,
)
from scrapy_bloom.sizing import choose_geometry
from scrapy_bloom.status import FilterStatus, GenerationStatus

logger = logging.getLogger(__name__)

MAX_MIRROR_BYTES = 1 << 30  # of all generations together; what is beyond is asked for each time

_POLL_SECS = 0.02  # while another crawler makes the next generation
_PATIENCE_SECS = 120.0  # until it must be there: its lock ends after 30
_LONGEST_BATCH = 1000  # requests counted here before all are told
_TELL_AGAIN_SECS = 600.0  # of lost keys
_MOST_CHANGES = 100  # of the generations, while one fingerprint is recorded


class RedisBackend:
    """A Bloom filter that many crawlers share.

    What is recorded here is kept in a mirror in memory, too: bits only ever go from 0 to 1, so
    what the mirror knows needs no question. All else is one atomic command to the server.

    Args:
        server: the connection.
        key: the name of the filter's hash, and the beginning of the names of its blocks' keys.
        capacity: requests that all crawlers together are expected to record.
        error_rate: the highest false-positive rate, over all generations.
        on_full: "grow" by a further generation, or stay as it is: "warn", "close".
        window_secs: how long a request is remembered, 0: for ever.
        salt: 16 bytes for a new filter; None: random.
        fingerprinter: import path of what makes the fingerprints.
        spider: the spider's name, kept with the filter for information.
        mirror: whether to keep one: as much memory as the filter takes, up to 1 GiB.
        flush: remove the filter at the close.
        job: the crawl's job directory, with a queue that must fit the filter.
        clock: seconds since 1970, for tests; None: the server's.
    """

    def __init__(
        self,
        server: RedisServer,
        key: str,
        *,
        capacity: int,
        error_rate: float,
        on_full: str = "grow",
        window_secs: float = 0.0,
        salt: bytes | None = None,
        fingerprinter: str = "",
        spider: str = "",
        mirror: bool = True,
        flush: bool = False,
        job: Job | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._policy = Policy(
            expected=capacity, error_rate=error_rate, on_full=on_full, window=window_secs
        )
        self._server = server
        self._store = RedisStore(server, key)
        self._salt = salt
        self._fingerprinter = fingerprinter
        self._spider = spider
        self._with_mirror = mirror
        self._flush = flush
        self._job = job or Job(None, "keep")
        self._lock: FileLock | None = None
        self._clock = clock or self._server_clock
        self._clock_offset = 0.0
        self._info: FilterInfo
        self._newest: RedisGeneration
        self._live: list[RedisGeneration] = []
        self._older: list[RedisGeneration] = []
        self._mirrors: list[BloomFilter] = []
        self._uncounted = 0  # recorded here, and not told the others yet
        self._count_at: float = math.inf  # with so many of them, tell
        self._grow_at: float = math.inf  # at this count, a new request needs a new generation
        self._due: float = math.inf  # at this time, a generation ends or expires
        self._no_room = False
        self._errors = self._expired = self._mirror_hits = self._lost_keys = 0
        self._told_of_loss = -math.inf

    def open(self) -> None:
        """Connect, and join the filter or create it.

        Raises:
            StorageError: or one of its children: the server is out of reach or refuses, the key
                holds something else, or the filter is of another fingerprinter; the job is in use
                by another crawl, or was killed and shall be looked at.
            SeenFileError: the job's requests.seen cannot be imported.
        """
        if self._job.path is not None:
            self._lock = lock_directory(self._job.path / "bloom")
        try:
            self._open()
        except BaseException:
            self._unlock()
            raise

    def _open(self) -> None:
        if policy := self._server.eviction_policy():
            logger.warning(
                "%s removes keys when its memory is full (maxmemory-policy %s): the filter would "
                "forget, and pages be crawled again; set it to noeviction",
                self._server.address,
                policy,
            )
        importable = self._job.importable()
        stored = self._store.read()
        there = stored.info is not None and bool(stored.generations)
        if self._job.was_killed(stored.info.created_at if stored.info and there else None):
            count = sum(each.count for each in stored.generations) if there else None
            if self._job.recover(
                f"the job with the filter {self._store.key!r}" if there else None,
                count,
                lambda: [self._set_aside(stored)] if there else [],
            ):
                importable = None
        self._join(importable, tell=True)

    def _set_aside(self, stored: Stored) -> str:
        name = self._store.set_aside(stored, self._new_info())
        return f"the key {name!r} of {self._server.address}"

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def begin(self) -> None:
        """The crawl begins: mark the job as in use."""
        self._job.begin()
        if self._live and self._newest.open_until and not self._policy.window:
            # There is no window any more: what is recorded now shall not end with the quarter.
            self._append(self._policy.first(), 0.0)

    def add(self, fingerprint: bytes) -> bool:
        """Record a fingerprint; True if it was new, to all crawlers.

        A fingerprint whose first answer got lost counts as new: it may be crawled twice, but
        would otherwise never be.

        Raises:
            TypeError: fingerprint is not bytes.
            OutageError: the server is out of reach.
            StorageError: it refuses.
        """
        if not self._live:
            self._join()
        if self._policy.window and self._clock() >= self._due:
            self._turn()
        block_hash, positions = self._locate(fingerprint)
        for mirror in self._mirrors:
            if mirror.has_hashed(block_hash, positions):
                self._mirror_hits += 1
                return False
        retries = self._server.retries
        new = self._recorded(fingerprint, block_hash, positions)
        if not new and self._server.retries == retries:
            return False
        self._newest.count += 1
        self._uncounted += 1
        if self._uncounted >= self._count_at:
            self._tell_count()
        return True

    def __contains__(self, fingerprint: bytes) -> bool:
        if not self._live:
            self._join()
        if self._policy.window and self._clock() >= self._due:
            self._turn()
        block_hash, positions = self._locate(fingerprint)
        for mirror in self._mirrors:
            if mirror.has_hashed(block_hash, positions):
                self._mirror_hits += 1
                return True
        return self._is_recorded(fingerprint, block_hash, positions, set())

    def clear(self) -> None:
        """Remove the filter, for all crawlers; the next request begins a new one."""
        self._info = self._new_info()
        self._store.redefine(self._info)
        self._store.remove_left_over(self._store.read())
        self._forget()

    def close(self) -> None:
        """Tell the last counts, and close the connection.

        Raises:
            StorageError: the server could not be told.
        """
        try:
            if self._live and self._uncounted:
                self._tell_count()
            if self._flush and self._live:
                self.clear()
            if not self._live:
                self._store.undefine(self._info)
        finally:
            self._server.close()
            # Scrapy has closed the queue, and it fits what was recorded.
            self._job.end()
            self._unlock()

    def status(self) -> FilterStatus:
        """The filter's figures now; what others recorded a moment ago may not be counted yet."""
        return FilterStatus(
            location=f"{self._server.address}, key {self._store.key}",
            generations=[GenerationStatus.of(each) for each in self._live or self._planned()],
            error_rate=max(self._policy.error_rate, sum(each.error_rate for each in self._live)),
            errors=self._errors,
            expired=self._expired,
            more={
                "redis/round_trips": self._server.round_trips,
                "redis/mirror_hits": self._mirror_hits,
                "redis/retries": self._server.retries,
                "redis/lost_keys": self._lost_keys,
            },
        )

    # Recording and asking.

    def _recorded(self, fingerprint: bytes, block_hash: int, positions: list[int]) -> bool:
        """Set the bits where they belong; False if they were set before."""
        # Generations that were sealed when our bits were set there: these bits tell nothing.
        ours: set[str] = set()
        for _ in range(_MOST_CHANGES):
            live, newest = self._live, self._newest
            if newest.count >= self._grow_at:
                if self._is_recorded(fingerprint, block_hash, positions, ours):
                    return False
                self._grow()
            elif self._older and self._is_in_older(block_hash, positions, ours):
                return False
            if self._live is live:
                new = self._recorded_in(newest, block_hash, positions)
                if new is not None:
                    return new
                ours.add(newest.id)
            # Other generations, and perhaps another salt.
            block_hash, positions = self._locate(fingerprint)
        raise self._changing()

    def _recorded_in(
        self, newest: RedisGeneration, block_hash: int, positions: list[int]
    ) -> bool | None:
        """Set the bits in the newest generation; None if another one has become the newest."""
        own = positions[: newest.geometry.num_hashes]
        new, marks = self._store.record(newest, block_hash, own)
        if marks == SEALED:
            if not new:
                return False
            self._follow(newest)
        elif marks != ALIVE:
            self._lost(newest, block_hash)
        if self._newest is not newest:
            return None
        if newest.mirror is not None:
            newest.mirror.add_hashed(block_hash, own)
        return new

    def _is_recorded(
        self, fingerprint: bytes, block_hash: int, positions: list[int], ours: set[str]
    ) -> bool:
        for _ in range(_MOST_CHANGES):
            live, newest = self._live, self._newest
            if self._is_in_older(block_hash, positions, ours):
                return True
            if self._live is live:
                own = positions[: newest.geometry.num_hashes]
                seen, marks = self._store.look(newest, block_hash, own)
                if marks == SEALED and not seen:
                    self._refresh()
                elif marks not in {ALIVE, SEALED}:
                    self._lost(newest, block_hash)
                if self._newest is newest:
                    return seen
            block_hash, positions = self._locate(fingerprint)
        raise self._changing()

    def _is_in_older(self, block_hash: int, positions: list[int], ours: set[str]) -> bool:
        """Whether a generation before the newest has it; False too if they turn out to change."""
        live = self._live
        for each in self._older:
            if each.id in ours:
                continue
            own = positions[: each.geometry.num_hashes]
            block = block_of(block_hash, each.geometry.num_blocks)
            marks = ALIVE
            if each.mirror is None:
                seen, marks = self._store.look(each, block_hash, own)
            else:
                if not each.complete[block]:
                    # It is sealed, so what is there now is all there will ever be.
                    data, marks = self._store.fetch(each, block)
                    each.mirror.add_blocks(block, data)
                    each.complete[block] = 1
                seen = each.mirror.has_hashed(block_hash, own)
            if marks not in {ALIVE, SEALED}:
                self._lost(each, block_hash)
                if self._live is not live:
                    return False
            if seen:
                return True
        return False

    def _changing(self) -> StorageError:
        return StorageError(
            f"{self._server.address}: the generations of {self._store.key!r} change all the time"
        )

    def _tell_count(self) -> None:
        newest, number = self._newest, self._uncounted
        self._uncounted = 0
        count = self._store.add_count(self._info.epoch, newest, number)
        if count is None:
            self._lost(newest)
        else:
            newest.count = count
        self._plan_counting()

    def _plan_counting(self) -> None:
        newest = self._newest
        room = newest.capacity - newest.count
        # Often when it is nearly full: all crawlers shall find that out in time.
        batch = room // 64 if room > 0 else newest.capacity // 256
        self._count_at = max(1, min(batch, _LONGEST_BATCH))

    # Which generations there are.

    def _join(self, importable: Path | None = None, *, tell: bool = False) -> None:
        """Take part in the filter; create what is missing of it.

        Args:
            importable: a requests.seen that a new filter shall begin with.
            tell: log how the filter differs from the settings.
        """
        self._set_clock()
        stored = self._store.read()
        if stored.info is None:
            self._tell_of_a_local_one()
            self._store.define(self._new_info())
            stored = self._store.read()
        assert stored.info is not None
        self._check_fingerprinter(stored.info)
        if stored.left_over or stored.drafts:
            self._store.remove_left_over(stored)
        created = False
        end = time.monotonic() + _PATIENCE_SECS
        while not stored.generations:
            if self._store.lock():
                try:
                    self._create_first(stored.info, importable)
                    created = True
                except NoRoomError as error:
                    raise StorageError(
                        f"{self._server.address}: {error}; give it more, or lower "
                        "BLOOM_EXPECTED_REQUESTS"
                    ) from error
                finally:
                    self._store.unlock()
            elif time.monotonic() > end:
                raise StorageError(
                    f"{self._server.address}: another crawler did not finish making the filter "
                    f"{self._store.key!r}; remove the key {self._store.key}:lock and start again"
                )
            else:
                time.sleep(_POLL_SECS)
            stored = self._store.read()
            if stored.info is None:
                raise StorageError(
                    f"{self._server.address}: the filter {self._store.key!r} was removed while it "
                    "was being made; start again"
                )
        self._adopt(stored)
        if tell and not created:
            self._tell_what_is_joined()

    def _create_first(self, info: FilterInfo, importable: Path | None) -> None:
        if importable is None:
            self._published(info, self._policy.first(), 1, 0.0)
            return
        try:
            seen = SeenFile(importable)
        except OSError as error:
            raise StorageError(f"{importable} cannot be read: {error.strerror or error}") from error
        size = self._policy.first(at_least=seen.count())
        content = BloomFilter(size.capacity, size.error_rate, salt=bytes.fromhex(info.salt))
        count = import_seen(seen, content)
        self._published(info, size, 1, 0.0, content=content, count=count)

    def _adopt(self, stored: Stored) -> None:
        """From now on, the generations are these."""
        assert stored.info is not None
        known = {each.id: each for each in self._live}
        found = {each.id: each for each in stored.generations}
        if self._uncounted and found.keys() >= {self._newest.id}:
            # Before a generation that was the newest is left, too.
            self._store.add_count(stored.info.epoch, self._newest, self._uncounted)
            found[self._newest.id].count += self._uncounted
        self._uncounted = 0
        self._info = stored.info
        for each in stored.generations:
            if each.id in known:
                known[each.id].count = each.count
        self._live = [known.get(each.id, each) for each in stored.generations]
        self._newest = newest = self._live[-1]
        self._older = self._live[-2::-1]
        self._mirror()
        most = max(each.geometry.num_hashes for each in self._live)
        self._locate = make_hasher(bytes.fromhex(stored.info.salt), most)
        growing = self._policy.on_full == "grow" or self._policy.was_raised(self._live)
        self._grow_at = newest.capacity if growing else math.inf
        self._plan_counting()
        if self._policy.window:
            self._due = min(self._ends(newest), self._policy.next_expiry(self._live))

    def _mirror(self) -> None:
        """Give a mirror to each new generation, as long as there is room for it."""
        used = sum(each.geometry.nbytes for each in self._live if each.mirror is not None)
        for each in reversed(self._live):
            nbytes = each.geometry.nbytes
            if each.mirror is None and self._with_mirror and used + nbytes <= MAX_MIRROR_BYTES:
                used += nbytes
                each.mirror = BloomFilter.over(
                    memoryview(mmap.mmap(-1, nbytes)),
                    each.geometry,
                    capacity=each.capacity,
                    error_rate=each.error_rate,
                    salt=bytes.fromhex(self._info.salt),
                )
                each.complete = bytearray(each.geometry.num_blocks)
        self._mirrors = [each.mirror for each in reversed(self._live) if each.mirror is not None]

    def _forget(self) -> None:
        self._live, self._older, self._mirrors = [], [], []
        self._uncounted = 0

    def _refresh(self) -> None:
        """Look at the generations that there are, and take part in these."""
        stored = self._store.read()
        if stored.info is not None and stored.generations:
            self._adopt(stored)
        elif stored.info is not None and stored.info.epoch != self._info.epoch:
            self._forget()
            self._join()  # it was cleared
        else:
            self._publish_again()

    def _follow(self, sealed: RedisGeneration) -> None:
        """Go on to the generation after a sealed one, and make it if nobody does."""
        end = time.monotonic() + _PATIENCE_SECS
        while True:
            self._refresh()
            if self._newest is not sealed:
                return
            if self._append(self._policy.next(self._live), sealed.open_until):
                return
            if time.monotonic() > end:
                raise StorageError(
                    f"{self._server.address}: another crawler sealed generation {sealed.number} of "
                    f"the filter {self._store.key!r}, and there is no next one"
                )
            time.sleep(_POLL_SECS)

    def _append(self, size: Size, open_until: float) -> bool:
        """Add a generation, unless another crawler is about to; whether the newest is another.

        Raises:
            NoRoomError: the server's memory is full.
        """
        ended = self._newest
        if not self._store.lock():
            return False
        try:
            self._refresh()
            if self._newest is not ended:
                return True
            self._published(self._info, size, ended.number + 1, open_until, after=ended)
        finally:
            self._store.unlock()
        self._refresh()
        self._no_room = False
        return self._newest is not ended

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
        now = self._now()
        new = RedisGeneration(
            number=number,
            id=secrets.token_hex(4),
            geometry=choose_geometry(size.capacity, size.error_rate),
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
            self._store.seal(after)
        if self._store.publish(info.epoch, new):
            if count:
                self._store.set_count(info.epoch, new)
            return True
        self._store.discard(new.id, new.num_chunks)
        return False

    # Growing, turning, expiring.

    def _grow(self) -> None:
        full = self._newest
        size = self._policy.next(self._live)
        try:
            if not self._append(size, full.open_until):
                # Another crawler is making it; it may be that it dies of it.
                self._grow_at = full.count + max(1, full.capacity // 100)
                return
        except NoRoomError as error:
            self._grow_at = full.count + max(1, full.capacity // 20)
            self._cannot_grow(
                "The crawl goes on with the full filter, its error rate rises, and growing is "
                "tried again after some more requests",
                error,
            )
            return
        if self._newest.number == full.number + 1:
            logger.info(
                "The filter is full with %s requests and goes on in generation %d, with room for "
                "%s more at error rate %.2g, in %s bytes",
                f"{sum(each.count for each in self._live):,}",
                self._newest.number,
                f"{self._newest.capacity:,}",
                self._newest.error_rate,
                f"{self._newest.geometry.nbytes:,}",
            )

    def _turn(self) -> None:
        """End what has ended: go on to a new quarter, and let old generations expire."""
        now = self._now()
        if now >= self._ends(self._newest):
            self._rotate(now)
        if number := self._policy.expired(self._live, now):
            self._expire(number)
        self._due = min(self._due_after(now), self._policy.next_expiry(self._live))

    def _due_after(self, now: float) -> float:
        ends = self._ends(self._newest)
        # Not over yet only because another crawler is making the next one, or there is no room.
        return ends if ends > now else now + self._policy.window / 100

    def _ends(self, generation: RedisGeneration) -> float:
        """When a generation is over; the window may have been changed since it was made."""
        own = self._policy.open_until(generation.created_at) or math.inf
        return min(generation.open_until or math.inf, own)

    def _rotate(self, now: float) -> None:
        ended = self._newest
        self._set_clock()
        in_quarter = sum(g.count for g in self._live if g.open_until == ended.open_until)
        try:
            rotated = self._append(self._policy.first(in_quarter), self._policy.open_until(now))
        except NoRoomError as error:
            self._cannot_grow("Requests are remembered for longer than BLOOM_WINDOW_SECS", error)
            return
        if rotated:
            logger.info(
                "A quarter of the time window is over: generation %d takes what is new, generation "
                "%d with %s requests counts until it expires",
                self._newest.number,
                ended.number,
                f"{ended.count:,}",
            )

    def _expire(self, number: int) -> None:
        gone = self._live[:number]
        for each in gone:
            self._store.expire(self._info.epoch, each)
        self._refresh()
        count = sum(each.count for each in gone)
        self._expired += count
        logger.info(
            "%s requests recorded more than %g seconds ago are forgotten: generation %s expired",
            f"{count:,}",
            self._policy.window,
            ", ".join(str(each.number) for each in gone),
        )

    def _cannot_grow(self, consequence: str, error: Exception) -> None:
        self._errors += 1
        if not self._no_room:
            self._no_room = True
            logger.error("No room for a new generation: %s. %s", error, consequence)

    # Keys that were lost.

    def _lost(self, generation: RedisGeneration, block_hash: int | None = None) -> None:
        """A key is not what we left there: it was evicted, or removed, or all is gone."""
        stored = self._store.read()
        if stored.info is None or self._is_behind(stored, generation):
            self._publish_again()
            return
        chunk = None
        if block_hash is not None:
            chunk = block_of(block_hash, generation.geometry.num_blocks) // CHUNK_BLOCKS
        if generation.id not in {each.id for each in stored.generations}:
            # Not lost: the filter was cleared, or the generation has expired.
            if chunk is not None:
                self._store.drop(generation, chunk)
            self._refresh()
            return
        if chunk is not None:
            is_newest = generation.id == stored.generations[-1].id
            self._store.restore(generation, chunk, sealed=not is_newest)
            self._tell_of_loss(1)
        if [each.id for each in stored.generations] != [each.id for each in self._live]:
            self._adopt(stored)

    def _is_behind(self, stored: Stored, generation: RedisGeneration) -> bool:
        """Whether a crawler that knows fewer generations has written back what was lost."""
        assert stored.info is not None
        newest = stored.generations[-1].number if stored.generations else 0
        return stored.info.epoch == self._info.epoch and generation.number > newest

    def _publish_again(self) -> None:
        """Everything is gone: write back what is known here, unless another was first."""
        self._store.define(self._info)
        stored = self._store.read()
        if stored.info is not None and stored.info.epoch != self._info.epoch:
            self._forget()
            self._join()
            return
        for each in self._live:
            for chunk in range(each.num_chunks):
                self._store.restore(each, chunk, sealed=each is not self._newest)
            if self._store.publish(self._info.epoch, each):
                self._store.set_count(self._info.epoch, each)
        self._uncounted = 0
        self._tell_of_loss(sum(each.num_chunks for each in self._live))
        stored = self._store.read()
        if stored.info is not None and stored.generations:  # not gone again already
            self._adopt(stored)

    def _tell_of_loss(self, number: int) -> None:
        self._lost_keys += number
        if time.monotonic() - self._told_of_loss < _TELL_AGAIN_SECS:
            return
        self._told_of_loss = time.monotonic()
        logger.warning(
            "%s has lost keys of the filter %s: evicted, flushed, or not saved before a restart. "
            "They were made anew%s; pages recorded in them by others may be crawled again. Check "
            "maxmemory-policy (noeviction) and persistence (appendonly yes)",
            self._server.address,
            self._store.key,
            " with what this crawl knows of them" if self._with_mirror else ", empty",
        )

    # Small helpers.

    def _new_info(self) -> FilterInfo:
        return FilterInfo(
            salt=(self._salt or secrets.token_bytes(SALT_BYTES)).hex(),
            fingerprinter=self._fingerprinter,
            spider=self._spider,
            created_at=self._now(),
        )

    def _check_fingerprinter(self, info: FilterInfo) -> None:
        if info.fingerprinter != self._fingerprinter:
            raise FingerprinterMismatchError(
                f"the filter {self._store.key!r} in {self._server.address} was recorded with "
                f"REQUEST_FINGERPRINTER_CLASS = {info.fingerprinter!r}, and this crawl has "
                f"{self._fingerprinter!r}: no request would be found in it; set "
                "REQUEST_FINGERPRINTER_CLASS back, or use another BLOOM_REDIS_KEY"
            )

    def _planned(self) -> Sequence[RedisGeneration]:
        """What the next request would create."""
        size = self._policy.first()
        return [
            RedisGeneration(
                number=1,
                id="",
                geometry=choose_geometry(size.capacity, size.error_rate),
                capacity=size.capacity,
                error_rate=size.error_rate,
                created_at=0.0,
            )
        ]

    def _tell_of_a_local_one(self) -> None:
        if self._job.path is not None and filter_files(path := self._job.path / "bloom"):
            logger.warning(
                '%s holds a filter that is not used, since BLOOM_BACKEND is "redis": what it '
                "recorded is crawled again. To go on with it, upload it first, as docs/scaling.md "
                "says",
                path,
            )

    def _tell_what_is_joined(self) -> None:
        policy = self._policy
        differences = []
        if self._salt not in {None, bytes.fromhex(self._info.salt)}:
            differences.append("its own salt (BLOOM_SALT is for a new one)")
        capacity = sum(each.capacity for each in self._live)
        if not policy.window and policy.first().capacity > capacity:
            differences.append(f"room for {capacity:,} requests")
        error_rate = sum(each.error_rate for each in self._live)
        if error_rate > policy.error_rate:
            differences.append(f"an error rate of {error_rate:.2g}")
        if bool(policy.window) != bool(self._newest.open_until):
            differences.append("a time window" if self._newest.open_until else "no time window")
        if differences:
            logger.info(
                "The filter %s in %s was made with other settings and stays as it is: %s. This "
                "crawl's settings count for further generations; all crawlers that share a filter "
                "should have the same",
                self._store.key,
                self._server.address,
                ", ".join(differences),
            )

    def _now(self) -> float:
        newest = self._live[-1].created_at if self._live else 0.0
        return max(self._clock(), newest)

    def _set_clock(self) -> None:
        # One clock for all: a crawler's own may be wrong. Monotonic time goes on from there.
        self._clock_offset = self._server.now() - time.monotonic()

    def _server_clock(self) -> float:
        return time.monotonic() + self._clock_offset

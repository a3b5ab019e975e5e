"""One filter for many crawlers, in Redis or Valkey."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from filelock import FileLock

from scrapy_bloom.directory import filter_files, lock_directory
from scrapy_bloom.exceptions import OutageError, StorageError
from scrapy_bloom.generations import Policy, Size
from scrapy_bloom.hashing import block_of
from scrapy_bloom.job import Job
from scrapy_bloom.redis_generations import SharedGenerations
from scrapy_bloom.redis_meta import RedisGeneration, Stored
from scrapy_bloom.redis_server import RedisServer
from scrapy_bloom.redis_store import ALIVE, SEALED, NoRoomError, RedisStore
from scrapy_bloom.status import FilterStatus, GenerationStatus

logger = logging.getLogger(__name__)

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
        counting: whether requests can be forgotten: four times the space, and no mirror.
        salt: 16 bytes for a new filter; None: random.
        fingerprinter: import path of what makes the fingerprints.
        spider: the spider's name, kept with the filter for information.
        mirror: whether to keep one: as much memory as the filter takes, up to 1 GiB.
        flush: remove the filter at the close.
        job: the crawl's job directory, with a queue that must fit the filter.
        trust_secs: how long the mirror is trusted without a word from the server.
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
        counting: bool = False,
        salt: bytes | None = None,
        fingerprinter: str = "",
        spider: str = "",
        mirror: bool = True,
        flush: bool = False,
        job: Job | None = None,
        trust_secs: float = 1.0,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._trust_secs = trust_secs
        self._policy = Policy(
            expected=capacity,
            error_rate=error_rate,
            on_full=on_full,
            window=window_secs,
            counting=counting,
        )
        self._server = server
        self._store = RedisStore(server, key)
        self._shared = SharedGenerations(
            self._store,
            self._policy,
            salt=salt,
            fingerprinter=fingerprinter,
            spider=spider,
            mirror=mirror,
            clock=clock,
            changed=self._changed,
        )
        self._flush = flush
        self._job = job or Job(None, "keep")
        self._lock: FileLock | None = None
        self._grow_at: float = math.inf  # at this count, a new request needs a new generation
        self._due: float = math.inf  # at this time, a generation ends or expires
        self._no_room = self._begun = False
        self._epoch = ""
        self._confirm_at = 0.0  # on a monotonic clock
        self._errors = self._expired = self._mirror_hits = 0

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
        if not there:
            self._tell_of_a_local_one()
        if self._job.was_killed(stored.info.created_at if stored.info and there else None):
            importable = self._after_a_kill(stored, importable)
        self._shared.join(importable, tell=True)

    def _after_a_kill(self, stored: Stored, importable: Path | None) -> Path | None:
        """Deal with a job that was killed; what is still to be imported."""
        if stored.info is not None and stored.generations:
            if not self._job.used(stored.info.epoch):
                self._job.drop_queue()
                return None
            is_away = self._job.recover(
                f"the job with the filter {self._store.key!r}",
                sum(each.count for each in stored.generations),
                lambda: [self._set_aside(stored)],
            )
        else:
            is_away = self._job.recover(None, None, list)
        return None if is_away else importable

    def _set_aside(self, stored: Stored) -> str:
        name = self._shared.set_aside(stored)
        time.sleep(self._trust_secs)  # as in clear()
        return name

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def begin(self) -> None:
        """The crawl begins: mark the job as in use."""
        self._begun = True
        self._job.begin(self._shared.epoch)
        if self._shared.live and self._shared.newest.open_until and not self._policy.window:
            # There is no window any more: what is recorded now shall not end with the quarter.
            self._shared.append(self._policy.first(), 0.0)
        elif self._shared.live and (size := self._policy.other_kind(self._shared.live)):
            self._begin_to_count(size)

    def add(self, fingerprint: bytes) -> bool:
        """Record a fingerprint; True if it was new, to all crawlers.

        A fingerprint whose first answer got lost counts as new: it may be crawled twice, but
        would otherwise never be.

        Raises:
            TypeError: fingerprint is not bytes.
            OutageError: the server is out of reach.
            StorageError: it refuses.
        """
        hashed = self._unless_known(fingerprint)
        if hashed is None:
            return False
        retries = self._server.retries
        new = self._recorded(fingerprint, *hashed)
        self._confirm_at = time.monotonic() + self._trust_secs
        if not new and self._server.retries == retries:
            return False
        self._shared.count()
        return True

    def discard(self, fingerprint: bytes) -> bool:
        """Forget a fingerprint; see `Backend.discard`.

        Raises:
            OutageError: the server is out of reach.
            StorageError: it refuses.
        """
        if not self._shared.live:
            self._shared.join()
        block_hash, positions = self._shared.locate(fingerprint)
        holders = [
            each
            for each in self._shared.live
            if self._store.look(each, block_hash, positions[: each.geometry.num_hashes])[0]
        ]
        if len(holders) != 1 or not holders[0].geometry.is_counting:
            return False  # if several have it, one of them errs, and which one can't be told
        (holder,) = holders
        retries = self._server.retries
        own = positions[: holder.geometry.num_hashes]
        if not self._store.forget(holder, block_hash, own) and self._server.retries == retries:
            return False  # another crawler was faster
        self._shared.uncount(holder)
        return True

    def __contains__(self, fingerprint: bytes) -> bool:
        hashed = self._unless_known(fingerprint)
        return hashed is None or self._is_recorded(fingerprint, *hashed, set())

    def clear(self) -> None:
        """Remove the filter, for all crawlers; the next request begins a new one.

        It takes a second, until none of the others trusts its mirror of the old one any more: a
        request that they answered from it afterwards would be lost.
        """
        self._shared.clear()
        time.sleep(self._trust_secs)

    def close(self) -> None:
        """Tell the last counts, and close the connection.

        Raises:
            StorageError: the server could not be told.
        """
        try:
            if self._flush and self._shared.live:
                self._shared.clear()
            self._shared.leave()
        finally:
            # Scrapy has closed the queue, and it fits what was recorded.
            self._job.end()
            self._unlock()
            self._server.close()

    def status(self) -> FilterStatus:
        """The filter's figures now; what others recorded a moment ago may not be counted yet."""
        live = self._shared.live or self._planned()
        counting = any(each.geometry.is_counting for each in live)
        return FilterStatus(
            location=f"{self._server.address}, key {self._store.key}",
            generations=[GenerationStatus.of(each) for each in live],
            error_rate=max(
                self._policy.error_rate, sum(each.error_rate for each in self._shared.live)
            ),
            errors=self._errors,
            expired=self._expired,
            saturated=self._store.saturated if counting else None,
            more={
                "redis/round_trips": self._server.round_trips,
                "redis/mirror_hits": self._mirror_hits,
                "redis/retries": self._server.retries,
                "redis/lost_keys": self._shared.lost_keys,
            },
        )

    def _planned(self) -> Sequence[RedisGeneration]:
        """What the next request would create."""
        size = self._policy.first()
        return [
            RedisGeneration(
                number=1,
                id="",
                geometry=size.geometry,
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

    # Recording and asking.

    def _unless_known(self, fingerprint: bytes) -> tuple[int, list[int]] | None:
        """A fingerprint's block hash and positions; None if a mirror has it.

        Brings the generations up to date before.
        """
        try:
            if not self._shared.live:
                self._shared.join()
            if self._policy.window and self._shared.now() >= self._due:
                self._turn()
        except OutageError:
            # What is known needs no server.
            if self._shared.live and self._is_in_a_mirror(*self._shared.locate(fingerprint)):
                self._mirror_hits += 1
                return None
            raise
        hashed = self._shared.locate(fingerprint)
        if self._is_in_a_mirror(*hashed):
            live = self._shared.live
            if time.monotonic() >= self._confirm_at:
                self._confirm(*hashed)
                if self._shared.live is not live:
                    hashed = self._shared.locate(fingerprint)
                    if not self._is_in_a_mirror(*hashed):
                        return hashed
            self._mirror_hits += 1
            return None
        return hashed

    def _is_in_a_mirror(self, block_hash: int, positions: list[int]) -> bool:
        for mirror in self._shared.mirrors:  # noqa: SIM110 - any() takes half as long again
            if mirror.has_hashed(block_hash, positions):
                return True
        return False

    def _confirm(self, block_hash: int, positions: list[int]) -> None:
        """Every now and then: is it still the filter that the mirrors are of?"""
        begun = time.monotonic()
        self._confirm_at = begun + self._trust_secs
        newest = self._shared.newest
        own = positions[: newest.geometry.num_hashes]
        try:
            _, marks = self._store.look(newest, block_hash, own, patient=False)
            if marks == SEALED:
                self._shared.refresh()
            elif marks != ALIVE:
                self._shared.lost(newest, block_hash)
        except OutageError:
            # What is new will wait for the server, and tell. Here, each attempt may take long.
            now = time.monotonic()
            self._confirm_at = now + max(self._trust_secs, 10 * (now - begun))

    def _recorded(self, fingerprint: bytes, block_hash: int, positions: list[int]) -> bool:
        """Set the bits where they belong; False if they were set before."""
        # Sealed generations that did not have it: bits that were set there since tell nothing,
        # be they our own or of another crawler that came too late.
        done: set[str] = set()
        for _ in range(_MOST_CHANGES):
            live, newest = self._shared.live, self._shared.newest
            if newest.count >= self._grow_at:
                if self._is_recorded(fingerprint, block_hash, positions, done):
                    return False
                if self._shared.newest is newest:  # else another crawler has just made the next
                    self._grow()
            elif self._shared.older and self._is_in_older(block_hash, positions, done):
                return False
            if self._shared.live is live:
                new = self._recorded_in(newest, block_hash, positions)
                if new is not None:
                    return new
                done.add(newest.id)
            # Other generations, and perhaps another salt.
            block_hash, positions = self._shared.locate(fingerprint)
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
            size = self._policy.next(self._shared.live)
            self._shared.follow(newest, size, newest.open_until)
        elif marks != ALIVE:
            self._shared.lost(newest, block_hash)
        if self._shared.newest is not newest:
            return None
        if newest.mirror is not None:
            newest.mirror.add_hashed(block_hash, own)
        return new

    def _is_recorded(
        self, fingerprint: bytes, block_hash: int, positions: list[int], done: set[str]
    ) -> bool:
        for _ in range(_MOST_CHANGES):
            live, newest = self._shared.live, self._shared.newest
            if self._is_in_older(block_hash, positions, done):
                return True
            if self._shared.live is live:
                own = positions[: newest.geometry.num_hashes]
                seen, marks = self._store.look(newest, block_hash, own)
                if marks == SEALED and not seen:
                    self._shared.refresh()
                elif marks not in {ALIVE, SEALED}:
                    self._shared.lost(newest, block_hash)
                if self._shared.newest is newest:
                    return seen
            block_hash, positions = self._shared.locate(fingerprint)
        raise self._changing()

    def _is_in_older(self, block_hash: int, positions: list[int], done: set[str]) -> bool:
        """Whether a generation before the newest has it; False too if they turn out to change."""
        live = self._shared.live
        for each in self._shared.older:
            if each.id in done:
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
                self._shared.lost(each, block_hash)
                if self._shared.live is not live:
                    return False
            if seen:
                return True
            # It was sealed before we asked: what others set there since tells nothing, either.
            done.add(each.id)
        return False

    def _changing(self) -> StorageError:
        return StorageError(
            f"{self._server.address}: the generations of {self._store.key!r} change all the time"
        )

    # Growing, turning, expiring.

    def _changed(self) -> None:
        """The generations are others than before."""
        live, newest = self._shared.live, self._shared.newest
        if self._begun and self._epoch != self._shared.epoch:
            self._job.begin(self._shared.epoch)
        self._epoch = self._shared.epoch
        growing = self._policy.on_full == "grow" or self._policy.was_raised(live)
        self._grow_at = newest.capacity if growing else math.inf
        if self._policy.window:
            self._due = min(self._ends(newest), self._policy.next_expiry(live))

    def _grow(self) -> None:
        full = self._shared.newest
        size = self._policy.next(self._shared.live)
        try:
            if not self._shared.append(size, full.open_until):
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
        self._no_room = False
        if self._shared.newest.number == full.number + 1:
            logger.info(
                "The filter is full with %s requests and goes on in generation %d, with room for "
                "%s more at error rate %.2g, in %s bytes",
                f"{sum(each.count for each in self._shared.live):,}",
                self._shared.newest.number,
                f"{self._shared.newest.capacity:,}",
                self._shared.newest.error_rate,
                f"{self._shared.newest.geometry.nbytes:,}",
            )

    def _begin_to_count(self, size: Size) -> None:
        plain = self._shared.newest
        try:
            self._shared.follow(plain, size, plain.open_until)
        except NoRoomError as error:
            self._cannot_grow("Requests cannot be forgotten", error)
            return
        logger.info(
            "BLOOM_COUNTING: from now on, requests are recorded in generation %d, in %s bytes, and "
            "can be forgotten; the %s recorded before cannot",
            self._shared.newest.number,
            f"{self._shared.newest.geometry.nbytes:,}",
            f"{plain.count:,}",
        )

    def _turn(self) -> None:
        """End what has ended: go on to a new quarter, and let old generations expire."""
        now, ended = self._shared.now(), None
        # Again, if what another crawler has made meanwhile has ended, too.
        while self._shared.newest is not ended and now >= self._ends(self._shared.newest):
            ended = self._shared.newest
            self._rotate(ended, now)
        if number := self._policy.expired(self._shared.live, now):
            self._expire(number)

    def _ends(self, generation: RedisGeneration) -> float:
        """When a generation is over; the window may have been changed since it was made."""
        own = self._policy.open_until(generation.created_at)
        return min(generation.open_until or own, own)

    def _rotate(self, ended: RedisGeneration, now: float) -> None:
        self._shared.set_clock()
        live = self._shared.live
        size = self._policy.first(sum(g.count for g in live if g.open_until == ended.open_until))
        try:
            self._shared.follow(ended, size, self._policy.open_until(now))
        except NoRoomError as error:
            # What is recorded in it from now on shall not expire with its quarter.
            self._shared.extend(self._policy.open_until(now))
            self._due = now + self._policy.window / 100
            self._cannot_grow("Requests are remembered for longer than BLOOM_WINDOW_SECS", error)
            return
        self._no_room = False
        logger.info(
            "A quarter of the time window is over: generation %d takes what is new, generation %d "
            "with %s requests counts until it expires",
            self._shared.newest.number,
            ended.number,
            f"{ended.count:,}",
        )

    def _expire(self, number: int) -> None:
        gone = ", ".join(str(each.number) for each in self._shared.live[:number])
        count = self._shared.expire(number)
        self._expired += count
        logger.info(
            "%s requests recorded more than %g seconds ago are forgotten: generation %s expired",
            f"{count:,}",
            self._policy.window,
            gone,
        )

    def _cannot_grow(self, consequence: str, error: Exception) -> None:
        self._errors += 1
        if not self._no_room:
            self._no_room = True
            logger.error("No room for a new generation: %s. %s", error, consequence)

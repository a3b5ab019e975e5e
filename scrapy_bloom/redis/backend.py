"""One filter for many crawlers, in Redis or Valkey."""

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.generations.backoff import next_attempt
from scrapy_bloom.generations.forgotten import Forgotten
from scrapy_bloom.generations.lifecycle import LifeCycle, NoRoomError
from scrapy_bloom.generations.policy import ANY_ORIGIN, Origin, Policy
from scrapy_bloom.generations.status import FilterStatus
from scrapy_bloom.job.paths import filter_files
from scrapy_bloom.job.recovery import Job
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.forgotten import RedisForgotten
from scrapy_bloom.redis.generations import SharedGenerations
from scrapy_bloom.redis.keys.meta import FilterInfo, RedisGeneration, Stored
from scrapy_bloom.redis.keys.store import RedisStore
from scrapy_bloom.redis.lookup import SharedLookup
from scrapy_bloom.redis.view import log_differences
from scrapy_bloom.text import escaped

logger = logging.getLogger(__name__)


class RedisBackend:
    """A Bloom filter that many crawlers share.

    What is recorded here is kept in a mirror in memory, too: bits only ever go from 0 to 1, so
    what the mirror knows needs no question. All else is one atomic command to the server.

    Args:
        server: the connection.
        key: the name of the filter's hash, and the beginning of the names of its blocks' keys.
        policy, origin, claims: see `LocalBackend`; the policy is for all crawlers together.
        mirror: whether to keep one: as much memory as the filter takes, up to 1 GiB.
        queue_is_shared: the crawlers' queue is in Redis, too. If the server loses something, the
            queue has lost as much: nothing is written back, and the mirror is void. Without it, the
            queue has survived, and the mirror is right.
        flush: remove the filter at the close.
        job: the crawl's job directory, with a queue that must fit the filter.
        trust_secs: how long the mirror is trusted without a word from the server.
        clock: seconds since 1970, for tests; None: the server's.

    Attributes:
        collected: where `add` puts what is new, for whoever calls `record` later; None: it records.
    """

    def __init__(
        self,
        server: RedisServer,
        key: str,
        policy: Policy,
        origin: Origin = ANY_ORIGIN,
        *,
        mirror: bool = True,
        queue_is_shared: bool = False,
        flush: bool = False,
        job: Job | None = None,
        claims: bool = False,
        trust_secs: float = 1.0,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._trust_secs = trust_secs
        self._policy = policy
        self._origin = origin = replace(origin, error_rate=policy.error_rate)
        self.server = server
        self.key = key
        self.flush = flush
        self._store = RedisStore(server, key)
        self.collected: list[bytes] | None = None
        self._shared = SharedGenerations(
            self._store,
            policy,
            origin,
            mirror=mirror,
            queue_is_shared=queue_is_shared,
            clock=clock,
            changed=self._changed,
        )
        self._job = job or Job()
        self._last_status: FilterStatus | None = None
        self._idle_again = 0.0  # on a monotonic clock
        self._forgotten = RedisForgotten(server, key, "", self._shared.now, claims=claims)
        self.forgotten = Forgotten(self._forgotten)
        self._life = LifeCycle(policy, self._shared, self.forgotten)
        self._lookup = SharedLookup(self._shared, self._life, trust_secs)

    def open(self) -> None:
        """Connect, and join the filter, or create it.

        Raises:
            StorageError: or one of its children: the server is out of reach or refuses, the key
                holds something else, or another fingerprinter's filter; the job is in use, or was
                killed and shall be looked at.
            SeenFileError: the job's requests.seen cannot be imported.
        """
        if policy := self.server.eviction_policy():
            logger.warning(
                "%s removes keys when its memory is full (maxmemory-policy %s): the filter would "
                "forget, and pages be crawled again; set it to noeviction",
                self.server.address,
                escaped(policy),
            )
        is_new = self._shared.join(self._prepare_job())
        view = self._shared.view
        if not is_new:
            log_differences(view, self._policy, self._origin, self._store.name)
        # What the server refuses is better known now than at the first request.
        self._store.blocks.look(view.newest, view.locate(b""))

    def _prepare_job(self) -> Path | None:
        """Deal with a job that was killed; return the requests.seen for a new filter."""
        job, stored = self._job, self._store.read()
        info = stored.info if stored.generations else None
        importable, count = job.importable(), sum(each.count for each in stored.generations)
        if info is None and job.path is not None and filter_files(path := job.path / "bloom"):
            logger.warning(
                '%s holds a filter that is not used, since BLOOM_BACKEND is "redis": what it '
                "recorded is crawled again. To go on with it, upload it first, as docs/scaling.md "
                "says",
                path,
            )
        if not job.was_killed(has_filter=info is not None):
            return importable
        if info is None:
            is_away = job.recover(None, None, list)
        elif job.used(info.epoch):
            what = f"the job with the filter {self._store.key!r}"
            is_away = job.recover(what, count, lambda: [self._set_aside(stored)])
        else:
            job.drop_queue()
            is_away = True
        return None if is_away else importable

    def _set_aside(self, stored: Stored) -> str:
        """Keep the filter under another name, for all crawlers; where it is now, for people."""
        new = FilterInfo.of(self._origin, self.server.now())
        name = self._store.set_aside(stored, new)
        time.sleep(self._trust_secs)  # as in clear()
        return f"the key {name!r} of {self.server.address}"

    def begin(self) -> None:
        """Begin the crawl: note that the job is in use."""
        self._job.begin(self._shared.view.info.epoch)
        newest = self._shared.live[-1] if self._shared.live else None
        if newest is not None and newest.open_until and not self._life.has_window:
            # There is no window any more: what is recorded now shall not end with the quarter.
            try:
                self._shared.append(self._policy.first(), self._shared.now(), 0.0)
            except NoRoomError as error:
                self._shared.extend(0.0)
                self._life.log_cannot_turn(error)
        self._shared.begin_run()

    def _changed(self) -> None:
        """Note that the list of generations has changed."""
        try:
            self._job.goes_on_with(self._shared.view.info.epoch)
        finally:  # also if the disk is full
            self._life.plan()
            self._enter_epoch()

    def _enter_epoch(self) -> None:
        """Go on to the forgotten requests of another filter, if it is another one."""
        epoch = self._shared.view.info.epoch
        if self._forgotten.epoch != epoch:
            self._forgotten.enter(epoch)
            self.forgotten.open()

    def add(self, fingerprint: bytes) -> bool:
        """Record a fingerprint; True if it was new, to all crawlers; raises StorageError.

        A fingerprint whose first answer got lost counts as new: rather crawled twice than never.
        """
        if self.collected is not None and fingerprint not in self:
            self.collected.append(fingerprint)
            return True
        return self.record(fingerprint)

    def record(self, fingerprint: bytes) -> bool:
        """Record a fingerprint at once; see `add`."""
        if self._lookup.add(fingerprint):
            self.forgotten.take(fingerprint)  # new it is anyway, and once
            return True
        if not self.forgotten.take(fingerprint):
            return False
        if self._policy.window:
            self._lookup.record_anew(fingerprint)
        return True

    def add_many(self, fingerprints: Sequence[bytes]) -> int:
        """Record fingerprints, many with one round trip; return how many were surely new."""
        forgotten = {each for each in fingerprints if each in self.forgotten}
        added = self._lookup.add_many([each for each in fingerprints if each not in forgotten])
        return added + sum(map(self.add, forgotten))

    def __contains__(self, fingerprint: bytes) -> bool:
        return fingerprint in self._lookup and fingerprint not in self.forgotten

    def keeps_newest(self) -> bool:
        """See `Backend`."""
        live = self._shared.live
        return not self._policy.window or not live or self._shared.run.keeps(live[-1])

    @property
    def unconfirmed(self) -> int:
        """Return how many answers came from the mirror since the server's last word."""
        return self._lookup.unconfirmed

    @property
    def voided(self) -> int:
        """Return how often unconfirmed answers of the mirror turned out to be void."""
        return self._shared.voided

    def confirm(self) -> None:
        """Ask the server whether the unconfirmed answers were right; raises StorageError."""
        self._lookup.confirm()

    def clear(self) -> None:
        """Remove the filter, for all crawlers; the next request begins a new one.

        It takes a second: then no other crawler trusts its mirror of the old filter any more. A
        request that a mirror answered after the removal would be lost. Meanwhile, and for a second
        more, nobody can record in the new filter: the caller empties its queue then. What others
        had recorded and queued before that would look seen, and be nowhere.
        """
        self._shared.clear(and_wait=self._trust_secs)
        self._enter_epoch()

    def close(self) -> None:
        """Exchange the last counts with the other crawlers, and disconnect; raises StorageError."""
        self.server.hurry()
        try:
            self._shared.tell_count()
            self._shared.learn_counts()
            self._last_status = self.status()
            if self.flush and self._shared.live:
                self._shared.clear()
            elif self._shared.live:
                self.forgotten.close()
            if not self._shared.live:  # cleared: nothing stays behind
                self._store.undefine(self._shared.view.info)
                self._store.lock.release()
        finally:
            try:
                # Scrapy has closed the queue, and it fits what was recorded.
                self._job.end()
            except OSError as error:
                raise StorageError(
                    f"{self._job.path} could not be written to the disk: "
                    f"{error.strerror or error}; the next run will take it for not closed"
                ) from error
            finally:
                self.server.close()

    def idle(self) -> None:
        """Tell the other crawlers the counts while there is nothing to do: one may be closing."""
        begun = time.monotonic()
        if begun < self._idle_again:
            return
        with contextlib.suppress(StorageError):  # they are told at the close
            self._shared.tell_count(patient=False)
        self._idle_again = next_attempt(begun)

    def status(self) -> FilterStatus:
        """Return the filter's figures now; those of the close, once it is closed.

        What others recorded a moment ago may not be counted yet.
        """
        if self._last_status is not None:
            return self._last_status
        # Without any: what the next request would create.
        live = self._shared.live or [RedisGeneration.of(self._policy.first(), 1, 0.0)]
        return self._life.status(
            f"{self.server.address}, key {escaped(self._store.key)}",
            live,
            more={
                "redis/round_trips": self.server.round_trips,
                "redis/mirror_hits": self._lookup.mirror_hits,
                "redis/retries": self.server.retries,
                "redis/lost_keys": self._shared.recovery.lost_keys,
            },
        )

"""The backend for a filter in Redis or Valkey that many crawlers share."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from scrapy_bloom.exceptions import OutageError, StorageError
from scrapy_bloom.generations.backend import FilterStatus
from scrapy_bloom.generations.forgotten import Forgotten
from scrapy_bloom.generations.lifecycle import LifeCycle, NoRoomError
from scrapy_bloom.generations.policy import ANY_ORIGIN, Origin, Policy
from scrapy_bloom.job.paths import SET_ASIDE, filter_files
from scrapy_bloom.job.recovery import Damage, Job
from scrapy_bloom.redis.connection.server import RedisServer, next_attempt
from scrapy_bloom.redis.filter import (
    NEW,
    LostKeysError,
    OtherFilterError,
    SharedFilter,
    WentBackError,
)
from scrapy_bloom.redis.forgotten import RedisForgotten
from scrapy_bloom.redis.stored import RedisGeneration, Stored
from scrapy_bloom.text import counted, escaped

logger = logging.getLogger(__name__)

_AT_ONCE = 64  # fingerprints recorded by one script, so that it takes less than 5 ms
MOST_LOSSES = 100  # in a row
_MOST_UNCONFIRMED = 1000  # answers of the mirrors since the last reply of the server


class RedisBackend:
    """A Bloom filter in Redis that many crawlers share.

    Mirrors in memory hold the bits known to be set. Bits only change from 0 to 1, so a fingerprint
    that a mirror has is a duplicate, without asking the server. Otherwise one script looks the
    fingerprint up and records it.

    Args:
        server: the connection.
        key: the name of the filter's hash, and part of the names of its other keys.
        policy: the size of the filter, and when it grows and expires, for all crawlers together.
        origin: the fingerprinter, the spider and the salt.
        mirror: whether to mirror the bits, which takes as much memory as the filter, up to 1 GiB.
        flush: whether to remove the filter at the close.
        job: the crawl's job directory, whose queue must fit the filter.
        trust_secs: how long the mirrors are trusted without a reply of the server.
        clock: returns seconds since 1970, for tests; None: the server's clock.
        shards: how many shards the filter has, of which this object is one.

    Attributes:
        parts: this backend alone; a `ShardedBackend` has several.
        filter: the access to the stored filter, with its mirrors.
        collect: called by `add` instead of the server, if a shared queue records fingerprints.
        unconfirmed: how many answers came from the mirrors since the last reply of the server.
        losses: how often the server was found to have lost the filter or changes of it.
    """

    def __init__(
        self,
        server: RedisServer,
        key: str,
        policy: Policy,
        origin: Origin = ANY_ORIGIN,
        *,
        mirror: bool = True,
        flush: bool = False,
        job: Job | None = None,
        trust_secs: float = 1.0,
        clock: Callable[[], float] | None = None,
        shards: int = 1,
    ) -> None:
        self.parts: Sequence[RedisBackend] = [self]
        self.server = server
        self.key = key
        self.flush = flush
        self.collect: Callable[[bytes], bool] | None = None
        self.unconfirmed = self.losses = 0
        self._mirror_hits = 0
        self._policy = policy
        self._origin = replace(origin, error_rate=policy.error_rate)
        self._job = job or Job()
        self._trust_secs = trust_secs
        self._confirm_at = 0.0  # on a monotonic clock
        self._last_status: FilterStatus | None = None
        self.filter = SharedFilter(
            server,
            key,
            policy,
            self._origin,
            mirror=mirror,
            changed=self._changed,
            clock=clock,
            shards=shards,
        )
        self._forgotten = RedisForgotten(server, key, "")
        self.forgotten = Forgotten(self._forgotten)
        self.life = LifeCycle(policy, self.filter, self.forgotten)

    def open(self) -> None:
        """Connect, and join the filter, or create it.

        Raises:
            StorageError: or one of its children: the server is unreachable or refuses; the key is
                not a filter, or a filter of another fingerprinter; the job is in use, or was killed
                and BLOOM_ON_UNCLEAN_SHUTDOWN is "stop".
            SeenFileError: the job's requests.seen cannot be imported.
        """
        self.warn_of_eviction()
        if not self.filter.join(self._prepare_job()):
            self.log_differences()
        self.confirm()  # so that a refusal of the server is reported now, not at the first request

    def join(self) -> None:
        """Join the filter again, or create it; raises StorageError."""
        self.filter.join()

    def warn_of_eviction(self) -> None:
        """Warn if the server may evict keys of the filter."""
        if policy := self.server.eviction_policy():
            logger.warning(
                "%s evicts keys when its memory is full (maxmemory-policy %s), so the filter may "
                "be lost, and its requests crawled again. Set maxmemory-policy to noeviction",
                self.server.address,
                escaped(policy),
            )

    def _prepare_job(self) -> Path | None:
        """Recover a job that was killed; return the requests.seen for a new filter, or None."""
        job, stored = self._job, self.filter.read()
        if stored is None and job.path is not None and filter_files(path := job.path / "bloom"):
            logger.warning(
                '%s holds a filter that this crawl does not use, because BLOOM_BACKEND is "redis", '
                "so its requests are crawled again. To use the filter, copy it to the server with "
                "`scrapy bloom push` before the crawl",
                path,
            )
        importable = job.importable()
        if not job.was_killed(has_filter=stored is not None):
            return importable
        if stored is None:
            end = job.unclean_end(None, None)
        elif job.may_have_used(stored.id):
            count = sum(each.count for each in stored.generations)
            end = job.unclean_end(f"the job with the filter {self.key!r}", count)
        else:
            end = job.unclean_end(None, None, Damage.LOST_UNRECORDED)
        starts_over = job.starts_over(end)
        moved = job.set_queue_aside()
        if starts_over and stored is not None:
            moved.append(self._set_aside(stored))
        job.log_recovery(end, moved, starts_over=starts_over)
        if not starts_over and end.damage is Damage.LOST_QUEUE:
            return importable
        job.end()
        return None

    def _set_aside(self, stored: Stored) -> str:
        """Rename the filter, for all crawlers; return a description of its new place."""
        name = f"{{{self.key}}}{SET_ASIDE}{time.strftime('%Y%m%d-%H%M%S')}-{stored.id}"
        self.server.transaction(("RENAME", self.key, name), ("UNLINK", *self.filter.keys[1:]))
        return f"the key {name!r} of {self.server.address}"

    def log_differences(self) -> None:
        """Log how an existing filter differs from the settings of this crawl."""
        live, differences = self.filter.live, []
        if self._origin.salt not in {None, bytes.fromhex(self.filter.info.salt)}:
            differences.append("its own salt (BLOOM_SALT is for a new one)")
        capacity = sum(each.capacity for each in live)
        if not self._policy.window and self._policy.first().capacity > capacity:
            differences.append(f"room for {counted(capacity, 'request')}")
        error_rate = sum(each.error_rate for each in live)
        if self._policy.is_exceeded(error_rate):
            differences.append(f"an error rate of {error_rate:.2g}")
        if bool(self._policy.window) != bool(live[-1].open_until):
            differences.append("a time window" if live[-1].open_until else "no time window")
        if differences:
            logger.info(
                "This crawl joins %s, which was created with other settings and keeps them: %s. "
                "The settings of this crawl apply to new generations only; give all crawlers that "
                "share a filter the same settings",
                self.filter.name,
                ", ".join(differences),
            )

    def begin(self) -> None:
        """Begin the crawl: mark the job as in use."""
        self._job.begin(self.filter.id)
        newest = self.filter.live[-1]
        if newest.open_until and not self.life.has_window:
            # The window was removed from the settings, so requests recorded now must not expire.
            try:
                self.filter.append(self._policy.first(), self.filter.now(), 0.0)
            except NoRoomError as error:
                self.filter.extend(0.0)
                self.life.log_cannot_turn(error)

    def _changed(self) -> None:
        """Update the plans after a change of the generations."""
        try:
            self._job.change_filter(self.filter.id)
        finally:  # also if the disk is full
            self.life.plan()
            if self._forgotten.filter_id != self.filter.id:
                self._forgotten.filter_id = self.filter.id
                self.forgotten.open()

    def add(self, fingerprint: bytes) -> bool:
        """Record a fingerprint; return whether it was new to all crawlers; raises StorageError.

        If the first reply was lost, the fingerprint counts as new, so that its request is crawled
        again rather than skipped.
        """
        if self.collect is not None:
            return self.collect(fingerprint)
        retries = self.server.retries
        if self.is_known(fingerprint):
            return False
        answer = self._exchange([fingerprint], "n")
        return answer in NEW or self.server.retries > retries

    def add_many(self, fingerprints: Sequence[bytes]) -> int:
        """Record fingerprints, many per round trip; return how many were certainly new."""
        self.confirm()
        added, start = 0, 0
        while start < len(fingerprints):
            batch, losses = fingerprints[start : start + _AT_ONCE], self.losses
            unknown = [each for each in batch if not self.filter.knows(each) or self._is_back(each)]
            # In steps of 1 % of the capacity, so that the newest generation is not overfilled.
            few = max(1, self.filter.live[-1].capacity // 100)
            for first in range(0, len(unknown), few):
                answers = self._exchange(unknown[first : first + few], "n")
                added += sum(answer in NEW for answer in answers)
            if self.losses == losses:  # otherwise the mirrors were wrong, and the batch is repeated
                start += _AT_ONCE
        return added

    def __contains__(self, fingerprint: bytes) -> bool:
        if self.collect is not None:
            return not self.collect(fingerprint)
        return self.is_known(fingerprint) or self._exchange([fingerprint], "?") not in NEW

    def _exchange(self, fingerprints: Sequence[bytes], kind: str) -> str:
        """Send a batch to the server; if it has lost the filter, start over with an empty filter.

        A reply confirms all earlier answers of the mirrors.
        """
        for _ in range(MOST_LOSSES):
            try:
                if not self.filter.live:
                    self.filter.join()
                self.keep_up()
                answers = self.filter.exchange(fingerprints, kind)
            except OtherFilterError as error:
                self.start_over(error)
                continue
            self._confirm_at = time.monotonic() + self._trust_secs
            self.unconfirmed = 0
            return answers
        raise StorageError(
            f"the server loses {self.filter.name} again and again; check its memory and its "
            "maxmemory-policy, and start the crawl again"
        )

    def keep_up(self) -> None:
        """Add a generation or end a quarter of the window, if that is due."""
        life = self.life
        if life.has_window and self.filter.now() >= life.due_at:
            life.turn()
        if life.is_full():
            life.grow()

    def start_over(self, error: OtherFilterError) -> None:
        """Continue after the server has lost the filter, or a part or changes of it."""
        if self.filter.live:
            self.losses += 1
            name = self.filter.name[0].upper() + self.filter.name[1:]
            if isinstance(error, WentBackError):
                logger.warning(
                    "%s has lost its latest changes, for example after a failover or a restore "
                    "from a snapshot. The requests that were lost are crawled again",
                    name,
                )
            else:
                logger.warning(
                    "%s was lost: removed, flushed, evicted, or not saved before a restart. The "
                    "crawl starts over with an empty filter; check persistence (appendonly yes) "
                    "and maxmemory-policy (noeviction)",
                    name,
                )
        if isinstance(error, WentBackError):
            self.filter.drop_mirrors()
        elif isinstance(error, LostKeysError):
            self.filter.clear()
            self.filter.join()
        else:
            self.filter.join()

    def knows(self, fingerprint: bytes) -> bool:
        """Return whether a mirror has a fingerprint that is not forgotten, without the server."""
        is_known = self.filter.knows(fingerprint) and not self._is_back(fingerprint)
        self._mirror_hits += is_known
        return is_known

    def is_known(self, fingerprint: bytes) -> bool:
        """Return the result of `knows`, which the server has to confirm from time to time."""
        if not self.knows(fingerprint):
            return False
        self.unconfirmed += 1
        begun = time.monotonic()
        is_due = begun >= self._confirm_at or (
            self.life.has_window and self.filter.now() >= self.life.due_at
        )
        if not is_due and self.unconfirmed <= _MOST_UNCONFIRMED:
            return True
        try:
            self.confirm()
        except OutageError:
            if self.unconfirmed > _MOST_UNCONFIRMED:
                raise
            # A duplicate needs no server. The next new request will wait for it, or fail.
            self._confirm_at = next_attempt(begun, self._trust_secs)
        # The filter may have been lost meanwhile, or the fingerprint has expired.
        return self.filter.knows(fingerprint)

    def _is_back(self, fingerprint: bytes) -> bool:
        return self.forgotten.may_have(fingerprint)

    def confirm(self) -> None:
        """Have the server confirm the answers of the mirrors; raises StorageError."""
        self._exchange([], "n")

    def clear(self) -> None:
        """Remove the filter, for all crawlers; the next request creates a new filter."""
        self.filter.clear()

    def close(self) -> None:
        """Disconnect, and with `flush` remove the filter; raises StorageError."""
        self.server.shorten_deadline()
        try:
            if self.filter.live:
                with suppress(StorageError):
                    self.filter.refresh()  # for the counts of other crawlers
            self._last_status = self.status()
            if self.flush:
                self.filter.remove(only_unused=True)
            else:
                with suppress(StorageError):  # otherwise the field is removed after a week
                    self.filter.leave()
        finally:
            try:
                # Scrapy has closed the queue, which fits the filter.
                self._job.end()
            except OSError as error:
                raise StorageError(
                    f"{self._job.path} could not be written to the disk: "
                    f"{error.strerror or error}; the next run will treat this run as killed"
                ) from error
            finally:
                self.server.close()

    def status(self) -> FilterStatus:
        """Return the filter's current figures; after `close`, the last figures."""
        if self._last_status is not None:
            return self._last_status
        # Without a filter: the generation that the next request would create.
        live = self.filter.live or [RedisGeneration.of(self._policy.first(), 1, 0.0)]
        return self.life.status(
            f"{self.server.address}, key {escaped(self.key)}",
            live,
            more={
                "redis/round_trips": self.server.round_trips,
                "redis/mirror_hits": self._mirror_hits,
                "redis/retries": self.server.retries,
            },
        )

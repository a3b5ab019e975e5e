"""One filter for many crawlers, in Redis or Valkey."""

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

_AT_ONCE = 64  # fingerprints recorded by one script: in less than 5 ms
MOST_LOSSES = 100  # in a row
_MOST_UNCONFIRMED = 1000  # answers of the mirrors since the server's last word


class RedisBackend:
    """A Bloom filter that many crawlers share.

    What is recorded is kept in mirrors in memory, too: bits only ever go from 0 to 1, so what a
    mirror knows needs no question. All else is one script on the server.

    Args:
        server: the connection.
        key: the name of the filter's hash, and part of the names of its other keys.
        policy: how large the filter is, and when it grows and expires; for all crawlers together.
        origin: what the filter holds, and whose.
        mirror: whether to keep one: as much memory as the filter takes, up to 1 GiB.
        flush: remove the filter at the close.
        job: the crawl's job directory, with a queue that must fit the filter.
        trust_secs: how long the mirror is trusted without a word from the server.
        clock: seconds since 1970, for tests; None: the server's.
        shards: how many filters there are of this kind, of which this is one.

    Attributes:
        parts: this backend alone; a `ShardedBackend` has several.
        filter: its generations and mirrors.
        collect: what `add` calls in place of the server, if a shared queue records fingerprints.
        unconfirmed: how many answers came from the mirrors since the server's last word.
        voided: how often the server turned out to have lost the filter.
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
        self.unconfirmed = self.voided = 0
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
            StorageError: or one of its children: the server is out of reach or refuses, the key
                holds something else, or another fingerprinter's filter; the job is in use, or was
                killed and shall be looked at.
            SeenFileError: the job's requests.seen cannot be imported.
        """
        self.warn_of_eviction()
        if not self.filter.join(self._prepare_job()):
            self.log_differences()
        self.confirm()  # what the server refuses is better known now than at the first request

    def join(self) -> None:
        """Take part in the filter again, or create it; raises StorageError."""
        self.filter.join()

    def warn_of_eviction(self) -> None:
        """Warn if the server may remove keys of the filter."""
        if policy := self.server.eviction_policy():
            logger.warning(
                "%s removes keys when its memory is full (maxmemory-policy %s): the filter would "
                "be lost, and pages be crawled again; set it to noeviction",
                self.server.address,
                escaped(policy),
            )

    def _prepare_job(self) -> Path | None:
        """Deal with a job that was killed; return the requests.seen for a new filter."""
        job, stored = self._job, self.filter.read()
        if stored is None and job.path is not None and filter_files(path := job.path / "bloom"):
            logger.warning(
                '%s holds a filter that is not used, since BLOOM_BACKEND is "redis": what it '
                "recorded is crawled again. To use it, copy it to the server first, with scrapy "
                "bloom push",
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
        """Keep the filter under another name, for all crawlers; where it is now, for people."""
        name = f"{{{self.key}}}{SET_ASIDE}{time.strftime('%Y%m%d-%H%M%S')}-{stored.id}"
        self.server.transaction(("RENAME", self.key, name), ("UNLINK", *self.filter.keys[1:]))
        return f"the key {name!r} of {self.server.address}"

    def log_differences(self) -> None:
        """Log how a filter that is there differs from what a crawl's settings ask for."""
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
                "This crawl joins %s, which was made with other settings and stays as it is: %s. "
                "The settings count for further generations; all crawlers that share a filter "
                "should have the same",
                self.filter.name,
                ", ".join(differences),
            )

    def begin(self) -> None:
        """Begin the crawl: mark the job as in use."""
        self._job.begin(self.filter.id)
        newest = self.filter.live[-1]
        if newest.open_until and not self.life.has_window:
            # There is no window any more: what is recorded now shall not end with the quarter.
            try:
                self.filter.append(self._policy.first(), self.filter.now(), 0.0)
            except NoRoomError as error:
                self.filter.extend(0.0)
                self.life.log_cannot_turn(error)

    def _changed(self) -> None:
        """Plan for a list of generations that has changed."""
        try:
            self._job.change_filter(self.filter.id)
        finally:  # also if the disk is full
            self.life.plan()
            if self._forgotten.filter_id != self.filter.id:
                self._forgotten.filter_id = self.filter.id
                self.forgotten.open()

    def add(self, fingerprint: bytes) -> bool:
        """Record a fingerprint; True if it was new, to all crawlers; raises StorageError.

        A fingerprint whose first answer got lost counts as new: rather crawled twice than never.
        """
        if self.collect is not None:
            return self.collect(fingerprint)
        retries = self.server.retries
        if self.is_known(fingerprint):
            return False
        answer = self._exchange([fingerprint], "n")
        return answer in NEW or self.server.retries > retries

    def add_many(self, fingerprints: Sequence[bytes]) -> int:
        """Record fingerprints, many with one round trip; return how many were surely new."""
        self.confirm()
        added, start = 0, 0
        while start < len(fingerprints):
            batch, voided = fingerprints[start : start + _AT_ONCE], self.voided
            unknown = [each for each in batch if not self.filter.knows(each) or self._is_back(each)]
            # So few that the newest generation is hardly fuller than it may be.
            few = max(1, self.filter.live[-1].capacity // 100)
            for first in range(0, len(unknown), few):
                answers = self._exchange(unknown[first : first + few], "n")
                added += sum(answer in NEW for answer in answers)
            if self.voided == voided:  # else the mirrors were wrong
                start += _AT_ONCE
        return added

    def __contains__(self, fingerprint: bytes) -> bool:
        if self.collect is not None:
            return not self.collect(fingerprint)
        return self.is_known(fingerprint) or self._exchange([fingerprint], "?") not in NEW

    def _exchange(self, fingerprints: Sequence[bytes], kind: str) -> str:
        """Exchange a batch with the server; if it has lost the filter, begin an empty one.

        Its answer shows that what the mirrors said until now was right.
        """
        for _ in range(MOST_LOSSES):
            try:
                if not self.filter.live:
                    self.filter.join()
                self.keep_up()
                answers = self.filter.exchange(fingerprints, kind)
            except OtherFilterError as error:
                self.begin_anew(error)
                continue
            self._confirm_at = time.monotonic() + self._trust_secs
            self.unconfirmed = 0
            return answers
        raise StorageError(f"{self.filter.name} is lost each time it is made; start again")

    def keep_up(self) -> None:
        """Let the generations grow and turn, if that is due."""
        life = self.life
        if life.has_window and self.filter.now() >= life.due_at:
            life.turn()
        if life.is_full():
            life.grow()

    def begin_anew(self, error: OtherFilterError) -> None:
        """Drop what is known of a filter that the server has lost, all of it or a part."""
        if self.filter.live:
            self.voided += 1
            name = self.filter.name[0].upper() + self.filter.name[1:]
            if isinstance(error, WentBackError):
                logger.warning(
                    "%s has lost its latest changes, as when a server is restored from a snapshot "
                    "or its replica takes over. What was lost is crawled again, so that no page is "
                    "left out",
                    name,
                )
            else:
                logger.warning(
                    "%s was lost: removed, flushed, evicted, or not saved before a restart. An "
                    "empty filter was begun, and pages are crawled again, so that none is left "
                    "out. Check persistence (appendonly yes) and maxmemory-policy (noeviction)",
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
        """Return whether a mirror has a fingerprint, which is not forgotten; nothing is asked."""
        is_known = self.filter.knows(fingerprint) and not self._is_back(fingerprint)
        self._mirror_hits += is_known
        return is_known

    def is_known(self, fingerprint: bytes) -> bool:
        """Return what `knows` does, and ask from time to time whether the server agrees."""
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
            # What is known needs no server; what is new will wait for it, and tell.
            self._confirm_at = next_attempt(begun, self._trust_secs)
        return self.filter.knows(fingerprint)  # it may have been lost, or expired

    def _is_back(self, fingerprint: bytes) -> bool:
        return self.forgotten.may_have(fingerprint)

    def confirm(self) -> None:
        """Ask the server whether the unconfirmed answers were right; raises StorageError."""
        self._exchange([], "n")

    def clear(self) -> None:
        """Remove the filter, for all crawlers; the next request begins another one."""
        self.filter.clear()

    def close(self) -> None:
        """Disconnect, and remove the filter if that is wanted; raises StorageError."""
        self.server.hurry()
        try:
            if self.filter.live:
                with suppress(StorageError):  # what others have recorded since the last batch
                    self.filter.refresh()
            self._last_status = self.status()
            if self.flush:
                self.filter.remove()
            else:
                with suppress(StorageError):  # after some days, the server forgets it by itself
                    self.filter.leave()
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

    def status(self) -> FilterStatus:
        """Return the filter's figures now; those of the close, once it is closed."""
        if self._last_status is not None:
            return self._last_status
        # Without any: what the next request would create.
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

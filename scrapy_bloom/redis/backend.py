"""The backend for a filter in Redis or Valkey that many crawlers share."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from zlib import crc32

from scrapy_bloom.exceptions import OutageError, StorageError
from scrapy_bloom.generations.forgotten import Forgotten
from scrapy_bloom.generations.lifecycle import NoRoomError
from scrapy_bloom.generations.policy import ANY_ORIGIN, FilterStatus, Origin, Policy, kept_settings
from scrapy_bloom.redis.connection.server import RedisServer, next_attempt
from scrapy_bloom.redis.filter import (
    NEW,
    LostKeysError,
    OtherFilterError,
    SharedFilter,
    WentBackError,
)
from scrapy_bloom.redis.forgotten import RedisForgotten
from scrapy_bloom.redis.making import remove_filter
from scrapy_bloom.redis.scripts import shard_key
from scrapy_bloom.redis.stored import RedisGeneration, summed
from scrapy_bloom.text import escaped

logger = logging.getLogger(__name__)

_AT_ONCE = 64  # fingerprints recorded by one script, so that it takes less than 5 ms
MOST_LOSSES = 100  # in a row
_MOST_UNCONFIRMED = 1000  # answers of the mirrors since the last reply of the server


class RedisBackend:
    """A Bloom filter in Redis that many crawlers share.

    Mirrors in memory hold the bits known to be set. Bits only change from 0 to 1, so a fingerprint
    that a mirror has is a duplicate, without asking the server. Otherwise one script looks the
    fingerprint up and records it.

    For crawls beyond the memory of one master, the filter is split into shards. The batches of a
    shared queue record in them; without such a queue, a filter has one shard.

    Args:
        server: the connection.
        key: the name of the filter's hash, and part of the names of its other keys.
        policy: the size of the filter, and when it grows and expires, for all crawlers together.
        origin: the fingerprinter, the spider and the salt.
        mirror: whether to mirror the bits, which takes as much memory as the filter, up to 1 GiB.
        flush: whether to remove the filter at the close.
        shards: the number of shards.

    Attributes:
        shards: the access to each stored shard, with its mirrors.
        collect: called by `add` instead of the server, if a shared queue records fingerprints.
        unconfirmed: how many answers came from the mirrors since the last reply of the server.
        losses: how often the server was found to have lost the filter or changes of it.
    """

    _trust_secs = 1.0  # how long the mirrors are trusted without a reply of the server

    def __init__(
        self,
        server: RedisServer,
        key: str,
        policy: Policy,
        origin: Origin = ANY_ORIGIN,
        *,
        mirror: bool = True,
        flush: bool = False,
        shards: int = 1,
    ) -> None:
        self.server = server
        self.key = key
        self.flush = flush
        self.collect: Callable[[bytes], bool] | None = None
        self.unconfirmed = self.losses = 0
        self._mirror_hits = 0
        self._policy = replace(policy, expected=share_of(policy.expected, shards))
        self._origin = replace(origin, error_rate=policy.error_rate)
        self._confirm_at = 0.0  # on a monotonic clock
        self._last_status: FilterStatus | None = None
        keys = [shard_key(key, shard) for shard in range(shards)]
        self.forgotten = Forgotten(RedisForgotten(server, keys))
        self.shards = [
            SharedFilter(
                server,
                each,
                self._policy,
                self._origin,
                mirror=mirror,
                shards=shards,
            )
            for each in keys
        ]
        self._first = self.shards[0]

    def open(self) -> None:
        """Connect, and join the filter, or create it.

        Raises:
            StorageError: or one of its children: the server is unreachable or refuses; the key is
                not a filter, or a filter of another fingerprinter.
        """
        self._warn_of_eviction()
        self.join()
        self.forgotten.open()
        self._log_differences()
        self.confirm()  # so that a refusal of the server is reported now, not at the first request

    def join(self) -> None:
        """Join the filter again, or create it; raises StorageError."""
        if join_shards(self.shards):
            self._log_lost_shard()

    def _warn_of_eviction(self) -> None:
        """Warn if the server may evict keys of the filter."""
        if policy := self.server.eviction_policy():
            logger.warning(
                "%s evicts keys when its memory is full (maxmemory-policy %s), so the filter may "
                "be lost, and its requests crawled again. Set maxmemory-policy to noeviction",
                self.server.address,
                escaped(policy),
            )

    def _log_differences(self) -> None:
        """Log how an existing filter differs from the settings of this crawl."""
        shard = self._first
        differences = kept_settings(self._policy, self._origin.salt, shard.live, shard.salt)
        if bool(self._policy.window) != bool(shard.live[-1].open_until):
            has_window = bool(shard.live[-1].open_until)
            differences.append("a time window" if has_window else "no time window")
        if differences:
            logger.info(
                "This crawl joins %s, which was created with other settings and keeps them: %s. "
                "The settings of this crawl apply to new generations only; give all crawlers that "
                "share a filter the same settings",
                shard.name,
                ", ".join(differences),
            )

    def begin(self) -> None:
        """Begin the crawl."""
        for shard in self.shards:
            if shard.live[-1].open_until and not self._policy.window:
                # The window was removed from the settings, so what is recorded now must not expire.
                try:
                    shard.append(self._policy.first(), shard.now(), 0.0)
                except NoRoomError as error:
                    shard.extend(0.0)
                    shard.life.log_cannot_turn(error)

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
        answer = self._exchange([fingerprint])
        return answer in NEW or self.server.retries > retries

    def add_many(self, fingerprints: Sequence[bytes]) -> int:
        """Record fingerprints, many per round trip; return how many were certainly new."""
        added = start = 0
        while start < len(fingerprints):
            # In steps of 1 % of the capacity, so that the newest generation is not overfilled.
            few = min(_AT_ONCE, max(1, self._first.live[-1].capacity // 100))
            answers = self._exchange(fingerprints[start : start + few])
            added += sum(answer in NEW for answer in answers)
            start += few
        return added

    def __contains__(self, fingerprint: bytes) -> bool:
        if self.collect is not None:
            return not self.collect(fingerprint)
        return self.is_known(fingerprint) or self._exchange([fingerprint], records=False) not in NEW

    def _exchange(self, fingerprints: Sequence[bytes], *, records: bool = True) -> str:
        """Send a batch to the server; if it has lost the filter, start over with an empty filter.

        A reply confirms all earlier answers of the mirrors.
        """
        for _ in range(MOST_LOSSES):
            try:
                if not self._first.live:
                    self.join()
                self.keep_up()
                answers = self._first.exchange(fingerprints, records=records)
            except OtherFilterError as error:
                self.start_over(error)
                continue
            self._confirm_at = time.monotonic() + self._trust_secs
            self.unconfirmed = 0
            return answers
        raise StorageError(
            f"the server loses {self._first.name} again and again; check its memory and its "
            "maxmemory-policy, and start the crawl again"
        )

    def keep_up(self) -> None:
        """Add generations or end quarters of the window, if that is due."""
        for each in self.shards:
            each.keep_up()

    def start_over(self, error: OtherFilterError) -> None:
        """Continue after the server has lost the filter, or a part or changes of it."""
        if self._first.live:
            self.losses += 1
            self._log_lost(error)
        if isinstance(error, LostKeysError):
            self.clear()
        self.join()

    def _log_lost(self, error: OtherFilterError) -> None:
        name = self._first.name[0].upper() + self._first.name[1:]
        if len(self.shards) > 1:
            self._log_lost_shard()
        elif isinstance(error, WentBackError):
            logger.warning(
                "%s has lost its latest changes, for example after a failover or a restore from a "
                "snapshot. The requests that were lost are crawled again",
                name,
            )
        else:
            logger.warning(
                "%s was lost: removed, flushed, evicted, or not saved before a restart. The crawl "
                "starts over with an empty filter; check persistence (appendonly yes) and "
                "maxmemory-policy (noeviction)",
                name,
            )

    def _log_lost_shard(self) -> None:
        logger.error(
            "A shard of %s was lost: removed, flushed, evicted, or rolled back by more than a "
            "minute. The others have only parts of the crawl, so all %d shards start over; check "
            "persistence (appendonly yes) and maxmemory-policy (noeviction)",
            self._first.name,
            len(self.shards),
        )

    def knows(self, fingerprint: bytes) -> bool:
        """Return whether a mirror has a fingerprint that is not forgotten, without the server."""
        # This is `shard_of`, inlined because a call would take a tenth of the time.
        shard = self.shards[crc32(fingerprint) % len(self.shards)]
        is_known = shard.knows(fingerprint) and not self.forgotten.may_have(fingerprint)
        self._mirror_hits += is_known
        return is_known

    def is_known(self, fingerprint: bytes) -> bool:
        """Return the result of `knows`, which the server has to confirm from time to time."""
        if not self.knows(fingerprint):
            return False
        self.unconfirmed += 1
        begun = time.monotonic()
        is_due = begun >= self._confirm_at or (
            self._policy.window and self._first.now() >= self._first.life.due_at
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
        return self._first.knows(fingerprint)

    def confirm(self) -> None:
        """Have the server confirm the answers of the mirrors; raises StorageError."""
        self._exchange([])

    def clear(self) -> None:
        """Remove the filter, for all crawlers; the next request creates a new filter.

        Without the first shard, the others are not valid.
        """
        self._first.clear()

    def close(self) -> None:
        """Disconnect, and with `flush` remove the filter; raises StorageError."""
        self.server.shorten_deadline()
        try:
            for each in self.shards:
                if each.live:
                    with suppress(StorageError):
                        each.refresh()  # for the counts of other crawlers
            self._last_status = self.status()
            if self.flush:
                for each in self.shards:  # without the first shard, the others are not valid
                    remove_filter(self.server, each.key, each.id, only_unused=True)
            else:
                with suppress(StorageError):  # otherwise the field is removed after a week
                    self._first.leave()
        finally:
            self.server.close()

    def status(self) -> FilterStatus:
        """Return the filter's current figures; after `close`, the last figures."""
        if self._last_status is not None:
            return self._last_status
        # A shard without a filter has the figures of the one that the next request will create.
        new = RedisGeneration.of(self._policy.first(), 1, 0.0)
        parts = [each.life.status("", each.live or [new]) for each in self.shards]
        return replace(
            parts[0],
            location=f"{self.server.address}, key {escaped(self.key)}",
            generations=summed([each.generations for each in parts]),
            error_rate=max(each.error_rate for each in parts),
            errors=sum(each.errors for each in parts),
            failure=next((each.failure for each in parts if each.failure), ""),
            expired=sum(each.expired for each in parts),
            more={
                "redis/round_trips": self.server.round_trips,
                "redis/mirror_hits": self._mirror_hits,
                "redis/retries": self.server.retries,
            },
        )


def join_shards(shards: Sequence[SharedFilter]) -> bool:
    """Join all shards, or create them.

    All shards have the id of the first shard. If the first shard has the queue of a crawl, all
    shards did exist. If one of them is missing or has another id, the first shard is removed, and
    all shards are created again.

    Args:
        shards: of one filter.

    Returns:
        Whether a shard was lost, so that all shards are new.
    """
    first, *others = shards
    any_lost = False
    while True:
        first.join()
        have_existed = bool(others) and bool(first.server.send("HEXISTS", first.key, "crawl"))
        if all(_is_joined(each, first.id, have_existed=have_existed) for each in others):
            return any_lost
        any_lost = True
        first.clear()


def _is_joined(shard: SharedFilter, filter_id: str, *, have_existed: bool) -> bool:
    try:
        shard.join(new_id=filter_id, creates=not have_existed)
    except OtherFilterError:
        return False
    if shard.id == filter_id or have_existed:
        return shard.id == filter_id
    shard.clear()  # it belongs to an earlier filter
    return _is_joined(shard, filter_id, have_existed=False)


def share_of(expected: int, shards: int) -> int:
    """Return for how many of the expected requests one shard must have room.

    The numbers of requests per shard vary by chance, so four standard deviations are added.

    >>> share_of(1_000_000, 1), share_of(1_000_000, 4)
    (1000000, 252000)
    """
    if shards == 1:
        return expected
    return math.ceil(expected / shards + 4 * math.sqrt(expected / shards))

"""The backend for a filter in Redis or Valkey that many crawlers share."""

import logging
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from scrapy_bloom.exceptions import OutageError, RefusedError, StorageError
from scrapy_bloom.generations.policy import ANY_ORIGIN, FilterStatus, Origin, Policy, kept_settings
from scrapy_bloom.redis.connection.server import RedisServer, next_attempt
from scrapy_bloom.redis.filter import (
    NEW,
    Answers,
    LostKeysError,
    OtherFilterError,
    SharedFilter,
)
from scrapy_bloom.redis.stored import RedisGeneration
from scrapy_bloom.text import escaped

logger = logging.getLogger(__name__)

_AT_ONCE = 32  # fingerprints recorded by one script, so that it takes less than 5 ms
_MOST_LOSSES = 10  # in a row: each at most so many seconds after the one before
_QUIET_SECS = 60.0


class RedisBackend:
    """A Bloom filter in Redis that many crawlers share.

    A mirror in memory holds the bits known to be set. Bits only change from 0 to 1, so a
    fingerprint that the mirror has is a duplicate, without asking the server. Otherwise one script
    looks the fingerprint up and records it.

    Args:
        server: the connection.
        key: the name of the filter's hash, and part of the names of its other keys.
        policy: the size of the filter, and when it grows and expires, for all crawlers together.
        origin: the fingerprinter, the spider and the salt.
        mirror: whether to mirror the bits, which takes as much memory as the filter, up to 1 GiB.

    Attributes:
        filter: the access to the stored filter, with its mirror.
    """

    _trust_secs = 1.0  # how long a mirror answers without a reply of the server

    def __init__(
        self,
        server: RedisServer,
        key: str,
        policy: Policy,
        origin: Origin = ANY_ORIGIN,
        *,
        mirror: bool = True,
    ) -> None:
        self.server = server
        self.key = key
        self._losses_in_a_row = 0
        self._lost_at = -math.inf  # on a monotonic clock
        self._policy = policy
        self._origin = replace(origin, error_rate=policy.error_rate)
        self._ask_at = 0.0  # when to ask the server about a duplicate, on a monotonic clock
        self._last_status: FilterStatus | None = None
        self.filter = SharedFilter(server, key, policy, self._origin, mirror=mirror)

    def open(self) -> None:
        """Connect, and join the filter, or create it.

        Raises:
            StorageError: or one of its children: the server is unreachable or refuses; the key is
                not a filter, or a filter of another fingerprinter.
        """
        self._warn_of_eviction()
        self.filter.join()
        self._log_differences()
        self._exchange([])  # so that a refusal is reported now, not at the first request

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
        differences = kept_settings(self._policy, self.filter.live)
        if differences:
            logger.info(
                "This crawl joins %s, which was created with other settings and keeps them: %s. "
                "The settings of this crawl apply to new generations only; give all crawlers that "
                "share a filter the same settings",
                self.filter.name,
                ", ".join(differences),
            )

    def begin(self) -> None:
        """Begin a run, of this crawl alone."""
        try:
            self.filter.begin_run(self.filter.now())
        except OtherFilterError as error:
            self.start_over(error)

    def add(self, fingerprint: bytes) -> bool:
        """Record a fingerprint; return whether it was new to all crawlers; raises StorageError.

        If a reply was lost, or the server has lost changes, the fingerprint counts as new, so that
        its request is crawled again rather than skipped.
        """
        is_known, begun = self.filter.knows(fingerprint), time.monotonic()
        if is_known and not self._must_ask(begun):
            return False
        try:
            answers = self._exchange([fingerprint])
        except OutageError:
            if not self.filter.knows(fingerprint):  # or it knew it, but the filter was lost since
                raise
            # A duplicate needs no server. The next new request will wait for it, or fail.
            self._ask_at = next_attempt(begun, self._trust_secs)
            return False
        return answers.letters == NEW or answers.is_repeated or answers.has_lost

    def add_many(self, fingerprints: Sequence[bytes]) -> int:
        """Record fingerprints, many per round trip; return how many were certainly new."""
        added = start = 0
        while start < len(fingerprints):
            # In steps of 1 % of the capacity, so that the newest generation is not overfilled.
            few = min(_AT_ONCE, max(1, self.filter.live[-1].capacity // 100))
            answers = self._exchange(fingerprints[start : start + few])
            added += answers.letters.count(NEW)
            start += few
        return added

    def __contains__(self, fingerprint: bytes) -> bool:
        if self.is_duplicate(fingerprint):
            return True
        return self._exchange([fingerprint], records=False).letters != NEW

    def is_duplicate(self, fingerprint: bytes) -> bool:
        """Return whether `add` would certainly return False, without asking the server."""
        return not self._must_ask(time.monotonic()) and self.filter.knows(fingerprint)

    def _must_ask(self, now: float) -> bool:
        """Return whether to ask the server about a fingerprint that a mirror has.

        A crawl that meets only duplicates notices in this way that the server has lost the filter,
        or that a part of a window has ended.
        """
        return now >= self._ask_at or bool(
            self._policy.window and self.filter.now() >= self.filter.life.due_at
        )

    def _exchange(self, fingerprints: Sequence[bytes], *, records: bool = True) -> Answers:
        """Send fingerprints to the server; start over if it has lost the filter."""
        while True:  # `start_over` gives up
            try:
                if not self.filter.live:
                    self.filter.join()
                self.filter.keep_up()
                answers = self.filter.exchange(fingerprints, records=records)
            except OtherFilterError as error:
                self.start_over(error)
                continue
            if answers.has_lost:
                logger.warning(
                    "%s has lost its latest changes, for example after a failover or a restore "
                    "from a snapshot. The requests that were lost are crawled again",
                    self._name,
                )
            self._ask_at = time.monotonic() + self._trust_secs
            return answers

    @property
    def _name(self) -> str:
        """The name of the filter at the beginning of a sentence."""
        return self.filter.name[0].upper() + self.filter.name[1:]

    def start_over(self, error: OtherFilterError) -> None:
        """Continue after the server has lost the filter, or a part of it.

        Raises a RefusedError if it does so again and again.
        """
        if self.filter.live:
            self._check_losses()
            logger.warning(
                "%s was lost: removed, flushed, evicted, or not saved before a restart. The crawl "
                "starts over with an empty filter; check persistence (appendonly yes) and "
                "maxmemory-policy (noeviction)",
                self._name,
            )
        if isinstance(error, LostKeysError):
            self.clear()
        self.filter.join()

    def _check_losses(self) -> None:
        now = time.monotonic()
        is_soon = now <= self._lost_at + _QUIET_SECS
        self._losses_in_a_row = self._losses_in_a_row + 1 if is_soon else 1
        self._lost_at = now
        if self._losses_in_a_row < _MOST_LOSSES:
            return
        policy = self.server.eviction_policy()
        raise RefusedError(
            f"{self.filter.name} was lost {self._losses_in_a_row} times in a row, so the crawl "
            "would never end: "
            + (
                f"the server's maxmemory-policy is {policy}, which evicts keys when its memory is "
                "full. Set maxmemory-policy to noeviction, and raise maxmemory"
                if policy
                else "check the server's maxmemory and maxmemory-policy (noeviction), and what "
                "else removes its keys"
            )
        )

    @property
    def sample(self) -> str:
        """The sample of fingerprints, which is stored before the next batch, or at the close."""
        return self.filter.sample

    @sample.setter
    def sample(self, text: str) -> None:
        self.filter.sample = text

    def clear(self) -> None:
        """Remove the filter, for all crawlers; the next request creates a new filter."""
        self.filter.clear()

    def close(self) -> None:
        """Disconnect; raises StorageError."""
        self.server.shorten_deadline()
        try:
            if self.filter.live:
                with suppress(StorageError):
                    self.filter.refresh()  # for the counts of other crawlers
                    self.filter.store_sample()
            self._last_status = self.status()
            with suppress(StorageError):  # otherwise the field is removed after a month
                self.filter.leave()
        finally:
            self.server.close()

    def status(self) -> FilterStatus:
        """Return the filter's current figures; after `close`, the last figures."""
        if self._last_status is not None:
            return self._last_status
        # Without a filter, the figures are those of the one that the next request will create.
        live = self.filter.live or [RedisGeneration.of(self._policy.first(), 1, 0.0)]
        location = f"{self.server.address}, key {escaped(self.key)}"
        return replace(
            self.filter.life.status(location, live),
            more={
                "redis/round_trips": self.server.round_trips,
                "redis/mirror_hits": self.filter.mirror_hits,
                "redis/retries": self.server.retries,
            },
        )

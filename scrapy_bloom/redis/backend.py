"""The backend for a filter in Redis or Valkey that many crawlers share."""

import logging
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from scrapy_bloom.exceptions import OutageError, RefusedError, StorageError
from scrapy_bloom.generations.policy import FilterStatus, kept_settings
from scrapy_bloom.redis.connection.server import next_attempt
from scrapy_bloom.redis.filter import (
    NEW,
    Answers,
    LostKeysError,
    OtherFilterError,
    SharedFilter,
)
from scrapy_bloom.text import escaped

logger = logging.getLogger(__name__)

_AT_ONCE = 32  # fingerprints recorded by one script, so that it takes less than 5 ms
_MOST_LOSSES = 10  # in a row: each at most so many seconds after the one before
_QUIET_SECS = 60.0


class RedisBackend(SharedFilter):
    """A Bloom filter in Redis that many crawlers share, which also have the policy in common.

    A mirror in memory holds the bits known to be set. Bits only change from 0 to 1, so a
    fingerprint that the mirror has is a duplicate, without asking the server. Otherwise one script
    looks the fingerprint up and records it. Mirrors take as much memory as the filter, up to 1 GiB.
    """

    _trust_secs = 1.0  # how long a mirror answers without a reply of the server
    _losses_in_a_row = 0
    _lost_at = -math.inf  # on a monotonic clock
    _ask_at = 0.0  # when to ask the server about a duplicate, on a monotonic clock

    def open(self) -> None:
        """Connect, and join the filter, or create it; raises StorageError."""
        if policy := self.server.eviction_policy():
            logger.warning(
                "%s evicts keys when its memory is full (maxmemory-policy %s), so the filter may "
                "be lost, and its requests crawled again. Set maxmemory-policy to noeviction",
                self.server.address,
                escaped(policy),
            )
        self.join()
        if differences := kept_settings(self._policy, self.live):
            logger.info(
                "This crawl joins %s, which was created with other settings and keeps them: %s. "
                "The settings of this crawl apply to new generations only; give all crawlers that "
                "share a filter the same settings",
                self.name,
                ", ".join(differences),
            )
        self._send([])  # so that a refusal is reported now, not at the first request

    def begin(self) -> None:
        """Begin a run, of this crawl alone."""
        try:
            self.begin_run(self.now())
        except OtherFilterError as error:
            self.start_over(error)

    def add(self, fingerprint: bytes) -> bool:
        """Record a fingerprint; return whether it was new to all crawlers; raises StorageError.

        If a reply was lost, or the server has lost changes, the fingerprint counts as new, so that
        its request is crawled again rather than skipped.
        """
        is_known, begun = self.knows(fingerprint), time.monotonic()
        if is_known and not self._must_ask(begun):
            return False
        try:
            answers = self._send([fingerprint])
        except OutageError:
            if not self.knows(fingerprint):  # or it knew it, but the filter was lost since
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
            few = min(_AT_ONCE, max(1, self.live[-1].capacity // 100))
            answers = self._send(fingerprints[start : start + few])
            added += answers.letters.count(NEW)
            start += few
        return added

    def __contains__(self, fingerprint: bytes) -> bool:
        if self.is_duplicate(fingerprint):
            return True
        return self._send([fingerprint], records=False).letters != NEW

    def is_duplicate(self, fingerprint: bytes) -> bool:
        """Return whether `add` would certainly return False, without asking the server."""
        return not self._must_ask(time.monotonic()) and self.knows(fingerprint)

    def _must_ask(self, now: float) -> bool:
        """Return whether to ask the server about a fingerprint that a mirror has.

        A crawl that meets only duplicates notices in this way that the server has lost the filter,
        or that a part of a window has ended.
        """
        return now >= self._ask_at or bool(self._policy.window and self.now() >= self.life.due_at)

    def _send(self, fingerprints: Sequence[bytes], *, records: bool = True) -> Answers:
        """Send fingerprints to the server; start over if it has lost the filter."""
        while True:  # `start_over` gives up
            try:
                if not self.live:
                    self.join()
                self.keep_up()
                answers = self.exchange(fingerprints, records=records)
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
        return self.name[0].upper() + self.name[1:]

    def start_over(self, error: OtherFilterError) -> None:
        """Continue after the server has lost the filter, or a part of it.

        Raises a RefusedError if that happens again and again.
        """
        if self.live:
            self._check_losses()
            logger.warning(
                "%s was lost: removed, flushed, evicted, or not saved before a restart. The crawl "
                "starts over with an empty filter; check persistence (appendonly yes) and "
                "maxmemory-policy (noeviction)",
                self._name,
            )
        if isinstance(error, LostKeysError):
            self.clear()
        self.join()

    def _check_losses(self) -> None:
        now = time.monotonic()
        is_soon = now <= self._lost_at + _QUIET_SECS
        self._losses_in_a_row = self._losses_in_a_row + 1 if is_soon else 1
        self._lost_at = now
        if self._losses_in_a_row < _MOST_LOSSES:
            return
        policy = self.server.eviction_policy()
        raise RefusedError(
            f"{self.name} was lost {self._losses_in_a_row} times in a row, so the crawl "
            "would never end: "
            + (
                f"the server's maxmemory-policy is {policy}, which evicts keys when its memory is "
                "full. Set maxmemory-policy to noeviction, and raise maxmemory"
                if policy
                else "check the server's maxmemory and maxmemory-policy (noeviction), and what "
                "else removes its keys"
            )
        )

    def close(self) -> None:
        """Disconnect; raises StorageError."""
        self.server.shorten_deadline()
        try:
            if self.live:
                with suppress(StorageError):
                    self.refresh()  # for the counts of other crawlers
                    self.store_sample()
            with suppress(StorageError):  # otherwise the field is removed after a month
                self.leave()
        finally:
            self.server.close()

    def status(self) -> FilterStatus:
        """Return the filter's current figures; after `close`, the last ones."""
        location = f"{self.server.address}, key {escaped(self.key)}"
        return replace(
            self.life.status(location),
            more={
                "redis/round_trips": self.server.round_trips,
                "redis/mirror_hits": self.mirror_hits,
                "redis/retries": self.server.retries,
            },
        )

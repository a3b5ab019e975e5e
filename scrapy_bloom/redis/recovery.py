"""Recovery of keys that the server has lost of a shared filter."""

import logging
import math
import time

from scrapy_bloom.redis.keys.meta import RedisGeneration, Stored
from scrapy_bloom.redis.keys.store import RedisStore
from scrapy_bloom.redis.known import KnownGenerations

logger = logging.getLogger(__name__)

_TELL_AGAIN_SECS = 600.0  # of lost keys


class Recovery:
    """Makes lost keys anew with what the mirrors know of them, or removes what is void.

    Attributes:
        lost_keys: keys that were found lost.
    """

    def __init__(self, store: RedisStore, known: KnownGenerations) -> None:
        self.lost_keys = 0
        self._store = store
        self._known = known
        self._told_at = -math.inf
        self._void: list[RedisGeneration] = []

    def is_lost(self, stored: Stored) -> bool:
        """Check whether all is gone, or a crawler that knew less has written back what was lost.

        Not so if the filter was removed on purpose, or if there is another one.
        """
        if stored.info is None:
            return not stored.was_reset
        number = stored.generations[-1].number if stored.generations else 0
        return self._known.are_of(stored) and number < self._known.newest.number

    def write_back(self) -> None:
        """Write back what is known of all generations."""
        info, live = self._known.info, self._known.live
        number = 0
        for each in live:
            if each.mirror is None:
                each.count = 0
            for chunk in range(each.num_chunks):
                self._store.blocks.restore(each, chunk, sealed=each is not live[-1])
            if not self._store.publish(info.epoch, each):
                # Another crawler has gone another way from there.
                self._store.discard(each.id, each.num_chunks)
                break
            number += each.num_chunks
        self.log_loss(number)

    def log_loss(self, number: int) -> None:
        """Tell of keys that were made anew, but not each time."""
        self.lost_keys += number
        if time.monotonic() - self._told_at < _TELL_AGAIN_SECS:
            return
        self._told_at = time.monotonic()
        logger.warning(
            "Keys of %s were lost: evicted, flushed, or not saved before a restart. They were made "
            "anew%s; other pages recorded in them may be crawled again. Check maxmemory-policy "
            "(noeviction) and persistence (appendonly yes)",
            self._store.name,
            " with what this crawl knows of them" if self._known.mirrors else ", empty",
        )

    def note_void(self) -> None:
        """Note that the server lost what is known, and nothing is to be written back."""
        self._void = self._void or self._known.live  # the first, if the server is away in between

    def replace_void(self, stored: Stored, *, was_gone: bool) -> None:
        """Tell that all that was known is void, if so; remove what was recorded on top of it.

        Args:
            stored: the generations that there are.
            was_gone: the server had lost all of the filter.
        """
        if not self._void:
            return
        kept = {each.id for each in stored.generations}
        for each in self._void:
            if each.id in kept:
                continue
            if was_gone:
                self._store.blocks.unlink(each.id, each.num_chunks)
            else:  # it may have been set aside, with all of its keys
                self._store.blocks.unlink_strays(each)
        self._void = []
        name = self._store.name
        if self._known.are_of(stored):
            logger.info(
                "%s has been restarted, or replaced by another: from now on, what it says of %s "
                "counts, and no more what this crawl knew of it",
                self._store.server.address,
                name,
            )
            return
        logger.warning(
            "%s was lost: flushed, or not saved before a restart. The queue is taken to have been "
            "lost with it: an empty filter was begun, and pages are crawled again, so that none is "
            "left out. Check persistence (appendonly yes) and maxmemory-policy (noeviction)",
            name[0].upper() + name[1:],
        )

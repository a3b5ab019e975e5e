"""Recovery of keys that the server has lost of a shared filter."""

import logging
import math
import time

from scrapy_bloom.redis.keys.meta import Stored
from scrapy_bloom.redis.keys.store import RedisStore
from scrapy_bloom.redis.view import View

logger = logging.getLogger(__name__)

_TELL_AGAIN_SECS = 600.0  # of lost keys


class Recovery:
    """Makes lost keys anew with what the mirrors know of them, or removes what is void."""

    def __init__(self, store: RedisStore) -> None:
        self.lost_keys = 0  # as far as they were found
        self._store = store
        self._told_at = -math.inf
        self._void: View | None = None

    def write_back(self, view: View) -> None:
        """Write back what is known of all generations."""
        number = 0
        for each in view.live:
            if each.mirror is None:
                each.count = 0
            for chunk in range(each.num_chunks):
                self._store.blocks.restore(each, chunk, sealed=each is not view.newest)
            if not self._store.publish(each):
                # Another crawler has gone another way from there.
                self._store.discard(each.id, each.num_chunks)
                break
            number += each.num_chunks
        self.note_loss(view, number)

    def note_loss(self, view: View, number: int) -> None:
        """Count keys that were made anew, and warn of them, but not each time."""
        self.lost_keys += number
        if time.monotonic() - self._told_at < _TELL_AGAIN_SECS:
            return
        self._told_at = time.monotonic()
        logger.warning(
            "Keys of %s were lost: evicted, flushed, or not saved before a restart. They were made "
            "anew%s; other pages recorded in them may be crawled again. Check maxmemory-policy "
            "(noeviction) and persistence (appendonly yes)",
            self._store.name,
            " with what this crawl knows of them" if view.mirrors else ", empty",
        )

    def note_void(self, view: View) -> None:
        """Note that the server lost what is known, and nothing is to be written back."""
        if self._void is None and view.live:  # the first, if the server is away in between
            self._void = view

    def replace_void(self, stored: Stored, *, was_gone: bool) -> None:
        """Remove what was recorded on top of what is void, if anything is, and tell of it."""
        void = self._void
        if void is None:
            return
        kept = {each.id for each in stored.generations}
        for each in void.live:
            if each.id in kept:
                continue
            if was_gone:  # all of the filter
                self._store.blocks.unlink(each.id, each.num_chunks)
            else:  # it may have been set aside, with all of its keys
                self._store.blocks.unlink_strays(each)
        self._void = None
        name = self._store.name
        if void.is_of(stored):
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

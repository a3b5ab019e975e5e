"""Counts of requests in a shared filter: taken here, and told all crawlers now and then."""

import contextlib
import math
import time

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.redis.keys.store import RedisStore
from scrapy_bloom.redis.known import KnownGenerations

_LONGEST_BATCH = 1000  # requests counted here before all are told
_LONGEST_SECS = 1.0  # likewise: a small crawl has no whole batch


class SharedCounts:
    """Counts what this crawl records in the newest generation."""

    def __init__(self, store: RedisStore, known: KnownGenerations) -> None:
        self._store = store
        self._known = known
        self._untold = 0
        self._tell_at: float = math.inf  # with so many of them
        self._tell_by = math.inf  # on a monotonic clock

    def add_one(self) -> bool:
        """Count one more; after some of them, tell all crawlers, and learn what they have.

        Returns:
            False if the newest generation is not there any more.
        """
        self._known.newest.count += 1
        self._untold += 1
        if self._untold < self._tell_at and time.monotonic() < self._tell_by:
            return True
        is_there = self.tell()
        self.plan()
        return is_there

    def tell(self, *, patient: bool = True) -> bool:
        """Tell all crawlers how many requests were recorded here and not told yet.

        Args:
            patient: wait out an outage.

        Returns:
            False if the newest generation is not there any more.
        """
        if not self._known.live or not self._untold:
            return True
        newest, epoch = self._known.newest, self._known.info.epoch
        count = self._store.add_count(epoch, newest, self._untold, patient=patient)
        self._untold = 0
        if count is None:
            return False
        newest.count = count
        return True

    def drop(self) -> None:
        """Forget what was not told: the generation is void, or its whole count was written."""
        self._untold = 0

    def plan(self) -> None:
        """Plan when to tell next."""
        newest = self._known.newest
        room = newest.capacity - newest.count
        # Often when it is nearly full: all crawlers shall find that out in time.
        batch = room // 64 if room > 0 else newest.capacity // 256
        # And never many: others may fill that room while we are slow.
        self._tell_at = max(1, min(batch, newest.capacity // 500, _LONGEST_BATCH))
        self._tell_by = time.monotonic() + _LONGEST_SECS

    def learn(self) -> None:
        """Learn at the close what all crawlers have recorded, unless there is an outage."""
        with contextlib.suppress(StorageError):
            stored = self._store.read(patient=False)
            if self._known.are_of(stored) and stored.generations:
                self._known.live = list(stored.generations)

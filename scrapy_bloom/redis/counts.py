"""Counts of requests in a shared filter: taken here, and told all crawlers now and then."""

import math
import time

from scrapy_bloom.redis.keys.meta import RedisGeneration
from scrapy_bloom.redis.keys.store import RedisStore

_LONGEST_BATCH = 1000  # requests counted here before all are told
_LONGEST_SECS = 1.0  # likewise: a small crawl has no whole batch


class SharedCounts:
    """Counts what this crawl records in the newest generation."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self._untold = 0
        self._tell_at: float = math.inf  # with so many of them
        self._tell_by = math.inf  # on a monotonic clock

    def add_one(self, newest: RedisGeneration) -> bool:
        """Count one more request; return whether it is time to tell."""
        newest.count += 1
        self._untold += 1
        return self._untold >= self._tell_at or time.monotonic() >= self._tell_by

    def tell(self, newest: RedisGeneration, *, patient: bool = True) -> bool:
        """Tell all crawlers the count of late, and learn theirs; False if it is gone."""
        count: int | None = newest.count
        if self._untold:
            count = self._store.add_count(newest, self._untold, patient=patient)
        self._untold = 0
        if count is not None:
            newest.count = count
        self.plan(newest)
        return count is not None

    def drop(self) -> None:
        """Forget the count of late: the generation is void, or its whole count was written."""
        self._untold = 0

    def plan(self, newest: RedisGeneration) -> None:
        """Plan when to tell next."""
        room = newest.capacity - newest.count
        # Often when it is nearly full: all crawlers shall find that out in time.
        batch = room // 64 if room > 0 else newest.capacity // 256
        # And never many: others may fill that room while we are slow.
        self._tell_at = max(1, min(batch, newest.capacity // 500, _LONGEST_BATCH))
        self._tell_by = time.monotonic() + _LONGEST_SECS

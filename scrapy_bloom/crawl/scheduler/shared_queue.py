"""The queue that workers share in Redis, as a store of batches: each step is sent at once."""

import contextlib
from collections.abc import Callable

import scrapy
from scrapy import Request
from scrapy.crawler import Crawler
from scrapy.dupefilters import BaseDupeFilter
from scrapy.settings import BaseSettings

from scrapy_bloom.crawl.failures import Failures
from scrapy_bloom.crawl.scheduler.safe_queue import Order, SafeQueue
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.queues.batch import Batch, Taken
from scrapy_bloom.queues.redis import SharedRequests
from scrapy_bloom.redis.backend import RedisBackend

# Beside the one that is downloaded, others are being scraped: Scrapy goes on meanwhile, and the
# order of a crawl with CONCURRENT_REQUESTS = 1 depends on it.
_FEW_IN_FLIGHT = 8


def most_in_flight(settings: BaseSettings) -> int:
    """Return how many requests may be taken from a shared queue and not be done; 0: any number."""
    most = settings.getint("CONCURRENT_REQUESTS")
    if 0 < most < _FEW_IN_FLIGHT:
        most = _FEW_IN_FLIGHT
    if scrapy.version_info < (2, 14):  # whose scraper keeps each response for 0.1 seconds
        most *= 2
    return most


class SharedStore:
    """A `RequestStore` over a shared queue."""

    def __init__(self, requests: SharedRequests) -> None:
        self.name = requests.name
        self.requests = requests
        self.set_aside, self.close = requests.set_aside, requests.close

    @property
    def pending(self) -> int:
        """See `RequestStore`."""
        return self.requests.pending

    def apply(self, batch: Batch) -> None:
        """See `RequestStore`."""
        while batch.found:
            found = batch.found.pop(0)
            self.requests.push(
                found.data,
                slot=found.slot,
                priority=found.priority,
                rank=found.rank,
                newest_first=found.newest_first,
            )
        while batch.done:
            self.requests.done(batch.done.pop(0))

    def take(self, batch: Batch, active: Callable[[str], int]) -> Taken | None:
        """See `RequestStore`."""
        self.apply(batch)
        return self.requests.take(active)


class SharedQueue(SafeQueue):
    """A worker's queue; see `SafeQueue`. A request is recorded once it is queued.

    Args:
        store: the shared queue.
        backend: of the filter.
    """

    place = "redis"

    def __init__(
        self,
        crawler: Crawler,
        store: SharedStore,
        order: Order,
        *,
        backend: RedisBackend,
        most_in_flight: int,
        failures: Failures,
        by_slot: bool,
    ) -> None:
        super().__init__(crawler, store, order, failures=failures, by_slot=by_slot)
        self._requests = store.requests
        self._backend = backend
        self._most_in_flight = most_in_flight

    def enqueue(self, request: Request, df: BaseDupeFilter) -> str | None:
        """See `SafeQueue`."""
        new: list[bytes] = []
        self._backend.collected = new
        try:
            is_seen = not request.dont_filter and df.request_seen(request)
        finally:
            self._backend.collected = None
        if is_seen:
            return None
        found = self._serialized(request)
        if found is not None:
            self._batch.found.append(found)
            self.flush()
        if self.has_failed or not self._record(request, new):
            if found is not None:
                self.attempt(self._requests.take_back)
            return None
        if found is None:
            self._in_flight.keep_in_memory(request, lambda: None)
        return self.place if found is not None else "memory"

    def _record(self, request: Request, fingerprints: list[bytes]) -> bool:
        """Record what is queued; False if another worker has recorded it meanwhile."""
        try:
            return all(map(self._backend.record, fingerprints))
        except Exception as error:  # noqa: BLE001 - whatever it is, no page may be lost for it
            assert self._failures is not None
            self._failures.add(request, error)
            return True

    def record(self, stored: bytes, df: BaseDupeFilter) -> None:
        """Record a request that is queued, and may not be recorded."""
        collected, self._backend.collected = self._backend.collected, None
        with contextlib.suppress(Exception):  # it will be told of when it is taken
            request = self.deserialized(stored)
            if not request.dont_filter:
                df.request_seen(request)
        self._backend.collected = collected

    def close(self) -> None:
        """See `SafeQueue`; leave the queue to the other workers."""
        had_failed = self.has_failed
        if had_failed:  # a server that is away is not waited for again
            self._batch = Batch()
        super().close()
        try:
            self._store.close()
        except StorageError as error:
            if not had_failed:
                self._fail(error)

    def take(self) -> Request | None:
        """See `SafeQueue`."""
        # What is in flight is crawled twice after a crash: that is kept to what is promised, also
        # while responses wait to be scraped.
        return None if 0 < self._most_in_flight <= self.in_flight else super().take()

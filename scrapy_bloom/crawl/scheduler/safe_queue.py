"""The queue of CrashSafeScheduler: a request stays in it until it is done."""

import logging
import sqlite3
from collections.abc import Callable
from typing import Any

import scrapy
from queuelib.queue import FifoDiskQueue, LifoDiskQueue
from scrapy import Request
from scrapy.crawler import Crawler
from scrapy.pqueues import DownloaderInterface, ScrapyPriorityQueue
from scrapy.settings import BaseSettings
from scrapy.squeues import FifoMemoryQueue
from scrapy.utils.misc import load_object
from scrapy.utils.request import request_from_dict

from scrapy_bloom.crawl.engine import close_spider_soon
from scrapy_bloom.crawl.failures import Failures
from scrapy_bloom.crawl.scheduler.in_flight import InFlight
from scrapy_bloom.exceptions import OutageError, RefusedError, SettingError, StorageError
from scrapy_bloom.queues.queue import RequestQueue, packed, unpacked

# Beside the one that is downloaded, others are being scraped: Scrapy goes on meanwhile, and the
# order of a crawl with CONCURRENT_REQUESTS = 1 depends on it.
_FEW_IN_FLIGHT = 8

Order = Callable[[Request], tuple[int, bool]]


def order_of(crawler: Crawler) -> Order:
    """Return how Scrapy would order requests of one priority.

    That is a function that gives a request's rank (the lowest is taken first), and whether the
    newest of its rank is taken first. Raises a SettingError if a disk queue has no known order.
    """
    settings, start = crawler.settings, "SCHEDULER_START_DISK_QUEUE"
    others = 0, _is_lifo(settings, "SCHEDULER_DISK_QUEUE")
    if not settings[start]:
        return lambda _: others
    starts = _start_rank(crawler), _is_lifo(settings, start)
    return lambda request: starts if request.meta.get("is_start_request") else others


def _is_lifo(settings: BaseSettings, name: str) -> bool:
    path = settings[name]
    queue = load_object(path)
    for kind, is_lifo in ((LifoDiskQueue, True), (FifoDiskQueue, False)):
        if isinstance(queue, type) and issubclass(queue, kind):
            return is_lifo
    raise SettingError(
        f"{name} is {path!r}, whose order is unknown to CrashSafeScheduler; allowed are Scrapy's "
        '"scrapy.squeues.PickleLifoDiskQueue" (newest first) and '
        '"scrapy.squeues.PickleFifoDiskQueue" (oldest first), and what is made of them'
    )


def _start_rank(crawler: Crawler) -> int:
    """Return 1 if start requests go after others, else -1. Scrapy changed it: it is tried out."""
    queue = ScrapyPriorityQueue(crawler, FifoMemoryQueue, "", start_queue_cls=FifoMemoryQueue)
    queue.push(Request("data:,other"))
    queue.push(Request("data:,start", meta={"is_start_request": True}))
    first = queue.pop()
    return -1 if first is not None and first.url == "data:,start" else 1


def most_in_flight(settings: BaseSettings) -> int:
    """Return how many requests may be taken from a queue and not be done; 0: any number."""
    most = settings.getint("CONCURRENT_REQUESTS")
    if 0 < most < _FEW_IN_FLIGHT:
        most = _FEW_IN_FLIGHT
    if scrapy.version_info < (2, 14):  # whose scraper keeps each response for 0.1 seconds
        most *= 2
    return most


class SafeQueue:
    """Requests of a crawl, pending or in flight, in a queue that outlives the process.

    With `by_slot`, the least busy slot of the downloader is served first. Outages that `failures`
    has told of are not told of again. Raises a SettingError if this version of Scrapy works in
    another way.

    Attributes:
        has_failed: the queue has failed, or is closed. What is in it stays.
    """

    def __init__(
        self,
        crawler: Crawler,
        queue: RequestQueue,
        order: Order,
        *,
        by_slot: bool,
        failures: Failures | None = None,
    ) -> None:
        self.has_failed = False
        self._crawler = crawler
        self._spider = crawler.spider
        self._logger = logging.LoggerAdapter(logging.getLogger(__name__), {"spider": self._spider})
        self._queue = queue
        self._order = order
        self._failures = failures
        self._logs_unserializable = crawler.settings.getbool("SCHEDULER_DEBUG")
        self._most_in_flight = most_in_flight(crawler.settings)
        self._downloader = DownloaderInterface(crawler) if by_slot else None
        self._in_flight = InFlight(crawler.engine, self._done)

    def __len__(self) -> int:
        # What can't be read any more must not keep the spider open.
        return 0 if self.has_failed else self._queue.pending

    def push(self, request: Request) -> int:
        """Store a request, and return its row: 0 if it cannot be serialized, or stored."""
        rank, newest_first = self._order(request)
        if not isinstance(request.priority, int):  # no request could be made again with it
            error = ValueError(f"the priority {request.priority!r} is not an integer")
            self._log_unserializable(request, error)
            return 0
        try:
            data = packed(request.to_dict(spider=self._spider))
        except ValueError as unserializable:
            self._log_unserializable(request, unserializable)
            return 0
        row: int | None = self.attempt(
            self._queue.push,
            data,
            # A project may name slots as it likes, by numbers too.
            slot=str(self._downloader.get_slot_key(request)) if self._downloader else "",
            priority=request.priority,
            rank=rank,
            newest_first=newest_first,
        )
        return row or 0

    def take_back(self) -> None:
        """Remove the request that was stored just now."""
        self.attempt(self._queue.take_back)

    def take(self) -> Request | None:
        """Return the next request, which is in flight from now on; None if none is to be taken."""
        # What is in flight is crawled twice after a crash: that is kept to what is promised, also
        # while responses wait to be scraped.
        if 0 < self._most_in_flight <= len(self._in_flight):
            return None
        while not self.has_failed:
            taken = self.attempt(self._queue.take, self._downloads)
            if taken is None:
                break
            try:
                request = self.unpacked(taken.data)
            except Exception as error:  # noqa: BLE001 - a callback that was renamed, for example
                self._logger.error(  # noqa: TRY400 - one line
                    "A request of the job cannot be made again, and is left in %s: %s: %s",
                    self._queue.name,
                    type(error).__name__,
                    error,
                )
                self.attempt(self._queue.set_aside, taken.id)
                continue
            self._in_flight.add(request, taken.id)
            return request
        return None

    def close(self) -> None:
        """Leave the queue to the next run, as it is."""
        self._in_flight.settle()
        try:
            self._queue.close()
        except StorageError as error:
            if not self.has_failed:
                self._fail(error)
        self.has_failed = True

    @property
    def in_flight(self) -> int:
        """Return how many requests were taken, and are not done."""
        return len(self._in_flight)

    def _downloads(self, slot: str) -> int:
        return self._downloader.stats([slot])[0][0] if self._downloader else 0

    def unpacked(self, data: bytes) -> Request:
        """Return a request that was stored. It may raise anything."""
        return request_from_dict(dict(unpacked(data)), spider=self._spider)

    def _done(self, row: Any) -> None:
        """Remove a request: all that it led to is scheduled."""
        # If something was not, it has to be in flight for the next run.
        self.attempt(self._queue.done, row)

    def attempt(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Take a step of the queue; return None if it has failed, now or before: the crawl ends."""
        if self.has_failed:
            return None
        try:
            return function(*args, **options)
        except (sqlite3.Error, StorageError) as error:
            self._fail(error)
            return None

    def _fail(self, error: Exception) -> None:
        self.has_failed = True
        reason = "bloom_outage" if isinstance(error, OutageError) else "bloom_queue_failed"
        if isinstance(error, (OutageError, RefusedError)):
            when = error.until if isinstance(error, OutageError) else "that is put right"
            if self._failures is not None and not self._failures.is_first(error):
                close_spider_soon(self._crawler, reason)
                return
            what, rest = str(error), f", and nothing is lost: start the crawl again when {when}"
        elif isinstance(error, sqlite3.Error):
            what = f"The queue in {self._queue.name} cannot be written or read: {error}"
            rest = ", and nothing is lost: make room, or repair the disk, and start the crawl again"
        else:
            what, rest = str(error), ""
        self._logger.error("%s. The spider is closed (reason %s)%s", what, reason, rest)
        close_spider_soon(self._crawler, reason)

    def _log_unserializable(self, request: Request, error: ValueError) -> None:
        if self._logs_unserializable:
            self._logger.warning(
                "Unable to serialize request: %(request)s - reason: %(reason)s - no more "
                "unserializable requests will be logged (stats being collected)",
                {"request": request, "reason": error},
                exc_info=error,
            )
            self._logs_unserializable = False
        assert self._crawler.stats is not None
        self._crawler.stats.inc_value("scheduler/unserializable")

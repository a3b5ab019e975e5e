"""The queue of CrashSafeScheduler in a job directory: a request stays in it until it is done."""

import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import scrapy
from queuelib.queue import FifoDiskQueue, LifoDiskQueue
from scrapy import Request, Spider
from scrapy.crawler import Crawler
from scrapy.pqueues import DownloaderInterface, ScrapyPriorityQueue
from scrapy.settings import BaseSettings
from scrapy.squeues import FifoMemoryQueue
from scrapy.utils.misc import load_object
from scrapy.utils.request import request_from_dict

from scrapy_bloom.crawl.engine import close_spider_soon
from scrapy_bloom.crawl.scheduler.in_flight import InFlight
from scrapy_bloom.exceptions import SettingError
from scrapy_bloom.job import paths as jobdir
from scrapy_bloom.job.locks import lock_file
from scrapy_bloom.queues.sqlite import RequestDatabase, unpacked

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


class SafeQueue:
    """Requests of a job, pending or in flight, in a SQLite database that no other crawl uses.

    With `by_slot`, the least busy slot of the downloader is served first. Raises a BloomError if
    the database cannot be used, or this version of Scrapy works in another way.

    Attributes:
        has_failed: the disk has failed, and the spider is closed. What is in the queue stays.
    """

    def __init__(
        self, crawler: Crawler, spider: Spider, job: Path, order: Order, *, by_slot: bool
    ) -> None:
        self.has_failed = False
        self._crawler = crawler
        self._spider = spider
        self._logger = logging.LoggerAdapter(logging.getLogger(__name__), {"spider": spider})
        self._order = order
        settings = crawler.settings
        self._logs_unserializable = settings.getbool("SCHEDULER_DEBUG")
        self._most_in_flight = settings.getint("CONCURRENT_REQUESTS")
        if 0 < self._most_in_flight < _FEW_IN_FLIGHT:
            self._most_in_flight = _FEW_IN_FLIGHT
        if scrapy.version_info < (2, 14):  # whose scraper keeps each response for 0.1 seconds
            self._most_in_flight *= 2
        self._downloader = DownloaderInterface(crawler) if by_slot else None
        self._in_flight = InFlight(crawler.engine, self._done)
        path = job / jobdir.DATABASE
        self._lock = lock_file(Path(f"{path}.lock"), path, "JOBDIR")
        try:
            self._database = RequestDatabase(path, by_slot=by_slot)
        except BaseException:
            self._lock.release()
            raise
        if self._database.resumed:
            killed = self._database.were_in_flight
            self._logger.info(
                "Resuming crawl (%d requests scheduled%s)",
                self._database.resumed,
                f", {killed:,} of them in flight when the last run was killed" if killed else "",
            )

    def __len__(self) -> int:
        # What can't be read any more must not keep the spider open.
        return 0 if self.has_failed else self._database.pending

    def newest(self) -> Request | None:
        """Return the request that was added last, if it is there and can be made again."""
        data = self._database.newest()
        try:
            return None if data is None else self._unpacked(data)
        except Exception:  # noqa: BLE001 - it will be told of when it is taken
            return None

    def push(self, request: Request) -> int:
        """Store a request, and return its row: 0 if it cannot be serialized, or stored."""
        rank, newest_first = self._order(request)
        row: int | None = None
        try:
            row = self._attempt(
                self._database.push,
                request.to_dict(spider=self._spider),
                slot=self._downloader.get_slot_key(request) if self._downloader else "",
                priority=request.priority,
                rank=rank,
                newest_first=newest_first,
            )
        except ValueError as error:
            self._log_unserializable(request, error)
        return row or 0

    def take_back(self, row: int) -> None:
        """Remove a request that was stored just now."""
        if not self.has_failed:
            self._attempt(self._database.remove, row, was_pending=True)

    def take(self) -> Request | None:
        """Return the next request, which is in flight from now on; None if none is to be taken."""
        # What is in flight is crawled twice after a crash: that is kept to what is promised, also
        # while responses wait to be scraped.
        if 0 < self._most_in_flight <= len(self._in_flight):
            return None
        while len(self):
            taken = self._attempt(self._database.take, self._downloads)
            if taken is None:
                return None
            try:
                request = self._unpacked(taken.data)
            except Exception as error:  # noqa: BLE001 - a callback that was renamed, for example
                self._logger.error(  # noqa: TRY400 - one line
                    "A request of the job cannot be made again, and is left in %s: %s: %s",
                    self._database.path,
                    type(error).__name__,
                    error,
                )
                continue
            self._in_flight.add(request, taken.id)
            return request
        return None

    def close(self) -> None:
        """Leave the queue to the next run, as it is."""
        self._in_flight.settle()
        self._database.close()
        self._lock.release()

    def _downloads(self, slot: str) -> int:
        return self._downloader.stats([slot])[0][0] if self._downloader else 0

    def _unpacked(self, data: bytes) -> Request:
        return request_from_dict(dict(unpacked(data)), spider=self._spider)

    def _done(self, row: int) -> None:
        """Remove a request: all that it led to is scheduled."""
        # If something was not, it has to be in flight for the next run.
        if not self.has_failed:
            self._attempt(self._database.remove, row)

    def _attempt(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Change the database; if that fails, return None, and end the crawl."""
        try:
            return function(*args, **options)
        except sqlite3.Error as error:
            self.has_failed = True
            self._logger.error(  # noqa: TRY400 - one line
                "The queue in %s cannot be written or read: %s. The spider is closed (reason "
                "bloom_queue_failed), and nothing is lost: make room, or repair the disk, and "
                "start the crawl again",
                self._database.path,
                error,
            )
            close_spider_soon(self._crawler, "bloom_queue_failed")
            return None

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

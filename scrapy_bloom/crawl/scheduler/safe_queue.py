"""The queue of CrashSafeScheduler: a request stays in it until it is done."""

import contextlib
import logging
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

from queuelib.queue import FifoDiskQueue, LifoDiskQueue
from scrapy import Request
from scrapy.crawler import Crawler
from scrapy.dupefilters import BaseDupeFilter
from scrapy.pqueues import DownloaderInterface, ScrapyPriorityQueue
from scrapy.settings import BaseSettings
from scrapy.squeues import FifoMemoryQueue
from scrapy.utils.misc import load_object
from scrapy.utils.reactor import CallLaterOnce
from scrapy.utils.request import request_from_dict

from scrapy_bloom.crawl.engine import close_spider_soon
from scrapy_bloom.crawl.failures import Failures
from scrapy_bloom.crawl.scheduler.in_flight import InFlight
from scrapy_bloom.exceptions import OutageError, RefusedError, SettingError, StorageError
from scrapy_bloom.queues.batch import (
    Batch,
    Found,
    RequestStore,
    Taken,
    deserialized,
    serialized,
)

_MOST_FOUND = 1000  # requests in a batch

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


class SafeQueue(ABC):
    """The requests of a crawl, pending or in flight, in a store that outlives the process.

    What callbacks produce is collected in a batch: requests found and done, and the changes of the
    filter. It is stored before the next request is taken, when it has become large, and at the end
    of the event loop's turn. So what the store has is at each instant a state from which the crawl
    can go on.

    With `by_slot`, the least busy slot of the downloader is served first. Outages that `failures`
    has told of are not told of again. Raises a SettingError if this version of Scrapy works in
    another way.

    Attributes:
        has_failed: the store has failed, or is closed. What is in it stays.
        place: "disk" or "redis", as in the stats.
    """

    place = "disk"

    def __init__(
        self,
        crawler: Crawler,
        store: RequestStore,
        order: Order,
        *,
        by_slot: bool,
        failures: Failures | None = None,
    ) -> None:
        self.has_failed = False
        self._crawler = crawler
        self._spider = crawler.spider
        self._logger = logging.LoggerAdapter(logging.getLogger(__name__), {"spider": self._spider})
        self._store = store
        self._order = order
        self._failures = failures
        self._warns_unserializable = True
        self._batch = Batch()
        self._downloader = DownloaderInterface(crawler) if by_slot else None
        self._engine: Any = crawler.engine
        self._in_flight = InFlight(self._engine)
        self._flush_soon = CallLaterOnce(self.flush)

    def __len__(self) -> int:
        return 0 if self.has_failed else self._store.pending + len(self._batch.found)

    @property
    def in_flight(self) -> int:
        """Return how many requests were taken, and have not ended."""
        return len(self._in_flight)

    @abstractmethod
    def enqueue(self, request: Request, df: BaseDupeFilter) -> str | None:
        """Put a request into the batch, unless the filter has seen it, or the queue has failed.

        Return where it is kept, as in the stats: `place`, or "memory" if it cannot be serialized;
        the caller keeps that one. None: it was not new.
        """

    def _serialized(self, request: Request, fingerprint: bytes | None = None) -> Found | None:
        """Return what is to be stored of a request; None if it cannot be serialized."""
        rank, newest_first = self._order(request)
        if not isinstance(request.priority, int):  # no request could be made again with it
            error = ValueError(f"the priority {request.priority!r} is not an integer")
            self._warn_of_unserializable(request, error)
            return None
        try:
            data = serialized(request.to_dict(spider=self._spider))
        except ValueError as unserializable:
            self._warn_of_unserializable(request, unserializable)
            return None
        return Found(
            data,
            fingerprint,
            # A project may name slots as it likes, by numbers too.
            slot=str(self._downloader.get_slot_key(request)) if self._downloader else "",
            priority=request.priority,
            rank=rank,
            newest_first=newest_first,
        )

    def _add(self, found: Found) -> None:
        collected = self._batch.found
        collected.append(found)
        if len(collected) >= _MOST_FOUND:
            self.flush()
        elif len(collected) == 1:
            self._flush_soon.schedule()

    def flush(self) -> None:
        """Store the batch."""
        if batch := self._collected():
            self.attempt(self._store.apply, batch)
            self._stored()

    def _collected(self) -> Batch:
        return self._batch

    def _stored(self) -> None:
        if not self.has_failed:
            self._batch = Batch()

    def take(self) -> Request | None:
        """Return the next request, which is in flight from now on; None if none is to be taken."""
        while not self.has_failed:
            taken = self.attempt(self._store.take, self._collected(), self._downloads)
            self._stored()
            taken = taken or self._take_suspect()
            if taken is None:
                break
            try:
                request = self.deserialized(taken.data)
            except Exception as error:  # noqa: BLE001 - a callback that was renamed, for example
                self._logger.error(  # noqa: TRY400 - one line
                    "A request of the job cannot be made again, and is left in %s: %s: %s",
                    self._store.name,
                    type(error).__name__,
                    error,
                )
                self.attempt(self._store.set_aside, taken.id)
                continue
            self._in_flight.add(request, partial(self._done, taken.id))
            return request
        return None

    def _take_suspect(self) -> Taken | None:
        return None

    def took_from_memory(self, request: Request) -> None:
        """Note that a request is in flight that was kept in memory."""
        self._in_flight.add(request)

    def _downloads(self, slot: str) -> int:
        return self._downloader.stats([slot])[0][0] if self._downloader else 0

    def deserialized(self, data: bytes) -> Request:
        """Return a request that was stored. It may raise anything."""
        return request_from_dict(dict(deserialized(data)), spider=self._spider)

    def _done(self, row: Any) -> None:
        """Remove a request with the next batch: that has all that it led to, or an earlier one."""
        if not self.has_failed:  # else what it led to may have been refused
            self._batch.done.append(row)
            self._flush_soon.schedule()

    def close(self) -> None:
        """Store the last batch, and leave the queue to the next run."""
        self._in_flight.settle()
        self._flush_soon.cancel()
        if self.has_failed:  # perhaps there is room again; if not, that was told
            with contextlib.suppress(sqlite3.Error, OSError, StorageError):
                self._store.apply(self._collected())
                self.has_failed = False
                self._stored()
        else:
            self.flush()
        self.has_failed = True

    def attempt(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Take a step of the store; return None if it has failed, now or before: the crawl ends."""
        if self.has_failed:
            return None
        try:
            return function(*args, **options)
        except (sqlite3.Error, OSError, StorageError) as error:
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
        elif isinstance(error, (sqlite3.Error, OSError)):
            what = f"The queue in {self._store.name} cannot be written or read: {error}"
            rest = ", and nothing is lost: make room, or repair the disk, and start the crawl again"
        else:
            what, rest = str(error), ""
        self._logger.error("%s. The spider is closed (reason %s)%s", what, reason, rest)
        close_spider_soon(self._crawler, reason)

    def _warn_of_unserializable(self, request: Request, error: ValueError) -> None:
        if self._warns_unserializable:
            self._warns_unserializable = False
            self._logger.warning(
                "Unable to serialize request: %(request)s - reason: %(reason)s - it is kept in "
                "memory, and found again by the next run if this one dies - no more unserializable "
                "requests will be logged (stats being collected)",
                {"request": request, "reason": error},
                exc_info=error if self._crawler.settings.getbool("SCHEDULER_DEBUG") else None,
            )
        assert self._crawler.stats is not None
        self._crawler.stats.inc_value("scheduler/unserializable")

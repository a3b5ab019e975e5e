"""Define the queue of CrashSafeScheduler, in which a request stays until it is done."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any

from queuelib.queue import FifoDiskQueue, FifoSQLiteQueue, LifoDiskQueue, LifoSQLiteQueue
from scrapy import Request
from scrapy.crawler import Crawler
from scrapy.pqueues import DownloaderInterface, ScrapyPriorityQueue
from scrapy.settings import BaseSettings
from scrapy.squeues import FifoMemoryQueue
from scrapy.utils.misc import load_object
from scrapy.utils.reactor import CallLaterOnce
from scrapy.utils.request import request_from_dict
from twisted.internet.defer import Deferred

from scrapy_bloom.crawl.engine import Drops, MayGoOn, taking_turns
from scrapy_bloom.crawl.failures import Failures
from scrapy_bloom.crawl.scheduler.in_flight import Flight, InFlight
from scrapy_bloom.exceptions import SettingError
from scrapy_bloom.queues.batch import Found, Taken, deserialized, serialized, url_of
from scrapy_bloom.queues.sqlite import MOST_DEATHS

_STANDSTILL_SECS = 5.0  # without progress, after which callbacks may be waiting for a suspect

Order = Callable[[Request], tuple[int, bool]]


def order_of(crawler: Crawler) -> Order:
    """Return a function that tells how Scrapy orders requests of one priority.

    The function returns a request's rank (the lowest is taken first), and whether the newest
    request of the rank is taken first. Raises a SettingError if a disk queue has an unknown order.
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
    if isinstance(queue, type):
        # First, because LifoSQLiteQueue is a subclass of FifoSQLiteQueue.
        if issubclass(queue, LifoDiskQueue | LifoSQLiteQueue):
            return True
        if issubclass(queue, FifoDiskQueue | FifoSQLiteQueue):
            return False
    raise SettingError(
        f"{name} is {path!r}, whose order is unknown to CrashSafeScheduler; set "
        '"scrapy.squeues.PickleLifoDiskQueue" (newest first) or '
        '"scrapy.squeues.PickleFifoDiskQueue" (oldest first), or another disk queue of Scrapy'
    )


def _start_rank(crawler: Crawler) -> int:
    """Return 1 if start requests come after others, else -1; it depends on Scrapy's version."""
    queue = ScrapyPriorityQueue(crawler, FifoMemoryQueue, "", start_queue_cls=FifoMemoryQueue)
    queue.push(Request("data:,other"))
    queue.push(Request("data:,start", meta={"is_start_request": True}))
    first = queue.pop()
    return -1 if first is not None and first.url == "data:,start" else 1


def serves_least_busy_slot(crawler: Crawler) -> bool:
    """Return whether the least busy slot of the downloader is served first."""
    return not issubclass(
        load_object(crawler.settings["SCHEDULER_PRIORITY_QUEUE"]), ScrapyPriorityQueue
    )


class SafeQueue(ABC):
    """The requests of a crawl, pending or in flight, in a store that outlives the process.

    The queue collects a batch: the requests that callbacks found, the requests that are done, and
    the changes of the filter. The store applies a batch in one step. The constructor raises a
    SettingError if this version of Scrapy lacks a method.

    Args:
        crawler: the crawler of the requests.
        store_name: the place of the store in messages.
        failures: logs why the queue is unusable, and closes the spider.

    Attributes:
        has_failed: whether the store has failed; its requests stay in it.
        is_closed: whether `close` was called.
        in_flight: the requests in flight.
        storage: "disk" or "redis", as in the stats.
    """

    storage = "disk"

    def __init__(self, crawler: Crawler, store_name: str, failures: Failures) -> None:
        self.has_failed = self.is_closed = False
        self._progress_at = monotonic()
        self._crawler = crawler
        assert crawler.spider is not None
        assert crawler.stats is not None
        self._stats = crawler.stats
        self._spider = crawler.spider
        self._logger = logging.LoggerAdapter(logging.getLogger(__name__), {"spider": self._spider})
        self._store_name = store_name
        self._order = order_of(crawler)
        self._failures = failures
        self._warns_unserializable = True
        self._downloader = DownloaderInterface(crawler) if serves_least_busy_slot(crawler) else None
        self._engine: Any = crawler.engine
        self.in_flight = InFlight(self._engine)
        self._flush_soon = CallLaterOnce(self.flush)
        self._turn = taking_turns()

    @property
    def is_open(self) -> bool:
        """Return whether the queue accepts changes: it has not failed, and is not closed."""
        return not (self.has_failed or self.is_closed)

    @abstractmethod
    def __len__(self) -> int:
        """Return how many requests are pending; not 0 while other workers may have some."""

    def watch(self, request: Request, result: Any) -> tuple[Drops, MayGoOn] | None:
        """Note which requests a request in flight leads to, and pace its output."""
        flight = self.in_flight.handled(request, result)

        def led_to(element: object) -> bool:
            if flight is not None and isinstance(element, Request):
                self.in_flight.led_to(flight, element)
            return False

        return led_to, partial(self.may_go_on, flight)

    async def may_go_on(self, flight: Flight | None) -> bool:  # noqa: ARG002
        """Wait until Scrapy may consume more of the output of a request, or of start() if None.

        Return False if Scrapy must not consume more of it, so that the request stays in flight.
        """
        return await self._turn()

    @abstractmethod
    def enqueue(self, request: Request) -> str | None:
        """Add a request to the batch, unless the duplicate filter has seen it.

        Return `storage`. Return "memory" if the request cannot be serialized, so that the caller
        has to keep it. Return None if it is a duplicate.
        """

    @abstractmethod
    def flush(self) -> None:
        """Store the batch, now or soon."""

    @abstractmethod
    def take(self) -> Request | None:
        """Return the next request, which is in flight from now on; None if there is none yet."""

    @abstractmethod
    def close(self) -> Deferred[None] | None:
        """Store the last batch; pending requests stay for the next run, or for other workers."""

    def _serialized(
        self, request: Request, fingerprint: bytes | None = None, **more: Any
    ) -> Found | None:
        """Return a request in the form that the store keeps; None if it cannot be serialized.

        `more` are further fields.
        """
        try:
            if not isinstance(request.priority, int):  # Request.from_dict would refuse it
                raise ValueError(f"the priority {request.priority!r} is not an integer")  # noqa: TRY004, TRY301 - logged like the other reasons
            data = serialized(request.to_dict(spider=self._spider))
        except ValueError as error:
            self._warn_of_unserializable(request, error)
            return None
        rank, newest_first = self._order(request)
        return Found(
            data,
            fingerprint,
            slot=str(self._downloader.get_slot_key(request)) if self._downloader else "",
            priority=request.priority,
            rank=rank,
            newest_first=newest_first,
            request=request,
            **more,
        )

    def _log_dead(self, data: bytes, processes: str) -> None:
        self._logger.error(
            "%s was in flight in %d %s that died, the last time alone: it is not crawled any more. "
            "It is kept in %s: `scrapy bloom queue --dead` shows it",
            url_of(data),
            MOST_DEATHS + 1,
            processes,
            self._store_name,
        )

    def _downloads(self, slot: str) -> int:
        return self._downloader.stats([slot])[0][0] if self._downloader else 0

    def _stands_still(self) -> bool:
        """Return whether all requests in flight wait, perhaps for a suspect."""
        is_late = monotonic() >= self._progress_at + _STANDSTILL_SECS
        return is_late and not self._engine.downloader.active

    def _hand_out(
        self, taken: Taken, downloaded: Callable[[], object] = lambda: None
    ) -> Request | None:
        """Return a request that is in flight from now on; set it aside if it is unreadable.

        `downloaded` is called when its download has ended, or was skipped.
        """
        try:
            request = request_from_dict(dict(deserialized(taken.data)), spider=self._spider)
        except Exception as error:  # noqa: BLE001 - a callback that was renamed, for example
            self._logger.error(  # noqa: TRY400 - the line has the reason
                "A request of the job cannot be deserialized, and stays in %s: %s: %s",
                self._store_name,
                type(error).__name__,
                error,
            )
            self._set_aside(taken)
            return None
        self._progress_at = monotonic()
        self.in_flight.add(request, partial(self._done, taken.id), downloaded)
        return request

    def _done(self, row: Any) -> None:
        """Remove a request with the next batch, which contains or follows all that it led to."""
        self._progress_at = monotonic()
        if self.is_open:  # otherwise a request that it led to may have been refused
            self._collect_done(row)
            self._flush_soon.schedule()

    @abstractmethod
    def _collect_done(self, row: Any) -> None:
        """Add a request that is done to the batch."""

    @abstractmethod
    def _set_aside(self, taken: Taken) -> None:
        """Keep a request that this process cannot deserialize for another one."""

    def _fail(self, error: Exception) -> None:
        self.has_failed = True
        self._failures.close_for_queue(error, self._store_name)

    def _warn_of_unserializable(self, request: Request, error: ValueError) -> None:
        if self._warns_unserializable:
            self._warns_unserializable = False
            self._logger.warning(
                "Unable to serialize request: %(request)s - reason: %(reason)s - it is kept in "
                "memory, and if this run dies, the next run finds it again - no more "
                "unserializable requests will be logged (stats being collected)",
                {"request": request, "reason": error},
                exc_info=error if self._crawler.settings.getbool("SCHEDULER_DEBUG") else None,
            )
        self._stats.inc_value("scheduler/unserializable")

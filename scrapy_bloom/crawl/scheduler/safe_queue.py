"""The queue of CrashSafeScheduler: a request stays in it until it is done."""

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from queuelib.queue import FifoDiskQueue, LifoDiskQueue
from scrapy import Request
from scrapy.crawler import Crawler
from scrapy.pqueues import DownloaderInterface, ScrapyPriorityQueue
from scrapy.settings import BaseSettings
from scrapy.squeues import FifoMemoryQueue
from scrapy.utils.misc import load_object
from scrapy.utils.reactor import CallLaterOnce
from scrapy.utils.request import request_from_dict
from twisted.internet.defer import Deferred

from scrapy_bloom.crawl.engine import taking_turns
from scrapy_bloom.crawl.failures import Failures
from scrapy_bloom.crawl.scheduler.in_flight import InFlight
from scrapy_bloom.exceptions import SettingError
from scrapy_bloom.queues.batch import Found, Limit, Limits, Taken, deserialized, serialized, url_of
from scrapy_bloom.queues.sqlite import MOST_DEATHS
from scrapy_bloom.text import counted, escaped

_MOST_LOGGED_SLOTS = 100  # hosts whose limit is logged
DROPPED = "dropped"
STANDSTILL_SECS = 5.0  # without a download or an end: all callbacks wait, perhaps for a suspect

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


def serves_least_busy_slot(crawler: Crawler) -> bool:
    """Return whether the least busy slot of the downloader is served first."""
    return not issubclass(
        load_object(crawler.settings["SCHEDULER_PRIORITY_QUEUE"]), ScrapyPriorityQueue
    )


def limits_of(crawler: Crawler) -> Limits:
    """Return the limits that Scrapy's settings and the spider set for each slot."""
    settings, spider = crawler.settings, crawler.spider
    usual = settings.getint("CONCURRENT_REQUESTS_PER_IP") or settings.getint(
        "CONCURRENT_REQUESTS_PER_DOMAIN"
    )
    usual = getattr(spider, "max_concurrent_requests", usual)
    adapts = settings.getbool("AUTOTHROTTLE_ENABLED")  # the delay, within a worker
    delay = getattr(spider, "download_delay", settings.getfloat("DOWNLOAD_DELAY"))
    return Limits(
        Limit(int(usual), bool(delay) or adapts),
        {
            slot: Limit(each.get("concurrency", usual), bool(each.get("delay", delay)) or adapts)
            for slot, each in settings.getdict("DOWNLOAD_SLOTS").items()
        },
    )


class SafeQueue(ABC):
    """The requests of a crawl, pending or in flight, in a store that outlives the process.

    What callbacks produce is collected in a batch: requests found and done, and the changes of the
    filter. The store applies it as one step. The constructor raises a SettingError if this version
    of Scrapy works in another way.

    Args:
        crawler: whose requests they are.
        store_name: where they are, for people.
        failures: logs why the queue cannot be used, and closes the spider.
        max_pages: BLOOM_MAX_PAGES_PER_SLOT.

    Attributes:
        has_failed: the store has failed, or is closed. What is in it stays.
        place: "disk" or "redis", as in the stats.
    """

    place = "disk"

    def __init__(
        self, crawler: Crawler, store_name: str, failures: Failures, *, max_pages: int = 0
    ) -> None:
        self.has_failed = False
        self._max_pages = max_pages
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
        self._logged_slots: set[str] = set()  # that have had their limit of requests
        by_slot = serves_least_busy_slot(crawler)
        self._downloader = DownloaderInterface(crawler) if by_slot else None
        self._limits = limits_of(crawler) if by_slot else Limits()
        self._downloading: Counter[str] = Counter()  # by slot, from when they are taken
        self._engine: Any = crawler.engine
        self._in_flight = InFlight(self._engine)
        self._flush_soon = CallLaterOnce(self.flush)
        self._turn = taking_turns()

    @abstractmethod
    def __len__(self) -> int:
        """Return how many requests are pending; not 0 if others may have some."""

    async def may_go_on(self, request: Request | None) -> bool:  # noqa: ARG002
        """Wait until more of the output of a request, or of start(), may be consumed.

        False: no more of it is to be consumed, and it stays in flight.
        """
        await self._turn()
        return True

    def yielded(self, each: Any) -> None:  # noqa: B027 - nobody has to know
        """Note a request or item that was yielded by a callback, an errback, or start()."""

    @abstractmethod
    def enqueue(self, request: Request) -> str | None:
        """Put a request into the batch, unless the duplicate filter has seen it.

        Return where it is kept, as in the stats: `place`, or "memory" if it cannot be serialized;
        the caller keeps that one. None: it was not new. `DROPPED`: its host has had its limit.
        """

    @abstractmethod
    def flush(self) -> None:
        """Store what is collected, or have it stored soon."""

    @abstractmethod
    def take(self) -> Request | None:
        """Return the next request, which is in flight from now on; None if none is to be taken."""

    @abstractmethod
    def close(self) -> Deferred[None] | None:
        """Store the last batch, and leave the queue to the next run, or to other workers."""

    def _serialized(self, request: Request, fingerprint: bytes | None = None) -> Found | None:
        """Return what is to be stored of a request; None if it cannot be serialized."""
        rank, newest_first = self._order(request)
        if not isinstance(request.priority, int):  # it could not be deserialized with it
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
            slot=self._slot_of(request),
            priority=request.priority,
            rank=rank,
            newest_first=newest_first,
        )

    def _slot_of(self, request: Request) -> str:
        """Return the slot of the downloader; a project may name slots by numbers, too."""
        return str(self._downloader.get_slot_key(request)) if self._downloader else ""

    def _count_beyond_limit(self, slot: str) -> None:
        """Count a request that is dropped because of BLOOM_MAX_PAGES_PER_SLOT."""
        self._stats.inc_value("scheduler/dropped/slot_limit")
        if slot in self._logged_slots or len(self._logged_slots) >= _MOST_LOGGED_SLOTS:
            return
        self._logged_slots.add(slot)
        is_last = len(self._logged_slots) == _MOST_LOGGED_SLOTS
        self._logger.info(
            "The host %s has had its %s (BLOOM_MAX_PAGES_PER_SLOT): further requests to it are "
            "dropped, and counted in scheduler/dropped/slot_limit%s",
            escaped(slot),
            counted(self._max_pages, "request", "requests"),
            ". No further hosts are logged" if is_last else "",
        )

    def _log_unreadable(self, error: Exception) -> None:
        self._logger.error(
            "A request of the job cannot be deserialized, and is left in %s: %s: %s",
            self._store_name,
            type(error).__name__,
            error,
        )

    def _log_dead(self, data: bytes, processes: str) -> None:
        self._logger.error(
            "%s was in flight in %d %s that died, the last time alone: it is not crawled any more. "
            "It is kept in %s: `scrapy bloom info` shows it",
            url_of(data),
            MOST_DEATHS + 1,
            processes,
            self._store_name,
        )

    def add_in_flight(self, request: Request) -> None:
        """Note that a request was taken that is kept in memory."""
        self._in_flight.add(request)

    def _downloads(self, slot: str) -> int:
        return self._downloader.stats([slot])[0][0] if self._downloader else 0

    def _is_closed(self, slot: str) -> bool:
        """Return whether a request of a slot would only wait in the downloader.

        Scrapy itself counts a download when it has begun, and so begins too many with asyncio.
        """
        if 0 < self._limits.of(slot).concurrency <= self._downloading[slot]:
            return True
        return self._waits_for_delay(slot)

    def _waits_for_delay(self, slot: str) -> bool:
        found = self._engine.downloader.slots.get(slot)
        return bool(found and found.delay and found.queue)

    def _hand_out(self, request: Request, slot: str, taken: Taken) -> Request:
        """Note that a request is handed out, to be downloaded."""
        self._downloading[slot] += 1
        downloaded = partial(self._downloaded, slot, taken)
        self._in_flight.add(request, partial(self._done, taken.id), downloaded)
        return request

    def _downloaded(self, slot: str, taken: Taken) -> None:  # noqa: ARG002 - for a shared queue
        self._downloading[slot] -= 1
        if not self._downloading[slot]:
            del self._downloading[slot]

    @abstractmethod
    def _done(self, row: Any) -> None:
        """Remove a request with the next batch."""

    def deserialized(self, data: bytes) -> Request:
        """Return a request that was stored; raises anything, as when its callback is gone."""
        return request_from_dict(dict(deserialized(data)), spider=self._spider)

    def _fail(self, error: Exception) -> None:
        self.has_failed = True
        self._failures.close_for_queue(error, self._store_name)

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
        self._stats.inc_value("scheduler/unserializable")

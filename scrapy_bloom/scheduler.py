"""A scheduler whose requests survive the death of the process, at any instant."""

import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import scrapy
from scrapy import Request, Spider
from scrapy.core.scheduler import BaseScheduler
from scrapy.crawler import Crawler
from scrapy.dupefilters import BaseDupeFilter
from scrapy.pqueues import ScrapyPriorityQueue
from scrapy.statscollectors import StatsCollector
from scrapy.utils.job import job_dir
from scrapy.utils.misc import build_from_crawler, load_object
from scrapy.utils.request import request_from_dict
from twisted.internet.defer import Deferred

from scrapy_bloom import jobdir
from scrapy_bloom.dupefilter import BloomDupeFilter
from scrapy_bloom.engine import close_spider_soon, command_without_crawl, fail_at_the_start
from scrapy_bloom.exceptions import BloomError
from scrapy_bloom.inflight import InFlight
from scrapy_bloom.jobqueues import check_no_disk_queue
from scrapy_bloom.locks import Lock, lock_file
from scrapy_bloom.order import Order
from scrapy_bloom.requestdb import RequestDatabase, unpacked

logger = logging.getLogger(__name__)

# Beside the one that is downloaded, others are being scraped: Scrapy goes on meanwhile, and the
# order of a crawl with CONCURRENT_REQUESTS = 1 depends on it.
_FEW_IN_FLIGHT = 8


class CrashSafeScheduler(BaseScheduler):
    """Scrapy's scheduler with a queue that survives `kill -9`: `SCHEDULER` in the settings.

    With a JOBDIR, requests are kept in a SQLite database there, from before they are recorded in
    the duplicate filter until all that they led to is scheduled and their items are through. A
    process that dies leaves them pending or in flight; the next run with the same job directory
    crawls both. Without a JOBDIR, it is Scrapy's scheduler in memory.

    Order, statistics and settings are those of Scrapy's scheduler; of SCHEDULER_DISK_QUEUE, only
    the order counts.

    Args:
        crawler: with its settings, stats and, from `open` on, its engine.
        dupefilter: told of each request that is to be filtered.
        job: the job directory, None without one.

    Raises:
        SettingError: the order of the disk queues that are set is unknown.
    """

    is_crash_safe = True

    def __init__(self, crawler: Crawler, dupefilter: BaseDupeFilter, job: Path | None) -> None:
        settings = crawler.settings
        assert crawler.stats is not None
        self.df = dupefilter
        self.crawler = crawler
        self.stats: StatsCollector = crawler.stats
        self.spider: Spider
        self._job = job
        self._logs_unserializable = settings.getbool("SCHEDULER_DEBUG")
        self._pqclass = load_object(settings["SCHEDULER_PRIORITY_QUEUE"])
        self._order = Order.of(crawler)
        self._memory: Any = None
        self._database: RequestDatabase | None = None
        self._in_flight: InFlight | None = None
        self._active: Callable[[str], int] = lambda _: 0
        self._slot_of: Callable[[Request], str] = lambda _: ""
        self._has_failed = False
        self._most_in_flight = settings.getint("CONCURRENT_REQUESTS")
        if 0 < self._most_in_flight < _FEW_IN_FLIGHT:
            self._most_in_flight = _FEW_IN_FLIGHT
        if scrapy.version_info < (2, 14):  # whose scraper keeps each response for 0.1 seconds
            self._most_in_flight *= 2
        self._lock: Lock | None = None

    @classmethod
    def from_crawler(cls, crawler: Crawler) -> "CrashSafeScheduler":
        """Build it, with the duplicate filter of the settings.

        Raises:
            BloomError: the job directory is one of Scrapy's own scheduler, or a setting is not
                valid. It is logged as well, because Scrapy buries it under an error of its own.
        """
        path, is_crawl = job_dir(crawler.settings), not command_without_crawl(crawler)
        job = Path(path).absolute() if path and is_crawl else None
        try:
            if job is not None:
                check_no_disk_queue(job)
            Order.of(crawler)  # sooner than the filter is made
        except BloomError as error:
            fail_at_the_start(crawler, error, logger)
        # The filter tells of its own errors.
        dupefilter = load_object(crawler.settings["DUPEFILTER_CLASS"])
        new = cls(crawler, build_from_crawler(dupefilter, crawler), job)
        if is_crawl and job is None:
            logger.warning(
                "Without a JOBDIR, CrashSafeScheduler keeps its queue in memory, and none of it "
                'survives the end of the process: set JOBDIR, for example to "jobs/shop"',
                extra={"spider": crawler.spider},
            )
        return new

    def open(self, spider: Spider) -> Deferred[None] | None:
        """Open the queues, and the duplicate filter.

        Raises:
            StorageError: the database cannot be used.
        """
        self.spider = spider
        self._memory = self._memory_queue()
        if self._job is not None:
            try:
                self._open_database(self._job)
            except BloomError as error:
                self.close("bloom_error")  # else nobody would: Scrapy's slot is not ready
                fail_at_the_start(self.crawler, error, logger)
        opened: Deferred[None] | None = self.df.open()
        if self._database is not None and (newest := self._database.newest()) is not None:
            if opened is None:
                self._record(newest)
            else:
                opened.addCallback(lambda _: self._record(newest))
        return opened

    def _open_database(self, job: Path) -> None:
        engine: Any = self.crawler.engine
        by_slot = not issubclass(self._pqclass, ScrapyPriorityQueue)
        database = jobdir.database_path(job)
        self._lock = lock_file(Path(f"{database}.lock"), database, "JOBDIR")
        self._database = RequestDatabase(database, by_slot=by_slot)
        if by_slot:
            self._slot_of = engine.downloader.get_slot_key
            slots = engine.downloader.slots
            self._active = lambda slot: len(slots[slot].active) if slot in slots else 0
        self._in_flight = InFlight(engine, self._done)
        if self._database.resumed:
            again = ""
            if self._database.were_in_flight:
                again = (
                    f", {self._database.were_in_flight:,} of them in flight when the last run "
                    "was killed"
                )
            logger.info(
                "Resuming crawl (%s requests scheduled%s)",
                f"{self._database.resumed:d}",
                again,
                extra={"spider": self.spider},
            )

    def _record(self, newest: bytes) -> None:
        """Record what was added last: the process may have died before that was done."""
        try:
            request = request_from_dict(dict(unpacked(newest)), spider=self.spider)
        except Exception:  # noqa: BLE001 - it will be told of when it is taken
            return
        if not request.dont_filter:
            self.df.request_seen(request)

    def close(self, reason: str) -> Deferred[None] | None:
        """Close the queue, as it is, and the duplicate filter."""
        if self._in_flight is not None:
            self._in_flight.settle()
        if self._database is not None:
            self._database.close()
        if self._lock is not None:
            self._lock.release()
        return self.df.close(reason)

    def has_pending_requests(self) -> bool:
        """Return whether there is a request to take."""
        return len(self) > 0

    def __len__(self) -> int:
        on_disk = self._database.pending if self._database is not None else 0
        # What can't be read any more must not keep the spider open.
        return len(self._memory) + (0 if self._has_failed else on_disk)

    def enqueue_request(self, request: Request) -> bool:
        """Store a request, unless the duplicate filter has it; whether it was stored.

        It is stored before it is recorded in the filter: so there is no instant at which it looks
        seen, and is nowhere queued.
        """
        if self._has_failed:
            return False  # what led to it is in flight for ever, that is, until the next run
        queued: list[int | None] = []

        def queue() -> bool:
            if not queued:
                queued.append(self._push(request))
            return not self._has_failed

        if not request.dont_filter and self._is_seen(request, queue):
            if queued and queued[0] is not None and not self._has_failed:
                assert self._database is not None
                self._attempt(self._database.remove, queued[0], was_pending=True)
            if not self._has_failed:
                self.df.log(request, self.spider)
            return False
        if not queue():
            return False
        if queued[0] is None:
            self._memory.push(request)
        kind = "memory" if queued[0] is None else "disk"
        self.stats.inc_value(f"scheduler/enqueued/{kind}")
        self.stats.inc_value("scheduler/enqueued")
        return True

    def _is_seen(self, request: Request, queue: Callable[[], bool]) -> bool:
        if self._database is None:
            return self.df.request_seen(request)
        df = self.df
        if isinstance(df, BloomDupeFilter) and (
            type(df).request_seen is BloomDupeFilter.request_seen  # or it may not know the keyword
        ):
            return df.request_seen(request, before_recording=queue)
        # Another filter can't be asked without being told.
        return not queue() or self.df.request_seen(request)

    def next_request(self) -> Request | None:
        """Return the next request, which is in flight from now on; None if there is none."""
        request: Request | None = self._memory.pop()
        kind = "memory"
        if request is None and not self._has_failed:
            request, kind = self._taken(), "disk"
        if request is not None:
            self.stats.inc_value(f"scheduler/dequeued/{kind}")
            self.stats.inc_value("scheduler/dequeued")
        return request

    def _taken(self) -> Request | None:
        # What is in flight is crawled twice after a crash: that is kept to what is promised, also
        # while responses wait to be scraped.
        if self._in_flight is not None and 0 < self._most_in_flight <= len(self._in_flight):
            return None
        while self._database is not None and self._database.pending:
            taken = self._attempt(self._database.take, self._active)
            if taken is None:
                return None
            try:
                request = request_from_dict(dict(unpacked(taken.data)), spider=self.spider)
            except Exception as error:  # noqa: BLE001 - a callback that was renamed, for example
                logger.error(  # noqa: TRY400 - one line
                    "A request of the job cannot be made again, and is left in %s: %s: %s",
                    self._database.path,
                    type(error).__name__,
                    error,
                    extra={"spider": self.spider},
                )
                continue
            assert self._in_flight is not None
            self._in_flight.add(request, taken.id)
            return request
        return None

    def _push(self, request: Request) -> int | None:
        """Return the row of a request that was stored; None if it is for the memory."""
        if self._database is None:
            return None
        rank, newest_first = self._order.place(request)
        try:
            data = request.to_dict(spider=self.spider)
            row: int | None = self._attempt(
                self._database.push,
                data,
                slot=self._slot_of(request),
                priority=request.priority,
                rank=rank,
                newest_first=newest_first,
            )
        except ValueError as error:
            self._tell_of_unserializable(request, error)
            return None
        return row

    def _done(self, row: int) -> None:
        """Remove a request: all that it led to is scheduled."""
        # If something was not, it has to be in flight for the next run.
        if not self._has_failed:
            assert self._database is not None
            self._attempt(self._database.remove, row)

    def _attempt(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Change the database; if that fails, the crawl is over. None then."""
        try:
            return function(*args, **options)
        except sqlite3.Error as error:
            self._has_failed = True
            assert self._database is not None
            logger.error(  # noqa: TRY400 - one line
                "The queue in %s cannot be written or read: %s. The spider is closed (reason "
                "bloom_queue_failed), and nothing is lost: make room, or repair the disk, and "
                "start the crawl again",
                self._database.path,
                error,
                extra={"spider": self.spider},
            )
            close_spider_soon(self.crawler, "bloom_queue_failed")
            return None

    def _tell_of_unserializable(self, request: Request, error: ValueError) -> None:
        if self._logs_unserializable:
            logger.warning(
                "Unable to serialize request: %(request)s - reason: %(reason)s - no more "
                "unserializable requests will be logged (stats being collected)",
                {"request": request, "reason": error},
                exc_info=error,
                extra={"spider": self.spider},
            )
            self._logs_unserializable = False
        self.stats.inc_value("scheduler/unserializable")

    def _memory_queue(self) -> Any:
        settings = self.crawler.settings
        start = settings["SCHEDULER_START_MEMORY_QUEUE"]
        return build_from_crawler(
            self._pqclass,
            self.crawler,
            downstream_queue_cls=load_object(settings["SCHEDULER_MEMORY_QUEUE"]),
            key="",
            start_queue_cls=load_object(start) if start else None,
        )

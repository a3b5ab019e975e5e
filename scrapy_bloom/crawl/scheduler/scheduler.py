"""A scheduler whose requests survive the death of the process, at any instant."""

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scrapy import Request, Spider
from scrapy.core.scheduler import BaseScheduler
from scrapy.crawler import Crawler
from scrapy.dupefilters import BaseDupeFilter
from scrapy.pqueues import ScrapyPriorityQueue
from scrapy.statscollectors import StatsCollector
from scrapy.utils.job import job_dir
from scrapy.utils.misc import build_from_crawler, load_object
from twisted.internet.defer import Deferred

from scrapy_bloom.crawl.dupefilter import BloomDupeFilter
from scrapy_bloom.crawl.engine import command_without_crawl, fail_at_the_start
from scrapy_bloom.crawl.scheduler.safe_queue import SafeQueue, order_of
from scrapy_bloom.exceptions import BloomError, SettingError
from scrapy_bloom.job import paths as jobdir
from scrapy_bloom.job.locks import lock_job
from scrapy_bloom.queues.conflicts import check_no_disk_queue
from scrapy_bloom.queues.sqlite import RequestDatabase

logger = logging.getLogger(__name__)


class CrashSafeScheduler(BaseScheduler):
    """Scrapy's scheduler with a queue that survives `kill -9`: `SCHEDULER` in the settings.

    With a JOBDIR, requests are kept in a SQLite database there. They get in before they are
    recorded in the duplicate filter. They stay until all that they led to is scheduled and their
    items are through. A process that dies leaves them pending or in flight; the next run with the
    same job directory crawls both. Without a JOBDIR, it is Scrapy's scheduler in memory.

    With BLOOM_QUEUE = "redis", requests are kept in Redis in the same way, and all crawlers that
    have the same filter share them. What a dead one had in flight is crawled by the others.

    Order, statistics and settings are those of Scrapy's scheduler; of SCHEDULER_DISK_QUEUE, only
    the order counts, and an unknown one is a SettingError.
    """

    is_crash_safe = True

    def __init__(self, crawler: Crawler, dupefilter: BaseDupeFilter, job: Path | None) -> None:
        assert crawler.stats is not None
        self.df = dupefilter
        self.crawler = crawler
        self.stats: StatsCollector = crawler.stats
        self.spider: Spider
        self._job = job
        self._pqclass = load_object(crawler.settings["SCHEDULER_PRIORITY_QUEUE"])
        self._order = order_of(crawler)
        self._memory: Any = None
        self._queue: SafeQueue | None = None
        self._stored_in = "disk"  # where that is, in the stats
        self._newest: bytes | None = None  # request of a job that was resumed
        self._held = contextlib.ExitStack()  # what is to be released at the close
        self._job_lock = contextlib.ExitStack()  # and after that

    @classmethod
    def from_crawler(cls, crawler: Crawler) -> "CrashSafeScheduler":
        """Build it, with the duplicate filter of the settings.

        Raises:
            BloomError: the job directory is one of Scrapy's own scheduler, or a setting is not
                valid. It is logged as well, because Scrapy buries it under an error of its own.
        """
        path, is_crawl = job_dir(crawler.settings), not command_without_crawl(crawler)
        job = Path(path).absolute() if path and is_crawl else None
        is_shared = is_crawl and crawler.settings.get("BLOOM_QUEUE") == "redis"
        dupefilter = load_object(crawler.settings["DUPEFILTER_CLASS"])
        is_ours = isinstance(dupefilter, type) and issubclass(dupefilter, BloomDupeFilter)
        job_lock = contextlib.ExitStack()
        try:
            if job is not None and not is_ours:  # else the filter does it
                job_lock.callback(lock_job(job).release)
            if job is not None:
                check_no_disk_queue(job)
            order_of(crawler)  # sooner than the filter is made
            if is_shared and not is_ours:
                raise SettingError(
                    'BLOOM_QUEUE is "redis", and DUPEFILTER_CLASS is '
                    f"{crawler.settings['DUPEFILTER_CLASS']!r}: the queue is beside a filter of "
                    'scrapy_bloom; set DUPEFILTER_CLASS = "scrapy_bloom.BloomDupeFilter", or '
                    'BLOOM_QUEUE = "job"'
                )
        except BloomError as error:
            job_lock.close()
            fail_at_the_start(crawler, error, logger)
        # The filter tells of its own errors.
        new = cls(crawler, build_from_crawler(dupefilter, crawler), None if is_shared else job)
        new._job_lock = job_lock
        if is_crawl and job is None and not is_shared:
            logger.warning(
                "Without a JOBDIR, CrashSafeScheduler keeps its queue in memory, and none of it "
                'survives the end of the process: set JOBDIR, for example to "jobs/shop"',
                extra={"spider": crawler.spider},
            )
        return new

    def open(self, spider: Spider) -> Deferred[None] | None:
        """Open the queues, and the duplicate filter.

        Raises:
            StorageError: the database or the server cannot be used.
        """
        self.spider = spider
        settings = self.crawler.settings
        start = settings["SCHEDULER_START_MEMORY_QUEUE"]
        self._memory = build_from_crawler(
            self._pqclass,
            self.crawler,
            downstream_queue_cls=load_object(settings["SCHEDULER_MEMORY_QUEUE"]),
            key="",
            start_queue_cls=load_object(start) if start else None,
        )
        by_slot = not issubclass(self._pqclass, ScrapyPriorityQueue)
        try:
            if self._job is not None:
                self._open_job(self._job, by_slot=by_slot)
            elif isinstance(self.df, BloomDupeFilter) and self.df.settings.queue == "redis":
                self._join_crawl(self.df, by_slot=by_slot)
        except BloomError as error:
            self.close("bloom_error")  # else nobody would: Scrapy's slot is not ready
            fail_at_the_start(self.crawler, error, logger)
        opened: Deferred[None] | None = self.df.open()
        if opened is None:
            self._record_newest()
        else:
            opened.addCallback(lambda _: self._record_newest())
        return opened

    def _open_job(self, job: Path, *, by_slot: bool) -> None:
        """Open the queue of a job directory, which no other crawl uses meanwhile."""
        database = RequestDatabase(job / jobdir.DATABASE, by_slot=by_slot)
        self._held.callback(database.close)
        self._queue = SafeQueue(self.crawler, database, self._order, by_slot=by_slot)
        self._newest = database.newest()
        if database.resumed:
            killed = database.were_in_flight
            logger.info(
                "Resuming crawl (%d requests scheduled%s)",
                database.resumed,
                f", {killed:,} of them in flight when the last run was killed" if killed else "",
                extra={"spider": self.spider},
            )

    def _join_crawl(self, df: BloomDupeFilter, *, by_slot: bool) -> None:
        """Share the queue in Redis with other workers."""
        from scrapy_bloom.crawl.scheduler.shared_crawl import SharedCrawl  # noqa: PLC0415 - for those who use it

        self._stored_in = "redis"
        shared = SharedCrawl(self.crawler, df, self._record, by_slot=by_slot)
        self._held.callback(shared.close)
        self._queue = SafeQueue(
            self.crawler, shared.queue, self._order, failures=df.failures, by_slot=by_slot
        )
        shared.begin(self._queue)

    def _record_newest(self) -> None:
        """Record the request that was added last: the process may have died before it did."""
        if self._newest is not None:
            self._record(self._newest)

    def _record(self, stored: bytes) -> None:
        if self._queue is None:
            return
        with contextlib.suppress(Exception):  # it will be told of when it is taken
            request = self._queue.unpacked(stored)
            if not request.dont_filter:
                self.df.request_seen(request)

    def close(self, reason: str) -> Deferred[None] | None:
        """Close the queue, as it is, and the duplicate filter."""
        if self._queue is not None:
            self._queue.close()
        self._held.close()
        with self._job_lock:
            return self.df.close(reason)

    def has_pending_requests(self) -> bool:
        """Return whether there is a request to take."""
        return len(self) > 0

    def __len__(self) -> int:
        return len(self._memory) + (len(self._queue) if self._queue is not None else 0)

    def enqueue_request(self, request: Request) -> bool:
        """Store a request, unless the duplicate filter has it; return whether it was stored.

        It is stored before it is recorded in the filter: at no instant does it look seen and is
        nowhere queued.
        """
        if self._has_failed():
            return False  # what led to it is in flight for ever, that is, until the next run
        row: int | None = None  # 0: it is kept in memory

        def store() -> bool:
            nonlocal row
            if row is None:
                row = self._queue.push(request) if self._queue is not None else 0
            return not self._has_failed()

        if not request.dont_filter and self._is_seen(request, store):
            if self._queue is not None and row:
                self._queue.take_back()
            if not self._has_failed():
                self.df.log(request, self.spider)
            return False
        if not store():
            return False
        if not row:
            self._memory.push(request)
        kind = self._stored_in if row else "memory"
        self.stats.inc_value(f"scheduler/enqueued/{kind}")
        self.stats.inc_value("scheduler/enqueued")
        return True

    def _has_failed(self) -> bool:
        return self._queue is not None and self._queue.has_failed

    def _is_seen(self, request: Request, store: Callable[[], bool]) -> bool:
        df = self.df
        if self._queue is None:
            return df.request_seen(request)
        if isinstance(df, BloomDupeFilter) and (
            type(df).request_seen is BloomDupeFilter.request_seen  # or it may not know the keyword
        ):
            return df.request_seen(request, before_recording=store)
        # Another filter can't be asked without being told.
        return not store() or df.request_seen(request)

    def next_request(self) -> Request | None:
        """Return the next request, which is in flight from now on; None if there is none."""
        request: Request | None = self._memory.pop()
        kind = "memory"
        if request is None and self._queue is not None:
            request, kind = self._queue.take(), self._stored_in
        if request is not None:
            self.stats.inc_value(f"scheduler/dequeued/{kind}")
            self.stats.inc_value("scheduler/dequeued")
        return request

"""A scheduler whose requests survive the death of the process, at any instant."""

import contextlib
import logging
from pathlib import Path
from typing import Any

from scrapy import Request, Spider
from scrapy.core.scheduler import BaseScheduler
from scrapy.crawler import Crawler
from scrapy.dupefilters import BaseDupeFilter
from scrapy.statscollectors import StatsCollector
from scrapy.utils.job import job_dir
from scrapy.utils.misc import build_from_crawler, load_object
from twisted.internet.defer import Deferred

from scrapy_bloom.crawl.dupefilter import BloomDupeFilter
from scrapy_bloom.crawl.engine import command_without_crawl, pace
from scrapy_bloom.crawl.scheduler.job_queue import JobQueue
from scrapy_bloom.crawl.scheduler.safe_queue import (
    DROPPED,
    SafeQueue,
    order_of,
    serves_least_busy_slot,
)
from scrapy_bloom.crawl.startup import fail_at_the_start
from scrapy_bloom.exceptions import BloomError, SettingError
from scrapy_bloom.files.backend import LocalBackend
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

    With BLOOM_BACKEND = "redis", requests are kept in Redis in the same way, and all crawlers that
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
        self._by_slot = serves_least_busy_slot(crawler)
        self._memory: Any = None
        self._database: RequestDatabase | None = None
        self._queue: SafeQueue | None = None
        self._resources = contextlib.ExitStack()  # released at the close

    @classmethod
    def from_crawler(cls, crawler: Crawler) -> "CrashSafeScheduler":
        """Build it, with the duplicate filter of the settings.

        Raises:
            BloomError: the job directory is one of Scrapy's own scheduler, or a setting is not
                valid. It is logged as well, because Scrapy buries it under an error of its own.
        """
        path, is_crawl = job_dir(crawler.settings), not command_without_crawl(crawler)
        job = Path(path).absolute() if path and is_crawl else None
        dupefilter = load_object(crawler.settings["DUPEFILTER_CLASS"])
        is_ours = isinstance(dupefilter, type) and issubclass(dupefilter, BloomDupeFilter)
        is_shared = is_crawl and is_ours and crawler.settings.get("BLOOM_BACKEND") == "redis"
        with contextlib.ExitStack() as resources:
            try:
                if job is not None and not is_shared:
                    resources.callback(lock_job(job).release)
                if job is not None:
                    check_no_disk_queue(job)
                order_of(crawler)  # an error is better raised before the filter is made
            except BloomError as error:
                fail_at_the_start(crawler, error)
            # The filter logs its own errors.
            new = cls(crawler, build_from_crawler(dupefilter, crawler), None if is_shared else job)
            new._resources.push(resources.pop_all())
        try:
            if is_crawl and is_ours:
                new._check_max_pages(has_queue=is_shared or job is not None)
            new._open_database()
        except BloomError as error:
            new._resources.close()
            fail_at_the_start(crawler, error)
        if is_crawl and job is None and not is_shared:
            logger.warning(
                "Without a JOBDIR, CrashSafeScheduler keeps its queue in memory, and none of it "
                'survives the end of the process: set JOBDIR, for example to "jobs/shop"',
                extra={"spider": crawler.spider},
            )
        return new

    def _check_max_pages(self, *, has_queue: bool) -> None:
        """Raise a SettingError if BLOOM_MAX_PAGES_PER_SLOT is set, and nothing counts by host."""
        assert isinstance(self.df, BloomDupeFilter)
        if not (most := self.df.settings.max_pages_per_slot):
            return
        if not has_queue:
            raise SettingError(
                f"BLOOM_MAX_PAGES_PER_SLOT is {most}, and without a JOBDIR the queue is in memory "
                'and counts no requests; set JOBDIR, or BLOOM_BACKEND = "redis"'
            )
        if not self._by_slot:
            raise SettingError(
                f"BLOOM_MAX_PAGES_PER_SLOT is {most}, and SCHEDULER_PRIORITY_QUEUE does not tell "
                'hosts apart; set it to "scrapy.pqueues.DownloaderAwarePriorityQueue"'
            )

    def _open_database(self) -> None:
        """Open the queue of a job directory, and the filter whose log it is."""
        if self._job is None:
            return
        database = RequestDatabase(self._job / jobdir.DATABASE, by_slot=self._by_slot)
        self._database = database
        self._resources.callback(database.close)
        if isinstance(self.df, BloomDupeFilter):
            assert isinstance(self.df.backend, LocalBackend)
            self.df.backend.open(database)
        else:
            database.begin()

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
        try:
            if self._database is not None:
                self._resume(self._database)
            elif isinstance(self.df, BloomDupeFilter) and self.df.settings.shares_queue:
                from scrapy_bloom.crawl.scheduler.shared_queue import join_crawl  # noqa: PLC0415 - for those who use it

                self._queue = join_crawl(self.crawler, self.df)
            if self._queue is not None:  # start() is by now what the shared queue has made of it
                pace(self.crawler.engine, self._queue.may_go_on, self._queue.yielded)
        except BloomError as error:
            self.close("bloom_error")  # Scrapy would not: its slot is not ready
            fail_at_the_start(self.crawler, error)
        opened: Deferred[None] | None = self.df.open()
        return opened

    def _resume(self, database: RequestDatabase) -> None:
        self._queue = JobQueue(self.crawler, database, self.df)
        if database.resumed:
            killed = database.were_in_flight
            logger.info(
                "Resuming crawl (%d requests scheduled%s)",
                database.resumed,
                f", {killed:,} of them in flight when the last run was killed" if killed else "",
                extra={"spider": self.spider},
            )

    def close(self, reason: str) -> Deferred[None] | None:
        """Store what is collected, close the duplicate filter, and leave the queue as it is."""
        if isinstance(self.df, BloomDupeFilter):
            self.df.end(reason)  # what it forgets is in the last batch
        closing = self._queue.close() if self._queue is not None else None
        if closing is not None:
            return closing.addCallback(lambda _: self._close_filter(reason))
        return self._close_filter(reason)

    def _close_filter(self, reason: str) -> Deferred[None] | None:
        try:
            return self.df.close(reason)
        finally:  # the filter has taken its last changes over from the log
            self._resources.close()

    def has_pending_requests(self) -> bool:
        """Return whether there is a request to take, or the queue has failed.

        Then the spider is being closed for that. It must not look idle, and so finished.
        """
        return len(self) > 0 or (self._queue is not None and self._queue.has_failed)

    def __len__(self) -> int:
        return len(self._memory) + (len(self._queue) if self._queue is not None else 0)

    def enqueue_request(self, request: Request) -> bool:
        """Queue a request, unless the duplicate filter has it; return whether it was queued.

        The store gets the request and its fingerprint in one step.
        """
        queue = self._queue
        if queue is None:
            is_seen = not request.dont_filter and self.df.request_seen(request)
            kind = None if is_seen else "memory"
        elif queue.has_failed:
            return False  # what led to it stays in flight until the next run
        else:
            kind = queue.enqueue(request)
            if queue.has_failed:
                return False
        if kind is None:
            self.df.log(request, self.spider)
            return False
        if kind == DROPPED:
            return False
        if kind == "memory":
            self._memory.push(request)
        self.stats.inc_value(f"scheduler/enqueued/{kind}")
        self.stats.inc_value("scheduler/enqueued")
        return True

    def next_request(self) -> Request | None:
        """Return the next request, which is in flight from now on; None if there is none."""
        queue = self._queue
        request: Request | None = self._memory.pop()
        kind = "memory"
        if queue is not None and request is not None:
            queue.add_in_flight(request)
        elif queue is not None:
            request, kind = queue.take(), queue.place
        if request is not None:
            self.stats.inc_value(f"scheduler/dequeued/{kind}")
            self.stats.inc_value("scheduler/dequeued")
        return request

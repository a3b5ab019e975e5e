"""Schedule requests so that they survive a kill of the process at any instant."""

import contextlib
import logging
from functools import partial
from pathlib import Path
from typing import Any

from scrapy import Request, Spider
from scrapy.core.scheduler import BaseScheduler, Scheduler
from scrapy.crawler import Crawler
from scrapy.dupefilters import BaseDupeFilter
from scrapy.statscollectors import StatsCollector
from scrapy.utils.job import job_dir
from scrapy.utils.misc import build_from_crawler, load_object
from scrapy.utils.python import global_object_name
from twisted.internet.defer import Deferred

from scrapy_bloom.crawl.dupefilter import BloomDupeFilter
from scrapy_bloom.crawl.engine import command_without_crawl, pace_start, watch_scheduled
from scrapy_bloom.crawl.scheduler.job_queue import JobQueue
from scrapy_bloom.crawl.scheduler.safe_queue import (
    SafeQueue,
    order_of,
    serves_least_busy_slot,
)
from scrapy_bloom.crawl.scheduler.takeover import finish, remove_database, take_over
from scrapy_bloom.crawl.startup import check_no_job, log_and_raise
from scrapy_bloom.exceptions import BloomError, SettingError
from scrapy_bloom.files.backend import LocalBackend
from scrapy_bloom.job import jobdir
from scrapy_bloom.queues.job_state import check_no_disk_queue
from scrapy_bloom.queues.sqlite import RequestDatabase
from scrapy_bloom.settings import BloomSettings

logger = logging.getLogger(__name__)


class CrashSafeScheduler(BaseScheduler):
    """A scheduler whose queue survives `kill -9`, for `SCHEDULER` in the settings.

    With a JOBDIR, the scheduler keeps requests in a SQLite database there. A request enters the
    database before the duplicate filter records it. It stays there until everything that it led to
    is scheduled, and its items have passed the pipelines. If the process dies, the next run with
    the same job directory crawls the pending requests and those in flight. If Scrapy's own
    scheduler has left pending requests in the JOBDIR, the first run moves them to the database.

    With BLOOM_REDIS_URL, the scheduler keeps requests in Redis in the same way, and all
    crawlers with the same filter share them. If one dies, the others crawl its requests in flight.

    With neither of them, Scrapy's own scheduler is used.

    Order, stats and settings are those of Scrapy's scheduler. SCHEDULER_DISK_QUEUE only determines
    the order; a class with an unknown order raises a SettingError.
    """

    is_crash_safe = True

    def __init__(
        self, crawler: Crawler, dupefilter: BaseDupeFilter, database: RequestDatabase | None = None
    ) -> None:
        assert crawler.stats is not None
        self.df = dupefilter
        self.crawler = crawler
        self.stats: StatsCollector = crawler.stats
        self.spider: Spider
        self._database = database
        self._memory: Any = None
        self._queue: SafeQueue | None = None  # from `open` on
        self._resources = contextlib.ExitStack()  # released at the close

    @classmethod
    def from_crawler(cls, crawler: Crawler) -> BaseScheduler:  # type: ignore[override]  # see Returns
        """Build the scheduler and the duplicate filter that the settings ask for.

        Returns:
            Scrapy's own scheduler, if there is neither a JOBDIR nor a queue in Redis.

        Raises:
            BloomError: the job directory cannot be used, or a setting is not valid. The error is
                also logged in one line, because Scrapy hides the exception behind an error of its
                own.
        """
        with contextlib.ExitStack() as resources:
            try:
                if command := command_without_crawl(crawler):
                    check_no_job(crawler, command)
                    return Scheduler.from_crawler(crawler)
                settings = BloomSettings.from_settings(crawler.settings)
                _check_filter(crawler, settings)
                path = job_dir(crawler.settings)
                if not (path or settings.shares_queue):
                    logger.warning(
                        "Without a JOBDIR, CrashSafeScheduler is Scrapy's own scheduler: its queue "
                        "is in memory, and lost when the process ends. Set JOBDIR, for example to "
                        '"jobs/shop"',
                        extra={"spider": crawler.spider},
                    )
                    return Scheduler.from_crawler(crawler)
                order_of(crawler)  # raises an error before anything is created
                job = Path(path).absolute() if path else None
                if job is not None and not settings.shares_queue:
                    resources.callback(jobdir.lock_job(job).release)
                if job is not None and settings.shares_queue:
                    check_no_disk_queue(job)
                df = build_from_crawler(load_object(crawler.settings["DUPEFILTER_CLASS"]), crawler)
                database = None
                if job is not None and not settings.shares_queue:
                    database = _opened(crawler, df, job, resources)
                new = cls(crawler, df, database)
            except BloomError as error:
                log_and_raise(crawler, error)
            new._resources = resources.pop_all()
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
            load_object(settings["SCHEDULER_PRIORITY_QUEUE"]),
            self.crawler,
            downstream_queue_cls=load_object(settings["SCHEDULER_MEMORY_QUEUE"]),
            key="",
            start_queue_cls=load_object(start) if start else None,
        )
        try:
            if self._database is not None:
                self._queue = JobQueue(self.crawler, self._database, self.df)
            else:
                from scrapy_bloom.crawl.scheduler.shared_queue import SharedQueue  # noqa: PLC0415 - half a MB, which only crawls with Redis need

                assert isinstance(self.df, BloomDupeFilter)
                self._queue = SharedQueue(self.crawler, self.df)
            watch_scheduled(self.crawler.engine, self._queue.watch)
            # Last, because it wraps the start() that SharedQueue has replaced.
            pace_start(self.crawler.engine, partial(self._queue.may_go_on, None))
        except BloomError as error:
            self.close("bloom_error")  # Scrapy does not close a scheduler that failed to open
            log_and_raise(self.crawler, error)
        opened: Deferred[None] | None = self.df.open()
        return opened

    def close(self, reason: str) -> Deferred[None] | None:
        """Store the last batch, and close the duplicate filter and the queue."""
        if isinstance(self.df, BloomDupeFilter):
            self.df.end(reason)  # first, so that its last changes are in the last batch
        closing = self._queue.close() if self._queue is not None else None
        if closing is not None:
            return closing.addCallback(lambda _: self._close_filter(reason))
        return self._close_filter(reason)

    def _close_filter(self, reason: str) -> Deferred[None] | None:
        try:
            return self.df.close(reason)
        finally:  # after the last checkpoint of the filter, which reads the log
            self._resources.close()

    def has_pending_requests(self) -> bool:
        """Return whether there is a request to take, or the queue has failed.

        After a failure, the spider is being closed, and must not look idle and so finished.
        """
        assert self._queue is not None
        return len(self) > 0 or self._queue.has_failed

    def __len__(self) -> int:
        assert self._queue is not None
        return len(self._memory) + len(self._queue)

    def enqueue_request(self, request: Request) -> bool:
        """Queue a request unless it is a duplicate; return whether it was queued.

        The store gets the request and its fingerprint in one step.
        """
        queue = self._queue
        assert queue is not None
        if not queue.is_open:
            return False  # the request that led to it stays in flight until the next run
        kind = queue.enqueue(request)
        if not queue.is_open:
            return False
        if kind is None:
            self.df.log(request, self.spider)
            return False
        if kind == "memory":
            self._memory.push(request)
        self.stats.inc_value(f"scheduler/enqueued/{kind}")
        self.stats.inc_value("scheduler/enqueued")
        return True

    def next_request(self) -> Request | None:
        """Return the next request, which is in flight from now on; None if there is none."""
        queue = self._queue
        assert queue is not None
        request: Request | None = self._memory.pop()
        kind = "memory"
        if request is not None:
            queue.in_flight.add(request)
        else:
            request, kind = queue.take(), queue.storage
        if request is not None:
            self.stats.inc_value(f"scheduler/dequeued/{kind}")
            self.stats.inc_value("scheduler/dequeued")
        return request


def _check_filter(crawler: Crawler, settings: BloomSettings) -> None:
    """Raise a SettingError if DUPEFILTER_CLASS cannot be used with a queue that survives."""
    dupefilter = load_object(crawler.settings["DUPEFILTER_CLASS"])
    if isinstance(dupefilter, type) and issubclass(dupefilter, BloomDupeFilter):
        return
    name = global_object_name(dupefilter)
    if dupefilter is not BaseDupeFilter:
        raise SettingError(
            f'DUPEFILTER_CLASS is "{name}", but CrashSafeScheduler stores a request and its '
            "fingerprint in one step, which only the filter of scrapy_bloom can do; set "
            'DUPEFILTER_CLASS = "scrapy_bloom.BloomDupeFilter", or '
            '"scrapy.dupefilters.BaseDupeFilter" to filter nothing'
        )
    if settings.shares_queue:
        raise SettingError(
            f'DUPEFILTER_CLASS is "{name}", but a queue in Redis is stored with its filter; set '
            'DUPEFILTER_CLASS = "scrapy_bloom.BloomDupeFilter", or remove BLOOM_REDIS_URL'
        )


def _opened(
    crawler: Crawler, df: BaseDupeFilter, job: Path, resources: contextlib.ExitStack
) -> RequestDatabase:
    """Open the queue of a job directory, and then the filter, whose log the queue is."""
    is_new = take_over(crawler, df, job)
    by_slot = serves_least_busy_slot(crawler)
    database = RequestDatabase(job / jobdir.DATABASE, by_slot=by_slot)
    resources.callback(database.close)
    if isinstance(df, BloomDupeFilter):
        assert isinstance(df.backend, LocalBackend)
        try:
            df.backend.open(database)
        except BloomError:
            if is_new and not database.has_run(database.run):  # the log has not begun
                database.close()
                remove_database(job / jobdir.DATABASE)
            raise
    else:
        database.begin()
    finish(crawler, df, job)
    return database

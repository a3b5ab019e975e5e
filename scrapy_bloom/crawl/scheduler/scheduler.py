"""Schedule requests so that they survive a kill of the process at any instant."""

import contextlib
import logging
from pathlib import Path
from typing import Any, NoReturn

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
from scrapy_bloom.crawl.engine import (
    command_without_crawl,
    hold_back,
    nothing,
    replace_start,
    watch_scheduled,
    watch_start,
)
from scrapy_bloom.crawl.failures import Failures
from scrapy_bloom.crawl.scheduler.driver import Driver, InLoop
from scrapy_bloom.crawl.scheduler.in_thread import InThread
from scrapy_bloom.crawl.scheduler.inbox import InboxReader
from scrapy_bloom.crawl.scheduler.order import order_of
from scrapy_bloom.crawl.scheduler.queue import CrawlQueue
from scrapy_bloom.crawl.scheduler.shared_start import SharedStart
from scrapy_bloom.crawl.scheduler.takeover import open_with_scrapys_queue
from scrapy_bloom.crawl.start_requests import mark
from scrapy_bloom.crawl.startup import check_job_dir, check_no_job, log_and_raise
from scrapy_bloom.exceptions import BloomError, SettingError
from scrapy_bloom.job import jobdir
from scrapy_bloom.job.filter import LocalBackend
from scrapy_bloom.queues.sqlite_queue import check_no_disk_queue
from scrapy_bloom.queues.sqlite_store import SQLiteStore
from scrapy_bloom.queues.store import Joining, Opened, Store
from scrapy_bloom.redis.backend import RedisBackend
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
        self,
        crawler: Crawler,
        dupefilter: BaseDupeFilter,
        settings: BloomSettings,
        job: Path | None = None,
    ) -> None:
        assert crawler.stats is not None
        self._df = dupefilter
        self.crawler = crawler
        self.stats: StatsCollector = crawler.stats
        self.spider: Spider
        self._settings = settings
        self._job = job  # None: the queue is in Redis
        self._store: Store | None = None  # from `_open_store` on
        self._opened: Opened
        # The names of Scrapy's scheduler for its queues in memory and on the disk, for monitoring.
        self.mqs: Any = None
        self.dqs: CrawlQueue | None = None  # from `open` on
        self._inbox: InboxReader | None = None
        self._resources = contextlib.ExitStack()  # released at the close

    @property
    def df(self) -> BaseDupeFilter:
        """The duplicate filter, with which the queue is stored."""
        return self._df

    @df.setter
    def df(self, _: object) -> NoReturn:
        raise AttributeError(
            "the filter of CrashSafeScheduler cannot be replaced, because the queue is stored with "
            "it: set DUPEFILTER_CLASS to a subclass of scrapy_bloom.BloomDupeFilter"
        )

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
                check_job_dir(crawler)
                if command := command_without_crawl(crawler):
                    check_no_job(crawler, command)
                    return Scheduler.from_crawler(crawler)
                settings = BloomSettings.from_settings(crawler.settings)
                _check_filter(crawler, settings)
                path = job_dir(crawler.settings)
                if not (path or settings.shares_queue):
                    logger.warning(
                        "Without a JOBDIR, CrashSafeScheduler behaves like Scrapy's own scheduler: "
                        "its queue is in memory, and lost when the process ends. Set JOBDIR, for "
                        'example to "jobs/shop"',
                        extra={"spider": crawler.spider},
                    )
                    return Scheduler.from_crawler(crawler)
                order_of(crawler)  # raises an error before anything is created
                job = Path(path).absolute() if path else None
                if job is not None and settings.shares_queue:
                    check_no_disk_queue(job)
                    job = None  # it is for spider.state
                if job is not None:
                    resources.callback(jobdir.lock_job(job).release)
                df = build_from_crawler(load_object(crawler.settings["DUPEFILTER_CLASS"]), crawler)
                new = cls(crawler, df, settings, job)
                if job is not None:
                    new._open_store()
            except BloomError as error:
                log_and_raise(crawler, error)
            new._resources = resources.pop_all()
        return new

    def _open_store(self) -> None:
        """Open the store that has the queue and the filter; raises BloomError."""
        crawler, df = self.crawler, self.df
        settings = self._settings
        assert crawler.spider is not None
        joining = Joining(crawler.spider.name, settings.run, keeps_failed=settings.keep_failed)
        if self._job is not None:
            backend = df.backend if isinstance(df, BloomDupeFilter) else None
            assert backend is None or isinstance(backend, LocalBackend)
            in_job = SQLiteStore(self._job / jobdir.FILE, backend)
            self._opened = open_with_scrapys_queue(crawler, df, self._job, in_job, joining)
            self._store = in_job
            return
        from scrapy_bloom.queues.redis_store import RedisStore  # noqa: PLC0415 - half a MB, which only crawls with Redis need

        assert isinstance(df, BloomDupeFilter)
        assert isinstance(df.backend, RedisBackend)
        shared = RedisStore(df.backend, lease_secs=self._settings.queue_lease_secs)
        self._opened = shared.open(joining)
        self._store = shared

    def open(self, spider: Spider) -> Deferred[None] | None:
        """Open the queues, and the duplicate filter.

        Raises:
            StorageError: the database or the server cannot be used.
        """
        self.spider = spider
        settings = self.crawler.settings
        start = settings["SCHEDULER_START_MEMORY_QUEUE"]
        self.mqs = build_from_crawler(
            load_object(settings["SCHEDULER_PRIORITY_QUEUE"]),
            self.crawler,
            downstream_queue_cls=load_object(settings["SCHEDULER_MEMORY_QUEUE"]),
            key="",
            start_queue_cls=load_object(start) if start else None,
        )
        try:
            if self._store is None:
                self._open_store()
            self._open_queue()
        except BloomError as error:
            self.close("bloom_error")  # Scrapy does not close a scheduler that failed to open
            log_and_raise(self.crawler, error)
        try:
            opened: Deferred[None] | None = self.df.open()
        except BaseException:  # of a subclass
            self.close("bloom_error")
            raise
        return opened

    def _open_queue(self) -> None:
        """Begin to collect and take requests; raises BloomError."""
        assert self._store is not None
        crawler, settings, store, opened = self.crawler, self._settings, self._store, self._opened
        ours = self.df if isinstance(self.df, BloomDupeFilter) else None
        failures = ours.failures if ours is not None else Failures(crawler)
        driver: Driver
        if self._job is not None:
            driver = InLoop(crawler, store)
        else:
            driver = InThread(crawler, store, opened, settings)
        self.dqs = queue = CrawlQueue(
            crawler, self.df, driver, opened, failures, keeps_failed=settings.keep_failed
        )
        if ours is not None:
            ours.use_queue(queue)
        queue.log.log_opening(settings, opened)
        if isinstance(driver, InThread):
            queue.log.log_limits(settings)
            SharedStart(crawler, queue, driver)
            hold_back(crawler.engine, lambda: not len(self.mqs) and driver.is_held_back())
        else:
            assert isinstance(store, SQLiteStore)
            assert self._job is not None
            if opened.is_late:
                replace_start(crawler.engine, nothing)
            else:
                self._inbox = InboxReader(crawler, queue, store, self._job)
        watch_scheduled(crawler.engine, queue.watch)
        # Last, because it wraps the start() that SharedStart has replaced.
        watch_start(crawler.engine, mark, queue.may_go_on)

    def close(self, reason: str) -> Deferred[None] | None:
        """Store the last batch, and close the queue and the duplicate filter."""
        if self.dqs is None:
            if self._store is not None:
                with contextlib.suppress(BloomError):  # the error of the opening is reported
                    self._store.close()
            return self._close_filter(reason)
        if self._inbox is not None:
            self._inbox.close()
        backend = getattr(self.df, "backend", None)
        if isinstance(backend, RedisBackend):  # the queue's thread may be waiting for it
            backend.server.shorten_deadline()
        closing = self.dqs.close(is_finished=reason == "finished")
        return closing.addCallback(lambda _: self._close_filter(reason))

    def _close_filter(self, reason: str) -> Deferred[None] | None:
        try:
            return self.df.close(reason)
        finally:
            self._resources.close()

    def has_pending_requests(self) -> bool:
        """Return whether there is a request to take, or may be one later."""
        assert self.dqs is not None
        return len(self) > 0 or self.dqs.expects_more

    def __len__(self) -> int:
        assert self.dqs is not None
        pending = len(self.mqs) + len(self.dqs)
        # The crawl must not end before it has done what commands want from it.
        return pending or int(self._inbox is not None and self._inbox.may_have_messages)

    def enqueue_request(self, request: Request) -> bool:
        """Queue a request unless it is a duplicate; return whether it was queued.

        The store gets the request and its fingerprint in one step.
        """
        queue = self.dqs
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
            self.mqs.push(request)
        self.stats.inc_value(f"scheduler/enqueued/{kind}")
        self.stats.inc_value("scheduler/enqueued")
        return True

    def next_request(self) -> Request | None:
        """Return the next request, which is in flight from now on; None if there is none."""
        queue = self.dqs
        assert queue is not None
        request: Request | None = self.mqs.pop()
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

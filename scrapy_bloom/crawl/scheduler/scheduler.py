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
from scrapy_bloom.crawl.engine import mark, watch_scheduled, watch_start
from scrapy_bloom.crawl.scheduler.in_loop import open_in_job
from scrapy_bloom.crawl.scheduler.in_thread import open_in_redis
from scrapy_bloom.crawl.scheduler.queue import CrawlQueue
from scrapy_bloom.crawl.scheduler.stored_requests import order_of
from scrapy_bloom.crawl.startup import log_and_raise, starts_crawl
from scrapy_bloom.exceptions import BloomError, SettingError
from scrapy_bloom.job import jobdir
from scrapy_bloom.queues.sqlite_queue import check_no_disk_queue
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
        # The names of Scrapy's scheduler for its queues in memory and on the disk, for monitoring.
        # From `open` on.
        self.mqs: Any
        self.dqs: CrawlQueue
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
                if not starts_crawl(crawler):
                    return Scheduler.from_crawler(crawler)
                settings = BloomSettings.from_settings(crawler.settings)
                _check_filter(crawler, settings)
                path = job_dir(crawler.settings)
                job = Path(path).absolute() if path else None
                if job is None and not settings.shares_queue:
                    logger.warning(
                        "Without a JOBDIR, CrashSafeScheduler behaves like Scrapy's own scheduler: "
                        "its queue is in memory, and lost when the process ends. Set JOBDIR, for "
                        'example to "jobs/shop"',
                        extra={"spider": crawler.spider},
                    )
                    return Scheduler.from_crawler(crawler)
                order_of(crawler)  # raises an error before anything is created
                if job is not None and settings.shares_queue:
                    check_no_disk_queue(job)
                    job = None  # it is for spider.state
                if job is not None:
                    resources.callback(jobdir.lock_job(job).release)
                df = build_from_crawler(load_object(crawler.settings["DUPEFILTER_CLASS"]), crawler)
                new = cls(crawler, df, settings, job)
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
        try:
            self.mqs = build_from_crawler(
                load_object(settings["SCHEDULER_PRIORITY_QUEUE"]),
                self.crawler,
                downstream_queue_cls=load_object(settings["SCHEDULER_MEMORY_QUEUE"]),
                key="",
                start_queue_cls=load_object(start) if start else None,
            )
            if self._job is not None:
                queue = open_in_job(self.crawler, self.df, self._settings, self._job, self.mqs)
            else:
                assert isinstance(self.df, BloomDupeFilter)
                queue = open_in_redis(self.crawler, self.df, self._settings, self.mqs)
            self.dqs = queue
            watch_scheduled(self.crawler.engine, queue.watch)
            # Last, because it wraps the start() of a queue in Redis.
            watch_start(self.crawler.engine, mark, queue.may_go_on)
        except BaseException as error:
            self._resources.close()  # Scrapy does not close a scheduler that failed to open
            if isinstance(error, BloomError):
                log_and_raise(self.crawler, error)
            raise
        try:
            opened: Deferred[None] | None = self.df.open()
        except BaseException:  # of a subclass
            self.close("bloom_error")
            raise
        return opened

    def close(self, reason: str) -> Deferred[None]:
        """Store the last batch, and close the queue and the duplicate filter."""
        closing = self.dqs.close(is_finished=reason == "finished")
        return closing.addCallback(lambda _: self.df.close(reason)).addBoth(self._release)

    def _release(self, result: Any) -> Any:
        self._resources.close()
        return result

    def has_pending_requests(self) -> bool:
        """Return whether there is a request to take, or may be one later."""
        return len(self) > 0 or self.dqs.expects_more

    def __len__(self) -> int:
        return len(self.mqs) + len(self.dqs)

    def enqueue_request(self, request: Request) -> bool:
        """Queue a request unless it is a duplicate; return whether it was queued.

        The store gets the request and its fingerprint in one step.
        """
        return self.dqs.enqueue(request)

    def next_request(self) -> Request | None:
        """Return the next request, which is in flight from now on; None if there is none."""
        return self.dqs.take()


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

"""Scrapy's side: the duplicate filter's life in a crawl, its log lines and its stats."""

import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from scrapy import Request, Spider, signals
from scrapy.dupefilters import BaseDupeFilter
from scrapy.utils.python import global_object_name
from scrapy.utils.request import RequestFingerprinterProtocol, referer_str

from scrapy_bloom.crawl.backends import filter_arguments
from scrapy_bloom.crawl.decision import Decision
from scrapy_bloom.crawl.engine import command_without_crawl
from scrapy_bloom.crawl.fingerprinting import fingerprint_function
from scrapy_bloom.crawl.lost_by_server import IsSeen, LostByServer
from scrapy_bloom.crawl.outcomes.actions import OutcomeActions, Watch
from scrapy_bloom.crawl.queue_fate import QueueFate
from scrapy_bloom.crawl.start_errors import fail_at_the_start
from scrapy_bloom.crawl.telemetry.telemetry import Telemetry
from scrapy_bloom.crawl.this_run import ThisRun
from scrapy_bloom.exceptions import BloomError, SettingError, StorageError
from scrapy_bloom.generations.backend import Backend
from scrapy_bloom.settings.settings import BloomSettings

if TYPE_CHECKING:
    from scrapy.crawler import Crawler
    from scrapy.statscollectors import StatsCollector

    from scrapy_bloom.redis.backend import RedisBackend

logger = logging.getLogger(__name__)


class BloomDupeFilter(BaseDupeFilter):
    """Scrapy's set of seen requests as a Bloom filter: `DUPEFILTER_CLASS` in the settings.

    A request seen before is always filtered. A new one is taken for seen, and never crawled,
    with a chance of at most `BLOOM_ERROR_RATE` while no more than `BLOOM_EXPECTED_REQUESTS` are
    recorded. If the filter itself fails, requests are crawled (again) rather than dropped.

    Args:
        backend: an opened backend.
        fingerprinter: the crawler's request fingerprinter.
        stats: the crawler's stats, for the bloom/* and dupefilter/* values.
        settings: the BLOOM_* settings.
        queue: what becomes of the crawl's queue.
        this_run: what is filtered within this run only.
        watch: has a function called at the end of each request: see `OutcomeObserver`.
        close_spider: closes the spider with the reason given.
        debug: log every filtered request, not only the first (DUPEFILTER_DEBUG).
        spider: the spider, for the log records.
    """

    def __init__(
        self,
        backend: Backend,
        fingerprinter: RequestFingerprinterProtocol,
        *,
        stats: "StatsCollector",
        settings: BloomSettings | None = None,
        queue: QueueFate = QueueFate(),  # noqa: B008 - it cannot be changed
        this_run: ThisRun | None = None,
        watch: Watch = lambda _: None,
        close_spider: Callable[[str], None] = lambda _: None,
        debug: bool = False,
        spider: Spider | None = None,
    ) -> None:
        settings = settings or BloomSettings()
        self.backend = backend
        self.debug = debug
        self._fingerprint = fingerprint_function(fingerprinter)
        self._queue = queue
        this_run = this_run or ThisRun()
        self._telemetry = Telemetry(
            backend,
            settings,
            this_run,
            stats=stats,
            extra={"spider": spider},
            close_spider=close_spider,
            fingerprinter=global_object_name(type(fingerprinter)),
        )
        self._actions = OutcomeActions(
            backend, self._telemetry, watch, forget_failed=settings.forget_failed
        )
        decision = Decision(backend, this_run, self._actions, forget_failed=settings.forget_failed)
        self._is_seen: IsSeen = decision.is_seen
        self._any_passed = False
        self._logged_duplicate = False
        self._closed = False

    @classmethod
    def from_crawler(cls, crawler: "Crawler") -> "BloomDupeFilter":
        """Build the filter that the settings ask for, with its files locked and verified.

        It happens here and not in `open`, because Scrapy's scheduler opens its disk queue in
        between. A queue that belongs to another running crawl, or to a crashed one, must not be
        touched.

        Raises:
            BloomError: with one line that says what to do. It is logged as well, because Scrapy
                buries it under an error of its own.
        """
        return cls._built(crawler)

    @classmethod
    def from_spider(cls, spider: Spider) -> "BloomDupeFilter":
        """Build the filter for scrapy-redis's scheduler, which never opens or closes one.

        Raises:
            BloomError: as `from_crawler`; also if BLOOM_BACKEND is not "redis".
        """
        crawler = spider.crawler
        if crawler.settings.get("BLOOM_BACKEND") != "redis":
            error = SettingError(
                "scrapy-redis's scheduler shares its queue among crawlers, and so must the filter "
                'be shared: set BLOOM_BACKEND = "redis"'
            )
            fail_at_the_start(crawler, error, logger)
        new = cls._built(crawler, queue_is_shared=True)
        new.open()
        # After the scheduler, which may still clear the filter.
        crawler.signals.connect(new.close, signals.spider_closed)
        return new

    @classmethod
    def _built(cls, crawler: "Crawler", *, queue_is_shared: bool = False) -> "BloomDupeFilter":
        try:
            new = cls(**filter_arguments(crawler, queue_is_shared=queue_is_shared))
            new._connect(crawler)
        except BloomError as error:
            fail_at_the_start(crawler, error, logger)
        return new

    def _connect(self, crawler: "Crawler") -> None:
        """Do what the filter needs a crawler for, and open the backend; raises BloomError."""
        if not command_without_crawl(crawler):
            self._telemetry.log_regularly(crawler)
        self.backend.open()
        if self._queue.shared_at:
            lost = LostByServer(crawler, cast("RedisBackend", self.backend), self._telemetry)
            self._is_seen = lost.watched(self._is_seen)
        if idle := getattr(self.backend, "idle", None):
            crawler.signals.connect(idle, signals.spider_idle)

    def clear(self) -> None:
        """Forget all requests, for all crawlers that share the filter: scrapy-redis's flush.

        Raises:
            StorageError: the server failed.
        """
        if clear := getattr(self.backend, "clear", None):  # not without a crawl
            clear()
            logger.info("The Bloom filter in Redis was cleared", extra=self._telemetry.extra)

    def open(self) -> None:
        """Begin the crawl: note that the filter is in use, and say what it is."""
        self.backend.begin()
        self._queue.log_risk(self._telemetry.log_opened(), self._telemetry)
        self._telemetry.show()

    def request_seen(
        self, request: Request, *, before_recording: Callable[[], bool] | None = None
    ) -> bool:
        """Return whether the request was seen before; record a new one.

        With `meta["bloom_record"] = False` it is filtered, but not recorded if it is new. With
        `meta["bloom_filter"] = False` it is recorded, but never filtered. With `"run"` in place of
        False, it is filtered if this run has scheduled it, whatever earlier runs have recorded.

        Never raises: Scrapy would lose the request. When anything fails, the request passes as
        new, and `bloom/errors` counts it.

        Args:
            request: from the scheduler.
            before_recording: called when a request is new, and before it is recorded: a scheduler
                whose process may die at any instant stores it then. If it returns False, the
                request is not recorded, and True is returned. A subclass may do without it.
        """
        fingerprint = None
        try:
            fingerprint = self._fingerprint(request)
            if self._is_seen(request, fingerprint, before_recording):
                return True
            self._any_passed = True
        except Exception as error:  # noqa: BLE001 - whatever it is, no page may be lost for it
            self._log_failure(request, fingerprint, error)
        return False

    def _log_failure(self, request: Request, fingerprint: object, error: Exception) -> None:
        self._telemetry.failed(request, error)
        if isinstance(fingerprint, bytes):
            with contextlib.suppress(Exception):  # a server may have recorded it all the same
                self._actions.extend_trail(request, fingerprint)
        else:
            any_worked = self._any_passed or self._telemetry.filtered > 0
            self._telemetry.failed_to_fingerprint(any_worked=any_worked)

    def close(self, reason: str) -> None:
        """End the crawl: tell the figures, write the filter out, and close it."""
        if self._closed:
            return
        self._closed = True
        is_finished = reason == "finished"
        any_new = self._any_passed or self._telemetry.failures or self._queue.shared_at
        self._actions.close(is_finished=is_finished)
        try:
            self.backend.close()
        except StorageError as error:
            self._telemetry.failed_at_the_close(error)
        location = self._telemetry.close(all_seen=is_finished and not any_new)
        if not is_finished:
            self._queue.log_early_end(reason, location, self._telemetry)

    def log(self, request: Request, spider: Spider) -> None:
        """Log that a request was filtered, and count it, as Scrapy's own filter does."""
        if self.debug:
            logger.debug(
                "Filtered duplicate request: %(request)s (referer: %(referer)s)",
                {"request": request, "referer": referer_str(request)},
                extra={"spider": spider},
            )
        elif not self._logged_duplicate:
            logger.debug(
                "Filtered duplicate request: %(request)s - no more duplicates will be shown (see "
                "DUPEFILTER_DEBUG to show all duplicates)",
                {"request": request},
                extra={"spider": spider},
            )
            self._logged_duplicate = True
        self._telemetry.filtered += 1
        self._telemetry.stats.inc_value("dupefilter/filtered")

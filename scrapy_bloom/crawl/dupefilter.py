"""Filter the duplicate requests of a crawl, as Scrapy's scheduler asks for it."""

import contextlib
import logging
from pathlib import Path
from weakref import WeakKeyDictionary

from scrapy import Request, Spider, signals
from scrapy.crawler import Crawler
from scrapy.dupefilters import BaseDupeFilter
from scrapy.utils.job import job_dir
from scrapy.utils.request import referer_str

from scrapy_bloom.crawl.door import drop_known_duplicates
from scrapy_bloom.crawl.engine import command_without_crawl, engine_of, listen
from scrapy_bloom.crawl.fingerprinting import fingerprint_function
from scrapy_bloom.crawl.outcomes import TRAIL, Outcomes
from scrapy_bloom.crawl.startup import (
    backend_without_crawl,
    check_queue,
    create_backend,
    has_log,
    log_and_raise,
)
from scrapy_bloom.crawl.telemetry import Telemetry
from scrapy_bloom.crawl.this_run import ThisRun, UnconfirmedDuplicates
from scrapy_bloom.exceptions import BloomError, StorageError
from scrapy_bloom.generations.memory import Backend
from scrapy_bloom.job.jobdir import lock_job
from scrapy_bloom.redis.backend import RedisBackend
from scrapy_bloom.settings import BloomSettings

logger = logging.getLogger(__name__)


class BloomDupeFilter(BaseDupeFilter):
    """A duplicate filter that is a Bloom filter, for `DUPEFILTER_CLASS` in the settings.

    The filter always filters a request that was recorded before. Like any Bloom filter, it has
    false positives: it mistakes a new request for a duplicate, so that the request is never
    crawled, with a probability of at most `BLOOM_ERROR_RATE`. If the filter itself fails, requests
    are crawled (again) rather than dropped.

    Args:
        crawler: the crawler whose requests are filtered.
        backend: keeps the filter; the caller opens it before the first request.
        settings: the BLOOM_* settings.
        queue_is_shared: whether the queue is in Redis, so that both may be lost at once.
    """

    def __init__(
        self,
        crawler: Crawler,
        backend: Backend,
        settings: BloomSettings,
        *,
        queue_is_shared: bool = False,
    ) -> None:
        assert crawler.request_fingerprinter is not None
        has_lasting_queue = queue_is_shared or bool(job_dir(crawler.settings))
        self.backend = backend
        self.settings = settings
        self.debug = crawler.settings.getbool("DUPEFILTER_DEBUG")
        self._crawler = crawler
        self._fingerprint = fingerprint_function(crawler.request_fingerprinter)
        # Of new requests, from when they are yielded until they are scheduled.
        self._fingerprints: WeakKeyDictionary[Request, bytes] = WeakKeyDictionary()
        start_requests = settings.outlives_the_run and not has_lasting_queue
        self._this_run = ThisRun(
            start_requests=start_requests,
            has_window=settings.window_secs > 0 and not queue_is_shared,
        )
        if start_requests and (engine := engine_of(crawler)) is not None:
            listen(engine, scraping=self._this_run.mark_handled)
        self._telemetry = Telemetry(
            crawler, backend, settings, self._this_run, queue_is_shared=queue_is_shared
        )
        self.failures = self._telemetry.failures
        self._counts_new = settings.record_on == "scheduled"  # otherwise, Outcomes counts
        self._outcomes: Outcomes | None = None
        if settings.forget_failed or not self._counts_new:
            self._outcomes = Outcomes(
                crawler, backend, settings, self._telemetry, self._fingerprint
            )
        self._unconfirmed: UnconfirmedDuplicates | None = None
        if queue_is_shared and not settings.shares_queue:
            assert isinstance(backend, RedisBackend)
            self._unconfirmed = UnconfirmedDuplicates(crawler, backend, self.failures)
        self._any_passed = self._logged_duplicate = False
        self._is_closed = False
        self._job_lock = contextlib.ExitStack()

    @classmethod
    def from_crawler(cls, crawler: Crawler) -> "BloomDupeFilter":
        """Build the filter that the settings ask for, with its files locked and checked.

        Scrapy's scheduler opens its disk queue between `from_crawler` and `open`, and it must not
        open the queue of another running crawl, or of a crashed one. So `from_crawler` locks the
        job directory, wherever the filter is, and `close` releases the lock. CrashSafeScheduler
        locks its job itself, and opens the filter after the log of the filter.

        Raises:
            BloomError: the filter cannot be used. The error is also logged in one line that says
                what to do, because Scrapy hides the exception behind an error of its own.
        """
        return cls._built(crawler)

    @classmethod
    def from_spider(cls, spider: Spider) -> "BloomDupeFilter":
        """Build and open the filter for scrapy-redis's scheduler, which never calls `open`.

        The filter is in Redis, like the queue: at BLOOM_REDIS_URL, or on the queue's server.

        Raises:
            BloomError: the filter cannot be used. The error is also logged in one line.
        """
        crawler = spider.crawler
        new = cls._built(crawler, queue_is_shared=True)
        new.open()
        # The scheduler handles this signal first, and may clear the filter.
        crawler.signals.connect(new.close, signals.spider_closed)
        return new

    @classmethod
    def _built(cls, crawler: Crawler, *, queue_is_shared: bool = False) -> "BloomDupeFilter":
        job_lock = contextlib.ExitStack()
        try:
            settings = BloomSettings.from_settings(crawler.settings, scrapy_redis=queue_is_shared)
            is_opened_later = has_log(crawler, settings)
            if command := command_without_crawl(crawler):
                backend = backend_without_crawl(crawler, command)
                settings, queue_is_shared = BloomSettings(), False
            else:
                settings.warn_of_unused(extra={"spider": crawler.spider})
                check_queue(crawler, settings)
                path = job_dir(crawler.settings)
                if path and not settings.is_in_redis and not is_opened_later:
                    job_lock.callback(lock_job(Path(path).absolute()).release)
                backend = create_backend(crawler, settings)
            # Keyword arguments, so that the constructor of a subclass may take **kwargs.
            new = cls(
                crawler=crawler,
                backend=backend,
                settings=settings,
                queue_is_shared=queue_is_shared or settings.shares_queue,
            )
            if command or not is_opened_later:
                backend.open()
        except BloomError as error:
            job_lock.close()
            log_and_raise(crawler, error)
        new._job_lock = job_lock
        return new

    def was_duplicate(self) -> None:
        """Correct the stats after a request that passed turned out to be a duplicate."""
        self._telemetry.added -= 1

    def clear(self) -> None:
        """Clear the filter for all crawlers that share it; scrapy-redis calls this to flush.

        Raises:
            StorageError: the server failed.
        """
        if clear := getattr(self.backend, "clear", None):  # in `scrapy shell`, there is none
            clear()
            logger.info("The Bloom filter in Redis was cleared", extra=self._telemetry.extra)

    def open(self) -> None:
        """Mark the filter as in use, and log its size and place."""
        self.backend.begin()
        self._telemetry.open()
        is_crawl = engine_of(self._crawler) is not None and not command_without_crawl(self._crawler)
        if is_crawl and type(self).request_seen is BloomDupeFilter.request_seen:
            drop_known_duplicates(self._crawler, self.is_known, self.log, logs_all=self.debug)

    def is_known(self, request: Request) -> bool:
        """Return whether `request_seen` would certainly report a request as a duplicate.

        The method asks neither a server nor a disk, and records nothing. It never raises. False
        means that only `request_seen` can tell.
        """
        if request.dont_filter:
            return False
        try:
            meta = request.meta
            if meta and (
                "bloom_filter" in meta
                or "bloom_record" in meta
                or TRAIL in meta
                or self._this_run.is_filtered_within_run(meta)
            ):
                return False
            fingerprint = self._fingerprint(request)
            if self.backend.is_duplicate(fingerprint):
                return True
            self._fingerprints[request] = fingerprint
        except Exception:  # noqa: BLE001 - request_seen has the same failure, and logs it
            return False
        return False

    def request_seen(self, request: Request) -> bool:
        """Return whether a request is a duplicate; record it if it is new.

        A request with `meta["bloom_record"] = False` is filtered, but not recorded. A request with
        `meta["bloom_filter"] = False` is recorded, but never filtered. A request with
        `meta["bloom_filter"] = "run"` is filtered only if this run has scheduled it before.

        The method never raises, because Scrapy would lose the request. If anything fails, the
        request passes as new, and `bloom/errors` counts the failure.
        """
        fingerprint = None
        try:
            fingerprint = self._fingerprints.pop(request, None) or self._fingerprint(request)
            is_seen = self._is_seen(request, fingerprint)
            if is_seen and self._outcomes is not None and TRAIL in request.meta:
                self._outcomes.filtered(request, fingerprint)
            if self._unconfirmed is not None:
                self._unconfirmed.add_answer(request, is_seen=is_seen)
        except Exception as error:  # noqa: BLE001 - no failure may lose a page
            self.failures.add(request, error)
            if not isinstance(fingerprint, bytes):
                any_worked = self._any_passed or self._telemetry.filtered > 0
                self.failures.add_unfingerprinted(any_worked=any_worked)
            return False
        if not is_seen:
            self._any_passed = True
        return is_seen

    def _is_seen(self, request: Request, fingerprint: bytes) -> bool:
        """Return whether to filter a request; record it if not."""
        meta = request.meta
        this_run = self._this_run
        may_filter = bool(meta.get("bloom_filter", True))
        if self._outcomes is not None and self._outcomes.is_given_up(fingerprint):
            return may_filter
        within_run = this_run.is_filtered_within_run(meta)
        is_filtered = may_filter and not (within_run and this_run.add(fingerprint))
        # The fingerprint may have expired in the backend, but the backend knows if it is forgotten.
        is_known = this_run.has_window and is_filtered and fingerprint in this_run
        if is_known and fingerprint not in self.backend.forgotten:
            return True
        if "bloom_record" in meta and not meta["bloom_record"]:
            return is_filtered and (within_run or fingerprint in self.backend)
        if self.backend.add(fingerprint):
            if self._counts_new:
                self._telemetry.count_added()
        elif is_filtered:
            return True
        this_run.add_if_needed(fingerprint)
        return False

    def end(self, reason: str) -> None:
        """Make the last changes of the filter, before CrashSafeScheduler stores its last batch."""
        if self._outcomes is not None:
            self._outcomes.close(is_finished=reason == "finished")
            self._outcomes = None

    def close(self, reason: str) -> None:
        """Sync and close the filter, and log its last figures."""
        if self._is_closed:
            return
        self._is_closed = True
        with self._job_lock:
            any_new = bool(self._any_passed or self.failures.number or self._unconfirmed)
            self.end(reason)
            try:
                self.backend.close()
            except StorageError as error:
                self.failures.add_at_the_close(error)
            self._telemetry.close(reason, any_new=any_new)

    def log(self, request: Request, spider: Spider) -> None:
        """Log and count a filtered request, with the messages of Scrapy's own filter."""
        # RFPDupeFilter.log() needs spider.crawler, which not every spider has.
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

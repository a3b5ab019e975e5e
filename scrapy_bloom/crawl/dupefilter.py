"""The duplicate filter of a crawl, as Scrapy's scheduler uses it."""

import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, cast

from scrapy import Request, Spider, signals
from scrapy.dupefilters import BaseDupeFilter
from scrapy.utils.job import job_dir
from scrapy.utils.request import referer_str

from scrapy_bloom.crawl.engine import command_without_crawl, engine_of, listen
from scrapy_bloom.crawl.fingerprinting import fingerprint_function
from scrapy_bloom.crawl.outcomes import TRAIL, Outcomes
from scrapy_bloom.crawl.startup import (
    backend_without_crawl,
    create_backend,
    fail_at_the_start,
    has_log,
)
from scrapy_bloom.crawl.telemetry import Telemetry
from scrapy_bloom.crawl.this_run import ThisRun, UnconfirmedDuplicates
from scrapy_bloom.exceptions import BloomError, SettingError, StorageError
from scrapy_bloom.generations.backend import Backend
from scrapy_bloom.job.locks import lock_job
from scrapy_bloom.settings.settings import BloomSettings

if TYPE_CHECKING:
    from scrapy.crawler import Crawler

    from scrapy_bloom.redis.backend import RedisBackend

logger = logging.getLogger(__name__)


class BloomDupeFilter(BaseDupeFilter):
    """Scrapy's set of seen requests as a Bloom filter: `DUPEFILTER_CLASS` in the settings.

    A request that was recorded before is always filtered. Like any Bloom filter, it has false
    positives: a new request is mistaken for a duplicate, and never crawled, with a probability of
    at most `BLOOM_ERROR_RATE`. If the filter itself fails, requests are crawled (again) rather than
    dropped.

    Args:
        crawler: whose requests are filtered.
        backend: keeps the filter; to be opened before the first request.
        settings: the BLOOM_* settings.
        queue_is_shared: the queue is in Redis, and may lose what the filter loses.
    """

    def __init__(
        self,
        crawler: "Crawler",
        backend: Backend,
        settings: BloomSettings,
        *,
        queue_is_shared: bool = False,
    ) -> None:
        assert crawler.request_fingerprinter is not None
        has_lasting_queue = queue_is_shared or job_dir(crawler.settings)
        self.backend = backend
        self.settings = settings
        self.debug = crawler.settings.getbool("DUPEFILTER_DEBUG")
        self._fingerprint = fingerprint_function(crawler.request_fingerprinter)
        start_requests = settings.outlives_the_run and not has_lasting_queue
        self._this_run = ThisRun(
            start_requests=start_requests,
            has_window=settings.window_secs > 0 and not queue_is_shared,
        )
        if start_requests and (engine := engine_of(crawler)) is not None:
            listen(
                engine,
                "A filter that outlives its queue does not work",
                "set JOBDIR",
                scraping=self._this_run.mark_handled,
            )
        self._telemetry = Telemetry(
            crawler, backend, settings, self._this_run, queue_is_shared=queue_is_shared
        )
        self.failures = self._telemetry.failures
        self._outcomes = Outcomes(crawler, backend, settings, self._telemetry, self._fingerprint)
        self._unconfirmed: UnconfirmedDuplicates | None = None
        if queue_is_shared and not settings.shares_queue:
            self._unconfirmed = UnconfirmedDuplicates(
                crawler, cast("RedisBackend", backend), self.failures
            )
        self._add = backend.add
        self._forgets_failed = settings.forget_failed
        self._counts_new = settings.record_on == "scheduled"  # else what was crawled is counted
        self._any_passed = self._logged_duplicate = False
        self._has_ended = self._is_closed = False
        self._job_lock = contextlib.ExitStack()

    @classmethod
    def from_crawler(cls, crawler: "Crawler") -> "BloomDupeFilter":
        """Build the filter that the settings ask for, with its files locked and verified.

        It happens here and not in `open`, because Scrapy's scheduler opens its disk queue in
        between. A queue that belongs to another running crawl, or to a crashed one, must not be
        touched. So the job directory is locked first, wherever the filter is, until `close`.
        CrashSafeScheduler has locked its job already, and opens the filter, whose log it has.

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
            fail_at_the_start(crawler, error)
        new = cls._built(crawler, queue_is_shared=True)
        new.open()
        # After the scheduler, which may still clear the filter.
        crawler.signals.connect(new.close, signals.spider_closed)
        return new

    @classmethod
    def _built(cls, crawler: "Crawler", *, queue_is_shared: bool = False) -> "BloomDupeFilter":
        job_lock = contextlib.ExitStack()
        try:
            settings = BloomSettings.from_settings(crawler.settings)
            is_opened_later = has_log(crawler, settings)
            queue_is_shared = queue_is_shared or settings.shares_queue
            # By name: the constructor of a subclass may take just what comes.
            if command := command_without_crawl(crawler):
                backend = backend_without_crawl(crawler, command)
                new = cls(crawler=crawler, backend=backend, settings=BloomSettings())
            else:
                settings.warn_of_unused(extra={"spider": crawler.spider})
                path = job_dir(crawler.settings)
                if path and not settings.shares_queue and not is_opened_later:
                    job_lock.callback(lock_job(Path(path).absolute()).release)
                backend = create_backend(crawler, settings)
                new = cls(
                    crawler=crawler,
                    backend=backend,
                    settings=settings,
                    queue_is_shared=queue_is_shared,
                )
                new._telemetry.log_regularly()
            if command or not is_opened_later:
                new.backend.open()
        except BloomError as error:
            job_lock.close()
            fail_at_the_start(crawler, error)
        new._job_lock = job_lock
        return new

    def was_duplicate(self) -> None:
        """Note that a request that passed turned out to be a duplicate: another worker has it."""
        self._telemetry.added -= 1

    def clear(self) -> None:
        """Forget all requests, for all crawlers that share the filter: scrapy-redis's flush.

        Raises:
            StorageError: the server failed.
        """
        if clear := getattr(self.backend, "clear", None):  # not without a crawl
            clear()
            logger.info("The Bloom filter in Redis was cleared", extra=self._telemetry.extra)

    def open(self) -> None:
        """Begin the crawl: note that the filter is in use, and log what it is."""
        self.backend.begin()
        self._telemetry.log_opened()
        self._telemetry.show()

    def request_seen(self, request: Request) -> bool:
        """Return whether the request was seen before; record a new one.

        With `meta["bloom_record"] = False` it is filtered, but not recorded if it is new. With
        `meta["bloom_filter"] = False` it is recorded, but never filtered. With `"run"` in place of
        False, it is filtered if this run has scheduled it, whatever earlier runs have recorded.

        Never raises: Scrapy would lose the request. When anything fails, the request passes as
        new, and `bloom/errors` counts it.
        """
        fingerprint = None
        try:
            fingerprint = self._fingerprint(request)
            is_seen = self._is_seen(request, fingerprint)
            if is_seen and TRAIL in request.meta:
                self._outcomes.filtered(request, fingerprint)
            if self._unconfirmed is not None:
                self._unconfirmed.add_answer(request, is_seen=is_seen)
        except Exception as error:  # noqa: BLE001 - whatever it is, no page may be lost for it
            self._handle_failure(request, fingerprint, error)
            return False
        if not is_seen:
            self._any_passed = True
        return is_seen

    def _is_seen(self, request: Request, fingerprint: bytes) -> bool:
        """Return whether a request is to be filtered; record it if it is not."""
        meta = request.meta
        this_run = self._this_run
        may_filter = bool(meta.get("bloom_filter", True))
        if self._forgets_failed and self._outcomes.is_given_up(fingerprint):
            return may_filter
        within_run = this_run.is_filtered_within_run(meta)
        is_filtered = may_filter and not (within_run and this_run.add(fingerprint))
        # The backend may not know it any more, but it knows whether it is forgotten.
        is_known = this_run.has_window and is_filtered and fingerprint in this_run
        if is_known and fingerprint not in self.backend.forgotten:
            return True
        if "bloom_record" in meta and not meta["bloom_record"]:
            return is_filtered and (within_run or fingerprint in self.backend)
        if self._add(fingerprint):
            if self._counts_new:
                self._telemetry.count_added()
        elif is_filtered:
            return True
        this_run.add_if_needed(fingerprint)
        self._outcomes.extend_trail(request, fingerprint)
        return False

    def _handle_failure(self, request: Request, fingerprint: object, error: Exception) -> None:
        self.failures.add(request, error)
        if isinstance(fingerprint, bytes):
            with contextlib.suppress(Exception):  # a server may have recorded it all the same
                self._outcomes.extend_trail(request, fingerprint)
        else:
            any_worked = self._any_passed or self._telemetry.filtered > 0
            self.failures.add_unfingerprinted(any_worked=any_worked)

    def end(self, reason: str) -> None:
        """Change the filter for the last time: CrashSafeScheduler needs that in its last batch."""
        if not self._has_ended:
            self._has_ended = True
            self._outcomes.close(is_finished=reason == "finished")

    def close(self, reason: str) -> None:
        """End the crawl: write the filter out, close it, and log its last figures."""
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
        """Log that a request was filtered, and count it, as Scrapy's own filter does."""
        # Not by Scrapy's own filter: that asks the spider for its crawler, and not all know it.
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

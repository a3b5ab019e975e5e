"""Report the state of a crawl's filter, and failures, in the bloom/* stats and in the log."""

import contextlib
import logging
from typing import Any

from scrapy import signals
from scrapy.crawler import Crawler
from scrapy.statscollectors import StatsCollector
from scrapy.utils.asyncio import create_looping_call
from scrapy.utils.python import global_object_name

from scrapy_bloom.crawl.engine import close_spider_soon
from scrapy_bloom.crawl.startup import Backend
from scrapy_bloom.exceptions import BloomError, OutageError, RefusedError, StorageError
from scrapy_bloom.generations.policy import FilterStatus
from scrapy_bloom.settings import BloomSettings
from scrapy_bloom.text import counted, number_text, size_text

_STATS_EVERY = 1000  # new requests, after which the stats are updated
# If the fingerprinter fails on the first 100 requests, it fails on all.
_MOST_UNFINGERPRINTED = 100
_UNAVAILABLE = (OutageError, RefusedError)  # errors that mean: the filter cannot be used


class Failures:
    """The failures of one crawl: counts them, logs them, and closes the spider if necessary.

    An outage of Redis makes the filter, the queue and the close fail, but is logged once.
    """

    def __init__(self, crawler: Crawler, *, shares_queue: bool = False) -> None:
        assert crawler.stats is not None
        self.number = 0  # of failures of the filter
        self.stats: StatsCollector = crawler.stats
        extra = {"spider": crawler.spider}
        self.logger = logging.LoggerAdapter(logging.getLogger(__name__), extra)
        self._crawler = crawler
        self._shares_queue = shares_queue
        self._logged: set[object] = set()  # the kinds of failures that were logged
        self._unfingerprinted = 0

    def add(
        self,
        what: object,
        error: Exception,
        consequence: str = "it is crawled, even if it is a duplicate",
    ) -> None:
        """Count a failure of the filter; log the first failure of each kind."""
        self.number += 1
        self.update_stat()
        if not self._is_first(error):
            return
        if isinstance(error, StorageError):  # of a file, too: unfiltered, a crawl may never end
            self._log_unavailable(error, "bloom_outage")
            return
        is_ours = isinstance(error, BloomError)
        self.logger.error(
            "The Bloom filter failed on %s: %s. Further failures of this kind are not logged, but "
            "counted in bloom/errors%s",
            what,
            consequence,
            f". The error: {error}" if is_ours else "",
            exc_info=None if is_ours else error,
        )

    def add_unfingerprinted(self, *, any_worked: bool) -> None:
        """Count a request without a fingerprint; close the spider if no request ever had one."""
        self._unfingerprinted += 1
        if self._unfingerprinted != _MOST_UNFINGERPRINTED or any_worked:
            return
        self.logger.error(
            "%s, the REQUEST_FINGERPRINTER_CLASS, has not returned bytes for any of the first %d "
            "requests. The spider is closed because an unfiltered crawl may never end: fix the "
            "class, and start the crawl again",
            global_object_name(type(self._crawler.request_fingerprinter)),
            _MOST_UNFINGERPRINTED,
        )
        close_spider_soon(self._crawler, "bloom_no_fingerprints")

    def add_at_the_close(self, error: StorageError) -> None:
        """Count a failure at the close of the filter, and log it unless its outage was logged."""
        self.number += 1
        if self._is_first(error) or not isinstance(error, _UNAVAILABLE):
            self.logger.error("%s", error)

    def close_for_queue(self, error: Exception, store_name: str) -> None:
        """Log why the queue of CrashSafeScheduler is unusable, and close the spider."""
        reason = "bloom_outage" if isinstance(error, OutageError) else "bloom_queue_failed"
        if isinstance(error, _UNAVAILABLE):
            if self._is_first(error):
                self._log_unavailable(error, reason)
        elif isinstance(error, OSError):
            self.logger.error(
                "The queue in %s, or its filter, cannot be written or read: %s. The spider is "
                "closed (reason %s), and nothing is lost: free some space or repair the disk, and "
                "start the crawl again",
                store_name,
                error,
                reason,
            )
        else:
            self.logger.error(
                "%s. The spider is closed (reason %s)",
                str(error) or type(error).__name__,
                reason,
                exc_info=None if isinstance(error, BloomError) else error,
            )
        close_spider_soon(self._crawler, reason)

    def update_stat(self, others: int = 0) -> None:
        """Update the stat bloom/errors, including errors that the backend counted."""
        if errors := self.number + others:
            self.stats.max_value("bloom/errors", errors)

    def _is_first(self, error: Exception) -> bool:
        """Return whether no error of the same outage, or of the same kind, came before."""
        kind = getattr(error, "since", type(error))
        is_first = kind not in self._logged
        self._logged.add(kind)
        return is_first

    def _log_unavailable(self, error: StorageError, reason: str) -> None:
        """Log that Redis or a file cannot be used, and close the spider."""
        are_kept = self._shares_queue or reason == "bloom_queue_failed"
        self.logger.error(
            "%s. The spider is closed (reason %s), and requests that are still in progress %s; "
            "start the crawl again when %s",
            error,
            reason,
            "stay in the queue" if are_kept else "are crawled unfiltered",
            "the server is back" if isinstance(error, OutageError) else "that is fixed",
        )
        close_spider_soon(self._crawler, reason)


class Telemetry:
    """Counts of a run's requests, reported together with the figures of the filter."""

    def __init__(
        self, crawler: Crawler, backend: Backend, settings: BloomSettings, *, queue_is_shared: bool
    ) -> None:
        # The numbers of recorded and filtered requests; STATS_CLASS may keep no stats.
        self.added = self.filtered = 0
        self.failures = Failures(crawler, shares_queue=settings.shares_queue)
        self.stats, self.logger = self.failures.stats, self.failures.logger
        self._backend = backend
        self._settings = settings
        self._loses_queue = settings.is_in_redis and not queue_is_shared
        self._is_scrapy_redis = queue_is_shared and not settings.shares_queue
        self._logged = (0, 0)
        self._interval = 0.0
        self._loop: Any = None
        with contextlib.suppress(ValueError, TypeError):  # Scrapy's LogStats reports a bad value
            self._interval = crawler.settings.getfloat("LOGSTATS_INTERVAL")
        if self._interval > 0:
            crawler.signals.connect(self._start, signals.spider_opened)

    def _start(self) -> None:
        """Log a line every LOGSTATS_INTERVAL while the spider is open, if a count has changed."""
        # Not earlier, because the kind of loop depends on the event loop that is running.
        self._loop = create_looping_call(self._log)
        self._loop.start(self._interval, now=False)

    def open(self) -> None:
        """Log size and place of the filter, and where pending requests stay after an early end."""
        status = self.update_stats()
        # With a window, its generations have room for parts of what the settings ask for.
        requests = counted(status.count, "request")
        if not self._settings.window_secs:
            requests = f"{status.count:,} of {counted(status.capacity, 'request')}"
        self.logger.info(
            "Bloom filter in %s: %s, %s", status.location, requests, size_text(status.nbytes)
        )
        location = status.location
        if self._loses_queue:
            self.logger.info(
                "The pending requests are in the memory of this crawl: if it ends early, they are "
                "lost, but %s still reports them as duplicates. Set SCHEDULER = "
                '"scrapy_bloom.CrashSafeScheduler" to keep the queue in Redis, too',
                location,
            )

    def count_added(self, number: int = 1) -> None:
        """Count recorded requests; sometimes update the stats; raises StorageError."""
        before, self.added = self.added, self.added + number
        if before // _STATS_EVERY != self.added // _STATS_EVERY:
            self.update_stats()

    def update_stats(self) -> FilterStatus:
        """Update the stats, and return the current figures of the filter."""
        status = self._backend.status()
        for name, value in (
            ("added", self.added),
            ("count", status.count),
            ("capacity", status.capacity),
            ("fill_ratio", status.fill_ratio),
            ("error_rate", status.error_rate_now),
            ("bytes", status.nbytes),
            ("generations", len(status.generations)),
            ("expired", status.expired or None),
            *status.more.items(),
        ):
            if value is not None:
                self.stats.set_value(f"bloom/{name}", value)
        self.failures.update_stat(status.errors)
        return status

    def close(self, reason: str, *, any_passed: bool) -> None:
        """Log the final figures of the filter, and what an early end or an idle run means."""
        if self._loop is not None and self._loop.running:
            self._loop.stop()
        status = self.update_stats()
        self.stats.set_value("bloom/expected_false_positives", status.expected_false_positives)
        self.logger.info(
            "Bloom filter closed: %s new, %s in all, expected false positives %s",
            f"{self.added:,}",
            f"{status.count:,}",
            number_text(status.expected_false_positives, 2),
        )
        if reason != "finished":
            self._log_early_end(reason, status.location)
        elif self.filtered and not (any_passed or self._has_other_pages()):
            # A WARNING if the run did not crawl a single page, not even a start page. A queue that
            # survives has warned already that its run had ended.
            was_idle = not self.stats.get_value("scheduler/dequeued", 0)
            is_crash_safe = self._settings.is_crash_safe
            self.logger.log(
                logging.WARNING if was_idle and not is_crash_safe else logging.INFO,
                "Nothing new was crawled: %s, recorded earlier in %s. Give requests for list pages "
                'meta={"bloom_filter": "run"} to crawl them once in each run%s, set '
                "BLOOM_WINDOW_SECS to crawl pages again after some time, or start over after "
                "`scrapy bloom reset`",
                counted(
                    self.filtered,
                    "request was a known duplicate",
                    "requests were known duplicates",
                ),
                status.location,
                " (another BLOOM_RUN begins one)" if is_crash_safe else "",
            )

    def _has_other_pages(self) -> bool:
        """Return whether the crawl may have had pages of earlier runs or of other workers."""
        get = self.stats.get_value
        took_queued = get("scheduler/dequeued", 0) > get("scheduler/enqueued", 0)
        return bool(took_queued or self.failures.number or self._is_scrapy_redis)

    def _log_early_end(self, reason: str, location: str) -> None:
        lost = self.added if self._loses_queue else 0
        if (queued := self.stats.get_value("scheduler/enqueued")) is not None:
            # Some of them may not be recorded: requests with dont_filter, such as start requests.
            lost = min(lost, queued - self.stats.get_value("scheduler/dequeued", 0))
        if lost > 0:
            self.logger.warning(
                "The crawl ended early (%s), and its queue was in memory: up to %s lost, but %s "
                "still reports them as duplicates to later runs. To crawl them, start over after "
                "`scrapy bloom reset`; to keep them next time, set "
                'SCHEDULER = "scrapy_bloom.CrashSafeScheduler"',
                reason,
                counted(lost, "pending request was", "pending requests were"),
                location,
            )

    def _log(self) -> None:
        counts = added, filtered = self.added, self.filtered
        if counts == self._logged:
            return
        try:
            status = self.update_stats()
            self.logger.info(
                "Bloom filter: %s new (%s), %s (%s), %s recorded in all",
                f"{added:,}",
                f"{added - self._logged[0]:+,}",
                counted(filtered, "duplicate"),
                f"{filtered - self._logged[1]:+,}",
                f"{status.count:,}",
            )
            self._logged = counts
        except Exception as error:  # noqa: BLE001 - an exception would end the loop
            self.failures.add("its figures", error, "the log lacks them")

"""News of a filter from its crawl: the bloom/* stats, and lines in the log."""

import contextlib
import logging
import math
from dataclasses import replace
from typing import Any

from scrapy import signals
from scrapy.crawler import Crawler

from scrapy_bloom.crawl.engine import close_spider_soon, create_looping_call
from scrapy_bloom.crawl.failures import Failures
from scrapy_bloom.crawl.this_run import ThisRun
from scrapy_bloom.generations.backend import Backend
from scrapy_bloom.generations.status import FilterStatus
from scrapy_bloom.settings.settings import BloomSettings
from scrapy_bloom.text import counted, size_text

# Stats are brought up to date every so many new requests: often enough to watch a crawl, and
# too seldom to cost anything.
_STATS_EVERY = 1000


class Telemetry:
    """Counts what becomes of a run's requests, and shows it with the figures of the filter.

    Attributes:
        added: requests recorded.
        filtered: requests filtered. Not from the stats: STATS_CLASS may be one that keeps none.
        forgotten: how many times a request was forgotten; shown with BLOOM_FORGET_FAILED only.
        stats: the crawler's.
        extra: for log records.
    """

    def __init__(
        self, crawler: Crawler, backend: Backend, settings: BloomSettings, this_run: ThisRun
    ) -> None:
        self.added = self.filtered = self.forgotten = 0
        self.failures = Failures(
            crawler, on_outage=settings.redis_on_outage, keeps_queue=settings.shares_queue
        )
        self.stats, self.extra = self.failures.stats, self.failures.extra
        self._logger = logging.LoggerAdapter(logging.getLogger(__name__), self.extra)
        self._crawler = crawler
        self._backend = backend
        self._settings = settings
        self._this_run = this_run
        # Soon, but not now: no spider can be closed before it runs.
        self._look_at = _STATS_EVERY if settings.on_full == "grow" else 1
        self._full_number = 0  # of the generation that was last told to be full
        self._full_at = 1.0  # at this load of it, tell again; infinite: never
        self._logged = (0, 0, 0)
        self._interval = 0.0
        self._loop: Any = None

    def log_regularly(self) -> None:
        """Log a line every LOGSTATS_INTERVAL while the spider is open, if there is anything new."""
        with contextlib.suppress(ValueError, TypeError):  # of which Scrapy tells, if it is used
            self._interval = self._crawler.settings.getfloat("LOGSTATS_INTERVAL")
        if self._interval > 0:
            self._crawler.signals.connect(self._start, signals.spider_opened)
            self._crawler.signals.connect(self._stop, signals.spider_closed)

    def _start(self) -> None:
        # Not earlier: what it is made of depends on the event loop that is running.
        self._loop = create_looping_call(self._log)
        self._loop.start(self._interval, now=False)

    def _stop(self) -> None:
        if self._loop is not None and self._loop.running:
            self._loop.stop()

    def log_opened(self) -> str:
        """Log what the filter is, and return where."""
        status = self._backend.status()
        self._logger.info(
            "Bloom filter in %s: %s at error rate %g, %s; %s already recorded",
            status.location,
            counted(status.capacity, "request"),
            status.error_rate,
            size_text(status.nbytes),
            f"{status.count:,}",
        )
        return status.location

    def count_added(self) -> None:
        """Count a recorded request; every now and then, look if it is full. Raises StorageError."""
        self.added += 1
        if self.added >= self._look_at:
            self._look()

    def show(self) -> FilterStatus:
        """Bring the stats up to date; return the figures of the filter now."""
        status = self._backend.status()
        if in_memory := self._this_run.generations():
            status = replace(status, volatile=[*status.volatile, *in_memory])
        for name, value in (
            ("added", self.added),
            ("count", status.count),
            ("capacity", status.capacity),
            ("fill_ratio", status.fill_ratio),
            ("error_rate", status.error_rate_now),
            ("bytes", status.nbytes),
            ("generations", len(status.generations)),
            ("forgotten", self.forgotten if self._settings.forget_failed else None),
            ("expired", status.expired or None),
            *status.more.items(),
        ):
            if value is not None:
                self.stats.set_value(f"bloom/{name}", value)
        self.failures.show(status.errors)
        return status

    def close(self, *, all_seen: bool) -> str:
        """Show and log the last figures of a closed filter; return where it is."""
        status = self.show()
        self._logged = self._counts()  # no regular line any more
        self.stats.set_value("bloom/expected_false_drops", status.expected_false_drops)
        self._logger.info(
            "Bloom filter closed: %s recorded, %s in all, %.3g %% of the bits set, "
            "error rate now %.2g, expected false drops %.2g",
            counted(self.added, "request"),
            f"{status.count:,}",
            100 * status.fill_ratio,
            status.error_rate_now,
            status.expected_false_drops,
        )
        if all_seen and self.filtered:
            # If no start page that is never filtered was crawled either, somebody should know.
            was_idle = not self.stats.get_value("scheduler/dequeued", 0)
            self._logger.log(
                logging.WARNING if was_idle else logging.INFO,
                "Nothing new was crawled: %s came to the filter, and all was "
                "recorded in %s before. Pages that lead to new ones are crawled once in each run "
                'with meta={"bloom_filter": "run"}; to crawl pages again after some time, set '
                "BLOOM_WINDOW_SECS; to start over, use another JOBDIR, BLOOM_DIR or "
                "BLOOM_REDIS_KEY, or `scrapy bloom reset`",
                counted(self.filtered, "request"),
                status.location,
            )
        return status.location

    def _log(self) -> None:
        counts = added, filtered, forgotten = self._counts()
        if counts == self._logged:
            return
        try:
            status = self._look()
            self._logger.info(
                "Bloom filter: %s recorded (%s), %s in all, %s%s filtered (%s), %.3g %% "
                "of the bits set, error rate now %.2g",
                counted(added, "request"),
                f"{added - self._logged[0]:+,}",
                f"{status.count:,}",
                f"{forgotten:,} forgotten, " if self._settings.forget_failed else "",
                f"{filtered:,}",
                f"{filtered - self._logged[1]:+,}",
                100 * status.fill_ratio,
                status.error_rate_now,
            )
            self._logged = counts
        except Exception as error:  # noqa: BLE001 - it would never be called again
            self.failures.add("its figures", error, "they are left out of the log")

    def _counts(self) -> tuple[int, int, int]:
        return self.added, self.filtered, self.forgotten

    def _look(self) -> FilterStatus:
        """Update the stats, tell if the filter is full, and say when to look again."""
        status = self.show()
        ahead: float = _STATS_EVERY
        if self._settings.on_full != "grow":
            newest = status.generations[-1]
            if newest.number != self._full_number and self._full_at < math.inf:
                self._full_number, self._full_at = newest.number, 1.0
            if status.load >= self._full_at:
                self._warn_overfull(status)
            # An eighth of the room: other crawlers may fill it, too.
            room = (self._full_at * newest.capacity - newest.count) / 8
            ahead = min(ahead, max(1.0, room))
        self._look_at = self.added + math.ceil(ahead)
        return status

    def _warn_overfull(self, status: FilterStatus) -> None:
        """Warn at the capacity, and at each doubling of it; or close the spider."""
        while self._full_at <= status.load:
            self._full_at *= 2
        if self._settings.on_full == "close":
            self._full_at = math.inf  # what is under way may still add to it: say this once
            what = "The spider is closed; raise BLOOM_EXPECTED_REQUESTS, and start it again"
            close_spider_soon(self._crawler, "bloom_full")
        else:
            what = (
                "It rises with each further request, so that more and more new pages are taken "
                'for seen: set BLOOM_ON_FULL = "grow", or raise BLOOM_EXPECTED_REQUESTS, and '
                "start the crawl again"
            )
        self._logger.warning(
            "The Bloom filter holds %s, and was made for %s: its error rate is now %.2g "
            "(asked for: %g). %s",
            counted(status.count, "request"),
            f"{status.capacity:,}",
            status.error_rate_now,
            status.error_rate,
            what,
        )

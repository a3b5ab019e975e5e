"""The figures of a run: counted, and shown in the bloom/* stats and in a line of the log."""

import contextlib
import logging
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from scrapy_bloom.crawl.backends import Backend
from scrapy_bloom.crawl.engine import Ticker
from scrapy_bloom.crawl.outcomes.forgetting import Forgetting
from scrapy_bloom.crawl.telemetry.failures import Failures
from scrapy_bloom.crawl.telemetry.outlets import Outlets
from scrapy_bloom.crawl.this_run import ThisRun
from scrapy_bloom.generations.status import FilterStatus

if TYPE_CHECKING:
    from scrapy.crawler import Crawler

logger = logging.getLogger(__name__)

# Stats are brought up to date every so many new requests: often enough to watch a crawl, and
# too seldom to cost anything.
_STATS_EVERY = 1000


class Figures:
    """Counts what becomes of a run's requests, and shows it with the figures of the filter.

    Attributes:
        added: requests recorded.
        filtered: requests filtered. Not from the stats: STATS_CLASS may be one that keeps none.
    """

    def __init__(
        self,
        backend: Backend,
        this_run: ThisRun,
        forgetting: Forgetting | None,
        failures: Failures,
        outlets: Outlets,
        *,
        on_full: str,
    ) -> None:
        self.added = self.filtered = 0
        self._backend = backend
        self._this_run = this_run
        self._forgetting = forgetting
        self._failures = failures
        self._fullness = _Fullness(on_full, outlets)
        # Soon, but not now: no spider can be closed before it runs.
        self._look_at = _STATS_EVERY if on_full == "grow" else 1
        self._outlets = outlets
        self._logged = self._counts()
        self._ticker: Ticker | None = None

    def log_regularly(self, crawler: "Crawler") -> None:
        """Log a line every LOGSTATS_INTERVAL, if there is anything new."""
        secs = 0.0
        with contextlib.suppress(ValueError, TypeError):  # of which Scrapy tells, if it is used
            secs = crawler.settings.getfloat("LOGSTATS_INTERVAL")
        if secs > 0:
            self._ticker = Ticker(crawler, secs, self._log)

    def count_added(self) -> None:
        """Count a recorded request; every now and then, update the stats, and look if it is full.

        Raises:
            StorageError: the filter is out of reach.
        """
        self.added += 1
        if self.added >= self._look_at:
            self._look()

    def show(self) -> FilterStatus:
        """Bring the stats up to date; return the figures of the filter now."""
        status = self._backend.status()
        if in_memory := self._this_run.generations():
            status = replace(status, volatile=[*status.volatile, *in_memory])
        _, _, forgotten = self._counts()
        for name, value in (
            ("added", self.added),
            ("count", status.count),
            ("capacity", status.capacity),
            ("fill_ratio", status.fill_ratio),
            ("error_rate", status.error_rate_now),
            ("bytes", status.nbytes),
            ("generations", len(status.generations)),
            ("forgotten", forgotten),
            ("expired", status.expired or None),
            *status.more.items(),
        ):
            if value is not None:
                self._outlets.stats.set_value(f"bloom/{name}", value)
        self._failures.show(status.errors)
        return status

    def close(self) -> FilterStatus:
        """Do `show` for the last time: no line in the log any more."""
        self._logged = self._counts()
        return self.show()

    def _look(self) -> FilterStatus:
        status = self.show()
        self._look_at = self.added + math.ceil(min(self._fullness.look(status), _STATS_EVERY))
        return status

    def _log(self) -> None:
        counts = added, filtered, forgotten = self._counts()
        if counts == self._logged:
            return
        try:
            status = self._look()
            logger.info(
                "Bloom filter: %s requests recorded (%s), %s in all, %s%s filtered (%s), %.3g %% "
                "of the bits set, error rate now %.2g",
                f"{added:,}",
                f"{added - self._logged[0]:+,}",
                f"{status.count:,}",
                "" if forgotten is None else f"{forgotten:,} forgotten, ",
                f"{filtered:,}",
                f"{filtered - self._logged[1]:+,}",
                100 * status.fill_ratio,
                status.error_rate_now,
                extra=self._outlets.extra,
            )
            self._logged = counts
        except Exception as error:  # noqa: BLE001 - it would never be called again
            self._failures.add("its figures", error, "they are left out of the log")

    def _counts(self) -> tuple[int, int, int | None]:
        forgotten = self._forgetting.forgotten if self._forgetting is not None else None
        return self.added, self.filtered, forgotten


class _Fullness:
    """Watches how full a filter is: tells at its capacity, and at each doubling of that."""

    def __init__(self, on_full: str, outlets: Outlets) -> None:
        self._on_full = on_full
        self._outlets = outlets
        self._number = 0  # of the generation that was told of last
        self._next = 1.0  # this load of it is the next to be told of; infinite: none any more

    def look(self, status: FilterStatus) -> float:
        """Tell if the filter is full.

        Returns:
            After how many further requests to look again: infinite if that is not needed.
        """
        if self._on_full == "grow":
            return math.inf
        newest = status.generations[-1]
        if newest.number != self._number and self._next < math.inf:
            self._number, self._next = newest.number, 1.0
        if status.load >= self._next:
            self._warn_overfull(status)
        # An eighth of the room: other crawlers may fill it, too.
        return max(1.0, (self._next * newest.capacity - newest.count) / 8)

    def _warn_overfull(self, status: FilterStatus) -> None:
        while self._next <= status.load:
            self._next *= 2
        if self._on_full == "close":
            self._next = math.inf  # what is under way may still add to it: say this once
            what = "The spider is closed; raise BLOOM_EXPECTED_REQUESTS, and start it again"
            self._outlets.close_spider("bloom_full")
        else:
            what = (
                "It rises with each further request, so that more and more new pages are taken "
                'for seen: set BLOOM_ON_FULL = "grow", or raise BLOOM_EXPECTED_REQUESTS, and '
                "start the crawl again"
            )
        logger.warning(
            "The Bloom filter holds %s requests, and was made for %s: its error rate is now %.2g "
            "(asked for: %g). %s",
            f"{status.count:,}",
            f"{status.capacity:,}",
            status.error_rate_now,
            status.error_rate,
            what,
            extra=self._outlets.extra,
        )

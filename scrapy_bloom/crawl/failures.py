"""Count the failures of the filter and of the queue, and log each kind of failure once."""

import logging
from traceback import walk_tb

from scrapy.crawler import Crawler
from scrapy.statscollectors import StatsCollector
from scrapy.utils.python import global_object_name

from scrapy_bloom.crawl.engine import close_spider_soon, is_closing, is_open
from scrapy_bloom.exceptions import BloomError, OutageError, RefusedError, StorageError

# If the fingerprinter fails on the first 100 requests, it fails on all. A crawl without a filter
# may never end, because links lead back to pages.
_MOST_UNFINGERPRINTED = 100
_UNAVAILABLE = (OutageError, RefusedError)  # errors that mean: the filter cannot be used


class Failures:
    """The failures of one crawl: counts them, logs them, and closes the spider if necessary.

    An outage of Redis makes the filter, the queue and the close fail, but is logged once. With
    `shares_queue`, requests in progress stay in a queue in Redis if it cannot be used.
    """

    def __init__(self, crawler: Crawler, *, shares_queue: bool = False) -> None:
        assert crawler.stats is not None
        self.number = 0  # of failures of the filter
        self.stats: StatsCollector = crawler.stats
        self.extra = {"spider": crawler.spider}
        self._logger = logging.LoggerAdapter(logging.getLogger(__name__), self.extra)
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
        """Count a failure of the filter on a request, or another thing; log the first of a kind."""
        self.number += 1
        self.show()
        if not self._is_first(error):
            return
        if isinstance(error, StorageError):  # of a file, too: unfiltered, a crawl may never end
            self._log_unavailable(error, "bloom_outage")
            return
        is_ours = isinstance(error, BloomError)
        self._logger.error(
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
        self._logger.error(
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
            self._logger.error("%s", error)

    def close_for_queue(self, error: Exception, store_name: str) -> None:
        """Log why the queue of CrashSafeScheduler is unusable, and close the spider."""
        reason = "bloom_outage" if isinstance(error, OutageError) else "bloom_queue_failed"
        if isinstance(error, _UNAVAILABLE):
            if self._is_first(error):
                self._log_unavailable(error, reason)
        elif isinstance(error, OSError):
            self._logger.error(
                "The queue in %s, or its filter, cannot be written or read: %s. The spider is "
                "closed (%s), and nothing is lost: free some space or repair the disk, and start "
                "the crawl again",
                store_name,
                error,
                self._cause(reason),
            )
        else:
            self._logger.error(
                "%s. The spider is closed (%s)",
                str(error) or type(error).__name__,
                self._cause(reason),
                exc_info=None if isinstance(error, BloomError) else error,
            )
        close_spider_soon(self._crawler, reason)

    def show(self, others: int = 0) -> None:
        """Update the stat bloom/errors, including errors that the backend counted."""
        if errors := self.number + others:
            self.stats.max_value("bloom/errors", errors)

    def _cause(self, reason: str) -> str:
        """Return why the spider is closed, which may be for another reason."""
        if is_open(self._crawler) and is_closing(self._crawler.engine):
            return "for another reason"
        return f"reason {reason}"

    def _is_first(self, error: Exception) -> bool:
        """Return whether no error of the same outage, or of the same kind, came before."""
        kind = getattr(error, "since", type(error))
        if not isinstance(error, _UNAVAILABLE):
            lines = [(frame.f_code, line) for frame, line in walk_tb(error.__traceback__)]
            kind = kind, *lines[-1:]
        is_first = kind not in self._logged
        self._logged.add(kind)
        return is_first

    def _log_unavailable(self, error: StorageError, reason: str) -> None:
        """Log that Redis or a file cannot be used, and close the spider."""
        are_kept = self._shares_queue or reason == "bloom_queue_failed"
        self._logger.error(
            "%s. The spider is closed (%s), and requests that are still in progress %s; start the "
            "crawl again when %s",
            error,
            self._cause(reason),
            "stay in the queue" if are_kept else "are crawled unfiltered",
            "the server is back" if isinstance(error, OutageError) else "that is fixed",
        )
        close_spider_soon(self._crawler, reason)

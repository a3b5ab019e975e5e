"""Failures of the filter: all are counted; each outage, and the first of all others, is logged."""

import logging

from scrapy.crawler import Crawler
from scrapy.statscollectors import StatsCollector
from scrapy.utils.python import global_object_name

from scrapy_bloom.crawl.engine import close_spider_soon
from scrapy_bloom.exceptions import BloomError, OutageError, RefusedError, StorageError

# If none of so many requests can be fingerprinted, no request can. A crawl without any filter may
# have no end: links lead back.
_HOPELESS = 100


class Failures:
    """Counts the failures of one crawl's filter, and tells of them.

    Attributes:
        number: how many there were.
        stats: the crawler's.
        extra: for the log records of the crawl.
    """

    def __init__(self, crawler: Crawler, *, on_outage: str, keeps_queue: bool = False) -> None:
        assert crawler.stats is not None
        self.number = 0
        self.stats: StatsCollector = crawler.stats
        self.extra = {"spider": crawler.spider}
        self._logger = logging.LoggerAdapter(logging.getLogger(__name__), self.extra)
        self._crawler = crawler
        self._on_outage = on_outage
        self._under_way = "stays in the queue" if keeps_queue else "is crawled unfiltered"
        self._told: set[object] = set()  # kinds of failures
        self._unfingerprinted = 0

    def add(
        self,
        what: object,
        error: Exception,
        consequence: str = "it is crawled, whether it was seen or not",
    ) -> None:
        """Count that the filter failed on something, and tell of it if it is of a new kind."""
        self.number += 1
        self.show()
        if not self.is_first(error):
            return
        if isinstance(error, OutageError):
            self._give_up(error, error.until)
        elif isinstance(error, RefusedError):
            # Redis would refuse the next request, too; and unfiltered, links back would never end.
            self._give_up(error, "that is put right")
        else:
            is_ours = isinstance(error, BloomError)
            self._logger.error(
                "The Bloom filter failed on %s: %s. More failures are counted in bloom/errors, not "
                "logged%s",
                what,
                consequence,
                f". It was: {error}" if is_ours else "",
                exc_info=None if is_ours else error,
            )

    def is_first(self, error: Exception) -> bool:
        """Return whether an error is the first of its kind, of which somebody is to tell."""
        kind = _kind(error)
        is_first = kind not in self._told
        self._told.add(kind)
        return is_first

    def show(self, others: int = 0) -> None:
        """Bring bloom/errors up to date, with the errors that were counted elsewhere."""
        if errors := self.number + others:
            self.stats.max_value("bloom/errors", errors)

    def add_unfingerprinted(self, *, any_worked: bool) -> None:
        """Note that the last failure was the fingerprinter's; give up if it has never worked."""
        self._unfingerprinted += 1
        if self._unfingerprinted != _HOPELESS or any_worked:
            return
        self._logger.error(
            "%s, the REQUEST_FINGERPRINTER_CLASS, has not returned bytes for any of the first %d "
            "requests. The spider is closed, since unfiltered it might never end: mend that class, "
            "and start the crawl again",
            global_object_name(type(self._crawler.request_fingerprinter)),
            _HOPELESS,
        )
        close_spider_soon(self._crawler, "bloom_no_fingerprints")

    def add_at_the_close(self, error: StorageError) -> None:
        """Count that the filter could not be closed well, and tell of it if it is of a new kind."""
        self.number += 1
        if (kind := _kind(error)) is None or kind not in self._told:
            self._logger.error("%s", error)

    def _give_up(self, error: StorageError, when: str) -> None:
        if self._on_outage == "close":
            what = (
                f"The spider is closed, and what is still under way {self._under_way}; start the "
                f"crawl again when {when}"
            )
            close_spider_soon(self._crawler, "bloom_outage")
        else:
            what = f"Requests are crawled unfiltered until {when}, and counted in bloom/errors"
        self._logger.error("%s. %s", error, what)


def _kind(error: Exception) -> object:
    """Return the kind of an error that is logged once for each outage or refusal; else None."""
    if isinstance(error, OutageError):
        return error.since
    return RefusedError if isinstance(error, RefusedError) else None

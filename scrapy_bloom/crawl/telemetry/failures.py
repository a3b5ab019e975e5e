"""Failures of the filter: all are counted; each outage, and the first of all others, is logged."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from scrapy.statscollectors import StatsCollector

from scrapy_bloom.exceptions import BloomError, OutageError, RefusedError, StorageError

logger = logging.getLogger(__name__)

# If none of so many requests can be fingerprinted, no request can. A crawl without any filter may
# have no end: links lead back.
_HOPELESS = 100


class Failures:
    """Counts the failures of one crawl's filter, and tells of them.

    Args:
        stats: the crawler's.
        extra: for the log records.
        close_spider: closes the spider with the reason given.
        on_outage: BLOOM_REDIS_ON_OUTAGE.
        fingerprinter: import path of the class that makes the fingerprints.

    Attributes:
        failures: how many there were.
    """

    def __init__(
        self,
        stats: StatsCollector,
        extra: Mapping[str, Any],
        close_spider: Callable[[str], None],
        *,
        on_outage: str,
        fingerprinter: str,
    ) -> None:
        self.stats = stats
        self.extra = extra
        self.close_spider = close_spider
        self.failures = 0
        self._on_outage = on_outage
        self._fingerprinter = fingerprinter
        self._told: set[object] = set()  # kinds of failures
        self._unfingerprinted = 0

    def failed(
        self,
        what: object,
        error: Exception,
        consequence: str = "it is crawled, whether it was seen or not",
    ) -> None:
        """Count a failure, and tell of it if it is of a new kind.

        Args:
            what: what the filter was asked about.
            error: how it failed.
            consequence: what becomes of that now.
        """
        self.failures += 1
        self.show_errors()
        if (kind := _kind(error)) in self._told:
            return
        self._told.add(kind)
        if isinstance(error, OutageError):
            self._give_up(error, error.until)
        elif isinstance(error, RefusedError):
            # Redis would refuse the next request, too; and unfiltered, links back would never end.
            self._give_up(error, "that is put right")
        else:
            is_ours = isinstance(error, BloomError)
            logger.error(
                "The Bloom filter failed on %s: %s. More failures are counted in bloom/errors, not "
                "logged%s",
                what,
                consequence,
                f". It was: {error}" if is_ours else "",
                exc_info=None if is_ours else error,
                extra=self.extra,
            )

    def show_errors(self, others: int = 0) -> None:
        """Bring bloom/errors up to date, with the errors that were counted elsewhere."""
        if errors := self.failures + others:
            self.stats.max_value("bloom/errors", errors)

    def failed_to_fingerprint(self, *, any_worked: bool) -> None:
        """Note that the last failure was the fingerprinter's; give up if it has never worked."""
        self._unfingerprinted += 1
        if self._unfingerprinted != _HOPELESS or any_worked:
            return
        logger.error(
            "%s, the REQUEST_FINGERPRINTER_CLASS, has not returned bytes for any of the first %d "
            "requests. The spider is closed, since unfiltered it might never end: mend that class, "
            "and start the crawl again",
            self._fingerprinter,
            _HOPELESS,
            extra=self.extra,
        )
        self.close_spider("bloom_no_fingerprints")

    def failed_at_the_close(self, error: StorageError) -> None:
        """Count that the filter could not be closed well, and tell of it if it is of a new kind."""
        self.failures += 1
        if (kind := _kind(error)) is None or kind not in self._told:
            logger.error("%s", error, extra=self.extra)

    def _give_up(self, error: StorageError, when: str) -> None:
        if self._on_outage == "close":
            what = (
                "The spider is closed, and what is still under way is crawled unfiltered; start "
                f"the crawl again when {when}"
            )
            self.close_spider("bloom_outage")
        else:
            what = f"Requests are crawled unfiltered until {when}, and counted in bloom/errors"
        logger.error("%s. %s", error, what, extra=self.extra)


def _kind(error: Exception) -> object:
    """Return the kind of an error that is logged once for each outage or refusal; else None."""
    if isinstance(error, OutageError):
        return error.since
    return RefusedError if isinstance(error, RefusedError) else None

"""Telling when a filter that does not grow is full (BLOOM_ON_FULL)."""

import logging
import math

from scrapy_bloom.outlets import Outlets
from scrapy_bloom.status import FilterStatus

logger = logging.getLogger(__name__)


class Fullness:
    """Watches how full a filter is: tells at its capacity, and at each doubling of that.

    Args:
        on_full: BLOOM_ON_FULL. With "grow" that is the backend's business alone.
        outlets: of the crawl.
    """

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
            self._tell(status)
        # An eighth of the room: other crawlers may fill it, too.
        return max(1.0, (self._next * newest.capacity - newest.count) / 8)

    def _tell(self, status: FilterStatus) -> None:
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

"""What the parts of a filter tell their crawl by."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scrapy.statscollectors import StatsCollector


@dataclass(frozen=True)
class Outlets:
    """The stats, the log and the end of one crawl.

    Attributes:
        stats: the crawler's.
        extra: for the log records.
        close_spider: closes the spider with the reason given.
    """

    stats: "StatsCollector"
    extra: Mapping[str, Any]
    close_spider: Callable[[str], None]

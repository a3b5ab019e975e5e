"""Ways by which the parts of a filter reach their crawl."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from scrapy.statscollectors import StatsCollector


@dataclass(frozen=True)
class Outlets:
    """Ways by which the parts of a filter reach their crawl: its stats, its log and its end.

    Attributes:
        stats: the crawler's.
        extra: for the log records.
        close_spider: closes the spider with the reason given.
    """

    stats: StatsCollector
    extra: Mapping[str, Any]
    close_spider: Callable[[str], None]

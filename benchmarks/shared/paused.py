"""A crawl that downloads nothing: what is measured is the scheduler of its engine."""

from collections.abc import Callable, Mapping
from typing import Any

import scrapy
from scrapy.crawler import CrawlerProcess
from scrapy.exceptions import CloseSpider


class PausedSpider(scrapy.Spider):
    """Has the scheduler of its engine measured, while that is paused, and closes."""

    name = "paused"
    measure: Callable[[Any, scrapy.Spider], None]

    async def start(self) -> Any:
        """Measure, and close the spider."""
        engine: Any = self.crawler.engine
        engine.pause()  # no host of the requests exists
        self.measure(engine.scheduler, self)
        raise CloseSpider("measured")
        yield  # it is a generator


def in_paused_crawl(
    settings: Mapping[str, Any], measure: Callable[[Any, scrapy.Spider], None]
) -> None:
    """Call a function with the scheduler and the spider of a crawl.

    That ends the use of this process for any other.
    """
    process = CrawlerProcess(
        {
            **settings,
            "LOG_ENABLED": False,
            "CLOSESPIDER_ERRORCOUNT": 1,  # should the measurement fail
            "TELNETCONSOLE_ENABLED": False,
            "REMOTE_CONTROL_ENABLED": False,
        }
    )
    process.crawl(PausedSpider, measure=measure)
    process.start(install_signal_handlers=False)  # or SIGTERM would not end this process

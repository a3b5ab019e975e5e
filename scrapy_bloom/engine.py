"""What a filter asks of Scrapy's engine, across the versions of Scrapy."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

from scrapy.crawler import Crawler
from scrapy.utils.defer import deferred_from_coro
from scrapy.utils.reactor import is_reactor_installed


def is_shell(crawler: Crawler) -> bool:
    """Whether this is `scrapy shell`: it opens the filter, without a crawl, and never closes it.

    Only there is an engine without `Crawler.crawl`. Whether it runs already does not matter: the
    shell starts it in another thread.
    """
    try:
        engine = crawler.engine
    except RuntimeError:  # Scrapy 2.19: not there yet
        return False
    return engine is not None and not crawler.crawling


def close_spider_soon(crawler: Crawler, reason: str) -> None:
    """Close the spider once the request under way is in the queue, so that it is not lost.

    Args:
        crawler: the running crawler.
        reason: the finish_reason, for example "bloom_full".
    """

    def close() -> None:
        engine = crawler.engine
        if engine is None or crawler.spider is None or engine.spider is None:
            return
        if hasattr(engine, "close_spider_async"):
            deferred_from_coro(engine.close_spider_async(reason=reason))
        else:  # Scrapy 2.13
            engine.close_spider(crawler.spider, reason)

    _call_soon(close)


def _call_soon(function: Callable[[], None]) -> None:
    """Call a function from the event loop, with or without a Twisted reactor."""
    if is_reactor_installed():
        from twisted.internet import reactor  # noqa: PLC0415 - importing it earlier installs one

        cast("Any", reactor).callLater(0, function)
    else:
        asyncio.get_running_loop().call_soon(function)

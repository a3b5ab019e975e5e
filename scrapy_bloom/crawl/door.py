"""Drop known duplicates right after a callback has yielded them.

Most links of a page are known. Scrapy spends 50 to 60 microseconds on each of them, and the filter
3. So the output of callbacks is filtered where it comes out: before the spider middlewares if
nobody could notice, and otherwise after them. Only requests of which the filter is certain, without
asking a server or a disk, are dropped here.
"""

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from scrapy import Request, signals
from scrapy.core.spidermw import SpiderMiddlewareManager
from scrapy.crawler import Crawler
from scrapy.downloadermiddlewares.offsite import OffsiteMiddleware
from scrapy.exceptions import IgnoreRequest
from scrapy.http import Response
from scrapy.spidermiddlewares.depth import DepthMiddleware
from scrapy.spidermiddlewares.referer import RefererMiddleware
from scrapy.spidermiddlewares.start import StartSpiderMiddleware
from scrapy.utils.request import RequestFingerprinter

from scrapy_bloom.crawl.engine import (
    is_filter,
    listeners,
    paced,
    taking_turns,
    watch_callbacks,
    watch_scheduled,
)
from scrapy_bloom.exceptions import SettingError

logger = logging.getLogger(__name__)

_SCHEDULERS = ("scrapy.core.", "scrapy_bloom.")  # modules of the schedulers whose ways are known
# Scrapy's spider middlewares whose effect on a request that is dropped nobody sees.
_WITHOUT_EFFECT = (StartSpiderMiddleware, RefererMiddleware)


def drop_known_duplicates(crawler: Crawler, df: Any) -> None:
    """Drop the known duplicates of a crawl early, with the stats and the log of the usual way.

    Does nothing if the scheduler is neither Scrapy's nor ours. What a project's components could
    notice is dropped after them, or not at all.
    """
    engine: Any = crawler.engine
    # A subclass may have its own, and count or keep what is dropped.
    if not engine.scheduler_cls.enqueue_request.__module__.startswith(_SCHEDULERS):
        return
    # A middleware sets the Referer with which DUPEFILTER_DEBUG logs each duplicate.
    middlewares = None if df.debug else _processing_middlewares(crawler)
    # The depth is the same for all requests of a response, and one call sets the stat.
    further = [
        middleware
        for middleware in middlewares or ()
        if type(middleware) is not DepthMiddleware
        or (middleware.maxdepth or middleware.verbose_stats)
    ]
    give_way = taking_turns(most_steps=math.inf)

    def watch(output: Any, _: Request, result: Any) -> Any:
        # What an errback yields after a failed download skips the spider middlewares.
        if middlewares is not None and not isinstance(result, Response):
            return output
        if (offsite := _listening_middlewares(crawler)) is None or not is_filter(engine, df):
            return output
        links = _Links(df, crawler.spider, result, middlewares or (), further, offsite)
        return paced(output, links.is_dropped, give_way)

    try:
        _listening_middlewares(crawler)  # so that a failure is noticed now
        (watch_scheduled if middlewares is None else watch_callbacks)(engine, watch)
    except (ImportError, SettingError) as error:
        logger.debug("Known duplicates are not dropped early: %s", error)
        return
    logger.debug(
        "Known duplicates are dropped %s the spider middlewares",
        "after" if middlewares is None else "before",
        extra={"spider": crawler.spider},
    )


@dataclass
class _Links:
    """Drops known duplicates from the output of one callback."""

    df: Any
    spider: Any
    response: Response
    middlewares: Iterable[Any]
    further: Iterable[Any]  # the middlewares after the first duplicate
    offsite: Iterable[OffsiteMiddleware]
    passed: set[str] = field(default_factory=set)  # sites that nobody refuses: most links have few

    def is_dropped(self, element: Any) -> bool:
        """Return whether an element is a request that is known; if so, count it as Scrapy does."""
        if not (isinstance(element, Request) and self.df.is_known(element)):
            return False
        for middleware in self.middlewares:
            if middleware.get_processed_request(element, self.response) is None:
                return True
        self.middlewares = self.further
        if not self._is_refused(element):
            self.df.log(element, self.spider)
        return True

    def _is_refused(self, request: Request) -> bool:
        """Return whether a middleware refuses the site of a request, and has counted it."""
        url = request.url
        site = url[: url.find("/", len("https://")) + 1] or url
        if site in self.passed:
            return False
        try:
            for middleware in self.offsite:
                middleware.request_scheduled(request, self.spider)
        except IgnoreRequest:
            return True
        if not request.meta.get("allow_offsite"):
            self.passed.add(site)
        return False


def _processing_middlewares(crawler: Crawler) -> list[Any] | None:
    """Return Scrapy's middlewares that may drop or count a request; None if others may notice."""
    engine: Any = crawler.engine
    manager = engine.scraper.spidermw
    if (
        type(manager) is not SpiderMiddlewareManager
        or type(crawler.request_fingerprinter) is not RequestFingerprinter
    ):
        return None
    processing = []
    for middleware in reversed(manager.middlewares):
        if hasattr(middleware, "process_spider_output"):
            is_scrapys = type(middleware).__module__.startswith("scrapy.spidermiddlewares.")
            if not is_scrapys or not hasattr(middleware, "get_processed_request"):
                return None
            processing.append(middleware)
    return [one for one in processing if type(one) not in _WITHOUT_EFFECT]


def _listening_middlewares(crawler: Crawler) -> list[OffsiteMiddleware] | None:
    """Return Scrapy's listeners that may refuse a request; None if anybody else listens."""
    if listeners(crawler, signals.request_dropped):
        return None
    # Until Scrapy 2.15, RefererMiddleware listens. It changes no fingerprint of Scrapy's own class.
    may_set_referer = type(crawler.request_fingerprinter) is RequestFingerprinter
    offsite = []
    for listener in listeners(crawler, signals.request_scheduled):
        owner = getattr(listener, "__self__", None)
        if type(owner) is OffsiteMiddleware:
            offsite.append(owner)
        elif not (may_set_referer and type(owner) is RefererMiddleware):
            return None
    return offsite

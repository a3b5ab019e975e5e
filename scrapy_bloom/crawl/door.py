"""Drop known duplicates right after a callback has yielded them.

Most links of a page are known. Scrapy spends 50 to 60 microseconds on each of them, and the filter
3. So the output of callbacks is filtered where it comes out: before the spider middlewares if
nobody could notice, and otherwise after them. Only requests of which the filter is certain, without
asking a server or a disk, are dropped here.
"""

import logging
import math
from collections.abc import Iterable
from itertools import filterfalse
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
    Drops,
    MayGoOn,
    is_filter,
    listeners,
    taking_turns,
    watch_callbacks,
    watch_scheduled,
)
from scrapy_bloom.exceptions import SettingError

logger = logging.getLogger(__name__)

_MIDDLEWARES, _PROCESSES = "scrapy.spidermiddlewares.", "get_processed_request"
_SCHEDULERS = ("scrapy.core.", "scrapy_bloom.")  # modules of the schedulers whose ways are known
# Scrapy's spider middlewares whose effect on a request that is dropped nobody sees.
_WITHOUT_EFFECT = (StartSpiderMiddleware, RefererMiddleware)


def drop_known_duplicates(crawler: Crawler, df: Any, *, logs_all: bool) -> None:
    """Drop the known duplicates of a crawl early, with the stats and the log of the usual way.

    Does nothing if the scheduler is neither Scrapy's nor ours. What a project's components could
    notice is dropped after them, or not at all.

    Args:
        crawler: the crawler, while its scheduler is opened.
        df: the filter of its scheduler.
        logs_all: whether the filter logs the Referer of each duplicate.
    """
    engine: Any = crawler.engine
    # A subclass may have its own, and count or keep what is dropped.
    if not engine.scheduler_cls.enqueue_request.__module__.startswith(_SCHEDULERS):
        return
    middlewares = None if logs_all else _processing_middlewares(crawler)
    give_way = taking_turns(most_steps=math.inf)

    def watch(_: Request, result: Any) -> tuple[Drops, MayGoOn] | None:
        # What an errback yields after a failed download skips the spider middlewares.
        if middlewares is not None and not isinstance(result, Response):
            return None
        if (offsite := _listening_middlewares(crawler)) is None or not is_filter(engine, df):
            return None
        links = _Links(df, crawler.spider, result, middlewares or (), offsite)
        return links.is_dropped, give_way

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


class _Links:
    """Drops known duplicates from the output of one callback."""

    def __init__(
        self,
        df: Any,
        spider: Any,
        response: Response,
        middlewares: Iterable[Any],
        offsite: Iterable[OffsiteMiddleware],
    ) -> None:
        self._df = df
        self._spider = spider
        self._response = response
        self._middlewares = middlewares
        # The depth is the same for all requests of a response, and one call sets the stat.
        self._further = list(filterfalse(_only_sets_depth, middlewares))
        self._offsite = offsite
        self._passed: set[str] = set()  # the sites that nobody refuses: most links lead to a few

    def is_dropped(self, element: Any) -> bool:
        """Return whether an element is a request that is known; if so, count it as Scrapy does."""
        if not (isinstance(element, Request) and self._df.is_known(element)):
            return False
        for middleware in self._middlewares:
            if middleware.get_processed_request(element, self._response) is None:
                return True
        self._middlewares = self._further
        if not self._is_refused(element):
            self._df.log(element, self._spider)
        return True

    def _is_refused(self, request: Request) -> bool:
        """Return whether a middleware refuses the site of a request, and has counted it."""
        url = request.url
        site = url[: url.find("/", len("https://")) + 1] or url
        if site in self._passed:
            return False
        try:
            for middleware in self._offsite:
                middleware.request_scheduled(request, self._spider)
        except IgnoreRequest:
            return True
        if not request.meta.get("allow_offsite"):
            self._passed.add(site)
        return False


def _only_sets_depth(middleware: Any) -> bool:
    return type(middleware) is DepthMiddleware and not (
        middleware.maxdepth or middleware.verbose_stats
    )


def _processing_middlewares(crawler: Crawler) -> list[Any] | None:
    """Return Scrapy's spider middlewares that may drop or count a request, in their order.

    Returns None if there is any other class, which may notice that a request is missing.
    """
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
            module = type(middleware).__module__
            if not module.startswith(_MIDDLEWARES) or not hasattr(middleware, _PROCESSES):
                return None
            processing.append(middleware)
    return [one for one in processing if type(one) not in _WITHOUT_EFFECT]


def _listening_middlewares(crawler: Crawler) -> list[OffsiteMiddleware] | None:
    """Return Scrapy's middlewares that may refuse a request of another site as it is scheduled.

    Returns None if anybody else listens to the signals of scheduled and dropped requests.
    """
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

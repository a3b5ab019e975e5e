"""Drop known duplicates right after a callback has yielded them.

Most links of a page are known. Scrapy spends 50 to 60 microseconds on each of them: the spider
middlewares as nested asynchronous generators, a queue of tasks, two signals, and the scheduler. The
filter answers in 3. So the output of callbacks is filtered where it comes out: before the spider
middlewares if nobody could notice, and otherwise after them. Only requests of which the filter is
certain, without asking a server or a disk, are dropped here. All others go Scrapy's way.
"""

import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
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
from scrapy.spidermiddlewares.urllength import UrlLengthMiddleware
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

_SCHEDULERS = ("scrapy.core.", "scrapy_bloom.")  # modules of the schedulers whose ways are known
_Check = Callable[[Request], bool]  # returns whether a request of a response is dropped
# The spider middlewares that do to a request of a callback only what `get_processed_request` does.
_CHECKING: list[type] = [DepthMiddleware, UrlLengthMiddleware]
with contextlib.suppress(ImportError):  # before Scrapy 2.18
    from scrapy.spidermiddlewares.metacopy import MetaCopyDetectionMiddleware

    _CHECKING.append(MetaCopyDetectionMiddleware)
# Those whose effect on a request that is dropped nobody sees.
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
    middlewares = None if logs_all else _middlewares_with_checks(crawler)
    give_way = taking_turns(most_steps=math.inf)

    def watch(_: Request, result: Any) -> tuple[Drops, MayGoOn] | None:
        # What an errback yields after a failed download skips the spider middlewares.
        if middlewares is not None and not isinstance(result, Response):
            return None
        if (offsite := _listening_middlewares(crawler)) is None or not is_filter(engine, df):
            return None
        sites = _Sites(offsite, crawler.spider)
        checks = [_check_of_middleware(each, result) for each in middlewares or ()]
        return partial(_is_dropped, df.is_known, df.log, sites, [*checks, sites.refuse]), give_way

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


def _is_dropped(
    is_known: Callable[[Request], bool],
    log: Callable[[Request, Any], None],
    sites: "_Sites",
    checks: Sequence[_Check],
    element: Any,
) -> bool:
    """Return whether an element of a callback's output is certainly a request that is not crawled.

    It is counted and logged as Scrapy does it.
    """
    if not isinstance(element, Request):
        return False
    known = is_known(element)
    if not known and not sites.have_refused(element):
        return False
    for refuses in checks:
        if refuses(element):
            return True
    if known:
        log(element, sites.spider)
    return known


def _middlewares_with_checks(crawler: Crawler) -> list[Any] | None:
    """Return the spider middlewares that may drop a request, or count it, in their order.

    They are Scrapy's depth, its limit of a URL's length, and its warnings. Returns None if there is
    any other class than Scrapy's own, which may notice that a request is missing.
    """
    engine: Any = crawler.engine
    manager = engine.scraper.spidermw
    if (
        type(manager) is not SpiderMiddlewareManager
        or type(crawler.request_fingerprinter) is not RequestFingerprinter
    ):
        return None
    checking = []
    for middleware in reversed(manager.middlewares):
        kind = type(middleware)
        if not hasattr(middleware, "process_spider_output"):
            continue
        if kind in _CHECKING:
            checking.append(middleware)
        elif kind not in _WITHOUT_EFFECT:
            return None
    return checking


def _check_of_middleware(middleware: Any, response: Response) -> _Check:
    """Return what a spider middleware does with a request that a response has led to."""
    process = middleware.get_processed_request
    # The depth is the same for all requests of a response, and one call sets the stat.
    is_needed_once = type(middleware) is DepthMiddleware and not (
        middleware.maxdepth or middleware.verbose_stats
    )
    was_called = False

    def is_removed(request: Request) -> bool:
        nonlocal was_called
        if was_called and "depth_reset" not in request.meta:
            return False
        was_called = is_needed_once and "depth_reset" not in request.meta
        return process(request, response) is None

    return is_removed


def _listening_middlewares(crawler: Crawler) -> list[OffsiteMiddleware] | None:
    """Return Scrapy's middlewares that may refuse a request of another site as it is scheduled.

    Returns None if anybody else listens to the signals of scheduled and dropped requests.
    """
    if listeners(crawler, signals.request_dropped):
        return None
    # Until Scrapy 2.15, RefererMiddleware listens. It changes no fingerprint of Scrapy's own class.
    may_set_referer = type(crawler.request_fingerprinter) is RequestFingerprinter
    found = []
    for listener in listeners(crawler, signals.request_scheduled):
        owner = getattr(listener, "__self__", None)
        if type(owner) is OffsiteMiddleware:
            found.append(owner)
        elif not (may_set_referer and type(owner) is RefererMiddleware):
            return None
    return found


class _Sites:
    """The sites that one response links to: most of its requests are of the same few."""

    def __init__(self, middlewares: list[OffsiteMiddleware], spider: Any) -> None:
        self._middlewares = middlewares
        self.spider = spider
        self._passed: set[str] = set()
        self._refused: set[str] = set()

    def refuse(self, request: Request) -> bool:
        """Return whether a request without `dont_filter` is refused; then Scrapy has counted it."""
        if (site := _site_of(request)) in self._passed:
            return False
        try:
            for middleware in self._middlewares:
                middleware.request_scheduled(request, self.spider)
        except IgnoreRequest:
            self._refused.add(site)
            return True
        if not request.meta.get("allow_offsite"):
            self._passed.add(site)
        return False

    def have_refused(self, request: Request) -> bool:
        """Return whether `refuse` will refuse a request, because it has refused its site before."""
        return (
            _site_of(request) in self._refused
            and not request.dont_filter
            and not request.meta.get("allow_offsite")
        )


def _site_of(request: Request) -> str:
    """Return the beginning of a request's URL, up to a slash after the name of the host."""
    url = request.url
    end = url.find("/", len("https://"))
    return url[:end] if end > 0 else url

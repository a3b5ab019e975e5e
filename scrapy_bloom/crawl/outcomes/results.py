"""Outcomes of a crawl's requests: crawled without an error, failed for good, or otherwise.

No signal of Scrapy says so: a download that failed for good ends silently in an errback, or in a
line of the log, and so does a response that HttpErrorMiddleware has refused. But all that is not
retried or redirected goes through three methods of Scrapy's scraper, in all versions from 2.13 on.
So these are wrapped, in the scraper of this crawl only. Middlewares would see the same, but would
have to be put into the settings of each project, and could not tell when the item pipelines are
done.
"""

from collections.abc import AsyncIterator, Callable, Container, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from scrapy import Request, signals
from scrapy.crawler import Crawler
from scrapy.exceptions import CloseSpider, IgnoreRequest, StopDownload
from scrapy.spidermiddlewares.httperror import HttpError
from twisted.python.failure import Failure

from scrapy_bloom.crawl.engine import wrap_methods
from scrapy_bloom.crawl.outcomes.trail import KEY

_ON_PURPOSE = (IgnoreRequest, StopDownload, CloseSpider)  # HttpError is one, but not on purpose


class Outcome(Enum):
    """End of a request that is not tried again.

    CRAWLED: its response was handled without any error, its items have passed the pipelines, and
        the requests that it led to are scheduled. Or its status is one of BLOOM_DONE_STATUSES.
    FAILED: its download failed, or its response's status is not allowed, or a callback or errback
        raised an exception.
    OTHER: it was left out on purpose, or an item pipeline raised an exception.
    """

    CRAWLED = 1
    FAILED = 2
    OTHER = 3


@dataclass(eq=False)
class _Handling:
    """A request whose response or failure is being handled.

    Attributes:
        request: after the last retry or redirect.
        result: its response or failure.
        outcome: as far as is known.
        again: its callback or errback has asked for it once more.
    """

    request: Request
    result: Any
    outcome: Outcome = Outcome.CRAWLED
    again: bool = False


class Outcomes:
    """Watches a crawl, and tells how each request ended.

    Args:
        crawler: with its engine, before the first request.
        ended: called with each request, after the last retry or redirect, and how it ended. It
            must not raise.
        done_statuses: BLOOM_DONE_STATUSES: statuses that are answers, though not allowed.

    Raises:
        SettingError: this version of Scrapy works in another way.
    """

    def __init__(
        self,
        crawler: Crawler,
        ended: Callable[[Request, Outcome], None],
        *,
        done_statuses: Container[int] = (),
    ) -> None:
        self._ended = ended
        self._done_statuses = done_statuses
        self._under_way: dict[int, _Handling] = {}
        assert crawler.engine is not None
        wrap_methods(
            crawler.engine.scraper,
            {
                "enqueue_scrape": self._handle,
                "call_spider_async": self._called,
                "handle_spider_error": self._spider_error,
            },
            "BLOOM_FORGET_FAILED and BLOOM_RECORD_ON do not work",
            "do without these settings",
        )
        crawler.signals.connect(self._item_error, signals.item_error)
        crawler.signals.connect(self._scheduled, signals.request_scheduled)

    def _handle(
        self, enqueue_scrape: Callable[..., Any], result: Any, request: Request, *args: Any
    ) -> Any:
        handling = self._under_way[id(request)] = _Handling(request, result)
        return enqueue_scrape(result, request, *args).addBoth(self._handled, handling)

    def _handled(self, result: Any, handling: _Handling) -> Any:
        self._under_way.pop(id(handling.request), None)
        if isinstance(result, Failure):  # a bug, of which Scrapy tells
            handling.outcome = Outcome.FAILED
        if not handling.again:
            self._ended(handling.request, handling.outcome)
        return result

    async def _called(self, call_spider: Callable[..., Any], result: Any, request: Request) -> Any:
        if isinstance(result, Failure):  # of the download, or of a spider middleware's input
            self._error(request, result.value)
        # Errors are seen here, too: a spider middleware may swallow them.
        try:
            output = await call_spider(result, request)
        except Exception as error:
            self._error(request, error)
            raise
        if hasattr(output, "__aiter__"):
            return self._watched_async(output, request)
        return self._watched(output, request)

    def _watched(self, output: Any, request: Request) -> Iterator[Any]:
        try:
            yield from output
        except Exception as error:
            self._error(request, error)
            raise

    async def _watched_async(self, output: Any, request: Request) -> AsyncIterator[Any]:
        try:
            async for each in output:
                yield each
        except Exception as error:
            self._error(request, error)
            raise

    def _spider_error(
        self, handle: Callable[..., None], failure: Failure, request: Request, *args: Any
    ) -> None:
        self._error(request, failure.value)
        handle(failure, request, *args)

    def _error(self, request: Request, error: BaseException | None) -> None:
        handling = self._under_way.get(id(request))
        if handling is None or handling.outcome is Outcome.FAILED:
            return
        if isinstance(error, HttpError) and error.response.status in self._done_statuses:
            return
        on_purpose = isinstance(error, _ON_PURPOSE) and not isinstance(error, HttpError)
        handling.outcome = Outcome.OTHER if on_purpose else Outcome.FAILED

    def _item_error(self, response: Any) -> None:
        for handling in self._under_way.values():
            if handling.result is response and handling.outcome is Outcome.CRAWLED:
                handling.outcome = Outcome.OTHER

    def _scheduled(self, request: Request) -> None:
        """Take the trail from a request that does not go on with the one that was recorded.

        What comes from the downloader (a retry, a redirect, what a middleware made of a request)
        does. What comes from a callback is a request of its own, even if it has the meta of the
        response; but for the same request once more, which then counts in place of this one.
        """
        trail = request.meta.get(KEY)
        if trail is None and not request.dont_filter:
            return
        for handling in self._under_way.values():
            if _is_the_same(request, handling.request):
                handling.again = handling.again or request.dont_filter
            elif trail is not None and trail == handling.request.meta.get(KEY):
                del request.meta[KEY]
                return


def _is_the_same(one: Request, other: Request) -> bool:
    return (one.url, one.method, one.body) == (other.url, other.method, other.body)

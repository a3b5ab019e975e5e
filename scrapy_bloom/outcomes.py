"""How each request of a crawl ended: crawled without an error, failed for good, or neither.

No signal of Scrapy says so: a download that failed for good ends silently in an errback, or in a
line of the log, and so does a response that HttpErrorMiddleware has refused. But all that is not
retried or redirected goes through three methods of Scrapy's scraper, in all versions from 2.13 on.
So these are wrapped, in the scraper of this crawl only. Middlewares would see the same, but would
have to be put into the settings of each project, and could not tell when the item pipelines are
done.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scrapy import Request, signals
from scrapy.crawler import Crawler
from scrapy.exceptions import CloseSpider, IgnoreRequest, StopDownload
from scrapy.spidermiddlewares.httperror import HttpError
from twisted.python.failure import Failure

from scrapy_bloom.marks import KEY

_ON_PURPOSE = (IgnoreRequest, StopDownload)  # HttpError is one, but not on purpose


@dataclass(eq=False)
class _Handling:
    """A request whose response or failure is being handled.

    Attributes:
        request: after the last retry or redirect.
        failed: an error or HTTP error of the download, or an exception in a callback or errback.
        clean: nothing went wrong or was left out: none of the above, nor anything on purpose, nor
            an error in an item pipeline, and it is not crawled again by its own callback.
    """

    request: Request
    failed: bool = False
    clean: bool = True


class Outcomes:
    """Watches a crawl, and tells how each request ended that has been tried for the last time.

    Args:
        crawler: with its engine, before the first request.
        failed: called with a request that failed for good.
        crawled: called with a request whose response was handled without any error, after its
            items have passed the pipelines and the requests it led to are scheduled.
    """

    def __init__(
        self,
        crawler: Crawler,
        *,
        failed: Callable[[Request], None],
        crawled: Callable[[Request], None],
    ) -> None:
        self._failed = failed
        self._crawled = crawled
        self._under_way: dict[int, _Handling] = {}
        assert crawler.engine is not None
        scraper: Any = crawler.engine.scraper
        self._enqueue_scrape = scraper.enqueue_scrape
        self._call_spider = scraper.call_spider_async
        self._handle_spider_error = scraper.handle_spider_error
        scraper.enqueue_scrape = self._handle
        scraper.call_spider_async = self._called
        scraper.handle_spider_error = self._spider_error
        crawler.signals.connect(self._item_error, signals.item_error)
        crawler.signals.connect(self._scheduled, signals.request_scheduled)

    def _handle(self, result: Any, request: Request, *args: Any) -> Any:
        handling = self._under_way[id(request)] = _Handling(request)
        return self._enqueue_scrape(result, request, *args).addBoth(self._handled, handling)

    def _handled(self, result: Any, handling: _Handling) -> Any:
        self._under_way.pop(id(handling.request), None)
        if handling.failed:
            self._failed(handling.request)
        elif handling.clean:
            self._crawled(handling.request)
        return result

    async def _called(self, result: Any, request: Request) -> Any:
        if isinstance(result, Failure):  # of the download, or of a spider middleware's input
            self._error(request, result.value)
        return await self._call_spider(result, request)

    def _spider_error(self, failure: Failure, request: Request, *args: Any) -> None:
        self._error(request, failure.value)
        self._handle_spider_error(failure, request, *args)

    def _error(self, request: Request, error: BaseException | None) -> None:
        handling = self._under_way.get(id(request))
        if handling is not None:
            handling.clean = False
            on_purpose = isinstance(error, (*_ON_PURPOSE, CloseSpider))
            if isinstance(error, HttpError) or not on_purpose:
                handling.failed = True

    def _item_error(self, response: Any) -> None:
        request = getattr(response, "request", None)
        for handling in self._under_way.values():
            if handling.request is request:
                handling.clean = False

    def _scheduled(self, request: Request) -> None:
        """A request is about to be asked for: does it go on with one that was recorded?

        What comes from the downloader (a retry, a redirect, what a middleware made of a request)
        does. What comes from a callback is a request of its own, even if it has the meta of the
        response; but for the same request once more, which then counts in place of this one.
        """
        mark = request.meta.get(KEY)
        if mark is None and not request.dont_filter:
            return
        for handling in self._under_way.values():
            if _is_the_same(request, handling.request):
                handling.clean = handling.clean and not request.dont_filter
            elif mark is not None and mark == handling.request.meta.get(KEY):
                del request.meta[KEY]
                return


def _is_the_same(one: Request, other: Request) -> bool:
    return (one.url, one.method, one.body) == (other.url, other.method, other.body)

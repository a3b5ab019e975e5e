"""How each request of a crawl ended, and its trail: which recorded requests it stands for.

The request that fails is not always the one that was recorded: that may have been redirected,
replaced by a downloader middleware, and retried. Scrapy copies the meta to each request that is
made of another, and into its disk queue. So the trail is in the meta: the recorded fingerprints.
Spiders copy it, too, to new requests. These are told apart when they are scheduled.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from scrapy import Request, signals
from scrapy.crawler import Crawler
from scrapy.exceptions import CloseSpider, IgnoreRequest, StopDownload
from scrapy.spidermiddlewares.httperror import HttpError
from twisted.python.failure import Failure

from scrapy_bloom.crawl.engine import listen

TRAIL = "bloom_recorded"  # a meta key
_ON_PURPOSE = (IgnoreRequest, StopDownload, CloseSpider)  # HttpError is one, but not on purpose


def extend_trail(request: Request, fingerprint: bytes) -> None:
    """Note in a request, once, that it was recorded, beside what was recorded on the way to it."""
    if fingerprint not in trail_of(request)[-1:]:
        # As text: a queue may be in JSON. A new list: the old one is that of the request before.
        request.meta[TRAIL] = [*request.meta.get(TRAIL, []), fingerprint.hex()]


def trail_of(request: Request) -> list[bytes]:
    """Return the fingerprints recorded for a request: its own, after those that became it."""
    return [bytes.fromhex(name) for name in request.meta.get(TRAIL, [])]


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
    """A request, after the last retry or redirect, whose response or failure is being handled."""

    request: Request
    result: Any
    outcome: Outcome = Outcome.CRAWLED
    again: bool = False


class OutcomeObserver:
    """Watches a crawl from before its first request, and tells how each request ended.

    `ended` is called after the last retry or redirect, and must not raise. The constructor raises
    a SettingError if this version of Scrapy works in another way.
    """

    def __init__(
        self,
        crawler: Crawler,
        ended: Callable[[Request, Outcome], None],
        done_statuses: Container[int],
    ) -> None:
        self._ended = ended
        self._done_statuses = done_statuses
        self._under_way: dict[int, _Handling] = {}
        listen(
            crawler.engine,
            "BLOOM_FORGET_FAILED and BLOOM_RECORD_ON do not work",
            "do without these settings",
            scraping=self._scraping,
            error=self._error,
        )
        crawler.signals.connect(self._item_error, signals.item_error)
        crawler.signals.connect(self._scheduled, signals.request_scheduled)

    def _scraping(self, request: Request, result: Any) -> Callable[[Any], None]:
        handling = self._under_way[id(request)] = _Handling(request, result)
        return partial(self._scraped, handling)

    def _scraped(self, handling: _Handling, result: Any) -> None:
        self._under_way.pop(id(handling.request), None)
        if isinstance(result, Failure):  # a bug, of which Scrapy tells
            handling.outcome = Outcome.FAILED
        if not handling.again:
            self._ended(handling.request, handling.outcome)

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

        A request from the downloader (a retry, a redirect, what a middleware made of a request)
        goes on with it. One from a callback is a request of its own, even if it has the meta of the
        response. But the same request once more counts in place of this one.
        """
        trail = request.meta.get(TRAIL)
        if trail is None and not request.dont_filter:
            return
        for handling in self._under_way.values():
            if _is_the_same(request, handling.request):
                handling.again = handling.again or request.dont_filter
            elif trail is not None and trail == handling.request.meta.get(TRAIL):
                del request.meta[TRAIL]
                return


def _is_the_same(one: Request, other: Request) -> bool:
    return (one.url, one.method, one.body) == (other.url, other.method, other.body)

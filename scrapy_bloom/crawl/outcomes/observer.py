"""How each request of a crawl ended, and its trail: which recorded requests it stands for.

The request that fails is not always the one that was recorded: that may have been redirected,
replaced by a downloader middleware, and retried. Scrapy copies the meta to each request that is
made of another, and into its disk queue. So the trail is in the meta: the recorded fingerprints.
Spiders copy it, too, to new requests, and make the same request once more without it. These are
told apart when they are scheduled.
"""

import contextlib
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

    The constructor raises a SettingError if this version of Scrapy works in another way.

    Args:
        ended: called after the last retry or redirect; must not raise.
        done_statuses: of responses that are answers, whether they are allowed or not.
        fingerprint: of a request; may raise anything.
        adopts: a request that comes without its trail from the queue, where an earlier run or a
            subclass of the filter has left it so, stands for its own fingerprint.
    """

    def __init__(
        self,
        crawler: Crawler,
        ended: Callable[[Request, Outcome], None],
        done_statuses: Container[int],
        fingerprint: Callable[[Request], bytes],
        *,
        adopts: bool,
    ) -> None:
        self._ended = ended
        self._done_statuses = done_statuses
        self._fingerprint = fingerprint
        self._adopts = adopts
        self._under_way: dict[int, _Handling] = {}
        self._replacement: Request | None = None  # the last one from the downloader
        listen(
            crawler.engine,
            "BLOOM_FORGET_FAILED and BLOOM_RECORD_ON do not work",
            "do without these settings",
            scraping=self._scraping,
            error=self._error,
            fetching=self._fetching,
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

    def _fetching(self, request: Request) -> Callable[[Any], None]:
        # Now, since middlewares may change what is fingerprinted.
        if self._adopts and not request.dont_filter and request.meta.get("bloom_record", True):
            fingerprint = self._fingerprint_of(request)
            if fingerprint is not None and fingerprint not in trail_of(request):
                extend_trail(request, fingerprint)
        return partial(self._fetched, request)

    def _fetched(self, request: Request, result: Any) -> None:
        """Let a request from the downloader (a retry, a redirect, one that is all new) go on."""
        if isinstance(result, Request):
            self._replacement = result
            if TRAIL in request.meta:
                result.meta.setdefault(TRAIL, request.meta[TRAIL])

    def _fingerprint_of(self, request: Request) -> bytes | None:
        fingerprint: object = None
        with contextlib.suppress(Exception):  # told of by the filter
            fingerprint = self._fingerprint(request)
        return fingerprint if isinstance(fingerprint, bytes) else None

    def _scheduled(self, request: Request) -> None:
        """Give the trail to a request that goes on with the one that was recorded, or take it.

        A request from a callback or errback is one of its own, even if it has the meta of the
        response. But the same one once more, even without that meta, counts in place of this one.
        """
        if request is self._replacement:
            return
        trail = request.meta.get(TRAIL)
        again = self._handlings_of(request) if request.dont_filter else []
        for handling in again:
            handling.again = True
            if TRAIL in handling.request.meta:
                request.meta[TRAIL] = handling.request.meta[TRAIL]
        if trail is not None and not again:
            under_way = self._under_way.values()
            if any(trail == handling.request.meta.get(TRAIL) for handling in under_way):
                del request.meta[TRAIL]

    def _handlings_of(self, request: Request) -> list[_Handling]:
        """Return those of the same request, or of what it was redirected to."""
        under_way = self._under_way.values()
        fingerprint = self._fingerprint_of(request) if under_way else None
        return [
            each
            for each in under_way
            if _is_the_same(request, each.request) or fingerprint in trail_of(each.request)
        ]


def _is_the_same(one: Request, other: Request) -> bool:
    return (one.url, one.method, one.body) == (other.url, other.method, other.body)

"""Requests that a server with queue and filter may lose: filtered too late, or just queued."""

import contextlib
import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from scrapy import Request, signals
from scrapy.exceptions import DontCloseSpider

from scrapy_bloom.crawl.engine import call_soon, is_open, schedule
from scrapy_bloom.crawl.telemetry.failures import Failures
from scrapy_bloom.exceptions import StorageError

if TYPE_CHECKING:
    from scrapy.crawler import Crawler

    from scrapy_bloom.redis.backend import RedisBackend

logger = logging.getLogger(__name__)

IsSeen = Callable[..., bool]  # of a request, its fingerprint, and others

_KEPT = 500  # new requests, until there are newer ones
# Of those that the filter still has: where exactly the server was cut off is not known.
_MAY_MISS = 5


class LostByServer:
    """Schedules such requests again, if the server turns out to have lost queue and filter.

    A mirror is trusted for a second. If the server has lost something in that second, a request
    that the mirror took for seen may be in no queue any more, and its link is not met again. The
    last new requests may be lost, too. If the server was cut off between recording and queueing
    one, it may still be recorded.
    """

    def __init__(self, crawler: "Crawler", backend: "RedisBackend", telemetry: Failures) -> None:
        self._crawler = crawler
        self._backend = backend
        self._telemetry = telemetry
        self._voided = backend.voided
        self._filtered: list[Request] = []  # the backend asks the server before there are many
        self._to_schedule: list[Request] = []
        self._new: deque[tuple[bytes, Request]] = deque(maxlen=_KEPT)
        crawler.signals.connect(self._confirm_when_idle, signals.spider_idle)

    def watched(self, is_seen: IsSeen) -> IsSeen:
        """Return a function that notes the filter's answer to each request."""

        def watched(request: Request, fingerprint: bytes, *args: Any) -> bool:
            seen = is_seen(request, fingerprint, *args)
            self._add(request, fingerprint, is_seen=seen)
            return seen

        return watched

    def _add(self, request: Request, fingerprint: bytes, *, is_seen: bool) -> None:
        if self._backend.voided != self._voided:
            self._take_void()
            if self._to_schedule:
                call_soon(self._schedule)  # not now: the scheduler is at work
        elif not self._backend.unconfirmed:
            self._filtered.clear()
        if is_seen and self._backend.unconfirmed:
            self._filtered.append(request)
        elif not is_seen:
            self._new.append((fingerprint, request))

    def _take_void(self) -> None:
        self._voided = self._backend.voided
        self._to_schedule += self._filtered + self._lost()
        self._filtered = []

    def _lost(self) -> list[Request]:
        """Return the last new requests that the server may have lost."""
        lost, found = [], 0
        while self._new and found < _MAY_MISS:
            fingerprint, request = self._new.pop()
            with contextlib.suppress(StorageError):  # asked anew when it is scheduled
                if fingerprint in self._backend:
                    found += 1
                    request = request.replace(dont_filter=True)
            lost.append(request)
        self._new.clear()
        return lost

    def _schedule(self) -> bool:
        """Schedule requests, which asks the filter again; return whether there were any."""
        requests, self._to_schedule = self._to_schedule, []
        if not requests or not is_open(self._crawler):
            return False
        logger.info(
            "%d requests from just before the server was lost or replaced are scheduled again",
            len(requests),
            extra=self._telemetry.extra,
        )
        schedule(self._crawler, requests)
        return True

    def _confirm_when_idle(self) -> None:
        if self._filtered:
            try:
                self._backend.confirm()
            except Exception as error:  # noqa: BLE001 - the spider must end all the same
                self._telemetry.failed(
                    "requests that its mirror took for seen", error, "they are not crawled"
                )
            if self._backend.voided != self._voided:
                self._take_void()
            else:
                self._filtered.clear()
        if self._schedule():
            raise DontCloseSpider

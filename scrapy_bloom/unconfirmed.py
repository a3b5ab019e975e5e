"""Requests that were filtered on the word of a mirror, until the server has confirmed it."""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from scrapy import Request, signals
from scrapy.exceptions import DontCloseSpider

from scrapy_bloom.engine import call_soon
from scrapy_bloom.failures import Failures

if TYPE_CHECKING:
    from scrapy.crawler import Crawler

    from scrapy_bloom.redis_backend import RedisBackend

logger = logging.getLogger(__name__)


class Unconfirmed:
    """Schedules such requests again, if the server turns out to have lost queue and filter.

    A mirror is trusted for a second. If the server has lost something in that second, a request
    that the mirror took for seen may be in no queue any more, and its link is not met again.

    Args:
        crawler: with a queue in Redis.
        backend: the filter in the same server.
        failures: is told if the server cannot be asked.
        extra: for the log records.
    """

    def __init__(
        self,
        crawler: "Crawler",
        backend: "RedisBackend",
        failures: Failures,
        extra: Mapping[str, Any],
    ) -> None:
        self._crawler = crawler
        self._backend = backend
        self._failures = failures
        self._extra = extra
        self._voided = backend.voided
        self._filtered: list[Request] = []  # the backend asks the server before there are many
        self._to_schedule: list[Request] = []
        crawler.signals.connect(self._confirm_when_idle, signals.spider_idle)

    def add(self, request: Request, *, is_seen: bool) -> None:
        """Note what the filter has just said of a request."""
        if self._backend.voided != self._voided:
            self._take_void()
            if self._to_schedule:
                call_soon(self._schedule)  # not now: the scheduler is at work
        elif not self._backend.unconfirmed:
            self._filtered.clear()
        if is_seen and self._backend.unconfirmed:
            self._filtered.append(request)

    def _take_void(self) -> None:
        self._voided = self._backend.voided
        self._to_schedule += self._filtered
        self._filtered = []

    def _schedule(self) -> bool:
        """Give them to the scheduler, which asks the filter again; whether there were any."""
        requests, self._to_schedule = self._to_schedule, []
        engine = self._crawler.engine
        if not requests or engine is None or engine.spider is None:
            return False
        logger.info(
            "%d requests were taken for seen just before the filter was found to be lost, and are "
            "scheduled again",
            len(requests),
            extra=self._extra,
        )
        for request in requests:
            engine.crawl(request)
        return True

    def _confirm_when_idle(self) -> None:
        if self._filtered:
            try:
                self._backend.confirm()
            except Exception as error:  # noqa: BLE001 - the spider must end all the same
                self._failures.add(
                    "requests that its mirror took for seen", error, "they are not crawled"
                )
            if self._backend.voided != self._voided:
                self._take_void()
            else:
                self._filtered.clear()
        if self._schedule():
            raise DontCloseSpider

"""Requests that a mirror took for duplicates since the server's last reply."""

import logging
from typing import TYPE_CHECKING

from scrapy import Request, signals
from scrapy.crawler import Crawler
from scrapy.exceptions import DontCloseSpider
from scrapy.utils.reactor import CallLaterOnce

from scrapy_bloom.crawl.engine import is_open
from scrapy_bloom.crawl.failures import Failures
from scrapy_bloom.text import counted

if TYPE_CHECKING:
    from scrapy_bloom.redis.backend import RedisBackend


class UnconfirmedDuplicates:
    """Schedules such requests again if the server turns out to have lost queue and filter.

    A mirror is trusted for a second. If the server has lost something in that second, a request
    that the mirror took for seen may be in no queue any more, and its link is not met again.
    """

    def __init__(self, crawler: Crawler, backend: "RedisBackend", failures: Failures) -> None:
        self._crawler = crawler
        self._backend = backend
        self._failures = failures
        self._logger = logging.LoggerAdapter(logging.getLogger(__name__), failures.extra)
        self._voided = backend.voided
        self._filtered: list[Request] = []  # the backend asks the server before there are many
        self._to_schedule: list[Request] = []
        crawler.signals.connect(self._confirm_when_idle, signals.spider_idle)

    def note(self, request: Request, *, is_seen: bool) -> None:
        """Note the filter's answer to a request."""
        if self._is_void():
            if self._to_schedule:
                CallLaterOnce(self._schedule).schedule()  # not now: the scheduler is at work
        elif not self._backend.unconfirmed:
            self._filtered.clear()
        if is_seen and self._backend.unconfirmed:
            self._filtered.append(request)

    def _is_void(self) -> bool:
        """Return whether what the mirror said turns out to be void, and note what is lost then."""
        if self._backend.voided == self._voided:
            return False
        self._voided = self._backend.voided
        self._to_schedule += self._filtered
        self._filtered = []
        return True

    def _schedule(self) -> bool:
        """Schedule requests, which asks the filter again; return whether there were any."""
        requests, self._to_schedule = self._to_schedule, []
        if not requests or not is_open(self._crawler):
            return False
        self._logger.info(
            "Scheduled again: %s from just before the server was lost or replaced",
            counted(len(requests), "request"),
        )
        for request in requests:
            self._crawler.engine.crawl(request)
        return True

    def _confirm_when_idle(self) -> None:
        if self._filtered:
            try:
                self._backend.confirm()
            except Exception as error:  # noqa: BLE001 - the spider must end all the same
                self._failures.add(
                    "requests that its mirror took for seen", error, "they are not crawled"
                )
            if not self._is_void():
                self._filtered.clear()
        if self._schedule():
            raise DontCloseSpider

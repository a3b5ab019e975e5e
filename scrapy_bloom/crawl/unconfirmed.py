"""Keep duplicates that a mirror reported until the server has confirmed them."""

import logging

from scrapy import Request, signals
from scrapy.crawler import Crawler
from scrapy.exceptions import DontCloseSpider
from scrapy.utils.reactor import CallLaterOnce

from scrapy_bloom.crawl.engine import is_open
from scrapy_bloom.crawl.failures import Failures
from scrapy_bloom.redis.backend import RedisBackend
from scrapy_bloom.text import counted


class UnconfirmedDuplicates:
    """Filtered requests that are scheduled again if the server has lost queue and filter.

    A worker trusts its mirror for one second. If the server lost something in that second, a
    request that the mirror reported as a duplicate may be in no queue, and no later page may link
    to it.
    """

    def __init__(self, crawler: Crawler, backend: RedisBackend, failures: Failures) -> None:
        self._crawler = crawler
        self._backend = backend
        self._failures = failures
        self._logger = logging.LoggerAdapter(logging.getLogger(__name__), failures.extra)
        self._losses = backend.losses
        self._filtered: list[Request] = []  # short, because the backend often asks the server
        self._to_schedule: list[Request] = []
        crawler.signals.connect(self._confirm_when_idle, signals.spider_idle)

    def add_answer(self, request: Request, *, is_seen: bool) -> None:
        """Keep a request that was filtered until the server confirms that it is a duplicate."""
        if self._has_lost_filter():
            if self._to_schedule:
                CallLaterOnce(self._schedule).schedule()  # later, because the scheduler called this
        elif not self._backend.unconfirmed:
            self._filtered.clear()
        if is_seen and self._backend.unconfirmed:
            self._filtered.append(request)

    def _has_lost_filter(self) -> bool:
        """Return whether the server lost the filter; if so, move requests to be scheduled again."""
        if self._backend.losses == self._losses:
            return False
        self._losses = self._backend.losses
        self._to_schedule += self._filtered
        self._filtered = []
        return True

    def _schedule(self) -> bool:
        """Schedule the requests, which asks the filter again; return False if there are none."""
        requests, self._to_schedule = self._to_schedule, []
        if not requests or not is_open(self._crawler):
            return False
        self._logger.info(
            "Scheduled again: %s filtered just before the server was lost or replaced",
            counted(len(requests), "request"),
        )
        for request in requests:
            self._crawler.engine.crawl(request)
        return True

    def _confirm_when_idle(self) -> None:
        if self._filtered:
            try:
                self._backend.confirm()
            except Exception as error:  # noqa: BLE001 - the spider must end nevertheless
                self._failures.add(
                    "requests that its mirror reported as duplicates", error, "they are not crawled"
                )
            if not self._has_lost_filter():
                self._filtered.clear()
        if self._schedule():
            raise DontCloseSpider

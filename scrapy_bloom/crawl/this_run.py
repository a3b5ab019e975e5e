"""What a run remembers of its requests: which it has scheduled, and unconfirmed duplicates."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from scrapy import Request, signals
from scrapy.crawler import Crawler
from scrapy.exceptions import DontCloseSpider
from scrapy.utils.reactor import CallLaterOnce

from scrapy_bloom.crawl.engine import is_open
from scrapy_bloom.crawl.failures import Failures
from scrapy_bloom.generations.memory import practically_exact_set
from scrapy_bloom.generations.policy import Generation
from scrapy_bloom.text import counted

if TYPE_CHECKING:
    from scrapy_bloom.redis.backend import RedisBackend

_HANDLED = "bloom_handled"  # a meta key of start requests whose response has come


class ThisRun:
    """Remembers in memory what this run has scheduled, from when that is needed.

    It begins with the first request that is filtered within the run, by
    `meta["bloom_filter"] = "run"`. So crawls without such requests pay nothing, and a page may be
    scheduled once before and once after that. With a time window, it begins with the first request:
    what the run records may expire within it.

    Args:
        start_requests: start requests are filtered so, too, unless their meta has a `bloom_filter`.
            Where the filter outlives its queue, all of them would otherwise be duplicates in later
            runs, which would crawl nothing.
        has_window: what this run records may expire within it.

    Attributes:
        has_window: what it has scheduled is filtered, whether the backend knows it or not.
    """

    def __init__(self, *, start_requests: bool = False, has_window: bool = False) -> None:
        self.has_window = has_window
        self._start_requests = start_requests
        self._scheduled = practically_exact_set() if has_window else None

    def is_filtered_within_run(self, meta: Mapping[str, Any]) -> bool:
        """Return whether the request with this meta is filtered within this run only."""
        if "bloom_filter" in meta:
            return bool(meta["bloom_filter"] == "run")
        is_start = self._start_requests and bool(meta.get("is_start_request"))
        # Spiders copy a response's meta to the requests that they make of it.
        return is_start and _HANDLED not in meta and not meta.get("depth")

    def mark_handled(self, request: Request, result: Any) -> Callable[[Any], None]:
        """Mark a start request whose response or failure is about to be handled.

        Copies of its meta have the mark from now on, also if they are given to the engine, where no
        spider middleware sets a depth. A retry or redirect was made before.
        """
        # A middleware may have given the response another request.
        for each in (request, getattr(result, "request", None) or request):
            if each.meta.get("is_start_request"):
                each.meta[_HANDLED] = True
        return lambda _: None

    def add(self, fingerprint: bytes) -> bool:
        """Remember a fingerprint, and from now on all others; True if it was not scheduled yet."""
        if self._scheduled is None:
            self._scheduled = practically_exact_set()
        return self._scheduled.add(fingerprint)

    def __contains__(self, fingerprint: bytes) -> bool:
        return self._scheduled is not None and fingerprint in self._scheduled

    def add_if_needed(self, fingerprint: bytes) -> None:
        """Remember the fingerprint of a request that passes, if `add` or a window asks for that."""
        if self._scheduled is not None:
            self._scheduled.add(fingerprint)

    def generations(self) -> Sequence[Generation]:
        """Return the figures of what is remembered."""
        return self._scheduled.status().generations if self._scheduled is not None else ()


class UnconfirmedDuplicates:
    """Schedules filtered requests again if the server turns out to have lost queue and filter.

    A mirror is trusted for a second. If the server has lost something in that second, a request
    that the mirror reported as a duplicate may be in no queue any more, and no page links to it
    again.
    """

    def __init__(self, crawler: Crawler, backend: "RedisBackend", failures: Failures) -> None:
        self._crawler = crawler
        self._backend = backend
        self._failures = failures
        self._logger = logging.LoggerAdapter(logging.getLogger(__name__), failures.extra)
        self._losses = backend.losses
        self._filtered: list[Request] = []  # the backend asks the server before there are many
        self._to_schedule: list[Request] = []
        crawler.signals.connect(self._confirm_when_idle, signals.spider_idle)

    def add_answer(self, request: Request, *, is_seen: bool) -> None:
        """Keep a request that was filtered until the server confirms that it is a duplicate."""
        if self._has_lost_filter():
            if self._to_schedule:
                CallLaterOnce(self._schedule).schedule()  # not now: the scheduler is at work
        elif not self._backend.unconfirmed:
            self._filtered.clear()
        if is_seen and self._backend.unconfirmed:
            self._filtered.append(request)

    def _has_lost_filter(self) -> bool:
        """Return whether the server has lost the filter; requests are scheduled again then."""
        if self._backend.losses == self._losses:
            return False
        self._losses = self._backend.losses
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
                    "requests that its mirror reported as duplicates", error, "they are not crawled"
                )
            if not self._has_lost_filter():
                self._filtered.clear()
        if self._schedule():
            raise DontCloseSpider

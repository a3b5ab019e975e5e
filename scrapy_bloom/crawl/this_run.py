"""Keep in memory which requests this run has scheduled, and which duplicates are unconfirmed."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scrapy import Request, signals
from scrapy.crawler import Crawler
from scrapy.exceptions import DontCloseSpider
from scrapy.utils.reactor import CallLaterOnce

from scrapy_bloom.crawl.engine import is_open
from scrapy_bloom.crawl.failures import Failures
from scrapy_bloom.generations.memory import practically_exact_set
from scrapy_bloom.generations.policy import Generation
from scrapy_bloom.redis.backend import RedisBackend
from scrapy_bloom.text import counted

_HANDLED = "bloom_handled"  # a meta key of start requests whose response has arrived


class ThisRun:
    """The fingerprints of the requests that this run has scheduled, if the run needs them.

    Collecting them begins with the first request with `meta["bloom_filter"] = "run"`, so a crawl
    without such requests pays nothing. (A page may be scheduled once before that request and once
    after it.) With a time window, collecting begins with the first request of the run.

    Args:
        start_requests: whether start requests without a `bloom_filter` in their meta are filtered
            within the run, too. Where the filter outlives its queue, all of them would otherwise be
            duplicates in later runs, which would crawl nothing.
        has_window: whether fingerprints that this run records may expire within the run.

    Attributes:
        has_window: if True, a request that this run has scheduled stays a duplicate, even after it
            expired in the backend.
    """

    def __init__(self, *, start_requests: bool = False, has_window: bool = False) -> None:
        self.has_window = has_window
        self._start_requests = start_requests
        self._scheduled = practically_exact_set() if has_window else None

    def is_filtered_within_run(self, meta: Mapping[str, Any]) -> bool:
        """Return whether a request with this meta is filtered only if this run scheduled it."""
        if "bloom_filter" in meta:
            return bool(meta["bloom_filter"] == "run")
        is_start = self._start_requests and bool(meta.get("is_start_request"))
        # Spiders copy the meta of a response to new requests, which are not start requests.
        return is_start and _HANDLED not in meta and not meta.get("depth")

    def mark_handled(self, request: Request, result: Any) -> Callable[[Any], None]:
        """Mark a start request whose response or failure is about to be handled.

        Copies of its meta then have the mark, even if a request goes directly to the engine, so
        that no spider middleware sets its depth. Retries and redirects were made before, without
        the mark.
        """
        # A middleware may have assigned another request to the response.
        for each in (request, getattr(result, "request", None) or request):
            if each.meta.get("is_start_request"):
                each.meta[_HANDLED] = True
        return lambda _: None

    def add(self, fingerprint: bytes) -> bool:
        """Add a fingerprint, and begin to collect all others; return True if it was new."""
        if self._scheduled is None:
            self._scheduled = practically_exact_set()
        return self._scheduled.add(fingerprint)

    def __contains__(self, fingerprint: bytes) -> bool:
        return self._scheduled is not None and fingerprint in self._scheduled

    def add_if_needed(self, fingerprint: bytes) -> None:
        """Add the fingerprint of a request that passes, if the run collects fingerprints."""
        if self._scheduled is not None:
            self._scheduled.add(fingerprint)

    def generations(self) -> Sequence[Generation]:
        """Return the generations of the set in memory."""
        return self._scheduled.status().generations if self._scheduled is not None else ()


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

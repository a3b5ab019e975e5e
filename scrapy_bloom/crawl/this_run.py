"""Requests that this run has scheduled, where the filter does not know that (any more)."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scrapy import Request

from scrapy_bloom.files.backend import notes_in_memory
from scrapy_bloom.generations.policy import Generation

_HANDLED = "bloom_handled"  # a meta key of start requests whose response has come


class ThisRun:
    """Remembers in memory what this run has scheduled, from when that is needed.

    It begins with the first request that asks for it, by `meta["bloom_filter"] = "run"`. So crawls
    without such requests pay nothing, and a page may be scheduled once before and once after that.
    It is also needed once the run has lasted for a time window: what it records from then on may
    expire within it. The backend keeps what it recorded before, and says when that ends: a clock of
    our own would show another time after the machine has slept, or its clock was put forward.

    Args:
        start_requests: start requests ask by themselves, unless their meta has a `bloom_filter`.
            Where the filter outlives its queue, a run would otherwise find them all seen, and do
            nothing.
        window: seconds after which the filter forgets (BLOOM_WINDOW_SECS); 0: never.
        keeps_newest: of the backend; see there.
        from_start: remember what is recorded before, too: the backend does not keep it.
        extra: for the log record.

    Attributes:
        has_window: what this run records may expire within it.
        counts: what it has scheduled is filtered, whether the backend knows it or not.
    """

    def __init__(
        self,
        *,
        start_requests: bool = False,
        window: float = 0.0,
        keeps_newest: Callable[[], bool] = lambda: True,
        from_start: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self.has_window = window > 0
        self._start_requests = start_requests
        self._window = window
        self._keeps_newest = keeps_newest
        self._is_over = not window
        self._logger = logging.LoggerAdapter(logging.getLogger(__name__), extra or {})
        self.counts = self.has_window and from_start
        self._scheduled = notes_in_memory() if self.counts else None

    def is_asked(self, meta: Mapping[str, Any]) -> bool:
        """Return whether the request with this meta is filtered within this run only."""
        if "bloom_filter" in meta:
            return bool(meta["bloom_filter"] == "run")
        is_start = self._start_requests and bool(meta.get("is_start_request"))
        # Spiders copy a response's meta to the requests that they make of it.
        return is_start and _HANDLED not in meta and not meta.get("depth")

    def handle(self, request: Request, result: Any) -> Callable[[Any], None]:
        """Mark a request whose response or failure is about to be handled, for `is_asked`.

        Copies of its meta have the mark from now on, also if they are given to the engine, where no
        spider middleware sets a depth. A retry or redirect was made before.
        """
        # A middleware may have given the response another request.
        for each in (request, getattr(result, "request", None) or request):
            if each.meta.get("is_start_request"):
                each.meta[_HANDLED] = True
        return lambda _: None

    def begins_with(self, fingerprint: bytes) -> bool:
        """Remember the fingerprint of a request that asks; False if it was scheduled before."""
        if self._scheduled is None:
            self._scheduled = notes_in_memory()
        return self._scheduled.add(fingerprint)

    def __contains__(self, fingerprint: bytes) -> bool:
        return self._scheduled is not None and fingerprint in self._scheduled

    def scheduled(self, fingerprint: bytes) -> None:
        """Remember the fingerprint of a request that passes and was recorded, if that is needed."""
        if not self._is_over and not self._keeps_newest():
            self._outlast_the_window()
        if self._scheduled is not None:
            self._scheduled.add(fingerprint)

    def _outlast_the_window(self) -> None:
        self._is_over = self.counts = True
        self._scheduled = self._scheduled or notes_in_memory()
        self._logger.warning(
            "This crawl has lasted for longer than BLOOM_WINDOW_SECS (%g seconds). What it "
            "records is filtered to its end, and from now on remembered in memory, too: 10 MB "
            "for a million requests. Set a window that is longer than any crawl",
            self._window,
        )

    def generations(self) -> Sequence[Generation]:
        """Return the figures of what is remembered."""
        return self._scheduled.status().generations if self._scheduled is not None else ()

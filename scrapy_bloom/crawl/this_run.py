"""Requests that this run has scheduled, where the filter may not know that, or not any more."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scrapy import Request

from scrapy_bloom.generations.memory import practically_exact_set
from scrapy_bloom.generations.policy import Generation

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

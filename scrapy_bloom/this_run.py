"""What this run has scheduled, for requests that are filtered within their run only."""

from collections.abc import Mapping, Sequence
from typing import Any

from scrapy_bloom.local import LocalBackend
from scrapy_bloom.status import GenerationStatus

_FIRST_CAPACITY = 20_000  # and on by doubling: a million requests take 10 MB
_ERROR_RATE = 1e-12  # nothing beside that of any filter


class ThisRun:
    """Remembers in memory what this run has scheduled, from the first request that asks for it.

    A request asks by `meta["bloom_filter"] = "run"`. Nothing is remembered before, lest crawls
    without such requests pay for it; so a page may be scheduled once before and once after that.

    Args:
        start_requests: start requests ask by themselves, unless their meta has a `bloom_filter`:
            where the filter outlives its queue, a run would find them all seen, and do nothing.
    """

    def __init__(self, *, start_requests: bool = False) -> None:
        self._start_requests = start_requests
        self._scheduled: LocalBackend | None = None

    def is_asked(self, meta: Mapping[str, Any]) -> bool:
        """Return whether the request with this meta is filtered within this run only."""
        if "bloom_filter" in meta:
            return bool(meta["bloom_filter"] == "run")
        # Spiders copy a response's meta to the requests that they make of it: only a depth tells.
        return self._start_requests and bool(meta.get("is_start_request")) and not meta.get("depth")

    def begins_with(self, fingerprint: bytes) -> bool:
        """Remember the fingerprint of a request that asks; False if it was scheduled before."""
        if self._scheduled is None:
            self._scheduled = LocalBackend(None, capacity=_FIRST_CAPACITY, error_rate=_ERROR_RATE)
            self._scheduled.open()
        return self._scheduled.add(fingerprint)

    def scheduled(self, fingerprint: bytes) -> None:
        """Remember the fingerprint of a request that passes, if any has asked before."""
        if self._scheduled is not None:
            self._scheduled.add(fingerprint)

    def generations(self) -> Sequence[GenerationStatus]:
        """Return the figures of what is remembered."""
        return self._scheduled.status().generations if self._scheduled is not None else ()

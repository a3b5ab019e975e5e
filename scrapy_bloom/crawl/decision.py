"""The decision whether a request was seen, by the filter, its meta and this run."""

from collections.abc import Callable

from scrapy import Request

from scrapy_bloom.crawl.outcomes.actions import OutcomeActions
from scrapy_bloom.crawl.outcomes.trail import KEY
from scrapy_bloom.crawl.this_run import ThisRun
from scrapy_bloom.generations.backend import Backend


class Decision:
    """Decides whether a request is to be filtered, and records a new one.

    Args:
        backend: an opened backend.
        this_run: what is filtered within this run only.
        actions: follows what is recorded to its end.
        forget_failed: BLOOM_FORGET_FAILED.
    """

    def __init__(
        self, backend: Backend, this_run: ThisRun, actions: OutcomeActions, *, forget_failed: bool
    ) -> None:
        self._backend = backend
        self._add = backend.add
        self._this_run = this_run
        self._actions = actions
        self._may_be_over = forget_failed or this_run.has_window

    def is_seen(
        self, request: Request, fingerprint: bytes, before_recording: Callable[[], bool] | None
    ) -> bool:
        """Return whether a request was seen: see `BloomDupeFilter.request_seen`; may raise."""
        meta = request.meta
        this_run = self._this_run
        asks = this_run.is_asked(meta)
        is_first = asks and this_run.begins_with(fingerprint)
        is_filtered = not is_first and bool(meta.get("bloom_filter", True))
        if self._may_be_over and self._is_over(fingerprint, is_filtered):
            return self._filtered(request, fingerprint)
        if "bloom_record" in meta and not meta["bloom_record"]:
            return is_filtered and (asks or fingerprint in self._backend)
        if before_recording is not None and fingerprint not in self._backend:
            self._actions.extend_trail(request, fingerprint)  # it goes into the queue, too
            if not before_recording():
                return True
        if self._add(fingerprint):
            self._actions.was_new()
        elif is_filtered:
            return KEY not in meta or self._filtered(request, fingerprint)
        this_run.scheduled(fingerprint)
        self._actions.extend_trail(request, fingerprint)
        return False

    def _is_over(self, fingerprint: bytes, is_filtered: bool) -> bool:  # noqa: FBT001 - called often
        """Return whether this run shall not schedule a request again, whatever the filter says."""
        if self._actions.is_dead(fingerprint):
            return True
        this_run = self._this_run
        return (
            is_filtered
            and this_run.outlasts_the_window()
            and fingerprint in this_run
            and fingerprint not in self._backend.forgotten
        )

    def _filtered(self, request: Request, fingerprint: bytes) -> bool:
        """Filter a request, unless its meta forbids that; return whether it is filtered."""
        if not request.meta.get("bloom_filter", True):
            return False
        self._actions.filtered(request, fingerprint)
        return True

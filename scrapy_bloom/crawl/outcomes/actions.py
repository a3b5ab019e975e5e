"""Actions at the end of a request: what failed is forgotten, what was crawled is recorded."""

import logging
from collections.abc import Callable, Sequence

from scrapy import Request
from scrapy.crawler import Crawler

from scrapy_bloom.crawl.backends import RecordCrawled
from scrapy_bloom.crawl.outcomes.forget_failed import ForgetFailed
from scrapy_bloom.crawl.outcomes.observer import Outcome, OutcomeObserver, extend_trail, trail_of
from scrapy_bloom.crawl.telemetry import Telemetry
from scrapy_bloom.generations.backend import Backend
from scrapy_bloom.settings.settings import BloomSettings
from scrapy_bloom.text import counted


class OutcomeActions:
    """Follows the requests of a crawl to their end, where anything is to be done there.

    BLOOM_FORGET_FAILED and BLOOM_RECORD_ON ask for it, and so do forgotten requests that are
    crawled again in a run whose queue dies with it.

    Attributes:
        is_dead: tells whether a request has failed so often that this run shall not crawl it again.
        was_new: counts a request that was recorded as new, unless it is recorded at its end.
    """

    def __init__(
        self,
        crawler: Crawler,
        backend: Backend,
        settings: BloomSettings,
        telemetry: Telemetry,
        fingerprint: Callable[[Request], bytes],
    ) -> None:
        self._crawler = crawler
        self._fingerprint = fingerprint
        self._forgotten = backend.forgotten
        self._done_statuses = settings.done_statuses
        self._telemetry = telemetry
        self._failures = telemetry.failures
        self._logger = logging.LoggerAdapter(logging.getLogger(__name__), telemetry.extra)
        self._recorder = backend if isinstance(backend, RecordCrawled) else None
        self._forgetting: ForgetFailed | None = None
        self._settle: Callable[[Sequence[bytes]], None] = self._forgotten.remove
        # Not methods: they are asked with each request.
        self.is_dead: Callable[[bytes], bool] = lambda _: False
        self.was_new = telemetry.count_added if self._recorder is None else lambda: None
        if settings.forget_failed:
            self._forgetting = ForgetFailed(self._forget, self._forgotten.remove)
            self._settle = self._forgetting.ended
            self.is_dead = self._forgetting.is_dead
        self._is_watching = False
        if self._forgetting or self._recorder:
            self._watch()

    def _watch(self) -> None:
        self._is_watching = True
        OutcomeObserver(  # the engine keeps it
            self._crawler,
            self.ended,
            self._done_statuses,
            self._fingerprint,
            adopts=self._recorder is None,  # else all that is to be recorded has a trail
        )

    def extend_trail(self, request: Request, fingerprint: bytes) -> None:
        """Note in a request that it was recorded, if anything is to be done at its end."""
        if not self._is_watching:
            if not self._forgotten.has_claims:
                return
            self._watch()
        extend_trail(request, fingerprint)

    def filtered(self, request: Request, fingerprint: bytes) -> None:
        """Note that a request was filtered: what was redirected to it has ended."""
        redirected = trail_of(request) if self._is_watching else []
        if not redirected:
            return
        if self._forgetting:
            self._forgetting.followed(fingerprint, redirected)
        else:
            self._settle(redirected)
        if self._recorder and fingerprint in self._recorder.stored:
            self._record(redirected)

    def ended(self, request: Request, outcome: Outcome) -> None:
        """Do what is to be done for a request that is not tried again; never raises."""
        try:
            fingerprints = trail_of(request)
            if outcome is Outcome.CRAWLED:
                self._record(fingerprints)
            if outcome is not Outcome.FAILED:
                self._settle(fingerprints)
            elif self._forgetting:
                self._forgetting.failed(fingerprints)
        except Exception as error:  # noqa: BLE001 - it must not disturb the crawl
            self._failures.add(request, error, "what is recorded of it could not be changed")

    def close(self, *, is_finished: bool) -> None:
        """Do what is left to do, and tell what could not be done; see `ForgetFailed.close`."""
        if self._forgetting and (number := self._forgetting.close(is_finished=is_finished)):
            self._failures.number += 1
            self._logger.error(
                "%s could not be forgotten, since the filter is out of reach: what failed looks "
                "seen, and later runs will not crawl it",
                counted(number, "failed request"),
            )
        if self._recorder:
            self._logger.info(
                "%s of %s crawled without an error, and so recorded. The others "
                "are crawled by the next run that finds a link to them: list pages should be "
                'requested with meta={"bloom_filter": "run"}',
                f"{self._telemetry.added:,}",
                counted(self._recorder.scheduled, "new request was", "new requests were"),
            )

    def _forget(self, fingerprints: Sequence[bytes]) -> None:
        self._forgotten.add(fingerprints)
        self._telemetry.forgotten += len(fingerprints)

    def _record(self, fingerprints: Sequence[bytes]) -> None:
        if self._recorder:
            for fingerprint in fingerprints:
                if self._recorder.record(fingerprint):
                    self._telemetry.count_added()

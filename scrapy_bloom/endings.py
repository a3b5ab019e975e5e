"""What is done when a request ends: forgetting what failed, recording what was crawled."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scrapy import Request

from scrapy_bloom.backend import Backend
from scrapy_bloom.crawled import RecordCrawled
from scrapy_bloom.forgetting import Forgetting
from scrapy_bloom.marks import mark, marked
from scrapy_bloom.outcomes import Outcome

logger = logging.getLogger(__name__)


class Endings:
    """Follows the requests of a crawl to their end.

    BLOOM_FORGET_FAILED and BLOOM_RECORD_ON ask for it, and so do forgotten requests that are
    crawled again in a run whose queue dies with it.

    Args:
        backend: the filter. If it is a `RecordCrawled`, what was crawled is recorded in it.
        forget_failed: forget what failed for good.
        recorded: called with each request that is recorded at its end.

    Attributes:
        is_dead: tells whether a request has failed so often that this run shall not crawl it again.
    """

    def __init__(
        self, backend: Backend, *, forget_failed: bool, recorded: Callable[[], None]
    ) -> None:
        self._forgetting = Forgetting(backend.forget, backend.ended) if forget_failed else None
        self._backend = backend
        # Not a method: a request is asked for here each time.
        self.is_dead = self._forgetting.is_dead if self._forgetting else _never
        self._recorder = backend if isinstance(backend, RecordCrawled) else None
        self._recorded = recorded

    @property
    def forgotten(self) -> int | None:
        """How many requests were forgotten; None if none ever is."""
        return self._forgetting.forgotten if self._forgetting is not None else None

    def scheduled(self, request: Request, fingerprint: bytes) -> None:
        """A request was let pass, and is recorded, or shall be at its end."""
        self.mark(request, fingerprint)

    def mark(self, request: Request, fingerprint: bytes) -> None:
        """Note in a request that it stands for a fingerprint, once."""
        if fingerprint not in marked(request)[-1:]:
            mark(request, fingerprint)

    def filtered(self, request: Request, fingerprint: bytes) -> None:
        """A request was filtered. What was redirected to it, if anything, has ended with that.

        Raises:
            StorageError: the filter is out of reach.
        """
        if redirected := marked(request):
            if self._forgetting is not None:
                self._forgetting.followed(fingerprint, redirected)
            else:
                self._backend.ended(redirected)
            if self._recorder is not None and self._recorder.is_stored(fingerprint):
                self._record(redirected)

    def ended(self, request: Request, outcome: Outcome) -> None:
        """A request is not tried again.

        Raises:
            StorageError: the filter is out of reach.
        """
        fingerprints = marked(request)
        if outcome is Outcome.CRAWLED:
            self._record(fingerprints)
        if outcome is not Outcome.FAILED:
            ended = self._backend.ended if self._forgetting is None else self._forgetting.ended
            ended(fingerprints)
        elif self._forgetting is not None:
            self._forgetting.failed(fingerprints)

    def close(self, extra: Mapping[str, Any], *, is_finished: bool) -> bool:
        """Do what is left to do, and tell what could not be done; whether all could.

        Args:
            is_finished: see `Forgetting.close`.
            extra: for the log records.
        """
        number = 0
        if self._forgetting is not None:
            number = self._forgetting.close(is_finished=is_finished)
        if number:
            logger.error(
                "%s failed requests could not be forgotten, since the filter is out of reach: they "
                "look seen, and later runs will not crawl them",
                f"{number:,}",
                extra=extra,
            )
        if self._recorder is not None:
            logger.info(
                "%s of %s new requests were crawled without an error, and are recorded. The others "
                "are crawled by the next run that finds a link to them: list pages should be "
                'requested with meta={"bloom_filter": "run"}',
                f"{self._recorder.crawled:,}",
                f"{self._recorder.scheduled:,}",
                extra=extra,
            )
        return not number

    def _record(self, fingerprints: Sequence[bytes]) -> None:
        if self._recorder is not None:
            for fingerprint in fingerprints:
                if self._recorder.record(fingerprint):
                    self._recorded()


def _never(_: bytes) -> bool:
    return False

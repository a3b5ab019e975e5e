"""Observe how each request ends, and change the filter accordingly.

With BLOOM_FORGET_FAILED, a request that failed for good is forgotten. With BLOOM_RECORD_ON =
"crawled", a request that was crawled is recorded. The request that ends is not always the request
that was recorded, because a middleware may have redirected, replaced or retried it. Scrapy copies
the meta to each request that replaces another, and into its disk queue. So the meta has the trail
of a request until its response is handled: the fingerprints that were recorded on the way.
"""

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import chain
from typing import Any

from scrapy import Request, signals
from scrapy.crawler import Crawler
from scrapy.exceptions import CloseSpider, IgnoreRequest, StopDownload
from scrapy.spidermiddlewares.httperror import HttpError
from twisted.python.failure import Failure

from scrapy_bloom.crawl.engine import listen
from scrapy_bloom.crawl.telemetry import Telemetry
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.generations.memory import Backend, RecordCrawled, practically_exact_set
from scrapy_bloom.settings import BloomSettings
from scrapy_bloom.text import counted

_MOST_FAILURES = 3  # of one request in one run, before the run gives it up
_MOST_REDIRECTED = 100_000  # requests whose redirect leads to a request that has not ended
_MOST_ENDED = 500_000  # requests that are known to have ended
_GONE = {404, 410}  # statuses of pages that are gone, which is no failure

TRAIL = "bloom_recorded"  # a meta key
# HttpError is a subclass of IgnoreRequest, but counts as a failure.
_ON_PURPOSE = (IgnoreRequest, StopDownload, CloseSpider)


def _trail_of(request: Request) -> list[bytes]:
    """Return the fingerprints recorded for a request and its predecessors, its own at the end."""
    return [bytes.fromhex(name) for name in request.meta.get(TRAIL, [])]


def _set_trail(request: Request, trail: Sequence[bytes]) -> None:
    request.meta[TRAIL] = [each.hex() for each in trail]  # as text, because a queue may use JSON


class Outcome(Enum):
    """How a request ended that is not tried again.

    CRAWLED: Scrapy handled its response without an error, its items passed the pipelines, and the
        requests that it led to are scheduled. Or its status says that the page is gone.
    FAILED: its download failed, or the status of its response is not allowed, or a callback or
        errback raised an exception.
    OTHER: the project dropped it on purpose, or an item pipeline raised an exception.
    """

    CRAWLED = 1
    FAILED = 2
    OTHER = 3


@dataclass(eq=False)
class _Handling:
    """A request, after the last retry or redirect, while its response or failure is handled.

    Attributes:
        request: the request.
        trail: its trail.
        result: its response or failure.
        outcome: how the request ends, as far as is known.
        is_repeated: whether its callback has yielded the same request again; then only the end of
            the new one counts.
    """

    request: Request
    trail: list[bytes]
    result: Any
    outcome: Outcome = Outcome.CRAWLED
    is_repeated: bool = False


class ForgetFailed:
    """Forgets requests that failed for good, so that a later link to them is crawled again.

    A page that always fails would be crawled in a loop. So this run gives up a request that has
    failed three times, and does not crawl it again. The next run tries again.

    The methods raise a StorageError if the filter cannot be reached. The next call tries again.

    Args:
        forget: adds fingerprints to the forgotten ones; may raise a StorageError.
    """

    def __init__(self, forget: Callable[[Sequence[bytes]], None]) -> None:
        self._forget_stored = forget
        # Bloom filters, because there may be many. Their false positives lose far fewer pages than
        # those of the main filter.
        self._failures = practically_exact_set()  # each fingerprint followed by 1, 2 and 3
        self._ended, self._num_ended = BloomFilter(_MOST_ENDED, 1e-6), 0
        self._any_given_up = False
        self._redirected: dict[bytes, list[bytes]] = {}  # by the target of the redirect
        self._num_redirected = 0
        self._to_forget: list[bytes] = []  # grows while the server cannot be reached

    def failed(self, fingerprints: Sequence[bytes]) -> None:
        """Forget the fingerprints of a failed request, and of requests redirected to it."""
        self._to_forget += self._with_redirected(fingerprints)
        self._forget()

    def ended(self, fingerprints: Sequence[bytes]) -> None:
        """Mark a request as ended without a failure; never raises."""
        for fingerprint in self._with_redirected(fingerprints):
            if self._num_ended >= _MOST_ENDED:
                self._ended, self._num_ended = BloomFilter(_MOST_ENDED, 1e-6), 0
            self._num_ended += self._ended.add(fingerprint)
        with contextlib.suppress(StorageError):  # it was logged when the request failed
            self._forget()

    def redirected(self, fingerprints: Sequence[bytes], target: bytes) -> None:
        """Forget requests that were redirected to a filtered request once that request fails.

        A site that is down may redirect all pages to the same page, which then fails.
        """
        if self.is_given_up(target) or target in self._to_forget:
            self.failed(fingerprints)
        elif target in fingerprints or target in self._ended:
            self.ended(fingerprints)
        else:  # the target is in flight, or in the queue, perhaps since an earlier run
            self._redirected.setdefault(target, []).extend(fingerprints)
            self._num_redirected += len(fingerprints)
            while self._num_redirected > _MOST_REDIRECTED:  # at-least-once: forget the oldest
                oldest = self._redirected.pop(next(iter(self._redirected)))
                self._num_redirected -= len(oldest)
                self._to_forget += oldest
            self._forget()

    def is_given_up(self, fingerprint: bytes) -> bool:
        """Return whether a request has failed three times in this run."""
        return self._any_given_up and fingerprint + bytes([_MOST_FAILURES]) in self._failures

    def close(self, *, is_finished: bool) -> None:
        """Decide on requests that were redirected to a target whose end this run has not seen.

        The queue of a finished run is empty, so an earlier run has seen the end of the target. A
        run that ends early forgets the redirected requests.
        """
        if not is_finished:
            self._to_forget += chain.from_iterable(self._redirected.values())
        try:
            self._forget()
        except StorageError:
            number = counted(len(self._to_forget), "failed request")
            raise StorageError(
                f"{number} could not be forgotten because the filter cannot be reached: later runs "
                "will filter them as duplicates, and not crawl them"
            ) from None

    def _with_redirected(self, fingerprints: Sequence[bytes]) -> list[bytes]:
        """Return fingerprints, and those of requests that were redirected to them."""
        found = list(fingerprints)
        for fingerprint in found:  # the list grows meanwhile
            redirected = self._redirected.pop(fingerprint, ())
            self._num_redirected -= len(redirected)
            found += redirected
        return found

    def _forget(self) -> None:
        if not self._to_forget:
            return
        self._forget_stored(self._to_forget)
        forgotten, self._to_forget = self._to_forget, []
        for fingerprint in forgotten:
            for number in range(1, _MOST_FAILURES + 1):
                if self._failures.add(fingerprint + bytes([number])):
                    break
            self._any_given_up = self._any_given_up or number == _MOST_FAILURES


class Outcomes:
    """Changes the filter at the end of each request, for BLOOM_FORGET_FAILED and BLOOM_RECORD_ON.

    The constructor raises a SettingError if this version of Scrapy lacks a method.
    """

    def __init__(
        self,
        crawler: Crawler,
        backend: Backend,
        settings: BloomSettings,
        telemetry: Telemetry,
        fingerprint: Callable[[Request], bytes],
    ) -> None:
        self._fingerprint = fingerprint
        self._telemetry = telemetry
        self._recorder = backend if isinstance(backend, RecordCrawled) else None
        self._forget_stored = self._recorder.forget if self._recorder else backend.forgotten.add
        self._forgetting = ForgetFailed(self._forget) if settings.forget_failed else None
        self._under_way: dict[int, _Handling] = {}
        listen(
            crawler.engine,
            scraping=self._scraping,
            error=self._error,
            fetching=self._fetching,
        )
        crawler.signals.connect(self._item_error, signals.item_error)
        crawler.signals.connect(self._scheduled, signals.request_scheduled)

    def is_given_up(self, fingerprint: bytes) -> bool:
        """Return whether this run does not crawl a request again, because it failed too often."""
        return self._forgetting is not None and self._forgetting.is_given_up(fingerprint)

    def filtered(self, request: Request, fingerprint: bytes) -> None:
        """Handle the requests that were redirected to a request that was filtered."""
        if redirected := _trail_of(request):
            if self._forgetting:
                self._forgetting.redirected(redirected, fingerprint)
            if self._recorder and fingerprint in self._recorder.stored:
                self._record(redirected)

    def ended(self, request: Request, trail: Sequence[bytes], outcome: Outcome) -> None:
        """Forget or record a request that is not tried again; never raises."""
        try:
            if outcome is Outcome.CRAWLED:
                self._record(trail)
            if self._forgetting and outcome is Outcome.FAILED:
                self._forgetting.failed(trail)
            elif self._forgetting:
                self._forgetting.ended(trail)
        except Exception as error:  # noqa: BLE001 - a failure must not disturb the crawl
            self._telemetry.failures.add(
                request, error, "the filter could not be changed at its end"
            )

    def close(self, *, is_finished: bool) -> None:
        """Forget the remaining requests, and log how many were recorded or not forgotten."""
        if self._forgetting:
            try:
                self._forgetting.close(is_finished=is_finished)
            except StorageError as error:
                self._telemetry.failures.add_at_the_close(error)
        if self._recorder:
            logging.getLogger(__name__).info(
                "%s of %s crawled without an error, and so recorded. The next run that finds a "
                "link to one of the others crawls it, so request list pages with "
                'meta={"bloom_filter": "run"}',
                f"{self._telemetry.added:,}",
                counted(self._recorder.scheduled, "new request was", "new requests were"),
                extra=self._telemetry.extra,
            )

    def _forget(self, fingerprints: Sequence[bytes]) -> None:
        self._forget_stored(fingerprints)
        self._telemetry.forgotten += len(fingerprints)

    def _record(self, fingerprints: Sequence[bytes]) -> None:
        if self._recorder:
            for fingerprint in fingerprints:
                if self._recorder.record(fingerprint):
                    self._telemetry.count_added()

    def _fetching(self, request: Request) -> Callable[[Any], None]:
        """Add the fingerprint of a request that is recorded to its trail.

        Now, because middlewares may change the request, and a request in the queue may be from a
        run without these settings.
        """
        if not request.dont_filter and request.meta.get("bloom_record", True):
            fingerprint, trail = self._fingerprint_of(request), _trail_of(request)
            if (
                fingerprint is not None
                and fingerprint not in trail
                and self._may_be_recorded(fingerprint)
            ):
                _set_trail(request, [*trail, fingerprint])
        return partial(self._fetched, request)

    def _may_be_recorded(self, fingerprint: bytes) -> bool:
        """Return whether the request may be recorded: not if a callback has downloaded it itself.

        Without BLOOM_RECORD_ON = "crawled", nothing is recorded here, so the answer is True.
        """
        return self._recorder is None or fingerprint in self._recorder

    def _fetched(self, request: Request, result: Any) -> None:
        """Pass the trail on to a request that the downloader returned in place of another."""
        if isinstance(result, Request) and TRAIL in request.meta:
            result.meta.setdefault(TRAIL, request.meta[TRAIL])

    def _scraping(self, request: Request, result: Any) -> Callable[[Any], None]:
        handling = _Handling(request, _trail_of(request), result)
        self._under_way[id(request)] = handling
        # Spiders copy the meta to new requests, which must not fail or succeed with the old one. A
        # middleware may have assigned another request to the response.
        for each in (request, getattr(result, "request", None) or request):
            each.meta.pop(TRAIL, None)
        return partial(self._scraped, handling)

    def _scraped(self, handling: _Handling, result: Any) -> None:
        self._under_way.pop(id(handling.request), None)
        if isinstance(result, Failure):  # a bug, which Scrapy logs
            handling.outcome = Outcome.FAILED
        if not handling.is_repeated:
            self.ended(handling.request, handling.trail, handling.outcome)

    def _error(self, request: Request, error: BaseException | None) -> None:
        handling = self._under_way.get(id(request))
        if handling is None or handling.outcome is Outcome.FAILED:
            return
        if isinstance(error, HttpError) and error.response.status in _GONE:
            return
        on_purpose = isinstance(error, _ON_PURPOSE) and not isinstance(error, HttpError)
        handling.outcome = Outcome.OTHER if on_purpose else Outcome.FAILED

    def _item_error(self, response: Any) -> None:
        for handling in self._under_way.values():
            if handling.result is response and handling.outcome is Outcome.CRAWLED:
                handling.outcome = Outcome.OTHER

    def _scheduled(self, request: Request) -> None:
        """Give the trail to a request by which a callback or errback repeats its own, to retry it.

        It is the same request, or the one that was redirected to it.
        """
        if not request.dont_filter or TRAIL in request.meta:
            return
        fingerprint = self._fingerprint_of(request) if self._under_way else None
        for each in self._under_way.values() if fingerprint is not None else ():
            if fingerprint in each.trail or fingerprint == self._fingerprint_of(each.request):
                each.is_repeated = True
                _set_trail(request, each.trail)

    def _fingerprint_of(self, request: Request) -> bytes | None:
        fingerprint: object = None
        with contextlib.suppress(Exception):  # request_seen has logged it
            fingerprint = self._fingerprint(request)
        return fingerprint if isinstance(fingerprint, bytes) else None

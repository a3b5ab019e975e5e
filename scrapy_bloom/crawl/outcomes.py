"""How each request of a crawl ended, and what that changes in the filter.

A request that failed for good is forgotten (BLOOM_FORGET_FAILED), one that was crawled is recorded
(BLOOM_RECORD_ON). The request that ends is not always the one that was recorded: that may have been
redirected, replaced by a downloader middleware, and retried. Scrapy copies the meta to each request
that is made of another, and into its disk queue. So the meta has the trail: the fingerprints that
were recorded on the way. Spiders copy it, too, to new requests, and make the same request once more
without it. These are told apart when they are scheduled.
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
from scrapy_bloom.generations.backend import Backend
from scrapy_bloom.generations.memory import RecordCrawled, practically_exact_set
from scrapy_bloom.settings.settings import BloomSettings
from scrapy_bloom.text import counted

MOST_FAILURES = 3  # of one request in one run, before it is given up
_MOST_REDIRECTED = 100_000  # requests that wait for the end of the one they were redirected to
_MOST_ENDED = 500_000  # requests whose end is remembered

TRAIL = "bloom_recorded"  # a meta key
_ON_PURPOSE = (IgnoreRequest, StopDownload, CloseSpider)  # HttpError is one, but not on purpose


def extend_trail(request: Request, fingerprint: bytes) -> None:
    """Add a request's own fingerprint to its trail, once."""
    if fingerprint not in trail_of(request)[-1:]:
        # As text: a queue may be in JSON. A new list: the old one is that of the request before.
        request.meta[TRAIL] = [*request.meta.get(TRAIL, []), fingerprint.hex()]


def trail_of(request: Request) -> list[bytes]:
    """Return the fingerprints recorded for a request: its own, after those that became it."""
    return [bytes.fromhex(name) for name in request.meta.get(TRAIL, [])]


class Outcome(Enum):
    """End of a request that is not tried again.

    CRAWLED: its response was handled without any error, its items have passed the pipelines, and
        the requests that it led to are scheduled. Or its status is one of BLOOM_DONE_STATUSES.
    FAILED: its download failed, or its response's status is not allowed, or a callback or errback
        raised an exception.
    OTHER: it was left out on purpose, or an item pipeline raised an exception.
    """

    CRAWLED = 1
    FAILED = 2
    OTHER = 3


@dataclass(eq=False)
class _Handling:
    """A request, after the last retry or redirect, whose response or failure is being handled."""

    request: Request
    result: Any
    outcome: Outcome = Outcome.CRAWLED
    again: bool = False


class ForgetFailed:
    """Forgets requests that failed for good, so that a later link to them is crawled again.

    A page that always fails would be crawled in a loop. So a request that has failed three times is
    given up: it is not crawled again in this run. The next run tries again.
    """

    def __init__(self, forget: Callable[[Sequence[bytes]], None]) -> None:
        self._forget_stored = forget
        # Filters, because there may be many. Their false positives cost a page now and then, much
        # less often than those of the filter itself.
        self._failures = practically_exact_set()  # each fingerprint with 1, 2 and 3
        self._ended, self._num_ended = BloomFilter(_MOST_ENDED, 1e-6), 0
        self._any_given_up = False
        self._redirected: dict[bytes, list[bytes]] = {}  # by what they were redirected to
        self._num_redirected = 0
        self._to_forget: list[bytes] = []  # more than one batch while the server is out of reach

    def failed(self, fingerprints: Sequence[bytes]) -> int:
        """Forget what was recorded for a failed request; return how many were forgotten.

        Raises a StorageError if the filter is out of reach; the next call tries again.
        """
        self._to_forget += self._with_redirected(fingerprints)
        return self._forget()

    def ended(self, fingerprints: Sequence[bytes]) -> int:
        """Note that a request ended in another way; return and raise as `failed` does."""
        ended = self._with_redirected(fingerprints)
        for fingerprint in ended:
            if self._num_ended >= _MOST_ENDED:
                self._ended, self._num_ended = BloomFilter(_MOST_ENDED, 1e-6), 0
            self._num_ended += self._ended.add(fingerprint)
        with contextlib.suppress(StorageError):  # logged when the request failed
            return self._forget()
        return 0

    def redirected(self, fingerprints: Sequence[bytes], target: bytes) -> int:
        """Note that requests were redirected to one that is filtered: they fail if it fails.

        A site that is down redirects each of its pages to the same one, which fails.
        """
        if self.is_given_up(target) or target in self._to_forget:
            return self.failed(fingerprints)
        if target in fingerprints or target in self._ended:
            return self.ended(fingerprints)
        # It is under way, or in the queue, perhaps since an earlier run.
        self._redirected.setdefault(target, []).extend(fingerprints)
        self._num_redirected += len(fingerprints)
        while self._num_redirected > _MOST_REDIRECTED:  # rather crawled twice than never
            oldest = self._redirected.pop(next(iter(self._redirected)))
            self._num_redirected -= len(oldest)
            self._to_forget += oldest
        return self._forget()

    def is_given_up(self, fingerprint: bytes) -> bool:
        """Return whether a request has failed so often that this run does not crawl it again."""
        return self._any_given_up and fingerprint + bytes([MOST_FAILURES]) in self._failures

    def close(self, *, is_finished: bool) -> int:
        """Decide on requests that were redirected to one whose end this run has not seen.

        A finished run has nothing queued any more, so an earlier run has seen that end. A run that
        ends early forgets these requests.

        Returns:
            How many were forgotten now.

        Raises:
            StorageError: with the number of those that could not be forgotten.
        """
        if not is_finished:
            self._to_forget += chain.from_iterable(self._redirected.values())
        try:
            return self._forget()
        except StorageError:
            number = counted(len(self._to_forget), "failed request")
            raise StorageError(
                f"{number} could not be forgotten because the filter is out of reach: later runs "
                "will filter them as duplicates, and not crawl them"
            ) from None

    def _with_redirected(self, fingerprints: Sequence[bytes]) -> list[bytes]:
        """Return these requests, and those that were redirected to them, in one or more steps."""
        found = list(fingerprints)
        for fingerprint in found:  # which grows
            redirected = self._redirected.pop(fingerprint, ())
            self._num_redirected -= len(redirected)
            found += redirected
        return found

    def _forget(self) -> int:
        if not self._to_forget:
            return 0
        self._forget_stored(self._to_forget)
        forgotten, self._to_forget = self._to_forget, []
        for fingerprint in forgotten:
            for number in range(1, MOST_FAILURES + 1):
                if self._failures.add(fingerprint + bytes([number])):
                    break
            self._any_given_up = self._any_given_up or number == MOST_FAILURES
        return len(forgotten)


class Outcomes:
    """Changes the filter at the end of each request, where that is needed.

    Without BLOOM_FORGET_FAILED and BLOOM_RECORD_ON, nothing is watched. The constructor raises a
    SettingError if this version of Scrapy works in another way.
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
        self._done_statuses = settings.done_statuses
        self._telemetry = telemetry
        self._recorder = backend if isinstance(backend, RecordCrawled) else None
        forget = self._recorder.forget if self._recorder else backend.forgotten.add
        self._forgetting = ForgetFailed(forget) if settings.forget_failed else None
        self._under_way: dict[int, _Handling] = {}
        self._replacement: Request | None = None  # the last one from the downloader
        self._is_watching = bool(self._forgetting or self._recorder)
        if not self._is_watching:
            return
        listen(
            self._crawler.engine,
            "BLOOM_FORGET_FAILED and BLOOM_RECORD_ON do not work",
            "do without these settings",
            scraping=self._scraping,
            error=self._error,
            fetching=self._fetching,
        )
        self._crawler.signals.connect(self._item_error, signals.item_error)
        self._crawler.signals.connect(self._scheduled, signals.request_scheduled)

    def is_given_up(self, fingerprint: bytes) -> bool:
        """Return whether a request has failed so often that this run does not crawl it again."""
        return self._forgetting is not None and self._forgetting.is_given_up(fingerprint)

    def extend_trail(self, request: Request, fingerprint: bytes) -> None:
        """Note in a request that it was recorded, if anything is to be done at its end."""
        if self._is_watching:
            extend_trail(request, fingerprint)

    def filtered(self, request: Request, fingerprint: bytes) -> None:
        """Note that a request with a trail was filtered: what was redirected to it has ended."""
        redirected = trail_of(request) if self._is_watching else []
        if not redirected:
            return
        if self._forgetting:
            self._telemetry.forgotten += self._forgetting.redirected(redirected, fingerprint)
        if self._recorder and fingerprint in self._recorder.stored:
            self._record(redirected)

    def ended(self, request: Request, outcome: Outcome) -> None:
        """Forget or record a request that is not tried again; never raises."""
        try:
            fingerprints = trail_of(request)
            if outcome is Outcome.CRAWLED:
                self._record(fingerprints)
            if self._forgetting:
                is_failed = outcome is Outcome.FAILED
                end = self._forgetting.failed if is_failed else self._forgetting.ended
                self._telemetry.forgotten += end(fingerprints)
        except Exception as error:  # noqa: BLE001 - it must not disturb the crawl
            self._telemetry.failures.add(
                request, error, "what is recorded of it could not be changed"
            )

    def close(self, *, is_finished: bool) -> None:
        """Forget what is left to be forgotten, and log what could not be done."""
        if self._forgetting:
            try:
                self._telemetry.forgotten += self._forgetting.close(is_finished=is_finished)
            except StorageError as error:
                self._telemetry.failures.add_at_the_close(error)
        if self._recorder:
            logging.getLogger(__name__).info(
                "%s of %s crawled without an error, and so recorded. The others "
                "are crawled by the next run that finds a link to them: list pages should be "
                'requested with meta={"bloom_filter": "run"}',
                f"{self._telemetry.added:,}",
                counted(self._recorder.scheduled, "new request was", "new requests were"),
                extra=self._telemetry.extra,
            )

    def _record(self, fingerprints: Sequence[bytes]) -> None:
        if self._recorder:
            for fingerprint in fingerprints:
                if self._recorder.record(fingerprint):
                    self._telemetry.count_added()

    # How a request ends: hooks in Scrapy's engine, and signals.

    def _scraping(self, request: Request, result: Any) -> Callable[[Any], None]:
        handling = self._under_way[id(request)] = _Handling(request, result)
        return partial(self._scraped, handling)

    def _scraped(self, handling: _Handling, result: Any) -> None:
        self._under_way.pop(id(handling.request), None)
        if isinstance(result, Failure):  # a bug, which Scrapy logs
            handling.outcome = Outcome.FAILED
        if not handling.again:
            self.ended(handling.request, handling.outcome)

    def _error(self, request: Request, error: BaseException | None) -> None:
        handling = self._under_way.get(id(request))
        if handling is None or handling.outcome is Outcome.FAILED:
            return
        if isinstance(error, HttpError) and error.response.status in self._done_statuses:
            return
        on_purpose = isinstance(error, _ON_PURPOSE) and not isinstance(error, HttpError)
        handling.outcome = Outcome.OTHER if on_purpose else Outcome.FAILED

    def _item_error(self, response: Any) -> None:
        for handling in self._under_way.values():
            if handling.result is response and handling.outcome is Outcome.CRAWLED:
                handling.outcome = Outcome.OTHER

    def _fetching(self, request: Request) -> Callable[[Any], None]:
        # Before the download: middlewares may change what is fingerprinted.
        is_recorded = not request.dont_filter and request.meta.get("bloom_record", True)
        if self._recorder is None and is_recorded:
            fingerprint = self._fingerprint_of(request)
            if fingerprint is not None and fingerprint not in trail_of(request):
                extend_trail(request, fingerprint)
        return partial(self._fetched, request)

    def _fetched(self, request: Request, result: Any) -> None:
        """Let a request from the downloader (a retry, a redirect, one that is all new) go on."""
        if isinstance(result, Request):
            self._replacement = result
            if TRAIL in request.meta:
                result.meta.setdefault(TRAIL, request.meta[TRAIL])

    def _fingerprint_of(self, request: Request) -> bytes | None:
        fingerprint: object = None
        with contextlib.suppress(Exception):  # the filter has logged it
            fingerprint = self._fingerprint(request)
        return fingerprint if isinstance(fingerprint, bytes) else None

    def _scheduled(self, request: Request) -> None:
        """Give the trail to a request that goes on with the one that was recorded, or take it.

        A request from a callback or errback is one of its own, even if it has the meta of the
        response. But the same one once more, even without that meta, counts in place of this one.
        """
        if request is self._replacement:
            return
        trail = request.meta.get(TRAIL)
        again = self._handlings_of(request) if request.dont_filter else []
        for handling in again:
            handling.again = True
            if TRAIL in handling.request.meta:
                request.meta[TRAIL] = handling.request.meta[TRAIL]
        if trail is not None and not again:
            under_way = self._under_way.values()
            if any(trail == handling.request.meta.get(TRAIL) for handling in under_way):
                del request.meta[TRAIL]

    def _handlings_of(self, request: Request) -> list[_Handling]:
        """Return those of the same request, or of what it was redirected to."""
        under_way = self._under_way.values()
        fingerprint = self._fingerprint_of(request) if under_way else None
        return [
            each
            for each in under_way
            if _is_the_same(request, each.request) or fingerprint in trail_of(each.request)
        ]


def _is_the_same(one: Request, other: Request) -> bool:
    return (one.url, one.method, one.body) == (other.url, other.method, other.body)

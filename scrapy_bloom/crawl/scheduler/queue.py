"""The queue of CrashSafeScheduler, in which a request stays until it is done.

A request takes this way: `enqueue` asks whether its fingerprint is known, and hands it to a driver,
which has the store apply a batch of changes. `on_reply` gets the answers. `take` hands out the
requests that the driver has taken; from then on, `InFlight` tracks them, and `_done` puts their
ends into a later batch.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

from scrapy import Request, signals
from scrapy.crawler import Crawler
from scrapy.dupefilters import BaseDupeFilter
from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from scrapy_bloom.crawl.dupefilter import BloomDupeFilter
from scrapy_bloom.crawl.engine import (
    Drops,
    MayGoOn,
    ask_scheduler,
    close_spider_soon,
    taking_turns,
)
from scrapy_bloom.crawl.failures import Failures
from scrapy_bloom.crawl.fingerprinting import fingerprint_function
from scrapy_bloom.crawl.scheduler.driver import Driver
from scrapy_bloom.crawl.scheduler.in_flight import Flight, InFlight
from scrapy_bloom.crawl.scheduler.reports import QueueLog
from scrapy_bloom.crawl.scheduler.stored_requests import StoredRequests
from scrapy_bloom.crawl.start_requests import is_start_request
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.queues.store import (
    MOST_TRIES,
    TO_ITSELF,
    Batch,
    End,
    Ended,
    Entered,
    Opened,
    QueueStatus,
    Reply,
    Taken,
    once_in,
)

_STANDSTILL_SECS = 5.0  # without progress, after which callbacks may be waiting for a suspect
_MOST_UNREADABLE = 100  # in one turn of the event loop


class _Sent(NamedTuple):
    """A request in a batch that is not answered yet."""

    request: Request
    keys: Sequence[bytes]  # the fingerprints that it records
    replaced: Flight | None  # the request in memory that it replaces
    refused: Sequence[Flight]  # the requests in flight that it takes over if it is queued


class CrawlQueue:
    """The requests of a crawl, pending or in flight, in a store that outlives the process.

    `len` tells how many requests are pending, as far as this worker knows. Raises a SettingError if
    this version of Scrapy lacks a method.
    """

    def __init__(
        self,
        crawler: Crawler,
        df: BaseDupeFilter,
        driver: Driver,
        opened: Opened,
        failures: Failures,
        *,
        keeps_failed: bool = True,
    ) -> None:
        assert crawler.spider is not None
        assert crawler.stats is not None
        assert crawler.request_fingerprinter is not None
        self.has_failed = False  # whether the store has failed; its requests stay in it
        self.is_closed = False  # whether nothing is collected any more
        self.in_flight = InFlight(crawler)
        self.storage = driver.storage
        self._driver = driver
        self._store = driver.store
        self._failures = failures
        self._crawler = crawler
        self._engine: Any = crawler.engine
        self._spider = crawler.spider
        self._stats = crawler.stats
        self.log = QueueLog(crawler, driver.store.name)
        self._df = df if isinstance(df, BloomDupeFilter) else None
        self._fingerprint = fingerprint_function(crawler.request_fingerprinter)
        self._requests = StoredRequests(crawler)
        self._keeps_failed = keeps_failed
        self._is_late = opened.is_late  # there is nothing to do in the current run
        self._is_retired = False  # whether another run has begun since
        self._unanswered: set[bytes] = set()  # fingerprints in batches that are not answered yet
        self._in_memory: dict[bytes, Request] = {}  # requests that cannot be stored
        self._progress_at = time.monotonic()
        self._turn = taking_turns()
        driver.begin(self)

    @property
    def is_open(self) -> bool:
        """Return whether the queue accepts changes: it has not failed, and is not closed."""
        return not (self.has_failed or self.is_closed)

    def __len__(self) -> int:
        return len(self._driver) if self.is_open and not self._is_late else 0

    @property
    def expects_more(self) -> bool:
        """Return whether the spider is not idle, although nothing is pending here.

        After a failure, the spider is being closed, and must not look idle and so finished.
        """
        return self.has_failed or self._driver.expects_more

    def _refuse(self, *_: object) -> NoReturn:
        raise AttributeError(
            "the queue of CrashSafeScheduler has no push(), pop() and peek(): drop requests with "
            "`scrapy bloom queue --drop-host`, or stop the crawl with engine.close_spider()"
        )

    push = pop = peek = _refuse

    # The output of callbacks, and of start().

    def watch(self, request: Request, result: Any) -> tuple[Drops, MayGoOn] | None:
        """Note which requests a request in flight leads to, and pace its output."""
        flight = self.in_flight.handled(request, result)

        def led_to(element: object) -> None:
            if flight is not None and isinstance(element, Request):
                self.in_flight.led_to(flight, element)

        return led_to, partial(self.may_go_on, flight)

    async def may_go_on(self, flight: Flight | None = None) -> bool:
        """Wait until Scrapy may consume more of the output of a request, or of start() if None.

        Return False if Scrapy must not consume more of it, so that the request stays in flight.
        """
        await self._turn()
        if await self._driver.wait_for_room():
            return True
        if flight is not None:
            self.in_flight.leave(flight)
        return False

    # Requests that enter the queue.

    def knows(self, fingerprint: bytes, *, once: bool = False) -> bool:
        """Return whether a fingerprint is certainly recorded, or about to be."""
        key = once_in(self._store.run, fingerprint) if once else fingerprint
        return (
            key in self._unanswered
            or key in self._in_memory
            or self._store.knows(fingerprint, once=once)
        )

    def record(self, fingerprint: bytes, *, once: bool = False) -> None:
        """Record a fingerprint without a request; with `once`, for this run, too."""
        keys = [fingerprint, once_in(self._store.run, fingerprint)]
        self._record_keys(keys[: 1 + once])

    def _record_keys(self, keys: list[bytes]) -> None:
        self._unanswered.update(keys)
        if self.is_open:  # otherwise, requests of a parent may have been refused
            self._driver.changes.last().recorded += keys
            self._driver.flush_soon()

    def enqueue(self, request: Request) -> str | None:
        """Collect a request for the next batch, unless the duplicate filter has seen it.

        Return `storage`. Return "memory" if the request cannot be serialized, so that the
        caller has to keep it. Return None if it is a duplicate.
        """
        replaced = self.in_flight.replaced_by(request)
        row = replaced.taken if replaced is not None else None
        refused = self.in_flight.refused_parents(request)
        try:
            found = self._look_up(request, replaced)
        except Exception as error:  # noqa: BLE001 - no failure may lose a page
            self._failures.add(request, error)
            found = (), {"is_filtered": False}
        if found is None:
            return None
        keys, fields = found
        # A retry or a redirect of a request in memory is stored in a row of its own.
        in_memory = replaced if row is None else None
        sent = _Sent(request, keys if row is None else (), in_memory, refused)
        try:
            entered = self._requests.entered(
                request,
                **fields,
                replaces=row and row.id,
                # Spider middlewares set one of these keys in what callbacks and start() yield.
                has_parent="depth" in request.meta or "is_start_request" in request.meta,
                context=sent,
            )
        except Exception as error:  # noqa: BLE001 - no failure may lose a page
            if not isinstance(error, ValueError):
                self._failures.add(request, error, "it is kept in memory")
            pages = [*keys, *(in_memory.pages if in_memory is not None else ())]
            return self._keep_in_memory(request, keys, error, refused, pages)
        if replaced is not None and row is not None:
            replaced.is_replaced = True
        for flight in (*refused, *([in_memory] if in_memory is not None else [])):
            flight.waits_for += 1
        self._enter(entered)
        return self.storage

    def _look_up(
        self, request: Request, replaced: Flight | None
    ) -> tuple[Sequence[bytes], Mapping[str, Any]] | None:
        """Return the fingerprints that a request records now, and fields of `Entered`.

        Returns None if the request is a duplicate. If it replaces another one, only the store can
        tell what that means for the row.
        """
        df, is_start = self._df, replaced is None and is_start_request(request)
        if df is None or request.dont_filter:
            page = self._fingerprint_of(request) if is_start else None
            is_start = page is not None
            unfiltered = {"is_filtered": False, "is_recorded": False}
            return (), {"fingerprint": page, **unfiltered, "is_start": is_start, "once": is_start}
        is_seen = passes = False
        if df.is_overridden:
            is_seen, passes, fingerprint = df.decision(request)
        else:
            fingerprint = df.fingerprint_of(request)
        if fingerprint is None:
            return None if is_seen else ((), {"is_filtered": False})
        wishes = df.wishes(request)
        is_known = self.knows(fingerprint, once=wishes.once)
        is_seen = is_seen or (is_known and wishes.is_filtered and not df.is_overridden)
        is_redirect = replaced is not None and replaced.taken is not None
        if is_seen and not (is_known and is_redirect):
            if replaced is not None and fingerprint in replaced.pages:
                replaced.error = TO_ITSELF
            elif replaced is not None:
                replaced.awaits.append(fingerprint)
            return None
        keys: list[bytes] = []
        if wishes.is_recorded and not is_known:
            keys += [fingerprint, once_in(self._store.run, fingerprint)][: 1 + wishes.once]
        is_start = is_start and (wishes.once or not wishes.is_filtered)
        return keys, {
            "fingerprint": fingerprint,
            "is_filtered": wishes.is_filtered,
            "is_recorded": wishes.is_recorded,
            "passes": passes,
            "once": wishes.once or is_start,
            "is_start": is_start,
        }

    def _fingerprint_of(self, request: Request) -> bytes | None:
        """Return the fingerprint of a request that is not filtered; None if there is none."""
        try:
            fingerprint = self._fingerprint(request)
        except Exception:  # noqa: BLE001 - it is not filtered
            return None
        return fingerprint if isinstance(fingerprint, bytes) else None

    def _enter(self, entered: Entered) -> None:
        if entered.context is not None:
            self._unanswered.update(entered.context.keys)
        self._driver.changes.enter(entered)
        self._driver.flush_soon()

    def add_unreadable(self, data: bytes) -> None:
        """Queue a serialized request of `scrapy bloom add` that the spider cannot deserialize."""
        self._enter(Entered(data))

    def _keep_in_memory(
        self,
        request: Request,
        keys: Sequence[bytes],
        error: Exception,
        refused: Sequence[Flight],
        pages: Sequence[bytes],
    ) -> str:
        self._stats.inc_value("scheduler/unserializable")
        self.log.log_in_memory(request, error)
        for flight in refused:
            flight.is_taken_over = True
        for key in keys:
            self._in_memory[key] = request

        def done(flight: Flight) -> None:
            # Since the worker has rejoined the queue, the requests that it led to may be lost.
            kept = [key for key in keys if self._in_memory.get(key) is request]
            for key in kept:
                del self._in_memory[key]
            if kept and not flight.reason:
                self._record_keys(kept)

        self.in_flight.keep_in_memory(request, done, pages)
        return "memory"

    # Outcomes of batches, which the driver reports.

    def on_reply(self, batch: Batch, reply: Reply) -> None:
        """Handle the answers to a batch."""
        self._unanswered.difference_update(batch.recorded)
        for entered, is_queued in zip(batch.entered, reply.queued, strict=True):
            if entered.context is not None:
                self._answered(entered, is_queued=is_queued)
        if reply.added and self._df is not None:
            self._df.count_new(reply.added)
        self.log.log_reply(reply)
        self._is_retired = reply.is_retired
        is_last = reply.is_stopped or reply.is_retired
        if is_last and not self.is_closed and self.log.is_first("shutdown"):
            self.log.log_shutdown(reply)
            close_spider_soon(self._crawler, "shutdown")

    def _answered(self, entered: Entered, *, is_queued: bool) -> None:
        """Note whether the store has queued a request that entered."""
        request, keys, replaced, refused = entered.context
        self._unanswered.difference_update(keys)
        if not is_queued:
            self._stats.inc_value(f"scheduler/enqueued/{self.storage}", -1)
            self._stats.inc_value("scheduler/enqueued", -1)
            if self._df is not None:
                self._df.log(request, self._spider)
            self._crawler.signals.send_catch_log(
                signal=signals.request_dropped, request=request, spider=self._spider
            )
        for flight in refused:
            flight.is_taken_over = flight.is_taken_over or is_queued
            self.in_flight.release(flight)
        if replaced is not None:
            if not is_queued and entered.fingerprint is not None:
                replaced.awaits.append(entered.fingerprint)
            self.in_flight.release(replaced)

    def on_rejoined(self, number: int, found: Iterable[Entered]) -> None:
        """Queue what the current queue may lack, after the driver has dropped some requests."""
        self._unanswered.clear()
        self._in_memory.clear()
        # Only once while closing, because a server may lose each batch.
        if not self.is_closed or self.log.is_first("rejoined while closing"):
            for entered in found:
                if entered.replaces is None:  # otherwise its row is pending again
                    self._enter(entered)
        self.log.log_rejoined(number + len(self.in_flight))

    def fail(self, error: Exception) -> None:
        """Close the spider, because the store cannot be used."""
        self.has_failed = True
        if self.log.is_first("failure"):
            self._failures.close_for_queue(error, self._store.name)

    def flush(self) -> None:
        """Have the store apply the changes that are due."""
        self._driver.flush()

    def stands_still(self, *, has_more: bool) -> bool:
        """Return whether all requests in flight wait, perhaps for a suspect.

        `has_more`: the driver has requests, or ends of which the store does not know.
        """
        if self.in_flight.is_idle and not has_more:
            return True
        return self._is_slow and not self._engine.downloader.active

    @property
    def _is_slow(self) -> bool:
        return time.monotonic() >= self._progress_at + _STANDSTILL_SECS

    def log_no_share(self, workers: int) -> None:
        """Log that this worker has no share of a host with pending requests, if it takes none."""
        if self._is_slow and not self.in_flight:
            self.log.log_no_share(workers)

    # Requests that are handed out.

    def take(self) -> Request | None:
        """Return the next request, which is in flight from now on; None if there is none yet."""
        for _ in range(_MOST_UNREADABLE):
            if not self.is_open or self._is_late or (taken := self._driver.take()) is None:
                return None
            if (request := self._hand_out(taken)) is not None:
                return request
        ask_scheduler(self._engine)
        return None

    def _hand_out(self, taken: Taken) -> Request | None:
        """Return a request that is in flight from now on; None if it is unreadable."""
        try:
            request = self._requests.taken(taken)
        except Exception as error:  # noqa: BLE001 - a callback that was renamed, for example
            self._stats.inc_value("scheduler/unreadable")
            self.log.log_unreadable(error)
            self._end(Ended(taken.id, End.UNREADABLE))
            return None
        self._progress_at = time.monotonic()
        self.in_flight.add(request, self._done, taken._replace(data=b""))
        return request

    # The ends of requests.

    def _done(self, flight: Flight) -> None:
        """Report the end of a request in the batch that contains what it led to, or later."""
        taken, reason = flight.taken, flight.reason
        self._progress_at = time.monotonic()
        # If closed, a request that it led to may be refused.
        if taken is None or flight.is_replaced or not self.is_open:
            return
        end = End.TAKEN_OVER if flight.is_taken_over and not flight.error else End.DONE
        if reason and self._keeps_failed:
            end = End.FAILED
            self._stats.inc_value("scheduler/failed")
            self.log.log_failed(flight, is_last=taken.tries + 1 >= MOST_TRIES)
        self._end(Ended(taken.id, end, reason, flight.awaits))
        self._check_reachability(flight, taken)

    def _end(self, ended: Ended) -> None:
        if self.is_open:  # otherwise, requests that it led to may have been refused
            self._driver.changes.end(ended)
            self._driver.flush_soon()

    def _check_reachability(self, flight: Flight, taken: Taken) -> None:
        """Close the spider if nothing can be downloaded, before all requests have failed."""
        reachability = self.in_flight.reachability
        if flight.reason and flight.has_no_response and not taken.tries:
            reachability.add_failure(taken.slot)
            if reachability.is_lost and self._keeps_failed and self.log.is_first("unreachable"):
                self.log.log_unreachable(flight.reason)
                close_spider_soon(self._crawler, "bloom_unreachable")

    # The end of the crawl in this process.

    def close(self, *, is_finished: bool) -> Deferred[None]:
        """Have the store apply all changes, and close it; `is_finished`: nothing is left."""
        self.in_flight.end_replaced()
        closed = self._driver.close(is_finished=is_finished and not self._is_late)
        return closed.addCallbacks(self._log_end, self._note_failed_close)

    def _log_end(self, closed: QueueStatus | None) -> None:
        if closed is not None and not (self._is_late or self._is_retired):
            self.log.log_end(closed)

    def _note_failed_close(self, failure: Failure) -> None:
        if isinstance(failure.value, StorageError):
            self._failures.add_at_the_close(failure.value)
        elif isinstance(failure.value, Exception):
            self.fail(failure.value)

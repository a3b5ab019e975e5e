"""The queue of CrashSafeScheduler, in which a request stays until it is done."""

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from scrapy import Request, signals
from scrapy.crawler import Crawler
from scrapy.dupefilters import BaseDupeFilter
from scrapy.utils.reactor import CallLaterOnce
from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from scrapy_bloom.crawl.dupefilter import BloomDupeFilter
from scrapy_bloom.crawl.engine import (
    START,
    ask_scheduler,
    close_spider_soon,
    paced,
    taking_turns,
)
from scrapy_bloom.crawl.fingerprinting import fingerprint_function
from scrapy_bloom.crawl.scheduler.in_flight import MOST_UNREACHABLE, Flight, InFlight
from scrapy_bloom.crawl.scheduler.reports import log_end, log_opening, log_reply
from scrapy_bloom.crawl.scheduler.stored_requests import StoredRequests
from scrapy_bloom.crawl.telemetry import Failures
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.queues.collected import Collected
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
    Store,
    Taken,
    once_in,
)
from scrapy_bloom.settings import BloomSettings
from scrapy_bloom.text import counted, escaped

_MOST_UNREADABLE = 100  # in one turn of the event loop


class Driver(ABC):
    """Has a store apply the changes of a queue, and prefetches requests.

    Add changes to `changes` while `is_open`, and then call `flush_soon`.
    """

    storage: str  # "disk" or "redis", as in the stats

    def __init__(
        self, crawler: Crawler, store: Store, failures: Failures, changes: Collected, opened: Opened
    ) -> None:
        self.store = store
        self.in_flight = InFlight(crawler)
        self.changes = changes
        self.ready: deque[Taken] = deque()  # in flight in the store, and not handed out yet
        self.is_late = opened.is_late  # there is nothing to do in the current run
        self.has_failed = False  # whether the store has failed; its requests stay in it
        self.is_closed = False  # whether nothing is collected any more
        self.queue: CrawlQueue  # gets the replies; set before anything else is done
        self.failures = failures
        self._engine: Any = crawler.engine
        self._next_flush = CallLaterOnce(self.flush)

    @property
    def is_open(self) -> bool:
        """Return whether changes may be collected."""
        return not (self.has_failed or self.is_closed)

    def __len__(self) -> int:
        if not self.is_open or self.is_late:
            return 0
        return self._pending + len(self.ready) + self.changes.entering

    @property
    def _pending(self) -> int:
        return self.store.pending

    @property
    @abstractmethod
    def expects_more(self) -> bool:
        """Whether other processes may queue requests, although nothing is pending here."""

    def fail(self, error: Exception) -> None:
        """Close the spider, because the store cannot be used."""
        if not self.has_failed:
            self.has_failed = True
            self.failures.close_for_queue(error, self.store.name)

    def end(self, ended: Ended) -> None:
        """Collect the end of a request."""
        self.changes.end(ended)
        self.flush_soon()

    def flush_soon(self) -> None:
        """Have the store apply the changes at the end of this turn of the event loop, or later."""
        self._next_flush.schedule()

    @abstractmethod
    def flush(self) -> None:
        """Have the store apply the changes that are due."""

    async def wait_for_room(self) -> bool:
        """Wait until more changes can be collected; return False if there will be no room."""
        return True

    @abstractmethod
    def take(self) -> Taken | None:
        """Return the next request, which is in flight; None if there is none yet."""

    @abstractmethod
    def close(self, *, is_finished: bool) -> "Deferred[QueueStatus | None]":
        """Have the store apply all changes, and close it; `is_finished`: nothing is pending."""


class CrawlQueue:
    """The requests of a crawl, pending or in flight, in a store that outlives the process.

    `len` tells how many requests are pending in the store, as far as this worker knows. Requests
    that cannot be stored are in `memory`, a queue of Scrapy.
    """

    def __init__(
        self,
        crawler: Crawler,
        df: BaseDupeFilter,
        driver: Driver,
        opened: Opened,
        *,
        settings: BloomSettings,
        memory: Any,
    ) -> None:
        assert crawler.spider is not None
        assert crawler.stats is not None
        assert crawler.request_fingerprinter is not None
        self.in_flight = driver.in_flight
        self._logger = logging.LoggerAdapter(
            logging.getLogger(__name__), {"spider": crawler.spider}
        )
        self._logged: set[str] = set()  # kinds of messages that are logged once
        self._driver = driver
        self._store = driver.store
        self._memory = memory
        self._crawler = crawler
        self._spider = crawler.spider
        self._stats = crawler.stats
        self._df = df if isinstance(df, BloomDupeFilter) else None
        self._fingerprint = fingerprint_function(crawler.request_fingerprinter)
        self._requests = StoredRequests(crawler)
        self._keeps_failed = settings.keep_failed
        self._is_retired = False  # whether another run has begun since
        self._unanswered: set[bytes] = set()  # fingerprints in batches that are not answered yet
        self._in_memory: dict[bytes, Flight] = {}  # by the fingerprints that they will record
        self._turn = taking_turns()
        if self._df is not None:
            self._df.queue = self
        log_opening(self._logger, self._store.name, crawler, settings, opened)
        driver.queue = self

    def __len__(self) -> int:
        return len(self._driver)

    @property
    def expects_more(self) -> bool:
        """Return whether the spider is not idle, although nothing is pending here."""
        # After a failure, the spider is being closed, and must not look finished.
        return self._driver.has_failed or self._driver.expects_more

    def _refuse(self, *_: object) -> NoReturn:
        raise AttributeError(
            "the queue of CrashSafeScheduler has no push(), pop() and peek(): drop requests with "
            "`scrapy bloom queue --drop-host`, or stop the crawl with engine.close_spider()"
        )

    push = pop = peek = _refuse

    def _is_first(self, kind: str) -> bool:
        """Return whether a kind of message was not logged yet."""
        is_first = kind not in self._logged
        self._logged.add(kind)
        return is_first

    def watch(self, output: Any, request: Request, result: Any) -> AsyncIterator[Any]:
        """Note which requests a request in flight leads to, and pace its output."""
        flight = self.in_flight.find(request, result)
        led_to = partial(self.in_flight.led_to, flight)
        return paced(output, led_to, partial(self.may_go_on, flight))

    async def may_go_on(self, flight: Flight | None = None) -> bool:
        """Wait until Scrapy may consume more of the output of a request, or of start() if None.

        Return False if Scrapy must not consume more of it, so that the request stays in flight.
        """
        await self._turn()
        if await self._driver.wait_for_room():
            return True
        if flight is not None:
            self.in_flight.remove(flight)
        return False

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
        self._record(self._keys(Entered(b"", fingerprint, once=once)))

    def _record(self, keys: Sequence[bytes]) -> None:
        self._unanswered.update(keys)
        if self._driver.is_open:  # otherwise, requests of a parent may have been refused
            self._driver.changes.last().recorded += keys
            self._driver.flush_soon()

    def _keys(self, entered: Entered) -> list[bytes]:
        """Return what is recorded as a request enters; the store decides it for one with a row."""
        fingerprint = entered.fingerprint
        if fingerprint is None or not entered.is_recorded or entered.replaces is not None:
            return []
        return [fingerprint, *([once_in(self._store.run, fingerprint)] if entered.once else ())]

    def enqueue(self, request: Request) -> bool:
        """Collect a request for the next batch; return whether it is queued.

        It is not if it is a duplicate, or if the queue is not open: then the request that led to it
        stays in flight until the next run. A request that cannot be serialized stays in memory.
        """
        if not self._driver.is_open:
            return False
        replaced = self.in_flight.replaced_by(request)
        try:
            lookup = self._look_up(request, replaced)
        except Exception as error:  # noqa: BLE001 - no failure may lose a page
            self._driver.failures.add(request, error)
            lookup = Entered(b"", is_filtered=False)
        if lookup is None:
            if self._df is not None:
                self._df.log(request, self._spider)
            return False
        row = replaced.taken if replaced is not None else None
        waiting = self.in_flight.waiting_for(request, replaced)
        context = request, waiting  # for the answer
        try:
            entered = self._requests.pack(request, lookup, replaces=row and row.id, context=context)
        except Exception as error:  # noqa: BLE001 - no failure may lose a page
            if not isinstance(error, ValueError):
                self._driver.failures.add(request, error, "it is kept in memory")
            self._keep_in_memory(request, lookup, waiting, error)
            return True
        if replaced is not None:
            replaced.taken = None
        for flight in waiting:
            flight.waits_for += 1
        self._unanswered.update(self._keys(entered))
        self._driver.changes.enter(entered)
        self._driver.flush_soon()
        if self._driver.is_open:  # the store has not failed
            self._count("enqueued", self._driver.storage)
        return self._driver.is_open

    def _count(self, event: str, storage: str, number: int = 1) -> None:
        self._stats.inc_value(f"scheduler/{event}/{storage}", number)
        self._stats.inc_value(f"scheduler/{event}", number)

    def _look_up(self, request: Request, replaced: Flight | None) -> Entered | None:
        """Return how a request enters the queue, without its bytes; None if it is a duplicate."""
        df, is_start = self._df, replaced is None and START in request.meta
        if df is None or request.dont_filter:
            lookup = Entered(b"", is_filtered=False, is_recorded=False)
            with suppress(Exception):  # it needs no fingerprint
                if is_start and isinstance(page := self._fingerprint(request), bytes):
                    lookup = lookup._replace(fingerprint=page, is_start=True, once=True)
            return lookup
        is_seen = passes = False
        if df.is_overridden:
            is_seen, passes, fingerprint = df.decision(request)
        else:
            fingerprint = df.fingerprint_of(request)
        if fingerprint is None:
            return None if is_seen else Entered(b"", is_filtered=False)
        wishes = df.wishes(request)
        is_known = self.knows(fingerprint, once=wishes.once)
        is_seen = is_seen or (is_known and wishes.is_filtered and not df.is_overridden)
        # If it takes the row of another request, only the store can tell what becomes of the row.
        takes_row = replaced is not None and replaced.taken is not None
        if is_seen and not (is_known and takes_row):
            if replaced is not None and fingerprint in replaced.pages:
                replaced.error = TO_ITSELF
            elif replaced is not None:
                replaced.awaits.append(fingerprint)
            return None
        is_start = is_start and (wishes.once or not wishes.is_filtered)
        return Entered(
            b"",
            fingerprint,
            is_filtered=wishes.is_filtered,
            is_recorded=wishes.is_recorded,
            passes=passes,
            once=wishes.once or is_start,
            is_start=is_start,
        )

    def _keep_in_memory(
        self, request: Request, lookup: Entered, waiting: Sequence[Flight], error: Exception
    ) -> None:
        if self._is_first("unserializable"):  # the text is Scrapy's
            self._logger.warning(
                "Unable to serialize request: %(request)s - reason: %(reason)s - it is kept in "
                "memory, and if this process dies, the pages that link to it are crawled again "
                "- no more unserializable requests will be logged (stats being collected)",
                {"request": request, "reason": error},
                exc_info=error if self._crawler.settings.getbool("SCHEDULER_DEBUG") else None,
            )
        self._stats.inc_value("scheduler/unserializable")
        self._count("enqueued", "memory")
        pages = self._keys(lookup)
        for flight in waiting:
            if flight.refusal:
                flight.is_taken_over = True
            else:  # the request in memory that is replaced
                pages += flight.pages
        flight = self.in_flight.keep_in_memory(request, self._on_done_in_memory, pages)
        for page in pages:
            self._in_memory.setdefault(page, flight)
        self._memory.push(request)

    def _on_done_in_memory(self, flight: Flight) -> None:
        # After the worker has rejoined the queue, the requests that it led to may be lost.
        pages = [page for page in flight.pages if self._in_memory.get(page) is flight]
        for page in pages:
            del self._in_memory[page]
        if pages and not flight.reason:
            self._record(pages)

    def on_reply(self, batch: Batch, reply: Reply) -> None:
        """Handle the answers to a batch."""
        self._unanswered.difference_update(batch.recorded)
        for entered, is_queued in zip(batch.entered, reply.queued, strict=True):
            self._on_answer(entered, is_queued=is_queued)
        if reply.added and self._df is not None:
            self._df.count_new(reply.added)
        log_reply(self._logger, self._store.name, reply)
        is_idle = self.in_flight.is_slow and not (self._driver.ready or self.in_flight)
        has_no_share = is_idle and batch.want and reply.pending and reply.workers > 1
        if has_no_share and self._is_first("no share"):
            self._logger.info(
                "This worker waits, because the %d workers of the queue in %s share the limits per "
                "host (BLOOM_SHARED_LIMITS), and it has no share of a host with pending requests",
                reply.workers,
                self._store.name,
            )
        self._is_retired = reply.is_retired
        is_last = reply.is_stopped or reply.is_retired
        if is_last and not self._driver.is_closed and self._is_first("shutdown"):
            self._logger.info(
                "This worker of the queue in %s shuts down, because %s",
                self._store.name,
                "scrapy bloom stop was run" if reply.is_stopped else "another run has begun",
            )
            close_spider_soon(self._crawler, "shutdown")

    def _on_answer(self, entered: Entered, *, is_queued: bool) -> None:
        """Note whether the store has queued a request that entered."""
        self._unanswered.difference_update(self._keys(entered))
        if entered.context is None:  # it is of a command, or was sent before
            return
        request, waiting = entered.context
        if not is_queued:
            self._count("enqueued", self._driver.storage, -1)
            if self._df is not None:
                self._df.log(request, self._spider)
            self._crawler.signals.send_catch_log(
                signal=signals.request_dropped, request=request, spider=self._spider
            )
        for flight in waiting:
            if flight.refusal:
                flight.is_taken_over = flight.is_taken_over or is_queued
            elif not is_queued and entered.fingerprint is not None:
                flight.awaits.append(entered.fingerprint)
            self.in_flight.release(flight)

    def on_rejoined(self, number: int, entered: Sequence[Entered]) -> None:
        """Queue again what the store may lack, after so many requests were dropped."""
        self._unanswered.clear()
        self._in_memory.clear()
        # Only once while closing, because a server may lose each batch.
        if not self._driver.is_closed or self._is_first("rejoined while closing"):
            for request in entered:
                if request.replaces is None:  # otherwise its row is pending again
                    self._unanswered.update(self._keys(request))
                    self._driver.changes.enter(request)
            self._driver.flush_soon()
        self._logger.info(
            "This worker has rejoined the queue in %s, because its lease had expired or the server "
            "had lost it: at least %s crawled again, by this worker or another",
            self._store.name,
            counted(number + len(self.in_flight), "request is", "requests are"),
        )

    def take(self) -> Request | None:
        """Return the next request, which is in flight from now on; None if there is none yet."""
        request: Request | None = self._memory.pop()
        if request is not None:
            self.in_flight.add(request)
            self._count("dequeued", "memory")
            return request
        driver = self._driver
        for _ in range(_MOST_UNREADABLE):
            if not driver.is_open or driver.is_late or (taken := driver.take()) is None:
                return None
            try:
                request = self._requests.unpack(taken)
            except Exception as error:  # noqa: BLE001 - a callback that was renamed, for example
                self._keep_unreadable(taken, error)
            else:
                self.in_flight.add(request, self._on_done, taken._replace(data=b""))
                self._count("dequeued", driver.storage)
                return request
        ask_scheduler(self._crawler.engine)
        return None

    def _keep_unreadable(self, taken: Taken, error: Exception) -> None:
        self._stats.inc_value("scheduler/unreadable")
        name = type(error).__name__
        if self._is_first(f"unreadable {name}"):
            self._logger.error(
                "A request of the job cannot be deserialized, and stays in %s: %s: %s. Further "
                "requests with a %s are not logged, but counted in scheduler/unreadable",
                self._store.name,
                name,
                escaped(str(error)),
                name,
            )
        self._driver.end(Ended(taken.id, End.UNREADABLE))

    def _on_done(self, flight: Flight) -> None:
        """Report the end of a request in the batch that contains what it led to, or later."""
        taken, reason = flight.taken, flight.reason
        # If closed, a request that it led to may be refused.
        if taken is None or not self._driver.is_open:
            return
        end = End.TAKEN_OVER if flight.is_taken_over and not flight.error else End.DONE
        if reason and self._keeps_failed:
            end = End.FAILED
            self._stats.inc_value("scheduler/failed")
            if self._is_first("failed"):
                is_last = taken.tries + 1 >= MOST_TRIES
                self._logger.info(
                    "%s has failed (%s), and is %s. Further failed requests are not logged, but "
                    "counted in scheduler/failed; `scrapy bloom queue --failed` shows them",
                    escaped(flight.url),
                    escaped(reason),
                    f"not tried again, because it has failed in {MOST_TRIES} runs"
                    if is_last
                    else "kept for the next run",
                )
            if self.in_flight.reachability.is_lost and self._is_first("unreachable"):
                self._logger.error(
                    "The last %d downloads failed without a response, the last one with %s. The "
                    "spider is closed (reason bloom_unreachable), so that not all requests fail: "
                    "check name resolution, network and proxies, and start the crawl again",
                    MOST_UNREACHABLE,
                    escaped(reason),
                )
                close_spider_soon(self._crawler, "bloom_unreachable")
        self._driver.end(Ended(taken.id, end, reason, flight.awaits))

    def close(self, *, is_finished: bool) -> Deferred[None]:
        """Have the store apply all changes, and close it; `is_finished`: nothing is left."""
        self.in_flight.end_replaced()
        closed = self._driver.close(is_finished=is_finished and not self._driver.is_late)
        return closed.addCallbacks(self._log_end, self._note_failed_close)

    def _log_end(self, closed: QueueStatus | None) -> None:
        if closed is not None and not (self._driver.is_late or self._is_retired):
            log_end(self._logger, self._store.name, closed)

    def _note_failed_close(self, failure: Failure) -> None:
        if isinstance(failure.value, StorageError):
            self._driver.failures.add_at_the_close(failure.value)
        elif isinstance(failure.value, Exception):
            self._driver.fail(failure.value)

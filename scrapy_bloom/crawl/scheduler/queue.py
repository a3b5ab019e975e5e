"""The queue of CrashSafeScheduler, in which a request stays until it is done.

A request takes this way: `enqueue` asks whether its fingerprint is known, and collects it in a
batch. A driver has the store apply the batch, and `_handle_reply` gets the answers and the requests
that were taken. `take` hands them out; from then on, `InFlight` tracks them, and `_done` puts their
ends into a later batch.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from scrapy import Request, signals
from scrapy.core.downloader import Downloader
from scrapy.crawler import Crawler
from scrapy.dupefilters import BaseDupeFilter
from scrapy.exceptions import DontCloseSpider
from scrapy.utils.asyncio import call_later
from scrapy.utils.reactor import CallLaterOnce
from twisted.internet.defer import Deferred

from scrapy_bloom.crawl.dupefilter import BloomDupeFilter
from scrapy_bloom.crawl.engine import (
    Bell,
    Drops,
    MayGoOn,
    ask_scheduler,
    close_spider_soon,
    give_turn,
    is_closing,
    reads_start,
    taking_turns,
)
from scrapy_bloom.crawl.failures import Failures
from scrapy_bloom.crawl.fingerprinting import fingerprint_function
from scrapy_bloom.crawl.scheduler.downloads import ActiveDownloads, SharedDownloads
from scrapy_bloom.crawl.scheduler.driver import InThread, Outcome, applied, closed
from scrapy_bloom.crawl.scheduler.in_flight import Flight, InFlight
from scrapy_bloom.crawl.scheduler.reachability import MOST_UNREACHABLE, Reachability
from scrapy_bloom.crawl.scheduler.reports import log_end, log_no_share, log_reply
from scrapy_bloom.crawl.scheduler.stored_requests import StoredRequests
from scrapy_bloom.crawl.start_requests import is_start_request
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.queues.collected import Collected
from scrapy_bloom.queues.shares import NO_MEMBER, Limits, Membership
from scrapy_bloom.queues.store import (
    MOST_TRIES,
    TO_ITSELF,
    Batch,
    Closed,
    End,
    Ended,
    Entered,
    Opened,
    RejoinedError,
    Reply,
    Store,
    Taken,
    once_in,
)
from scrapy_bloom.text import counted, escaped

_STANDSTILL_SECS = 5.0  # without progress, after which callbacks may be waiting for a suspect
_MOST_CHANGES = 1000  # in a transaction of a database
_SOON_SECS = 0.03  # until an incomplete batch is sent to a server
_HUNGRY_SECS = 0.003  # until an incomplete batch is sent, if no request is prefetched
_LOOK_AGAIN_SECS = 0.25  # until the next batch if no request was pending
_LIMITED_SECS = 0.1  # the same if requests were pending, but none of a host with a free share
_ASK_SECS = 0.5  # until the next batch, so that the worker soon knows of a change of its shares
_ASKS = 4  # of these batches per lease, at least
_PREFETCH = 16  # most requests held, so that taking one needs no round trip
_MOST_WAITING = 4  # times the prefetch: most requests held, if their slots wait for a delay
_LAST_LOOK_SECS = 0.05  # until the second look, which finds the crawl ended
_POLL_SECS = 0.5
_MOST_UNREADABLE = 100  # in one turn of the event loop


class _Sent(NamedTuple):
    """A request in a batch that is not answered yet."""

    request: Request
    keys: Sequence[bytes]  # the fingerprints that it records
    replaced: Flight | None  # the request in memory that it replaces
    refused: Sequence[Flight]  # the requests in flight that it takes over if it is queued


class CrawlQueue:
    """The requests of a crawl, pending or in flight, in a store that outlives the process.

    Args:
        crawler: the crawler of the requests.
        df: the duplicate filter; or Scrapy's BaseDupeFilter, which filters nothing.
        store: the store.
        opened: what it has told at its opening.
        failures: logs why the queue is unusable, and closes the spider.
        keeps_failed: whether failed requests are kept.
        lease_secs: how long the store lets this worker keep its requests; 0: there are no leases,
            and the store answers at once.
        limits: the limits of downloads that all workers share.
        waits: whether the crawl goes on when the queue is empty.

    Raises:
        SettingError: this version of Scrapy lacks a method.

    `len` tells how many requests are pending, as far as this worker knows.

    Attributes:
        storage: "disk" or "redis", as in the stats.
        has_failed: whether the store has failed; its requests stay in it.
        is_closed: whether `close` was called.
        is_over: whether nothing is left to crawl, for all workers.
        runs_start: whether the store has this worker run start().
        rejoined: how often this worker had to join the store again.
        in_flight: the requests in flight.
        changed: rings after a reply, a failure, or the close.
    """

    def __init__(
        self,
        crawler: Crawler,
        df: BaseDupeFilter,
        store: Store,
        opened: Opened,
        failures: Failures,
        *,
        keeps_failed: bool = True,
        lease_secs: float = 0.0,
        limits: Limits | None = None,
        waits: bool = False,
    ) -> None:
        assert crawler.spider is not None
        assert crawler.stats is not None
        assert crawler.request_fingerprinter is not None
        self.has_failed = self.is_closed = self.runs_start = False
        self.is_over = opened.is_late or bool(opened.ended_at and not waits)
        self.rejoined = 0
        self.storage = "redis" if lease_secs else "disk"
        self.store = store
        self.failures = failures
        self.changed = Bell()
        # None: the limits per host are the downloader's.
        self._downloads = SharedDownloads(crawler, limits or Limits()) if lease_secs else None
        self.in_flight = InFlight(crawler)
        if self._downloads is not None:
            crawler.signals.connect(self._limit, signals.request_reached_downloader)
            crawler.signals.connect(self._look_for_more, signals.request_left_downloader)
        self._crawler = crawler
        self._engine: Any = crawler.engine
        self._spider = crawler.spider
        self._stats = crawler.stats
        self._logger = logging.LoggerAdapter(logging.getLogger(__name__), {"spider": self._spider})
        self._df = df if isinstance(df, BloomDupeFilter) else None
        self._fingerprint = fingerprint_function(crawler.request_fingerprinter)
        self._requests = StoredRequests(crawler)
        self._reachability = Reachability()
        self._keeps_failed = keeps_failed
        self._waits = waits
        self._is_late = opened.is_late  # there is nothing to do in the current run
        self._is_retired = False  # whether another run has begun since
        self._most_downloads = most = crawler.settings.getint("CONCURRENT_REQUESTS")
        self._prefetch = min(_PREFETCH, most) if most > 0 else _PREFETCH
        self._changes = Collected() if lease_secs else Collected(_MOST_CHANGES, math.inf)
        self._sent: Batch | None = None  # and not answered yet
        self._unsent: Batch | None = None  # could not be applied
        self._pending = 0  # according to the last reply
        self._ready: deque[Taken] = deque()  # in flight in the store, and not handed out yet
        self._unanswered: set[bytes] = set()  # fingerprints in batches that are not answered yet
        self._in_memory: dict[bytes, Request] = {}  # requests that cannot be stored
        self._all_known = False  # whether the last batch had only duplicates
        self._look_at = 0.0  # when to ask for requests again, on a monotonic clock
        # How long not to ask at most, and until when.
        self._ask_secs, self._ask_at = min(_ASK_SECS, lease_secs / _ASKS), math.inf
        self._wakes_at = math.inf  # when a timer calls `flush`
        self._counters: Sequence[int] | None = None  # of the last look that found nothing left
        self._progress_at = time.monotonic()
        self._logged: set[str] = set()  # kinds of warnings that were logged
        self._closed: Deferred[None] = Deferred()
        self._flush_soon = CallLaterOnce(self.flush)
        self._turn = taking_turns()
        # None: the store answers at once.
        self._thread = InThread(store, self._handle, lease_secs) if lease_secs else None
        if waits and not self._is_late:
            crawler.signals.connect(self._stay_open, signals.spider_idle)

    @property
    def is_open(self) -> bool:
        """Return whether the queue accepts changes: it has not failed, and is not closed."""
        return not (self.has_failed or self.is_closed)

    def __len__(self) -> int:
        if not self.is_open or self._is_late:
            return 0
        if self._thread is None:
            pending = self.store.pending
        else:
            pending = self._pending + (len(self._sent.entered) if self._sent is not None else 0)
        return pending + len(self._ready) + self._changes.entering

    @property
    def expects_more(self) -> bool:
        """Return whether the spider is not idle, although nothing is pending here.

        After a failure, the spider is being closed, and must not look idle and so finished.
        """
        is_over = self.is_over or self._thread is None
        return self.has_failed or not (is_over or self.is_closed)

    def is_held_back(self) -> bool:
        """Return whether pending requests wait for the limits of their hosts, or for the server.

        They count like requests that wait in the downloader, as they do under Scrapy's scheduler.
        """
        most, active = self._most_downloads, len(self._engine.downloader.active)
        return 0 < most <= active + len(self) and self._next_ready() is None

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
        if self._thread is None:
            return True
        while not self._changes.has_room and self.is_open and not is_closing(self._engine):
            await self.changed.wait(_POLL_SECS)
        if self._changes.has_room and self.is_open:
            return True
        if flight is not None:
            self.in_flight.leave(flight)
        return False

    async def offer(self) -> None:
        """Let the engine take what start() has yielded, while it downloads nothing.

        Otherwise, if start() pauses the engine, and callbacks unpause it, no callback is called.
        """
        if self._may_be_first:
            while self._may_be_first and self.is_open:
                await self.changed.wait(_POLL_SECS)
            await give_turn(self._engine)

    @property
    def _may_be_first(self) -> bool:
        """Return whether the answer to a batch may bring the only request to download."""
        can_download = self._engine.downloader.active or self._ready
        # Without the last condition, there is a round trip for each page of an earlier run.
        return bool(self._changes or self._sent) and not (can_download or self._all_known)

    # Requests that enter the queue.

    def knows(self, fingerprint: bytes, *, once: bool = False) -> bool:
        """Return whether a fingerprint is certainly recorded, or about to be."""
        key = once_in(self.store.run, fingerprint) if once else fingerprint
        return (
            key in self._unanswered
            or key in self._in_memory
            or self.store.knows(fingerprint, once=once)
        )

    def record(self, fingerprint: bytes, *, once: bool = False) -> None:
        """Record a fingerprint without a request; with `once`, for this run, too."""
        keys = [fingerprint, once_in(self.store.run, fingerprint)]
        self._record_keys(keys[: 1 + once])

    def _record_keys(self, keys: Sequence[bytes]) -> None:
        self._unanswered.update(keys)
        self._last_batch().recorded += keys

    def enqueue(self, request: Request) -> str | None:
        """Collect a request for the next batch, unless the duplicate filter has seen it.

        Return `storage`. Return "memory" if the request cannot be serialized, so that the caller
        has to keep it. Return None if it is a duplicate.
        """
        replaced = self.in_flight.replaced_by(request)
        row = replaced.taken if replaced is not None else None
        refused = self.in_flight.refused_parents(request)
        try:
            found = self._look_up(request, replaced)
        except Exception as error:  # noqa: BLE001 - no failure may lose a page
            self.failures.add(request, error)
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
                self.failures.add(request, error, "it is kept in memory")
            pages = [*keys, *(in_memory.pages if in_memory is not None else ())]
            return self._keep_in_memory(request, keys, error, refused, pages)
        if replaced is not None and row is not None:
            replaced.is_replaced = True
        for each in (*refused, *([in_memory] if in_memory is not None else [])):
            each.waits_for += 1
        self.is_over = False
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
            keys += [fingerprint, once_in(self.store.run, fingerprint)][: 1 + wishes.once]
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
        self._changes.enter(entered)
        if self._thread is None and self._changes.fills_a_batch:
            self.flush()
        else:
            self._flush_soon.schedule()

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
        if self._is_first("unserializable"):
            self._logger.warning(
                "Unable to serialize request: %(request)s - reason: %(reason)s - it is kept in "
                "memory, and if this process dies, the next one finds it again - no more "
                "unserializable requests will be logged (stats being collected)",
                {"request": request, "reason": error},
                exc_info=error if self._crawler.settings.getbool("SCHEDULER_DEBUG") else None,
            )
        for each in refused:
            each.is_taken_over = True
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

    def _last_batch(self) -> Batch:
        """Return the batch for one more change; after a failure or the close, it is never sent."""
        if not self.is_open:  # requests of a parent may have been refused
            return Batch()
        self._flush_soon.schedule()
        return self._changes.last()

    def _is_first(self, kind: str) -> bool:
        """Return whether a kind of warning was not logged yet."""
        is_first = kind not in self._logged
        self._logged.add(kind)
        return is_first

    # Batches.

    def flush(self) -> None:
        """Send a batch if it is due, unless an earlier batch has no reply yet."""
        if self._sent is not None or not self.is_open:
            return
        if self._thread is None:
            while self._changes and self.is_open:
                self._send()
            return
        now, is_low = time.monotonic(), 2 * self._wanted >= self._prefetch
        due = self._look_at if is_low else math.inf
        if self._changes.fills_a_batch or (is_low and self._changes.entering):
            due = now
        elif self._changes:
            due = min(due, self._changes.since + (_SOON_SECS if self._ready else _HUNGRY_SECS))
        due = min(due, self._ask_at)
        if due <= now:
            self._send()
        elif due < self._wakes_at:
            self._wakes_at = due
            call_later(due - now, partial(self._wake, due))

    @property
    def _wanted(self) -> int:
        """Return how many requests to prefetch; those that wait for a delay do not count."""
        assert self._downloads is not None
        if is_closing(self._engine):
            return 0
        startable = sum(not self._downloads.is_delayed(each.slot) for each in self._ready)
        room = _MOST_WAITING * self._prefetch - len(self._ready)
        return max(0, min(room, self._prefetch - startable))

    def _wake(self, due: float) -> None:
        if due == self._wakes_at:  # otherwise an earlier timer has replaced this one
            self._wakes_at = math.inf
            self.flush()

    def _send(self, want: int = 0) -> None:
        self._sent = batch = self._changes.next_batch()
        now = time.monotonic()
        self._ask_at = now + self._ask_secs
        if not (self.is_closed or (self._thread is not None and is_closing(self._engine))):
            batch.want = want if self._downloads is None else self._wanted
            batch.may_start = True
            batch.stands_still = self._stands_still()
            if self._downloads is not None:
                batch.downloads = self._downloads.with_those(self._ready)
                batch.shares, batch.own_shares = self._downloads.shares.ranges(now)
            elif want and (downloader := self._requests.downloader) is not None:
                # A store usually asks for one of them.
                batch.downloads = ActiveDownloads(downloader, self._engine.downloader.slots)
        if self._thread is None:
            batch.start_ended = not reads_start(self._engine)
            self._handle(batch, applied(self.store, batch))
        else:
            self._thread.send(batch)

    def _stands_still(self) -> bool:
        """Return whether all requests in flight wait, perhaps for a suspect."""
        if self.in_flight.is_idle and not (self._ready or self._changes.ending):
            return True
        is_late = time.monotonic() >= self._progress_at + _STANDSTILL_SECS
        return is_late and not self._engine.downloader.active

    def _handle(self, batch: Batch | None, outcome: Outcome) -> None:
        """Handle the outcome of a batch, or of closing the store."""
        if batch is None:
            self._handle_end(outcome)
            return
        was_sent, was_over = batch is self._sent, self.is_over
        if was_sent:
            self._sent = None
        if isinstance(outcome, RejoinedError):
            self._start_over(outcome, batch)
        elif isinstance(outcome, Exception):
            self._unsent = batch
            self.fail(outcome)
        elif isinstance(outcome, Reply):
            self._handle_reply(batch, outcome)
        self.changed.ring()
        if self.is_open and self._thread is not None:
            if not (was_over and self.is_over):  # a spider that is idle stays idle
                ask_scheduler(self._engine)
            if outcome is None and self._sent is None:
                self._send()
            self.flush()
        elif self.is_closed and was_sent and self._thread is not None:
            self._send_last()

    def _handle_end(self, outcome: Outcome) -> None:
        if isinstance(outcome, StorageError):
            self.failures.add_at_the_close(outcome)
        elif isinstance(outcome, Exception):
            self.fail(outcome)
        elif isinstance(outcome, Closed) and not (self._is_late or self._is_retired):
            log_end(self._logger, self.store.name, outcome)
        self._closed.callback(None)

    def _handle_reply(self, batch: Batch, reply: Reply) -> None:
        self._unanswered.difference_update(batch.recorded)
        self._all_known = bool(reply.queued) and not any(reply.queued)
        self._ready += reply.taken  # first: whatever fails, these requests are handed out
        for entered, is_queued in zip(batch.entered, reply.queued, strict=True):
            if entered.context is not None:
                self._answered(entered, is_queued=is_queued)
        if reply.added and self._df is not None:
            self._df.count_new(reply.added)
        log_reply(self._logger, self.store.name, reply)
        self._pending = reply.pending
        if batch.may_start:  # a later reply has requests for the shares before that of a heartbeat
            self._share(Membership(reply.workers, reply.rank))
        self._follow(reply)
        if len(reply.taken) < batch.want and not (reply.taken and reply.pending):
            secs = _LIMITED_SECS if reply.pending and batch.shares else _LOOK_AGAIN_SECS
            self._look_at = time.monotonic() + secs
            is_late = time.monotonic() >= self._progress_at + _STANDSTILL_SECS
            is_idle = is_late and not (self._ready or self.in_flight)
            if is_idle and reply.pending and reply.workers > 1 and self._is_first("no share"):
                log_no_share(self._logger, self.store.name, reply.workers)

    def _share(self, membership: Membership) -> None:
        """Follow a change of the shares: return requests of slots of which others have them."""
        downloads, now = self._downloads, time.monotonic()
        if downloads is None or not downloads.shares.change(membership, now):
            return
        self._look_at = 0.0
        for request in self._engine.downloader.active:
            self._limit(request)
        numbers, ready = downloads.with_those(()), self._ready
        self._ready = deque()
        for taken in ready:
            numbers[taken.slot] += 1
            if numbers[taken.slot] <= downloads.shares.of(taken.slot, now):
                self._ready.append(taken)
            else:
                self._end(Ended(taken.id, End.RETURNED))

    def _limit(self, request: Request) -> None:
        """Have the downloader keep to the share of the slot of a request.

        If a middleware has chosen another slot, as those for rotating proxies do, the request
        counts only in that one, whose limit is not shared.
        """
        assert self._downloads is not None
        slot = self.in_flight.slot_of(request)
        if slot is not None and slot == request.meta.get(Downloader.DOWNLOAD_SLOT):
            self._downloads.limit(slot)

    def _look_for_more(self) -> None:
        """Ask for requests soon, because a download has ended, and its slot may take another."""
        if self._pending:
            secs = _SOON_SECS if self._ready else _HUNGRY_SECS
            self._look_at = min(self._look_at, time.monotonic() + secs)
            self._flush_soon.schedule()
        ask_scheduler(self._engine)

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
        for each in refused:
            each.is_taken_over = each.is_taken_over or is_queued
            self.in_flight.release(each)
        if replaced is not None:
            if not is_queued and entered.fingerprint is not None:
                replaced.awaits.append(entered.fingerprint)
            self.in_flight.release(replaced)

    def _follow(self, reply: Reply) -> None:
        """Start, end or retire as the store says."""
        if (reply.is_stopped or reply.is_retired) and not self.is_closed and self._is_first("end"):
            self._logger.info(
                "This worker of the queue in %s shuts down, because %s",
                self.store.name,
                "scrapy bloom stop was run" if reply.is_stopped else "another run has begun",
            )
            close_spider_soon(self._crawler, "shutdown")
        self._is_retired = reply.is_retired
        self.runs_start = reply.runs_start
        if self._thread is None:
            return
        is_idle = not (self._ready or self._changes or self.in_flight or self._sent)
        if reply.left or not reply.is_started or reply.taken or not is_idle:
            self.is_over, self._counters = self._is_late, None
        elif reply.ended_at or self._counters == reply.counters:
            self.is_over = True
            if not (reply.ended_at or self._waits):
                self._last_batch().is_over = True
        else:
            self._counters = reply.counters
            self._look_at = time.monotonic() + _LAST_LOOK_SECS

    def _stay_open(self) -> None:
        """Keep the idle spider open, for requests that are queued later."""
        raise DontCloseSpider

    def end_start(self) -> None:
        """Report that start() has ended."""
        self._last_batch().start_ended = True

    def _start_over(self, error: RejoinedError, batch: Batch) -> None:
        """Drop the requests that this worker had taken: they are pending again, or lost.

        Requests that were found are sent to the current queue, because it may not have them.
        """
        number = len(self._ready) + len(self.in_flight) + len(batch.ended) + self._changes.ending
        self._ready.clear()
        found = (*error.lost, *batch.entered, *self._changes.entered())
        self._changes.clear()
        self._unanswered.clear()
        self._in_memory.clear()
        # Only once while closing, because a server may lose each batch.
        if not self.is_closed or self._is_first("rejoined while closing"):
            for entered in found:
                if entered.replaces is None:  # otherwise its row is pending again
                    self._enter(entered)
        self.is_over = self.runs_start = False
        self._pending = 0
        self.rejoined += 1
        self._look_at, self._counters = 0.0, None
        self._share(NO_MEMBER)
        self._logger.info(
            "This worker has rejoined the queue in %s, because its lease had expired or the server "
            "had lost it: at least %s crawled again, by this worker or another",
            self.store.name,
            counted(number, "request is", "requests are"),
        )

    # Requests that are handed out.

    def take(self) -> Request | None:
        """Return the next request, which is in flight from now on; None if there is none yet."""
        request = None
        for _ in range(_MOST_UNREADABLE):
            if not self.is_open or self._is_late:
                return None
            taken = self._next_ready()
            if taken is None and self._thread is None:
                while self._changes.fills_a_batch and self.is_open:
                    self._send()
                if self.is_open:
                    self._send(want=1)
                taken = self._next_ready()
            if taken is None:
                break
            self._ready.remove(taken)
            if (request := self._hand_out(taken)) is not None:
                break
        else:
            ask_scheduler(self._engine)
        if self._thread is not None:
            self._flush_soon.schedule()
        return request

    def _next_ready(self) -> Taken | None:
        """Return a request that may be handed out now; None if there is none yet."""
        if self._thread is None:
            return self._ready[0] if self._ready else None
        assert self._downloads is not None
        if not self._thread.has_lease:
            return None  # another worker may have taken the requests
        is_busy = self._downloads.is_busy
        return next((each for each in self._ready if not is_busy(each.slot)), None)

    def _hand_out(self, taken: Taken) -> Request | None:
        """Return a request that is in flight from now on; None if it is unreadable."""
        try:
            request = self._requests.taken(taken)
        except Exception as error:  # noqa: BLE001 - a callback that was renamed, for example
            self._set_aside(taken, error)
            return None
        self._progress_at = time.monotonic()
        self.in_flight.add(request, self._done, taken._replace(data=b""))
        return request

    def _set_aside(self, taken: Taken, error: Exception) -> None:
        self._stats.inc_value("scheduler/unreadable")
        name = type(error).__name__
        if self._is_first(f"unreadable {name}"):
            self._logger.error(
                "A request of the job cannot be deserialized, and stays in %s: %s: %s. Further "
                "requests with a %s are not logged, but counted in scheduler/unreadable",
                self.store.name,
                name,
                escaped(str(error)),
                name,
            )
        self._end(Ended(taken.id, End.UNREADABLE))

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
            self._count_failed(flight, taken)
        self._end(Ended(taken.id, end, reason, flight.awaits))
        self._check_reachability(flight, taken)

    def _end(self, ended: Ended) -> None:
        if self.is_open:  # requests that it led to may have been refused
            self._changes.end(ended)
            self._flush_soon.schedule()

    def _count_failed(self, flight: Flight, taken: Taken) -> None:
        self._stats.inc_value("scheduler/failed")
        if not self._is_first("failed"):
            return
        is_last = taken.tries + 1 >= MOST_TRIES
        self._logger.info(
            "%s has failed (%s), and is %s. Further failed requests are not logged, but counted in "
            "scheduler/failed; `scrapy bloom queue --failed` shows them",
            escaped(flight.url),
            escaped(flight.reason),
            f"not tried again, because it has failed in {MOST_TRIES} runs"
            if is_last
            else "kept for the next run",
        )

    def _check_reachability(self, flight: Flight, taken: Taken) -> None:
        """Close the spider if nothing can be downloaded, before all requests have failed."""
        reachability = self._reachability
        if flight.has_response:
            reachability.add_response(taken.slot)
        elif flight.reason and flight.has_response is False and not taken.tries:
            reachability.add_failure(taken.slot)
            if reachability.is_lost and self._keeps_failed and self._is_first("unreachable"):
                self._logger.error(
                    "The last %d downloads failed without a response, the last one with %s. The "
                    "spider is closed (reason bloom_unreachable), so that not all requests fail: "
                    "check name resolution, network and proxies, and start the crawl again",
                    MOST_UNREACHABLE,
                    escaped(flight.reason),
                )
                close_spider_soon(self._crawler, "bloom_unreachable")

    # The end of the crawl in this process.

    def close(self, *, is_finished: bool) -> Deferred[None]:
        """Send the collected changes, and close the store.

        Args:
            is_finished: whether the crawl has ended, because nothing is left.
        """
        self.in_flight.end_replaced()
        self._flush_soon.cancel()
        if self._thread is None:
            self._close_at_once(is_finished=is_finished)
            return self._closed
        self.is_closed = True  # from now on, nothing is collected
        self.changed.ring()
        if self._sent is None:
            if self.is_over or self.has_failed:
                self._send_last()
            else:  # even if empty: the reply tells whether the server has lost earlier batches
                self._send()
        return self._closed

    def _close_at_once(self, *, is_finished: bool) -> None:
        if self.has_failed:  # a full disk may have space again; if not, the error is logged already
            if self._unsent is not None:
                self._changes.put_back(self._unsent)
            self.has_failed = False
        self.flush()
        if is_finished and not self._is_late:
            self._last_batch().is_over = True  # after everything else has left the queue
            self.flush()
        self.is_closed = True
        self._leave()

    def _send_last(self) -> None:
        """Send the next batch of the collected changes, or close the store if there is none."""
        if self._changes and not self.has_failed:
            self._send()
        else:
            self._leave()

    def _leave(self) -> None:
        """Close the store."""
        if self._thread is None:
            self._handle_end(closed(self.store))
        else:
            self._thread.leave()

    def fail(self, error: Exception) -> None:
        """Close the spider, because the store cannot be used."""
        self.has_failed = True
        if self._is_first("failure"):
            self.failures.close_for_queue(error, self.store.name)
            self.changed.ring()

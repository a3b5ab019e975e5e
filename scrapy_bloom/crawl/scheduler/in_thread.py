"""The driver for a store that waits for a server, which several workers share.

Batches are sent one at a time, and requests are prefetched, so that taking one needs no round trip.
"""

import math
import sys
import threading
import time
from collections import deque
from functools import partial
from queue import Empty, SimpleQueue

from scrapy import Request, signals
from scrapy.core.downloader import Downloader
from scrapy.crawler import Crawler
from scrapy.exceptions import DontCloseSpider
from scrapy.utils.asyncio import call_later
from twisted.internet.defer import Deferred

from scrapy_bloom.crawl.engine import Bell, ask_scheduler, give_turn, is_closing, loop_caller
from scrapy_bloom.crawl.scheduler.downloads import SharedDownloads, limits_of
from scrapy_bloom.crawl.scheduler.driver import Driver, Listener
from scrapy_bloom.crawl.scheduler.order import serves_least_busy_slot
from scrapy_bloom.queues.collected import Collected
from scrapy_bloom.queues.shares import NO_MEMBER, Limits, Membership
from scrapy_bloom.queues.store import (
    Batch,
    End,
    Ended,
    Opened,
    QueueStatus,
    RejoinedError,
    Reply,
    Store,
    Taken,
)
from scrapy_bloom.settings import BloomSettings

_SOON_SECS = 0.03  # until an incomplete batch is sent
_HUNGRY_SECS = 0.003  # the same if no request is prefetched
_LOOK_AGAIN_SECS = 0.25  # until the next batch if no request was pending
_LIMITED_SECS = 0.1  # the same if requests were pending, but none of a host with a free share
_ASK_SECS = 0.5  # until the next batch, so that the worker soon knows of a change of its shares
_ASKS = 4  # of these batches per lease, at least
_PREFETCH = 16  # most requests held
_MOST_WAITING = 4  # times the prefetch: most requests held, if their slots wait for a delay
_LAST_LOOK_SECS = 0.05  # until the second look, which finds the crawl ended
_POLL_SECS = 0.5
_HEARTBEATS = 4  # per lease
_LONGEST_SHARE_SECS = 60.0


class InThread(Driver):
    """Calls a store in a thread: for a server, which takes a while to answer."""

    storage = "redis"

    def __init__(
        self, crawler: Crawler, store: Store, opened: Opened, settings: BloomSettings
    ) -> None:
        super().__init__(crawler, store, Collected())
        # Whether the crawl goes on when the queue is empty.
        self._waits = settings.queue_when_empty == "wait"
        # Whether nothing is left to crawl, for all workers.
        self.is_over = opened.is_late or bool(opened.ended_at and not self._waits)
        self.runs_start = False  # whether the store has this worker run start()
        self.rejoined = 0  # how often this worker had to join the store again
        self.changed = Bell()  # rings after a reply, a failure, or the close
        self._crawler = crawler
        self._lease_secs = settings.queue_lease_secs
        self._is_late = opened.is_late  # there is nothing to do in the current run
        is_limited = settings.shared_limits and serves_least_busy_slot(crawler)
        self._downloads = SharedDownloads(crawler, limits_of(crawler) if is_limited else Limits())
        self._most_downloads = most = crawler.settings.getint("CONCURRENT_REQUESTS")
        self._prefetch = min(_PREFETCH, most) if most > 0 else _PREFETCH
        self._sent: Batch | None = None  # and not answered yet
        self._last_pending = 0  # according to the last reply
        self._all_known = False  # whether the last batch had only duplicates
        self._look_at = 0.0  # when to ask for requests again, on a monotonic clock
        # How long not to ask at most, and until when.
        self._ask_secs, self._ask_at = min(_ASK_SECS, self._lease_secs / _ASKS), math.inf
        self._wakes_at = math.inf  # when a timer calls `flush`
        self._counters: tuple[int, int] | None = None  # of the last look that found nothing left
        self._closed: Deferred[QueueStatus | None] = Deferred()
        self._sender: _Sender

    def begin(self, queue: Listener) -> None:
        """Begin to work for a queue, and to send heartbeats."""
        super().begin(queue)
        connect = self._crawler.signals.connect
        connect(self._limit, signals.request_reached_downloader)
        connect(self._look_for_more, signals.request_left_downloader)
        if self._waits and not self._is_late:
            connect(self._stay_open, signals.spider_idle)
        self._sender = _Sender(self, self.store, self._lease_secs)

    def _stay_open(self) -> None:
        """Keep the idle spider open, for requests that are queued later."""
        raise DontCloseSpider

    @property
    def _pending(self) -> int:
        return self._last_pending + (len(self._sent.entered) if self._sent is not None else 0)

    @property
    def expects_more(self) -> bool:
        """Return whether other workers may queue requests, although nothing is pending here."""
        return not (self.is_over or self._queue.is_closed)

    # Pacing.

    def is_held_back(self) -> bool:
        """Return whether pending requests wait for the limits of their hosts, or for the server.

        They count like requests that wait in the downloader, as they do under Scrapy's scheduler.
        """
        most, active = self._most_downloads, len(self._engine.downloader.active)
        return 0 < most <= active + len(self._queue) and self._next_ready() is None

    async def wait_for_room(self) -> bool:
        """Wait until more changes can be collected; return False if there will be no room."""
        while not self.changes.has_room and self._queue.is_open and not is_closing(self._engine):
            await self.changed.wait(_POLL_SECS)
        return self.changes.has_room and self._queue.is_open

    async def offer(self) -> None:
        """Let the engine take what start() has yielded, while it downloads nothing.

        Otherwise, if start() pauses the engine, and callbacks unpause it, no callback is called.
        """
        while self._may_be_first and self._queue.is_open:
            await self.changed.wait(_POLL_SECS)
        if self._ready and not self._engine.downloader.active:
            await give_turn(self._engine)

    @property
    def _may_be_first(self) -> bool:
        """Return whether the answer to a batch may bring the only request to download."""
        can_download = self._engine.downloader.active or self._ready
        # Without the last condition, there is a round trip for each page of an earlier run.
        return bool(self.changes or self._sent) and not (can_download or self._all_known)

    # Changes, which are sent in batches.

    def flush_soon(self) -> None:
        """Send a batch at the end of this turn of the event loop, if it is due then."""
        self.is_over = self.is_over and not self.changes.entering
        super().flush_soon()

    def end_start(self) -> None:
        """Report that start() has ended."""
        if self._queue.is_open:
            self.changes.last().start_ended = True
            self.flush_soon()

    def flush(self) -> None:
        """Send a batch if it is due, unless an earlier batch has no reply yet."""
        if self._sent is not None or not self._queue.is_open:
            return
        now, is_low = time.monotonic(), 2 * self._wanted >= self._prefetch
        due = self._look_at if is_low else math.inf
        if self.changes.fills_a_batch or (is_low and self.changes.entering):
            due = now
        elif self.changes:
            due = min(due, self.changes.since + (_SOON_SECS if self._ready else _HUNGRY_SECS))
        due = min(due, self._ask_at)
        if due <= now:
            self._send()
        elif due < self._wakes_at:
            self._wakes_at = due
            call_later(due - now, partial(self._wake, due))

    def _wake(self, due: float) -> None:
        if due == self._wakes_at:  # otherwise an earlier timer has replaced this one
            self._wakes_at = math.inf
            self.flush()

    @property
    def _wanted(self) -> int:
        """Return how many requests to prefetch; those that wait for a delay do not count."""
        if is_closing(self._engine):
            return 0
        startable = sum(not self._downloads.is_delayed(taken.slot) for taken in self._ready)
        room = _MOST_WAITING * self._prefetch - len(self._ready)
        return max(0, min(room, self._prefetch - startable))

    def _send(self) -> None:
        self._sent = batch = self.changes.next_batch()
        now, queue = time.monotonic(), self._queue
        self._ask_at = now + self._ask_secs
        if not (queue.is_closed or is_closing(self._engine)):
            has_more = bool(self._ready or self.changes.ending)
            batch.want = self._wanted
            batch.may_start = True
            batch.stands_still = queue.stands_still(has_more=has_more)
            batch.downloads = self._downloads.with_those(self._ready)
            batch.shares, batch.own_shares = self._downloads.shares.ranges(now)
        self._sender.outbox.put(batch)

    def _look_for_more(self) -> None:
        """Ask for requests soon, because a download has ended, and its slot may take another."""
        if self._last_pending:
            secs = _SOON_SECS if self._ready else _HUNGRY_SECS
            self._look_at = min(self._look_at, time.monotonic() + secs)
            self._next_flush.schedule()
        ask_scheduler(self._engine)

    # Outcomes of batches, and of heartbeats, which the sender reports in the event loop.

    def on_reply(self, batch: Batch, reply: Reply) -> None:
        """Handle the reply to a batch or a heartbeat."""
        was_sent, was_over = self._end_of(batch), self.is_over
        self._all_known = bool(reply.queued) and not any(reply.queued)
        self._ready += reply.taken  # first: whatever fails, these requests are handed out
        self._queue.on_reply(batch, reply)
        self._last_pending = reply.pending
        if batch.may_start:  # a later reply has requests for the shares before that of a heartbeat
            self._share(Membership(reply.workers, reply.rank))
        self.runs_start = reply.runs_start
        self._look_for_the_end(reply)
        if len(reply.taken) < batch.want and not (reply.taken and reply.pending):
            secs = _LIMITED_SECS if reply.pending and batch.shares else _LOOK_AGAIN_SECS
            self._look_at = time.monotonic() + secs
            if reply.pending and reply.workers > 1 and not self._ready:
                self._queue.log_no_share(reply.workers)
        self._go_on(was_sent=was_sent, was_over=was_over)

    def on_rejoined(self, batch: Batch, error: RejoinedError) -> None:
        """Drop the requests that this worker had taken: they are pending again, or lost.

        Requests that were found are sent to the current queue, because it may not have them.
        """
        was_sent, queue = self._end_of(batch), self._queue
        number = len(self._ready) + len(batch.ended) + self.changes.ending
        self._ready.clear()
        found = (*error.lost, *batch.entered, *self.changes.entered())
        self.changes.clear()
        queue.on_rejoined(number, found)
        self.is_over = self.runs_start = False
        self._last_pending = 0
        self.rejoined += 1
        self._look_at, self._counters = 0.0, None
        self._share(NO_MEMBER)
        self._go_on(was_sent=was_sent)

    def on_heartbeat_rejoined(self) -> None:
        """Send a batch, which is not applied, but answered by what a heartbeat has found."""
        if self._queue.is_open and self._sent is None:
            self._send()

    def on_failure(self, batch: Batch, error: Exception) -> None:
        """Handle the failure of a batch or a heartbeat."""
        was_sent = self._end_of(batch)
        self._queue.fail(error)
        self._go_on(was_sent=was_sent)

    def on_closed(self, outcome: QueueStatus | Exception | None) -> None:
        """Report that the store is closed."""
        if isinstance(outcome, Exception):
            self._closed.errback(outcome)
        else:
            self._closed.callback(outcome)

    def _end_of(self, batch: Batch) -> bool:
        """Note that a batch has an outcome; return whether it is no heartbeat."""
        was_sent = batch is self._sent
        if was_sent:
            self._sent = None
        return was_sent

    def _go_on(self, *, was_sent: bool, was_over: bool = False) -> None:
        self.changed.ring()
        if self._queue.is_open:
            if not (was_over and self.is_over):  # a spider that is idle stays idle
                ask_scheduler(self._engine)
            self.flush()
        elif self._queue.is_closed and was_sent:
            self._send_last()

    def _look_for_the_end(self, reply: Reply) -> None:
        """Find out whether nothing is left, in two consecutive looks with the same counters."""
        is_idle = not (self._ready or self.changes or self._queue.in_flight or self._sent)
        if reply.left or not reply.is_started or reply.taken or not is_idle:
            self.is_over, self._counters = self._is_late, None
        elif reply.ended_at or self._counters == reply.counters:
            self.is_over = True
            if not (reply.ended_at or self._waits) and self._queue.is_open:
                self.changes.last().is_over = True
                self.flush_soon()
        else:
            self._counters = reply.counters
            self._look_at = time.monotonic() + _LAST_LOOK_SECS

    # Requests that are handed out.

    def take(self) -> Taken | None:
        """Return the next request that may be handed out now; None if there is none yet."""
        if (taken := self._next_ready()) is not None:
            self._ready.remove(taken)
        self._next_flush.schedule()
        return taken

    def _next_ready(self) -> Taken | None:
        if not self._sender.has_lease:
            return None  # another worker may have taken the requests
        is_busy = self._downloads.is_busy
        return next((taken for taken in self._ready if not is_busy(taken.slot)), None)

    def _share(self, membership: Membership) -> None:
        """Follow a change of the shares: return requests of slots of which others have them."""
        downloads, now = self._downloads, time.monotonic()
        if not downloads.shares.change(membership, now):
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
            elif self._queue.is_open:
                self.changes.end(Ended(taken.id, End.RETURNED))
                self.flush_soon()

    def _limit(self, request: Request) -> None:
        """Have the downloader keep to the share of the slot of a request.

        If a middleware has chosen another slot, as those for rotating proxies do, the request
        counts only in that one, whose limit is not shared.
        """
        slot = self._queue.in_flight.slot_of(request)
        if slot is not None and slot == request.meta.get(Downloader.DOWNLOAD_SLOT):
            self._downloads.limit(slot)

    # The end.

    def close(self, *, is_finished: bool) -> "Deferred[QueueStatus | None]":  # noqa: ARG002 - two looks tell it
        """Send the collected changes, and close the store."""
        self._next_flush.cancel()
        self._queue.is_closed = True  # from now on, nothing is collected
        self.changed.ring()
        if self._sent is None:
            if self.is_over or self._queue.has_failed:
                self._send_last()
            else:  # even if empty: the reply tells whether the server has lost earlier batches
                self._send()
        return self._closed

    def _send_last(self) -> None:
        """Send the next batch of the collected changes, or close the store if there is none."""
        if self.changes and not self._queue.has_failed:
            self._send()
        else:
            self._sender.outbox.put(None)


class _Sender:
    """A thread that applies batches, and reports their outcomes to a driver in the event loop.

    It also applies an empty batch a few times per lease, because the event loop may not run while a
    callback computes. If that finds that the worker had to rejoin, the next batch is not applied.
    """

    def __init__(self, driver: "InThread", store: Store, lease_secs: float) -> None:
        self._leased_until = _clock() + lease_secs
        self._shares_until = 0.0
        self._driver = driver
        self._store = store
        self._lease_secs = lease_secs
        self._rejoined: RejoinedError | None = None  # to be reported
        self._call_in_loop = loop_caller()
        # Batches to be applied; None: close the store, and end the thread.
        self.outbox: SimpleQueue[Batch | None] = SimpleQueue()
        threading.Thread(target=self._run, name="scrapy_bloom sender", daemon=True).start()

    @property
    def has_lease(self) -> bool:
        """Return whether no other worker can have got the requests or the shares of this one."""
        return _clock() < min(self._leased_until, self._shares_until)

    def _run(self) -> None:
        while True:
            try:
                wait = None if self._rejoined else self._lease_secs / _HEARTBEATS
                batch = self.outbox.get(timeout=wait)
            except Empty:
                self._send_heartbeat()
                continue
            if batch is None:
                break
            outcome, self._rejoined = self._rejoined or self._renewed(batch), None
            self._report(batch, outcome)
        closed: QueueStatus | Exception | None
        try:
            closed = self._store.close()
        except Exception as error:  # noqa: BLE001 - the queue logs it
            closed = error
        self._call_in_loop(partial(self._driver.on_closed, closed))

    def _send_heartbeat(self) -> None:
        batch = Batch()
        outcome = self._renewed(batch)
        if isinstance(outcome, RejoinedError):
            self._rejoined = outcome
            self._call_in_loop(self._driver.on_heartbeat_rejoined)
        else:
            self._report(batch, outcome)

    def _report(self, batch: Batch, outcome: Reply | Exception) -> None:
        driver = self._driver
        if isinstance(outcome, Reply):
            self._call_in_loop(partial(driver.on_reply, batch, outcome))
        elif isinstance(outcome, RejoinedError):
            self._call_in_loop(partial(driver.on_rejoined, batch, outcome))
        else:
            self._call_in_loop(partial(driver.on_failure, batch, outcome))

    def _renewed(self, batch: Batch) -> Reply | Exception:
        """Apply a batch, which renews the lease; return the error if that failed."""
        sent_at = _clock()
        try:
            reply = self._store.apply(batch)
        except Exception as error:  # noqa: BLE001 - the queue closes the spider
            return error
        self._leased_until = sent_at + self._lease_secs
        if batch.may_start:  # not a heartbeat
            self._shares_until = _clock() + min(self._lease_secs, _LONGEST_SHARE_SECS) / 2
        return reply


def _clock() -> float:
    """Return the time in seconds, on a clock that goes on while the machine is suspended."""
    if sys.platform == "win32":
        return time.monotonic()
    # Linux's CLOCK_MONOTONIC stands still then, unlike that of macOS.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))

"""The queue of a crawl in Redis, which several workers share, and its driver, with a thread.

Batches are sent one at a time, and requests are prefetched, so that taking one needs no round trip.
The workers run the spider's start() once per run.
"""

import math
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, cast

from scrapy import Request, signals
from scrapy.core.downloader import Downloader
from scrapy.crawler import Crawler
from scrapy.exceptions import DontCloseSpider
from scrapy.utils.asyncio import call_later
from scrapy.utils.defer import deferred_from_coro
from twisted.internet.defer import Deferred

from scrapy_bloom.crawl.dupefilter import BloomDupeFilter
from scrapy_bloom.crawl.engine import (
    Bell,
    MayGoOn,
    ask_scheduler,
    count_downloads_at_once,
    give_turn,
    hold_back,
    is_closing,
    loop_caller,
    mark,
    paced,
    read_start_again,
    reads_start,
    replace_start,
)
from scrapy_bloom.crawl.scheduler.in_flight import Flight
from scrapy_bloom.crawl.scheduler.queue import CrawlQueue, Driver
from scrapy_bloom.crawl.scheduler.stored_requests import serves_least_busy_slot
from scrapy_bloom.crawl.telemetry import Failures
from scrapy_bloom.queues.collected import Collected
from scrapy_bloom.queues.shares import NO_MEMBER, Limit, Limits, Membership, Shares
from scrapy_bloom.queues.store import (
    ANY_NUMBER,
    Batch,
    End,
    Ended,
    Joining,
    Opened,
    QueueStatus,
    RejoinedError,
    Reply,
    Store,
    Taken,
)
from scrapy_bloom.redis.backend import RedisBackend
from scrapy_bloom.redis.server import RedisServer
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


def open_in_redis(
    crawler: Crawler, df: BloomDupeFilter, settings: BloomSettings, memory: Any
) -> CrawlQueue:
    """Open the queue in Redis that belongs to a filter; raises BloomError."""
    from scrapy_bloom.queues.redis_store import RedisStore  # noqa: PLC0415 - half a MB, which only crawls with Redis need

    assert crawler.spider is not None
    backend = cast(RedisBackend, df.backend)
    store = RedisStore(backend, lease_secs=settings.queue_lease_secs)
    joining = Joining(crawler.spider.name, settings.run, keeps_failed=settings.keep_failed)
    opened = store.open(joining)
    driver = InThread(crawler, store, opened, df.failures, server=backend.server, settings=settings)
    queue = CrawlQueue(crawler, df, driver, opened, settings=settings, memory=memory)
    replace_start(crawler.engine, partial(_run_start, crawler, driver))
    deferred_from_coro(_run_start_again(crawler, driver, queue.may_go_on))
    hold_back(crawler.engine, lambda: not len(memory) and driver.is_held_back())
    return queue


class InThread(Driver):
    """Calls a store in a thread: for a server, which takes a while to answer."""

    storage = "redis"

    def __init__(
        self,
        crawler: Crawler,
        store: Store,
        opened: Opened,
        failures: Failures,
        *,
        server: RedisServer,
        settings: BloomSettings,
    ) -> None:
        super().__init__(crawler, store, failures, Collected(), opened)
        # Whether the crawl goes on when the queue is empty.
        self._waits = settings.queue_when_empty == "wait"
        # Whether nothing is left to crawl, for all workers.
        self.is_over = self.is_late or bool(opened.ended_at and not self._waits)
        self.start_flight: Flight | None = None  # start(), if this worker has begun it
        self.last_reply = Reply()
        self.changed = Bell()  # rings after a reply, a failure, or the close
        self._server = server
        self._most_secs = min(_ASK_SECS, settings.queue_lease_secs / _ASKS)  # between two batches
        is_limited = settings.shared_limits and serves_least_busy_slot(crawler)
        self._downloads = _SharedDownloads(
            self._engine, _limits_of(crawler) if is_limited else Limits()
        )
        self._most_downloads = most = crawler.settings.getint("CONCURRENT_REQUESTS")
        self._prefetch = min(_PREFETCH, most) if most > 0 else _PREFETCH
        self._sent: Batch | None = None  # and not answered yet
        # On a monotonic clock: when to ask for requests if few are prefetched, and in any case.
        self._look_at = self._ask_at = 0.0
        self._timer: Any = None  # calls `flush`
        self._counters: tuple[int, int] | None = None  # of the last look that found nothing left
        self._sender = _Sender(self, store, settings.queue_lease_secs)
        connect = crawler.signals.connect
        connect(self._limit, signals.request_reached_downloader)
        connect(self._look_for_more, signals.request_left_downloader)
        if self._waits and not self.is_late:
            connect(self._stay_open, signals.spider_idle)

    @property
    def _pending(self) -> int:
        return self.last_reply.pending + (len(self._sent.entered) if self._sent is not None else 0)

    def flush(self) -> None:
        if self._sent is not None or not self.is_open:
            return
        now, is_low = time.monotonic(), 2 * self._wanted >= self._prefetch
        due = min(self._ask_at, self._look_at if is_low else math.inf)
        if self.changes.fills_a_batch or (is_low and self.changes.entering):
            due = now
        elif self.changes:
            due = min(due, self.changes.since + (_SOON_SECS if self.ready else _HUNGRY_SECS))
        if self._timer is not None:
            self._timer.cancel()
        if due <= now:
            self._send()
        else:
            self._timer = call_later(due - now, self.flush)

    @property
    def _wanted(self) -> int:
        """Return how many requests to prefetch; those that wait for a delay do not count."""
        if is_closing(self._engine):
            return 0
        startable = sum(not self._downloads.is_delayed(taken.slot) for taken in self.ready)
        room = _MOST_WAITING * self._prefetch - len(self.ready)
        return max(0, min(room, self._prefetch - startable))

    def _look_for_more(self) -> None:
        """Ask for requests soon, because a download has ended, and its slot may take another."""
        if self.last_reply.pending:
            secs = _SOON_SECS if self.ready else _HUNGRY_SECS
            self._look_at = min(self._look_at, time.monotonic() + secs)
            self._next_flush.schedule()
        ask_scheduler(self._engine)

    def is_held_back(self) -> bool:
        """Return whether pending requests wait for the limits of their hosts, or for the server.

        They count like requests that wait in the downloader, as they do under Scrapy's scheduler.
        """
        most, active = self._most_downloads, len(self._engine.downloader.active)
        return 0 < most <= active + len(self) and self._next_ready() is None

    async def wait_for_room(self) -> bool:
        while not self.changes.has_room and self.is_open and not is_closing(self._engine):
            await self.changed.wait(_POLL_SECS)
        return self.changes.has_room and self.is_open

    async def offer(self) -> None:
        """Let the engine take what start() has yielded, while it downloads nothing.

        Otherwise, if start() pauses the engine, and callbacks unpause it, no callback is called.
        """
        active = self._engine.downloader.active
        while (self.changes or self._sent) and self.is_open and not (active or self.ready):
            if self.last_reply.queued and not any(self.last_reply.queued):
                return  # otherwise, there would be a round trip for each page of an earlier run
            await self.changed.wait(_POLL_SECS)
        if self.ready and not active:
            await give_turn(self._engine)

    def _send(self) -> None:
        self._sent = batch = self.changes.next_batch()
        now = time.monotonic()
        self._ask_at = now + self._most_secs
        if not (self.is_closed or is_closing(self._engine)):
            batch.want = self._wanted
            batch.may_start = True
            batch.stands_still = self.in_flight.stands_still
            batch.downloads = self._downloads.with_those(self.ready)
            batch.shares = self._downloads.shares.ranges(now)
        self._sender.outbox.put(batch)

    @property
    def has_to_start(self) -> bool:
        """Return whether this worker has to run start(), and has not begun it."""
        return self.is_open and self.last_reply.runs_start and self.start_flight is None

    def end_start(self, _: Flight) -> None:
        """Collect the end of start(): all requests that it has yielded are stored."""
        if self.is_open:
            self.changes.last().start_ended = True
            self.flush_soon()

    def on_outcome(self, batch: Batch, outcome: Reply | Exception) -> None:
        """Handle the reply to a batch or a heartbeat, or its failure."""
        was_over = self.is_over and not batch.entered
        is_heartbeat = batch is not self._sent
        if not is_heartbeat:
            self._sent = None
        if isinstance(outcome, Reply):
            self._on_reply(batch, outcome)
        elif isinstance(outcome, RejoinedError):
            self._on_rejoined(batch, outcome)
        else:
            self.fail(outcome)
        self.changed.ring()
        if self.is_open:
            if not (was_over and self.is_over):  # a spider that is idle stays idle
                ask_scheduler(self._engine)
            self.flush()
        elif self.is_closed and not is_heartbeat:
            self._send_last()

    def _on_reply(self, batch: Batch, reply: Reply) -> None:
        self.last_reply = reply
        self.ready += reply.taken  # first: whatever fails, these requests are handed out
        self.queue.on_reply(batch, reply)
        if batch.may_start:  # a later reply has requests for the shares before that of a heartbeat
            self._share(Membership(reply.workers, reply.rank))
        self._look_for_the_end(reply)
        if len(reply.taken) < batch.want and not (reply.taken and reply.pending):
            secs = _LIMITED_SECS if reply.pending and batch.shares else _LOOK_AGAIN_SECS
            self._look_at = time.monotonic() + secs

    def _on_rejoined(self, batch: Batch, error: RejoinedError) -> None:
        """Drop the requests that were taken, and send those again that the queue may lack."""
        number = len(self.ready) + len(batch.ended) + self.changes.ending
        entered = [*error.lost, *batch.entered, *self.changes.clear()]
        self.last_reply = Reply()
        self.ready.clear()
        self.queue.on_rejoined(number, entered)
        self.is_over = False
        if self.start_flight is not None:  # it is run again, by this worker or another
            self.in_flight.remove(self.start_flight)
            self.start_flight = None
        self._look_at, self._counters = 0.0, None
        self._share(NO_MEMBER)

    def take(self) -> Taken | None:
        if (taken := self._next_ready()) is not None:
            self.ready.remove(taken)
        self._next_flush.schedule()
        return taken

    def _next_ready(self) -> Taken | None:
        if not self._sender.has_lease:
            return None  # another worker may have taken the requests
        is_busy = self._downloads.is_busy
        return next((taken for taken in self.ready if not is_busy(taken.slot)), None)

    def _share(self, membership: Membership) -> None:
        """Follow a change of the shares: return requests of slots of which others have them."""
        downloads, now = self._downloads, time.monotonic()
        if not downloads.shares.change(membership, now):
            return
        self._look_at = 0.0
        for request in self._engine.downloader.active:
            self._limit(request)
        numbers, ready = downloads.with_those(()), self.ready
        self.ready = deque()
        for taken in ready:
            numbers[taken.slot] += 1
            if numbers[taken.slot] <= downloads.shares.of(taken.slot, now):
                self.ready.append(taken)
            else:
                self.end(Ended(taken.id, End.RETURNED))

    def _limit(self, request: Request) -> None:
        """Have the downloader keep to the share of the slot of a request."""
        # A request for which a middleware has chosen another slot counts only in that one.
        slot = self.in_flight.slot_of(request)
        if slot is not None and slot == request.meta.get(Downloader.DOWNLOAD_SLOT):
            self._downloads.limit(slot)

    @property
    def expects_more(self) -> bool:
        return not (self.is_over or self.is_closed)

    def _stay_open(self) -> None:
        """Keep the idle spider open, for requests that are queued later."""
        raise DontCloseSpider

    def _look_for_the_end(self, reply: Reply) -> None:
        """Find out whether nothing is left, in two consecutive looks with the same counters."""
        if reply.unfinished or not reply.is_started or self.changes or self._sent or self.in_flight:
            self.is_over, self._counters = self.is_late, None
        elif reply.ended_at or self._counters == reply.counters:
            self.is_over = True
            if not (reply.ended_at or self._waits) and self.is_open:
                self.changes.last().is_over = True
                self.flush_soon()
        else:
            self._counters = reply.counters
            self._look_at = time.monotonic() + _LAST_LOOK_SECS

    def close(self, *, is_finished: bool) -> "Deferred[QueueStatus | None]":  # noqa: ARG002 - two looks tell it
        self._server.shorten_deadline()  # the thread may be waiting for it
        self.is_closed = True
        self.changed.ring()
        if self._sent is None:
            if self.is_over or self.has_failed:
                self._send_last()
            else:  # even if empty: the reply tells whether the server has lost earlier batches
                self._send()
        return self._sender.closed

    def _send_last(self) -> None:
        """Send the next batch of the collected changes, or close the store if there is none."""
        if self.changes and not self.has_failed:
            self._send()
        else:
            self._sender.outbox.put(None)


async def _run_start(
    crawler: Crawler, driver: InThread, start: AsyncIterator[Any] | None
) -> AsyncIterator[Any]:
    """Yield nothing until the crawl has ended, or this worker has to run start()."""
    engine: Any = crawler.engine
    while driver.is_open and not driver.is_over:
        if not driver.has_to_start:
            await driver.changed.wait(_POLL_SECS)
            ask_scheduler(engine)
            continue
        flight = driver.in_flight.add(Request("data:,start()"), driver.end_start)
        driver.start_flight = flight
        try:
            # After the server has lost the queue, start() is called again.
            items, start = start or await engine.scraper.spidermw.process_start(), None
            async for element in items:
                if flight is not driver.start_flight:
                    break
                driver.in_flight.led_to(flight, element)
                yield element
                await driver.offer()
        except Exception:  # as under Scrapy's scheduler, start() ends with an error
            if engine.running:  # otherwise, Twisted's reactor has cancelled it
                driver.in_flight.end(flight)
            raise
        # While the crawl is being closed, requests that start() yields may be dropped.
        if engine.running:
            driver.in_flight.end(flight)


async def _run_start_again(crawler: Crawler, driver: InThread, may_go_on: MayGoOn) -> None:
    """Have the engine read start() once more, if it has ended here and has to be run again."""
    engine: Any = crawler.engine
    while driver.is_open:
        await driver.changed.wait(_POLL_SECS)
        if driver.has_to_start and not reads_start(engine):
            # Otherwise, the loop that has read the former start() may read this one, too.
            await give_turn(engine)
            read_start_again(engine, paced(_run_start(crawler, driver, None), mark, may_go_on))


class _Sender:
    """A thread that applies batches, and reports their outcomes to a driver in the event loop."""

    def __init__(self, driver: InThread, store: Store, lease_secs: float) -> None:
        # Batches to be applied; None: close the store, and end the thread.
        self.outbox: SimpleQueue[Batch | None] = SimpleQueue()
        self.closed: Deferred[QueueStatus | None] = Deferred()
        self._driver = driver
        self._store = store
        self._lease_secs = lease_secs
        self._valid_until = 0.0
        self._call_in_loop = loop_caller()
        threading.Thread(target=self._run, name="scrapy_bloom sender", daemon=True).start()

    @property
    def has_lease(self) -> bool:
        """Return whether no other worker can have got the requests or the shares of this one."""
        return _clock() < self._valid_until

    def _run(self) -> None:
        while True:
            try:
                batch = self.outbox.get(timeout=self._lease_secs / _HEARTBEATS)
            except Empty:  # a callback may compute for long
                batch = Batch()
            if batch is None:
                break
            sent_at = _clock()
            outcome: Reply | Exception
            try:
                outcome = self._store.apply(batch)
            except Exception as error:  # noqa: BLE001 - the queue closes the spider
                outcome = error
            else:
                if batch.may_start:  # not a heartbeat, whose reply changes no shares
                    shares_until = _clock() + min(self._lease_secs, _LONGEST_SHARE_SECS) / 2
                    self._valid_until = min(sent_at + self._lease_secs, shares_until)
            self._call_in_loop(partial(self._driver.on_outcome, batch, outcome))
        try:
            self._call_in_loop(partial(self.closed.callback, self._store.close()))
        except Exception as error:  # noqa: BLE001 - the queue logs it
            self._call_in_loop(partial(self.closed.errback, error))


class _SharedDownloads:
    """The downloads of this worker, which has a share of the limit of each slot."""

    # A request counts while Scrapy's downloader has it, not while it is in a middleware.

    def __init__(self, engine: Any, limits: Limits) -> None:
        self.shares = Shares(limits)
        self._downloader: Downloader = engine.downloader
        count_downloads_at_once(engine)

    def is_busy(self, name: str) -> bool:
        """Return whether a request of a slot would have to wait in the downloader."""
        share = self.shares.of(name, time.monotonic())
        return share <= self._number(name) or self.is_delayed(name)

    def is_delayed(self, name: str) -> bool:
        """Return whether requests of a slot wait in the downloader for its delay."""
        slot = self._downloader.slots.get(name)
        return slot is not None and bool(slot.delay and slot.queue)

    def _number(self, name: Any) -> int:
        slot = self._downloader.slots.get(name)
        return len(slot.queue) + len(slot.transferring) if slot is not None else 0

    def with_those(self, taken: Iterable[Taken]) -> Counter[str]:
        """Return how many requests each slot has: downloads, and some that were taken."""
        numbers = Counter(request.slot for request in taken)
        active = self._downloader.active
        for name in {request.meta.get(Downloader.DOWNLOAD_SLOT) for request in active}:
            numbers[str(name)] += self._number(name)
        return +numbers

    def limit(self, name: str) -> None:
        """Have the downloader keep to the share of a slot, if it has one of that name."""
        share, slot = self.shares.of(name, time.monotonic()), self._downloader.slots.get(name)
        if slot is not None and share < ANY_NUMBER:
            slot.concurrency = max(1, share)  # 0 would keep requests that it has already


def _limits_of(crawler: Crawler) -> Limits:
    """Return the limits that Scrapy's settings and the spider set for each slot."""
    settings, spider = crawler.settings, crawler.spider
    # With CONCURRENT_REQUESTS_PER_IP, Scrapy refuses the priority queue that tells hosts apart.
    usual = settings.getint("CONCURRENT_REQUESTS_PER_DOMAIN")
    usual = getattr(spider, "max_concurrent_requests", usual)
    delay = getattr(spider, "download_delay", settings.getfloat("DOWNLOAD_DELAY")) or 0.0
    # AutoThrottle changes the delay of the worker that has the slot.
    adapts = settings.getbool("AUTOTHROTTLE_ENABLED")
    least = max(settings.getfloat("AUTOTHROTTLE_START_DELAY"), 1.0) if adapts else 0.0

    def limit(own: dict[str, Any]) -> Limit:
        return Limit(int(own.get("concurrency", usual)), max(own.get("delay", delay), least))

    slots = settings.getdict("DOWNLOAD_SLOTS")
    return Limits(limit({}), {slot: limit(own) for slot, own in slots.items()})


def _clock() -> float:
    """Return the time in seconds, on a clock that goes on while the machine is suspended."""
    if sys.platform == "win32":
        return time.monotonic()
    # Linux's CLOCK_MONOTONIC stands still then, unlike that of macOS.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))

"""The scheduler's queue of a worker in a crawl whose queue is shared in Redis."""

import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

from scrapy import Request, signals
from scrapy.crawler import Crawler
from scrapy.utils.asyncio import call_later
from twisted.internet.defer import Deferred

from scrapy_bloom.crawl.dupefilter import BloomDupeFilter
from scrapy_bloom.crawl.engine import (
    Bell,
    ask_scheduler,
    close_spider_soon,
    is_closing,
    read_start_again,
    reads_start,
    replace_start,
    start_again,
)
from scrapy_bloom.crawl.scheduler.in_flight import Flight
from scrapy_bloom.crawl.scheduler.safe_queue import SafeQueue
from scrapy_bloom.crawl.scheduler.worker import BatchOutcome, BatchSender, join_queue
from scrapy_bloom.generations.forgotten import MemoryForgotten
from scrapy_bloom.queues.batch import Found, Taken
from scrapy_bloom.queues.collected import Collected, SharedBatch
from scrapy_bloom.queues.shared import RejoinedError, Reply
from scrapy_bloom.redis.backend import RedisBackend
from scrapy_bloom.text import counted, escaped

_MOST_PREFETCHED = 16
_SOON_SECS = 0.03  # until an incomplete batch is sent
_HUNGRY_SECS = 0.003  # until an incomplete batch is sent, if no request is prefetched
_LOOK_AGAIN_SECS = 0.25  # until the next batch if no request was pending
_LIMITED_SECS = 0.1  # the same if there are pending requests, but all hosts are at their limit
_MOST_WAITING = 4  # times _prefetch: most requests held, if their slots wait for a delay
_LAST_LOOK_SECS = 0.05  # until the second look, which finds the crawl ended
_POLL_SECS = 0.5


class SharedQueue(SafeQueue):
    """The queue of a worker, in Redis.

    The output of callbacks is collected in batches, and a thread sends one batch at a time. The
    replies bring further requests. So the event loop never waits for the server.

    Args:
        crawler: the crawler of the worker.
        df: the duplicate filter, whose settings are used, and whose fingerprints batches record.

    Raises:
        BloomError: the server cannot be used, or has the queue of another spider.
    """

    storage = "redis"

    def __init__(self, crawler: Crawler, df: BloomDupeFilter) -> None:
        settings = df.settings
        assert isinstance(df.backend, RedisBackend)
        self._backend = backend = df.backend
        self._store = store = join_queue(crawler, settings, backend)
        super().__init__(crawler, store.name, df.failures)
        self._df = df
        self._waits = settings.queue_when_empty == "wait"
        most = crawler.settings.getint("CONCURRENT_REQUESTS")
        self._prefetch = min(_MOST_PREFETCHED, max(most, 1))
        self._changes = Collected()
        self._sent: SharedBatch | None = None  # and not answered yet
        self._ready: deque[Taken] = deque()  # leased to this worker, and not handed out yet
        self._downloading: Counter[str] = Counter()  # handed out and not downloaded, by slot
        self._unanswered: set[bytes] = set()  # fingerprints in batches that are not answered yet
        self._in_memory: dict[bytes, Request] = {}  # requests that cannot be stored
        self._fingerprint: bytes | None = None  # of the request that the filter is checking
        self._look_at = 0.0  # when to ask for requests again, on a monotonic clock
        self._wakes_at = math.inf  # when a timer calls `flush`
        self._counters: Sequence[int] | None = None  # of the last look that found nothing left
        self._is_over = bool(store.ended_at) and not self._waits
        self._runs_start = False  # whether the queue has this worker run start()
        self._start_run: Flight | None = None  # in flight while start() runs; kept afterwards
        self._changed = Bell()  # rings after a reply, a failure, or the close
        self._closed: Deferred[None] = Deferred()
        backend.collect = self._collect
        backend.forgotten.use(_ForgottenInBatches(self._forget))
        replace_start(crawler.engine, self._start)
        lease_secs = settings.queue_lease_secs
        self._sender = BatchSender(store, backend, lease_secs, self._handle)

    def __len__(self) -> int:
        if not self.is_open:
            return 0
        return len(self._ready) or int(not self._is_over)

    # Requests that were found, and requests that are done.

    def _collect(self, fingerprint: bytes) -> bool:
        """Return whether a fingerprint is new to this worker, and keep it for its request."""
        if (
            fingerprint in self._unanswered
            or fingerprint in self._in_memory
            or self._backend.knows(fingerprint)
        ):
            return False
        self._fingerprint = fingerprint
        return True

    def enqueue(self, request: Request) -> str | None:
        """Add a request to the next batch, unless it is a duplicate; return where it is kept."""
        self._fingerprint = None
        if not request.dont_filter and self._df.request_seen(request):
            return None
        fingerprint = self._fingerprint
        is_recorded = bool(request.meta.get("bloom_record", True))
        found = self._serialized(
            request,
            fingerprint,
            is_filtered=not is_recorded or request.meta.get("bloom_filter", True) is True,
            is_recorded=is_recorded,
            # Spider middlewares set one of these keys in what callbacks and start() yield.
            has_parent="depth" in request.meta or "is_start_request" in request.meta,
        )
        if found is None:
            if fingerprint is not None:
                self._in_memory[fingerprint] = request
            self.in_flight.keep_in_memory(request, partial(self._record, fingerprint, request))
            return "memory"
        self._is_over = False
        self._add_found(found)
        self._flush_soon.schedule()
        return self.storage

    def _add_found(self, found: Found) -> None:
        if found.fingerprint is not None:
            self._unanswered.add(found.fingerprint)
        self._changes.add_found(found)

    def _record(self, fingerprint: bytes | None, request: Request) -> None:
        """Record the fingerprint of a request that was kept in memory, and is done."""
        # Since the worker has rejoined the queue, the requests that it led to may be lost.
        if fingerprint is not None and self._in_memory.get(fingerprint) is request:
            del self._in_memory[fingerprint]
            self._unanswered.add(fingerprint)
            self._last_batch().recorded.append(fingerprint)

    def _forget(self, fingerprints: Sequence[bytes]) -> None:
        for each in fingerprints:
            self._last_batch().forgotten.append(each)

    def _collect_done(self, row: bytes) -> None:
        self._last_batch().done.append(row)

    def _last_batch(self) -> SharedBatch:
        """Return the batch for one more change; after a failure or the close, it is never sent."""
        if not self.is_open:  # requests of a parent may have been refused
            return SharedBatch()
        self._flush_soon.schedule()
        return self._changes.last()

    async def may_go_on(self, flight: Flight | None) -> bool:
        """Wait until there is room for more output of a request; while closing, return False."""
        await self._turn()
        while not self._changes.has_room and self.is_open and not is_closing(self._engine):
            await self._changed.wait(_POLL_SECS)
        if self._changes.has_room and self.is_open:
            return True
        if flight is not None:
            self.in_flight.leave(flight)
        return False

    # Batches.

    def flush(self) -> None:
        """Send a batch if it is due, unless an earlier batch has no reply yet."""
        if self._sent is not None or not self.is_open:
            return
        now, changes = time.monotonic(), self._changes.batches
        is_low = 2 * self._startable() <= self._prefetch
        due = self._look_at if is_low else math.inf
        if self._changes.fills_a_batch or (is_low and any(each.found for each in changes)):
            due = now
        elif changes:
            due = min(due, changes[0].made_at + (_SOON_SECS if self._ready else _HUNGRY_SECS))
        if due <= now:
            self._send()
        elif due < self._wakes_at:
            self._wakes_at = due
            call_later(due - now, partial(self._wake, due))

    def _wake(self, due: float) -> None:
        if due == self._wakes_at:  # otherwise an earlier timer has replaced this one
            self._wakes_at = math.inf
            self.flush()

    def _send(self) -> None:
        self._sent = batch = self._changes.next_batch()
        if not self.is_closed:
            room = _MOST_WAITING * self._prefetch - len(self._ready)
            batch.want = max(0, min(room, self._prefetch - self._startable()))
            batch.may_start = True
            batch.stands_still = self._stands_still()
            if self._downloader is not None:
                slots = self._engine.downloader.slots
                batch.downloads = {str(slot): n for slot in slots if (n := self._downloads(slot))}
        self._sender.send(batch)

    def _handle(self, batch: SharedBatch | None, outcome: BatchOutcome) -> None:
        """Handle the outcome of a batch, or of leaving the queue."""
        if batch is None:
            self._handle_end(outcome)
            return
        if was_sent := batch is self._sent:
            self._sent = None
        if isinstance(outcome, RejoinedError):
            self._start_over(outcome, batch)
        elif isinstance(outcome, Exception):
            self._fail(outcome)
        elif isinstance(outcome, Reply):
            self._handle_reply(batch, outcome)
        self._changed.ring()
        if self.is_closed and was_sent:
            self._send_last()
        elif self.is_open:
            ask_scheduler(self._engine)
            if outcome is None and self._sent is None:
                self._send()
            self.flush()

    def _handle_reply(self, batch: SharedBatch, reply: Reply) -> None:
        self._backend.forgotten.show(reply.forgotten)
        self._handle_answers(batch, reply)
        self._handle_state(reply)
        if len(reply.taken) < batch.want and not (reply.taken and reply.pending):
            secs = _LIMITED_SECS if reply.pending else _LOOK_AGAIN_SECS
            self._look_at = time.monotonic() + secs
        self._ready += reply.taken

    def _handle_answers(self, batch: SharedBatch, reply: Reply) -> None:
        self._unanswered.difference_update(batch.recorded)
        for found, is_queued in zip(batch.found, reply.queued, strict=True):
            if found.fingerprint is not None:
                self._unanswered.discard(found.fingerprint)
            if found.request is not None and not is_queued:
                self._was_duplicate(found)

    def _was_duplicate(self, found: Found) -> None:
        """Count and signal a request that the server has not queued, as Scrapy does."""
        self._stats.inc_value(f"scheduler/enqueued/{self.storage}", -1)
        self._stats.inc_value("scheduler/enqueued", -1)
        if found.fingerprint is not None:
            self._df.was_duplicate()
        self._df.log(found.request, self._spider)
        self._crawler.signals.send_catch_log(
            signal=signals.request_dropped, request=found.request, spider=self._spider
        )

    def _handle_state(self, reply: Reply) -> None:
        for data in reply.died:
            self._log_dead(data, "workers")
        for name, number in reply.expired.items():
            self._logger.info(
                "The lease of the worker %s of the queue in %s has expired without a heartbeat: %s "
                "pending again",
                escaped(name),
                self._store_name,
                counted(number, "request is", "requests are"),
            )
        if reply.is_stopped and not self.is_closed:
            self._logger.info(
                "This worker of the queue in %s shuts down, because scrapy bloom stop was run",
                self._store_name,
            )
            close_spider_soon(self._crawler, "shutdown")
        self._runs_start = reply.runs_start
        if self._begins_start() and not self.is_closed and not reads_start(self._engine):
            read_start_again(self._engine, self._start(None), partial(self.may_go_on, None))
        is_idle = not (self._ready or self._changes or self.in_flight or self._sent)
        if self._waits or reply.left or not reply.is_started or reply.taken or not is_idle:
            self._counters = None
        elif reply.ended_at or self._counters == reply.counters:
            self._is_over = True
            if not reply.ended_at:
                self._last_batch().is_over = True
        else:
            self._counters = reply.counters
            self._look_at = time.monotonic() + _LAST_LOOK_SECS

    def _start_over(self, error: RejoinedError, batch: SharedBatch) -> None:
        """Drop the requests that this worker had taken: they are pending again, or lost.

        Requests that were found are sent to the current queue, because it may not have them.
        """
        number = len(self._ready) + len(self.in_flight)
        self._ready.clear()
        if self._start_run is not None:  # start() is run again, by this worker or another
            self.in_flight.leave(self._start_run)
            self._start_run = None
        unsent = [*batch.found, *self._changes.found()]
        self._changes = Collected()
        self._unanswered.clear()
        self._in_memory.clear()
        for found in (*error.lost, *unsent):
            self._add_found(found)
        self._is_over = self._runs_start = False
        self._look_at, self._counters = 0.0, None
        self._logger.info(
            "This worker has rejoined the queue in %s, because its lease had expired or the server "
            "had lost it: %s crawled again, by this worker or another",
            self._store_name,
            counted(number, "request is", "requests are"),
        )

    # Requests that are handed out.

    def take(self) -> Request | None:
        """Return the next request that may be downloaded; None: there is none yet."""
        request = None
        while request is None and self._ready and self.is_open:
            if time.monotonic() >= self._sender.leased_until:
                break  # another worker may have taken the request
            taken = next((each for each in self._ready if not self._is_busy(each.slot)), None)
            if taken is None:
                break
            self._ready.remove(taken)
            request = self._hand_out(taken, partial(self._downloaded, taken))
            if request is not None:
                self._downloading[taken.slot] += 1
        self._flush_soon.schedule()
        return request

    def _set_aside(self, taken: Taken) -> None:
        self._last_batch().set_aside.append(taken.id)
        self._release(taken, 0.0)

    def _is_busy(self, slot: str) -> bool:
        """Return whether a request of a slot would have to wait in the downloader.

        Scrapy counts a download only when it has begun, and so begins too many with asyncio.
        """
        if 0 < self._store.limits.of(slot).concurrency <= self._downloading[slot]:
            return True
        return self._waits_for_delay(slot)

    def _waits_for_delay(self, slot: str) -> bool:
        found = self._engine.downloader.slots.get(slot)
        return bool(found and found.delay and found.queue)

    def _startable(self) -> int:
        return sum(not self._waits_for_delay(each.slot) for each in self._ready)

    def _downloaded(self, taken: Taken) -> None:
        self._downloading[taken.slot] -= 1
        if not self._downloading[taken.slot]:
            del self._downloading[taken.slot]
        found = self._engine.downloader.slots.get(taken.slot)
        self._release(taken, found.delay if found else 0.0)

    def _release(self, taken: Taken, pause: float) -> None:
        if any(self._store.limits.of(taken.slot)):
            self._last_batch().downloaded.append((taken.id, taken.slot, pause))

    # The spider's start(), which one worker at a time runs.

    def _begins_start(self) -> bool:
        """Return whether this worker has to run start(), and has not begun to do so."""
        return self._runs_start and self._start_run is None

    async def _start(self, start: AsyncIterator[Any] | None) -> AsyncIterator[Any]:
        """Replace start() until the crawl has ended: run it if the queue has this worker do so."""
        while self.is_open and not self._is_over:
            if not self._begins_start():
                await self._changed.wait(_POLL_SECS)
                ask_scheduler(self._engine)
                continue
            this_run = self.in_flight.add(Request("data:,start()"), self._end_start)
            self._start_run = this_run
            # After the server has lost the queue, start() is called again.
            items, start = start or await start_again(self._crawler), None
            try:
                async for each in items:
                    if this_run is not self._start_run:
                        break
                    if isinstance(each, Request):
                        self.in_flight.led_to(this_run, each)
                    yield each
            except Exception:  # as under Scrapy's scheduler, start() ends with an error
                self.in_flight.end(this_run)
                raise
            # While the crawl is being closed, requests that start() yields may be dropped.
            if self._engine.running:
                self.in_flight.end(this_run)

    def _end_start(self) -> None:
        self._last_batch().start_ended = True

    # The end of the worker.

    def close(self) -> Deferred[None]:
        """Send the collected changes, and leave the queue."""
        self.in_flight.end_replaced()
        self._flush_soon.cancel()
        self.is_closed = True  # from now on, nothing is collected
        self._backend.server.shorten_deadline()
        self._changed.ring()
        if self._sent is None:
            if self._is_over or self.has_failed:
                self._send_last()
            else:  # even if empty: the reply tells whether the server has lost earlier batches
                self._send()
        return self._closed

    def _send_last(self) -> None:
        """Send the next batch of the collected changes, or leave the queue if there is none."""
        if self._changes and not self.has_failed:
            self._send()
        else:
            self._sender.leave()

    def _fail(self, error: Exception) -> None:
        if not self.has_failed:
            super()._fail(error)
            self._changed.ring()

    def _handle_end(self, outcome: BatchOutcome) -> None:
        if isinstance(outcome, Exception):
            self._fail(outcome)
        elif not (self._store.others or self._store.ended_at):
            self._logger.info(
                "The crawl of the queue in %s is unfinished, and no worker is left; pending "
                "requests: %s. Run the same command again to resume it",
                self._store_name,
                f"{self._store.pending:,}",
            )
        self._closed.callback(None)


class _ForgottenInBatches(MemoryForgotten):
    """Puts fingerprints to be forgotten into batches; the replies bring those of other workers."""

    def __init__(self, forget: Callable[[Sequence[bytes]], None]) -> None:
        super().__init__()
        self._forget = forget

    def add(self, fingerprints: Sequence[bytes]) -> None:
        """Add fingerprints to the next batch."""
        self._forget(fingerprints)

    def has(self, fingerprint: bytes) -> bool:  # noqa: ARG002 - the script of the batch decides
        """Return whether a fingerprint may be in the set."""
        return True

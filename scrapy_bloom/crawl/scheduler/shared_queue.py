"""The scheduler's queue of a worker in a crawl whose queue is shared in Redis."""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast
from weakref import WeakSet

from scrapy import Request, signals
from scrapy.crawler import Crawler
from twisted.internet.defer import Deferred

from scrapy_bloom.crawl.dupefilter import BloomDupeFilter
from scrapy_bloom.crawl.engine import (
    Bell,
    ask_scheduler,
    call_later,
    close_spider_soon,
    is_closing,
    listen,
    loop_caller,
    read_start_again,
    replace_start,
    start_again,
)
from scrapy_bloom.crawl.scheduler.collected import (
    Collected,
    Entry,
    Kept,
    Parcel,
    QueuedForgotten,
    is_queued,
)
from scrapy_bloom.crawl.scheduler.safe_queue import (
    STANDSTILL_SECS,
    SafeQueue,
    limits_of,
    serves_least_busy_slot,
)
from scrapy_bloom.queues.batch import Found, Taken
from scrapy_bloom.queues.shared import BEYOND_LIMIT, RejoinedError, Reply, SharedStore
from scrapy_bloom.queues.shared_state import requeue
from scrapy_bloom.redis.backend import RedisBackend
from scrapy_bloom.redis.filter import OtherFilterError
from scrapy_bloom.text import counted, escaped

logger = logging.getLogger(__name__)

_MOST_PREFETCHED = 16
_SOON_SECS = 0.03  # until an incomplete batch is sent
_HUNGRY_SECS = 0.003  # until an incomplete batch is sent, if no request is prefetched
_LOOK_AGAIN_SECS = 0.25  # until the next batch if no request was pending
_LIMITED_SECS = 0.1  # until the next batch if limits allowed no pending request
_MOST_WAITING = 4  # requests of slots with a delay may be prefetched: so many times the others
_LAST_LOOK_SECS = 0.05  # until the second look, which finds the crawl ended
_POLL_SECS = 0.5
_RENEWALS = 4  # heartbeats per lease


def join_crawl(crawler: Crawler, df: BloomDupeFilter) -> "SharedQueue":
    """Join the workers of the queue in Redis, and return the queue of this worker.

    Raises a BloomError if the server cannot be used, or has the queue of another spider.
    """
    assert crawler.spider is not None
    extra, settings = {"spider": crawler.spider}, df.settings
    backend = cast("RedisBackend", df.backend)
    by_slot = serves_least_busy_slot(crawler)
    is_limited = settings.shared_limits and by_slot and len(backend.shards) == 1
    store = SharedStore(
        backend.shards,
        crawler.spider.name,
        by_slot=by_slot,
        lease_secs=settings.queue_lease_secs,
        limits=limits_of(crawler) if is_limited else None,
        most_of_slot=settings.max_pages_per_slot,
    )
    try:
        store.join()
        if settings.redis_flush and store.ended_at and not (store.others or store.aside):
            # The last worker of an ended crawl died before it could remove the queue.
            backend.clear()
            backend.join()
            store.join()
    except OtherFilterError as error:  # the server was emptied after the filter was joined
        store.rejoin(backend, error)
    _log_joined(store, extra, waits=settings.queue_when_empty == "wait")
    if settings.shared_limits:
        _log_limits(store, extra, is_limited=is_limited)
    return SharedQueue(crawler, store, df=df, backend=backend)


def _log_joined(store: SharedStore, extra: Mapping[str, Any], *, waits: bool) -> None:
    if waits:
        logger.info(
            "The workers of the queue in %s stay open when it is empty (BLOOM_QUEUE_WHEN_EMPTY "
            'is "wait"). To end them, run `scrapy bloom stop`, or press Ctrl-C; pending '
            "requests: %s",
            store.name,
            f"{store.pending:,}",
            extra=extra,
        )
    elif store.ended_at and (store.others or not store.aside):
        logger.info(
            "The crawl of the queue in %s ended at %s, so this worker has nothing to do. To crawl "
            "again, set another BLOOM_REDIS_KEY, or run `scrapy bloom reset` first (with --queue, "
            "it keeps the filter)",
            store.name,
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(store.ended_at)),
            extra=extra,
        )
    elif store.pending:
        logger.info(
            "Joining the crawl of the queue in %s: pending requests: %s",
            store.name,
            f"{store.pending:,}",
            extra=extra,
        )


def _log_limits(store: SharedStore, extra: Mapping[str, Any], *, is_limited: bool) -> None:
    if is_limited:
        logger.info(
            "The limits of downloads per host (CONCURRENT_REQUESTS_PER_DOMAIN, DOWNLOAD_DELAY, "
            "DOWNLOAD_SLOTS) apply to all workers of the queue in %s together "
            "(BLOOM_SHARED_LIMITS)",
            store.name,
            extra=extra,
        )
    else:
        why = (
            f"it has {len(store.shards)} shards"
            if len(store.shards) > 1
            else "SCHEDULER_PRIORITY_QUEUE is not "
            '"scrapy.pqueues.DownloaderAwarePriorityQueue", which tells hosts apart'
        )
        logger.warning(
            "The limits of downloads per host apply to each worker of the queue in %s separately, "
            "because %s, so each further worker adds to the load of a host. Set "
            "CONCURRENT_REQUESTS_PER_DOMAIN and DOWNLOAD_DELAY for the number of workers, and "
            "BLOOM_SHARED_LIMITS = False",
            store.name,
            why,
            extra=extra,
        )


class SharedQueue(SafeQueue):
    """The queue of a worker, in Redis.

    The output of callbacks is collected in batches, and a thread sends one batch at a time. The
    replies bring further requests. So the event loop never waits for the server.

    Args:
        crawler: the crawler of the worker.
        store: the store, which the worker has joined.
        df: the duplicate filter, whose settings are used, and whose fingerprints batches record.
        backend: the backend of the duplicate filter.
    """

    place = "redis"

    def __init__(
        self,
        crawler: Crawler,
        store: SharedStore,
        *,
        df: BloomDupeFilter,
        backend: RedisBackend,
    ) -> None:
        max_pages = df.settings.max_pages_per_slot
        super().__init__(crawler, store.name, df.failures, max_pages=max_pages)
        self._shared = store
        self._df = df
        self._backend = backend
        self._lease_secs = lease_secs = df.settings.queue_lease_secs
        self._flush = df.settings.redis_flush  # the last worker removes an ended queue
        self._waits = df.settings.queue_when_empty == "wait"
        most = crawler.settings.getint("CONCURRENT_REQUESTS")
        self._prefetch = min(_MOST_PREFETCHED, max(most, 1))
        self._changes = Collected()
        self._sent: Parcel | None = None  # and not answered yet
        self._ready: deque[Taken] = deque()  # leased to this worker, and not handed out yet
        self._unanswered: set[bytes] = set()  # fingerprints in batches that are not answered yet
        self._in_memory: set[bytes] = set()  # fingerprints of requests that cannot be stored
        self._fingerprints: list[bytes] = []  # of the request that the filter is checking
        self._has_parent: WeakSet[Request] = WeakSet()
        self._kept = Kept(len(store.shards))
        self._era = 0  # how often the worker has rejoined, as known in the event loop
        self._thread_era = 0  # the same, as known in the thread
        self._send_at = self._look_at = 0.0  # on a monotonic clock
        self._timers: set[float] = set()
        self._progress_at = time.monotonic()
        self._leased_until = time.monotonic() + lease_secs
        self._counters: tuple[int, ...] | None = None  # of the last look that found nothing left
        self._may_start, self._runs_start, self._started_in = True, False, -1
        self._requeues = bool(store.aside and not store.others)
        self._is_over = bool(store.ended_at) and not self._requeues and not self._waits
        self._reads_start = True
        self._is_closing = self._is_broken = False
        self._changed = Bell()  # rings after a reply, a failure, or the close
        self._closed: Deferred[None] = Deferred()
        backend.collect = self._collect
        self._forgotten = QueuedForgotten(
            backend.server,
            [each.key for each in backend.shards],
            partial(self._collect_change, "forgotten"),
            self._forgets(),
        )
        backend.forgotten.use(self._forgotten)
        listen(crawler.engine, fetching=lambda _: self.yielded)
        replace_start(crawler.engine, self._start)
        self._courier = _Courier(self._exchange, self._delivered, lease_secs / _RENEWALS)

    def __len__(self) -> int:
        if self.has_failed:
            return 0
        return len(self._ready) + self._changes.found or int(not self._is_over)

    # Requests that were found, and requests that are done.

    def _collect(self, fingerprint: bytes) -> bool:
        """Return whether a fingerprint is new to this worker, and keep it for its request."""
        if (
            fingerprint in self._unanswered
            or fingerprint in self._in_memory
            or self._backend.knows(fingerprint)
        ):
            return False
        self._fingerprints.append(fingerprint)
        return True

    def yielded(self, each: Any) -> None:
        """Remember that a request has a parent: a callback, start(), or a replaced request."""
        if isinstance(each, Request):
            self._has_parent.add(each)

    def enqueue(self, request: Request) -> str | None:
        """Add a request to the next batch, unless it is a duplicate; return where it is kept."""
        self._fingerprints = []
        if not request.dont_filter and self._df.request_seen(request):
            return None
        fingerprints = self._fingerprints[-1:]
        found = self._serialized(request, *fingerprints)
        if found is None:
            self._in_memory.update(fingerprints)
            record = partial(self._record, self._era, fingerprints)
            self._in_flight.keep_in_memory(request, record)
            return "memory"
        kind = "n"
        if not request.meta.get("bloom_record", True):
            kind = "?"
        elif request.meta.get("bloom_filter", True) is not True:
            kind = "u"
        found = found._replace(kind=kind)
        self._unanswered.update(fingerprints)
        self._is_over = False
        self._changes.add_found(Entry(found, request, request in self._has_parent))
        self._flush_soon.schedule()
        return self.place

    def _record(self, era: int, fingerprints: Sequence[bytes]) -> None:
        """Record the fingerprint of a request that was kept in memory, and is done."""
        self._in_memory.difference_update(fingerprints)
        if era == self._era:  # otherwise the requests that it led to may be lost
            self._unanswered.update(fingerprints)
            for each in fingerprints:
                self._collect_change("recorded", each)

    def _done(self, row: bytes) -> None:
        self._progress_at = time.monotonic()
        self._collect_change("done", row)

    def _collect_change(self, name: str, each: Any) -> None:
        if not self.has_failed:  # after a failure, requests of a parent may have been refused
            self._changes.add(name, each)
            self._flush_soon.schedule()

    async def may_go_on(self, request: Request | None) -> bool:
        """Wait until there is room for more output of a request; while closing, return False."""
        await self._turn()
        while not self._changes.has_room and not self.has_failed and not is_closing(self._engine):
            await self._changed.wait(_POLL_SECS)
        if self._changes.has_room and not self.has_failed:
            return True
        if request is not None:
            self._in_flight.leave(request)
        return False

    # Batches.

    def flush(self) -> None:
        """Send a batch if it is due, unless an earlier batch has no reply yet."""
        if self._sent is not None or self.has_failed:
            return
        now, changes = time.monotonic(), self._changes
        is_low = 2 * self._startable() <= self._prefetch
        if changes and not self._send_at:
            self._send_at = now + (_SOON_SECS if self._ready else _HUNGRY_SECS)
        if (
            changes.fills_a_batch
            or (changes and now >= self._send_at)
            or (is_low and (changes.found or now >= self._look_at))
        ):
            self._send()
            return
        if changes:
            self._flush_at(self._send_at)
        if is_low:
            self._flush_at(self._look_at)

    def _flush_at(self, when: float) -> None:
        if when in self._timers:
            return

        def flush() -> None:
            self._timers.discard(when)
            self.flush()

        self._timers.add(when)
        call_later(max(0.0, when - time.monotonic()), flush)

    def _send(self) -> None:
        batch = self._changes.parcel()
        self._send_at = time.monotonic() if self._changes else 0.0
        batch.era = self._era
        if not self._is_closing:
            room = _MOST_WAITING * self._prefetch - len(self._ready)
            batch.want = max(0, min(room, self._prefetch - self._startable()))
            batch.may_start = self._may_start
            batch.stands_still = (
                not self._engine.downloader.active
                and time.monotonic() >= self._progress_at + STANDSTILL_SECS
            )
            if self._downloader is not None:
                slots = self._engine.downloader.slots
                batch.downloads = {str(slot): n for slot in slots if (n := self._downloads(slot))}
        self._sent = batch
        self._courier.send(batch)

    def _forgets(self) -> int:
        return sum(each.forgets for each in self._backend.shards)

    def _exchange(self, batch: Parcel) -> Reply | Exception | None:
        """Send a batch, in a thread; return the reply, or the error."""
        shared, backend = self._shared, self._backend
        try:
            if batch.is_last:
                shared.leave()
                return None
            if batch.era != self._thread_era:  # the requests that these led to may be lost
                batch.recorded, batch.start_ended = [], False
            if self._requeues:
                requeue(backend.server, backend.key, "aside")
                self._requeues = False
            batch.sent_at = time.monotonic()
            try:
                reply = shared.apply(batch)
                self._kept.add(batch, reply)
                backend.keep_up()
            except RejoinedError as error:
                batch.lost = self._kept.lost(error.last_known)
                self._thread_era += 1
                return error
            self._forgotten.read_news(self._forgets())
        except OtherFilterError as error:
            try:
                shared.rejoin(backend, error)
            except Exception as failure:  # noqa: BLE001 - the thread must go on
                return failure
            batch.lost = self._kept.start_over()
            self._thread_era += 1
            return RejoinedError(shared.name)
        except Exception as error:  # noqa: BLE001 - the event loop closes the spider
            return error
        return reply

    def _delivered(self, batch: Parcel, outcome: Reply | Exception | None) -> None:
        """Process the outcome of a batch, in the event loop."""
        if batch.is_last:
            self._has_left(outcome)
            return
        was_sent = batch is self._sent
        if was_sent:
            self._sent = None
        if isinstance(outcome, RejoinedError):
            self._start_over([*batch.lost, *batch.entries])
        elif isinstance(outcome, Exception):
            if not self._is_broken:
                self._fail(outcome)
        elif outcome is not None:
            self._leased_until = batch.sent_at + self._lease_secs
            self._handle_answers(batch, outcome)
            self._handle_state(outcome)
            if len(outcome.taken) < batch.want and not (outcome.taken and outcome.pending):
                self._look_at = time.monotonic() + (
                    _LIMITED_SECS if outcome.pending else _LOOK_AGAIN_SECS
                )
            self._ready += outcome.taken
        self._changed.ring()
        if self._is_closing and was_sent:
            self._send_last()
        elif not self.has_failed:
            ask_scheduler(self._engine)
            self.flush()

    def _handle_answers(self, batch: Parcel, reply: Reply) -> None:
        self._unanswered.difference_update(batch.recorded)
        for index, entry in enumerate(batch.entries):
            if entry.found.fingerprint is not None:
                self._unanswered.discard(entry.found.fingerprint)
            if entry.request is not None and not is_queued(entry, reply, index):
                is_beyond = reply.answers[index] == BEYOND_LIMIT
                self._was_refused(entry.request, entry.found, is_beyond_limit=is_beyond)

    def _was_refused(self, request: Request, found: Found, *, is_beyond_limit: bool) -> None:
        """Count and signal a request that the server has not queued, as Scrapy does."""
        self._stats.inc_value(f"scheduler/enqueued/{self.place}", -1)
        self._stats.inc_value("scheduler/enqueued", -1)
        if found.fingerprint is not None:
            self._df.was_duplicate()
        if is_beyond_limit:
            self._count_beyond_limit(found.slot)
        else:
            self._df.log(request, self._spider)
        self._crawler.signals.send_catch_log(
            signal=signals.request_dropped, request=request, spider=self._spider
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
        if reply.is_stopped and not self._is_closing:
            self._logger.info(
                "This worker of the queue in %s shuts down, because scrapy bloom stop was run",
                self._store_name,
            )
            close_spider_soon(self._crawler, "shutdown")
        self._may_start = not reply.is_started
        self._runs_start = reply.runs_start and self._started_in != self._era
        if self._runs_start and not self._reads_start and not self._is_closing:
            self._reads_start = True
            read_start_again(self._engine, self._start(None), self.may_go_on, self.yielded)
        is_idle = not (self._ready or self._changes or self._in_flight or self._sent)
        if self._waits or reply.left or not reply.is_started or reply.taken or not is_idle:
            self._counters = None
        elif reply.ended_at or self._counters == reply.counters:
            self._is_over = True
            if not reply.ended_at:
                self._collect_change("is_over", True)
        else:
            self._counters = reply.counters
            self._look_at = time.monotonic() + _LAST_LOOK_SECS

    def _start_over(self, unsent: Sequence[Entry]) -> None:
        """Drop the requests that this worker had taken: they are pending again, or lost.

        Requests that were found are sent to the current queue, because it may not have them.
        """
        self._era += 1
        number = len(self._ready) + len(self._in_flight)
        self._ready.clear()
        entries = [*unsent, *self._changes.entries]
        self._changes = Collected(entries)
        if self._sent is not None:  # the thread is sending it to the current queue
            entries += self._sent.entries
        found = (entry.found.fingerprint for entry in entries)
        self._unanswered = {fingerprint for fingerprint in found if fingerprint is not None}
        self._is_over = False
        self._send_at = self._look_at = 0.0
        self._counters, self._may_start, self._runs_start = None, True, False
        self._leased_until = time.monotonic() + self._lease_secs
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
        while request is None and self._ready and not self.has_failed and not self._is_closing:
            if time.monotonic() >= self._leased_until:
                break  # another worker may have taken the request
            taken = self._next_ready()
            if taken is None:
                break
            try:
                request = self.deserialized(taken.data)
            except Exception as error:  # noqa: BLE001 - a callback that was renamed, for example
                self._log_unreadable(error)
                self._collect_change("set_aside", taken.id)
                self._release(taken, 0.0)
            else:
                self._progress_at = time.monotonic()
                self._hand_out(request, taken.slot, taken)
        self._flush_soon.schedule()
        return request

    def _next_ready(self) -> Taken | None:
        for index, each in enumerate(self._ready):
            if not self._is_closed(each.slot):
                del self._ready[index]
                return each
        return None

    def _startable(self) -> int:
        return sum(not self._waits_for_delay(each.slot) for each in self._ready)

    def _downloaded(self, slot: str, taken: Taken) -> None:
        super()._downloaded(slot, taken)
        found = self._engine.downloader.slots.get(slot)
        self._release(taken, found.delay if found else 0.0)

    def _release(self, taken: Taken, pause: float) -> None:
        if any(self._shared.limits.of(taken.slot)):
            self._collect_change("downloaded", (taken.id, taken.slot, pause))

    # The spider's start(), which one worker at a time runs.

    async def _start(self, start: AsyncIterator[Any] | None) -> AsyncIterator[Any]:
        """Replace start() until the crawl has ended: run it if the queue has this worker do so."""
        try:
            while not (self._is_closing or self.has_failed or self._is_over):
                if not self._runs_start:
                    await self._changed.wait(_POLL_SECS)
                    ask_scheduler(self._engine)
                    continue
                era, self._runs_start = self._era, False
                self._started_in = era
                stands_for = Request("data:,start()")
                self._in_flight.add(stands_for, partial(self._start_done, era))
                # After the server has lost the queue, start() is called again.
                items, start = start or await start_again(self._crawler), None
                try:
                    async for each in items:
                        if era != self._era:
                            break  # start() is run again, by this worker or another
                        yield each
                except Exception:  # as under Scrapy's scheduler, start() ends with an error
                    self._in_flight.end(stands_for)
                    raise
                # While the crawl is being closed, requests that start() yields may be dropped.
                if self._engine.running:
                    self._in_flight.end(stands_for)
        finally:
            self._reads_start = False

    def _start_done(self, era: int) -> None:
        if era == self._era:
            self._collect_change("start_ended", True)

    # The end of the worker.

    def close(self) -> Deferred[None]:
        """Send the collected changes, and leave the queue."""
        self._in_flight.end_replaced()
        self._flush_soon.cancel()
        self._is_closing = self.has_failed = True  # from now on, nothing is collected
        self._backend.server.shorten_deadline()
        self._changed.ring()
        if self._sent is None:
            if self._changes or self._is_over or self._is_broken:
                self._send_last()
            else:
                self._send()  # the reply tells whether the server has lost earlier batches
        return self._closed

    def _send_last(self) -> None:
        """Send the next batch of the collected changes, or leave the queue if there is none."""
        if self._changes and not self._is_broken:
            self._send()
        else:
            self._courier.send(Parcel(is_last=True))
            self._courier.end()

    def _fail(self, error: Exception) -> None:
        self._is_broken = True
        super()._fail(error)
        self._changed.ring()

    def _has_left(self, outcome: object) -> None:
        shared = self._shared
        if isinstance(outcome, Exception):
            if not self._is_broken:
                self._fail(outcome)
        elif shared.others:
            pass
        elif not shared.ended_at:
            self._logger.info(
                "The crawl of the queue in %s is unfinished, and no worker is left; pending "
                "requests: %s. Run the same command again to resume it",
                self._store_name,
                f"{shared.pending:,}",
            )
        elif self._flush and shared.aside:
            self._logger.warning(
                "The queue in %s and its filter are kept despite BLOOM_REDIS_FLUSH, because %s in "
                "the queue could not be deserialized",
                self._store_name,
                counted(shared.aside, "request is", "requests are"),
            )
        elif self._flush:
            self._backend.flush = True
        self._closed.callback(None)


class _Courier:
    """Sends batches in a thread, one at a time, and delivers their outcomes in the event loop.

    Args:
        exchange: called in the thread with each batch; must not raise.
        deliver: called in the event loop with each batch and the result of `exchange`.
        heartbeat_secs: how long to wait for a batch before an empty batch is sent.
    """

    def __init__(
        self,
        exchange: Callable[[Parcel], Reply | Exception | None],
        deliver: Callable[[Parcel, Reply | Exception | None], None],
        heartbeat_secs: float,
    ) -> None:
        self._exchange = exchange
        self._deliver = deliver
        self._call_in_loop = loop_caller()
        self._heartbeat_secs = heartbeat_secs
        self._outbox: queue.SimpleQueue[Parcel | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="scrapy_bloom courier", daemon=True).start()

    def send(self, batch: Parcel) -> None:
        """Send a batch after the batches before it."""
        self._outbox.put(batch)

    def end(self) -> None:
        """End the thread when it has sent all batches."""
        self._outbox.put(None)

    def _run(self) -> None:
        while True:
            try:
                batch = self._outbox.get(timeout=self._heartbeat_secs)
            except queue.Empty:
                batch = Parcel()
            if batch is None:
                return
            outcome = self._exchange(batch)
            self._call_in_loop(partial(self._deliver, batch, outcome))

"""Join a shared queue in Redis as a worker, and send its batches in a thread."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from functools import partial

from scrapy.crawler import Crawler

from scrapy_bloom.crawl.engine import loop_caller
from scrapy_bloom.crawl.scheduler.safe_queue import serves_least_busy_slot
from scrapy_bloom.queues.batch import Limit, Limits
from scrapy_bloom.queues.collected import SharedBatch
from scrapy_bloom.queues.shared import RejoinedError, Reply, SharedStore
from scrapy_bloom.queues.shared_state import requeue
from scrapy_bloom.redis.backend import RedisBackend
from scrapy_bloom.redis.filter import OtherFilterError
from scrapy_bloom.redis.forgotten import RedisForgotten
from scrapy_bloom.settings import BloomSettings

_HEARTBEATS = 4  # per lease


def join_queue(crawler: Crawler, settings: BloomSettings, backend: RedisBackend) -> SharedStore:
    """Join the workers of the queue in Redis, and return the access of this worker to it.

    Raises a BloomError if the server cannot be used, or has the queue of another spider.
    """
    assert crawler.spider is not None
    by_slot = serves_least_busy_slot(crawler)
    is_limited = settings.shared_limits and by_slot
    store = SharedStore(
        backend.filter,
        crawler.spider.name,
        by_slot=by_slot,
        lease_secs=settings.queue_lease_secs,
        limits=limits_of(crawler) if is_limited else None,
    )
    try:
        store.join()
        if store.aside and not store.others:
            requeue(backend.server, backend.key, "aside")
            store.join()
    except OtherFilterError as error:  # the server was emptied after the filter was joined
        store.rejoin(backend, error)
    logger = logging.LoggerAdapter(logging.getLogger(__name__), {"spider": crawler.spider})
    if settings.queue_when_empty == "wait":
        logger.info(
            "The workers of the queue in %s stay open when it is empty (BLOOM_QUEUE_WHEN_EMPTY "
            'is "wait"). To end them, run `scrapy bloom stop`, or press Ctrl-C; pending '
            "requests: %s",
            store.name,
            f"{store.pending:,}",
        )
    elif store.ended_at:
        logger.info(
            "The crawl of the queue in %s ended at %s, so this worker has nothing to do. To crawl "
            "again, set another BLOOM_REDIS_KEY, or run `scrapy bloom reset` first (with --queue, "
            "it keeps the filter)",
            store.name,
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(store.ended_at)),
        )
    elif store.pending:
        logger.info(
            "Joining the crawl of the queue in %s: pending requests: %s",
            store.name,
            f"{store.pending:,}",
        )
    if is_limited:
        logger.info(
            "The limits of downloads per host (CONCURRENT_REQUESTS_PER_DOMAIN, DOWNLOAD_DELAY, "
            "DOWNLOAD_SLOTS) apply to all workers of the queue in %s together "
            "(BLOOM_SHARED_LIMITS)",
            store.name,
        )
    elif settings.shared_limits:
        logger.warning(
            "The limits of downloads per host apply to each worker of the queue in %s separately, "
            "because SCHEDULER_PRIORITY_QUEUE is not "
            '"scrapy.pqueues.DownloaderAwarePriorityQueue", which tells hosts apart. So each '
            "further worker adds to the load of a host: set CONCURRENT_REQUESTS_PER_DOMAIN and "
            "DOWNLOAD_DELAY for the number of workers, and BLOOM_SHARED_LIMITS = False",
            store.name,
        )
    return store


def limits_of(crawler: Crawler) -> Limits:
    """Return the limits that Scrapy's settings and the spider set for each slot."""
    settings, spider = crawler.settings, crawler.spider
    usual = settings.getint("CONCURRENT_REQUESTS_PER_IP") or settings.getint(
        "CONCURRENT_REQUESTS_PER_DOMAIN"
    )
    usual = getattr(spider, "max_concurrent_requests", usual)
    adapts = settings.getbool("AUTOTHROTTLE_ENABLED")  # AutoThrottle changes a worker's delay
    delay = getattr(spider, "download_delay", settings.getfloat("DOWNLOAD_DELAY"))
    return Limits(
        Limit(int(usual), bool(delay) or adapts),
        {
            slot: Limit(each.get("concurrency", usual), bool(each.get("delay", delay)) or adapts)
            for slot, each in settings.getdict("DOWNLOAD_SLOTS").items()
        },
    )


BatchOutcome = Reply | Exception | None


class BatchSender:
    """Sends the batches of a worker in a thread, and reports their outcomes in the event loop.

    The thread also sends an empty batch a few times per lease, because the event loop may not run
    while a callback computes.

    Args:
        store: the access of the worker, which has joined the queue.
        backend: the backend of the duplicate filter.
        lease_secs: the duration of a lease.
        handle: called in the event loop with each batch and its outcome; the batch is None when the
            worker has left the queue. The outcome is None if the thread's heartbeat has found that
            the worker had to rejoin. Send the next batch as usual: it is not transmitted, and its
            outcome is a `RejoinedError`.

    Attributes:
        leased_until: the end of the worker's lease, on a monotonic clock.
    """

    def __init__(
        self,
        store: SharedStore,
        backend: RedisBackend,
        lease_secs: float,
        handle: Callable[[SharedBatch | None, BatchOutcome], object],
    ) -> None:
        self.leased_until = time.monotonic() + lease_secs
        self._store = store
        self._backend = backend
        self._lease_secs = lease_secs
        self._handle = handle
        self._rejoined: RejoinedError | None = None  # to be reported
        self._forgotten = RedisForgotten(backend.server, backend.key)
        self._forgets = -1  # so that the first reply has the whole set
        self._call_in_loop = loop_caller()
        self._outbox: queue.SimpleQueue[SharedBatch | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="scrapy_bloom sender", daemon=True).start()

    def send(self, batch: SharedBatch) -> None:
        """Send a batch, after all earlier batches were answered."""
        self._outbox.put(batch)

    def leave(self) -> None:
        """Leave the queue, and end the thread."""
        self._outbox.put(None)

    def _run(self) -> None:
        batch: SharedBatch | None = SharedBatch()
        while batch is not None:
            outcome: BatchOutcome
            try:
                wait = None if self._rejoined else self._lease_secs / _HEARTBEATS
                batch = self._outbox.get(timeout=wait)
            except queue.Empty:
                batch = SharedBatch()
                outcome = self._exchange(batch)
                if isinstance(outcome, RejoinedError):
                    self._rejoined, outcome = outcome, None
            else:
                if batch is None:
                    outcome = self._left()
                elif self._rejoined:
                    outcome, self._rejoined = self._rejoined, None
                else:
                    outcome = self._exchange(batch)
            self._call_in_loop(partial(self._handle, batch, outcome))

    def _exchange(self, batch: SharedBatch) -> Reply | Exception:
        sent_at = time.monotonic()
        try:
            try:
                reply = self._store.apply(batch)
                self._backend.filter.keep_up()
                if self._backend.filter.forgets != self._forgets:
                    reply.forgotten = list(self._forgotten.news())
                    self._forgets = self._backend.filter.forgets
            except RejoinedError as error:
                return error
            except OtherFilterError as error:
                lost = self._store.rejoin(self._backend, error)
                return RejoinedError(self._store.name, lost)
        except Exception as error:  # noqa: BLE001 - the event loop closes the spider
            return error
        self.leased_until = sent_at + self._lease_secs
        return reply

    def _left(self) -> Exception | None:
        try:
            self._store.leave()
        except Exception as error:  # noqa: BLE001 - the event loop logs it
            return error
        return None

"""How the queue of a crawl calls its store: what drivers share, and that of a store in a file.

`in_thread` has the driver of a store that waits for a server.
"""

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol

from scrapy.crawler import Crawler
from scrapy.pqueues import DownloaderInterface
from scrapy.utils.reactor import CallLaterOnce
from twisted.internet.defer import Deferred, execute

from scrapy_bloom.crawl.engine import reads_start
from scrapy_bloom.crawl.scheduler.downloads import ActiveDownloads
from scrapy_bloom.crawl.scheduler.in_flight import InFlight
from scrapy_bloom.crawl.scheduler.order import serves_least_busy_slot
from scrapy_bloom.queues.collected import Collected
from scrapy_bloom.queues.store import Batch, Entered, QueueStatus, Reply, Store, Taken

_MOST_CHANGES = 1000  # in a transaction


class Listener(Protocol):
    """The queue to which a driver reports."""

    in_flight: InFlight
    has_failed: bool
    is_closed: bool

    @property
    def is_open(self) -> bool:
        """Return whether the queue accepts changes."""

    def __len__(self) -> int: ...

    def on_reply(self, batch: Batch, reply: Reply) -> None:
        """Handle the answers to a batch."""

    def on_rejoined(self, number: int, found: Iterable[Entered]) -> None:
        """Queue what the current queue may lack, after so many requests were dropped."""

    def fail(self, error: Exception) -> None:
        """Close the spider, because the store cannot be used."""

    def stands_still(self, *, has_more: bool) -> bool:
        """Return whether all requests in flight wait; `has_more`: the driver has changes."""

    def log_no_share(self, workers: int) -> None:
        """Log that this worker has no share of a host with pending requests, if it takes none."""


class Driver(ABC):
    """Has a store apply the changes of a queue, and prefetches requests.

    It reports to the queue: `on_reply`, `on_rejoined`, `fail`. Add changes to `changes`, and then
    call `flush_soon`.
    """

    storage: str  # "disk" or "redis", as in the stats

    def __init__(self, crawler: Crawler, store: Store, changes: Collected) -> None:
        self.store = store
        self.changes = changes
        self._queue: Listener
        self._engine: Any = crawler.engine
        self._ready: deque[Taken] = deque()  # in flight in the store, and not handed out yet
        self._next_flush = CallLaterOnce(self.flush)

    def begin(self, queue: Listener) -> None:
        """Begin to work for a queue."""
        self._queue = queue

    def __len__(self) -> int:
        """Return how many requests are pending, as far as this process knows."""
        return self._pending + len(self._ready) + self.changes.entering

    @property
    @abstractmethod
    def _pending(self) -> int: ...

    @property
    def expects_more(self) -> bool:
        """Return whether other processes may queue requests, although nothing is pending here."""
        return False

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
        """Have the store apply all changes, and close it; `is_finished`: nothing is left."""


class InLoop(Driver):
    """Calls a store in the event loop: for a file, which answers at once."""

    storage = "disk"

    def __init__(self, crawler: Crawler, store: Store) -> None:
        super().__init__(crawler, store, Collected(_MOST_CHANGES, math.inf))
        self._unsent: Batch | None = None  # could not be applied
        self._downloads = (
            ActiveDownloads(DownloaderInterface(crawler), self._engine.downloader.slots)
            if serves_least_busy_slot(crawler)
            else {}
        )

    @property
    def _pending(self) -> int:
        return self.store.pending

    def flush_soon(self) -> None:
        """Have the store apply the changes now, if there are many."""
        if self.changes.fills_a_batch:
            self.flush()
        else:
            super().flush_soon()

    def flush(self) -> None:
        """Have the store apply all changes."""
        while self.changes and self._queue.is_open:
            self._apply(self.changes.next_batch())

    def take(self) -> Taken | None:
        """Return the next request, which is in flight; None if there is none."""
        if not self._ready:
            while self.changes.fills_a_batch and self._queue.is_open:
                self._apply(self.changes.next_batch())
            if self._queue.is_open:
                batch = self.changes.next_batch()
                # A store usually asks for one of them.
                batch.want, batch.downloads = 1, self._downloads
                self._apply(batch)
        return self._ready.popleft() if self._ready else None

    def _apply(self, batch: Batch) -> None:
        queue = self._queue
        batch.may_start = True
        batch.stands_still = queue.stands_still(has_more=bool(self._ready or self.changes.ending))
        batch.start_ended = not reads_start(self._engine)
        try:
            reply = self.store.apply(batch)
        except Exception as error:  # noqa: BLE001 - whatever it is, the queue closes the spider
            self._unsent = batch
            queue.fail(error)
        else:
            self._ready += reply.taken  # first: whatever fails, these requests are handed out
            queue.on_reply(batch, reply)

    def close(self, *, is_finished: bool) -> "Deferred[QueueStatus | None]":
        """Have the store apply all changes, and close it; `is_finished`: nothing is left."""
        self._next_flush.cancel()
        queue = self._queue
        if (
            queue.has_failed
        ):  # a full disk may have space again; if not, the error is logged already
            if self._unsent is not None:
                self.changes.put_back(self._unsent)
            queue.has_failed = False
        self.flush()
        if is_finished and queue.is_open:
            self.changes.last().is_over = True  # after everything else has left the queue
            self.flush()
        queue.is_closed = True
        return execute(self.store.close)

"""How the queue of a crawl calls its store: what `in_loop` and `in_thread` share."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from scrapy.crawler import Crawler
from scrapy.utils.reactor import CallLaterOnce
from twisted.internet.defer import Deferred

from scrapy_bloom.crawl.scheduler.in_flight import InFlight
from scrapy_bloom.crawl.telemetry import Failures
from scrapy_bloom.queues.collected import Collected
from scrapy_bloom.queues.store import Batch, Ended, Entered, QueueStatus, Reply, Store, Taken


class Listener(Protocol):
    """The queue to which a driver reports."""

    def on_reply(self, batch: Batch, reply: Reply) -> None:
        """Handle the answers to a batch."""

    def on_rejoined(self, number: int, entered: Sequence[Entered]) -> None:
        """Queue again what the store may lack, after so many requests were dropped."""


class Driver(ABC):
    """Has a store apply the changes of a queue, and prefetches requests.

    Add changes to `changes` while `is_open`, and then call `flush_soon`. `len` tells how many
    requests are pending, as far as this process knows.
    """

    storage: str  # "disk" or "redis", as in the stats

    def __init__(
        self,
        crawler: Crawler,
        store: Store,
        failures: Failures,
        changes: Collected,
        *,
        is_late: bool,
    ) -> None:
        self.store = store
        self.in_flight = InFlight(crawler)
        self.changes = changes
        self.ready: deque[Taken] = deque()  # in flight in the store, and not handed out yet
        self.is_late = is_late  # there is nothing to do in the current run
        self.has_failed = False  # whether the store has failed; its requests stay in it
        self.is_closed = False  # whether nothing is collected any more
        self.queue: Listener  # set before anything else is done
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
    @abstractmethod
    def _pending(self) -> int: ...

    @property
    @abstractmethod
    def expects_more(self) -> bool:
        """Return whether other processes may queue requests, although nothing is pending here."""

    def fail(self, error: Exception) -> None:
        """Close the spider, because the store cannot be used."""
        if not self.has_failed:
            self.has_failed = True
            self.failures.close_for_queue(error, self.store.name)

    def end(self, ended: Ended) -> None:
        """Collect the end of a request."""
        if self.is_open:  # otherwise, requests that it led to may have been refused
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

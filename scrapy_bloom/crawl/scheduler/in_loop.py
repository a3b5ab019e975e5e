"""The queue of a crawl in its job directory, whose store answers at once."""

import logging
import math
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, cast

from scrapy.crawler import Crawler
from scrapy.dupefilters import BaseDupeFilter
from scrapy.pqueues import DownloaderInterface
from scrapy.utils.request import request_from_dict
from twisted.internet.defer import Deferred, execute

from scrapy_bloom.crawl.dupefilter import BloomDupeFilter
from scrapy_bloom.crawl.engine import (
    ask_scheduler,
    is_closing,
    loop_caller,
    reads_start,
    replace_start,
)
from scrapy_bloom.crawl.scheduler.queue import CrawlQueue, Driver
from scrapy_bloom.crawl.scheduler.stored_requests import serves_least_busy_slot
from scrapy_bloom.crawl.scheduler.takeover import open_with_scrapys_queue
from scrapy_bloom.crawl.telemetry import Failures
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.job import jobdir
from scrapy_bloom.job.filter import LocalBackend
from scrapy_bloom.queues import inbox
from scrapy_bloom.queues.collected import Collected
from scrapy_bloom.queues.inbox import Message
from scrapy_bloom.queues.serialized import serialized
from scrapy_bloom.queues.sqlite_store import SQLiteStore
from scrapy_bloom.queues.store import (
    Batch,
    Entered,
    Joining,
    Opened,
    QueueStatus,
    Store,
    Taken,
)
from scrapy_bloom.settings import BloomSettings
from scrapy_bloom.text import counted

_MOST_CHANGES = 1000  # in a transaction
_LOOK_SECS = 0.5  # between two looks into the inbox
_TURN_SECS = 0.005  # of the event loop


def open_in_job(
    crawler: Crawler, df: BaseDupeFilter, settings: BloomSettings, job: Path, memory: Any
) -> CrawlQueue:
    """Open the queue in a job directory, which the caller has locked; raises BloomError."""
    assert crawler.spider is not None
    backend, failures = None, Failures(crawler)
    if isinstance(df, BloomDupeFilter):
        backend, failures = cast(LocalBackend, df.backend), df.failures
    store = SQLiteStore(job / jobdir.FILE, backend)
    joining = Joining(crawler.spider.name, settings.run, keeps_failed=settings.keep_failed)
    opened = open_with_scrapys_queue(crawler, df, job, store, joining)
    driver = InLoop(crawler, store, failures, opened)
    queue = CrawlQueue(crawler, df, driver, opened, settings=settings, memory=memory)
    if opened.is_late:
        replace_start(crawler.engine, lambda _: None)
    else:
        driver.inbox = InboxReader(crawler, driver, store, job)
    return queue


class InLoop(Driver):
    """Calls a store in the event loop."""

    storage = "disk"

    def __init__(self, crawler: Crawler, store: Store, failures: Failures, opened: Opened) -> None:
        super().__init__(crawler, store, failures, Collected(_MOST_CHANGES, math.inf), opened)
        self.inbox: InboxReader | None = None
        by_slot = serves_least_busy_slot(crawler)
        self._downloads = _ActiveDownloads(crawler) if by_slot else Counter[str]()

    @property
    def expects_more(self) -> bool:
        return self.inbox is not None and self.inbox.may_have_messages

    def flush_soon(self) -> None:
        if self.changes.fills_a_batch:
            self.flush()
        else:
            super().flush_soon()

    def flush(self) -> None:
        while self.changes and self.is_open:
            self._apply(self.changes.next_batch())

    def take(self) -> Taken | None:
        if not self.ready:
            batch = self.changes.next_batch()
            batch.want, batch.downloads = 1, self._downloads
            self._apply(batch)
        return self.ready.popleft() if self.ready else None

    def _apply(self, batch: Batch) -> None:
        batch.stands_still = self.in_flight.stands_still
        batch.start_ended = not reads_start(self._engine)
        try:
            reply = self.store.apply(batch)
        except Exception as error:  # noqa: BLE001 - whatever it is, the spider is closed
            self.fail(error)
        else:
            self.ready += reply.taken  # first: whatever fails, these requests are handed out
            self.queue.on_reply(batch, reply)

    def close(self, *, is_finished: bool) -> "Deferred[QueueStatus | None]":
        if self.inbox is not None:
            self.inbox.close()
        self.flush()
        if is_finished and self.is_open:
            self.changes.last().is_over = True  # after everything else has left the queue
            self.flush()
        self.is_closed = True
        return execute(self.store.close)


class _ActiveDownloads(dict[str, int]):
    """How many downloads each slot of the downloader has, counted when it is asked for."""

    def __init__(self, crawler: Crawler) -> None:
        self._downloader = DownloaderInterface(crawler)

    def __missing__(self, slot: str) -> int:
        return self._downloader.stats([slot])[0][0]


class InboxReader:
    """Reads messages of commands while the crawl runs, and does what they ask for.

    A thread reads them, has the event loop apply them, syncs that, and removes them. So the event
    loop waits for no disk.
    """

    def __init__(self, crawler: Crawler, driver: InLoop, store: SQLiteStore, job: Path) -> None:
        self._engine: Any = crawler.engine
        self._spider = crawler.spider
        self._driver = driver
        self._store = store
        self._job = job
        self._logger = logging.LoggerAdapter(logging.getLogger(__name__), {"spider": self._spider})
        self._empty: object = []  # the state of the inbox in which it has no messages
        self._last: object = None  # its state at the last look
        self._call_in_loop = loop_caller()
        self._outcomes: SimpleQueue[bool] = SimpleQueue()  # whether to go on
        self._thread = threading.Thread(target=self._run, name="scrapy_bloom inbox", daemon=True)
        self._thread.start()

    @property
    def may_have_messages(self) -> bool:
        """Whether the crawl must not end yet."""
        return inbox.state_of(self._job) != self._empty

    def close(self) -> None:
        """End the thread, before the store is closed."""
        self._outcomes.put(False)
        self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                stored = self._read()
                messages = deque(message for _, message in stored if message is not None)
                number = sum(isinstance(message, dict) for message in messages)
                while messages:
                    self._call_in_loop(partial(self._apply, messages))
                    if not self._outcomes.get():
                        return
                if number:
                    self._logger.info(
                        "Queued %s added by `scrapy bloom add`, except duplicates",
                        counted(number, "request"),
                    )
                if stored:
                    self._store.sync()
                    inbox.remove(self._job, [id_ for id_, _ in stored])
                else:
                    with suppress(Empty):
                        self._outcomes.get(timeout=_LOOK_SECS)
                        return
        except StorageError as error:
            self._call_in_loop(partial(self._driver.fail, error))

    def _read(self) -> list[tuple[int, Message | None]]:
        """Return the first messages, with None in place of damaged ones."""
        if (now := inbox.state_of(self._job)) == self._empty:
            return []
        try:
            messages = inbox.read(self._job)
        except StorageError as error:
            self._log_undone(str(error))
            self._empty = now
            return []
        if not messages and now == self._last:
            # Two looks, because a file system may give two changes the same time.
            self._empty = now
        self._last = now
        if damaged := sum(message is None for _, message in messages):
            self._log_undone(f"{counted(damaged, 'message')} cannot be read; run the command again")
        return messages

    def _log_undone(self, why: str) -> None:
        self._logger.error("What commands want from this crawl is not done: %s", why)

    def _apply(self, messages: deque[Message]) -> None:
        """Do for some milliseconds what messages ask for, and remove those that are done."""
        end = time.monotonic() + _TURN_SECS
        try:
            while messages and self._goes_on and time.monotonic() < end:
                message = messages[0]
                if isinstance(message, dict):
                    self._queue(message)
                elif self._store.move_some(*message):  # there may be more of it
                    continue
                messages.popleft()
            self._driver.flush()
        except StorageError as error:
            self._driver.fail(error)
        ask_scheduler(self._engine)
        self._outcomes.put(self._goes_on)

    @property
    def _goes_on(self) -> bool:
        return self._driver.is_open and not is_closing(self._engine)

    def _queue(self, message: dict[str, Any]) -> None:
        try:
            request = request_from_dict(message, spider=self._spider)
        except Exception:  # noqa: BLE001 - the spider has no such callback: `take` logs it
            self._driver.changes.enter(Entered(serialized(message)))
        else:
            self._engine.crawl(request)

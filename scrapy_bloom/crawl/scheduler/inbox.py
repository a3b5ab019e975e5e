"""Do what commands want from a running crawl of a job directory."""

import logging
import threading
import time
from collections import deque
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from scrapy.crawler import Crawler
from scrapy.utils.asyncio import call_later
from scrapy.utils.request import request_from_dict

from scrapy_bloom.crawl.engine import ask_scheduler, is_closing, loop_caller
from scrapy_bloom.crawl.scheduler.queue import CrawlQueue
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.queues import inbox
from scrapy_bloom.queues.inbox import Message, Move
from scrapy_bloom.queues.serialized import serialized
from scrapy_bloom.queues.sqlite_store import SQLiteStore
from scrapy_bloom.text import counted

_LOOK_SECS = 0.5
_TURN_SECS = 0.005  # of the event loop


class InboxReader:
    """Reads messages of commands while the crawl runs, and does what they ask for.

    A thread reads them, has the event loop apply them, syncs that, and removes them. So the event
    loop waits for no disk.
    """

    def __init__(self, crawler: Crawler, queue: CrawlQueue, store: SQLiteStore, job: Path) -> None:
        self._engine: Any = crawler.engine
        self._spider = crawler.spider
        self._queue = queue
        self._store = store
        self._job = job
        self._logger = logging.LoggerAdapter(logging.getLogger(__name__), {"spider": self._spider})
        self._empty: object = []  # the state of the inbox in which it has no messages
        self._last: object = None  # its state at the last look
        self._call_in_loop = loop_caller()
        self._outcomes: SimpleQueue[bool] = SimpleQueue()  # whether the messages are applied
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
                messages = self._read()
                if messages:
                    rest = deque(message for _, message in messages if message is not None)
                    number = sum(isinstance(message, dict) for message in rest)
                    self._call_in_loop(partial(self._apply, rest, number))
                with suppress(Empty):
                    if not self._outcomes.get(timeout=None if messages else _LOOK_SECS):
                        return
                    self._store.sync()
                    inbox.remove(self._job, [id_ for id_, _ in messages])
        except StorageError as error:
            self._call_in_loop(partial(self._queue.fail, error))

    def _read(self) -> list[tuple[int, Message | None]]:
        """Return the first messages, with None in place of damaged ones."""
        messages: list[tuple[int, Message | None]] = []
        now = inbox.state_of(self._job)
        if now == self._empty:
            return []
        try:
            messages = inbox.read(self._job)
        except StorageError as error:
            self._log_undone(str(error))
            self._empty = now
        if not messages and now == self._last:
            # Two looks, because a file system may give two changes the same time.
            self._empty = now
        self._last = now
        if damaged := sum(message is None for _, message in messages):
            self._log_undone(f"{counted(damaged, 'message')} cannot be read; run the command again")
        return messages

    def _log_undone(self, why: str) -> None:
        self._logger.error("What commands want from this crawl is not done: %s", why)

    def _apply(self, messages: deque[Message], number: int) -> None:
        """Apply messages for some milliseconds, and the others in later turns of the event loop."""
        end = time.monotonic() + _TURN_SECS
        try:
            while messages and self._is_open and time.monotonic() < end:
                if not self._apply_some(messages[0]):
                    messages.popleft()
            self._queue.flush()
        except StorageError as error:
            self._queue.fail(error)
        if not self._is_open:
            self._outcomes.put(False)
        elif messages:
            call_later(0, self._apply, messages, number)
        else:
            if number:
                self._logger.info(
                    "Queued %s added by `scrapy bloom add`, except duplicates",
                    counted(number, "request"),
                )
            ask_scheduler(self._engine)
            self._outcomes.put(True)

    @property
    def _is_open(self) -> bool:
        return self._queue.is_open and not is_closing(self._engine)

    def _apply_some(self, message: Message) -> bool:
        """Apply a part of a message; return whether there may be more of it."""
        if isinstance(message, Move):
            return self._store.move_some(*message) > 0
        try:
            request = request_from_dict(message, spider=self._spider)
        except Exception:  # noqa: BLE001 - the spider has no such callback: `take` logs it
            self._queue.add_unreadable(serialized(message))
        else:
            self._engine.crawl(request)
        return False

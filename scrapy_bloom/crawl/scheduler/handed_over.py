"""Apply what commands hand over to a running crawl of a job directory."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scrapy import Request
from scrapy.crawler import Crawler
from scrapy.utils.asyncio import call_later
from scrapy.utils.request import request_from_dict

from scrapy_bloom.crawl.engine import is_closing
from scrapy_bloom.crawl.scheduler.queue import CrawlQueue
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.job.jobdir import set_aside
from scrapy_bloom.queues.handed_over import Move, handed_over_files, read_handed_over
from scrapy_bloom.queues.serialized import serialized
from scrapy_bloom.queues.sqlite_store import SQLiteStore
from scrapy_bloom.text import counted, escaped

_LOOK_SECS = 0.5


class HandedOver:
    """Looks for files of commands while the crawl runs, and does what they ask for.

    A file is removed once that is stored. If the process dies in between, the next run does it
    again: requests that were queued are duplicates then.

    Args:
        crawler: the crawler of the job.
        queue: the queue of the job.
        store: the store of the queue.
        job: the job directory.
    """

    def __init__(self, crawler: Crawler, queue: CrawlQueue, store: SQLiteStore, job: Path) -> None:
        self._engine: Any = crawler.engine
        self._spider = crawler.spider
        self._queue = queue
        self._store = store
        self._job = job
        self._logger = logging.LoggerAdapter(logging.getLogger(__name__), {"spider": self._spider})
        call_later(_LOOK_SECS, self._look)

    def __len__(self) -> int:
        """Return how many files there are: the crawl must not end before it has read them."""
        return len(handed_over_files(self._job))

    def _look(self) -> None:
        """Do what the oldest file asks for, if there is one."""
        if not self._queue.is_open:
            return
        files = [] if is_closing(self._engine) else handed_over_files(self._job)
        again = 0.0 if files[1:] else _LOOK_SECS
        if files:
            try:
                again = 0.0 if self._apply(files[0]) else again
            except (OSError, StorageError) as error:
                self._queue.fail(error)
                return
        call_later(again, self._look)

    def _apply(self, file: Path) -> bool:
        """Do what a file asks for, and remove it; return whether a part of it is left to do."""
        try:
            found = read_handed_over(file)
            for each in found if isinstance(found, list) else ():
                Request(**{**each, "callback": None})
        except Exception as error:  # noqa: BLE001 - the file is untrusted
            aside = set_aside(file)
            self._logger.error(  # noqa: TRY400 - where the file is damaged is no help
                "What scrapy bloom wrote to %s for this crawl cannot be read, and is not done "
                "(%s). The file was renamed to %s: run the command again",
                file,
                escaped(f"{type(error).__name__}: {error}"[:200]),
                aside.name,
            )
            return False
        if isinstance(found, Move):
            if self._store.move_some(*found):
                return True
        else:
            self._queue_all(found)
        self._store.sync()
        if self._queue.is_open:
            file.unlink()
        return False

    def _queue_all(self, requests: Sequence[dict[str, Any]]) -> None:
        for each in requests:
            try:
                request = request_from_dict(each, spider=self._spider)
            except Exception:  # noqa: BLE001 - the spider has no such callback: `take` logs it
                self._queue.add_unreadable(serialized(each))
                continue
            self._engine.crawl(request)
        self._queue.flush()
        self._logger.info(
            "Queued %s added by `scrapy bloom add`, except duplicates",
            counted(len(requests), "request"),
        )

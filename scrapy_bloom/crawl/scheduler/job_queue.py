"""Queue the requests of a job in SQLite, which is the log of the filter, too."""

import contextlib
import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from scrapy import Request
from scrapy.crawler import Crawler
from scrapy.dupefilters import BaseDupeFilter
from scrapy.utils.asyncio import call_later
from scrapy.utils.request import request_from_dict

from scrapy_bloom.crawl.dupefilter import BloomDupeFilter
from scrapy_bloom.crawl.engine import is_closing
from scrapy_bloom.crawl.failures import Failures
from scrapy_bloom.crawl.scheduler.safe_queue import SafeQueue
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.files.backend import LocalBackend
from scrapy_bloom.files.log import Change, Overlay
from scrapy_bloom.job.jobdir import set_aside
from scrapy_bloom.queues.batch import Batch, Found, Taken, serialized
from scrapy_bloom.queues.job_state import added_files, read_added
from scrapy_bloom.queues.sqlite import RequestDatabase
from scrapy_bloom.text import counted

_MOST_FOUND = 1000  # requests in a batch
_LOOK_SECS = 0.5  # between two looks for files of `scrapy bloom add`


class JobQueue(SafeQueue):
    """The queue of a job, and the log of its filter.

    The queue stores a batch before it takes the next request, when the batch has 1,000 requests,
    and at the end of the event loop's turn. So the crawl can continue from the stored state at any
    instant.

    Args:
        crawler: the crawler of the requests.
        store: the database of the job.
        df: the duplicate filter, whose log `store` is; or Scrapy's BaseDupeFilter, which filters
            nothing.
    """

    def __init__(self, crawler: Crawler, store: RequestDatabase, df: BaseDupeFilter) -> None:
        ours = df if isinstance(df, BloomDupeFilter) else None
        super().__init__(crawler, store.name, ours.failures if ours else Failures(crawler))
        self._database = store
        self._df = df
        self._batch = Batch()
        self._changes = Overlay(store)  # stays empty without a filter that changes it
        if ours is not None:
            assert isinstance(ours.backend, LocalBackend)
            assert ours.backend.overlay is not None
            self._changes, self._forgotten = ours.backend.overlay, ours.backend.forgotten
        self._job = Path(store.name).parent
        call_later(_LOOK_SECS, self._read_added)
        for data in store.died:
            self._log_dead(data, "processes")
        if store.resumed:
            killed = store.were_in_flight
            self._logger.info(
                "Resuming crawl (%d requests scheduled%s)",
                store.resumed,
                f", {killed:,} of them in flight when the last run was killed" if killed else "",
            )

    def __len__(self) -> int:
        if not self.is_open:
            return 0
        pending = self._database.pending + len(self._batch.found) + self._database.suspects
        # The crawl must not end before it has read the requests of `scrapy bloom add`.
        return pending or len(added_files(self._job))

    def enqueue(self, request: Request) -> str | None:
        """Add a request to the batch unless it is a duplicate; return where it is, or None."""
        changes = self._changes
        before, fingerprint = len(changes.collected), None
        if not request.dont_filter:
            if self._df.request_seen(request):
                return None
            if len(changes.collected) > before:
                fingerprint = changes.collected[-1].fingerprint
        found = self._serialized(request, fingerprint)
        if found is None:
            record = partial(self._record, changes.collected[before:])
            del changes.collected[before:]
            self.in_flight.keep_in_memory(request, record)
            return "memory"
        self._add(found)
        return self.storage

    def _record(self, postponed: Sequence[Change]) -> None:
        """Record a request from memory that is done, unless it was forgotten meanwhile."""
        if self.is_open:
            self._changes.collected += [
                each for each in postponed if each.fingerprint not in self._forgotten
            ]
            self._flush_soon.schedule()

    def _add(self, found: Found) -> None:
        collected = self._batch.found
        collected.append(found)
        if len(collected) >= _MOST_FOUND:
            self.flush()
        elif len(collected) == 1:
            self._flush_soon.schedule()

    def _read_added(self) -> None:
        """Queue the requests of the oldest file that `scrapy bloom add` has written, if any."""
        if not self.is_open:
            return
        files = [] if is_closing(self._engine) else added_files(self._job)
        call_later(0 if files[1:] else _LOOK_SECS, self._read_added)
        if not files:
            return
        requests = self._attempt(read_added, files[0])
        if not self.is_open:  # the file stays for the next run
            return
        if requests is None:
            if aside := self._attempt(set_aside, files[0]):
                self._logger.error(
                    "The requests that scrapy bloom add has handed over in %s cannot be read, "
                    "and are not crawled. The file was renamed to %s: add the requests again",
                    files[0],
                    aside.name,
                )
            return
        for each in requests:
            try:
                request = request_from_dict(each, spider=self._spider)
            except Exception:  # noqa: BLE001 - the spider has no such callback: `take` logs it
                self._add(Found(serialized(each)))
                continue
            try:
                self._engine.crawl(request)
            except Exception:  # of a subclass of the duplicate filter, which should not raise
                self._logger.exception("The duplicate filter failed on %s", request)
        self.flush()
        self._attempt(self._database.sync)
        if self.is_open:
            self._attempt(files[0].unlink)
            self._logger.info(
                "Queued %s that scrapy bloom add has handed over, except duplicates",
                counted(len(requests), "request"),
            )

    def flush(self) -> None:
        """Store the batch."""
        if batch := self._collected():
            self._attempt(self._database.apply, batch)
            self._stored()

    def _collected(self) -> Batch:
        if self._changes.failure is not None and self.is_open:
            self._fail(self._changes.failure)
        self._batch.changes = self._changes.collected
        return self._batch

    def _stored(self) -> None:
        if self.is_open:
            self._batch = Batch()
            self._changes.stored(self._database.seq)

    def _attempt(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the store; if it fails, close the spider and return None."""
        if not self.is_open:
            return None
        try:
            return function(*args)
        except (sqlite3.Error, OSError, StorageError) as error:
            self._fail(error)
            return None

    def _fail(self, error: Exception) -> None:
        super()._fail(error)
        if self._changes.failure is None:
            self._changes.failure = error  # no checkpoint follows, and the close logs nothing

    def close(self) -> None:
        """Store the last batch; pending requests stay for the next run."""
        self.in_flight.end_replaced()
        self._flush_soon.cancel()
        if self.has_failed:  # a full disk may have space again; if not, the error is logged already
            with contextlib.suppress(sqlite3.Error, OSError, StorageError):
                self._database.apply(self._collected())
                self.has_failed = False
                self._stored()
        else:
            self.flush()
        self.is_closed = True

    def take(self) -> Request | None:
        """Store the batch, and return the next request; None if there is none yet."""
        while self.is_open:
            taken = self._attempt(self._database.take, self._collected(), self._downloads)
            self._stored()
            taken = taken or self._take_suspect()
            if taken is None:
                break
            if request := self._hand_out(taken):
                return request
        return None

    def _set_aside(self, taken: Taken) -> None:
        self._attempt(self._database.set_aside, taken.id)

    def _take_suspect(self) -> Taken | None:
        """Take a suspect if nothing else is in flight, so that a death can be blamed on it."""
        taken: Taken | None = None
        if self._database.suspects and not (self.in_flight and not self._stands_still()):
            taken = self._attempt(self._database.take_suspect)
        return taken

    def _collect_done(self, row: int) -> None:
        self._batch.done.append(row)

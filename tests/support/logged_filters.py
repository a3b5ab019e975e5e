"""A job as CrashSafeScheduler uses it: its store, and the filter whose log that is."""

import contextlib
import threading
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from scrapy_bloom.files.log import Overlay
from scrapy_bloom.job.jobdir import DATABASE, lock_job
from scrapy_bloom.job.recovery import Job
from scrapy_bloom.queues.database import JobDatabase
from scrapy_bloom.queues.sqlite_store import SQLiteStore
from scrapy_bloom.queues.store import Batch, Ended, Entered, Taken
from tests.support.backends import local_backend
from tests.support.request_queues import SHOP


class LoggedFilter:
    """A job that a crawl has opened; nothing is written to the filter until `checkpoint`."""

    def __init__(self, job: Path, run: str = "", **options: Any) -> None:
        job.mkdir(parents=True, exist_ok=True)
        self.collected: list[Entered] = []
        self.in_flight: list[Taken] = []
        self._lock = lock_job(job)
        options = {"capacity": 1000, "error_rate": 1e-9, "job": Job(job), **options}
        self.backend = local_backend(job / "bloom", **options)
        checkpoint, lock = self.backend._checkpoint, threading.Lock()

        def alone(overlay: Overlay) -> None:
            with lock:  # the backend's thread may make one at the same time
                checkpoint(overlay)

        self.backend._checkpoint = alone
        self._store = SQLiteStore(job / DATABASE, self.backend, by_slot=False)
        try:
            self._store.open(replace(SHOP, run=run))
        except BaseException:
            self._lock.release()
            raise

    @property
    def database(self) -> JobDatabase:
        return self._store._database

    @property
    def overlay(self) -> Overlay:
        assert self.backend.overlay is not None
        return self.backend.overlay

    def find(self, *fingerprints: bytes) -> list[bool]:
        """Collect requests for the next batch, unless they are duplicates; which were new."""
        new = []
        for each in fingerprints:
            is_new = each not in self.backend and Entered(each, each) not in self.collected
            if is_new:
                self.collected.append(Entered(each, each))
            new.append(is_new)
        return new

    def store(self, done: Collection[Taken] = ()) -> None:
        """Store what was collected as one batch."""
        batch = Batch(self.collected, ended=[Ended(each.id) for each in done])
        assert all(self._store.apply(batch).queued)
        self.collected = []

    def take(self, number: int) -> list[Taken]:
        return self._store.apply(Batch(want=number)).taken

    def crawl(self, number: int) -> list[bytes]:
        """Take so many requests, and have them done; which ones."""
        taken = self.take(number)
        self.store(done=taken)
        return [each.data for each in taken]

    def checkpoint(self) -> None:
        self.backend._checkpoint(self.overlay)
        self.overlay.prune()

    def close(self) -> None:
        try:
            if self.collected:
                self.store()
        finally:
            try:
                self._store.close()
            finally:
                self._lock.release()

    def die(self) -> None:
        """End as a kill does: the files are as they were at that instant."""
        backend = self.backend
        backend._is_closing = True
        backend._wake.set()
        if backend._syncer is not None:
            backend._syncer.join()
        for file in [*backend._expired, *backend.live]:
            file.close()
        backend._lock.close()
        self._lock.release()
        if self.database._wal is not None:
            self.database._wal.close()
        with contextlib.suppress(Exception):
            self.database._db.close()

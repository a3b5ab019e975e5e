"""A job as CrashSafeScheduler uses it: its database, and the filter whose log that is."""

import contextlib
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scrapy_bloom.files.log import Overlay
from scrapy_bloom.job.jobdir import DATABASE, lock_job
from scrapy_bloom.job.recovery import Job
from scrapy_bloom.queues.batch import Batch, Found
from scrapy_bloom.queues.sqlite import RequestDatabase
from tests.support.backends import local_backend


class LoggedFilter:
    """A job that a crawl has opened; nothing is written to the filter until `checkpoint`.

    Args:
        job: the job directory.
        directory: of the filter; as BLOOM_DIR, if it is not the job's own.
        options: of the filter.
    """

    def __init__(self, job: Path, directory: Path | None = None, **options: Any) -> None:
        job.mkdir(parents=True, exist_ok=True)
        self.found: list[Found] = []
        self._lock = lock_job(job)
        self.database = RequestDatabase(job / DATABASE, by_slot=False)
        self.backend = local_backend(
            directory or job / "bloom",
            **{
                "capacity": 1000,
                "error_rate": 1e-9,
                "job": Job(job),
                **options,
            },
        )
        try:
            self.backend.open(self.database)
        except BaseException:
            self.database.close()
            self._lock.release()
            raise
        self.backend.begin()
        checkpoint, lock = self.backend._checkpoint, threading.Lock()

        def alone(overlay: Overlay) -> None:
            with lock:  # the backend's thread may make one at the same time
                checkpoint(overlay)

        self.backend._checkpoint = alone

    @property
    def overlay(self) -> Overlay:
        assert self.backend.overlay is not None
        return self.backend.overlay

    def find(self, *fingerprints: bytes) -> list[bool]:
        """Schedule requests; which of them were new."""
        new = [self.backend.add(each) for each in fingerprints]
        self.found += [
            Found(each, each) for each, is_new in zip(fingerprints, new, strict=True) if is_new
        ]
        return new

    def forget(self, *fingerprints: bytes) -> None:
        self.backend.forgotten.add(fingerprints)

    def store(self, done: Iterable[int] = ()) -> None:
        """Store what was collected as one batch."""
        found, self.found = self.found, []
        self.database.apply(Batch(found, self.overlay.collected, list(done)))
        self.overlay.stored(self.database.seq)

    def crawl(self, number: int) -> list[bytes]:
        """Take so many requests, and have them done; which ones."""
        rows = [self.database.take(Batch()) for _ in range(number)]
        taken = [row for row in rows if row is not None]
        self.store(done=[row.id for row in taken])
        return [row.data for row in taken]

    def checkpoint(self) -> None:
        self.backend._checkpoint(self.overlay)
        self.overlay.prune()

    def close(self) -> None:
        if self.found or self.overlay.collected:
            self.store()
        try:
            self.backend.close()
        finally:
            self.database.close()
            self._lock.release()

    def die(self) -> None:
        """End as a kill does: the files are as they were at that instant."""
        store = self.backend
        store._is_closing = True
        store._wake.set()
        if store._syncer is not None:
            store._syncer.join()
        self.backend._forgotten_file.close()
        for file in [*store._expired, *store.live]:
            file.close()
        store._lock.close()
        self._lock.release()
        if self.database._wal is not None:
            self.database._wal.close()
        with contextlib.suppress(Exception):
            self.database._db.close()

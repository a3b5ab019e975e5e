"""The place of a job directory."""

import os
import signal
import socket
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from difflib import get_close_matches
from pathlib import Path

from scrapy_bloom.commands.shared.output import note
from scrapy_bloom.commands.shared.place import (
    Backend,
    Batches,
    MissingError,
    Source,
    found,
    opened,
    reading,
)
from scrapy_bloom.commands.shared.project import Project, request_of
from scrapy_bloom.copying.sources import FileSource
from scrapy_bloom.copying.transfer import copy_to_job
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.generations.policy import Origin
from scrapy_bloom.job import jobdir, scrapys_queue
from scrapy_bloom.job.disk import log_and_index, same_directory
from scrapy_bloom.job.filter import LocalBackend
from scrapy_bloom.job.reader import FilterReader, check_free, has_filter
from scrapy_bloom.queues import inbox
from scrapy_bloom.queues.sqlite_queue import SQLiteQueue
from scrapy_bloom.queues.store import State, Worker
from scrapy_bloom.settings import BloomSettings

_MOST_NAMED = 3  # jobs in a directory


def open_path(path: Path, *, is_new: bool) -> "PathPlace":
    """Return the place of a path, which may be missing if it `is_new`."""
    if path.is_file():
        raise StorageError(
            f"{path} is a file; give a JOBDIR, and a list of URLs after it (import: before it)"
        )
    if not (is_new or path.exists()):
        names = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
        near = get_close_matches(path.name, names, n=1)
        hint = f"; did you mean {path.with_name(near[0])}?" if near else ""
        raise StorageError(f"{path} does not exist; give a JOBDIR{hint}")
    return PathPlace(path)


class PathPlace:
    """A job directory; implements `Place`."""

    hands_over = True

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        self._file = path / jobdir.FILE
        self._status = path.stat() if path.exists() else None

    def reader(self) -> FilterReader:
        if has_filter(self._file):
            return FilterReader(self._file)
        if (self._path / jobdir.SEEN).exists():
            raise MissingError(
                f"{self._path} is a job with Scrapy's own duplicate filter; a crawl with "
                'DUPEFILTER_CLASS = "scrapy_bloom.BloomDupeFilter" imports what it has recorded, '
                f"or run scrapy bloom import {self._path} FILTER"
            )
        jobs = sorted(str(file.parent) for file in self._path.glob(f"*/{jobdir.FILE}"))
        hint = f"; did you mean {' or '.join(jobs[:_MOST_NAMED])}?" if jobs else ""
        raise MissingError(f"{self._path} holds no filter; give a JOBDIR{hint}")

    @contextmanager
    def recording(self, bloom: BloomSettings, origin: Origin) -> Iterator[Backend]:
        check_free(self._path)
        backend = LocalBackend(self._path, bloom.policy, origin, is_crawl=False)
        with jobdir.no_new_directory(self._path), self._locked(), opened(backend):
            yield backend

    def queue(self) -> SQLiteQueue:
        if queue := SQLiteQueue.found(self._file):
            return queue
        if scrapys_queue.has_state(self._path) or scrapys_queue.has_queued(self._path):
            raise MissingError(
                f"{self._path} holds a queue of Scrapy's own scheduler, which this command cannot "
                'read; a crawl with SCHEDULER = "scrapy_bloom.CrashSafeScheduler" takes it over'
            )
        raise MissingError(f"{self._path} holds no queue of CrashSafeScheduler; give its JOBDIR")

    def workers(self) -> Sequence[Worker] | None:
        lock = self._path / jobdir.LOCK_NAME
        if not lock.exists():
            if not has_filter(self._file):
                self.queue()  # reports what is missing
            return []
        processes = jobdir.holders(lock)
        if processes is None or 0 in processes:
            return None
        queue = found(self.queue)
        in_flight = queue.counts()[State.IN_FLIGHT] if queue else 0
        host = socket.gethostname()
        return [Worker(str(process), f"{host}:{process}", in_flight) for process in processes]

    def stop(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            with suppress(ProcessLookupError):
                os.kill(int(worker.id), signal.SIGINT)

    def add(self, batches: Batches, project: Project) -> Generator[int, None, None]:
        self.queue()  # there is one
        known = found(self.reader)
        with reading(known, project) if known else nullcontext() as reader:
            for batch in batches:
                fingerprints = [project.fingerprint(request_of(values)) for values in batch]
                seen = reader.are_seen(fingerprints) if reader else [False] * len(batch)
                requests = [
                    request
                    for request, is_seen in zip(batch, seen, strict=True)
                    if request["dont_filter"] or not is_seen
                ]
                if requests:
                    inbox.add(self._path, requests)
                yield len(requests)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if self._status is not None:
            with same_directory(self._path, self._status):
                pass  # before a lock is made there
        lock = jobdir.lock_job(self._path)
        try:
            yield
        finally:
            lock.release()

    def check_unused(self) -> None:
        with self._locked():
            pass

    def remove(self, *, has_filter: bool) -> None:
        files = list(inbox.inbox_files(self._path))
        assert self._status is not None
        with self._locked():
            if has_filter:
                files += [self._file, *log_and_index(self._file)]
            else:
                self.queue().empty()
            with same_directory(self._path, self._status) as directory:
                for file in files:
                    with suppress(FileNotFoundError):
                        os.unlink(file if directory is None else file.name, dir_fd=directory)
        for name in (jobdir.SEEN, jobdir.QUEUE):
            if has_filter and (left := self._path / name).exists():
                note(
                    f"{left} is still there: the next crawl with this JOBDIR uses it, unless you "
                    "move it away"
                )

    def source(self) -> AbstractContextManager[Source]:
        self.reader().close()  # reports what is missing
        return closing(FileSource(self._path))

    def copy_from(self, source: Source) -> int:
        return copy_to_job(source, self._path)

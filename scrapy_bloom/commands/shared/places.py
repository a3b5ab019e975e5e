"""The places that command lines name, each with a filter and the queue of a crawl.

`PathPlace` and `RedisPlace` have the same methods. Each of them may raise a StorageError.
"""

import argparse
import os
import re
import signal
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from itertools import chain
from pathlib import Path
from typing import TypeAlias, TypeVar

from scrapy.exceptions import UsageError
from scrapy.settings import Settings

from scrapy_bloom.commands.shared.cli import PROJECTS_SERVER, note
from scrapy_bloom.commands.shared.project import Addition, Project
from scrapy_bloom.copying import FileSource, RedisSource, Source, copy_to_job, copy_to_redis
from scrapy_bloom.crawl.scheduler.stored_requests import StoredRequests
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.generations.policy import Origin
from scrapy_bloom.job import jobdir, scrapys_queue
from scrapy_bloom.job.disk import check_same, log_and_index
from scrapy_bloom.job.filter import LocalBackend
from scrapy_bloom.job.reader import FilterReader, check_free, has_filter
from scrapy_bloom.queues import inbox
from scrapy_bloom.queues.collected import Collected
from scrapy_bloom.queues.redis_queue import RedisQueue
from scrapy_bloom.queues.redis_store import RedisStore
from scrapy_bloom.queues.sqlite_queue import SQLiteQueue
from scrapy_bloom.queues.store import Entered, Joining, Queue, RejoinedError, State, Worker
from scrapy_bloom.redis.backend import RedisBackend
from scrapy_bloom.redis.server import RedisServer
from scrapy_bloom.redis.stored import RedisReader, read_existing, remove_filter
from scrapy_bloom.redis.url import SCHEMES, looks_like_url
from scrapy_bloom.settings import BloomSettings

Reader: TypeAlias = FilterReader | RedisReader
_T = TypeVar("_T")

_WITH_KEY = re.compile("([^#]+)#([^@]+)")  # an "@" would show that it is a part of a password
_SCHEMES = tuple(f"{scheme}://" for scheme in SCHEMES)


class MissingError(StorageError):
    """A place has no filter, or no queue."""


def existing(read: Callable[[], _T]) -> _T | None:
    """Return what a method of a place returns, or None if that is missing."""
    try:
        return read()
    except MissingError:
        return None


class PathPlace:
    """A job directory."""

    hands_over = True  # `add` leaves requests to the crawl

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        self._file = path / jobdir.FILE
        self._status = path.stat() if path.exists() else None

    def reader(self) -> Reader:
        """Return a reader of the filter; raise a MissingError if there is none."""
        if has_filter(self._file):
            return FilterReader(self._file)
        hint = self._checked_hint()
        if (self._path / jobdir.SEEN).exists():
            raise MissingError(
                f"{self._path} is a job with Scrapy's own duplicate filter; a crawl with "
                'DUPEFILTER_CLASS = "scrapy_bloom.BloomDupeFilter" imports what it has recorded'
            )
        raise MissingError(f"{self._path} holds no filter; give a JOBDIR{hint}")

    def _checked_hint(self) -> str:
        """Return the jobs that may be meant; raise a MissingError if the path is no directory."""
        path = self._path
        if path.is_file():
            raise MissingError(f"{path} is a file; give a JOBDIR, and a list of URLs after it")
        directory = path if path.exists() else path.parent
        jobs = sorted(str(file.parent) for file in directory.glob(f"*/{jobdir.FILE}"))
        hint = f"; did you mean {' or '.join(jobs[:3])}?" if jobs else ""
        if directory is not path:
            raise MissingError(
                f"{path} does not exist; give a JOBDIR, a URL such as redis://localhost:6379/0, or "
                f"--spider with the name of a spider{hint}"
            )
        return hint

    @contextmanager
    def recording(self, bloom: BloomSettings, origin: Origin) -> Iterator[LocalBackend]:
        """Open the filter in a `with` block that records requests, and make it if there is none."""
        check_free(self._path)
        backend = LocalBackend(self._path, bloom.policy, origin, is_crawl=False)
        with jobdir.no_new_directory(self._path), self._locked():
            backend.open()
            with closing(backend):
                yield backend

    def queue(self) -> Queue:
        """Return the queue of CrashSafeScheduler; raise a MissingError if there is none."""
        if queue := SQLiteQueue.found(self._file):
            return queue
        path, hint = self._path, self._checked_hint()
        if scrapys_queue.has_state(path) or scrapys_queue.has_queued(path):
            raise MissingError(
                f"{path} holds a queue of Scrapy's own scheduler, which this command cannot "
                'read; a crawl with SCHEDULER = "scrapy_bloom.CrashSafeScheduler" takes it over'
            )
        raise MissingError(f"{path} holds no queue of CrashSafeScheduler; give its JOBDIR{hint}")

    def workers(self) -> Sequence[Worker] | None:
        """Return the processes that use the queue, also dead ones; None if that is unknown."""
        lock = self._path / jobdir.LOCK_NAME
        if not lock.exists():
            if not has_filter(self._file):
                self.queue()  # reports what is missing
            return []
        processes = jobdir.holders(lock)
        if processes is None or 0 in processes:
            return None
        queue = existing(self.queue)
        in_flight = queue.status().counts[State.IN_FLIGHT] if queue else 0
        host = socket.gethostname()
        return [Worker(str(process), f"{host}:{process}", in_flight) for process in processes]

    def stop(self, workers: Sequence[Worker]) -> None:
        """Ask workers to end, as Ctrl-C does."""
        for worker in workers:
            with suppress(ProcessLookupError):
                os.kill(int(worker.id), signal.SIGINT)

    def add(self, batches: Iterator[list[Addition]], project: Project) -> int:
        """Add requests to the queue; return how many are not duplicates."""
        self.queue()  # there is one
        reader, new = existing(self.reader), 0
        with closing(reader) if reader else nullcontext():
            if reader:
                project.check_fingerprinter(reader.origin)
            for batch in batches:
                fingerprints = [addition.fingerprint for addition in batch]
                seen = reader.are_seen(fingerprints) if reader else [False] * len(batch)
                requests = [
                    addition.values
                    for addition, is_seen in zip(batch, seen, strict=True)
                    if addition.request.dont_filter or not is_seen
                ]
                if requests:
                    inbox.add(self._path, requests)
                new += len(requests)
        return new

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if self._status is not None:
            check_same(self._path, self._status)  # before a lock is made there
        lock = jobdir.lock_job(self._path)
        try:
            yield
        finally:
            lock.release()

    def check_unused(self) -> None:
        """Raise a StorageError if a crawl uses the place."""
        with self._locked():
            pass

    def remove(self, *, has_filter: bool) -> None:
        """Remove the queue, and the filter if there is one to remove; no crawl may use a JOBDIR."""
        files = list(inbox.inbox_files(self._path))
        with self._locked():
            if has_filter:
                files += [self._file, *log_and_index(self._file)]
            else:
                SQLiteQueue(self._file).empty()
            for file in files:
                file.unlink(missing_ok=True)
        for name in (jobdir.SEEN, jobdir.QUEUE):
            if has_filter and (self._path / name).exists():
                note(f"{self._path / name} is still there: the next crawl with this JOBDIR uses it")

    def source(self) -> FileSource:
        """Return the filter and its queue, to be copied and closed."""
        self.reader().close()  # reports what is missing
        return FileSource(self._path)

    def copy_from(self, source: Source) -> int:
        """Make the place as a copy; return how many requests of a queue were copied."""
        return copy_to_job(source, self._path)


class RedisPlace:
    """A filter on a Redis server, and its queue."""

    hands_over = False

    def __init__(self, server: RedisServer, key: str) -> None:
        self._place = server, key
        self._queue = RedisQueue(server, key)
        self.name = f"{key} in {server.address}"

    def reader(self) -> Reader:
        server, key = self._place
        if not server.send("EXISTS", key):
            raise MissingError(
                f"{server.address} has no filter {key!r}; `scrapy bloom info` with the URL alone "
                "lists its filters"
            )
        return RedisReader(server, key)

    @contextmanager
    def recording(self, bloom: BloomSettings, origin: Origin) -> Iterator[RedisBackend]:
        backend = RedisBackend(*self._place, bloom.policy, origin, mirror=bloom.redis_mirror)
        backend.open()
        with closing(backend):
            yield backend

    def queue(self) -> Queue:
        self.workers()  # there is one
        return self._queue

    def workers(self) -> Sequence[Worker]:
        server, key = self._place
        if (status := self._queue.find()) is None:
            raise MissingError(
                f"{server.address} has no queue {key!r}; `scrapy bloom info` with the URL alone "
                "lists its filters"
            )
        return status.workers

    def stop(self, workers: Sequence[Worker]) -> None:
        self._queue.stop(worker.id for worker in workers)

    def add(self, batches: Iterator[list[Addition]], project: Project) -> int:
        server, key = self._place
        state = self._queue.find()
        spider = project.spider or (state.spider if state else "")
        if state is None and not spider:
            raise StorageError(
                f"{server.address} has no queue {key!r}; no request was added; give the spider of "
                "a new one with --spider"
            )
        if (first := next(batches, None)) is None:
            return 0
        requests = StoredRequests(project.crawler)
        origin = Origin(fingerprinter=project.fingerprinter, spider=spider)
        backend = RedisBackend(server, key, project.bloom.policy, origin, mirror=False)
        store = RedisStore(backend, lease_secs=project.bloom.queue_lease_secs)
        backend.open()
        try:
            store.open(Joining(spider, is_crawl=False))
            return sum(
                _enter(store, [requests.pack(*addition.as_it_enters) for addition in batch])
                for batch in chain([first], batches)
            )
        finally:
            for part in (store, backend):
                with suppress(StorageError):  # the lease of this worker expires by itself
                    part.close()

    def check_unused(self) -> None:
        self._queue.find_unused("deleted", "; or add --force")

    def remove(self, *, has_filter: bool) -> None:
        if has_filter:
            stored = read_existing(*self._place, may_be_copied=True)
            remove_filter(*self._place, stored.id)
        else:
            self._queue.remove()

    def source(self) -> RedisSource:
        self.reader()  # reports what is missing
        return RedisSource(*self._place)

    def copy_from(self, source: Source) -> int:
        return copy_to_redis(source, *self._place)


Place: TypeAlias = PathPlace | RedisPlace


def _enter(store: RedisStore, requests: Iterable[Entered]) -> int:
    """Return how many of the requests were queued."""
    collected, queued = Collected(), 0
    for entered in requests:
        collected.enter(entered)
    while collected:
        changes = collected.next_batch()
        try:
            reply = store.apply(changes)
        except RejoinedError as error:
            # The lease expired while a pipe gave nothing, or the server was rolled back. What it
            # has lost is counted already.
            _enter(store, error.lost)
            reply = store.apply(changes)
        queued += sum(reply.queued)
    return queued


@contextmanager
def opened_place(
    options: argparse.Namespace, settings: Settings, text: str | None = None, spider: str = ""
) -> Iterator[tuple[Place, Project]]:
    """Open a place, by default that of the options or of the settings; yield its project, too.

    `spider` is put into BLOOM_REDIS_KEY if there is neither a key nor --spider.
    """
    if not (text := text or options.place):
        project = Project(settings, options.spider, None)
        job_dir = str(project.crawler.settings["JOBDIR"] or "")
        text = PROJECTS_SERVER if project.bloom.is_in_redis else job_dir
    if not text:
        raise UsageError(
            "the settings have neither BLOOM_REDIS_URL nor JOBDIR; give a path, the URL of a "
            "server, or the word redis for the server of scrapy-redis's settings"
        )
    url, key = split_url(text)
    project = Project(settings, options.spider, url)
    if url is None:
        yield PathPlace(Path(text)), project
        return
    if key is None:
        key, spider = project.bloom.redis_key, project.spider or spider
        if "%(spider)s" in key and not spider:
            raise UsageError(
                "the name of the filter is missing; give URL#KEY, or --spider with the spider's "
                f"name (BLOOM_REDIS_KEY is {key!r})"
            )
        key %= {"spider": spider}
    if "{" in key or "}" in key:
        raise UsageError(f"the name of the filter is {key!r}; use one without braces")
    with answering_server(project) as server:
        yield RedisPlace(server, key), project


def split_url(text: str) -> tuple[str | None, str | None]:
    """Return the URL and the key in REDIS-URL#KEY, in which the key is optional.

    Both are None for a path. Raises a UsageError for another URL, because a directory with its name
    would show the password.

    >>> split_url("redis://host/0#shop:bloom"), split_url("redis"), split_url("jobs/a#b")
    (('redis://host/0', 'shop:bloom'), ('redis', None), (None, None))
    """
    match = _WITH_KEY.fullmatch(text)
    url, key = (match[1], match[2]) if match else (text, None)
    if url == PROJECTS_SERVER or url.lower().startswith(_SCHEMES):
        return url, key
    if looks_like_url(text) or text.lower().startswith(tuple(scheme[:-1] for scheme in _SCHEMES)):
        raise UsageError(
            f"{text} is neither a path nor the URL of a Redis server, which begins with "
            f"{', '.join(_SCHEMES[:-1])} or {_SCHEMES[-1]}; give the filter first, and then URLs"
        )
    return None, None


@contextmanager
def answering_server(project: Project) -> Iterator[RedisServer]:
    """Yield the server of a project once it has answered; wait for it only a short time."""
    with closing(project.bloom.redis_server()) as server:
        deadline_secs = server.deadline_secs
        server.deadline_secs = min(deadline_secs, 1.5)  # because the URL may be mistyped
        server.now()
        server.deadline_secs = deadline_secs
        yield server

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
from scrapy.utils.httpobj import urlparse_cached

from scrapy_bloom.commands.shared.cli import PROJECTS_SERVER, note
from scrapy_bloom.commands.shared.project import Addition, Project
from scrapy_bloom.copying import FileSource, RedisSource, Source, copy_to_job, copy_to_redis
from scrapy_bloom.crawl.scheduler.stored_requests import order_of, serves_least_busy_slot
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.generations.policy import Origin
from scrapy_bloom.job import jobdir, scrapys_queue
from scrapy_bloom.job.disk import log_and_index, same_directory
from scrapy_bloom.job.filter import LocalBackend
from scrapy_bloom.job.reader import FilterReader, check_free, has_filter
from scrapy_bloom.queues import inbox, redis_queue
from scrapy_bloom.queues.collected import Collected
from scrapy_bloom.queues.redis_store import RedisStore
from scrapy_bloom.queues.serialized import serialized
from scrapy_bloom.queues.sqlite_queue import SQLiteQueue
from scrapy_bloom.queues.store import Batch, Entered, Joining, Queue, RejoinedError, State, Worker
from scrapy_bloom.redis.backend import RedisBackend
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.connection.url import SCHEMES, looks_like_url
from scrapy_bloom.redis.stored import RedisReader, read_existing, remove_filter
from scrapy_bloom.settings import BloomSettings

Reader: TypeAlias = FilterReader | RedisReader
_T = TypeVar("_T")

_WITH_KEY = re.compile("([^#]+)#([^@]+)")  # an "@" would show that it is a part of a password
_SCHEMES = tuple(f"{scheme}://" for scheme in SCHEMES)


_MOST_NAMED = 3  # jobs in a directory


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
        path = self._path
        if path.is_file():
            raise MissingError(f"{path} is a file; give a JOBDIR, and a list of URLs after it")
        if not path.exists():
            raise MissingError(f"{path} does not exist; give a JOBDIR")
        if (path / jobdir.SEEN).exists():
            raise MissingError(
                f"{path} is a job with Scrapy's own duplicate filter; a crawl with "
                'DUPEFILTER_CLASS = "scrapy_bloom.BloomDupeFilter" imports what it has recorded'
            )
        jobs = sorted(str(file.parent) for file in path.glob(f"*/{jobdir.FILE}"))
        hint = f"; did you mean {' or '.join(jobs[:_MOST_NAMED])}?" if jobs else ""
        raise MissingError(f"{path} holds no filter; give a JOBDIR{hint}")

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
        if scrapys_queue.has_state(self._path) or scrapys_queue.has_queued(self._path):
            raise MissingError(
                f"{self._path} holds a queue of Scrapy's own scheduler, which this command cannot "
                'read; a crawl with SCHEDULER = "scrapy_bloom.CrashSafeScheduler" takes it over'
            )
        raise MissingError(f"{self._path} holds no queue of CrashSafeScheduler; give its JOBDIR")

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
        in_flight = queue.counts()[State.IN_FLIGHT] if queue else 0
        host = socket.gethostname()
        return [Worker(str(process), f"{host}:{process}", in_flight) for process in processes]

    def stop(self, workers: Sequence[Worker]) -> None:
        """Ask workers to end, as Ctrl-C does."""
        for worker in workers:
            with suppress(ProcessLookupError):
                os.kill(int(worker.id), signal.SIGINT)

    def add(self, batches: Iterator[list[Addition]], project: Project) -> int:
        """Add requests to the queue; return how many are no duplicates."""
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
            with same_directory(self._path, self._status):
                pass  # before a lock is made there
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
        """Remove the queue, and also the filter or not; a crawl must not use a JOBDIR."""
        files = list(inbox.inbox_files(self._path))
        assert self._status is not None
        with self._locked():
            if has_filter:
                files += [self._file, *log_and_index(self._file)]
            else:
                SQLiteQueue(self._file).empty()
            with same_directory(self._path, self._status) as directory:
                for file in files:
                    with suppress(FileNotFoundError):
                        os.unlink(file if directory is None else file.name, dir_fd=directory)
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
        return redis_queue.RedisQueue(*self._place)

    def workers(self) -> Sequence[Worker]:
        server, key = self._place
        if (status := redis_queue.read_state(server, key)) is None:
            raise MissingError(f"{server.address} has no queue {key!r}")
        return status.workers

    def stop(self, workers: Sequence[Worker]) -> None:
        redis_queue.stop_workers(*self._place, [worker.id for worker in workers])

    def add(self, batches: Iterator[list[Addition]], project: Project) -> int:
        server, key = self._place
        state = redis_queue.read_state(server, key)
        spider = project.spider or (state.spider if state else "")
        if state is None and not spider:
            raise StorageError(
                f"{server.address} has no queue {key!r}; no request was added; give the spider of "
                "a new one with --spider"
            )
        if (first := next(batches, None)) is None:
            return 0
        entered = _entering(project)
        origin = Origin(fingerprinter=project.fingerprinter, spider=spider)
        backend = RedisBackend(server, key, project.bloom.policy, origin, mirror=False)
        store = RedisStore(backend, lease_secs=project.bloom.queue_lease_secs)
        backend.open()
        try:
            store.open(Joining(spider, is_crawl=False))
            return sum(
                _apply(store, changes)
                for batch in chain([first], batches)
                for changes in _split(map(entered, batch))
            )
        finally:
            for part in (store, backend):
                with suppress(StorageError):  # the lease of this worker expires by itself
                    part.close()

    def check_unused(self) -> None:
        redis_queue.read_unused(*self._place, "deleted", "; or add --force")

    def remove(self, *, has_filter: bool) -> None:
        if has_filter:
            stored = read_existing(*self._place, may_be_copied=True)
            remove_filter(*self._place, stored.id)
        else:
            redis_queue.remove_queue(*self._place)

    def source(self) -> RedisSource:
        return RedisSource(*self._place)

    def copy_from(self, source: Source) -> int:
        return copy_to_redis(source, *self._place)


Place: TypeAlias = PathPlace | RedisPlace


def _entering(project: Project) -> Callable[[Addition], Entered]:
    order, by_slot = order_of(project.crawler), serves_least_busy_slot(project.crawler)

    def entered(addition: Addition) -> Entered:
        request = addition.request
        rank, newest_first = order(request)
        slot = request.meta.get("download_slot")
        if not (slot and isinstance(slot, str | int)):
            slot = urlparse_cached(request).hostname or ""
        return Entered(
            serialized(addition.values),
            None if request.dont_filter else addition.fingerprint,
            slot=str(slot) if by_slot else "",
            priority=request.priority,
            rank=rank,
            newest_first=newest_first,
            has_parent=False,
        )

    return entered


def _apply(store: RedisStore, changes: Batch) -> int:
    """Apply a batch, and return how many requests were queued."""
    try:
        return sum(store.apply(changes).queued)
    except RejoinedError as error:
        # The lease expired while a pipe gave nothing, or the server was rolled back. What it has
        # lost is counted already.
        for lost in _split(error.lost):
            store.apply(lost)
        return sum(store.apply(changes).queued)


def _split(requests: Iterable[Entered]) -> Iterator[Batch]:
    collected = Collected()
    for entered in requests:
        collected.enter(entered)
    while collected:
        yield collected.next_batch()


@contextmanager
def opened_place(
    options: argparse.Namespace, settings: Settings, text: str | None = None, spider: str = ""
) -> Iterator[tuple[Place, Project]]:
    """Open a place, by default that of the options or of the settings; yield its project, too.

    `spider` is put into BLOOM_REDIS_KEY if there is neither a key nor --spider.
    """
    text = text or options.place or _projects_place(options, settings)
    url, key = split_url(text)
    project = Project(settings, options.spider, url)
    if url is None:
        yield PathPlace(Path(text)), project
        return
    key = key or _projects_key(project, spider)
    if "{" in key or "}" in key:
        raise UsageError(f"the name of the filter is {key!r}; use one without braces")
    with answering_server(project) as server:
        yield RedisPlace(server, key), project


def _projects_place(options: argparse.Namespace, settings: Settings) -> str:
    project = Project(settings, options.spider, None)
    if project.bloom.is_in_redis:
        return PROJECTS_SERVER
    if job_dir := project.crawler.settings.get("JOBDIR"):
        return str(job_dir)
    raise UsageError(
        "the settings have neither BLOOM_REDIS_URL nor JOBDIR; give a path, the URL of a server, "
        "or the word redis for the server of scrapy-redis's settings"
    )


def _projects_key(project: Project, spider: str) -> str:
    key, spider = project.bloom.redis_key, project.spider or spider
    if "%(spider)s" in key and not spider:
        raise UsageError(
            "the name of the filter is missing; give URL#KEY, or --spider with the spider's name "
            f"(BLOOM_REDIS_KEY is {key!r})"
        )
    return key % {"spider": spider}


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
    if looks_like_url(text):
        raise UsageError(
            f"{text} is neither a path nor the URL of a Redis server, which begins with "
            f"{', '.join(_SCHEMES[:-1])} or {_SCHEMES[-1]}; give the filter first, and then URLs"
        )
    return None, None


@contextmanager
def answering_server(project: Project) -> Iterator[RedisServer]:
    """Open the server of a project in a `with` block, once it has answered: the wait is short."""
    with closing(project.bloom.redis_server()) as server:
        deadline_secs = server.deadline_secs
        server.deadline_secs = min(deadline_secs, 1.5)  # because the URL may be mistyped
        server.now()
        server.deadline_secs = deadline_secs
        yield server

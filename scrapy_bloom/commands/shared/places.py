"""Places: what a command line names, a path or the URL of a server, with a filter and its queue.

Both kinds have the same methods, so a command has no branch for files or Redis. Each method may
raise a StorageError.
"""

import argparse
import os
import signal
import socket
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias

from scrapy.exceptions import UsageError
from scrapy.settings import Settings

from scrapy_bloom.commands.shared.adding import add_to_shared_queue, request_of
from scrapy_bloom.commands.shared.arguments import PROJECTS_SERVER, split_url
from scrapy_bloom.commands.shared.lists import is_list
from scrapy_bloom.commands.shared.output import note
from scrapy_bloom.commands.shared.project import Project, answering_server, load_project
from scrapy_bloom.copying.sources import FileSource, RedisSource, Source
from scrapy_bloom.copying.transfer import copy_to_job, copy_to_redis
from scrapy_bloom.exceptions import (
    BloomError,
    FingerprinterMismatchError,
    RefusedError,
    StorageError,
)
from scrapy_bloom.generations.policy import Origin
from scrapy_bloom.job import jobdir, scrapys_queue
from scrapy_bloom.job.disk import log_and_index
from scrapy_bloom.job.filter import LocalBackend
from scrapy_bloom.job.reader import FilterReader, check_free, has_filter
from scrapy_bloom.queues.handed_over import hand_over, handed_over_files
from scrapy_bloom.queues.redis_queue import (
    RedisQueue,
    read_state,
    read_unused,
    remove_queue,
    stop_workers,
)
from scrapy_bloom.queues.sqlite_queue import SQLiteQueue
from scrapy_bloom.queues.store import State, Worker
from scrapy_bloom.redis.backend import RedisBackend
from scrapy_bloom.redis.changes import remove_filter
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.stored import RedisReader, filters_on, read_existing
from scrapy_bloom.settings import BloomSettings

_SHOWN_KEYS = 5  # of a server, if the one that is given is missing

Figures: TypeAlias = dict[str, Any]
Reader: TypeAlias = FilterReader | RedisReader
Backend: TypeAlias = LocalBackend | RedisBackend
Batches: TypeAlias = Iterator[list[dict[str, Any]]]  # requests in the form of `Request.to_dict`


class PathPlace:
    """A job directory.

    Attributes:
        name: the place in messages.
        hands_over: whether `add` leaves requests to the crawl.
    """

    hands_over = True

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        self._file = path / jobdir.FILE

    # The filter.

    def has_filter(self) -> bool:
        """Return whether there is a filter, which may be damaged."""
        return has_filter(self._file)

    def filter(self) -> FilterReader:
        """Return a reader of the filter."""
        if jobdir.is_database(self._file):
            return FilterReader(self._file)
        if (self._path / jobdir.SEEN).exists():
            raise StorageError(
                f"{self._path} is a job with Scrapy's own duplicate filter; a crawl with "
                'DUPEFILTER_CLASS = "scrapy_bloom.BloomDupeFilter" imports what it has recorded, '
                f"or run scrapy bloom import {self._path} FILTER"
            )
        raise StorageError(f"{self._path} holds no filter; give a JOBDIR")

    @contextmanager
    def recording(self, bloom: BloomSettings, origin: Origin) -> Iterator[Backend]:
        """Open the filter in a `with` block that records requests, and make it if there is none."""
        check_free(self._path)
        backend = LocalBackend(self._path, bloom.policy, origin, is_crawl=False)
        with jobdir.no_new_directory(self._path), self.unused(force=False), _opened(backend):
            yield backend

    # The queue and its crawl.

    def queue(self) -> SQLiteQueue:
        """Return the queue of CrashSafeScheduler; raises a StorageError if there is none."""
        if (queue := self.find_queue()) is None:
            if scrapys_queue.has_state(self._path) or scrapys_queue.has_queued(self._path):
                raise StorageError(
                    f"{self._path} holds a queue of Scrapy's own scheduler, which this command "
                    "cannot read; a crawl with SCHEDULER = "
                    '"scrapy_bloom.CrashSafeScheduler" takes it over'
                )
            raise StorageError(
                f"{self._path} holds no queue of CrashSafeScheduler; give its JOBDIR"
            )
        return queue

    def find_queue(self) -> SQLiteQueue | None:
        """Return the queue of CrashSafeScheduler, or None."""
        return SQLiteQueue.found(self._file)

    def workers(self) -> Sequence[Worker] | None:
        """Return the process that uses the job; None if that is unknown."""
        lock = self._path / jobdir.LOCK_NAME
        if not lock.exists():
            if not self.has_filter():
                self.queue()  # reports what is missing
            return []
        processes = jobdir.holders(lock)
        if processes is None or 0 in processes:
            return None
        queue = self.find_queue()
        in_flight = queue.counts()[State.IN_FLIGHT] if queue else 0
        host = socket.gethostname()
        return [Worker(str(process), f"{host}:{process}", in_flight) for process in processes]

    def stop(self, workers: Sequence[Worker]) -> None:
        """Ask processes to end, as Ctrl-C does; a second time would end them at once."""
        for worker in workers:
            with suppress(ProcessLookupError):
                os.kill(int(worker.id), signal.SIGINT)

    def add(self, batches: Batches, project: Project) -> Generator[int, None, None]:
        """Hand requests over to the crawl, which filters them once more.

        Yields how many requests of each batch are no duplicates.
        """
        self.queue()  # there is one
        with reading(self, project) if self.has_filter() else nullcontext() as reader:
            for batch in batches:
                fingerprints = [project.fingerprint(request_of(each)) for each in batch]
                seen = reader.are_seen(fingerprints) if reader else [False] * len(batch)
                requests: list[Mapping[str, Any]] = [
                    request
                    for request, is_seen in zip(batch, seen, strict=True)
                    if request["dont_filter"] or not is_seen
                ]
                hand_over(self._path, requests)
                yield len(requests)

    # The whole place.

    @contextmanager
    def unused(self, *, force: bool) -> Iterator[str]:  # noqa: ARG002 - in Redis
        """Keep crawls away in a `with` block; raises a StorageError if one uses the place."""
        lock = jobdir.lock_job(self._path)
        try:
            yield ""
        finally:
            lock.release()

    def remove(self, *, has_filter: bool) -> None:
        """Remove the queue, and also the filter or not."""
        if has_filter:
            for file in (self._file, *log_and_index(self._file)):
                file.unlink(missing_ok=True)
        else:
            self.queue().empty()
        for file in handed_over_files(self._path):
            file.unlink(missing_ok=True)
        for name in (jobdir.SEEN, jobdir.QUEUE):
            if has_filter and (left := self._path / name).exists():
                note(
                    f"{left} is still there: the next crawl with this JOBDIR uses it, unless you "
                    "move it away"
                )

    def source(self) -> AbstractContextManager[Source]:
        """Return the filter and its queue for a `with` block that copies them."""
        self.filter().close()  # reports what is missing
        return closing(FileSource(self._path))

    def copy_from(self, source: Source) -> int:
        """Make a new job as a copy; return how many requests of a queue were copied."""
        return copy_to_job(source, self._path)


class RedisPlace:
    """A filter on a Redis server, and its queue."""

    hands_over = False

    def __init__(self, server: RedisServer, key: str) -> None:
        self.server = server
        self.key = key
        self.name = f"{key} in {server.address}"

    # The filter.

    def has_filter(self) -> bool:
        """Return whether there is a filter, which may be damaged."""
        return bool(self.server.send("EXISTS", self.key))

    def filter(self) -> RedisReader:
        """Return a reader of the filter."""
        return RedisReader(self.server, self.key)

    def recording(self, bloom: BloomSettings, origin: Origin) -> AbstractContextManager[Backend]:
        """Open the filter in a `with` block that records requests, and make it if there is none."""
        place, mirror = (self.server, self.key), bloom.redis_mirror
        return _opened(RedisBackend(*place, bloom.policy, origin, mirror=mirror))

    # The queue and its crawl.

    def queue(self) -> RedisQueue:
        """Return the queue of CrashSafeScheduler; raises a StorageError if there is none."""
        if (queue := self.find_queue()) is None:
            raise StorageError(f"{self.server.address} has no queue {self.key!r}")
        return queue

    def find_queue(self) -> RedisQueue | None:
        """Return the queue of CrashSafeScheduler, or None."""
        has_queue = read_state(self.server, self.key) is not None
        return RedisQueue(self.server, self.key) if has_queue else None

    def workers(self) -> Sequence[Worker] | None:
        """Return the workers of the queue, also those whose lease has expired."""
        self.queue()
        state = read_state(self.server, self.key)
        return state.workers if state else []

    def stop(self, workers: Sequence[Worker]) -> None:
        """Ask workers to end at their next batch, as after Ctrl-C."""
        stop_workers(self.server, self.key, [worker.id for worker in workers])

    def add(self, batches: Batches, project: Project) -> Generator[int, None, None]:
        """Add requests to the queue, or begin one for a known spider.

        Yields how many requests of each batch are no duplicates.
        """
        state = read_state(self.server, self.key)
        spider = project.spider or (state.crawl if state else "")
        if state is None and not spider:
            raise StorageError(
                f"{self.server.address} has no queue {self.key!r}; no request was added; give the "
                "spider of a new one with --spider"
            )
        yield from add_to_shared_queue(self.server, self.key, spider, batches, project)

    # The whole place.

    @contextmanager
    def unused(self, *, force: bool) -> Iterator[str]:
        """Say which workers use the queue; raises a StorageError if any do, unless forced."""
        text = ""
        if not force:
            read_unused(self.server, self.key, "deleted", "; or add --force")
            text = "No worker uses it now."
        with suppress(RefusedError):  # it is damaged
            if (state := read_state(self.server, self.key)) and state.live_workers:
                text = f"{state.users} it now: they start over."
        yield text

    def remove(self, *, has_filter: bool) -> None:
        """Remove the queue, and also the filter or not."""
        if has_filter:
            stored = read_existing(self.server, self.key, may_be_copied=True)
            remove_filter(self.server, self.key, stored.id)
        else:
            remove_queue(self.server, self.key)

    def source(self) -> AbstractContextManager[Source]:
        """Return the filter and its queue for a `with` block that copies them."""
        return nullcontext(RedisSource(self.server, self.key))

    def copy_from(self, source: Source) -> int:
        """Make a new filter as a copy; return how many requests of a queue were copied."""
        return copy_to_redis(source, self.server, self.key)


Place: TypeAlias = PathPlace | RedisPlace


@contextmanager
def _opened(backend: Backend) -> Iterator[Backend]:
    """Open a filter, and close it; after an error, ignore a second one from closing."""
    backend.open()
    try:
        yield backend
    except BaseException:
        with suppress(BloomError):
            backend.close()
        raise
    backend.close()


@dataclass(frozen=True)
class Address:
    """A place as the command line names it."""

    path: Path
    url: str | None  # of a server, or "redis" for that of the project's settings; None: the path
    key: str | None  # the name of the filter; None: BLOOM_REDIS_KEY with the name of the spider
    spider: str | None

    @classmethod
    def of(cls, text: str, key: str | None, spider: str | None) -> "Address":
        """Return the address in a text (a path, REDIS-URL or REDIS-URL#KEY) and two options."""
        url, key_in_url = split_url(text)
        if url is None and key is not None:
            raise UsageError(
                f"--key says which filter in Redis is meant, and {text} is a path; leave --key "
                "out, or give the URL of the server"
            )
        if key is not None and key_in_url is not None:
            raise UsageError(f"--key and #{key_in_url} both name the filter; leave one of them out")
        return cls(Path(text), url, key or key_in_url, spider)


def take_place(options: argparse.Namespace, settings: Settings) -> None:
    """Replace the place of a command line by its address: that of the project, if it has none."""
    text = options.place or _projects_place(options, settings)
    options.place = Address.of(text, options.key, options.spider)


def _projects_place(options: argparse.Namespace, settings: Settings) -> str:
    """Return the place of the project's crawl: its server or its JOBDIR.

    Raises a UsageError if the project's settings name neither.
    """
    project = load_project(settings, options.spider)
    if project.bloom.is_in_redis:
        return PROJECTS_SERVER
    if job_dir := project.crawler.settings.get("JOBDIR"):
        return str(job_dir)
    raise UsageError(
        "no place is given, and the settings have neither BLOOM_REDIS_URL nor JOBDIR; give a path, "
        "the URL of a server, as in redis://localhost:6379/0, or the word redis for the server of "
        "scrapy-redis's settings"
    )


@contextmanager
def opened_place(
    address: Address, source: Settings | Project, *, is_new: bool = False
) -> Iterator[Place]:
    """Open a place in a `with` block; a filter that `is_new` need not be there.

    The source is the settings, or a project that was loaded with the URL.
    """
    if address.url is None:
        _check_path(address.path, is_new=is_new)
        yield PathPlace(address.path)
        return
    project = source
    if not isinstance(project, Project):
        project = load_project(project, address.spider, address.url)
    if (key := address.key) is None:
        if "%(spider)s" in project.bloom.redis_key and not address.spider:
            raise UsageError(
                "the name of the filter is missing; give --key, or --spider with the spider's "
                f"name (BLOOM_REDIS_KEY is {project.bloom.redis_key!r})"
            )
        key = project.bloom.redis_key % {"spider": address.spider}
    if "{" in key or "}" in key:
        raise UsageError(f"--key is {key!r}; use a name without braces")
    with closing(answering_server(project)) as server:
        place = RedisPlace(server, key)
        if not (is_new or place.has_filter()):
            known = filters_on(server)
            near = get_close_matches(key, known, n=_SHOWN_KEYS, cutoff=0)
            some = ", ".join(near) + (", ..." if known[_SHOWN_KEYS:] else "")
            raise StorageError(
                f"{server.address} has no filter {key!r}; "
                + (f"its filters are: {some}" if known else "it has none at all")
                + " (--key, or BLOOM_REDIS_KEY with the name of the spider)"
            )
        yield place


def _check_path(path: Path, *, is_new: bool) -> None:
    """Raise an error if there is no directory at a path, which may be missing if it `is_new`."""
    if path.is_file() and is_list(path):
        raise UsageError(
            f"{path} is a list of URLs, not a filter; give the filter first, and then the list "
            "(import: the list first)"
        )
    if path.is_file():
        hint = f"; did you mean {path.parent}?" if path.name == jobdir.FILE else ""
        raise StorageError(f"{path} is a file; give a JOBDIR{hint}")
    if not (is_new or path.exists()):
        names = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
        near = get_close_matches(path.name, names, n=1)
        hint = f"; did you mean {path.with_name(near[0])}?" if near else ""
        raise StorageError(f"{path} does not exist; give a JOBDIR{hint}")


@contextmanager
def reading(place: Place, project: Project) -> Iterator[Reader]:
    """Open a filter, at a place that is open, for lookups with the project's fingerprints.

    Raises a FingerprinterMismatchError if the filter was recorded with another fingerprinter.
    """
    with closing(place.filter()) as reader:
        if reader.fingerprinter != project.fingerprinter:
            raise FingerprinterMismatchError(
                "the filter was recorded with REQUEST_FINGERPRINTER_CLASS = "
                f"{reader.fingerprinter!r}, and this project has {project.fingerprinter!r}, which "
                "would find nothing in it; run the command in the filter's project, or with "
                f"-s REQUEST_FINGERPRINTER_CLASS={reader.fingerprinter}"
            )
        yield reader

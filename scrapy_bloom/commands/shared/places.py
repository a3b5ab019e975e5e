"""Places: what a command line names, a path or the URL of a server, with a filter and its queue.

Both kinds have the same methods, so a command has no branch for files or Redis. It calls `open`
first and `close` last. Each method may raise a StorageError.
"""

import argparse
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias

from scrapy.exceptions import UsageError
from scrapy.settings import Settings

from scrapy_bloom.commands.shared.adding import JobAdder, RedisAdder
from scrapy_bloom.commands.shared.arguments import PROJECTS_SERVER, split_url
from scrapy_bloom.commands.shared.lists import is_list
from scrapy_bloom.commands.shared.output import note
from scrapy_bloom.commands.shared.project import Project, answering_server, load_project
from scrapy_bloom.copying.sources import FileSource, RedisSource
from scrapy_bloom.copying.transfer import JobTarget, RedisTarget
from scrapy_bloom.exceptions import (
    BloomError,
    FingerprinterMismatchError,
    RefusedError,
    StorageError,
)
from scrapy_bloom.files.backend import LocalBackend
from scrapy_bloom.files.directory import (
    FilterReader,
    check_free,
    filter_directory,
    found_files,
    other_files,
)
from scrapy_bloom.generations.policy import Generation, Origin, Policy
from scrapy_bloom.job import jobdir
from scrapy_bloom.job.disk import check_file, log_and_index
from scrapy_bloom.queues.handed_over import handed_over_files
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
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.filter import empty_filter
from scrapy_bloom.redis.making import remove_filter
from scrapy_bloom.redis.stored import RedisReader, filters_on, read_existing, read_stored

_FILTER_FIRST = "the filter first, and then the list"
_SHOWN_KEYS = 5  # of a server, if the one that is given is missing

Figures: TypeAlias = dict[str, Any]
Reader: TypeAlias = FilterReader | RedisReader
Backend: TypeAlias = LocalBackend | RedisBackend


class PathPlace:
    """A job directory, or the directory of a filter.

    Attributes:
        url: None, because the place is on no server.
        name: the place in messages.
        needs_key: False; of a place on a server, whether the name of the filter is missing.
        spider: the name of the spider, which a path does not depend on.
    """

    url: str | None = None
    needs_key = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)
        self.spider: str | None = None

    def open(self, source: Settings | Project, *, is_new: bool = False) -> None:  # noqa: ARG002 - of a server
        """Raise a StorageError if the path is missing, unless it `is_new`, or is a list."""
        path = self.path
        if not (is_new or path.exists()):
            near = get_close_matches(path.name, [each.name for each in _siblings(path)], n=1)
            hint = f"; did you mean {path.with_name(near[0])}?" if near else ""
            raise StorageError(
                f"{path} does not exist; give a JOBDIR, or a directory with the files of a filter"
                f"{hint}"
            )
        if path.is_file() and is_list(path):
            order = "the list first, and then the filter" if is_new else _FILTER_FIRST
            raise UsageError(f"{path} is a list of URLs, not a filter; give {order}")
        if path.is_file() and is_new:
            raise StorageError(
                f"{path} exists already, and is a file; give the source first, and then a "
                "directory for the filter"
            )
        if path.is_file():
            known = path.name == jobdir.DATABASE or path in jobdir.filter_files(path.parent)
            hint = f"; did you mean {path.parent}?" if known else ""
            raise StorageError(
                f"{path} is a file; give a JOBDIR, or a directory with the files of a filter{hint}"
            )

    def close(self) -> None:
        """Do nothing."""

    def shorten_waits(self, secs: float) -> None:
        """Do nothing: there is no server to wait for."""

    # The filter.

    @property
    def location(self) -> str:
        """The directory of the filter's files."""
        return str(self._directory().absolute())

    def _directory(self) -> Path:
        return filter_directory(self.path)

    @property
    def job_dir(self) -> Path | None:
        """The job directory, if the filter is or will be that of a job."""
        directory = self._directory()
        return directory.parent if directory.name == "bloom" else None

    def has_filter(self) -> bool:
        """Return whether there is a filter, which may be damaged."""
        return bool(jobdir.filter_files(filter_directory(self.path)))

    def filter(self, *, window: float = 0.0) -> FilterReader:
        """Return a reader of the filter, which answers as crawls with that BLOOM_WINDOW_SECS do."""
        # Read before the filter, so that a checkpoint between the two hides nothing.
        queue = self.find_queue()
        recent = queue.recent() if queue else frozenset()
        if (self.path / jobdir.SEEN).exists() and not self.has_filter():
            raise StorageError(
                f"{self.path} is a job with Scrapy's own duplicate filter; a crawl with "
                'DUPEFILTER_CLASS = "scrapy_bloom.BloomDupeFilter" imports what it has recorded, '
                f"or run scrapy bloom import {self.path} FILTER"
            )
        return FilterReader(self.path, window=window, recent=recent)

    def generations(self) -> Sequence[Generation]:
        """Return the generations of a filter that is to be changed; none if it is new.

        Raises a StorageError if a crawl uses it, or was killed.
        """
        check_free(self._directory())
        return found_files(self._directory()) if self.has_filter() else ()

    @contextmanager
    def recording(self, policy: Policy, origin: Origin, *, mirror: bool) -> Iterator[LocalBackend]:  # noqa: ARG002 - for Redis
        """Open the filter in a `with` block that records requests, and make it if there is none."""
        backend = LocalBackend(self._directory(), policy, origin, is_crawl=False)
        with jobdir.no_new_directory(self._directory()), _opened(backend):
            yield backend

    # The queue and its crawl.

    def queue(self) -> SQLiteQueue:
        """Return the queue of CrashSafeScheduler; raises a StorageError if there is none."""
        if (queue := self.find_queue()) is None:
            self._refuse_scrapys_queue()
            raise StorageError(f"{self.path} holds no queue of CrashSafeScheduler; give its JOBDIR")
        return queue

    def _refuse_scrapys_queue(self) -> None:
        if jobdir.has_state(self.path) or jobdir.has_queued(self.path):
            raise StorageError(
                f"{self.path} holds a queue of Scrapy's own scheduler, which this command cannot "
                'read; a crawl with SCHEDULER = "scrapy_bloom.CrashSafeScheduler" takes it over'
            )

    def find_queue(self) -> SQLiteQueue | None:
        """Return the queue of CrashSafeScheduler, or None."""
        # The parent of a filter's directory may be its job. No other path belongs to its parent.
        path = self.path
        for job_dir in (path, path.parent) if jobdir.filter_files(path) else (path,):
            if jobdir.is_database(database := job_dir / jobdir.DATABASE):
                return SQLiteQueue(database)
        return None

    def workers(self) -> Sequence[Worker] | None:
        """Return the process that uses the job or the filter; None if that is unknown."""
        locks = [directory / jobdir.LOCK_NAME for directory in (self.path / "bloom", self.path)]
        lock = next((each for each in locks if each.exists()), None)
        queue = self.find_queue()
        if lock is None:
            if not (queue or self.has_filter()):
                self._refuse_scrapys_queue()
                raise StorageError(f"{self.path} holds no job; give a JOBDIR")
            return []
        processes = jobdir.holders(lock)
        if processes is None or 0 in processes:
            return None
        in_flight = queue.counts()[State.IN_FLIGHT] if queue else 0
        host = socket.gethostname()
        return [Worker(str(process), f"{host}:{process}", in_flight) for process in processes]

    def stop(self, workers: Sequence[Worker]) -> None:
        """Ask processes to end, as Ctrl-C does; a second time would end them at once."""
        for worker in workers:
            with suppress(ProcessLookupError):
                os.kill(int(worker.id), signal.SIGINT)

    @contextmanager
    def adding(self, project: Project) -> Iterator[JobAdder]:
        """Return an object that hands requests over to the crawl of the job."""
        queue = self.queue()
        with reading(self, project) if self.has_filter() else nullcontext() as reader:
            yield JobAdder(queue.path.parent, project, reader)

    # The whole place.

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep crawls away in a `with` block; raises a StorageError if one uses the place."""
        directory = self._directory()
        check_file(directory)  # a link may lead to the filter of another job
        lock = jobdir.lock_directory(directory)
        try:
            yield
        finally:
            lock.release()

    def users(self, *, force: bool) -> str:  # noqa: ARG002 - in Redis
        """Return an empty text: nobody uses a place that is locked."""
        return ""

    def remove(self, *, has_filter: bool, has_queue: bool) -> None:
        """Remove the filter, the queue, or both; what stays can be used without the other."""
        directory, queue = self._directory(), self.find_queue()
        if has_filter:
            if queue and not has_queue:
                queue.forget_filter()
            for file in [*reversed(jobdir.filter_files(directory)), *other_files(directory)]:
                _unlink(file)
        if has_queue and queue:
            files = [queue.path, *log_and_index(queue.path)]
            if self.has_filter():  # it would not fit another database
                queue.empty()
                files = []
            for file in [*files, *handed_over_files(queue.path.parent)]:
                _unlink(file)
        for name in (jobdir.SEEN, jobdir.QUEUE):
            if has_filter and self.job_dir and (left := self.job_dir / name).exists():
                note(
                    f"{left} is still there: the next crawl with this JOBDIR uses it, unless you "
                    "move it away"
                )

    def source(self) -> FileSource:
        """Return the filter and its queue, to be copied."""
        return FileSource(self.path)

    def target(self) -> JobTarget:
        """Return a new job directory for a copy."""
        return JobTarget(self.path)


class RedisPlace:
    """A filter on a Redis server, and its queue.

    Args:
        url: the URL of the server, or "redis" for that of the project's settings.
        key: the name of the filter; None: BLOOM_REDIS_KEY with the name of the spider.
        spider: the name of the spider, if it is given.
    """

    server: RedisServer
    name: str
    job_dir: Path | None = None

    def __init__(self, url: str, key: str | None, spider: str | None) -> None:
        self.url: str | None = url
        self.spider = spider
        self.needs_key = key is None
        self.key = key or ""

    @classmethod
    def on(cls, server: RedisServer, key: str) -> "RedisPlace":
        """Return the place of a filter on a server that is connected."""
        place = cls("", key, None)
        place._use(server)
        return place

    def open(self, source: Settings | Project, *, is_new: bool = False) -> None:
        """Connect to the server, with the settings of a project that was loaded with its URL.

        Raises a StorageError if the filter, which need not be there if `is_new`, is missing.
        """
        project = source
        if not isinstance(project, Project):
            project = load_project(project, self.spider, self.url)
        if self.needs_key:
            if "%(spider)s" in project.bloom.redis_key and not self.spider:
                raise UsageError(
                    "the name of the filter is missing; give --key, or --spider with the spider's "
                    f"name (BLOOM_REDIS_KEY is {project.bloom.redis_key!r})"
                )
            self.key = project.bloom.redis_key % {"spider": self.spider}
        if "{" in self.key or "}" in self.key:
            raise UsageError(f"--key is {self.key!r}; use a name without braces")
        self._use(answering_server(project))
        if not (is_new or self.has_filter()):
            with closing(self.server) as server:
                known = filters_on(server)
            near = get_close_matches(self.key, known, n=_SHOWN_KEYS, cutoff=0)
            some = ", ".join(near) + (", ..." if known[_SHOWN_KEYS:] else "")
            raise StorageError(
                f"{server.address} has no filter {self.key!r}; "
                + (f"its filters are: {some}" if known else "it has none at all")
                + " (--key, or BLOOM_REDIS_KEY with the name of the spider)"
            )

    def _use(self, server: RedisServer) -> None:
        self.server = server
        self.name = f"{self.key} in {server.address}"

    def close(self) -> None:
        """Close the connection."""
        self.server.close()

    def shorten_waits(self, secs: float) -> None:
        """Wait for an answer of the server for at most so many seconds."""
        self.server.deadline_secs = min(self.server.deadline_secs, secs)

    # The filter.

    @property
    def location(self) -> str:
        """The address of the server, and the key."""
        return f"{self.server.address}, key {self.key}"

    def has_filter(self) -> bool:
        """Return whether there is a filter, which may be damaged."""
        return bool(self.server.send("EXISTS", self.key))

    def filter(self, *, window: float = 0.0) -> RedisReader:
        """Return a reader of the filter, which answers as crawls with that BLOOM_WINDOW_SECS do."""
        return RedisReader(self.server, self.key, window=window)

    def generations(self) -> Sequence[Generation]:
        """Return the generations of a filter that is to be changed; none if it is new."""
        stored = read_stored(self.server, self.key)
        return stored.generations if stored else ()

    @contextmanager
    def recording(self, policy: Policy, origin: Origin, *, mirror: bool) -> Iterator[RedisBackend]:
        """Open the filter in a `with` block that records requests, and make it if there is none."""
        backend = RedisBackend(self.server, self.key, policy, origin, mirror=mirror)
        with _opened(backend):
            yield backend

    # The queue and its crawl.

    def queue(self) -> RedisQueue:
        """Return the queue of CrashSafeScheduler; raises a StorageError if there is none."""
        if (queue := self.find_queue()) is None:
            raise self._no_queue()
        return queue

    def find_queue(self) -> RedisQueue | None:
        """Return the queue of CrashSafeScheduler, or None."""
        has_queue = read_state(self.server, self.key) is not None
        return RedisQueue(self.server, self.key) if has_queue else None

    def _no_queue(self) -> StorageError:
        return StorageError(f"{self.server.address} has no queue {self.key!r}")

    def workers(self) -> Sequence[Worker] | None:
        """Return the workers of the queue, also those whose lease has expired."""
        if (state := read_state(self.server, self.key)) is None:
            raise self._no_queue()
        return state.workers

    def stop(self, workers: Sequence[Worker]) -> None:
        """Ask workers to end at their next batch, as after Ctrl-C."""
        stop_workers(self.server, self.key, [worker.id for worker in workers])

    @contextmanager
    def adding(self, project: Project) -> Iterator[RedisAdder]:
        """Return an object that adds requests to the queue, or begins one for a known spider."""
        state = read_state(self.server, self.key)
        spider = self.spider or (state.crawl if state else "")
        if state is None and not spider:
            raise StorageError(
                f"{self.server.address} has no queue {self.key!r}; no request was added; give the "
                "spider of a new one with --spider"
            )
        with closing(RedisAdder(self.server, self.key, project, spider)) as adder:
            if state is None:
                adder.fate = "added to a new queue"
            yield adder

    # The whole place.

    def locked(self) -> AbstractContextManager[None]:
        """Do nothing: workers can join a queue at any time."""
        return nullcontext()

    def users(self, *, force: bool) -> str:
        """Return which workers use the queue; raises a StorageError if any do, unless forced."""
        if not force:
            read_unused(self.server, self.key, "deleted", "; or add --force")
            return "No worker uses it now."
        with suppress(RefusedError):  # it is damaged
            if (state := read_state(self.server, self.key)) and state.live_workers:
                return f"{state.users} it now: they start over."
        return ""

    def remove(self, *, has_filter: bool, has_queue: bool) -> None:
        """Remove the filter, the queue, or both; a filter with a queue is replaced by a new one."""
        if not has_filter:
            remove_queue(self.server, self.key)
        elif has_queue or not self.find_queue():
            remove_filter(self.server, self.key, read_existing(self.server, self.key).id)
        else:
            empty_filter(self.server, self.key)

    def source(self) -> RedisSource:
        """Return the filter and its queue, to be copied."""
        return RedisSource(self.server, self.key)

    def target(self) -> RedisTarget:
        """Return the place of a copy, where nothing is yet."""
        return RedisTarget(self.server, self.key)


Place: TypeAlias = PathPlace | RedisPlace


def _siblings(path: Path) -> list[Path]:
    return list(path.parent.iterdir()) if path.parent.is_dir() else []


def _unlink(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"{file.parent}: a file cannot be deleted: {error}") from error


@contextmanager
def _opened(backend: Backend) -> Iterator[None]:
    """Open a filter, and close it; after an error, ignore a second one from closing."""
    backend.open()
    try:
        yield
    except BaseException:
        with suppress(BloomError):
            backend.close()
        raise
    backend.close()


def place_of(text: str, key: str | None, spider: str | None) -> Place:
    """Return the place with a name: a path, REDIS-URL or REDIS-URL#KEY.

    Args:
        text: the name.
        key: the value of --key.
        spider: the value of --spider.
    """
    url, key_in_url = split_url(text)
    if url is None:
        if key is not None:
            raise UsageError(
                f"--key says which filter in Redis is meant, and {text} is a path; leave --key "
                "out, or give the URL of the server"
            )
        return PathPlace(Path(text))
    if key is not None and key_in_url is not None:
        raise UsageError(f"--key and #{key_in_url} both name the filter; leave one of them out")
    return RedisPlace(url, key or key_in_url, spider)


def take_place(options: argparse.Namespace, settings: Settings) -> None:
    """Replace the place of a command line by a `Place`: the project's, if it has none."""
    text = options.place or _projects_place(options, settings)
    options.place = place_of(text, getattr(options, "key", None), options.spider)


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
    place: Place, source: Settings | Project, *, is_new: bool = False
) -> Iterator[Place]:
    """Open a place in a `with` block; a filter that is to be made need not be there."""
    place.open(source, is_new=is_new)
    with closing(place):
        yield place


@contextmanager
def reading(place: Place, project: Project) -> Iterator[Reader]:
    """Open a filter, at a place that is open, for lookups with the project's fingerprints.

    Raises a FingerprinterMismatchError if the filter was recorded with another fingerprinter.
    """
    with closing(place.filter(window=project.bloom.window_secs)) as reader:
        if reader.fingerprinter != project.fingerprinter:
            raise FingerprinterMismatchError(
                "the filter was recorded with REQUEST_FINGERPRINTER_CLASS = "
                f"{reader.fingerprinter!r}, and this project has {project.fingerprinter!r}, which "
                "would find nothing in it; run the command in the filter's project, or with "
                f"-s REQUEST_FINGERPRINTER_CLASS={reader.fingerprinter}"
            )
        yield reader

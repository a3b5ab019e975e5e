"""Places: what a command line names, a path or the URL of a server, with a filter and its queue.

Both kinds have the same methods, so a command has no branch for files or Redis. It calls `open`
first and `close` last. Each method may raise a StorageError.
"""

import argparse
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeAlias

from scrapy.exceptions import UsageError
from scrapy.settings import Settings

from scrapy_bloom.commands.shared.adding import JobAdder, RedisAdder
from scrapy_bloom.commands.shared.arguments import PROJECTS_SERVER, split_url
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
from scrapy_bloom.files.file import MAGIC
from scrapy_bloom.generations.policy import Generation, Origin, Policy
from scrapy_bloom.job import jobdir
from scrapy_bloom.queues.redis_queue import (
    QueueState,
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
from scrapy_bloom.redis.making import remove_filter
from scrapy_bloom.redis.stored import RedisReader, read_existing, read_stored
from scrapy_bloom.text import counted, size_text

Figures: TypeAlias = dict[str, Any]
Reader: TypeAlias = FilterReader | RedisReader
Backend: TypeAlias = LocalBackend | RedisBackend


class PathPlace:
    """A job directory, the directory of a filter, or one file of a filter.

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

    def open(self, source: Settings | Project) -> None:
        """Do nothing: there is no connection to be made."""

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
        if self.path.is_file():
            raise BloomError(f"{self.path} is a file; give the directory of the filter")
        return filter_directory(self.path)

    @property
    def job_dir(self) -> Path | None:
        """The job directory, if the filter is or will be that of a job."""
        directory = self._directory()
        return directory.parent if directory.name == "bloom" else None

    def has_filter(self) -> bool:
        """Return whether there is a filter, which may be damaged."""
        if self.path.is_file():
            with self.path.open("rb") as file:
                return file.read(len(MAGIC)) == MAGIC
        return bool(jobdir.filter_files(filter_directory(self.path)))

    def filter(self, *, window: float = 0.0) -> FilterReader:
        """Return a reader of the filter, which answers as crawls with that BLOOM_WINDOW_SECS do."""
        # Read before the filter, so that a checkpoint between the two hides nothing.
        queue = None if self.path.is_file() else self.find_queue()
        recent = queue.recent() if queue else frozenset()
        return FilterReader(self.path, window=window, recent=recent)

    def generations(self) -> tuple[Sequence[Generation], float]:
        """Return the generations of a filter that is to be changed, and the rate it was made for.

        There are none of a new filter. Raises a StorageError if a crawl uses it, or was killed.
        """
        check_free(self._directory())
        if not self.has_filter():
            return (), 0.0
        found = found_files(self._directory())
        return found, found[-1].origin.error_rate

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
            raise StorageError(f"{self.path} holds no queue of CrashSafeScheduler; give its JOBDIR")
        return queue

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
    def adding(self, project: Project, *, may_begin: bool) -> Iterator[JobAdder]:  # noqa: ARG002 - in Redis
        """Return an object that hands requests over to the crawl of the job."""
        queue = self.queue()
        with reading(self, project) if self.has_filter() else nullcontext() as reader:
            yield JobAdder(queue.path.parent, project, reader)

    # The whole place.

    @contextmanager
    def removing(self, *, only_queue: bool, force: bool) -> Iterator[tuple[str, str]]:
        """Remove the files of the filter after a `with` block in which the user agrees.

        The block gets what is removed, and what that means for crawls.
        """
        if only_queue or force:
            option = "--queue" if only_queue else "--force"
            raise UsageError(f"{option} is for a queue in Redis: give the URL of its server")
        if self.path.is_file() or not self.has_filter():
            raise StorageError(
                f"{self.path} holds no filter; give a JOBDIR, or a directory with the files of a "
                "filter"
            )
        directory = self._directory()
        lock = jobdir.lock_directory(directory)
        try:
            # The files are not read: they may be damaged.
            files = jobdir.filter_files(directory)
            size = size_text(sum(file.stat().st_size for file in files))
            yield f"the filter in {directory}: {counted(len(files), 'file')}, {size}", ""
            for file in [*reversed(files), *other_files(directory)]:
                _unlink(file)
        finally:
            lock.release()
        if self.job_dir and (seen := self.job_dir / jobdir.SEEN).exists():
            note(
                f"{seen} is still there: the next crawl with this JOBDIR imports it into its new "
                "filter, unless you move it away"
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

    def open(self, source: Settings | Project) -> None:
        """Connect to the server, with the settings of a project that was loaded with its URL."""
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

    def generations(self) -> tuple[Sequence[Generation], float]:
        """Return the generations of a filter that is to be changed, and the rate it was made for.

        There are none of a new filter.
        """
        stored = read_stored(self.server, self.key)
        return (stored.generations, stored.origin.error_rate) if stored else ((), 0.0)

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
    def adding(self, project: Project, *, may_begin: bool) -> Iterator[RedisAdder]:
        """Return an object that adds requests to the queue, or begins one if `may_begin` is set."""
        state = read_state(self.server, self.key)
        spider = self.spider or (state.crawl if state else "")
        if state is None and not (may_begin and spider):
            hint = "; give the spider of a new one with --spider" if may_begin else ""
            raise StorageError(
                f"{self.server.address} has no queue {self.key!r}; no request was added{hint}"
            )
        with closing(RedisAdder(self.server, self.key, project, spider)) as adder:
            yield adder

    # The whole place.

    @contextmanager
    def removing(self, *, only_queue: bool, force: bool) -> Iterator[tuple[str, str]]:
        """Remove filter and queue, or the queue, after a `with` block in which the user agrees.

        The block gets what is removed, and what that means for crawls. Raises a StorageError if
        workers use the queue, unless `force` is given.
        """
        what, stored = f"the queue {self.name}", None
        try:
            queue = self._unused(force=force)
        except RefusedError as error:
            if not (force and only_queue):
                raise
            yield f"{what} unread", f" {error}."
        else:
            if only_queue and queue is None:
                raise self._no_queue()
            if queue is not None:
                what += f" with {counted(queue.total, 'request')}"
            if not only_queue:
                stored = read_existing(self.server, self.key)
                number = counted(sum(each.count for each in stored.generations), "request")
                size = size_text(sum(each.geometry.nbytes for each in stored.generations))
                also = f", and {what}" if queue else ""
                what = f"the filter {self.name}: {number}, {size}{also}"
            rest = "the filter as it is" if only_queue else "an empty filter"
            yield what, _consequence(queue, rest)
            self._unused(force=force)  # a worker may have joined before the user agreed
        if stored is None:
            remove_queue(self.server, self.key)
        else:
            remove_filter(self.server, self.key, stored.id)

    def _unused(self, *, force: bool) -> QueueState | None:
        if force:
            return read_state(self.server, self.key)
        return read_unused(self.server, self.key, "deleted", "; or add --force")

    def source(self) -> RedisSource:
        """Return the filter and its queue, to be copied."""
        return RedisSource(self.server, self.key)

    def target(self) -> RedisTarget:
        """Return the place of a copy, where nothing is yet."""
        return RedisTarget(self.server, self.key)


Place: TypeAlias = PathPlace | RedisPlace


def _unlink(file: Path) -> None:
    try:
        file.unlink()
    except OSError as error:
        raise StorageError(f"{file.parent}: a file cannot be deleted: {error}") from error


def _consequence(queue: QueueState | None, rest: str) -> str:
    """Say with what crawls go on when filter or queue are removed."""
    if queue is None:
        return f" Crawlers that use it now go on with {rest}."
    if queue.live_workers:
        return f" {queue.users} it now: they start over, with {rest}."
    return " No worker uses it now."


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
        "no filter is given, and the settings have neither BLOOM_REDIS_URL nor JOBDIR; give a "
        "path, the URL of a server, or the word redis for the server of scrapy-redis's settings"
    )


@contextmanager
def opened_place(place: Place, source: Settings | Project) -> Iterator[Place]:
    """Open a place in a `with` block."""
    place.open(source)
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

"""The interface of places: what a command line names, with a filter and the queue of a crawl."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from typing import Any, Protocol, TypeAlias, TypeVar

from scrapy_bloom.commands.shared.project import Project
from scrapy_bloom.copying.sources import Source as Source  # noqa: PLC0414 - for the places
from scrapy_bloom.exceptions import BloomError, FingerprinterMismatchError, StorageError
from scrapy_bloom.generations.policy import Origin
from scrapy_bloom.job.filter import LocalBackend
from scrapy_bloom.job.reader import FilterReader
from scrapy_bloom.queues.store import Queue, Worker
from scrapy_bloom.redis.backend import RedisBackend
from scrapy_bloom.redis.stored import RedisReader
from scrapy_bloom.settings import BloomSettings

Reader: TypeAlias = FilterReader | RedisReader
Backend: TypeAlias = LocalBackend | RedisBackend
Batches: TypeAlias = Iterator[list[dict[str, Any]]]  # requests in the form of `Request.to_dict`
_T = TypeVar("_T")


class MissingError(StorageError):
    """A place has no filter, or no queue."""


def found(read: Callable[[], _T]) -> _T | None:
    """Return what a method of a place returns, or None if that is missing."""
    try:
        return read()
    except MissingError:
        return None


class Place(Protocol):
    """A path or a server, with a filter and its queue. Each method may raise a StorageError.

    Attributes:
        name: the place in messages.
        hands_over: whether `add` leaves requests to the crawl.
    """

    name: str
    hands_over: bool

    def reader(self) -> Reader:
        """Return a reader of the filter; raise a MissingError if there is none."""

    def recording(self, bloom: BloomSettings, origin: Origin) -> AbstractContextManager[Backend]:
        """Open the filter in a `with` block that records requests, and make it if there is none."""

    def queue(self) -> Queue:
        """Return the queue of CrashSafeScheduler; raise a MissingError if there is none."""

    def workers(self) -> Sequence[Worker] | None:
        """Return the processes that use the queue, also dead ones; None if that is unknown."""

    def stop(self, workers: Sequence[Worker]) -> None:
        """Ask workers to end, as Ctrl-C does."""

    def add(self, batches: Batches, project: Project) -> Generator[int, None, None]:
        """Add requests to the queue; yield how many of each batch are no duplicates."""

    def check_unused(self) -> None:
        """Raise a StorageError if a crawl uses the place."""

    def remove(self, *, has_filter: bool) -> None:
        """Remove the queue, and also the filter or not; a crawl must not use a JOBDIR."""

    def source(self) -> AbstractContextManager[Source]:
        """Return the filter and its queue for a `with` block that copies them."""

    def copy_from(self, source: Source) -> int:
        """Make the place as a copy; return how many requests of a queue were copied."""


@contextmanager
def reading(reader: Reader, project: Project) -> Iterator[Reader]:
    """Look up the project's fingerprints in a `with` block; close the reader at its end.

    Raises a FingerprinterMismatchError if the filter was recorded with another fingerprinter.
    """
    with closing(reader):
        if reader.origin.fingerprinter != project.fingerprinter:
            raise FingerprinterMismatchError(
                "the filter was recorded with REQUEST_FINGERPRINTER_CLASS = "
                f"{reader.origin.fingerprinter!r}, and this project has {project.fingerprinter!r}, "
                "which would find nothing in it; run the command in the filter's project, or with "
                f"-s REQUEST_FINGERPRINTER_CLASS={reader.origin.fingerprinter}"
            )
        yield reader


@contextmanager
def opened(backend: Backend) -> Iterator[Backend]:
    """Open a filter, and close it; after an error, ignore a second one from closing."""
    backend.open()
    try:
        yield backend
    except BaseException:
        with suppress(BloomError):
            backend.close()
        raise
    backend.close()

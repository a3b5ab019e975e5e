"""Add requests to the queue of a crawl: in files for the crawl of a job, or in Redis at once.

The two classes have the same methods.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeAlias

from scrapy import Request
from scrapy.utils.httpobj import urlparse_cached

from scrapy_bloom.commands.shared.project import Project
from scrapy_bloom.crawl.scheduler.order import order_of, serves_least_busy_slot
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.files.directory import FilterReader
from scrapy_bloom.generations.policy import Origin
from scrapy_bloom.queues.collected import Collected
from scrapy_bloom.queues.handed_over import hand_over
from scrapy_bloom.queues.redis_store import RedisStore
from scrapy_bloom.queues.serialized import serialized
from scrapy_bloom.queues.store import Batch, Entered, Joining, RejoinedError
from scrapy_bloom.redis.backend import RedisBackend
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.stored import RedisReader


class JobAdder:
    """Hands requests over to the crawl of a job, which filters them once more.

    Args:
        job_dir: the job directory.
        project: the project of the crawl.
        reader: of the filter; None: the job has none.
    """

    hands_over = True
    spider = ""  # which the requests do not depend on

    def __init__(
        self, job_dir: Path, project: Project, reader: FilterReader | RedisReader | None
    ) -> None:
        self.fate = (
            f"handed over to {job_dir}: its crawl queues new requests within a second, or when it "
            "is resumed"
        )
        self._job_dir = job_dir
        self._project = project
        self._reader = reader

    def add(self, requests: Sequence[Mapping[str, Any]]) -> int:
        """Add requests, in the form of `Request.to_dict`; return how many are no duplicates."""
        if self._reader is not None:
            fingerprint = self._project.fingerprint
            seen = self._reader.are_seen([fingerprint(_request(each)) for each in requests])
            requests = [
                request
                for request, is_seen in zip(requests, seen, strict=True)
                if request.get("dont_filter") or not is_seen
            ]
        hand_over(self._job_dir, requests)
        return len(requests)


class RedisAdder:
    """Adds requests to a queue in Redis, as a worker that takes none.

    Args:
        server: the connection, which `close` closes.
        key: the key of the filter.
        project: the project of the crawl.
        spider: the name of the spider of the queue.
    """

    hands_over = False
    fate = "added to the queue"

    def __init__(self, server: RedisServer, key: str, project: Project, spider: str) -> None:
        bloom = project.bloom
        origin = Origin(fingerprinter=project.fingerprinter, spider=spider)
        self.spider = spider
        self._project = project
        self._order = order_of(project.crawler)
        self._by_slot = serves_least_busy_slot(project.crawler)
        self._backend = RedisBackend(server, key, bloom.policy, origin, mirror=False)
        self._store: RedisStore | None = None  # until the first request
        self._stack = ExitStack()

    def _opened(self) -> RedisStore:
        if self._store is None:
            self._stack.callback(_end, self._backend.close)
            self._backend.open()
            lease_secs = self._project.bloom.queue_lease_secs
            store = RedisStore(self._backend, by_slot=self._by_slot, lease_secs=lease_secs)
            store.open(Joining(self.spider, is_crawl=False))
            self._stack.callback(_end, store.close)
            self._store = store
        return self._store

    def add(self, requests: Sequence[Mapping[str, Any]]) -> int:
        """Add requests, in the form of `Request.to_dict`; return how many are no duplicates."""
        store, number = self._opened(), 0
        for changes in _batches([self._entered(each) for each in requests]):
            try:
                reply = store.apply(changes)
            except RejoinedError as error:
                # The lease expired while a pipe gave nothing, or the server was rolled back. What
                # it has lost is counted already.
                for lost in _batches(error.lost):
                    store.apply(lost)
                reply = store.apply(changes)
            number += sum(reply.queued)
        return number

    def _entered(self, values: Mapping[str, Any]) -> Entered:
        request = _request(values)
        rank, newest_first = self._order(request)
        slot = request.meta.get("download_slot")
        if not (slot and isinstance(slot, str | int)):
            slot = urlparse_cached(request).hostname or ""
        return Entered(
            serialized(values),
            None if values["dont_filter"] else self._project.fingerprint(request),
            slot=str(slot) if self._by_slot else "",
            priority=request.priority,
            rank=rank,
            newest_first=newest_first,
            has_parent=False,
        )

    def close(self) -> None:
        """Leave the queue, and close the connection."""
        self._stack.close()


def _request(values: Mapping[str, Any]) -> Request:
    """Return a request without its callback, for its fingerprint and its slot."""
    names = ("url", "method", "headers", "body", "meta", "encoding", "priority")
    return Request(**{name: values[name] for name in names})


def _batches(requests: Iterable[Entered]) -> Iterator[Batch]:
    collected = Collected()
    for entered in requests:
        collected.enter(entered)
    while collected:
        yield collected.next_batch()


def _end(function: Callable[[], object]) -> None:
    with suppress(StorageError):  # the lease of this worker expires by itself
        function()


Adder: TypeAlias = JobAdder | RedisAdder

"""The place of a filter on a Redis server."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    closing,
    contextmanager,
    nullcontext,
    suppress,
)
from itertools import chain
from typing import Any

from scrapy.exceptions import UsageError
from scrapy.utils.httpobj import urlparse_cached

from scrapy_bloom.commands.shared.place import Backend, Batches, MissingError, Source, opened
from scrapy_bloom.commands.shared.project import Project, request_of
from scrapy_bloom.copying.sources import RedisSource
from scrapy_bloom.copying.transfer import copy_to_redis
from scrapy_bloom.crawl.scheduler.order import order_of, serves_least_busy_slot
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.generations.policy import Origin
from scrapy_bloom.queues.collected import Collected
from scrapy_bloom.queues.redis_queue import (
    RedisQueue,
    read_state,
    read_unused,
    remove_queue,
    stop_workers,
)
from scrapy_bloom.queues.redis_store import RedisStore
from scrapy_bloom.queues.serialized import serialized
from scrapy_bloom.queues.store import Batch, Entered, Joining, QueueStatus, RejoinedError, Worker
from scrapy_bloom.redis.backend import RedisBackend
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.stored import RedisReader, read_existing, remove_filter
from scrapy_bloom.settings import BloomSettings

_FIRST_ANSWER_SECS = 1.5  # short, because the URL may be mistyped


@contextmanager
def answering_server(project: Project) -> Iterator[RedisServer]:
    """Open the server of a project in a `with` block, once it has answered: the wait is short."""
    with closing(project.bloom.redis_server()) as server:
        deadline_secs = server.deadline_secs
        server.deadline_secs = min(deadline_secs, _FIRST_ANSWER_SECS)
        server.now()
        server.deadline_secs = deadline_secs
        yield server


@contextmanager
def open_redis(
    project: Project, key: str | None, spider: str, *, is_new: bool
) -> Iterator["RedisPlace"]:
    """Open the filter of a key, else of BLOOM_REDIS_KEY, on the server of a project."""
    if key is None:
        spider = project.spider or spider
        if "%(spider)s" in project.bloom.redis_key and not spider:
            raise UsageError(
                "the name of the filter is missing; give URL#KEY, or --spider with the spider's "
                f"name (BLOOM_REDIS_KEY is {project.bloom.redis_key!r})"
            )
        key = project.bloom.redis_key % {"spider": spider}
    if "{" in key or "}" in key:
        raise UsageError(f"the name of the filter is {key!r}; use one without braces")
    with answering_server(project) as server:
        if not (is_new or server.send("EXISTS", key)):
            raise StorageError(
                f"{server.address} has no filter {key!r}; `scrapy bloom info` with the URL alone "
                "lists its filters"
            )
        yield RedisPlace(server, key)


class RedisPlace:
    """A filter on a Redis server, and its queue; implements `Place`."""

    hands_over = False

    def __init__(self, server: RedisServer, key: str) -> None:
        self._place = server, key
        self.name = f"{key} in {server.address}"

    def reader(self) -> RedisReader:
        server, key = self._place
        if not server.send("EXISTS", key):
            raise MissingError(f"{server.address} has no filter {key!r}")
        return RedisReader(server, key)

    def recording(self, bloom: BloomSettings, origin: Origin) -> AbstractContextManager[Backend]:
        backend = RedisBackend(*self._place, bloom.policy, origin, mirror=bloom.redis_mirror)
        return opened(backend)

    def _status(self) -> QueueStatus:
        server, key = self._place
        if (status := read_state(server, key)) is None:
            raise MissingError(f"{server.address} has no queue {key!r}")
        return status

    def queue(self) -> RedisQueue:
        self._status()  # there is one
        return RedisQueue(*self._place)

    def workers(self) -> Sequence[Worker]:
        return self._status().workers

    def stop(self, workers: Sequence[Worker]) -> None:
        stop_workers(*self._place, [worker.id for worker in workers])

    def add(self, batches: Batches, project: Project) -> Generator[int, None, None]:
        server, key = self._place
        state = read_state(server, key)
        spider = project.spider or (state.spider if state else "")
        if state is None and not spider:
            raise StorageError(
                f"{server.address} has no queue {key!r}; no request was added; give the spider of "
                "a new one with --spider"
            )
        if (first := next(batches, None)) is None:
            return
        bloom, by_slot = project.bloom, serves_least_busy_slot(project.crawler)
        origin = Origin(fingerprinter=project.fingerprinter, spider=spider)
        backend = RedisBackend(server, key, bloom.policy, origin, mirror=False)
        entered = _entering(project, by_slot=by_slot)
        with ExitStack() as stack:
            stack.callback(_end, backend.close)
            backend.open()
            store = RedisStore(backend, lease_secs=bloom.queue_lease_secs)
            store.open(Joining(spider, is_crawl=False))
            stack.callback(_end, store.close)
            for batch in chain([first], batches):
                yield sum(_apply(store, changes) for changes in _batches(map(entered, batch)))

    def check_unused(self) -> None:
        read_unused(*self._place, "deleted", "; or add --force")

    def remove(self, *, has_filter: bool) -> None:
        if has_filter:
            stored = read_existing(*self._place, may_be_copied=True)
            remove_filter(*self._place, stored.id)
        else:
            remove_queue(*self._place)

    def source(self) -> AbstractContextManager[Source]:
        return nullcontext(RedisSource(*self._place))

    def copy_from(self, source: Source) -> int:
        return copy_to_redis(source, *self._place)


def _entering(project: Project, *, by_slot: bool) -> Callable[[Mapping[str, Any]], Entered]:
    """Return a function that makes of a `Request.to_dict` what enters the queue."""
    order = order_of(project.crawler)

    def entered(values: Mapping[str, Any]) -> Entered:
        request = request_of(values)
        rank, newest_first = order(request)
        slot = request.meta.get("download_slot")
        if not (slot and isinstance(slot, str | int)):
            slot = urlparse_cached(request).hostname or ""
        return Entered(
            serialized(values),
            None if values["dont_filter"] else project.fingerprint(request),
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
        reply = store.apply(changes)
    except RejoinedError as error:
        # The lease expired while a pipe gave nothing, or the server was rolled back. What it has
        # lost is counted already.
        for lost in _batches(error.lost):
            store.apply(lost)
        reply = store.apply(changes)
    return sum(reply.queued)


def _batches(requests: Iterable[Entered]) -> Iterator[Batch]:
    collected = Collected()
    for entered in requests:
        collected.enter(entered)
    while collected:
        yield collected.next_batch()


def _end(function: Callable[[], object]) -> None:
    with suppress(StorageError):  # the lease of this worker expires by itself
        function()

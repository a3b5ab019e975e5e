"""Add requests to a queue in Redis, as a worker that takes none."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from itertools import chain
from typing import Any

from scrapy import Request
from scrapy.utils.httpobj import urlparse_cached

from scrapy_bloom.commands.shared.project import Project
from scrapy_bloom.crawl.scheduler.order import order_of, serves_least_busy_slot
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.generations.policy import Origin
from scrapy_bloom.queues.collected import Collected
from scrapy_bloom.queues.redis_store import RedisStore
from scrapy_bloom.queues.serialized import serialized
from scrapy_bloom.queues.store import Batch, Entered, Joining, RejoinedError
from scrapy_bloom.redis.backend import RedisBackend
from scrapy_bloom.redis.connection.server import RedisServer


def add_to_shared_queue(
    server: RedisServer,
    key: str,
    spider: str,
    batches: Iterator[list[dict[str, Any]]],
    project: Project,
) -> Iterator[int]:
    """Add requests to a queue; yield how many requests of each batch are no duplicates."""
    if (first := next(batches, None)) is None:
        return
    order, by_slot = order_of(project.crawler), serves_least_busy_slot(project.crawler)

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

    origin = Origin(fingerprinter=project.fingerprinter, spider=spider)
    backend = RedisBackend(server, key, project.bloom.policy, origin, mirror=False)
    with ExitStack() as stack:
        stack.callback(_end, backend.close)
        backend.open()
        lease_secs = project.bloom.queue_lease_secs
        store = RedisStore(backend, by_slot=by_slot, lease_secs=lease_secs)
        store.open(Joining(spider, is_crawl=False))
        stack.callback(_end, store.close)
        for batch in chain([first], batches):
            number = 0
            for changes in _batches(entered(each) for each in batch):
                try:
                    reply = store.apply(changes)
                except RejoinedError as error:
                    # The lease expired while a pipe gave nothing, or the server was rolled back.
                    # What it has lost is counted already.
                    for lost in _batches(error.lost):
                        store.apply(lost)
                    reply = store.apply(changes)
                number += sum(reply.queued)
            yield number


def request_of(values: Mapping[str, Any]) -> Request:
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

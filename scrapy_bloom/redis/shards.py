"""A filter that is split into shards, for crawls beyond the memory of one master."""

import json
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import zip_longest
from zlib import crc32

from scrapy_bloom.generations.backend import FilterStatus
from scrapy_bloom.generations.policy import Generation
from scrapy_bloom.redis.backend import RedisBackend
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.filter import LostKeysError, OtherFilterError, SharedFilter
from scrapy_bloom.redis.stored import MAX_SHARDS

logger = logging.getLogger(__name__)


def shard_of(data: bytes, shards: int) -> int:
    """Return the index of the shard for a fingerprint, or for a request without fingerprint."""
    return crc32(data) % shards if shards > 1 else 0


def shard_key(key: str, shard: int) -> str:
    """Return the key of a shard; for the first shard, that is the key of the filter."""
    return f"{key}:{shard}" if shard else key


def shard_keys(server: RedisServer, key: str) -> list[str]:
    """Return the keys of all shards of a filter; only `key` if it has no shards, or is damaged."""
    try:
        shards = json.loads(server.send("HGET", key, "filter") or b"")["shards"]
        return [shard_key(key, shard) for shard in range(min(int(shards), MAX_SHARDS))] or [key]
    except (ValueError, TypeError, KeyError, RecursionError):
        return [key]


def share_of(expected: int, shards: int) -> int:
    """Return for how many of the expected requests one shard must have room.

    The numbers of requests per shard vary by chance, so four standard deviations are added.

    >>> share_of(1_000_000, 1), share_of(1_000_000, 4)
    (1000000, 252000)
    """
    if shards == 1:
        return expected
    return math.ceil(expected / shards + 4 * math.sqrt(expected / shards))


def join_shards(shards: Sequence[SharedFilter]) -> bool:
    """Join all shards, or create them.

    All shards have the id of the first shard. If the first shard has the queue of a crawl, all
    shards did exist. If one of them is missing or has another id, the first shard is removed, and
    all shards are created again.

    Returns:
        Whether a shard was lost, so that all shards are new.
    """
    first, *others = shards
    any_lost = False
    while True:
        first.join()
        have_existed = bool(others) and bool(first.server.send("HEXISTS", first.key, "crawl"))
        if all(_is_joined(each, first.id, have_existed=have_existed) for each in others):
            return any_lost
        any_lost = True
        first.clear()


def _is_joined(shard: SharedFilter, filter_id: str, *, have_existed: bool) -> bool:
    try:
        shard.join(new_id=filter_id, creates=not have_existed)
    except OtherFilterError:
        return False
    if shard.id == filter_id or have_existed:
        return shard.id == filter_id
    shard.clear()  # it belongs to an earlier filter
    return _is_joined(shard, filter_id, have_existed=False)


def summed(shards: Sequence[Sequence[Generation]]) -> list[Generation]:
    """Return the generations of all shards as the generations of one filter, oldest first."""
    merged = []
    for alike in zip_longest(*shards):
        found = [each.figures for each in alike if each is not None]
        blocks = sum(each.geometry.num_blocks for each in found)
        one = replace(
            found[0],
            geometry=found[0].geometry._replace(num_blocks=blocks),
            capacity=sum(each.capacity for each in found),
            error_rate=max(each.error_rate for each in found),
            count=sum(each.count for each in found),
        )
        merged.append(one)
    return merged


class ShardedBackend:
    """A filter in shards, with the interface of `RedisBackend`.

    The batches of its queue, a `ShardedStore`, record the fingerprints.

    Args:
        parts: the backends of all shards.
    """

    def __init__(self, parts: Sequence[RedisBackend]) -> None:
        self.parts = parts
        self.server = parts[0].server
        self.forgotten = parts[0].forgotten
        for each in parts:
            each.forgotten = self.forgotten
        self.collect: Callable[[bytes], bool] | None = None
        self.flush = False

    def open(self) -> None:
        """Connect, and join the shards, or create them; raises StorageError."""
        self.parts[0].warn_of_eviction()
        self.join()
        self.parts[0].log_differences()

    def join(self) -> None:
        """Join all shards again, or create them; raises StorageError."""
        if join_shards([each.filter for each in self.parts]):
            self._log_lost()

    def begin(self) -> None:
        """Begin the crawl."""
        for each in self.parts:
            each.begin()

    def add(self, fingerprint: bytes) -> bool:
        """Return whether a fingerprint is new; the queue records it with its request."""
        assert self.collect is not None
        return self.collect(fingerprint)

    def __contains__(self, fingerprint: bytes) -> bool:
        return not self.add(fingerprint)

    def knows(self, fingerprint: bytes) -> bool:
        """Return whether a mirror has a fingerprint that is not forgotten, without the server."""
        return self.parts[shard_of(fingerprint, len(self.parts))].knows(fingerprint)

    def keep_up(self) -> None:
        """Add generations or end quarters of the window, if that is due."""
        for each in self.parts:
            each.keep_up()

    def start_over(self, error: OtherFilterError) -> None:
        """Start over in all shards, because one was lost, or another worker has done so."""
        self._log_lost()
        if isinstance(error, LostKeysError):
            self.clear()
        join_shards([each.filter for each in self.parts])

    def _log_lost(self) -> None:
        logger.error(
            "A shard of %s was lost: removed, flushed, evicted, or rolled back by more than a "
            "minute. The others have only parts of the crawl, so all %d shards start over; check "
            "persistence (appendonly yes) and maxmemory-policy (noeviction)",
            self.parts[0].filter.name,
            len(self.parts),
        )

    def clear(self) -> None:
        """Remove the first shard, which makes the others invalid; `join` must follow."""
        self.parts[0].clear()

    def status(self) -> FilterStatus:
        """Return the current figures of all shards together; after `close`, the last figures."""
        parts = [each.status() for each in self.parts]
        hits = sum(each.more["redis/mirror_hits"] for each in parts)
        return replace(
            parts[0],
            generations=summed([each.generations for each in parts]),
            error_rate=max(each.error_rate for each in parts),
            errors=sum(each.errors for each in parts),
            failure=next((each.failure for each in parts if each.failure), ""),
            expired=sum(each.expired for each in parts),
            more={**parts[0].more, "redis/mirror_hits": hits},
        )

    def close(self) -> None:
        """Disconnect, and with `flush` remove the filter; raises StorageError."""
        with ExitStack() as closing:
            for each in reversed(self.parts):
                each.flush = self.flush
                closing.callback(each.close)

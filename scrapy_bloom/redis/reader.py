"""Read a filter in Redis without changing it, also while crawls use it."""

from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.filters.hashing import block_of, make_hasher
from scrapy_bloom.filters.sizing import BLOCK_BITS, BLOCK_BYTES
from scrapy_bloom.generations.policy import unexpired
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.forgotten import RedisForgotten
from scrapy_bloom.redis.scripts import CHUNK_BLOCKS, block_key, shard_of
from scrapy_bloom.redis.stored import (
    RedisGeneration,
    Stored,
    read_existing,
    shard_keys,
    summed,
)


def chunks(server: RedisServer, key: str, generation: RedisGeneration) -> Iterator[bytes]:
    """Return the blocks of a generation, key by key; raises StorageError if a key was lost."""
    for chunk in range(generation.num_chunks):
        data = server.send("GET", block_key(key, generation.id, chunk))
        if data is None or len(data) != generation.chunk_bytes(chunk):
            raise _lost(server, key, generation)
        yield data


class RedisReader:
    """Reads a filter in Redis, with the interface of `FilterReader`, which reads files.

    Each method may raise a StorageError. The constructor raises it if the filter is missing.

    Args:
        server: the connection, which `close` closes.
        key: the key of the filter.
        window: BLOOM_WINDOW_SECS of its crawls; 0: the window that is stored with the filter.
    """

    # Unknown, because any crawl may share the filter.
    is_closed: bool | None = None
    is_in_use: bool | None = None

    def __init__(self, server: RedisServer, key: str, *, window: float = 0.0) -> None:
        self._server = server
        self._keys = shard_keys(server, key)
        self._shards = [read_existing(server, each) for each in self._keys]
        self.generations = summed([each.generations for each in self._shards])
        self.location = f"{server.address}, key {key}"
        if len(self._keys) > 1:
            self.location += f", in {len(self._keys)} shards"
        origin = self._shards[0].origin
        self.spider, self.fingerprinter = origin.spider, origin.fingerprinter
        self.error_rate, self.salt = origin.error_rate, self._shards[0].salt.hex()
        self.forgotten = RedisForgotten(server, self._keys)
        now = server.now()
        self._live = [_live(each, now, window) for each in self._shards]

    def are_seen(self, fingerprints: Sequence[bytes]) -> list[bool]:
        """Return which fingerprints a crawl would filter: recorded, and not forgotten."""
        recorded = self.are_recorded(fingerprints)
        forgotten = self.forgotten.among(fingerprints)
        return [
            is_recorded and not is_forgotten
            for is_recorded, is_forgotten in zip(recorded, forgotten, strict=True)
        ]

    def are_recorded(self, fingerprints: Sequence[bytes]) -> list[bool]:
        """Return which fingerprints are recorded, with false positives."""
        seen = [False] * len(fingerprints)
        shards = [shard_of(each, len(self._keys)) for each in fingerprints]
        for shard, live in enumerate(self._live):
            for generation in reversed(live):  # the newest has most of the fingerprints
                rest = [
                    index
                    for index, is_seen in enumerate(seen)
                    if shards[index] == shard and not is_seen
                ]
                answers = self._look(shard, generation, [fingerprints[index] for index in rest])
                for index, is_seen in zip(rest, answers, strict=True):
                    seen[index] = is_seen
        return seen

    def _look(
        self, shard: int, generation: RedisGeneration, fingerprints: Sequence[bytes]
    ) -> list[bool]:
        key = self._keys[shard]
        locate = make_hasher(self._shards[shard].salt, generation.geometry.num_hashes)
        used, commands = set(), []
        for fingerprint in fingerprints:
            block_hash, positions = locate(fingerprint)
            place = block_of(block_hash, generation.geometry.num_blocks)
            chunk, index = divmod(place, CHUNK_BLOCKS)
            used.add(chunk)
            bits = [("GET", "u1", index * BLOCK_BITS + each) for each in positions]
            commands.append(("BITFIELD_RO", block_key(key, generation.id, chunk), *chain(*bits)))
        # BITFIELD_RO returns 0 for the bits of a lost key, so the lengths are checked.
        lengths = [("STRLEN", block_key(key, generation.id, chunk)) for chunk in used]
        answers = self._server.batches([*commands, *lengths])
        if answers[len(commands) :] != [generation.chunk_bytes(chunk) for chunk in used]:
            raise _lost(self._server, key, generation)
        return [all(answer) for answer in answers[: len(commands)]]

    def block_fills(self) -> list[Iterator[float]]:
        """Return for each generation the share of set bits of each of its blocks, 0 to 1."""
        fills = [
            [self._fills(key, each) for each in shard.generations]
            for key, shard in zip(self._keys, self._shards, strict=True)
        ]
        return [chain(*each) for each in zip_longest(*fills, fillvalue=iter(()))]

    def _fills(self, key: str, generation: RedisGeneration) -> Iterator[float]:
        for data in chunks(self._server, key, generation):
            for start in range(0, len(data), BLOCK_BYTES):
                block = int.from_bytes(data[start : start + BLOCK_BYTES], "little")
                yield block.bit_count() / BLOCK_BITS

    def count_forgotten(self) -> int:
        """Count the requests that are to be crawled again."""
        return len(self.forgotten)

    def close(self) -> None:
        """Close the connection."""
        self._server.close()


def _live(shard: Stored, now: float, window: float) -> list[RedisGeneration]:
    live = unexpired(shard.generations, now, window)
    return [each for each in shard.generations if each in live or each.number >= shard.kept_from]


def _lost(server: RedisServer, key: str, generation: RedisGeneration) -> StorageError:
    return StorageError(
        f"{server.address} has lost keys of generation {generation.number} of the filter "
        f"{key!r}; the next crawl starts over with an empty filter"
    )

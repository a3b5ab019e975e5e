"""Read a filter in Redis without changing it, also while crawls use it."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, zip_longest

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.filters.hashing import block_of, make_hasher
from scrapy_bloom.filters.sizing import BLOCK_BYTES
from scrapy_bloom.generations.policy import ANY_ORIGIN, Policy, unexpired
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.filter import SharedFilter
from scrapy_bloom.redis.forgotten import RedisForgotten
from scrapy_bloom.redis.scripts import CHUNK_BLOCKS
from scrapy_bloom.redis.shards import shard_keys, shard_of, summed
from scrapy_bloom.redis.stored import RedisGeneration, Stored


def unjoined(server: RedisServer, key: str) -> SharedFilter:
    """Return a filter to be read, copied or removed, without joining it."""
    return SharedFilter(server, key, Policy(expected=1, error_rate=0.1), ANY_ORIGIN, mirror=False)


def read_filter(filter_: SharedFilter) -> Stored:
    """Return a stored filter for copying; raises StorageError if it is missing or has shards."""
    stored = read_any_filter(filter_)
    if stored.info.shards > 1:
        raise StorageError(
            f"{filter_.name} has {stored.info.shards} shards (BLOOM_REDIS_SHARDS), and a filter "
            "with shards cannot be copied"
        )
    return stored


def read_any_filter(filter_: SharedFilter) -> Stored:
    """Return a stored filter or shard; raises StorageError if it is missing."""
    stored = filter_.read()
    if stored is None:
        raise StorageError(
            f"{filter_.server.address} has no filter {filter_.key!r}; check BLOOM_REDIS_KEY, which "
            "may contain the spider's name"
        )
    return stored


def chunks(filter_: SharedFilter, generation: RedisGeneration) -> Iterator[bytes]:
    """Return the blocks of a generation, key by key; raises StorageError if a key was lost."""
    for chunk in range(generation.num_chunks):
        data = filter_.server.send("GET", filter_.chunk_key(generation, chunk))
        if data is None or len(data) != generation.chunk_bytes(chunk):
            raise _lost(filter_, generation)
        yield data


class RedisReader:
    """Reads a filter in Redis, with the interface of `FilterReader`, which reads files.

    Each method may raise a StorageError. The constructor raises it if the filter is missing.

    Args:
        server: the connection, which `close` closes.
        key: the key of the filter.
        window: BLOOM_WINDOW_SECS of its crawls; 0: the window that is stored with the filter.
    """

    def __init__(self, server: RedisServer, key: str, *, window: float = 0.0) -> None:
        self._server = server
        self._filter = unjoined(server, key)
        stored = read_any_filter(self._filter)
        self.info, self.generations = stored.info, stored.generations
        self.location = f"{server.address}, key {key}"
        self.spider, self.fingerprinter = self.info.spider, self.info.fingerprinter
        self.error_rate, self.salt = self.info.error_rate, self.info.salt
        self.forgotten = RedisForgotten(server, key, stored.id)
        self._live: Sequence[RedisGeneration] = self.generations
        if self.generations[-1].open_until:
            live = {each.id for each in unexpired(self.generations, server.now(), window)}
            self._live = [
                each
                for each in self.generations
                if each.id in live or each.number >= stored.kept_from
            ]
        most = max(each.geometry.num_hashes for each in self.generations)
        self._locate = make_hasher(bytes.fromhex(self.salt), most)

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
        for generation in reversed(self._live):  # the newest has most of the fingerprints
            rest = [index for index, is_seen in enumerate(seen) if not is_seen]
            answers = self._look(generation, [fingerprints[index] for index in rest])
            for index, is_seen in zip(rest, answers, strict=True):
                seen[index] = is_seen
        return seen

    def _look(self, generation: RedisGeneration, fingerprints: Sequence[bytes]) -> list[bool]:
        blocks, hashes = generation.geometry.num_blocks, generation.geometry.num_hashes
        bits = 8 * BLOCK_BYTES
        used, commands = set(), []
        for fingerprint in fingerprints:
            block_hash, positions = self._locate(fingerprint)
            chunk, index = divmod(block_of(block_hash, blocks), CHUNK_BLOCKS)
            used.add(chunk)
            words = [
                word for each in positions[:hashes] for word in ("GET", "u1", index * bits + each)
            ]
            key = self._filter.chunk_key(generation, chunk)
            commands.append(("BITFIELD_RO", key, *words))
        # BITFIELD_RO returns 0 for the bits of a lost key, so the lengths are checked.
        lengths = [("STRLEN", self._filter.chunk_key(generation, chunk)) for chunk in used]
        answers = self._server.batches([*commands, *lengths])
        if answers[len(commands) :] != [generation.chunk_bytes(chunk) for chunk in used]:
            raise _lost(self._filter, generation)
        return [all(answer) for answer in answers[: len(commands)]]

    def forget(self, fingerprints: Sequence[bytes]) -> None:
        """Add fingerprints to the forgotten set, so that they are new once more."""
        self.forgotten.add(fingerprints)

    def block_fills(self) -> list[Iterator[float]]:
        """Return for each generation the share of set bits of each of its blocks, 0 to 1."""
        return [self._fills(each) for each in self.generations]

    def count_forgotten(self) -> int:
        """Count the requests that are to be crawled again."""
        return len(self.forgotten)

    def is_closed(self) -> bool | None:
        """Return None, because it is unknown which crawls share the filter."""
        return None

    def is_in_use(self) -> bool | None:
        """Return None, because it is unknown which crawls share the filter."""
        return None

    def close(self) -> None:
        """Close the connection."""
        self._server.close()

    def _fills(self, generation: RedisGeneration) -> Iterator[float]:
        size = BLOCK_BYTES
        for data in chunks(self._filter, generation):
            for start in range(0, len(data), size):
                block = int.from_bytes(data[start : start + size], "little")
                yield block.bit_count() / (8 * size)


class ShardedReader:
    """Reads a filter in Redis with shards, with the interface of `RedisReader`.

    Args:
        shards: the readers of all shards.
    """

    def __init__(self, shards: Sequence[RedisReader]) -> None:
        first = shards[0]
        self._shards = shards
        self.generations = summed([each.generations for each in shards])
        self.location = f"{first.location}, in {len(shards)} shards"
        self.spider, self.fingerprinter = first.spider, first.fingerprinter
        self.error_rate, self.salt = first.error_rate, first.salt
        self.is_closed = self.is_in_use = first.is_closed
        self.close = first.close

    def are_seen(self, fingerprints: Sequence[bytes]) -> list[bool]:
        """Return which fingerprints a crawl would filter: recorded, and not forgotten."""
        return self._asked(fingerprints, RedisReader.are_seen)

    def are_recorded(self, fingerprints: Sequence[bytes]) -> list[bool]:
        """Return which fingerprints are recorded, with false positives."""
        return self._asked(fingerprints, RedisReader.are_recorded)

    def _asked(
        self,
        fingerprints: Sequence[bytes],
        ask: Callable[[RedisReader, Sequence[bytes]], list[bool]],
    ) -> list[bool]:
        parts = self._split(fingerprints)
        answers = [iter(ask(shard, parts[shard])) for shard in self._shards]
        return [next(answers[shard_of(each, len(answers))]) for each in fingerprints]

    def _split(self, fingerprints: Sequence[bytes]) -> dict[RedisReader, list[bytes]]:
        parts: dict[RedisReader, list[bytes]] = {each: [] for each in self._shards}
        for each in fingerprints:
            parts[self._shards[shard_of(each, len(parts))]].append(each)
        return parts

    def forget(self, fingerprints: Sequence[bytes]) -> None:
        """Add fingerprints to the forgotten set, so that they are new once more."""
        for shard, part in self._split(fingerprints).items():
            shard.forget(part)

    def block_fills(self) -> list[Iterator[float]]:
        """Return for each generation the share of set bits of each of its blocks, 0 to 1."""
        fills = zip_longest(*(each.block_fills() for each in self._shards), fillvalue=iter(()))
        return [chain(*each) for each in fills]

    def count_forgotten(self) -> int:
        """Count the requests that are to be crawled again."""
        return sum(each.count_forgotten() for each in self._shards)


def opened_reader(
    server: RedisServer, key: str, *, window: float = 0.0
) -> RedisReader | ShardedReader:
    """Return the reader of a filter, with or without shards."""
    readers = [RedisReader(server, each, window=window) for each in shard_keys(server, key)]
    return readers[0] if len(readers) == 1 else ShardedReader(readers)


def _lost(filter_: SharedFilter, generation: RedisGeneration) -> StorageError:
    return StorageError(
        f"{filter_.server.address} has lost keys of generation {generation.number} of the filter "
        f"{filter_.key!r}; the next crawl starts over with an empty filter"
    )

"""Read a filter in Redis, also while crawlers use it, without any change to it."""

from collections.abc import Iterator, Sequence

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.generations.policy import unexpired
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.forgotten import RedisForgotten
from scrapy_bloom.redis.keys.blocks import ALIVE, SEALED
from scrapy_bloom.redis.keys.meta import RedisGeneration
from scrapy_bloom.redis.keys.store import RedisStore
from scrapy_bloom.redis.view import View
from scrapy_bloom.text import counted


class RedisReader:
    """A filter in Redis, as its generations are now: see `FilterReader`, which has the same names.

    Each method may raise a StorageError, as the constructor does if there is no such filter.

    Args:
        server: the connection, which `close` closes.
        key: the filter's name.
        window: BLOOM_WINDOW_SECS of its crawls; 0: as the filter tells.
    """

    def __init__(self, server: RedisServer, key: str, *, window: float = 0.0) -> None:
        self.store = RedisStore(server, key)
        self.info, self.generations = self.store.read_filter()
        self.location = f"{server.address}, key {key}"
        self.spider, self.fingerprinter = self.info.spider, self.info.fingerprinter
        self.error_rate, self.salt = self.info.error_rate, self.info.salt
        self.names = [counted(each.num_chunks, "key") for each in self.generations]
        self.forgotten = RedisForgotten(server, key, self.info.epoch)
        self._live = self.generations
        if self.generations[-1].open_until:
            self._live = unexpired(self.generations, server.now(), window)
        self._locate = View(self.info, self.generations).locate

    def are_seen(self, fingerprints: Sequence[bytes]) -> list[bool]:
        """Return which fingerprints a crawl would filter: recorded, and not forgotten."""
        recorded = self.are_recorded(fingerprints)
        forgotten = self.forgotten.among(fingerprints)
        return [
            is_recorded and not is_forgotten
            for is_recorded, is_forgotten in zip(recorded, forgotten, strict=True)
        ]

    def are_recorded(self, fingerprints: Sequence[bytes]) -> list[bool]:
        """Return which fingerprints are recorded, or seem to be."""
        hashed = [self._locate(each) for each in fingerprints]
        seen = [False] * len(hashed)
        for generation in reversed(self._live):  # what is asked for is mostly in the newest
            rest = [index for index, is_seen in enumerate(seen) if not is_seen]
            answers = self.store.blocks.look_many(generation, [hashed[index] for index in rest])
            for index, (is_seen, marks) in zip(rest, answers, strict=True):
                if marks not in {ALIVE, SEALED}:
                    raise self._lost(generation)
                seen[index] = is_seen
        return seen

    def block_fills(self) -> list[Iterator[float]]:
        """Return for each generation the share of set bits of each of its blocks, 0 to 1."""
        return [self._fills(each) for each in self.generations]

    def count_forgotten(self) -> int:
        """Count the requests that are to be crawled again."""
        return len(self.forgotten.everything())

    def is_closed(self) -> bool | None:
        """Return None: nobody knows which crawls share the filter."""
        return None

    def is_in_use(self) -> bool | None:
        """Return None; see `is_closed`."""
        return None

    def close(self) -> None:
        """Close the connection."""
        self.store.server.close()

    def _fills(self, generation: RedisGeneration) -> Iterator[float]:
        size = generation.geometry.block_bytes
        for data in self.store.blocks.chunks(generation):
            for start in range(0, len(data), size):
                block = int.from_bytes(data[start : start + size], "little")
                yield block.bit_count() / (8 * size)

    def _lost(self, generation: RedisGeneration) -> StorageError:
        return StorageError(
            f"{self.store.server.address} has lost keys of generation {generation.number} of the "
            f"filter {self.store.key!r}; let a crawl that uses it go on, to mend what it knows of "
            "them"
        )

"""The blocks of a filter's generations in Redis or Valkey: recording, asking, copying, mending.

`scrapy_bloom.redis.keys.meta` says what the keys are called and hold, and what their marks mean.
"""

import secrets
from collections.abc import Callable, Sequence
from typing import Any

from scrapy_bloom.exceptions import BloomError
from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.filters.hashing import Hashed, block_of
from scrapy_bloom.generations.lifecycle import NoRoomError
from scrapy_bloom.redis.connection.client import Packed
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.keys.bitfield import NAME
from scrapy_bloom.redis.keys.meta import CHUNK_BLOCKS, RedisGeneration

LOST, ALIVE, SEALED = 0b00, 0b10, 0b11  # the marks; 0b01: sealed after it was lost
_IS_ALIVE = 0b10

_DRAFT_SECS = 3600  # that a copy to be OR-ed into a key lives, if we die meanwhile


class RedisBlocks:
    """The keys of the blocks of one filter."""

    def __init__(self, server: RedisServer, key: str) -> None:
        self._server = server
        self._key = key
        self._token = secrets.token_hex(8)

    def make(
        self,
        generation: RedisGeneration,
        chunks: Sequence[int],
        content: BloomFilter | None = None,
    ) -> None:
        """Make some of a generation's keys, with all their memory.

        Raises:
            NoRoomError: the server's memory is full.
        """

        def do(client: Any) -> None:
            pipeline = client.pipeline(transaction=False)
            for chunk in chunks:
                key = self.chunk_key(generation, chunk)
                if content is not None:
                    client.set(key, _content(generation, chunk, content) + _marks(ALIVE))
                else:
                    pipeline.setbit(key, generation.marks_at(chunk), 1)
            pipeline.execute()

        self._server.call(lambda client: _unless_full(client, do, generation))

    def unlink(self, generation_id: str, num_chunks: int) -> None:
        """Remove all keys of a generation."""
        self._unlink([f"{self._key}:{generation_id}:{chunk}" for chunk in range(num_chunks)])

    def unlink_strays(self, generation: RedisGeneration) -> None:
        """Remove those keys of a generation that recording has made, and not `make`."""
        keys = [self.chunk_key(generation, chunk) for chunk in range(generation.num_chunks)]
        alive = self._server.batches(
            [("GETBIT", key, generation.marks_at(chunk)) for chunk, key in enumerate(keys)]
        )
        self._unlink([key for key, is_alive in zip(keys, alive, strict=True) if not is_alive])

    def _unlink(self, keys: Sequence[str]) -> None:
        self._server.batches([("UNLINK", key) for key in keys])

    def seal(self, generation: RedisGeneration) -> None:
        """Set the mark that tells whoever records in the generation that it is over."""
        self._server.batches(
            [
                ("SETBIT", self.chunk_key(generation, chunk), generation.marks_at(chunk) + 1, 1)
                for chunk in range(generation.num_chunks)
            ]
        )

    def record(self, generation: RedisGeneration, hashed: Hashed) -> tuple[bool, int]:
        """Record a fingerprint, in one atomic step; return whether it was new, and the marks.

        Args:
            generation: the newest one.
            hashed: the fingerprint, with at least as many positions as the generation has hashes.
        """
        return self.record_many(generation, [hashed])[0]

    def record_many(
        self, generation: RedisGeneration, hashed: Sequence[Hashed]
    ) -> list[tuple[bool, int]]:
        """Record fingerprints, with one round trip if possible; see `record`."""
        answers = self._ask(generation, hashed, generation.packer.set)
        return [(0 in bits, marks) for *bits, marks in answers]

    def look(
        self, generation: RedisGeneration, hashed: Hashed, *, patient: bool = True
    ) -> tuple[bool, int]:
        """Return whether a fingerprint is recorded, and the marks of the key; see `record`."""
        return self.look_many(generation, [hashed], patient=patient)[0]

    def look_many(
        self, generation: RedisGeneration, hashed: Sequence[Hashed], *, patient: bool = True
    ) -> list[tuple[bool, int]]:
        """Return what `look` does for each fingerprint, with one round trip if possible."""
        answers = self._ask(generation, hashed, generation.packer.get, patient=patient)
        return [(0 not in bits, marks) for *bits, marks in answers]

    def _ask(
        self,
        generation: RedisGeneration,
        hashed: Sequence[Hashed],
        pack: Callable[[bytes, int, Sequence[int], int], Packed],
        *,
        patient: bool = True,
    ) -> list[Sequence[int]]:
        commands = []
        for block_hash, positions in hashed:
            block = block_of(block_hash, generation.geometry.num_blocks)
            chunk, index = divmod(block, CHUNK_BLOCKS)
            key = self.chunk_key(generation, chunk).encode()
            own = positions[: generation.geometry.num_hashes]
            commands.append((key, pack(key, index, own, generation.marks_at(chunk))))

        def do(client: Any) -> list[Sequence[int]]:
            if hasattr(client, "execute_packed"):
                answers: list[Sequence[int]] = client.execute_packed([each for _, each in commands])
                return answers
            return [client.execute_command(NAME, key, each) for key, each in commands]

        return self._server.call(do, patient=patient)

    def look_sealed(self, generation: RedisGeneration, hashed: Hashed) -> tuple[bool, int]:
        """Return what `look` does for a sealed generation: its mirror gets each block once."""
        if generation.mirror is None:
            return self.look(generation, hashed)
        block, marks = block_of(hashed[0], generation.geometry.num_blocks), ALIVE
        if not generation.complete[block]:
            # It is sealed, so what is there now is all there will ever be.
            data, marks = self._fetch(generation, block)
            generation.mirror.add_blocks(block, data)
            generation.complete[block] = 1
        return generation.mirror.has_hashed(*hashed), marks

    def _fetch(self, generation: RedisGeneration, block: int) -> tuple[bytes, int]:
        """Return a block's bytes, and the marks of its key."""
        size = generation.geometry.block_bytes
        chunk, index = divmod(block, CHUNK_BLOCKS)
        key = self.chunk_key(generation, chunk)
        start, marks_at = index * size, generation.marks_at(chunk) // 8
        data, marks = self._server.batches(
            [("GETRANGE", key, start, start + size - 1), ("GETRANGE", key, marks_at, marks_at)]
        )
        return data.ljust(size, b"\0"), marks[0] >> 6 if marks else LOST

    def chunk(self, generation: RedisGeneration, chunk: int) -> bytes | None:
        """Return all blocks of one key, None if it was lost."""
        data = self._server.send("GET", self.chunk_key(generation, chunk))
        size = generation.marks_at(chunk) // 8
        if data is None or len(data) != size + 1 or not data[-1] >> 6 & _IS_ALIVE:
            return None
        return bytes(data[:-1])

    def restore(self, generation: RedisGeneration, chunk: int, *, sealed: bool) -> None:
        """Make a lost key anew, with what the mirror knows of it.

        What others may have recorded in it meanwhile stays: it is OR-ed in one atomic step.
        """
        key, marks_at = self.chunk_key(generation, chunk), generation.marks_at(chunk)
        draft = f"{{{key}}}:{self._token}"  # on a Cluster, beside it

        def do(client: Any) -> None:
            if generation.mirror is not None:
                content = _content(generation, chunk, generation.mirror)
                client.set(draft, content + _marks(SEALED if sealed else ALIVE), ex=_DRAFT_SECS)
                client.bitop("OR", key, key, draft)
                client.unlink(draft)
            else:
                if sealed:
                    client.setbit(key, marks_at + 1, 1)
                client.setbit(key, marks_at, 1)

        self._server.call(do)

    def drop(self, generation: RedisGeneration, chunk: int) -> None:
        """Remove what we recorded in a key that belongs to no generation any more."""
        self._server.send("UNLINK", self.chunk_key(generation, chunk))

    def chunk_key(self, generation: RedisGeneration, chunk: int) -> str:
        """Return the name of the key of 127 blocks."""
        return f"{self._key}:{generation.id}:{chunk}"


def _content(generation: RedisGeneration, chunk: int, bits: BloomFilter) -> bytes:
    blocks = generation.blocks(chunk)
    return bytes(bits.blocks(blocks.start, blocks.stop))


def _marks(marks: int) -> bytes:
    return bytes([marks << 6])


def _unless_full(client: Any, do: Callable[[Any], None], generation: RedisGeneration) -> None:
    try:
        do(client)
    except BloomError:
        raise
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError" or "OOM command not allowed" in str(error):
            raise NoRoomError(
                f"the server's memory is full (maxmemory), and a generation takes "
                f"{generation.geometry.nbytes:,} bytes"
            ) from error
        raise

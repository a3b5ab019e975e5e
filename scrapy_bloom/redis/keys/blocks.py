"""The blocks of a filter's generations in Redis or Valkey: recording, asking, copying, mending.

`scrapy_bloom.redis.keys.meta` says what the keys are called and hold, and what their marks mean.
"""

import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.filters.hashing import Hashed, block_of
from scrapy_bloom.generations.lifecycle import NoRoomError
from scrapy_bloom.redis.connection.client import Command, Packed
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.keys.bitfield import NAME, BitfieldPacker
from scrapy_bloom.redis.keys.meta import CHUNK_BLOCKS, RedisGeneration

LOST, ALIVE, SEALED = 0b00, 0b10, 0b11  # the marks; 0b01: sealed after it was lost
_IS_ALIVE = 0b10

DRAFT_SECS = 3600  # that a key lives that is not published yet, if we die meanwhile
_BATCH = 1000  # keys whose names are made at once


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
        """Make some of a generation's keys, with all their memory; raises NoRoomError.

        They expire, unless `expire` is called again, until `persist` is.
        """

        def do(client: Any) -> None:
            pipeline = client.pipeline(transaction=False)
            try:
                for chunk in chunks:
                    key = self.chunk_key(generation, chunk)
                    if content is not None:
                        client.set(key, _content(generation, chunk, content, ALIVE), ex=DRAFT_SECS)
                    else:
                        pipeline.setbit(key, generation.marks_at(chunk), 1)
                        pipeline.expire(key, DRAFT_SECS)
                pipeline.execute()
            except Exception as error:
                if not _is_full(error):
                    raise
                raise NoRoomError(
                    f"the server's memory is full (maxmemory), and a generation takes "
                    f"{generation.geometry.nbytes:,} bytes"
                ) from error

        self._server.call(do)

    def unlink(self, generation_id: str, num_chunks: int) -> None:
        """Remove all keys of a generation."""
        for keys in self._batches(generation_id, num_chunks):
            self._server.unlink(keys)

    def expire(self, generation: RedisGeneration) -> None:
        """Have those keys of a generation that are there expire later."""
        for keys in self._batches(generation.id, generation.num_chunks):
            self._server.batches([("EXPIRE", key, DRAFT_SECS) for key in keys])

    def persist(self, generation: RedisGeneration) -> bool:
        """Have the keys of a generation not expire any more; return whether all are there."""
        is_complete = True
        for keys in self._batches(generation.id, generation.num_chunks):
            self._server.batches([("PERSIST", key) for key in keys])
            is_complete &= all(self._server.batches([("EXISTS", key) for key in keys]))
        return is_complete

    def _batches(self, generation_id: str, num_chunks: int) -> Iterator[list[str]]:
        """Yield the names of a generation's keys, which may be too many for the memory."""
        for start in range(0, num_chunks, _BATCH):
            chunks = range(start, min(start + _BATCH, num_chunks))
            yield [f"{self._key}:{generation_id}:{chunk}" for chunk in chunks]

    def unlink_strays(self, generation: RedisGeneration) -> None:
        """Remove those keys of a generation that recording has made, and not `make`."""
        keys = list(self._keys_with_marks(generation))
        alive = self._server.batches([("GETBIT", key, marks_at) for key, marks_at in keys])
        strays = [key for (key, _), is_alive in zip(keys, alive, strict=True) if not is_alive]
        self._server.batches([("UNLINK", key) for key in strays])

    def seal(self, generation: RedisGeneration) -> None:
        """Set the mark that tells whoever records in the generation that it is over."""
        keys = self._keys_with_marks(generation)
        self._server.batches([("SETBIT", key, marks_at + 1, 1) for key, marks_at in keys])

    def _keys_with_marks(self, generation: RedisGeneration) -> Iterator[tuple[str, int]]:
        for chunk in range(generation.num_chunks):
            yield self.chunk_key(generation, chunk), generation.marks_at(chunk)

    def record(self, generation: RedisGeneration, hashed: Hashed) -> tuple[bool, int]:
        """Record a fingerprint, in one atomic step; return whether it was new, and the marks."""
        return self.record_many(generation, [hashed])[0]

    def record_many(
        self, generation: RedisGeneration, hashed: Sequence[Hashed]
    ) -> list[tuple[bool, int]]:
        """Do the same for many, with one round trip if possible."""
        answers = self._ask(generation, hashed, BitfieldPacker.set)
        return [(0 in bits, marks) for *bits, marks in answers]

    def look(
        self, generation: RedisGeneration, hashed: Hashed, *, patient: bool = True
    ) -> tuple[bool, int]:
        """Return whether a fingerprint is recorded, and the marks of its key."""
        return self.look_many(generation, [hashed], patient=patient)[0]

    def look_many(
        self, generation: RedisGeneration, hashed: Sequence[Hashed], *, patient: bool = True
    ) -> list[tuple[bool, int]]:
        """Do the same for many, with one round trip if possible."""
        answers = self._ask(generation, hashed, BitfieldPacker.get, patient=patient)
        return [(0 not in bits, marks) for *bits, marks in answers]

    def _ask(
        self,
        generation: RedisGeneration,
        hashed: Sequence[Hashed],
        pack: Callable[[BitfieldPacker, int, Sequence[int]], Packed],
        *,
        patient: bool = True,
    ) -> list[Sequence[int]]:
        num_blocks, num_hashes, _ = generation.geometry

        def commands() -> Iterator[Command]:
            for block_hash, positions in hashed:
                chunk, index = divmod(block_of(block_hash, num_blocks), CHUNK_BLOCKS)
                packer = generation.packers.get(chunk) or self._packer(generation, chunk)
                yield NAME, packer.key, pack(packer, index, positions[:num_hashes])

        def do(client: Any) -> list[Sequence[int]]:
            answers: list[Sequence[int]] = client.execute_packed(commands())
            return answers

        return self._server.call(do, patient=patient)

    def _packer(self, generation: RedisGeneration, chunk: int) -> BitfieldPacker:
        key, marks_at = self.chunk_key(generation, chunk), generation.marks_at(chunk)
        packer = BitfieldPacker(key.encode(), generation.geometry.num_hashes, marks_at=marks_at)
        generation.packers[chunk] = packer
        return packer

    def look_sealed(self, generation: RedisGeneration, hashed: Hashed) -> tuple[bool, int]:
        """Look into a sealed generation, whose mirror gets each block once."""
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
        size = generation.geometry.block_bytes
        chunk, index = divmod(block, CHUNK_BLOCKS)
        key = self.chunk_key(generation, chunk)
        start, marks_at = index * size, generation.marks_at(chunk) // 8
        data, marks = self._server.batches(
            [("GETRANGE", key, start, start + size - 1), ("GETRANGE", key, marks_at, marks_at)]
        )
        return data.ljust(size, b"\0"), marks[0] >> 6 if marks else LOST

    def chunks(self, generation: RedisGeneration) -> Iterator[bytes]:
        """Yield all blocks of a generation, a key at a time; raises StorageError if one is lost."""
        for key, marks_at in self._keys_with_marks(generation):
            data, size = self._server.send("GET", key), marks_at // 8
            if data is None or len(data) != size + 1 or not data[-1] >> 6 & _IS_ALIVE:
                raise StorageError(
                    f"{self._server.address} has lost the key {key!r} of the filter; let a crawl "
                    "that uses it go on, to mend what it knows of it"
                )
            yield bytes(data[:-1])

    def restore(self, generation: RedisGeneration, chunk: int, *, sealed: bool) -> None:
        """Make a lost key anew, with what the mirror knows of it.

        What others may have recorded in it meanwhile stays: it is OR-ed in one atomic step.
        """
        key, marks_at = self.chunk_key(generation, chunk), generation.marks_at(chunk)
        marks = SEALED if sealed else ALIVE
        draft = f"{{{key}}}:{self._token}"  # on a Cluster, beside it

        def do(client: Any) -> None:
            if generation.mirror is not None:
                content = _content(generation, chunk, generation.mirror, marks)
                client.set(draft, content, ex=DRAFT_SECS)
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


def _content(generation: RedisGeneration, chunk: int, bits: BloomFilter, marks: int) -> bytes:
    blocks = generation.blocks(chunk)
    return bytes(bits.blocks(blocks.start, blocks.stop)) + bytes([marks << 6])


def _is_full(error: Exception) -> bool:
    return type(error).__name__ == "OutOfMemoryError" or "OOM command not allowed" in str(error)

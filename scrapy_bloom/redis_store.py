"""The generations of a filter as keys in Redis or Valkey.

    <key>                   a hash that says what the filter is:
      filter                  JSON: format, hash scheme, salt, fingerprinter, epoch, ...
      <epoch>:<n>             JSON: generation n: its id, geometry, capacity, error rate, times
      <epoch>:<n>:count       requests recorded in it
      draft:<id>              JSON: keys that belong to no generation, not yet or no more
    <key>:<id>:<c>          the blocks of a generation, 127 to a key, as they are in a file; then
                            one byte whose first two bits are marks. Of a generation that
                            counts 31 blocks, of four times the size
    <key>:lock              held by the crawler that is making a generation

Names of block keys have no hash tag, so a Cluster spreads them over its masters. 127 blocks and
the marks fill an allocation of 1 MiB.

The marks: "alive" is set when the key is made, so whoever reads 0 knows that the key was lost.
"Sealed" is set in all keys of a generation before the next one is published: whoever still
records in a sealed one sees that in the same answer, and goes on to the next.

A new epoch is a new filter under the same name. What bears another epoch is left over.
"""

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scrapy_bloom import redis_counting
from scrapy_bloom.exceptions import BloomError, StorageError
from scrapy_bloom.filters import BloomFilter
from scrapy_bloom.hashing import block_of
from scrapy_bloom.jobdir import SET_ASIDE
from scrapy_bloom.redis_bitfield import NAME
from scrapy_bloom.redis_client import Packed
from scrapy_bloom.redis_meta import (
    FilterInfo,
    RedisGeneration,
    Stored,
    generation_text,
    info_text,
    parsed,
)
from scrapy_bloom.redis_server import RedisServer

LOST, ALIVE, SEALED = 0b00, 0b10, 0b11  # the marks; 0b01: sealed after it was lost
_IS_ALIVE = 0b10

_LOCK_MILLISECONDS = 30_000
_DRAFT_SECS = 3600  # after which nobody is still making it
_BATCH = 64  # commands sent at once


class NoRoomError(StorageError):
    """The server's memory is full (maxmemory)."""


class RedisStore:
    """The keys of one filter.

    Args:
        server: where they are.
        key: the name of the hash, and the beginning of the others'.

    Attributes:
        saturated: how often a counter was at its highest when it should have counted one more.
    """

    def __init__(self, server: RedisServer, key: str) -> None:
        self.key = key
        self.server = server
        self.saturated = 0
        self._token = secrets.token_hex(8)

    # What the filter is.

    def read(self) -> Stored:
        """What is there now.

        Raises:
            StorageError: the key holds something else, or a filter of a newer format.
        """
        raw: Mapping[bytes, bytes] = self.server.call(lambda client: client.hgetall(self.key))
        fields = {name.decode("utf-8", "replace"): value for name, value in raw.items()}
        try:
            return parsed(fields)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise StorageError(
                f"the key {self.key!r} of {self.server.address} is no filter of scrapy_bloom, or a "
                "damaged one; it was left as it is: set BLOOM_REDIS_KEY to another name"
            ) from None

    def define(self, info: FilterInfo) -> None:
        """Define the filter, unless there is one."""
        self.server.call(lambda client: client.hsetnx(self.key, "filter", info_text(info)))

    def redefine(self, info: FilterInfo) -> None:
        """Begin a new epoch: from now on, the generations there are left over."""
        self.server.call(lambda client: client.hset(self.key, "filter", info_text(info)))

    def set_aside(self, stored: Stored, info: FilterInfo) -> str:
        """Keep a filter under another name, and begin a new epoch under this one.

        Args:
            stored: what is there.
            info: of the new epoch.

        Returns:
            The name of the hash that says what it was; the blocks keep their keys.
        """
        assert stored.info is not None
        name = f"{self.key}{SET_ASIDE}{time.strftime('%Y%m%d-%H%M%S')}-{stored.info.epoch}"
        kept = {"filter": info_text(stored.info)}
        for each in stored.generations:
            field_name = f"{stored.info.epoch}:{each.number}"
            kept[field_name] = generation_text(each)
            kept[f"{field_name}:count"] = str(each.count)

        def do(client: Any) -> None:
            client.hset(name, mapping=kept)
            pipeline = client.pipeline(transaction=True)
            pipeline.hset(self.key, "filter", info_text(info))
            if len(kept) > 1:  # else they would be left over, and removed with their blocks
                pipeline.hdel(self.key, *[each for each in kept if each != "filter"])
            pipeline.execute()

        self.server.call(do)
        for each in stored.generations:
            self.seal(each)  # whoever still records there is told to look for another
        return name

    def undefine(self, info: FilterInfo) -> None:
        """Remove the definition of a filter without generations."""
        stored = self.read()
        if stored.info == info and not stored.generations:
            self.server.call(lambda client: client.hdel(self.key, "filter"))

    def publish(self, epoch: str, generation: RedisGeneration) -> bool:
        """Make a generation part of the filter; False if there is another of that number."""
        name, value = f"{epoch}:{generation.number}", generation_text(generation)

        def do(client: Any) -> bool:
            client.hsetnx(self.key, name, value)
            # Not the answer of HSETNX: its reply may have been lost the first time.
            there = client.hget(self.key, name)
            if there is None or json.loads(there)["id"] != generation.id:
                return False
            client.hdel(self.key, _draft(generation.id))
            return True

        return self.server.call(do)

    def publish_filter(self, info: FilterInfo, generations: Sequence[RedisGeneration]) -> bool:
        """Make a whole filter known at once; False if there is one already."""
        fields = {"filter": info_text(info)}
        for each in generations:
            fields[f"{info.epoch}:{each.number}"] = generation_text(each)
            fields[f"{info.epoch}:{each.number}:count"] = str(each.count)
        drafts = [_draft(each.id) for each in generations]

        def do(client: Any) -> bool:
            there = client.hget(self.key, "filter")
            if there is not None:
                return bool(there == fields["filter"].encode())
            pipeline = client.pipeline(transaction=True)
            pipeline.hset(self.key, mapping=fields)
            pipeline.hdel(self.key, *drafts)
            pipeline.execute()
            return True

        # A crawler that is about to make its first generation has the lock.
        if not self.lock():
            return False
        try:
            return self.server.call(do)
        finally:
            self.unlock()

    def rewrite(self, epoch: str, generation: RedisGeneration) -> None:
        """Write a published generation's figures anew."""
        name, value = f"{epoch}:{generation.number}", generation_text(generation)
        self.server.call(lambda client: client.hset(self.key, name, value))

    def add_count(self, epoch: str, generation: RedisGeneration, number: int) -> int | None:
        """Add to a generation's count; the sum of all crawlers, None if it is not there."""
        name = f"{epoch}:{generation.number}"

        def do(client: Any) -> int | None:
            count: int = client.hincrby(self.key, f"{name}:count", number)
            if client.hexists(self.key, name):
                return count
            client.hdel(self.key, f"{name}:count")
            return None

        return self.server.call(do)

    def set_count(self, epoch: str, generation: RedisGeneration) -> None:
        """Write a generation's count as it is known here."""
        name = f"{epoch}:{generation.number}:count"
        self.server.call(lambda client: client.hset(self.key, name, generation.count))

    # One crawler at a time makes a generation.

    def lock(self) -> bool:
        """Try to become the one that makes the next generation."""

        def do(client: Any) -> bool:
            client.set(self._lock_key, self._token, nx=True, px=_LOCK_MILLISECONDS)
            return bool(client.get(self._lock_key) == self._token.encode())

        return self.server.call(do)

    def unlock(self) -> None:
        """Let others make the next one. Not vital: the lock ends by itself."""

        def do(client: Any) -> None:
            if client.get(self._lock_key) == self._token.encode():
                client.delete(self._lock_key)

        with contextlib.suppress(StorageError):
            self.server.call(do)

    @property
    def _lock_key(self) -> str:
        return f"{self.key}:lock"

    # The blocks.

    def create(self, generation: RedisGeneration, content: BloomFilter | None = None) -> None:
        """Make a generation's keys, with all their memory; nobody knows of them yet.

        Args:
            generation: with an id of its own.
            content: what its blocks shall hold; None: nothing.

        Raises:
            NoRoomError: the server's memory is full; what was made is removed.
        """
        draft = json.dumps([generation.num_chunks, self.server.now()])
        self.server.call(lambda client: client.hset(self.key, _draft(generation.id), draft))
        try:
            for start in range(0, generation.num_chunks, _BATCH):
                chunks = range(start, min(start + _BATCH, generation.num_chunks))
                self._create(generation, chunks, content)
            # Memory is checked before a command, not after it: the last key may have filled it,
            # and from then on nothing could be recorded any more.
            self._create(generation, chunks, None)
        except NoRoomError:
            self.discard(generation.id, generation.num_chunks)
            raise

    def _create(
        self, generation: RedisGeneration, chunks: Sequence[int], content: BloomFilter | None
    ) -> None:
        def do(client: Any) -> None:
            pipeline = client.pipeline(transaction=False)
            for chunk in chunks:
                key, marks_at = self.chunk_key(generation, chunk), generation.marks_at(chunk)
                if content is not None:
                    client.set(key, self._content(generation, chunk, content) + _marks(ALIVE))
                else:
                    pipeline.setbit(key, marks_at, 1)
            pipeline.pexpire(self._lock_key, _LOCK_MILLISECONDS)
            pipeline.execute()

        self.server.call(lambda client: _unless_full(client, do, generation))

    def discard(self, generation_id: str, num_chunks: int) -> None:
        """Remove the keys of what is no generation (any more)."""
        self._unlink(generation_id, num_chunks)
        self.server.call(lambda client: client.hdel(self.key, _draft(generation_id)))

    def expire(self, epoch: str, generation: RedisGeneration) -> None:
        """Remove a generation that does not count any more. Any number of crawlers may do it."""
        name = f"{epoch}:{generation.number}"
        draft = json.dumps([generation.num_chunks, 0])

        def do(client: Any) -> None:
            client.hset(self.key, _draft(generation.id), draft)
            client.hdel(self.key, name, f"{name}:count")

        self.server.call(do)
        self.discard(generation.id, generation.num_chunks)

    def remove_left_over(self, stored: Stored) -> None:
        """Remove what belongs to other epochs, and drafts that nobody works on any more."""
        for name, generation in stored.left_over.items():
            self._unlink(generation.id, generation.num_chunks)
            self._forget(name, f"{name}:count")
        live = {generation.id for generation in stored.generations}
        now = self.server.now() if stored.drafts else 0.0
        for generation_id, (num_chunks, since) in stored.drafts.items():
            if generation_id in live:
                self._forget(_draft(generation_id))
            elif now - since > _DRAFT_SECS:
                self.discard(generation_id, num_chunks)

    def _forget(self, *names: str) -> None:
        self.server.call(lambda client: client.hdel(self.key, *names))

    def _unlink(self, generation_id: str, num_chunks: int) -> None:
        keys = [f"{self.key}:{generation_id}:{chunk}" for chunk in range(num_chunks)]
        self._in_batches(keys, lambda pipeline, key: pipeline.unlink(key))

    def seal(self, generation: RedisGeneration) -> None:
        """From now on, whoever records in the generation is told that it is over."""
        self._in_batches(
            range(generation.num_chunks),
            lambda pipeline, chunk: pipeline.setbit(
                self.chunk_key(generation, chunk), generation.marks_at(chunk) + 1, 1
            ),
        )

    def _in_batches(self, items: Sequence[Any], command: Callable[[Any, Any], object]) -> None:
        for start in range(0, len(items), _BATCH):

            def do(client: Any, start: int = start) -> None:
                pipeline = client.pipeline(transaction=False)
                for item in items[start : start + _BATCH]:
                    command(pipeline, item)
                pipeline.execute()

            self.server.call(do)

    def record(
        self, generation: RedisGeneration, block_hash: int, positions: Sequence[int]
    ) -> tuple[bool, int]:
        """Record a fingerprint, in one atomic step.

        Args:
            generation: the newest one.
            block_hash: see `scrapy_bloom.hashing`.
            positions: exactly as many as the generation has hashes.

        Returns:
            Whether it was new, and the marks of the key. If that is sealed and the generation
            counts, nothing was changed.
        """
        if generation.geometry.is_counting:
            seen, marks = self._count(redis_counting.ADD, generation, block_hash, positions)
            return not seen, marks
        key, place, marks_at = self._place(generation, block_hash)
        bits, marks = self._bits(key, generation.packer.set(key, place, positions, marks_at))
        return 0 in bits, marks

    def look(
        self,
        generation: RedisGeneration,
        block_hash: int,
        positions: Sequence[int],
        *,
        patient: bool = True,
    ) -> tuple[bool, int]:
        """Whether a fingerprint is recorded, and the marks of the key. See `record`."""
        if generation.geometry.is_counting:
            return self._count(
                redis_counting.LOOK, generation, block_hash, positions, patient=patient
            )
        key, place, marks_at = self._place(generation, block_hash)
        command = generation.packer.get(key, place, positions, marks_at)
        bits, marks = self._bits(key, command, patient=patient)
        return 0 not in bits, marks

    def forget(
        self, generation: RedisGeneration, block_hash: int, positions: Sequence[int]
    ) -> bool:
        """Forget a fingerprint, in a generation that counts; False if it is not there."""
        seen, _ = self._count(redis_counting.DISCARD, generation, block_hash, positions)
        return seen

    def _place(self, generation: RedisGeneration, block_hash: int) -> tuple[bytes, int, int]:
        """The key of a fingerprint's block, its place in there, and that of the marks."""
        block = block_of(block_hash, generation.geometry.num_blocks)
        chunk, place = divmod(block, generation.chunk_blocks)
        return self.chunk_key(generation, chunk).encode(), place, generation.marks_at(chunk)

    def _bits(
        self, key: bytes, command: Packed, *, patient: bool = True
    ) -> tuple[Sequence[int], int]:
        *bits, marks = self.server.call(
            lambda client: client.execute_command(NAME, key, command), patient=patient
        )
        return bits, marks

    def _count(
        self,
        operation: str,
        generation: RedisGeneration,
        block_hash: int,
        positions: Sequence[int],
        *,
        patient: bool = True,
    ) -> tuple[bool, int]:
        key, place, marks_at = self._place(generation, block_hash)
        seen, marks, saturated = self.server.call(
            lambda client: redis_counting.run(
                client,
                key,
                operation,
                first_bit=place * generation.geometry.block_bytes * 8,
                positions=positions,
                marks_at=marks_at,
            ),
            patient=patient,
        )
        self.saturated += saturated
        return bool(seen), marks

    def fetch(self, generation: RedisGeneration, block: int) -> tuple[bytes, int]:
        """A block's bytes, and the marks of its key."""
        size = generation.geometry.block_bytes
        chunk, place = divmod(block, generation.chunk_blocks)
        key = self.chunk_key(generation, chunk)
        start, marks_at = place * size, generation.marks_at(chunk) // 8

        def do(client: Any) -> tuple[bytes, int]:
            pipeline = client.pipeline(transaction=False)
            pipeline.getrange(key, start, start + size - 1)
            pipeline.getrange(key, marks_at, marks_at)
            data, marks = pipeline.execute()
            return data.ljust(size, b"\0"), marks[0] >> 6 if marks else LOST

        return self.server.call(do)

    def chunk(self, generation: RedisGeneration, chunk: int) -> bytes | None:
        """All blocks of one key, None if it was lost."""
        data = self.server.call(lambda client: client.get(self.chunk_key(generation, chunk)))
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
                content = self._content(generation, chunk, generation.mirror)
                client.set(draft, content + _marks(SEALED if sealed else ALIVE), ex=_DRAFT_SECS)
                client.bitop("OR", key, key, draft)
                client.unlink(draft)
            else:
                if sealed:
                    client.setbit(key, marks_at + 1, 1)
                client.setbit(key, marks_at, 1)

        self.server.call(do)

    def drop(self, generation: RedisGeneration, chunk: int) -> None:
        """Remove what we recorded in a key that belongs to no generation any more."""
        self.server.call(lambda client: client.unlink(self.chunk_key(generation, chunk)))

    def chunk_key(self, generation: RedisGeneration, chunk: int) -> str:
        """The name of the key of 127 blocks."""
        return f"{self.key}:{generation.id}:{chunk}"

    def _content(self, generation: RedisGeneration, chunk: int, bits: BloomFilter) -> bytes:
        blocks = generation.blocks(chunk)
        return bytes(bits.blocks(blocks.start, blocks.stop))


def _marks(marks: int) -> bytes:
    return bytes([marks << 6])


def _draft(generation_id: str) -> str:
    return f"draft:{generation_id}"


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

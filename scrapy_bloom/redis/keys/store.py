"""All keys of a filter in Redis or Valkey: reading, making and removing them.

`scrapy_bloom.redis.keys.meta` says what they hold.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scrapy_bloom.exceptions import RefusedError, StorageError
from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.generations.lifecycle import NoRoomError
from scrapy_bloom.job.paths import SET_ASIDE
from scrapy_bloom.redis.connection.server import RedisServer, ReplacedError
from scrapy_bloom.redis.forgotten import RedisForgotten
from scrapy_bloom.redis.keys.blocks import DRAFT_SECS, RedisBlocks
from scrapy_bloom.redis.keys.drafts import Drafts
from scrapy_bloom.redis.keys.lock import RedisLock
from scrapy_bloom.redis.keys.meta import (
    QUEUE,
    RESET,
    FilterInfo,
    RedisGeneration,
    Stored,
    draft_name,
    filter_fields,
)
from scrapy_bloom.redis.keys.parsing import parsed

_RESET_SECS = 3600  # within which a crawler asks again that knew the filter
_BATCH = 64  # keys made at once, before the lock is prolonged


class RedisStore:
    """The hash, the blocks and the lock of one filter; `name` tells people which, and where."""

    def __init__(self, server: RedisServer, key: str) -> None:
        self.key = key
        self.server = server
        self.name = f"the filter {key!r} in {server.address}"
        self.blocks = RedisBlocks(server, key.partition(SET_ASIDE)[0])  # they keep their keys
        self.lock = RedisLock(server, key)
        self.drafts = Drafts(server, key, self.blocks)

    def read(self, *, patient: bool = True) -> Stored:
        """Return what is there now; raises RefusedError if that is no filter that we can use."""
        raw = self.server.send("HGETALL", self.key, patient=patient)
        what = f"the key {self.key!r} of {self.server.address}"
        try:
            return parsed(raw)
        except StorageError as error:
            raise RefusedError(f"{what}: {error}") from None
        except ValueError as error:
            raise RefusedError(
                f"{what} is no filter of scrapy_bloom, or a damaged one ({error}); it was left as "
                "it is: set BLOOM_REDIS_KEY to another name"
            ) from None

    def read_filter(self) -> tuple[FilterInfo, Sequence[RedisGeneration]]:
        """Return the filter that is there, with at least one generation; raises StorageError."""
        stored = self.read()
        if stored.info is None or not stored.generations:
            raise StorageError(
                f"{self.server.address} has no filter {self.key!r}; check BLOOM_REDIS_KEY, with "
                "the spider's name in it"
            )
        return stored.info, stored.generations

    def define(self, info: FilterInfo) -> None:
        """Define the filter, unless there is one."""
        self.server.transaction(
            ("HSETNX", self.key, "filter", info.text),
            ("PERSIST", self.key),  # see undefine()
        )

    def redefine(self, info: FilterInfo) -> None:
        """Begin a new epoch: from now on, the generations there are left over."""
        self.server.transaction(
            ("HSET", self.key, "filter", info.text),
            ("HDEL", self.key, QUEUE),
            ("PERSIST", self.key),
        )

    def undefine(self, info: FilterInfo) -> None:
        """Remove the definition of a filter without generations; in an hour nothing is left."""
        stored = self.read()
        if stored.info == info and not stored.generations:
            self._remove_definition(("PEXPIRE", self.key, 1000 * _RESET_SECS))

    def reset(self, *queue: str) -> None:
        """Remove the filter, for all crawlers, and the keys of its queue, all at once.

        Those that knew it begin a new one. In an hour nothing is left.
        """
        self._remove_definition(*([("UNLINK", *queue)] if queue else []))
        self.remove_left_over(self.read(), older_than=-math.inf)
        self.drafts.expire_hash()

    def _remove_definition(self, *more: Sequence[object]) -> None:
        # With a note of the purpose: else others write back what looks lost.
        self.server.transaction(
            ("HSET", self.key, RESET, self.server.now()),
            ("HDEL", self.key, "filter", QUEUE),
            *more,
        )

    def set_aside(self, stored: Stored, info: FilterInfo) -> str:
        """Keep a filter under another name, which is returned, and begin a new epoch here.

        The other name is that of a hash that says what the filter was; its blocks keep their keys.
        """
        assert stored.info is not None
        name = f"{self.key}{SET_ASIDE}{time.strftime('%Y%m%d-%H%M%S')}-{stored.info.epoch}"
        kept = filter_fields(stored.info, stored.generations)
        self.server.send("HSET", name, *_words(kept))
        commands = [("HSET", self.key, "filter", info.text), ("PERSIST", self.key)]
        if len(kept) > 1:  # else they would be left over, and removed with their blocks
            commands.append(("HDEL", self.key, *[each for each in kept if each != "filter"]))
        self.server.transaction(*commands)
        for each in stored.generations:
            self.blocks.seal(each)  # whoever still records there is told to look for another
        return name

    def publish_filter(
        self,
        info: FilterInfo,
        generations: Sequence[RedisGeneration],
        *beside: Sequence[object],
        absent: Sequence[str] = (),
    ) -> None:
        """Make a copied filter known, all at once.

        Args:
            info: what it is.
            generations: all of them, with their keys.
            *beside: commands that are executed in the same step.
            absent: more keys that must not be there; all are in one slot of a Cluster.

        Raises:
            StorageError: there is another filter, or such a key; or parts of the copy are lost.
        """
        if not all(self.blocks.persist(each) for each in generations):
            raise StorageError(
                f"{self.server.address} has lost parts of the copy before it was complete; it was "
                "removed: try again"
            )
        fields, drafts = filter_fields(info, generations), [draft_name(g.id) for g in generations]

        def do(client: Any) -> bool:
            with client.pipeline(transaction=True) as pipeline:
                pipeline.watch(self.key, *absent)
                there = pipeline.hget(self.key, "filter")
                if there is not None or (absent and pipeline.exists(*absent)):
                    return bool(there == info.text.encode())  # the reply was lost
                pipeline.multi()
                for command in (
                    ("HSET", self.key, *_words(fields)),
                    ("PERSIST", self.key),
                    ("HDEL", self.key, *drafts),
                    *beside,
                ):
                    pipeline.execute_command(*command)
                pipeline.execute()  # if they changed meanwhile, this fails, and is done again
            return True

        try:
            # A crawler that is about to make its first generation has the lock.
            if not self.lock.take() or not self.server.call(do):
                raise StorageError(
                    f"{self.server.address}: another crawl or copy made a filter or queue "
                    f"{self.key!r} meanwhile; this copy was removed"
                )
        finally:
            self.lock.release()

    def create(self, generation: RedisGeneration, content: BloomFilter | None = None) -> None:
        """Make a generation's keys, with all their memory; nobody knows of them yet.

        If the server's memory is full, what was made is removed, and a NoRoomError raised.
        """
        self.drafts.begin(generation)
        try:
            for start in range(0, generation.num_chunks, _BATCH):
                chunks = range(start, min(start + _BATCH, generation.num_chunks))
                self.blocks.make(generation, chunks, content)
                self.lock.renew()
                self.drafts.renew()
            # Memory is checked before a command, not after it: the last key may have filled it,
            # and from then on nothing could be recorded any more.
            self.blocks.make(generation, chunks)
        except (NoRoomError, ReplacedError):
            self.discard(generation.id, generation.num_chunks)
            raise

    def add(
        self,
        new: RedisGeneration,
        now: Callable[[], float],
        *,
        after: RedisGeneration | None = None,
        content: BloomFilter | None = None,
    ) -> bool:
        """Make a generation, seal the one before it, and let all crawlers know of it.

        Return False if there is another of that number: then nothing is left of the new one. Like
        `create`, it raises NoRoomError.
        """
        self.create(new, content)
        if after is not None:
            # All of it, before the next one is known: who sees that one finds here all that was
            # recorded, and who still records here is told that it is too late.
            self.blocks.seal(after)
            if after.id not in {each.id for each in self.read().generations}:
                # Sealing makes keys, too, if they were removed meanwhile: nobody knows of them.
                self.discard(after.id, after.num_chunks)
            new.created_at = now()  # meanwhile others may have recorded in that one
        if self.publish(new):
            return True
        self.discard(new.id, new.num_chunks)
        return False

    def publish(self, generation: RedisGeneration) -> bool:
        """Make a generation part of the filter; False if there is another of that number."""
        self.blocks.persist(generation)  # a crawl mends what is lost

        def do(client: Any) -> bool:
            client.hsetnx(self.key, generation.name, generation.text)
            # Not the answer of HSETNX: its reply may have been lost the first time.
            there = client.hget(self.key, generation.name)
            if there is None or json.loads(there)["id"] != generation.id:
                return False
            if generation.count:
                client.hset(self.key, f"{generation.name}:count", generation.count)
            return True

        if is_published := self.server.call(do):
            self.drafts.end(generation.id)
        return is_published

    def rewrite(self, generation: RedisGeneration) -> None:
        """Write the figures of a generation that was published before."""
        self.server.send("HSET", self.key, generation.name, generation.text)

    def add_count(
        self, generation: RedisGeneration, number: int, *, patient: bool = True
    ) -> int | None:
        """Add to a generation's count, and return the sum; None if it is not there any more."""
        name = generation.name

        def do(client: Any) -> int | None:
            count: int = client.hincrby(self.key, f"{name}:count", number)
            if client.hexists(self.key, name):
                return count
            client.hdel(self.key, f"{name}:count")
            return None

        return self.server.call(do, patient=patient)

    def expire(self, generation: RedisGeneration) -> None:
        """Remove a generation that does not count any more. Any number of crawlers may do it."""
        self.drafts.write(generation, 0)
        self._drop(generation.name, f"{generation.name}:count")
        self.discard(generation.id, generation.num_chunks)

    def discard(self, generation_id: str, num_chunks: int) -> None:
        """Remove keys that belong to no generation (any more)."""
        self.blocks.unlink(generation_id, num_chunks)
        self.drafts.end(generation_id)

    def remove_left_over(self, stored: Stored, *, older_than: float = DRAFT_SECS) -> None:
        """Remove the keys of other epochs, and drafts that nobody works on any more.

        Args:
            stored: what is there.
            older_than: the age of such a draft, in seconds.
        """
        for epoch in {each.epoch for each in stored.left_over}:
            RedisForgotten(self.server, self.key, epoch).remove_all()
        for each in stored.left_over:
            self.blocks.unlink(each.id, each.num_chunks)
            self._drop(each.name, f"{each.name}:count")
        live = {generation.id for generation in stored.generations}
        now = self.server.now() if stored.drafts else 0.0
        for generation_id, (num_chunks, since) in stored.drafts.items():
            if generation_id in live:
                self.drafts.end(generation_id)
            elif now - since > older_than:
                self.discard(generation_id, num_chunks)

    def _drop(self, *names: str) -> None:
        self.server.send("HDEL", self.key, *names)


def _words(fields: Mapping[str, str]) -> list[str]:
    return [word for field in fields.items() for word in field]

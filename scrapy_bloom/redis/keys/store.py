"""All keys of a filter in Redis or Valkey: making and removing them.

What they hold is said in `scrapy_bloom.redis.keys.meta`.
"""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.generations.lifecycle import NoRoomError
from scrapy_bloom.job.paths import SET_ASIDE
from scrapy_bloom.redis.connection.server import RedisServer, ReplacedError
from scrapy_bloom.redis.forgotten import remove_forgotten
from scrapy_bloom.redis.keys.blocks import RedisBlocks
from scrapy_bloom.redis.keys.hash import FilterHash
from scrapy_bloom.redis.keys.lock import RedisLock
from scrapy_bloom.redis.keys.meta import (
    FilterInfo,
    RedisGeneration,
    Stored,
    draft_name,
    field_name,
    filter_fields,
    info_text,
)

_DRAFT_SECS = 3600  # after which nobody is still making it
_BATCH = 64  # keys made at once, before the lock is prolonged


class RedisStore(FilterHash):
    """The hash and the blocks of one filter.

    Attributes:
        blocks: the keys of the blocks.
        lock: held by the crawler that is making a generation.
    """

    def __init__(self, server: RedisServer, key: str) -> None:
        super().__init__(server, key)
        self.blocks = RedisBlocks(server, key.partition(SET_ASIDE)[0])  # they keep their keys
        self.lock = RedisLock(server, key)

    def reset(self) -> None:
        """Remove the filter, for all crawlers: those that knew it begin a new one."""
        self._remove_definition()
        self.remove_left_over(self.read())

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
        kept = filter_fields(stored.info, stored.generations)

        def do(client: Any) -> None:
            client.hset(name, mapping=kept)
            pipeline = client.pipeline(transaction=True)
            pipeline.hset(self.key, "filter", info_text(info))
            pipeline.persist(self.key)
            if len(kept) > 1:  # else they would be left over, and removed with their blocks
                pipeline.hdel(self.key, *[each for each in kept if each != "filter"])
            pipeline.execute()

        self.server.call(do)
        for each in stored.generations:
            self.blocks.seal(each)  # whoever still records there is told to look for another
        return name

    def publish_filter(self, info: FilterInfo, generations: Sequence[RedisGeneration]) -> bool:
        """Make a whole filter known at once; False if there is one already."""
        fields = filter_fields(info, generations)
        drafts = [draft_name(each.id) for each in generations]

        def do(client: Any) -> bool:
            there = client.hget(self.key, "filter")
            if there is not None:
                return bool(there == fields["filter"].encode())
            pipeline = client.pipeline(transaction=True)
            pipeline.hset(self.key, mapping=fields)
            pipeline.persist(self.key)
            pipeline.hdel(self.key, *drafts)
            pipeline.execute()
            return True

        # A crawler that is about to make its first generation has the lock.
        if not self.lock.take():
            return False
        try:
            return self.server.call(do)
        finally:
            self.lock.release()

    def create(self, generation: RedisGeneration, content: BloomFilter | None = None) -> None:
        """Make a generation's keys, with all their memory; nobody knows of them yet.

        Args:
            generation: with an id of its own.
            content: what its blocks shall hold; None: nothing.

        Raises:
            NoRoomError: the server's memory is full; what was made is removed.
        """
        draft = json.dumps([generation.num_chunks, self.server.now()])
        self.server.call(lambda client: client.hset(self.key, draft_name(generation.id), draft))
        try:
            for start in range(0, generation.num_chunks, _BATCH):
                chunks = range(start, min(start + _BATCH, generation.num_chunks))
                self.blocks.make(generation, chunks, content)
                self.lock.renew()
            # Memory is checked before a command, not after it: the last key may have filled it,
            # and from then on nothing could be recorded any more.
            self.blocks.make(generation, chunks)
        except (NoRoomError, ReplacedError):
            self.discard(generation.id, generation.num_chunks)
            raise

    def add(
        self,
        epoch: str,
        new: RedisGeneration,
        now: Callable[[], float],
        *,
        after: RedisGeneration | None = None,
        content: BloomFilter | None = None,
    ) -> bool:
        """Make a generation, seal the one before it, and let all crawlers know of it.

        Args:
            epoch: of the filter.
            new: the generation.
            now: returns the time for all crawlers.
            after: the one before it.
            content: see `create`, whose errors are raised.

        Returns:
            False if there is another of that number: then nothing is left of it.
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
        if self.publish(epoch, new):
            return True
        self.discard(new.id, new.num_chunks)
        return False

    def discard(self, generation_id: str, num_chunks: int) -> None:
        """Remove the keys of what is no generation (any more)."""
        self.blocks.unlink(generation_id, num_chunks)
        self._drop(draft_name(generation_id))

    def expire(self, epoch: str, generation: RedisGeneration) -> None:
        """Remove a generation that does not count any more. Any number of crawlers may do it."""
        name = field_name(epoch, generation)
        draft = json.dumps([generation.num_chunks, 0])

        def do(client: Any) -> None:
            client.hset(self.key, draft_name(generation.id), draft)
            client.hdel(self.key, name, f"{name}:count")

        self.server.call(do)
        self.discard(generation.id, generation.num_chunks)

    def remove_left_over(self, stored: Stored) -> None:
        """Remove what belongs to other epochs, and drafts that nobody works on any more."""
        for epoch in {name.partition(":")[0] for name in stored.left_over}:
            remove_forgotten(self.server, self.key, epoch)
        for name, generation in stored.left_over.items():
            self.blocks.unlink(generation.id, generation.num_chunks)
            self._drop(name, f"{name}:count")
        live = {generation.id for generation in stored.generations}
        now = self.server.now() if stored.drafts else 0.0
        for generation_id, (num_chunks, since) in stored.drafts.items():
            if generation_id in live:
                self._drop(draft_name(generation_id))
            elif now - since > _DRAFT_SECS:
                self.discard(generation_id, num_chunks)

"""Keys in Redis that are not published yet: they expire by themselves if their maker dies.

The field `draft:<id>` of the filter's hash names the blocks of a generation that is being made. The
blocks expire, and so does the hash, unless there is a filter in it.
"""

import contextlib
import json
import time
from typing import Any

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.keys.blocks import DRAFT_SECS, RedisBlocks
from scrapy_bloom.redis.keys.meta import RedisGeneration, draft_name

_RENEW_SECS = DRAFT_SECS / 6


class Drafts:
    """The drafts of one process. It calls `renew` again and again while it works on them."""

    def __init__(self, server: RedisServer, key: str, blocks: RedisBlocks) -> None:
        self.keys: list[str] = []  # others that are drafts, too, and expire already
        self._server = server
        self._key = key
        self._blocks = blocks
        self._generations: dict[str, RedisGeneration] = {}
        self._renewed_at = time.monotonic()

    def begin(self, generation: RedisGeneration) -> None:
        """Announce a generation; its blocks are not there yet."""
        self._generations[generation.id] = generation
        self.write(generation, self._server.now())
        self.expire_hash()

    def renew(self) -> None:
        """Keep all drafts from expiring, if the last time was some minutes ago."""
        now = time.monotonic()
        if now - self._renewed_at < _RENEW_SECS:
            return
        self._renewed_at = now
        for each in self._generations.values():
            with contextlib.suppress(StorageError):  # a full server takes no more fields
                self.write(each, self._server.now(), patient=False)
            self._blocks.expire(each)
        self.expire_hash()
        self._server.batches([("EXPIRE", key, DRAFT_SECS) for key in self.keys])

    def end(self, generation_id: str) -> None:
        """Forget a generation that was published, or removed."""
        self._generations.pop(generation_id, None)
        self._server.send("HDEL", self._key, draft_name(generation_id))

    def write(self, generation: RedisGeneration, since: float, *, patient: bool = True) -> None:
        """Write the field of a generation's draft."""
        words = draft_name(generation.id), json.dumps([generation.num_chunks, since])
        self._server.send("HSET", self._key, *words, patient=patient)

    def expire_hash(self) -> None:
        """Have the hash expire if there is no filter in it; `RedisStore.define` undoes that."""

        def do(client: Any) -> None:
            with client.pipeline(transaction=True) as pipeline:
                pipeline.watch(self._key)
                if pipeline.hexists(self._key, "filter"):
                    return
                pipeline.multi()
                pipeline.execute_command("EXPIRE", self._key, DRAFT_SECS)
                pipeline.execute()  # if it changed meanwhile, this fails, and is done again

        self._server.call(do)

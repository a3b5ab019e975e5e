"""The hash that says what a filter in Redis or Valkey is; see `scrapy_bloom.redis.keys.meta`."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from scrapy_bloom.exceptions import RefusedError, StorageError
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.keys.meta import (
    RESET,
    FilterInfo,
    RedisGeneration,
    Stored,
    draft_name,
    field_name,
    generation_text,
    info_text,
)
from scrapy_bloom.redis.keys.parsing import parsed

_RESET_SECS = 3600  # within which a crawler asks again that knew the filter


class FilterHash:
    """The hash of one filter.

    Attributes:
        name: which filter it is, and where, for people.
    """

    def __init__(self, server: RedisServer, key: str) -> None:
        self.key = key
        self.server = server
        self.name = f"the filter {key!r} in {server.address}"

    def read(self, *, patient: bool = True) -> Stored:
        """Return what is there now.

        Args:
            patient: wait out an outage.

        Raises:
            RefusedError: the key holds something else, or a filter of a newer format.
        """
        raw: Mapping[bytes, bytes] = self.server.call(
            lambda client: client.hgetall(self.key), patient=patient
        )
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
        """Return the filter that is there, with at least one generation.

        Raises:
            StorageError: there is none; see `read` for more.
        """
        stored = self.read()
        if stored.info is None or not stored.generations:
            raise StorageError(
                f"{self.server.address} has no filter {self.key!r}; check BLOOM_REDIS_KEY, with "
                "the spider's name in it"
            )
        return stored.info, stored.generations

    def define(self, info: FilterInfo) -> None:
        """Define the filter, unless there is one."""

        def do(client: Any) -> None:
            client.hsetnx(self.key, "filter", info_text(info))
            client.persist(self.key)  # see undefine()

        self.server.call(do)

    def redefine(self, info: FilterInfo) -> None:
        """Begin a new epoch: from now on, the generations there are left over."""

        def do(client: Any) -> None:
            client.hset(self.key, "filter", info_text(info))
            client.persist(self.key)

        self.server.call(do)

    def undefine(self, info: FilterInfo) -> None:
        """Remove the definition of a filter without generations; in an hour nothing is left."""
        stored = self.read()
        if stored.info == info and not stored.generations:
            self._remove_definition(expiry=_RESET_SECS)

    def _remove_definition(self, *, expiry: float = 0.0) -> None:
        """Remove it so that others see the purpose: else they write back what looks lost."""
        when = self.server.now()

        def fill(pipeline: Any) -> None:
            pipeline.hset(self.key, RESET, when)
            pipeline.hdel(self.key, "filter")
            if expiry:
                pipeline.pexpire(self.key, round(1000 * expiry))

        self.server.transaction(fill)

    def publish(self, epoch: str, generation: RedisGeneration) -> bool:
        """Make a generation part of the filter, with its count as it is known here.

        Returns:
            False if there is another of that number.
        """
        name, value = field_name(epoch, generation), generation_text(generation)

        def do(client: Any) -> bool:
            client.hsetnx(self.key, name, value)
            # Not the answer of HSETNX: its reply may have been lost the first time.
            there = client.hget(self.key, name)
            if there is None or json.loads(there)["id"] != generation.id:
                return False
            client.hdel(self.key, draft_name(generation.id))
            if generation.count:
                client.hset(self.key, f"{name}:count", generation.count)
            return True

        return self.server.call(do)

    def rewrite(self, epoch: str, generation: RedisGeneration) -> None:
        """Write a published generation's figures anew."""
        name, value = field_name(epoch, generation), generation_text(generation)
        self.server.call(lambda client: client.hset(self.key, name, value))

    def add_count(
        self, epoch: str, generation: RedisGeneration, number: int, *, patient: bool = True
    ) -> int | None:
        """Add to a generation's count; the sum of all crawlers, None if it is not there."""
        name = field_name(epoch, generation)

        def do(client: Any) -> int | None:
            count: int = client.hincrby(self.key, f"{name}:count", number)
            if client.hexists(self.key, name):
                return count
            client.hdel(self.key, f"{name}:count")
            return None

        return self.server.call(do, patient=patient)

    def _drop(self, *names: str) -> None:
        self.server.call(lambda client: client.hdel(self.key, *names))

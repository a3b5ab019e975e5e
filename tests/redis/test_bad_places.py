"""Keys and servers that hold something else than a filter."""

import json
import secrets
import traceback

import pytest

from scrapy_bloom import (
    StorageError,
)
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.scripts import block_key
from tests.support import servers
from tests.support.redis_filters import opened


class TestBadPlaces:
    def test_a_server_that_repeats_the_password(self, server: servers.Server) -> None:
        """As one does that does not know the command AUTH."""
        password = secrets.token_hex(8)
        with pytest.raises(StorageError) as caught:
            RedisServer(server.url).call(lambda client: client.execute_command("AUHT", password))
        assert "unknown command" in str(caught.value)
        assert password not in "".join(traceback.format_exception(caught.value))

    @pytest.mark.parametrize(
        "fields",
        [
            {"name": "value"},
            {"filter": "no JSON"},
            {"filter": json.dumps({"format": 1})},
        ],
    )
    def test_a_hash_that_is_no_filter(self, key: str, fields: dict[str, str]) -> None:
        client = servers.shared("valkey").client
        client.hset(key, mapping=fields)
        with pytest.raises(StorageError, match="no filter of scrapy_bloom.*BLOOM_REDIS_KEY"):
            opened("valkey", key)
        assert client.hgetall(key) == {k.encode(): v.encode() for k, v in fields.items()}

    def test_a_newer_format(self, key: str) -> None:
        opened("valkey", key).close()
        client = servers.shared("valkey").client
        raw = json.loads(client.hget(key, "filter"))
        client.hset(key, "filter", json.dumps({**raw, "format": 2}))
        with pytest.raises(StorageError, match="Upgrade scrapy_bloom"):
            opened("valkey", key)

    def test_blocks_of_another_type(self, key: str) -> None:
        backend = opened("valkey", key)
        name = block_key(backend.shards[0].key, backend.shards[0].live[0].id, 0)
        client = servers.shared("valkey").client
        client.delete(name)
        client.lpush(name, "x")
        with pytest.raises(StorageError, match="WRONGTYPE"):
            backend.add(b"page")
        backend.close()

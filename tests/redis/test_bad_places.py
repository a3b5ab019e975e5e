"""Keys and servers that hold something else than a filter."""

import json
import secrets
import traceback

import pytest

from scrapy_bloom import (
    StorageError,
)
from scrapy_bloom.redis.connection.server import RedisServer
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

    def test_a_newer_format(self, key: str) -> None:
        opened("valkey", key).close()
        client = servers.shared("valkey").client
        raw = json.loads(client.hget(key, "filter"))
        client.hset(key, "filter", json.dumps({**raw, "format": 2}))
        with pytest.raises(StorageError, match="Upgrade scrapy_bloom"):
            opened("valkey", key)

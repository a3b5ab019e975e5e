"""The keys of a generation appear when they are needed, and are removed with it."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from scrapy_bloom.exceptions import RefusedError, StorageError
from scrapy_bloom.filters.sizing import block_fills
from scrapy_bloom.generations.policy import Origin, Policy
from scrapy_bloom.redis.backend import RedisBackend
from scrapy_bloom.redis.layout import CHUNK_BLOCKS
from scrapy_bloom.redis.server import RedisServer
from scrapy_bloom.redis.stored import RedisReader, filters_on
from tests.support import servers
from tests.support.redis_filters import WARNING, fps, messages, opened

POLICY = Policy(expected=1_000_000, error_rate=1e-3)


@pytest.fixture
def crawl(server: servers.Server) -> Iterator[RedisBackend]:
    """A crawl that takes part in a filter."""
    with closing(RedisServer(server.url)) as connection:
        joined = RedisBackend(connection, "k", POLICY, Origin())
        joined.join()
        yield joined


def blocks(server: servers.Server, generation_id: str = "*") -> list[bytes]:
    """The keys of blocks, without bitmaps."""
    names = server.client.keys(f"{{k}}:blocks:{generation_id}:*")
    return [name for name in names if not name.endswith(b":made")]


@pytest.mark.parametrize("program", servers.PROGRAMS)
def test_a_large_filter_with_few_requests_is_small(program: str) -> None:
    with servers.Server(program) as server:
        before = server.client.info("memory")["used_memory"]
        backend = opened("valkey", "k", url=server.url, capacity=500_000_000, error_rate=1e-9)
        assert all(backend.add(fingerprint) for fingerprint in fps(100))
        backend.close()
        assert server.client.info("memory")["used_memory"] - before < 60_000_000
        assert sum(map(server.client.memory_usage, server.client.keys())) < 60_000_000
        assert max(map(server.client.memory_usage, server.client.keys())) <= 132_000  # 128 KiB


def test_what_was_not_made_is_empty(server: servers.Server) -> None:
    backend = opened("valkey", "k", url=server.url, capacity=1_000_000)
    assert not blocks(server)
    assert fps(1)[0] not in backend
    assert not blocks(server)  # to look up makes nothing
    assert backend.add(fps(1)[0])
    backend.close()
    assert len(blocks(server)) == 1
    with closing(RedisReader(RedisServer(server.url), "k")) as reader:
        assert reader.are_seen(fps(1000)) == [True] + 999 * [False]
        fills = list(block_fills(reader.blocks(0)))
    assert len(fills) > CHUNK_BLOCKS
    assert sum(fill > 0 for fill in fills) == 1
    assert filters_on(RedisServer(server.url)) == ["k"]


def lose_block(server: servers.Server) -> None:
    server.client.delete(blocks(server)[0])


def cut_block(server: servers.Server) -> None:
    server.client.set(blocks(server)[0], b"short")


def lose_bitmap(server: servers.Server) -> None:
    server.client.delete(*server.client.keys("*:made"))


@pytest.mark.parametrize("lose", [lose_block, cut_block, lose_bitmap])
def test_a_lost_key_is_not_an_empty_one(
    lose, server: servers.Server, caplog: pytest.LogCaptureFixture
) -> None:
    backend = opened("valkey", "k", url=server.url, capacity=1_000_000, mirror=False)
    assert all(backend.add(fingerprint) for fingerprint in fps(5))
    lose(server)
    with closing(RedisReader(RedisServer(server.url), "k")) as reader:
        with pytest.raises(StorageError, match="has lost keys of generation 1"):
            reader.are_seen(fps(100))
        with pytest.raises(StorageError, match="has lost keys of generation 1"):
            list(block_fills(reader.blocks(0)))
    new = fps(5, 600)  # in all of 46 keys
    assert all(backend.add(fingerprint) for fingerprint in new)
    (warning,) = messages(caplog, WARNING)
    assert "starts over with an empty filter" in warning
    assert all(backend.add(fingerprint) for fingerprint in fps(5))
    backend.close()


def test_whoever_joins_removes_what_has_expired(
    crawl: RedisBackend, server: servers.Server
) -> None:
    """The crawl that took it out of the list was killed."""
    oldest = crawl.live[0]
    assert crawl._send(fps(20))[0] == 20 * [0]
    assert crawl.update(1.0, POLICY.next(crawl.live))
    copies = {name: server.client.dump(name) for name in server.client.keys(f"*{oldest.id}*")}
    crawl.update(1.0, None, 1)
    assert not blocks(server, oldest.id)
    for name, copy in copies.items():
        server.client.restore(name, 0, copy)
    server.client.hset("k", f"unlink:{oldest.id}", "")
    assert blocks(server, oldest.id)
    opened("valkey", "k", url=server.url).close()
    assert not server.client.keys(f"*{oldest.id}*")
    assert not [name for name in server.client.hkeys("k") if name.startswith(b"unlink:")]


def test_a_copy_that_is_not_complete_is_refused(server: servers.Server) -> None:
    opened("valkey", "k", url=server.url).close()
    server.client.hset("k", "copying", "1")
    with pytest.raises(StorageError, match="wait until `scrapy bloom copy` has ended"):
        opened("valkey", "k", url=server.url)
    with pytest.raises(StorageError, match="remove the copy with `scrapy bloom reset`"):
        RedisReader(RedisServer(server.url), "k")


def test_a_hash_that_was_damaged_is_refused(server: servers.Server) -> None:
    opened("valkey", "k", url=server.url).close()
    server.client.hset("k", "unlink:*", "")
    with pytest.raises(RefusedError, match="is damaged"):
        opened("valkey", "k", url=server.url)

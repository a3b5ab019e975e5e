"""New generations: one that is not published leaves nothing, and loses nothing."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.generations.lifecycle import NoRoomError
from scrapy_bloom.generations.policy import ANY_ORIGIN, Policy
from scrapy_bloom.redis import making
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.filter import SharedFilter
from scrapy_bloom.redis.making import Maker
from scrapy_bloom.redis.scripts import MAKE, block_key, maker_key
from scrapy_bloom.redis.stored import RedisGeneration
from tests.support import servers
from tests.support.clock import Clock
from tests.support.redis_filters import fps, opened

POLICY = Policy(expected=1_000_000, error_rate=1e-3)  # in 2 keys


@pytest.fixture
def crawl(server: servers.Server) -> Iterator[SharedFilter]:
    """A crawl that takes part in a filter."""
    joined = SharedFilter(RedisServer(server.url), "k", POLICY, ANY_ORIGIN)
    joined.join()
    with closing(joined.server):
        yield joined


def a_generation(number: int) -> RedisGeneration:
    return RedisGeneration.of(POLICY.first(), number, 1.0, open_until=0.0)


def blocks(server: servers.Server, generation: RedisGeneration) -> list[bytes]:
    return server.client.keys(f"{{k}}:blocks:{generation.id}:*")


def expiring(server: servers.Server) -> set[bytes]:
    """The keys that expire."""
    return {key for key in server.client.keys("*") if server.client.ttl(key) > 0}


def refreshed(server: servers.Server) -> None:
    """Let another crawl join."""
    opened("valkey", "k", url=server.url).close()


def test_the_lock_is_kept_while_keys_are_made(
    server: servers.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(making, "_RENEW_SECS", 0.0)
    with closing(Maker(RedisServer(server.url), "k")) as maker:
        assert maker.begin("", "")
        server.client.pexpire(maker_key("k"), 10_000)
        maker.make(a_generation(1))
        assert server.client.pttl(maker_key("k")) > 50_000


def test_of_two_generations_that_are_made_at_once_one_counts(
    crawl: SharedFilter, server: servers.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = SharedFilter(RedisServer(server.url), "k", POLICY, ANY_ORIGIN)
    other.join()
    check = Maker.check

    def after_another(maker: Maker) -> None:
        monkeypatch.setattr(Maker, "check", check)
        server.client.delete(maker_key("k"))  # it has expired
        assert other.append(POLICY.first(), 1.0, 0.0)
        check(maker)

    monkeypatch.setattr(Maker, "check", after_another)
    assert crawl.append(POLICY.first(), 1.0, 0.0)
    assert [each.id for each in crawl.live] == [each.id for each in other.live]
    assert len(server.client.keys("{k}:blocks:*")) == sum(each.num_chunks for each in crawl.live)
    assert not expiring(server)


def test_while_another_crawl_makes_a_generation_the_full_one_stays(
    server: servers.Server,
) -> None:
    backend = opened("valkey", "k", url=server.url, capacity=1000)
    with closing(Maker(RedisServer(server.url), "k")) as maker:
        assert maker.begin(backend.filter.id, backend.filter.version)
        assert all(backend.add(fingerprint) for fingerprint in fps(1005))
        assert len(backend.status().generations) == 1
    # It tries again after a hundredth of the capacity.
    assert all(backend.add(fingerprint) for fingerprint in fps(1005, 1015))
    assert [each.count for each in backend.status().generations] == [1010, 5]
    backend.close()


def test_while_another_crawl_makes_the_next_quarter_the_last_one_stays_open(
    server: servers.Server,
) -> None:
    clock = Clock()
    options = {"url": server.url, "window_secs": 1000, "clock": clock}
    backend = opened("valkey", "k", **options)
    with closing(Maker(RedisServer(server.url), "k")) as maker:
        assert maker.begin(backend.filter.id, backend.filter.version)
        clock.now += 251
        assert backend.add(b"page")
        (only,) = backend.status().generations
        assert (only.count, only.open_until) == (1, clock.now + 10)
    clock.now += 6
    assert backend.add(b"other")
    assert [each.count for each in backend.status().generations] == [1, 1]
    backend.close()


@pytest.mark.parametrize("change", ["create", "append"])
def test_whoever_joins_makes_permanent_what_was_published(
    change: str, server: servers.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The crawl that published it was killed."""
    killed = SharedFilter(RedisServer(server.url), "k", POLICY, ANY_ORIGIN)
    if change == "append":
        killed.join()
    with monkeypatch.context() as patched:
        patched.setattr("scrapy_bloom.redis.filter.finish", lambda *_: None)
        killed.join() if change == "create" else killed.append(POLICY.first(), 1.0, 0.0)
    newest = killed.live[-1]
    assert expiring(server) == set(blocks(server, newest))
    assert server.client.hget("k", f"persist:{newest.id}") == b"2"
    refreshed(server)
    assert not expiring(server)
    assert not server.client.hexists("k", f"persist:{newest.id}")
    assert len(blocks(server, newest)) == 2


def test_whoever_joins_removes_what_has_expired(
    crawl: SharedFilter, server: servers.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The crawl that took it out of the list was killed."""
    oldest = crawl.live[0]
    assert crawl.append(POLICY.first(), 1.0, 0.0)
    with monkeypatch.context() as patched:
        patched.setattr("scrapy_bloom.redis.filter.finish", lambda *_: None)
        crawl.expire(1)
    assert len(blocks(server, oldest)) == 2
    refreshed(server)
    assert not blocks(server, oldest)
    assert not [name for name in server.client.hkeys("k") if name.startswith(b"unlink:")]


def test_a_damaged_number_of_keys_costs_little(crawl: SharedFilter, server: servers.Server) -> None:
    server.client.hset("k", "unlink:0123456789abcdef", 9_999_999)
    before = crawl.server.round_trips
    crawl.refresh()
    assert crawl.server.round_trips - before < 100
    assert not server.client.hexists("k", "unlink:0123456789abcdef")


def test_a_late_copy_of_a_command_changes_nothing(
    crawl: SharedFilter, server: servers.Server
) -> None:
    (generation,) = crawl.live
    name = block_key(crawl.key, generation.id, 0)
    server.client.setbit(name, 5, 1)
    before = server.client.get(name)
    crawl.server.script(MAKE, [name], 3600, generation.chunk_bytes(0))
    assert server.client.get(name) == before
    assert not expiring(server)


def test_keys_that_the_server_removes_while_they_are_made(server: servers.Server) -> None:
    """With a policy volatile-*, it never says that its memory is full."""
    backend = opened("valkey", "k", url=server.url, capacity=100_000)
    used = server.client.info("memory")["used_memory"]
    server.client.config_set("maxmemory-policy", "volatile-lru")
    server.client.config_set("maxmemory", used + 1_000_000)  # the next one takes 1,500,000
    with pytest.raises(NoRoomError, match="memory is full|has evicted keys"):
        backend.filter.append(Policy(expected=200_000, error_rate=1e-13).first(), 1.0, 0.0)
    server.client.config_set("maxmemory", 0)
    assert len(backend.filter.live) == 1
    assert all(backend.add(fingerprint) for fingerprint in fps(100))
    backend.close()


def test_a_member_that_was_lost_is_not_published(server: servers.Server) -> None:
    with closing(Maker(RedisServer(server.url), "k")) as maker:
        assert maker.begin("", "")
        maker.make(a_generation(1))
        maker.add("{k}:pending", [b"one", b"two"])
        server.client.zrem(f"{{k}}:pending:{maker._token}", b"one")
        assert maker.create("0" * 16, {"filter": "{}", "version": "0" * 16}) == "lost"
    assert not server.client.keys("*")


def test_a_copy_that_differs_is_removed(server: servers.Server) -> None:
    new = a_generation(1)
    server.client.set(f"{{k}}:blocks:{new.id}:0", b"another content")
    with closing(Maker(RedisServer(server.url), "k")) as maker:
        assert maker.begin("", "")
        with pytest.raises(StorageError, match="differs"):
            maker.copy(new, [bytes(new.chunk_bytes(0))])
    assert not server.client.keys("*")

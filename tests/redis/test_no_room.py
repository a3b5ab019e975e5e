"""A server without room for another generation: no page is lost."""

import pytest

from scrapy_bloom import OutageError, StorageError
from scrapy_bloom.queues.redis_store import RedisStore
from scrapy_bloom.queues.store import Batch, Entered, Joining, Reply
from scrapy_bloom.redis.stored import read_stored
from tests.support import servers
from tests.support.clock import Clock
from tests.support.redis_filters import ERROR, fps, messages, opened


def fill_up(server: servers.Server) -> None:
    """From now on the server has room for requests, and not for a generation."""
    used = server.client.info("memory")["used_memory"]
    server.client.config_set("maxmemory", used + 150_000)


class TestFull:
    def test_no_room_to_grow(
        self, server: servers.Server, caplog: pytest.LogCaptureFixture
    ) -> None:
        backend = opened("valkey", "k", url=server.url, capacity=20_000)
        used = server.client.info("memory")["used_memory"]
        server.client.config_set("maxmemory", used + 200_000)  # the next one takes 300,000
        backend.add_many(fps(19_000))
        for fingerprint in fps(19_000, 25_000):
            backend.add(fingerprint)
        status = backend.status()
        assert len(status.generations) == 1
        assert status.errors > 1  # it has tried again
        (error,) = messages(caplog, ERROR)
        assert error.startswith("No room for a new generation: the server's memory is full")
        server.client.config_set("maxmemory", 0)
        for fingerprint in fps(25_000, 30_000):
            backend.add(fingerprint)
        assert len(backend.status().generations) == 2
        assert not any(backend.add(fingerprint) for fingerprint in fps(30_000))
        backend.close()
        # What was begun in vain is gone.
        assert len(server.client.keys("{k}:blocks:*")) == 2

    def test_no_room_at_the_start(self, server: servers.Server) -> None:
        used = server.client.info("memory")["used_memory"]
        server.client.config_set("maxmemory", used + 500_000)
        with pytest.raises(StorageError, match="memory is full.*BLOOM_EXPECTED_REQUESTS"):
            opened("valkey", "k", url=server.url, capacity=1_000_000, deadline_secs=1)
        assert not server.client.keys("{k}:*")

    def test_no_room_to_turn(
        self, server: servers.Server, caplog: pytest.LogCaptureFixture
    ) -> None:
        """What is recorded is remembered for longer then, and no page is lost for it."""
        clock = Clock()
        options = {"url": server.url, "capacity": 200_000, "window_secs": 1000, "clock": clock}
        backend = opened("valkey", "k", **options)
        assert backend.add(b"first")
        fill_up(server)
        for number in range(3):
            clock.now += 300
            assert backend.add(b"%d" % number)
        assert len(backend.status().generations) == 1
        (error,) = messages(caplog, ERROR)
        assert error.startswith("No room for a new generation: the server's memory is full")
        assert error.endswith("Requests stay recorded for longer than BLOOM_WINDOW_SECS")
        assert not backend.add(b"first")
        server.client.config_set("maxmemory", 0)
        clock.now += 300
        assert backend.add(b"later")
        assert len(backend.status().generations) == 2
        clock.now += 1000
        assert backend.add(b"first")
        backend.close()

    def test_no_room_when_the_window_is_switched_off(
        self, server: servers.Server, caplog: pytest.LogCaptureFixture
    ) -> None:
        """What is recorded from now on does not end with the quarter, all the same."""
        clock = Clock()
        options = {"url": server.url, "capacity": 20_000, "clock": clock}
        backend = opened("valkey", "k", **options, window_secs=1000)
        assert backend.add(b"page")
        backend.close()
        fill_up(server)
        backend = opened("valkey", "k", **options)
        (error,) = messages(caplog, ERROR)
        assert error.startswith("No room for a new generation: the server's memory is full")
        assert backend.add(b"other")
        clock.now += 5000
        assert not backend.add(b"other")
        backend.close()
        stored = read_stored(backend.server, backend.key)
        assert stored is not None
        assert [each.open_until for each in stored.generations] == [0]


def entered_in(number: int) -> list[Entered]:
    """The requests of a batch of 200 KB, each another one."""
    return [
        Entered(b"%d " % each + bytes(10_000), fps(each, each + 1)[0], newest_first=False)
        for each in range(20 * number, 20 * number + 20)
    ]


def applied(store: RedisStore, batch: Batch) -> Reply | None:
    try:
        return store.apply(batch)
    except OutageError:
        return None


@pytest.mark.parametrize("program", servers.PROGRAMS)
def test_no_room_for_a_batch(program: str) -> None:
    """It is applied once there is room, whatever part of it was applied before that."""
    server = servers.Server(program)
    backend = opened("valkey", "k", url=server.url, capacity=5000, deadline_secs=0.2)
    store = RedisStore(backend, by_slot=False, lease_secs=600)
    store.open(Joining("spider"))
    used = server.client.info("memory")["used_memory"]
    server.client.config_set("maxmemory", used + 1_500_000)
    number = 0
    while applied(store, Batch(entered_in(number))):
        number += 1
    assert number
    server.client.config_set("maxmemory", 0)
    batch = Batch(entered_in(number))
    servers.wait_for(lambda: applied(store, batch) is not None, lambda: "it does not come back")
    expected = {each.data for n in range(number + 1) for each in entered_in(n)}
    taken: list[bytes] = []
    while batch_taken := store.apply(Batch(want=50)).taken:
        taken += [each.data for each in batch_taken]
    assert set(taken) == expected
    assert len(taken) - len(expected) <= 1
    backend.close()
    server.end()

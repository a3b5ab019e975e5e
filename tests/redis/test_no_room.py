"""A server without room for another generation: no page is lost."""

import pytest

from scrapy_bloom import OutageError
from scrapy_bloom.queues.redis_store import RedisStore
from scrapy_bloom.queues.store import Batch, Entered, Joining, Reply
from scrapy_bloom.redis.backend import RedisBackend
from tests.support import servers
from tests.support.redis_filters import fps, opened


def set_room(server: servers.Server, nbytes: int) -> None:
    used = server.client.info("memory")["used_memory"]
    server.client.config_set("maxmemory", used + nbytes)


@pytest.mark.parametrize("program", servers.PROGRAMS)
class TestFull:
    def test_nothing_is_half_written(self, program: str) -> None:
        """A request waits for room; what could not be recorded passes, and is recorded later."""
        with servers.Server(program) as server:
            backend = opened(
                "valkey", "k", url=server.url, capacity=200_000, deadline_secs=0.1, mirror=False
            )
            set_room(server, 500_000)
            waiting = fps(1000)
            with pytest.raises(OutageError, match="OOM|used memory > 'maxmemory'"):
                while backend.add(waiting[0]):
                    waiting.pop(0)
            server.client.config_set("maxmemory", 0)
            first, *rest = waiting
            servers.wait_for(lambda: is_new(backend, first), lambda: "it does not come back")
            assert all(backend.add(fingerprint) for fingerprint in rest)
            assert not any(backend.add(fingerprint) for fingerprint in fps(1000))
            assert backend.status().count == 1000
            backend.close()

    def test_no_room_to_grow(self, program: str) -> None:
        with servers.Server(program) as server:
            backend = opened("valkey", "k", url=server.url, capacity=1000, deadline_secs=0.1)
            assert backend.add_many(fps(1000)) == 1000
            set_room(server, -100_000)
            with pytest.raises(OutageError, match="OOM|used memory > 'maxmemory'"):
                backend.add(b"page")
            assert len(server.client.keys("{k}:blocks:*:made")) == 1
            server.client.config_set("maxmemory", 0)
            servers.wait_for(lambda: is_new(backend, b"page"), lambda: "it does not come back")
            assert len(backend.status().generations) == 2
            backend.close()

    def test_no_room_at_the_start(self, program: str) -> None:
        with servers.Server(program) as server:
            set_room(server, -100_000)
            with pytest.raises(OutageError, match="has room"):
                opened("valkey", "k", url=server.url, deadline_secs=0.1)
            assert not server.client.keys("*")


def is_new(backend: RedisBackend, fingerprint: bytes) -> bool:
    try:
        return backend.add(fingerprint)
    except OutageError:
        return False


def entered_in(number: int) -> list[Entered]:
    """The requests of a batch of 200 KB, each another one."""
    return [
        Entered(
            b"%d " % each_number + bytes(10_000),
            fps(each_number, each_number + 1)[0],
            newest_first=False,
        )
        for each_number in range(20 * number, 20 * number + 20)
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
    store = RedisStore(backend, lease_secs=600)
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
    expected = {entry.data for n in range(number + 1) for entry in entered_in(n)}
    taken: list[bytes] = []
    while batch_taken := store.apply(Batch(want=50)).taken:
        taken += [entry.data for entry in batch_taken]
    assert set(taken) == expected
    assert len(taken) - len(expected) <= 1
    backend.close()
    server.end()

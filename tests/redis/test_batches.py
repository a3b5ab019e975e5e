"""Many fingerprints at once: few messages, also to a Cluster, and with nodes that fail."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from scrapy_bloom.redis.backend import RedisBackend
from scrapy_bloom.redis.stored import RedisReader
from tests.support import servers
from tests.support.redis_filters import PLACES, WARNING, fps, make, messages, opened

CAPACITY = 2_000_000  # 118 keys


@pytest.fixture(scope="module")
def own_cluster() -> Iterator[servers.Cluster]:
    cluster = servers.Cluster()
    yield cluster
    cluster.end()


def nodes_of(place: str) -> list[servers.Server]:
    return servers.shared_cluster().nodes if place == "cluster" else [servers.shared(place)]


def messages_to(nodes: list[servers.Server]) -> int:
    return sum(node.client.info("stats")["total_reads_processed"] for node in nodes)


@pytest.mark.parametrize("place", PLACES)
def test_few_messages(place: str, key: str) -> None:
    """A message each took three minutes for a million."""
    backend, wanted = opened(place, key, capacity=CAPACITY), fps(5000)
    begun = messages_to(nodes_of(place))
    assert backend.add_many(wanted) == 5000
    backend.close()
    assert messages_to(nodes_of(place)) - begun < 2500
    begun = messages_to(nodes_of(place))
    reader = RedisReader(make(place, key).server, key)
    assert reader.are_seen(wanted) == [True] * 5000
    assert not any(reader.are_seen(fps(5000, 6000)))
    reader.close()
    assert messages_to(nodes_of(place)) - begun < 2500


def in_own(cluster: servers.Cluster, key: str, **options: object) -> RedisBackend:
    return opened("cluster", key, url=cluster.url, capacity=CAPACITY, **options)


def test_a_slot_that_moves_to_another_node(
    own_cluster: servers.Cluster, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """First its keys are asked for elsewhere (ASK), then the slot is (MOVED)."""
    backend = in_own(own_cluster, key)
    assert backend.add_many(fps(1000)) == 1000
    source = own_cluster.master_of(key)
    target = next(node for node in own_cluster.nodes if node is not source)
    slot = source.client.cluster("KEYSLOT", key)
    ids = [str(node.client.cluster("MYID"), "ascii") for node in (source, target)]
    target.client.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[0])
    source.client.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[1])
    with ThreadPoolExecutor() as pool:
        adding = pool.submit(backend.add_many, fps(2000))
        names = source.client.keys("*")
        for some in (names[::2], names[1::2]):
            source.client.migrate("127.0.0.1", target.port, some, 0, 10_000)
        for node in own_cluster.nodes:
            node.client.execute_command("CLUSTER SETSLOT", slot, "NODE", ids[1])
        assert adding.result(servers.LIMIT) == 1000
    assert backend.add_many(fps(3000)) == 1000
    assert backend.status().count == 3000
    backend.close()
    assert not messages(caplog, WARNING)
    again = in_own(own_cluster, key)
    assert again.add_many(fps(4000)) == 1000
    again.close()

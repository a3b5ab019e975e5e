"""What a server says of itself: its time, and which keys it may remove."""

import time

import pytest

from scrapy_bloom import OutageError
from scrapy_bloom.redis.connection.server import RedisServer
from tests.support import servers
from tests.support.connections import PROGRAMS, failure


class TestEvictionPolicy:
    @pytest.mark.parametrize(
        ("policy", "maxmemory", "expected"),
        [
            ("allkeys-lru", "100mb", "allkeys-lru"),
            ("allkeys-random", "100mb", "allkeys-random"),
            ("allkeys-lru", "0", None),
            ("volatile-lru", "100mb", None),  # our keys have no expiry
            ("noeviction", "100mb", None),
        ],
    )
    def test_it_is_told(
        self, server: servers.Server, policy: str, maxmemory: str, expected: str | None
    ) -> None:
        server.client.config_set("maxmemory", maxmemory)
        server.client.config_set("maxmemory-policy", policy)
        assert RedisServer(server.url).eviction_policy() == expected

    def test_cluster(self, own_cluster: servers.Cluster) -> None:
        server = RedisServer(own_cluster.url, cluster=True)
        assert server.eviction_policy() is None
        for node in own_cluster.nodes:
            node.client.config_set("maxmemory", "1gb")
            node.client.config_set("maxmemory-policy", "allkeys-lfu")
        assert server.eviction_policy() == "allkeys-lfu"
        for node in own_cluster.nodes:
            node.client.config_set("maxmemory", 0)

    def test_an_outage_is_none_of_the_answers(self) -> None:
        server = RedisServer(f"redis://127.0.0.1:{servers.free_port()}", deadline_secs=0)
        failure(server.eviction_policy, OutageError)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_servers_time(program: str) -> None:
    assert abs(RedisServer(servers.shared(program).url).now() - time.time()) < 5

"""Lost replies: only RedisServer repeats a command after a lost reply."""

from collections.abc import Mapping
from typing import Any

import redis

from scrapy_bloom.redis.server import RedisServer
from tests.support import servers
from tests.support.connections import locked_up
from tests.support.proxies import DroppingProxy


class TestLostReplies:
    """Only RedisServer repeats a command after a lost reply, because it counts each attempt."""

    def check(self, server: RedisServer, dropping: list[DroppingProxy], calls: int = 600) -> None:
        names = "abcdefgh"
        counts = dict.fromkeys(names, 0)
        for number in range(calls):
            name = names[number % len(names)]
            before = server.round_trips
            server.call(lambda client, name=name: client.incr(name))
            counts[name] += server.round_trips - before
        dropped = sum(entry.dropped for entry in dropping)
        assert dropped > calls / 200
        assert server.retries == dropped
        assert sum(counts.values()) == calls + dropped
        for name, count in counts.items():
            assert server.call(lambda client, name=name: client.get(name)) == b"%d" % count

    def test_single_server(self, server: servers.Server) -> None:
        proxy = DroppingProxy(server.port, 0.03, seed=1, only=b"INCR")
        # What would make redis-py repeat by itself has no effect.
        params = {"retry_on_timeout": True, "retry_on_error": [redis.ConnectionError], "retry": 3}
        url = f"redis://127.0.0.1:{proxy.port}/0?retry_on_timeout=yes&retry=3"
        tried = RedisServer(url, params=params)
        try:
            self.check(tried, [proxy])
        finally:
            tried.close()
            proxy.end()

    def test_any_reply_also_those_while_it_connects(self, server: servers.Server) -> None:
        proxy = DroppingProxy(server.port, 0.2, seed=3)
        url = locked_up(server).replace(f":{server.port}/", f":{proxy.port}/")
        tried = RedisServer(url)
        try:
            for _ in range(30):
                tried.call(lambda client: client.incr("x"))
            assert tried.retries == proxy.dropped > 5
            assert tried.round_trips == 30 + proxy.dropped
            value = int(tried.call(lambda client: client.get("x")))
            assert 30 < value <= 30 + proxy.dropped
        finally:
            tried.close()
            proxy.end()

    def test_cluster(self, own_cluster: servers.Cluster) -> None:
        # Each node says that it is to be reached at its proxy.
        dropping = [
            DroppingProxy(node.port, 0.03, seed=number, only=b"INCR")
            for number, node in enumerate(own_cluster.nodes)
        ]
        ports = {entry.port for entry in dropping}
        try:
            self.announce(own_cluster, [entry.port for entry in dropping])
            servers.wait_for(
                lambda: announced_ports(own_cluster) == [ports] * 3, lambda: str(ports)
            )
            url = f"redis+cluster://127.0.0.1:{dropping[0].port}"
            tried = RedisServer(url, params={"retry_on_timeout": True, "retry": 3})
            self.check(tried, dropping)
            assert all(entry.dropped for entry in dropping)
            tried.close()
        finally:
            self.announce(own_cluster, [0] * 3)
            for entry in dropping:
                entry.end()

    def announce(self, cluster: servers.Cluster, ports: list[int]) -> None:
        for node, port in zip(cluster.nodes, ports, strict=True):
            node.client.config_set("cluster-announce-port", port)
        if not any(ports):
            real = {node.port for node in cluster.nodes}
            servers.wait_for(
                lambda: announced_ports(cluster) == [real] * 3, lambda: "ports are not back"
            )


def announced_ports(cluster: servers.Cluster) -> list[set[int]]:
    """Return the ports that each node announces to its clients."""
    answers = [node.client.execute_command("CLUSTER SLOTS") for node in cluster.nodes]
    return [{place[1] for place in answer} for answer in map(places, answers)]


def places(slots: Any) -> list[tuple[str, int]]:
    found = slots.values() if isinstance(slots, Mapping) else slots
    return [entry["primary"] if isinstance(entry, Mapping) else entry[2][:2] for entry in found]

"""Outages of a server: a crawl waits, logs them, and continues when the server is back."""

import math
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest

from scrapy_bloom import OutageError
from scrapy_bloom.redis.server import RedisServer
from tests.support import servers
from tests.support.connections import (
    LOGIN,
    PASSWORD,
    PROGRAMS,
    USER,
    check_tells_nothing,
    failure,
    healthy,
    locked_up,
    service,
    setting_bits,
)
from tests.support.proxies import DroppingProxy


def is_back(
    server: RedisServer, call: Callable[[Any], object] = lambda client: client.ping()
) -> bool:
    try:
        server.call(call)
    except OutageError as error:
        check_tells_nothing(error)
        return False
    return True


def patient(url: str) -> str:
    """The URL of a server that is only slow: however short the deadline, it is not away."""
    return f"{url}?socket_timeout=10"


class Waits:
    """Time that passes only where it is waited, however busy the machine is."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, secs: float) -> None:
        self.now += secs


@pytest.fixture
def _only_waits_take_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scrapy_bloom.redis.server.time", Waits())


class TestOutages:
    @pytest.mark.usefixtures("_only_waits_take_time")
    def test_a_server_that_is_not_running(self) -> None:
        address = f"127.0.0.1:{servers.free_port()}/0"
        server = RedisServer(f"redis://{LOGIN}{address}", deadline_secs=1)
        message = failure(server.now, OutageError)
        assert message.startswith(f"redis://{address} cannot be used: ")
        assert "onnection refused" in message
        assert "waited up to 1 seconds, BLOOM_REDIS_DEADLINE_SECS" in message
        assert USER not in message
        assert quote(USER, safe="") not in message
        assert server.retries + 1 == server.round_trips >= 4

    @pytest.mark.usefixtures("_only_waits_take_time")
    def test_the_deadline_of_a_crawl_that_is_closing(self) -> None:
        server = RedisServer(f"redis://127.0.0.1:{servers.free_port()}", deadline_secs=30)
        server.shorten_deadline()
        message = failure(server.now, OutageError)
        assert "(waited up to 5 seconds, the crawl is closing)" in message

    @pytest.mark.usefixtures("_only_waits_take_time")
    @pytest.mark.parametrize(("failures", "lines"), [(5, 0), (6, 2)])
    def test_only_an_outage_of_more_than_a_second_is_logged(
        self,
        failures: int,
        lines: int,
        server: servers.Server,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """A link that resets every tenth connection would fill the log."""
        left = iter(range(failures))

        def fails_at_first(client: object) -> str:
            if next(left, None) is not None:
                raise ConnectionResetError("reset")
            return "reply"

        tried = RedisServer(server.url)
        with caplog.at_level("INFO"):
            assert tried.call(fails_at_first) == "reply"
        assert len(caplog.messages) == lines

    def test_without_a_deadline_nothing_is_waited_for(self) -> None:
        server = RedisServer(f"redis://127.0.0.1:{servers.free_port()}", deadline_secs=0)
        failure(server.now, OutageError)
        assert server.retries == 0

    def test_a_crash_and_a_restart(
        self, server: servers.Server, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The breaker: after one long wait, calls fail at once until the server is back."""
        tried = RedisServer(patient(locked_up(server)), deadline_secs=0.5)
        servers.wait_for(lambda: is_back(tried), lambda: "it does not come")
        caplog.clear()
        server.kill()
        failure(lambda: tried.call(setting_bits(3)), OutageError)
        tried._next_attempt = math.inf  # so that it takes no second to ask 100 times
        trips = tried.round_trips
        for _ in range(100):
            with pytest.raises(OutageError, match="cannot be used: .* check that the server runs"):
                tried.now()
        assert tried.round_trips == trips
        tried._next_attempt = 0.0
        message = failure(tried.now, OutageError)
        assert "cannot be used" in message
        assert tried.round_trips == trips + 1
        server.start()
        server.client.config_set("requirepass", PASSWORD)
        servers.wait_for(lambda: is_back(tried), lambda: "it does not come back")
        assert tried.now() > 0
        (line,) = [
            each_message for each_message in caplog.messages if "is back after" in each_message
        ]
        assert line.startswith(f"{server.url} is back after ")
        server.kill()
        failure(tried.now, OutageError)  # the next outage is waited for again
        assert tried.round_trips > trips + 3

    def test_a_late_answer_is_not_taken_for_the_next_one(self, server: servers.Server) -> None:
        # A machine that stands still for a while is no second outage.
        tried = RedisServer(f"{server.url}?socket_timeout=4", deadline_secs=0.3)
        tried.call(setting_bits(3))
        server.pause()
        try:
            failure(lambda: tried.call(setting_bits(3)), OutageError)
        finally:
            server.go_on()
        tried._next_attempt = 0.0
        servers.wait_for(lambda: is_back(tried, setting_bits(5)), lambda: "it does not come back")
        assert tried.call(setting_bits(7)) == [1] * 5 + [0] * 2

    def test_an_error_between_commands_does_no_harm(self, server: servers.Server) -> None:
        tried = RedisServer(server.url)
        server.client.hset("hash", "x", 1)
        for number in range(1, 5):
            failure(lambda number=number: tried.call(setting_bits(number, "hash")))
            assert tried.call(setting_bits(number)) == [1] * (number - 1) + [0]
            assert tried.call(lambda client: client.hget("hash", "x")) == b"1"

    def test_a_node_of_a_cluster_that_is_gone(self, own_cluster: servers.Cluster) -> None:
        tried = RedisServer(own_cluster.url, deadline_secs=0.5)
        names = "abcdefgh"

        def ask(name: str) -> object:
            return tried.call(lambda client: client.get(name))

        def ask_all() -> None:
            for name in names:
                ask(name)

        def answers() -> bool:
            try:
                ask_all()
            except OutageError:
                return False
            return True

        servers.wait_for(answers, lambda: "it does not come")
        own_cluster.nodes[2].kill()
        with pytest.raises(OutageError) as caught:
            ask_all()
        check_tells_nothing(caught.value)
        own_cluster.nodes[2].start()
        servers.wait_for(lambda: is_back(tried), lambda: "it does not come back")
        servers.wait_for(lambda: healthy(own_cluster), lambda: "the cluster is not whole again")
        servers.wait_for(answers, lambda: "it does not come back")

    def test_a_sentinel_that_hangs(self) -> None:
        tried = RedisServer(service("valkey").url, deadline_secs=0.6)
        service("valkey").sentinel.pause()
        try:
            failure(tried.now, OutageError)
        finally:
            service("valkey").sentinel.go_on()
        assert RedisServer(service("valkey").url).now() > 0

    @pytest.mark.parametrize("program", PROGRAMS)
    def test_a_failover_is_waited_out(self, program: str) -> None:
        own = servers.Service(program)
        master, replica = own.servers
        short = RedisServer(own.url, deadline_secs=0.3)
        tried = RedisServer(own.url, deadline_secs=25)
        servers.wait_for(lambda: is_back(short), lambda: "it does not come")
        tried.now()
        admin = master.client
        admin.set("x", 1)
        assert admin.wait(1, 30_000) == 1
        tried.call(setting_bits(3, "y"))
        master.kill()
        failure(short.now, OutageError)
        own.notice_soon()
        tried.call(setting_bits(3))
        assert tried.retries > 0
        assert tried.call(lambda client: client.incr("x")) == 2
        assert replica.client.get("x") == b"2"
        assert replica.client.exists("bits")
        own.end()

    @pytest.mark.parametrize("program", PROGRAMS)
    @pytest.mark.parametrize("command", ["write", "script", "read"])
    def test_a_name_that_moves_to_the_new_master(self, program: str, command: str) -> None:
        """The old master lives on as its replica, and keeps the connections that it has."""
        master = servers.Master(program)
        new, proxy = master._replica, DroppingProxy(master.port)
        tried = RedisServer(f"redis://127.0.0.1:{proxy.port}", deadline_secs=10)
        calls: dict[str, Callable[[], object]] = {
            "write": lambda: tried.call(setting_bits(3)),
            "script": lambda: tried.script("return redis.call('SET', KEYS[1], 1)", ["x"]),
            "read": lambda: tried.send("GET", "x"),
        }
        calls[command]()
        master.client.config_set("replica-serve-stale-data", "no")
        master.promote()
        port = servers.free_port() if command == "read" else new.port  # its link is down, or up
        master.client.replicaof("127.0.0.1", port)
        proxy._server_address = ("127.0.0.1", new.port)
        calls[command]()
        assert 1 <= tried.retries <= 2
        tried.close()
        proxy.end()
        master.end()

    @pytest.mark.usefixtures("_only_waits_take_time")
    def test_refusals_that_pass(self, server: servers.Server) -> None:
        """A server that is about to fail over, or has no room, may take it a little later."""

        def write(client: Any) -> None:
            pipeline = client.pipeline(transaction=False)
            pipeline.set("x", "secret value")
            pipeline.execute()

        admin = server.client
        config, replicas, memory = "CONFIG SET", "min-replicas-to-write", "maxmemory"
        for word, begin, end in (
            ("NOREPLICAS", (config, replicas, 1), (config, replicas, 0)),
            ("used memory > 'maxmemory'", (config, memory, 1), (config, memory, 0)),
            (
                "read only replica",
                ("REPLICAOF", "127.0.0.1", servers.free_port()),
                ("REPLICAOF", "NO", "ONE"),
            ),
        ):
            tried = RedisServer(server.url, params={"socket_timeout": 5}, deadline_secs=0.5)
            admin.execute_command(*begin)
            message = failure(lambda tried=tried: tried.call(write), OutageError)
            assert word in message
            assert "secret value" not in message
            assert tried.retries > 1
            admin.execute_command(*end)
            RedisServer(server.url).call(write)

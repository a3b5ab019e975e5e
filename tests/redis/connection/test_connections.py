"""Each kind of connection to Redis and Valkey: also through a Sentinel, to a Cluster, with TLS."""

import gc
from pathlib import Path
from urllib.parse import quote, urlencode

import pytest
import redis

from scrapy_bloom.redis.server import RedisServer
from tests.support import servers
from tests.support.connections import (
    LOGIN,
    PASSWORD,
    PROGRAMS,
    SECRET,
    USER,
    locked,
    refusal,
    service,
    use,
)


@pytest.mark.parametrize("program", PROGRAMS)
class TestConnections:
    def test_unix_socket(self, program: str, key: str) -> None:
        path = locked(program).directory / "redis.sock"
        server = RedisServer(f"unix://{LOGIN}{path}?db=2")
        use(server, key)
        assert server.address == f"unix://{path}"
        (client,) = server.call(lambda client: client.client_list(client_id=[client.client_id()]))
        assert "redis.sock" in client["addr"]
        assert client["db"] == "2"
        server.close()

    def test_login_in_the_parameters(self, program: str, key: str) -> None:
        # What scrapy-redis's REDIS_PARAMS may hold; what would make redis-py repeat is left out.
        params = {"username": USER, "password": PASSWORD, "db": 1, "socket_timeout": 3}
        params |= {"retry_on_timeout": True, "retry_on_error": [OSError], "decode_responses": True}
        params |= {"redis_cls": "redis.Redis", "encoding": "utf-8", "socket_keepalive": True}
        server = RedisServer(f"redis://127.0.0.1:{locked(program).port}", params=params)
        use(server, key)
        (client,) = server.call(lambda client: client.client_list(client_id=[client.client_id()]))
        assert client["db"] == "1"

    def test_sentinel(self, program: str, key: str) -> None:
        server = RedisServer(service(program).url)
        use(server, key)
        server.call(lambda client: client.set(key, 1))
        assert service(program).servers[0].client.get(key) == b"1"

    def test_logins_of_the_sentinel_and_of_its_servers(self, program: str, key: str) -> None:
        """Users with a name, and passwords with every special character."""
        own = servers.Service(program)
        rules = {"enabled": True, "keys": ["*"], "channels": ["*"], "categories": ["+@all"]}
        of_master, of_sentinel = f"{PASSWORD}1", f"{PASSWORD}2"
        for entry, password in (
            (own.servers[0], of_master),
            (own.servers[1], of_master),
            (own.sentinel, of_sentinel),
        ):
            entry.client.acl_setuser(USER, passwords=[f"+{password}"], **rules)
            entry.client.execute_command("ACL", "SETUSER", "default", "resetpass", f">{SECRET}")
        login = f"{quote(USER, safe='')}:{quote(of_master, safe='')}@"
        options = urlencode({"sentinel_username": USER, "sentinel_password": of_sentinel})
        place = f"127.0.0.1:{own.sentinel.port}/mymaster/1"
        server = RedisServer(f"redis+sentinel://{login}{place}?{options}&socket_timeout=10")
        use(server, key)
        assert server.address == f"redis+sentinel://{place}"
        (client,) = server.call(lambda client: client.client_list(client_id=[client.client_id()]))
        assert (client["user"], client["db"]) == (USER, "1")
        server.close()
        own.end()

    def test_several_sentinels_some_of_them_down(self, program: str, key: str) -> None:
        down, up = servers.free_port(), service(program).sentinel.port
        hosts = ",".join(f"127.0.0.1:{port}" for port in (down, up, down))
        url = f"redis+sentinel://{hosts}/mymaster/1"
        server = RedisServer(url)
        use(server, key)
        assert server.address == url
        server.call(lambda client: client.set(key, 1))
        assert redis.Redis(port=service(program).servers[0].port, db=1).get(key) == b"1"

    def test_after_close_no_connection_is_left(self, program: str) -> None:
        for own in (servers.Server(program), servers.Service(program)):
            watched = [own] if isinstance(own, servers.Server) else [own.sentinel, own.servers[0]]
            admins = [entry.client for entry in watched]
            before = [clients(admin) for admin in admins]
            server = RedisServer(own.url)
            kept = server.call(lambda client: client)
            server.now()
            assert all(
                clients(admin) > number for admin, number in zip(admins, before, strict=True)
            )
            gc.disable()
            try:
                server.close()
                for admin, number in zip(admins, before, strict=True):
                    servers.wait_for(
                        lambda admin=admin, number=number: clients(admin) == number,
                        lambda admin=admin: str(admin.client_list()),
                    )
            finally:
                gc.enable()
            assert kept is not None
            server.close()  # again does no harm
            assert server.now() > 0  # and it can be used again
            server.close()
            own.end()


def clients(admin: redis.Redis) -> int:
    """Normal connections to a server, but for those of a Sentinel."""
    listed = admin.client_list(_type="normal")
    return len([entry for entry in listed if not entry["name"].startswith("sentinel-")])


class TestCluster:
    def test_the_usual_database_and_options(self, key: str) -> None:
        url = servers.shared_cluster().url
        server = RedisServer(f"{url}/0?socket_timeout=10&db=0")
        use(server, key)
        server.close()

    def test_tls_and_password(
        self, key: str, tls_cluster: servers.Cluster, certificate: Path
    ) -> None:
        port = tls_cluster.nodes[0].tls_port
        login = f":{quote(PASSWORD, safe='')}@"
        url = f"rediss+cluster://{login}127.0.0.1:{port}/0?ssl_ca_certs={certificate}"
        server = RedisServer(url)
        use(server, key)
        assert server.address == f"rediss+cluster://127.0.0.1:{port}/0"
        ports = server.call(lambda client: {node.port for node in client.get_nodes()})
        assert ports == {node.tls_port for node in tls_cluster.nodes}


class TestTLS:
    def test_server(self, key: str, tls_server: servers.Server, certificate: Path) -> None:
        url = f"rediss://127.0.0.1:{tls_server.tls_port}/1?ssl_ca_certs={certificate}"
        server = RedisServer(url)
        use(server, key)
        assert server.address == f"rediss://127.0.0.1:{tls_server.tls_port}/1"

    @pytest.mark.parametrize(
        ("host", "vouched_for"),
        [("127.0.0.1", False), ("localhost", True)],  # it is for 127.0.0.1
    )
    def test_a_certificate_that_is_not_trusted_is_refused_at_once(
        self, host: str, vouched_for: bool, tls_server: servers.Server, certificate: Path
    ) -> None:
        options = f"?ssl_ca_certs={certificate}" if vouched_for else ""
        message = refusal(f"rediss://:{SECRET}@{host}:{tls_server.tls_port}/0{options}")
        assert "CERTIFICATE_VERIFY_FAILED" in message
        assert "; check the host in BLOOM_REDIS_URL, and its option ssl_ca_certs" in message

    def test_sentinel(self, key: str, certificate: Path) -> None:
        own = servers.Service("redis", certificate=certificate)
        place = f"127.0.0.1:{own.sentinel.tls_port}/mymaster"
        server = RedisServer(f"rediss+sentinel://{place}?ssl_ca_certs={certificate}")
        use(server, key)
        assert server.address == f"rediss+sentinel://{place}"
        server.call(lambda client: client.set(key, 1))
        assert own.servers[0].client.get(key) == b"1"
        server.close()
        own.end()

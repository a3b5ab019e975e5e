"""The connection to Redis and Valkey: each kind of it, refusals, outages, and no secret told."""

import datetime as dt
import functools
import gc
import ipaddress
import logging
import math
import re
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

import servers
from proxies import DroppingProxy
from scrapy_bloom import BloomError, OutageError, SettingError, StorageError
from scrapy_bloom.redis.backend import RedisBackend
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.connection.url import without_secrets
from scrapy_bloom.redis.keys.bitfield import NAME, BitfieldPacker

PROGRAMS = list(servers.PROGRAMS)

SECRET = "hushhush"  # in every password of these tests, and nowhere else
USER, PASSWORD = "us/er@1", f"p@ss:/?#[%41]&= é{SECRET}"
LOGIN_HINT = "; check user and password in BLOOM_REDIS_URL (or REDIS_URL, REDIS_PARAMS)"
LOGIN = f"{quote(USER, safe='')}:{quote(PASSWORD, safe='')}@"


@pytest.fixture(autouse=True)
def _no_secret_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.DEBUG)
    yield
    for when in ("setup", "call"):
        for record in caplog.get_records(when):
            assert SECRET not in f"{record.getMessage()} {record.__dict__}"


@pytest.fixture
def key(tmp_path: Path) -> str:
    return tmp_path.as_posix()


def check_tells_nothing(error: BaseException) -> None:
    """Neither it nor what it came from tells a password."""
    pending, seen = [error], set()
    while pending:
        each = pending.pop()
        seen.add(id(each))
        assert SECRET not in f"{each} {each!r} {each.args} {each.__dict__}"
        pending += [e for e in (each.__cause__, each.__context__) if e and id(e) not in seen]
    assert SECRET not in "".join(traceback.format_exception(error))


def use(server: RedisServer, key: str, *, expected: int = 1000) -> None:
    """As a crawl does: this sends packed commands, pipelines, transactions, all of it."""
    backend = RedisBackend(server, key, capacity=expected, error_rate=1e-9)
    backend.open()
    backend.begin()
    fingerprints = [b"%020d" % number for number in range(100)]
    assert [backend.add(each) for each in fingerprints * 2] == [True] * 100 + [False] * 100
    backend.close()
    again = RedisBackend(server, key, capacity=expected, error_rate=1e-9, mirror=False)
    again.open()
    assert [each in again for each in fingerprints] == [True] * 100
    assert again.status().count == 100
    again.clear()
    again.close()
    assert server.retries == 0
    assert SECRET not in f"{server} {server!r} {server.address}"


def failure(
    call: Callable[[], object], kind: type[BloomError] = StorageError, *, within: float = 20
) -> str:
    """The message of the error that a call ends with; a refusal is not waited out.

    By default that would take 30 seconds.
    """
    begun = time.monotonic()
    with pytest.raises(kind) as caught:
        call()
    assert time.monotonic() - begun < within
    assert isinstance(caught.value, OutageError) == (kind is OutageError)
    check_tells_nothing(caught.value)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


def refusal(url: str, call: Callable[[Any], object] | None = None, **options: Any) -> str:
    server = RedisServer(url, **options)
    message = failure(lambda: server.call(call or (lambda client: client.hgetall("some"))))
    assert server.address in message
    server.close()
    return message


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new certificate for this computer that nobody but itself vouches for, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "scrapy_bloom")])
    now, day = dt.datetime.now(dt.timezone.utc), dt.timedelta(days=1)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    encoding, none = serialization.Encoding.PEM, serialization.NoEncryption()
    path = tmp_path_factory.mktemp("tls") / "certificate.pem"
    path.write_bytes(
        made.public_bytes(encoding)
        + key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, none)
    )
    return path


@functools.cache
def locked(program: str) -> servers.Server:
    """A server that lets nobody in but USER, and nobody without a password."""
    server = servers.Server(program, "--unixsocket", "redis.sock")
    admin = server.client
    admin.acl_setuser(
        USER, enabled=True, passwords=[f"+{PASSWORD}"], keys=["*"], categories=["+@all"]
    )
    admin.execute_command("ACL", "SETUSER", "default", f">{SECRET}")
    return server


@functools.cache
def service(program: str) -> servers.Service:
    return servers.Service(program)


@pytest.fixture(scope="module", params=PROGRAMS)
def tls_server(request: pytest.FixtureRequest, certificate: Path) -> Iterator[servers.Server]:
    server = servers.Server(request.param, certificate=certificate)
    yield server
    server.end()


@pytest.fixture(scope="module", params=PROGRAMS)
def tls_cluster(request: pytest.FixtureRequest, certificate: Path) -> Iterator[servers.Cluster]:
    """One that asks for a password, too."""
    cluster = servers.Cluster(request.param, certificate=certificate)
    for node in cluster.nodes:
        node.client.config_set("requirepass", PASSWORD)
    yield cluster
    cluster.end()


@pytest.fixture(scope="module")
def own_cluster() -> Iterator[servers.Cluster]:
    """One that tests may do harm to, if they mend it."""
    cluster = servers.Cluster()
    yield cluster
    cluster.end()


@pytest.fixture(params=PROGRAMS)
def server(request: pytest.FixtureRequest) -> Iterator[servers.Server]:
    """A server of one test alone."""
    server = servers.Server(request.param)
    yield server
    server.end()


@pytest.mark.parametrize("program", PROGRAMS)
class TestConnections:
    def test_tcp(self, program: str, key: str) -> None:
        use(RedisServer(servers.shared(program).url), key)

    def test_another_database(self, program: str, key: str) -> None:
        server = RedisServer(servers.shared(program).url.replace("/0", "/3"))
        server.call(lambda client: client.set(key, 1))
        assert redis.Redis(port=servers.shared(program).port, db=3).get(key) == b"1"

    def test_unix_socket(self, program: str, key: str) -> None:
        path = locked(program).directory / "redis.sock"
        server = RedisServer(f"unix://{LOGIN}{path}?db=2")
        use(server, key)
        assert server.address == f"unix://{path}"
        (client,) = server.call(lambda client: client.client_list(client_id=[client.client_id()]))
        assert "redis.sock" in client["addr"]
        assert client["db"] == "2"
        server.close()

    def test_user_and_password_percent_encoded(self, program: str, key: str) -> None:
        server = RedisServer(f"redis://{LOGIN}127.0.0.1:{locked(program).port}")
        use(server, key)
        assert server.call(lambda client: str_of(client.acl_whoami())) == USER
        assert server.address == f"redis://127.0.0.1:{locked(program).port}"

    def test_password_alone(self, program: str, key: str) -> None:
        server = RedisServer(f"redis://:{SECRET}@127.0.0.1:{locked(program).port}")
        use(server, key)
        assert server.call(lambda client: str_of(client.acl_whoami())) == "default"

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
        server = RedisServer(service(program).url, sentinel="mymaster")
        use(server, key)
        server.call(lambda client: client.set(key, 1))
        assert service(program).servers[0].client.get(key) == b"1"

    def test_several_sentinels_some_of_them_down(self, program: str, key: str) -> None:
        down, up = servers.free_port(), service(program).sentinel.port
        url = f"redis://127.0.0.1:{down},127.0.0.1:{up},127.0.0.1:{down}/1"
        server = RedisServer(url, sentinel="mymaster", deadline_secs=30)
        begun = time.monotonic()
        use(server, key)
        assert time.monotonic() - begun < 20
        assert server.address == url
        server.call(lambda client: client.set(key, 1))
        assert redis.Redis(port=service(program).servers[0].port, db=1).get(key) == b"1"

    def test_after_close_no_connection_is_left(self, program: str) -> None:
        for own, options in (
            (servers.Server(program), {}),
            (servers.Service(program), {"sentinel": "mymaster"}),
        ):
            watched = [own] if isinstance(own, servers.Server) else [own.sentinel, own.servers[0]]
            admins = [each.client for each in watched]
            before = [clients(admin) for admin in admins]
            server = RedisServer(own.url, **options)
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


def test_all_commands_share_one_connection() -> None:
    own = servers.Server()
    admin = own.client
    before = clients(admin)
    server = RedisServer(own.url)
    for pause in (0, 1.1):  # after a while, the connection is looked at again
        time.sleep(pause)
        for _ in range(3):
            server.call(packed(3))
            server.now()
            server.call(lambda client: client.pipeline().get("x").execute())
            server.call(packed(2))
    server.call(packed(3))
    assert clients(admin) == before + 1
    server.close()
    own.end()


def str_of(answer: str | bytes) -> str:
    return answer if isinstance(answer, str) else answer.decode()


def clients(admin: redis.Redis) -> int:
    """Normal connections to a server, but for those of a Sentinel."""
    listed = admin.client_list(_type="normal")
    return len([each for each in listed if not each["name"].startswith("sentinel-")])


class TestCluster:
    def test_plain(self, key: str) -> None:
        server = RedisServer(servers.shared_cluster().url, cluster=True)
        use(server, key)
        assert abs(server.now() - time.time()) < 5
        for name in "abcdefgh":  # on all nodes
            server.call(lambda client, name=name: client.set(key + name, 1))
        assert all(node.client.dbsize() for node in servers.shared_cluster().nodes)

    def test_any_node_will_do(self, key: str) -> None:
        for node in servers.shared_cluster().nodes:
            use(RedisServer(node.url, cluster=True), key)

    def test_tls_and_password(
        self, key: str, tls_cluster: servers.Cluster, certificate: Path
    ) -> None:
        port = tls_cluster.nodes[0].tls_port
        login = f":{quote(PASSWORD, safe='')}@"
        url = f"rediss://{login}127.0.0.1:{port}?ssl_ca_certs={certificate}"
        server = RedisServer(url, cluster=True)
        use(server, key)
        ports = server.call(lambda client: {node.port for node in client.get_nodes()})
        assert ports == {node.tls_port for node in tls_cluster.nodes}

    def test_after_close_no_connection_is_left(self, own_cluster: servers.Cluster) -> None:
        gc.collect()  # what other tests have left is not closed in the middle of this one
        admins = [node.client for node in own_cluster.nodes]
        before = [clients(admin) for admin in admins]
        server = RedisServer(own_cluster.url, cluster=True)
        kept = server.call(lambda client: client)
        for name in "abcdefgh":
            server.call(lambda client, name=name: client.get(name))
        assert [clients(admin) for admin in admins] != before
        server.close()
        servers.wait_for(
            lambda: [clients(admin) for admin in admins] == before, lambda: "a connection is left"
        )
        assert kept is not None


class TestTLS:
    def test_server(self, key: str, tls_server: servers.Server, certificate: Path) -> None:
        url = f"rediss://127.0.0.1:{tls_server.tls_port}/1?ssl_ca_certs={certificate}"
        server = RedisServer(url)
        use(server, key)
        assert server.address == f"rediss://127.0.0.1:{tls_server.tls_port}/1"

    def test_certificate_in_the_parameters(
        self, key: str, tls_server: servers.Server, certificate: Path
    ) -> None:
        params = {"ssl_ca_certs": str(certificate)}
        use(RedisServer(f"rediss://127.0.0.1:{tls_server.tls_port}", params=params), key)

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

    def test_without_tls_nobody_gets_through(self, tls_server: servers.Server) -> None:
        # The proxy for a server that knows no TLS is as strict as a server that does.
        server = RedisServer(f"redis://127.0.0.1:{tls_server.tls_port}", deadline_secs=0.3)
        failure(server.now, OutageError)

    @pytest.mark.parametrize("program", PROGRAMS)
    def test_sentinel(self, program: str, key: str, certificate: Path) -> None:
        own = servers.Service(program, certificate=certificate)
        url = f"rediss://127.0.0.1:{own.sentinel.tls_port}?ssl_ca_certs={certificate}"
        server = RedisServer(url, sentinel="mymaster")
        use(server, key)
        server.call(lambda client: client.set(key, 1))
        assert own.servers[0].client.get(key) == b"1"
        server.close()
        own.end()


class TestRefusals:
    """Each at once, however long the deadline: it would be the same a little later."""

    @pytest.mark.parametrize("program", PROGRAMS)
    @pytest.mark.parametrize(
        "login",
        [
            f"{quote(USER, safe='')}:wrong{SECRET}@",
            f"nobody:{SECRET}@",
            f":wrong{SECRET}@",
            f"{quote(USER, safe='')}@",
            "",
        ],
    )
    def test_login(self, program: str, login: str) -> None:
        message = refusal(f"redis://{login}127.0.0.1:{locked(program).port}/0")
        assert message.endswith(LOGIN_HINT)

    @pytest.mark.parametrize("program", PROGRAMS)
    def test_login_where_there_is_none(self, program: str) -> None:
        url = servers.shared(program).url.replace("//", f"//:{SECRET}@")
        assert refusal(url).endswith(LOGIN_HINT)

    @pytest.mark.parametrize("program", PROGRAMS)
    def test_login_of_the_master_behind_a_sentinel(self, program: str) -> None:
        own = servers.Service(program)
        own.servers[0].client.config_set("requirepass", PASSWORD)
        url = f"redis://{{}}127.0.0.1:{own.sentinel.port}"
        for login in ("", f":wrong{SECRET}@"):
            message = refusal(url.format(login), sentinel="mymaster")
            assert message.endswith(LOGIN_HINT)
        login = f":{quote(PASSWORD, safe='')}@"
        assert RedisServer(url.format(login), sentinel="mymaster").now() > 0
        own.end()

    @pytest.mark.parametrize("program", PROGRAMS)
    def test_login_of_the_sentinel(self, program: str) -> None:
        own = servers.Service(program)
        admin = own.sentinel.client
        admin.execute_command("ACL", "SETUSER", "default", "resetpass", f">{PASSWORD}")
        for params in ({}, {"sentinel_kwargs": {"password": f"wrong{SECRET}"}}):
            message = refusal(own.url, sentinel="mymaster", params=params)
            assert "No master found for 'mymaster'; " in message
            assert "REDIS_PARAMS (sentinel_kwargs)" in message
        params = {"sentinel_kwargs": {"password": PASSWORD}}
        assert RedisServer(own.url, sentinel="mymaster", params=params).now() > 0
        own.end()

    def test_login_to_a_cluster(self, tls_cluster: servers.Cluster, certificate: Path) -> None:
        options = f"ssl_ca_certs={certificate}"
        for login in ("", f":wrong{SECRET}@"):
            url = f"rediss://{login}127.0.0.1:{tls_cluster.nodes[0].tls_port}?{options}"
            message = refusal(url, cluster=True)
            assert message.endswith(LOGIN_HINT)

    def test_certificate_of_a_cluster(self, tls_cluster: servers.Cluster) -> None:
        url = f"rediss://:{SECRET}@127.0.0.1:{tls_cluster.nodes[0].tls_port}"
        assert "CERTIFICATE_VERIFY_FAILED" in refusal(url, cluster=True)

    @pytest.mark.parametrize("place", [*PROGRAMS, "cluster"])
    def test_permissions_and_what_the_message_says_is_enough(self, place: str, key: str) -> None:
        cluster = place == "cluster"
        nodes = servers.shared_cluster().nodes if cluster else [servers.shared(place)]
        user = f"user-{key}"

        def allow(*rules: str) -> None:
            for node in nodes:
                rest = ("reset", "on", f">{PASSWORD}", *rules)
                node.client.execute_command("ACL", "SETUSER", user, *rest)

        login = f"{quote(user, safe='')}:{quote(PASSWORD, safe='')}@"
        url = f"redis://{login}127.0.0.1:{nodes[0].port}"
        allow("~*", "-@all", "+cluster|slots")
        message = refusal(url, cluster=cluster)
        assert "NoPermissionError: " in message
        if cluster:
            allow("~*", "+@all", "-cluster")
            assert refusal(url, cluster=True).partition("; ")[2] == message.partition("; ")[2]
        allow("~other*", "+@all")
        assert refusal(url, cluster=cluster).partition("; ")[2] == message.partition("; ")[2]
        assert "; the user needs ~KEY* and ~{KEY*" in message
        categories = re.findall(r"\+[@\w|]+", message)
        assert len(categories) == 6
        rules = [each for each in categories if cluster or "|" not in each]
        allow(f"~{key}*", f"~{{{key}*", *rules)
        server = RedisServer(url, cluster=cluster)
        assert server.eviction_policy() is None  # INFO is not allowed
        use(server, key)
        use(server, key, expected=20)  # it grows
        backend = RedisBackend(server, key, capacity=1000, error_rate=1e-9)
        backend.open()
        assert backend.add(b"1" * 20)
        for node in nodes:
            for each in node.client.scan_iter(f"{key}*"):
                node.client.delete(each)
        assert backend.add(b"2" * 20)  # it makes anew what is lost
        assert not backend.add(b"1" * 20)
        backend.clear()
        backend.close()

    @pytest.mark.parametrize("program", PROGRAMS)
    def test_a_key_of_another_type(self, program: str, key: str) -> None:
        servers.shared(program).client.set(key, "something else")
        server = RedisServer(servers.shared(program).url)
        backend = RedisBackend(server, key, capacity=1000, error_rate=1e-9)
        assert "BLOOM_REDIS_KEY to another name" in failure(backend.open)
        assert servers.shared(program).client.get(key) == b"something else"

    @pytest.mark.parametrize("program", PROGRAMS)
    def test_a_database_that_is_not_there(self, program: str) -> None:
        url = f"redis://127.0.0.1:{servers.shared(program).port}/99"
        assert "DB index is out of range" in refusal(url)

    HINT = "; BLOOM_REDIS_CLUSTER = True is for a Cluster, and only for one"

    @pytest.mark.parametrize("program", PROGRAMS)
    def test_a_cluster_that_is_none(self, program: str) -> None:
        assert refusal(servers.shared(program).url, cluster=True).endswith(self.HINT)

    def test_a_cluster_taken_for_a_single_server(self) -> None:
        def ask(client: Any) -> None:
            for name in "abcdefgh":
                client.get(name)

        message = refusal(servers.shared_cluster().url, ask)
        assert "MovedError: " in message
        assert message.endswith(self.HINT)

    def test_a_cluster_has_one_database(self) -> None:
        server = RedisServer(servers.shared_cluster().url + "/1", cluster=True)
        assert "a Cluster has only database 0" in failure(server.now, SettingError)

    HINT_2 = "; BLOOM_REDIS_SENTINEL is for the URL of a Sentinel, and only for one"

    @pytest.mark.parametrize("program", PROGRAMS)
    def test_a_sentinel_that_is_none(self, program: str) -> None:
        assert refusal(servers.shared(program).url, sentinel="mymaster").endswith(self.HINT_2)

    @pytest.mark.parametrize("program", PROGRAMS)
    def test_a_sentinel_taken_for_a_server(self, program: str) -> None:
        assert refusal(service(program).url).endswith(self.HINT_2)

    @pytest.mark.parametrize("program", PROGRAMS)
    def test_a_service_that_the_sentinel_does_not_know(self, program: str) -> None:
        # It is the same while it fails over: this is waited for.
        server = RedisServer(service(program).url, sentinel="other", deadline_secs=0.5)
        message = failure(server.now, OutageError)
        assert "No master found for 'other'" in message

    @pytest.mark.parametrize("kind", ["single", "sentinel", "cluster"])
    def test_unknown_options(self, kind: str) -> None:
        url, options = {
            "single": (servers.shared("valkey").url, {}),
            "sentinel": (service("valkey").url, {"sentinel": "mymaster"}),
            "cluster": (servers.shared_cluster().url, {"cluster": True}),
        }[kind]
        expected = SettingError if kind == "cluster" else StorageError
        params = {"wrong_option": SECRET}
        for server in (
            RedisServer(f"{url}?wrong_option={SECRET}", **options),
            RedisServer(url, params=params, **options),
        ):
            message = failure(server.now, expected)
            assert "wrong_option" in message
            assert "BLOOM_REDIS_URL" in message
            assert "REDIS_PARAMS" in message

    def test_an_option_that_is_not_valid(self) -> None:
        server = RedisServer(f"{servers.shared('valkey').url}?socket_timeout=soon")
        assert "Invalid value for 'socket_timeout'" in failure(server.now, SettingError)

    def test_errors_in_pipelines_do_not_show_the_commands(self, key: str) -> None:
        def do(client: Any) -> None:
            pipeline = client.pipeline(transaction=False)
            pipeline.set(key, "x")
            pipeline.hset(key, "filter", '{"salt": "a secret of another kind"}')
            pipeline.execute()

        message = refusal(servers.shared("valkey").url, do)
        assert "ResponseError: WRONGTYPE" in message
        assert "salt" not in message

    def test_our_own_errors_pass_as_they_are(self) -> None:
        def refuse(client: object) -> None:
            raise SettingError("as it is")

        server = RedisServer(servers.shared("valkey").url)
        assert failure(lambda: server.call(refuse), SettingError) == "as it is"


class TestURLs:
    @pytest.mark.parametrize(
        ("url", "shown"),
        [
            ("redis://", "redis://"),
            ("redis:///5", "redis:///5"),
            ("redis://host", "redis://host"),
            (f"redis://:{SECRET}@host:6379/", "redis://host:6379/"),
            (f"redis://me:{SECRET}@[::1]:6379/0?socket_timeout=1", "redis://[::1]:6379/0"),
            (f"redis://me:{SECRET}@x@host.example", "redis://host.example"),
            (f"rediss://me:{SECRET}@a_1:1,b-2,c:3/7", "rediss://a_1:1,b-2,c:3/7"),
            (f"unix:///run/redis.sock?password={SECRET}", "unix:///run/redis.sock"),
            (f"unix://me:{SECRET}@/run/a@b.sock?db=1", "unix:///run/a@b.sock"),
        ],
    )
    def test_without_secrets(self, url: str, shown: str) -> None:
        assert without_secrets(url) == shown

    @pytest.mark.parametrize(
        "url",
        [
            *("", SECRET, f"redis:{SECRET}", f"{SECRET}@redis://host", f"http://{SECRET}@host"),
            *(f"redis://:{SECRET}", f"redis://host:{SECRET}/0", f"redis://host/{SECRET}"),
            *(f"redis://:a/{SECRET}@host", f"redis://:1/{SECRET}@host:6379/0"),
            *(f"redis://:1?{SECRET}@host", f"redis://:1#{SECRET}@host:6379/0"),
            *(f"redis://u:{SECRET}@a?b@host", f"redis://:[{SECRET}@host", f"redis://:{SECRET}]@h"),
            *(f"redis://:\u2100{SECRET}@host", f"redis://:{SECRET}\n@host", "redis://host/0\n"),
            *(f"unix://{SECRET}/run/sock", "unix://", f"unix://:a/{SECRET}#@/run/sock"),
            *(f"REDIS://:{SECRET}@host", f"redis://:{SECRET}@host:0x1", f"redis://:{SECRET}@ho st"),
        ],
    )
    def test_nothing_is_shown_of_what_is_not_valid(self, url: str) -> None:
        with pytest.raises(ValueError, match=r"^redis://\[\[user\]:password@\]host") as caught:
            without_secrets(url)
        check_tells_nothing(caught.value)
        message = failure(lambda: RedisServer(url), SettingError)
        assert message.startswith("the URL of Redis is not valid: redis://[[user]:password@]host")
        assert "percent-encoded" in message

    def test_ports(self) -> None:
        url = f"redis://:{SECRET}@host:99999/0"
        assert "Port out of range" in failure(lambda: RedisServer(url), SettingError)

    def test_combinations(self) -> None:
        for options in ({"cluster": True}, {"sentinel": "mymaster"}):
            message = failure(lambda o=options: RedisServer("unix:///run/sock", **o), SettingError)
            assert "needs redis:// or rediss://" in message
        for options in ({"cluster": True}, {}):
            message = failure(lambda o=options: RedisServer("redis://a,b", **o), SettingError)
            assert "BLOOM_REDIS_SENTINEL" in message

    def test_no_connection_before_the_first_call(self) -> None:
        code = """
            import sys
            from scrapy_bloom.redis.connection.server import RedisServer
            server = RedisServer("redis://127.0.0.1:1/0")
            server.close()
            assert "redis" not in sys.modules
        """
        subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)

    def test_without_redis_py(self) -> None:
        code = """
            import sys
            sys.modules["redis"] = None
            from scrapy_bloom import SettingError
            from scrapy_bloom.redis.connection.server import RedisServer
            try:
                RedisServer("redis://127.0.0.1:1/0").now()
            except SettingError as error:
                print(error)
        """
        command = [sys.executable, "-c", textwrap.dedent(code)]
        output = subprocess.run(command, check=True, timeout=60, stdout=subprocess.PIPE).stdout
        (line,) = output.decode().splitlines()
        assert (
            "redis-py 6.1 or later, which is not installed: pip install 'scrapy-bloom[redis]'"
            in line
        )


def is_back(
    server: RedisServer, call: Callable[[Any], object] = lambda client: client.ping()
) -> bool:
    try:
        server.call(call)
    except OutageError as error:
        check_tells_nothing(error)
        return False
    return True


def packed(number: int, key: str = "packed") -> Callable[[Any], list[int]]:
    """Set so many bits; the answer is as many values, and two marks as one."""
    command = BitfieldPacker(number).set(key.encode(), 0, range(number), 8000)
    return lambda client: client.execute_command(NAME, key, command)


def locked_up(server: servers.Server) -> str:
    """A URL for a server that from now on wants a password."""
    server.client.config_set("requirepass", PASSWORD)
    return f"redis://default:{quote(PASSWORD, safe='')}@127.0.0.1:{server.port}/0"


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
    monkeypatch.setattr("scrapy_bloom.redis.connection.server.time", Waits())


class TestOutages:
    @pytest.mark.usefixtures("_only_waits_take_time")
    def test_nobody_listens(self) -> None:
        address = f"127.0.0.1:{servers.free_port()}/0"
        server = RedisServer(f"redis://{LOGIN}{address}", deadline_secs=1)
        message = failure(server.now, OutageError)
        assert message.startswith(f"redis://{address} cannot be used: ")
        assert "onnection refused" in message
        assert "waited up to 1 seconds, BLOOM_REDIS_DEADLINE_SECS" in message
        assert USER not in message
        assert quote(USER, safe="") not in message
        assert server.retries + 1 == server.round_trips >= 4

    def test_without_a_deadline_nothing_is_waited_for(self) -> None:
        server = RedisServer(f"redis://127.0.0.1:{servers.free_port()}", deadline_secs=0)
        failure(server.now, OutageError)
        assert server.retries == 0

    @pytest.mark.parametrize("kind", ["sentinel", "cluster"])
    def test_nobody_listens_there_either(self, kind: str) -> None:
        options = {"cluster": True} if kind == "cluster" else {"sentinel": "mymaster"}
        address = f"redis://127.0.0.1:{servers.free_port()}"
        url = address.replace("//", f"//{LOGIN}")
        server = RedisServer(url, deadline_secs=0.5, **options)
        assert failure(server.now, OutageError).startswith(f"{address} cannot be used: ")

    def test_nothing_at_the_socket(self, tmp_path: Path) -> None:
        server = RedisServer(f"unix://{LOGIN}{tmp_path}/sock", deadline_secs=0.5)
        assert f"unix://{tmp_path}/sock cannot be used: " in failure(server.now, OutageError)

    def test_a_crash_and_a_restart(
        self, server: servers.Server, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The breaker: after one long wait, calls fail at once until the server is back."""
        tried = RedisServer(patient(locked_up(server)), deadline_secs=0.5)
        servers.wait_for(lambda: is_back(tried), lambda: "it does not come")
        caplog.clear()
        server.kill()
        failure(lambda: tried.call(packed(3)), OutageError)
        tried._next_attempt = math.inf  # so that it takes no second to ask 100 times
        trips = tried.round_trips
        for _ in range(100):
            with pytest.raises(OutageError, match="is tried again soon"):
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
        (line,) = [each for each in caplog.messages if "is back after" in each]
        assert line.startswith(f"{server.url} is back after ")
        server.kill()
        failure(tried.now, OutageError)  # the next outage is waited for again
        assert tried.round_trips > trips + 3

    def test_a_short_outage_is_waited_out(self, server: servers.Server) -> None:
        tried = RedisServer(server.url, deadline_secs=20)
        tried.call(packed(3))
        server.kill()

        def start_when_missed() -> None:
            servers.wait_for(lambda: tried.retries > 2, lambda: "nobody waits for it")
            server.start()

        soon = threading.Thread(target=start_when_missed)
        soon.start()
        assert tried.call(packed(3)) == [0] * 4  # it had saved nothing
        assert tried.retries > 2
        soon.join()

    def test_a_server_that_hangs(self, server: servers.Server) -> None:
        url = locked_up(server)
        for connected in (False, True):
            tried = RedisServer(url, deadline_secs=0.6)
            if connected:
                servers.wait_for(lambda tried=tried: is_back(tried), lambda: "it does not come")
            server.pause()
            try:
                message = failure(lambda tried=tried: tried.now(), OutageError)
                assert server.url in message
                assert "Timeout" in message
            finally:
                server.go_on()

    def test_a_late_answer_is_not_taken_for_the_next_one(self, server: servers.Server) -> None:
        # A machine that stands still for a while is no second outage.
        tried = RedisServer(f"{server.url}?socket_timeout=4", deadline_secs=0.3)
        tried.call(packed(3))
        server.pause()
        try:
            failure(lambda: tried.call(packed(3)), OutageError)
        finally:
            server.go_on()
        tried._next_attempt = 0.0
        servers.wait_for(lambda: is_back(tried, packed(5)), lambda: "it does not come back")
        assert tried.call(packed(7)) == [1] * 5 + [0] * 3

    def test_an_error_between_commands_does_no_harm(self, server: servers.Server) -> None:
        tried = RedisServer(server.url)
        server.client.hset("hash", "x", 1)
        for number in range(1, 5):
            failure(lambda number=number: tried.call(packed(number, "hash")))
            assert tried.call(packed(number)) == [1] * (number - 1) + [0, 0]
            assert tried.call(lambda client: client.hget("hash", "x")) == b"1"

    def test_a_cluster_that_hangs(self, own_cluster: servers.Cluster) -> None:
        tried = RedisServer(own_cluster.url, cluster=True, deadline_secs=1)
        servers.wait_for(lambda: is_back(tried), lambda: "it does not come")
        for node in own_cluster.nodes:
            node.pause()
        try:
            failure(tried.now, OutageError)
        finally:
            for node in own_cluster.nodes:
                node.go_on()
        servers.wait_for(lambda: healthy(own_cluster), lambda: "the cluster is not whole again")

    def test_a_node_of_a_cluster_that_is_gone(self, own_cluster: servers.Cluster) -> None:
        tried = RedisServer(own_cluster.url, cluster=True, deadline_secs=0.5)
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

    @pytest.mark.parametrize("program", PROGRAMS)
    def test_a_sentinel_that_hangs(self, program: str) -> None:
        tried = RedisServer(service(program).url, sentinel="mymaster", deadline_secs=0.6)
        service(program).sentinel.pause()
        try:
            failure(tried.now, OutageError)
        finally:
            service(program).sentinel.go_on()
        assert RedisServer(service(program).url, sentinel="mymaster").now() > 0

    @pytest.mark.parametrize("program", PROGRAMS)
    def test_a_failover_is_waited_out(self, program: str) -> None:
        own = servers.Service(program)
        master, replica = own.servers
        short = RedisServer(own.url, sentinel="mymaster", deadline_secs=0.3)
        tried = RedisServer(own.url, sentinel="mymaster", deadline_secs=25)
        servers.wait_for(lambda: is_back(short), lambda: "it does not come")
        tried.now()
        admin = master.client
        admin.set("x", 1)
        assert admin.wait(1, 30_000) == 1
        tried.call(packed(3, "y"))
        master.kill()
        failure(short.now, OutageError)
        own.notice_soon()
        tried.call(packed(3))
        assert tried.retries > 0
        assert tried.call(lambda client: client.incr("x")) == 2
        assert replica.client.get("x") == b"2"
        assert replica.client.exists("packed")
        own.end()

    @pytest.mark.usefixtures("_only_waits_take_time")
    @pytest.mark.parametrize("in_pipeline", [False, True])
    def test_refusals_that_pass(self, server: servers.Server, in_pipeline: bool) -> None:
        """A server that is about to fail over, or has no room, may take it a little later."""

        def write(client: Any) -> None:
            if in_pipeline:
                client = client.pipeline(transaction=False)
            client.set("x", "secret value")
            if in_pipeline:
                client.execute()

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


def healthy(cluster: servers.Cluster) -> bool:
    """Whether all nodes know of all nodes as they should be."""
    infos = [node.client.cluster("INFO") for node in cluster.nodes]
    return all(
        info["cluster_state"] == "ok" and info["cluster_slots_ok"] == str(servers.SLOTS)
        for info in infos
    )


class TestLostReplies:
    """A command whose reply was lost is sent again by nobody but us: we count each attempt."""

    def check(self, server: RedisServer, dropping: list[DroppingProxy], calls: int = 2000) -> None:
        names = "abcdefgh"
        counts = dict.fromkeys(names, 0)
        for number in range(calls):
            name = names[number % len(names)]
            before = server.round_trips
            server.call(lambda client, name=name: client.incr(name))
            counts[name] += server.round_trips - before
        dropped = sum(each.dropped for each in dropping)
        assert dropped > calls / 200
        assert server.retries == dropped
        assert sum(counts.values()) == calls + dropped
        for name, count in counts.items():
            assert server.call(lambda client, name=name: client.get(name)) == b"%d" % count

    def test_single_server(self, server: servers.Server) -> None:
        proxy = DroppingProxy(server.port, 0.01, seed=1, only=b"INCR")
        # What would make redis-py repeat by itself has no effect.
        params = {"retry_on_timeout": True, "retry_on_error": [redis.ConnectionError], "retry": 3}
        url = f"redis://127.0.0.1:{proxy.port}/0?retry_on_timeout=yes&retry=3"
        tried = RedisServer(url, params=params)
        try:
            self.check(tried, [proxy])
        finally:
            tried.close()
            proxy.end()

    def test_packed_commands(self, server: servers.Server) -> None:
        proxy = DroppingProxy(server.port, 0.03, seed=2, only=b"BITFIELD")
        tried = RedisServer(f"redis://127.0.0.1:{proxy.port}/0")
        backend = RedisBackend(tried, "k", capacity=1000, error_rate=1e-9, mirror=False)
        try:
            backend.open()
            before = executed(server, "bitfield")
            assert all(backend.add(b"%020d" % number) for number in range(500))
            assert proxy.dropped > 5
            assert tried.retries == proxy.dropped
            assert executed(server, "bitfield") - before == 500 + proxy.dropped
            backend.close()
        finally:
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

    @pytest.mark.parametrize("program", PROGRAMS)
    def test_sentinel(self, program: str) -> None:
        own = servers.Service(program)
        proxy = DroppingProxy(own.servers[0].port, 0.01, seed=4, only=b"INCR")
        tried = RedisServer(own.url, sentinel="mymaster", params={"retry": 3})
        try:
            own.watch(proxy.port)
            self.check(tried, [proxy])
        finally:
            tried.close()
            own.end()
            proxy.end()

    def test_cluster(self, own_cluster: servers.Cluster) -> None:
        # Each node says that it is to be reached at its proxy.
        dropping = [
            DroppingProxy(node.port, 0.01, seed=number, only=b"INCR")
            for number, node in enumerate(own_cluster.nodes)
        ]
        ports = {each.port for each in dropping}
        try:
            self.announce(own_cluster, [each.port for each in dropping])
            servers.wait_for(lambda: told(own_cluster) == [ports] * 3, lambda: str(ports))
            url = f"redis://127.0.0.1:{dropping[0].port}"
            tried = RedisServer(url, cluster=True, params={"retry_on_timeout": True, "retry": 3})
            self.check(tried, dropping)
            assert all(each.dropped for each in dropping)
            tried.close()
        finally:
            self.announce(own_cluster, [0] * 3)
            for each in dropping:
                each.end()

    def announce(self, cluster: servers.Cluster, ports: list[int]) -> None:
        for node, port in zip(cluster.nodes, ports, strict=True):
            node.client.config_set("cluster-announce-port", port)
        if not any(ports):
            real = {node.port for node in cluster.nodes}
            servers.wait_for(lambda: told(cluster) == [real] * 3, lambda: "ports are not back")


def told(cluster: servers.Cluster) -> list[set[int]]:
    """The ports that each node tells its clients of."""
    answers = [node.client.execute_command("CLUSTER SLOTS") for node in cluster.nodes]
    return [{place[1] for place in answer} for answer in map(places, answers)]


def places(slots: Any) -> list[tuple[str, int]]:
    found = slots.values() if isinstance(slots, Mapping) else slots
    return [each["primary"] if isinstance(each, Mapping) else each[2][:2] for each in found]


def executed(server: servers.Server, command: str) -> int:
    stats = server.client.info("commandstats")
    return int(stats.get(f"cmdstat_{command}", {"calls": 0})["calls"])


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

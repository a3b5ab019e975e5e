"""Connections to servers that want a password, and how they fail."""

import functools
import traceback
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest

from scrapy_bloom import BloomError, OutageError, StorageError
from scrapy_bloom.redis.server import RedisServer
from tests.support import servers
from tests.support.backends import begun, redis_backend

PROGRAMS = list(servers.PROGRAMS)
SECRET = "hushhush"  # in every password of these tests, and nowhere else
USER, PASSWORD = "us/er@1", f"p@ss:/?#[%41]&= é{SECRET}"
LOGIN_HINT = (
    "; check user and password in BLOOM_REDIS_URL (or REDIS_URL, REDIS_PARAMS; for a command, "
    "its URL or REDISCLI_AUTH)"
)
LOGIN = f"{quote(USER, safe='')}:{quote(PASSWORD, safe='')}@"


def check_tells_nothing(error: BaseException) -> None:
    """Check that neither an error nor its causes show a password."""
    pending, seen = [error], set()
    while pending:
        each = pending.pop()
        seen.add(id(each))
        assert SECRET not in f"{each} {each!r} {each.args} {each.__dict__}"
        pending += [e for e in (each.__cause__, each.__context__) if e and id(e) not in seen]
    assert SECRET not in "".join(traceback.format_exception(error))


def use(server: RedisServer, key: str, *, expected: int = 1000) -> None:
    """Use a filter as a crawl does, with scripts and pipelines."""
    backend = begun(redis_backend(server, key, capacity=expected, error_rate=1e-9))
    fingerprints = [b"%020d" % number for number in range(100)]
    assert [backend.add(fingerprint) for fingerprint in fingerprints * 2] == [True] * 100 + [
        False
    ] * 100
    backend.close()
    again = redis_backend(server, key, capacity=expected, error_rate=1e-9, mirror=False)
    again.open()
    assert [fingerprint in again for fingerprint in fingerprints] == [True] * 100
    assert again.status().count == 100
    again.clear()
    again.close()
    assert server.retries == 0
    assert SECRET not in f"{server} {server!r} {server.address}"


def failure(call: Callable[[], object], kind: type[BloomError] = StorageError) -> str:
    """Return the message of the error that a call raises; no retry delays a refusal."""
    with pytest.raises(kind) as caught:
        call()
    assert isinstance(caught.value, OutageError) == (kind is OutageError)
    check_tells_nothing(caught.value)
    message = str(caught.value)
    assert kind is OutageError or "waited up to" not in message
    assert "\n" not in message
    assert len(message) < 500
    return message


def refusal(url: str, call: Callable[[Any], object] | None = None, **options: Any) -> str:
    server = RedisServer(url, **options)
    message = failure(lambda: server.call(call or (lambda client: client.hgetall("some"))))
    assert server.address in message
    server.close()
    return message


@functools.cache
def locked(program: str) -> servers.Server:
    """Start a server that accepts USER only, and nobody without a password."""
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


def setting_bits(number: int, key: str = "bits") -> Callable[[Any], list[int]]:
    """Set so many bits; the answer is what they were."""
    words = [word for each_number in range(number) for word in ("SET", "u1", each_number, 1)]
    return lambda client: client.execute_command("BITFIELD", key, *words)


def locked_up(server: servers.Server) -> str:
    """Have a server require a password; return its URL."""
    server.client.config_set("requirepass", PASSWORD)
    return f"redis://default:{quote(PASSWORD, safe='')}@127.0.0.1:{server.port}/0"


def healthy(cluster: servers.Cluster) -> bool:
    """Return whether each node reports the whole Cluster as up."""
    infos = [node.client.cluster("INFO") for node in cluster.nodes]
    return all(
        info["cluster_state"] == "ok" and info["cluster_slots_ok"] == str(servers.SLOTS)
        for info in infos
    )

"""`scrapy bloom info` and `reset` of what is damaged or left over in Redis."""

from pathlib import Path

import pytest

from scrapy_bloom.redis.scripts import keys_of
from tests.support import servers
from tests.support.cli import bloom
from tests.support.request_queues import NAMES
from tests.support.workspace import fingerprints, make_queue, shared_filter, urls


@pytest.fixture
def key(tmp_path: Path) -> str:
    return f"{tmp_path.name}:bloom"


DAMAGES = [
    ("filter", b"done", b"many"),
    ("filter", b"done", b"9" * 5000),
    ("filter", b"ended", b"nan"),
    ("filter", b"ended", b"1e308"),
    ("workers", b"0123456789abcdef", b"soon"),
    ("workers", b"\xff" * 16, b"1"),
    ("workers", b"x", b"1"),
]


@pytest.mark.parametrize(
    "damage", DAMAGES, ids=[f"{name}-{n}" for n, (name, *_) in enumerate(DAMAGES)]
)
def test_a_damaged_queue_is_told_of_and_can_be_deleted(
    damage: tuple[str, bytes, bytes], key: str, server: servers.Server, tmp_path: Path
) -> None:
    name, field, value = damage
    shared_filter(server, key, fingerprints(urls(range(10))))
    make_queue(server.url, key)
    place = (server.url, "--key", key)
    server.client.hset(keys_of(key)[NAMES.index(name)], field, value)
    before = {each: server.client.dump(each) for each in keys_of(key)}
    for command in (
        ("info", *place),
        ("pull", *place[:1], "copy", *place[1:]),
        ("reset", *place, "--yes"),
        ("reset", *place, "--queue", "--yes"),
        ("queue", *place, "--requeue", "--yes"),
    ):
        error = bloom(*command, cwd=tmp_path).error
        assert "damaged" in error, command
        assert "reset --queue --force" in error
        assert len(error) < 600
        assert {each: server.client.dump(each) for each in keys_of(key)} == before
    ran = bloom("reset", *place, "--queue", "--force", "--yes", cwd=tmp_path)
    assert ran.status == 0, ran
    assert not server.client.exists(*keys_of(key)[1:])
    assert bloom("info", *place, "--json", cwd=tmp_path).json["recorded"] == 10


def test_nothing_stays_of_a_filter_that_was_reset(
    key: str, server: servers.Server, tmp_path: Path
) -> None:
    shared_filter(server, key, fingerprints(urls(range(10))))
    make_queue(server.url, key)
    server.client.hset(key, "unlink:0123456789abcdef", "1")
    server.client.set(f"{{{key}}}:blocks:0123456789abcdef:0", "of a generation that has expired")
    assert bloom("reset", server.url, "--key", key, "--yes", cwd=tmp_path).status == 0
    assert not server.client.keys(f"*{key}*")
    assert "has no filter" in bloom("reset", server.url, "--key", key, "--yes", cwd=tmp_path).error

"""`scrapy bloom info` and `reset` of what is damaged or left over in Redis."""

import json
from pathlib import Path

import pytest

import servers
from cli import bloom
from scrapy_bloom.generations.policy import Size
from scrapy_bloom.queues.members import keys_of_queue
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.keys.meta import RedisGeneration
from scrapy_bloom.redis.keys.store import RedisStore
from workspace import fingerprints, make_queue, shared_filter, urls


@pytest.fixture
def key(tmp_path: Path) -> str:
    return f"{tmp_path.name}:bloom"


DAMAGES = [
    ("state", b"done", b"many"),
    ("state", b"done", b"9" * 5000),
    ("state", b"ended", b"nan"),
    ("state", b"ended", b"1e308"),
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
    server.client.hset(f"{{{key}}}:queue:{name}", field, value)
    before = {each: server.client.dump(each) for each in keys_of_queue(key)}
    for command in (
        ("info", *place),
        ("pull", *place[:1], "copy", *place[1:]),
        ("reset", *place, "--yes"),
        ("reset", *place, "--queue", "--yes"),
    ):
        error = bloom(*command, cwd=tmp_path).error
        assert "damaged" in error, command
        assert "reset --queue --force" in error
        assert len(error) < 600
        assert {each: server.client.dump(each) for each in keys_of_queue(key)} == before
    ran = bloom("reset", *place, "--queue", "--force", "--yes", cwd=tmp_path)
    assert ran.status == 0, ran
    assert not server.client.exists(*keys_of_queue(key)[:-1])
    assert bloom("info", *place, "--json", cwd=tmp_path).json["recorded"] == 10


def test_nothing_stays_for_good_of_a_filter_that_was_reset(
    key: str, server: servers.Server, tmp_path: Path
) -> None:
    shared_filter(server, key, fingerprints(urls(range(10))))
    make_queue(server.url, key)
    assert bloom("reset", server.url, "--key", key, "--yes", cwd=tmp_path).status == 0
    assert not servers.keys_for_good(server.client, f"*{key}*")
    assert "has no filter" in bloom("reset", server.url, "--key", key, "--yes", cwd=tmp_path).error
    shared_filter(server, key, fingerprints(urls(range(10))))
    assert key.encode() in servers.keys_for_good(server.client, f"*{key}*")


@pytest.mark.parametrize("kind", ["generation", "draft"])
def test_a_generation_of_absurdly_many_keys_takes_no_memory(
    kind: str, key: str, server: servers.Server, tmp_path: Path
) -> None:
    """Its figures fit each other, and its keys are not there: their names would take 500 MB."""
    shared_filter(server, key, fingerprints(urls(range(10))))
    if kind == "draft":
        server.client.hset(key, "draft:0123abcd", json.dumps([3_000_000, 0]))
    else:
        (name,) = [each for each in server.client.hkeys(key) if each.endswith(b":1")]
        (info,) = RedisStore(RedisServer(server.url), key).read().generations
        large = RedisGeneration.of(
            Size(capacity=10**12, error_rate=1e-6), 1, 0.0, id=info.id, epoch=info.epoch
        )
        assert 3_000_000 < large.num_chunks < 4_000_000
        server.client.hset(key, name, large.text)
    limit = ("prlimit", "--as=500000000")
    ran = bloom("reset", server.url, "--key", key, "--yes", cwd=tmp_path, under=limit)
    assert ran.status == 0, ran
    assert server.client.hkeys(key) == [b"reset"]

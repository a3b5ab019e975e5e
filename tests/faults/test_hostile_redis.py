"""A filter in Redis whose hash has a damaged or hostile value: it is harmless, or refused."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scrapy_bloom import BloomError
from scrapy_bloom.redis.backend import RedisBackend
from scrapy_bloom.redis.server import RedisServer
from scrapy_bloom.redis.stored import RedisReader
from tests.support import servers
from tests.support.backends import begun, redis_backend
from tests.support.cli import bloom
from tests.support.crawls import Crawl
from tests.support.sites import Site
from tests.support.workspace import FINGERPRINTER, fingerprints, make_filter, urls, write_urls

KEY = "shop:bloom"
Fields = dict[bytes, bytes]

VALUES = [
    *("null", "true", '"text"', '""', "[1, 0]", '{"a": 1}', "[" * 100_000 + "]" * 100_000),
    *("0", "-1", "0.5", "NaN", "Infinity", "1e999", "1e-300", "65535", str(2**31), str(2**63)),
    *(str(10**30), "9" * 5000, '"\\ud800"', '"a\\nb\\u001b[31m"', '"zz345678"', '"١٢٣٤٥٦٧٨"'),
    json.dumps("x" * 1_000_000),
]
TEXTS = [b"", b"{", b"\xff\xfe\x00", b"{} {}", *(value.encode() for value in VALUES)]
COUNTS = [b"", b"many", b"-1", b"0.5", b"nan", b"\xff", b"1_0", b" 7", b"9" * 5000, b"1" * 30]
NAMES = [
    *(b"", b":", b"a:b:c:d", b"\xff", b"other", b"abcd0123:", b"abcd0123:-1", b"abcd0123:1.5"),
    *(b"abcd0123:" + b"9" * 5000, b"*:1", b"\r\n:1", b"unlink:a:b", b"persist:../../x"),
]
UNFINISHED = [b"persist:0123456789abcdef", b"unlink:0123456789abcdef"]  # keys made or removed
KEYS = [b"-1", b"1.5", b"x", b"1" * 30, b"[1, 2, 3]", b'["1", 0]', b"[-1, 0]", b"[1, -1e999]"]
# Figures of a generation, each of which is possible, but not with the others.
MISFITS: list[dict[str, Any]] = [
    *({"num_blocks": 10**9}, {"num_blocks": 10**9, "capacity": 10**12}, {"num_blocks": 10**30}),
    *({"num_hashes": 1}, {"num_hashes": 64}, {"capacity": 10**12}, {"capacity": 1}),
    *({"error_rate": 1e-19}, {"error_rate": 0.999}, {"id": "0123456"}, {"id": "../../ab"}),
    *({"first_run": 1e15}, {"last_run": 1e15}),
]


@pytest.fixture(scope="module")
def server() -> Iterator[servers.Server]:
    with servers.Server() as server:
        yield server


@pytest.fixture
def fields(server: servers.Server) -> Fields:
    server.client.flushdb()
    backend = opened(server.url)
    for number in range(150):
        backend.add(b"page %d" % number)
    backend.close()
    return server.client.hgetall(KEY)


def opened(url: str) -> RedisBackend:
    figures = {"capacity": 100, "error_rate": 1e-6, "window_secs": 1e6}
    return begun(redis_backend(RedisServer(url), KEY, fingerprinter=FINGERPRINTER, **figures))


def changed(good: bytes, **members: Any) -> bytes:
    return json.dumps({**json.loads(good), **members}).encode()


def replacements(good: bytes) -> Iterator[bytes]:
    """Yield what may be in place of an object, and of each of its members."""
    yield from TEXTS
    members = json.loads(good)
    for member in members:
        yield json.dumps({name: members[name] for name in members if name != member}).encode()
        for value in VALUES:
            yield json.dumps({**members, member: "HERE"}).replace('"HERE"', value).encode()


def mutations(fields: Fields) -> Iterator[tuple[bytes, bytes]]:
    first, *_, newest = sorted(name for name in fields if name.startswith(b"gen:"))
    for name in (b"filter", newest):
        yield from ((name, text) for text in replacements(fields[name]))
    yield from ((newest, changed(fields[newest], **misfit)) for misfit in MISFITS)
    yield newest, fields[first]  # two with the same keys
    yield from ((newest.replace(b"gen", b"count"), count) for count in COUNTS)
    yield from ((name, b"{}") for name in NAMES)
    yield from ((name, each_text) for name in UNFINISHED for each_text in [*TEXTS, *KEYS])


def crawl(url: str) -> None:
    with contextlib.closing(opened(url)) as backend:
        for number in range(20):
            backend.add(b"another page %d" % number)
            backend.add(b"another page %d" % number)
        str(backend.status().error_rate_now)


def look(url: str) -> None:
    with contextlib.closing(RedisServer(url)) as server:
        RedisReader(server, KEY).are_seen([b"page", b"another"])


@pytest.mark.parametrize("use", [crawl, look])
def test_no_value_hangs_or_breaks_a_crawl_or_a_reader(
    use: Callable[[str], None], server: servers.Server, fields: Fields
) -> None:
    """A value is harmless, or one line refuses it and nothing is changed."""
    client, refused = server.client, 0
    blocks = {key: client.get(key) for key in client.keys(f"{{{KEY}}}:blocks:*")}
    for name, text in mutations(fields):
        stored = {**fields, name: text}
        client.flushdb()
        client.hset(KEY, mapping=stored)
        client.mset(blocks)
        try:
            use(server.url)
        except BloomError as error:
            refused += 1
            assert "\n" not in str(error), (name, text[:60])
            assert len(str(error)) < 500, (name, text[:60])
            assert client.hgetall(KEY) == stored, (name, text[:60])
    assert refused > 200


# What was worst: no end, all memory, a traceback; and a filter that reports all as duplicates.
WORST: dict[str, Callable[[bytes], bytes]] = {
    "deep": lambda _: b"[" * 50_000,
    "shape": lambda good: changed(good, num_blocks=10**30),
    "rate": lambda good: changed(good, error_rate=float("nan")),
}


def damage(kind: str, server: servers.Server, fields: Fields) -> Fields:
    """Give the filter that a crawl has left a field that cannot be; return all its fields."""
    newest = max(name for name in fields if name.startswith(b"gen:"))
    server.client.hset(KEY, newest, WORST[kind](fields[newest]))
    return server.client.hgetall(KEY)


@pytest.mark.parametrize("kind", ["deep", "shape"])
def test_a_crawl_is_refused_in_one_line(
    kind: str, server: servers.Server, fields: Fields, tree: Site, tmp_path: Path
) -> None:
    damaged = damage(kind, server, fields)
    settings = {"BLOOM_REDIS_URL": server.url, "BLOOM_REDIS_KEY": KEY}
    assert "or is damaged (its field " in Crawl(tree.url, tmp_path, settings).refusal()
    assert not tree.hits
    assert server.client.hgetall(KEY) == damaged


def test_each_subcommand_is_refused_in_one_line(
    server: servers.Server, fields: Fields, tmp_path: Path
) -> None:
    damaged = damage("rate", server, fields)
    write_urls(tmp_path / "urls.txt", urls(range(10)))
    make_filter(tmp_path / "filter", fingerprints(urls(range(10))))
    place = f"{server.url}#{KEY}"
    for command in (
        ("info", place, "--scan", "--json"),
        ("check", place, "urls.txt"),
        ("import", "urls.txt", place),
        ("copy", place, "copy"),
        ("copy", "filter", place),
        ("reset", place, "--yes"),
    ):
        ran = bloom(*command, cwd=tmp_path)
        assert "or is damaged (its field " in ran.error, command
        assert server.client.hgetall(KEY) == damaged, command
    assert not list(tmp_path.glob("copy*"))

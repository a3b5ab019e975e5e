"""Copying a filter between a directory and Redis."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from scrapy_bloom import OutageError, StorageError
from scrapy_bloom.commands.shared.places import RedisPlace
from scrapy_bloom.copying import FileSource, copy_to_job
from scrapy_bloom.job.filter import LocalBackend
from scrapy_bloom.redis.server import RedisServer
from scrapy_bloom.redis.stored import read_existing
from tests.support import backends, servers
from tests.support.clock import Clock
from tests.support.copies import copy
from tests.support.redis_filters import PLACES, fps, opened, url_of


def server_of(place: str) -> RedisServer:
    return RedisServer(url_of(place))


def place_of(place: str, key: str) -> RedisPlace:
    return RedisPlace(server_of(place), key)


def begun(path: Path, clock: Clock | None = None, **options: Any) -> LocalBackend:
    options = {"capacity": 100, "error_rate": 1e-9, "clock": clock or Clock(), **options}
    return backends.begun(backends.local_backend(path, **options))


def blocks(path: Path) -> list[bytes]:
    """The blocks of each generation."""
    with closing(FileSource(path)) as source:
        return [b"".join(source.blocks(index)) for index in range(len(source.generations))]


@pytest.mark.parametrize("place", PLACES)
def test_up_and_down_again_byte_for_byte(place: str, tmp_path: Path, key: str) -> None:
    options = {"fingerprinter": "some.Fingerprinter"}
    backend = begun(tmp_path / "one", capacity=500, spider="shop", **options)
    for fingerprint in fps(0, 2250):
        assert backend.add(fingerprint)
    backend.close()
    before = blocks(tmp_path / "one")
    assert len(before) == 3

    assert copy(tmp_path / "one", place_of(place, key)) == 0
    assert blocks(tmp_path / "one") == before

    backend = opened(place, key, **options)
    status = backend.status()
    assert (len(status.generations), status.count) == (3, 2250)
    assert status.nbytes == sum(map(len, before))
    assert not any(backend.add(fingerprint) for fingerprint in fps(0, 2250))
    for fingerprint in fps(2250, 5000):  # and it grows on
        assert backend.add(fingerprint)
    assert len(backend.status().generations) == 4
    count = backend.status().count
    assert count == 5000
    backend.close()

    assert copy(place_of(place, key), tmp_path / "two") == 0
    after = blocks(tmp_path / "two")
    assert after[1] == before[1]
    assert after[0] == before[0]
    backend = begun(tmp_path / "two", **options)
    status = backend.status()
    assert (len(status.generations), status.count) == (4, count)
    assert status.nbytes == sum(map(len, after))
    assert not any(backend.add(fingerprint) for fingerprint in fps(0, 5000))
    assert backend.add(b"new")
    backend.close()


def test_windows_go_along(tmp_path: Path, key: str) -> None:
    clock = Clock()
    for page in (b"first", b"second"):
        backend = begun(tmp_path / "one", clock, window_secs=1000)
        assert backend.add(page)
        backend.close()
        clock.now += 500
    copy(tmp_path / "one", place_of("valkey", key))
    uploaded = opened("valkey", key, window_secs=1000, clock=clock)
    assert b"first" not in uploaded
    assert b"second" in uploaded
    assert uploaded.add(b"third")
    uploaded.close()
    copy(place_of("valkey", key), tmp_path / "two")
    clock.now += 500
    backend = begun(tmp_path / "two", clock, window_secs=1000)
    assert b"second" not in backend
    assert b"third" in backend
    backend.close()


def test_a_crawl_that_begins_while_its_job_is_copied(tmp_path: Path) -> None:
    begun(tmp_path / "one").close()
    with closing(FileSource(tmp_path / "one")) as source:
        crawl = begun(tmp_path / "one")
        with pytest.raises(StorageError, match="a crawl has used .*one meanwhile"):
            copy_to_job(source, tmp_path / "two")
    crawl.close()
    assert not (tmp_path / "two").exists()


def test_keys_that_cannot_be_copied(tmp_path: Path, key: str) -> None:
    there = place_of("valkey", key)
    with pytest.raises(StorageError, match="has no filter .*scrapy bloom info"):
        copy(there, tmp_path / "one")
    backend = opened("valkey", key, capacity=1_000_000)
    assert backend.add_many(fps(0, 2000)) == 2000  # in all of 46 keys
    backend.close()
    (generation,) = read_existing(server_of("valkey"), key).generations
    assert servers.shared("valkey").client.delete(f"{{{key}}}:blocks:{generation.id}:1")
    with pytest.raises(StorageError, match="has lost keys of generation 1"):
        copy(there, tmp_path / "one")
    assert not list(tmp_path.iterdir())


def test_a_full_server_keeps_nothing_of_it(server: servers.Server, tmp_path: Path) -> None:
    backend = begun(tmp_path / "one", capacity=2_000_000, error_rate=1e-6)
    for fingerprint in fps(0, 200):
        backend.add(fingerprint)
    backend.close()
    used = server.client.info("memory")["used_memory"]
    server.client.config_set("maxmemory", used + 3_000_000)
    with pytest.raises(OutageError, match="has room"):
        copy(tmp_path / "one", RedisPlace(RedisServer(server.url, deadline_secs=0.2), "k"))
    assert not server.client.keys("*")

"""What is to be crawled again, in its stores: many crawlers, kills, lost replies."""

import sqlite3
from pathlib import Path

from scrapy_bloom.files.forgotten import NAME, ForgottenFile
from scrapy_bloom.redis.scripts import keys_of
from tests.support import servers
from tests.support.local_filters import make
from tests.support.proxies import DroppingProxy
from tests.support.redis_filters import fps, opened


def is_any_forgotten(key: str) -> bool:
    return bool(servers.shared("valkey").client.exists(keys_of(key)[-1]))


def test_a_lost_reply_makes_it_new_twice_and_never_to_none(key: str) -> None:
    server = servers.Server()
    proxy = DroppingProxy(server.port, 0.05, seed=3)
    try:
        url = f"redis://127.0.0.1:{proxy.port}/0"
        one, two = (opened("valkey", key, url=url) for _ in range(2))
        names = fps(100)
        for name in names:
            one.add(name)
        one.forgotten.add(names)
        for name in names:
            assert two.add(name) + one.add(name) >= 1, name
        assert proxy.dropped > 5
        one.close()
        two.close()
        again = opened("valkey", key, url=server.url)
        assert sum(again.add(name) for name in names) == 0
        again.close()
    finally:
        proxy.end()
        server.end()


def test_what_is_set_aside_or_cleared_takes_it_along(key: str) -> None:
    backend = opened("valkey", key)
    backend.add(b"page")
    backend.forgotten.add([b"page"])
    backend._trust_secs = 0
    backend.clear()
    assert backend.add(b"page")
    assert not backend.add(b"page")
    backend.clear()
    backend.close()
    assert not is_any_forgotten(key)


def test_an_addition_during_a_crawl_is_noticed(tmp_path: Path) -> None:
    backend = make(tmp_path)
    backend.begin()
    assert backend.add(b"page")
    assert backend.add(b"other")
    command = ForgottenFile(tmp_path / NAME)
    command.add([b"page"])
    servers.wait_for(lambda: backend.add(b"page"), lambda: "not noticed")
    assert not backend.add(b"page")
    command.add([b"page", b"other"])
    servers.wait_for(lambda: backend.add(b"other"), lambda: "not noticed")
    assert backend.add(b"page")
    command.close()
    backend.close()
    assert [path.name for path in tmp_path.iterdir() if "-" in path.name] == [
        "generation-0001.bloom"
    ]


def test_forgotten_requests_expire_with_the_window(tmp_path: Path) -> None:
    now = 1e9
    backend = make(tmp_path, lambda: now, window_secs=100.0)
    backend.add(b"page")
    backend.forgotten.add([b"page", b"other"])
    with sqlite3.connect(tmp_path / NAME) as db:
        db.execute("UPDATE forgotten SET forgotten_at = 0")
    for _ in range(8):
        now += 26
        backend.add(b"%f" % now)
    assert len(ForgottenFile(tmp_path / NAME, readonly=True)) == 0
    backend.close()


def test_forgotten_requests_of_a_shared_filter_expire_with_its_window(key: str) -> None:
    now = 1e9
    backend = opened("valkey", key, window_secs=100.0, clock=lambda: now)
    backend.add(b"page")
    backend.forgotten.add([b"page", b"other"])
    assert is_any_forgotten(key)
    client = servers.shared("valkey").client
    client.zadd(keys_of(key)[-1], {b"page": 0, b"other": 0})
    for _ in range(10):
        now += 26
        backend.add(b"%f" % now)
    assert not is_any_forgotten(key)
    backend.close()

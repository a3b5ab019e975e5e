"""`scrapy bloom report` of a filter in Redis; and that info and report tell the same figures."""

import re
import time
from collections.abc import Iterator
from html import unescape
from pathlib import Path

from scrapy_bloom.redis.connection.server import RedisServer
from tests.support import servers
from tests.support.backends import redis_backend
from tests.support.cli import bloom
from tests.support.workspace import FINGERPRINTER, SALT, fingerprints, make_filter, urls

DAY = 24 * 3600.0


def text_of(page: Path) -> str:
    shown = re.sub(
        r"<style.*?</style>|<svg.*?</svg>", " ", page.read_text("utf-8"), flags=re.DOTALL
    )
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", shown)).split())


def test_a_filter_in_redis(tmp_path: Path) -> None:
    server, key = servers.shared("valkey"), f"{tmp_path.name}:bloom"
    backend = redis_backend(
        RedisServer(server.url),
        key,
        capacity=2000,
        error_rate=1e-6,
        fingerprinter=FINGERPRINTER,
        spider="shop",
        salt=SALT,
    )
    backend.open()
    backend.begin()
    for each in fingerprints(urls(range(3000))):
        backend.add(each)
    backend.close()
    before = {each: server.client.dump(each) for each in server.client.keys(f"{key}*")}
    ran = bloom("report", server.url, "--key", key, "-o", "page.html", cwd=tmp_path)
    assert ran.status == 0, ran
    assert {each: server.client.dump(each) for each in server.client.keys(f"{key}*")} == before
    text = text_of(tmp_path / "page.html")
    assert "Bloom filter of shop" in text
    assert f"key {key}" in text
    assert "State shared" in text
    assert "With 3,000 of 6,000 requests recorded" in text
    assert "asked for: 1e-6" in text
    assert SALT.hex() not in (tmp_path / "page.html").read_text("utf-8")
    wrong = bloom("report", server.url, "--key", "nothing", "-o", "x.html", cwd=tmp_path)
    assert "has no filter 'nothing'" in wrong.error
    assert bloom("report", server.url, "-o", "x.html", cwd=tmp_path).status == 2  # which filter?


def test_info_headline_and_tile_tell_the_same(tmp_path: Path) -> None:
    """With a window, of which a part ended before it was full."""
    now = time.time() - DAY

    def recorded() -> Iterator[bytes]:
        nonlocal now
        for number, each in enumerate(fingerprints(urls(range(1500)))):
            if number == 700:
                now += DAY
            yield each

    make_filter(
        tmp_path / "filter", recorded(), capacity=4000, window_secs=4 * DAY, clock=lambda: now
    )
    figures = bloom("info", "filter", "--json", cwd=tmp_path).json
    assert bloom("report", "filter", "-o", "page.html", cwd=tmp_path).status == 0
    text = text_of(tmp_path / "page.html")
    of = f"{figures['recorded']:,} of {figures['capacity']:,}"
    assert figures["recorded"] == 1500
    assert f"With {of} requests recorded" in text
    assert f"Recorded {of}: " in text
    assert f"recorded:        {of}\n" in bloom("info", "filter", cwd=tmp_path).out
    assert "Time window 4 days" in text
    assert figures["error_rate_asked"] == 1e-6
    assert "asked for: 1e-6" in text
    assert "At most one in 1 million was asked for." in text

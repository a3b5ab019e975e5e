"""The figures at the close of a crawl are those of the filter, whoever has recorded in it."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import servers
from crawls import Crawl
from sites import ScriptedSite, Site, tree_site

PAGES = 60


@pytest.fixture
def site() -> Iterator[Site]:
    site = tree_site(PAGES)
    yield site
    site.end()


@pytest.fixture
def server() -> Iterator[servers.Server]:
    server = servers.Server()
    yield server
    server.end()


def figures(crawl: Crawl) -> tuple[int, int]:
    """Return what a crawl has recorded, and what it says is in the filter."""
    recorded, in_all = re.findall(
        r"filter closed: (\d+) requests recorded, (\d+) in", crawl.output
    )[0]
    assert f"'bloom/count': {in_all}" in crawl.output
    assert f"'bloom/added': {recorded}" in crawl.output
    return int(recorded), int(in_all)


def test_workers_with_queues_of_their_own(
    site: Site, server: servers.Server, tmp_path: Path
) -> None:
    settings = {
        "BLOOM_BACKEND": "redis",
        "BLOOM_REDIS_URL": server.url,
        "BLOOM_REDIS_KEY": "shared:bloom",
    }
    site.delay = 0.1
    first = Crawl(site.url, tmp_path / "first", settings)
    first.wait_until(lambda: site.total() > 5)
    gate, hit = threading.Event(), site.hit
    site.hit = lambda path: (gate.wait(60), hit(path))  # type: ignore[method-assign]
    other = tree_site(10)
    second = Crawl(other.url, tmp_path / "second", settings)
    assert second.finish() == 0
    gate.set()
    assert first.finish() == 0
    other.end()
    (a, in_all), (b, _) = map(figures, (first, second))
    assert in_all == a + b


def test_the_close_does_not_wait_long_for_a_server(server: servers.Server, tmp_path: Path) -> None:
    leaves = [f"/leaf/{number}" for number in range(5)]
    site = ScriptedSite({"/": [tuple(leaves)]})
    site.delay = 2.0
    crawl = Crawl(site.url, tmp_path, {"BLOOM_BACKEND": "redis", "BLOOM_REDIS_URL": server.url})
    crawl.wait_until(lambda: site.under_way == len(leaves))
    server.kill()
    assert crawl.finish() == 0
    site.end()
    assert figures(crawl) == (len(leaves), len(leaves))
    (error,) = crawl.told("ERROR")
    assert "(waited up to 5 seconds" in error

"""Filter and queue lose the same changes, so lost requests are not reported as duplicates."""

import logging
from pathlib import Path

import pytest

from scrapy_bloom.redis.backend import RedisBackend
from scrapy_bloom.redis.layout import bitmap_key, block_key
from tests.support import server_losses, servers
from tests.support.crawls import SCRAPY_REDIS, SHARED_SPIDER, Crawl
from tests.support.redis_filters import fps, messages, opened
from tests.support.sites import ScriptedSite, Site

PAGES = 60  # of the tree
WARNING = logging.WARNING


# A server that is back empty has lost as much as one that was flushed, and one without its last
# second less than one that is back from a snapshot: `benchmarks/restarts.py` has all ways.
LOSSES = [server_losses.WAYS[number] for number in (1, 2, 4)]


@pytest.mark.parametrize("way", LOSSES, ids=lambda way: way.name.replace(" ", "-"))
def test_every_page_is_crawled(way: server_losses.Way, tmp_path: Path) -> None:
    # Whatever the server has lost, a page that is crawled afterwards links to it. So a page that is
    # missing in the end was recorded but never crawled.
    site = server_losses.linked_site(60, links_to_all=True)
    outcome = server_losses.crawl(
        way, server_losses.OURS, tmp_path / "crawl", site=site, workers=2, seed=way.name
    )
    assert outcome.has_ended
    # scrapy-redis records and queues a request with two commands, and the snapshot may have been
    # taken between them: at most one request of each worker.
    assert len(outcome.missing) <= (2 if "snapshot" in way.name else 0)
    assert all(len(lines) <= 1 for lines in outcome.warnings), outcome.warnings
    warnings = [line for lines in outcome.warnings for line in lines]
    if way.name == "flushed, not killed":
        assert "The crawl starts over with an empty filter" in warnings[0]
    else:
        assert not warnings


def test_links_to_requests_of_a_lost_queue_are_new(tmp_path: Path) -> None:
    """The last page links to one that was in the lost queue; no mirror reports it as known."""
    server = servers.Server()
    site = ScriptedSite({"/": [("/a", "/b", "/c", "/d")]})
    site.answers |= {f"/{name}": [("/a", "/b", "/c", "/d")] for name in "abcd"}
    settings = {
        **SCRAPY_REDIS,
        "REDIS_URL": server.url,
        "CONCURRENT_REQUESTS": 1,
        "IDLE_SECS": 0,
    }
    crawl = Crawl.held(site, 1, tmp_path, settings, spider=SHARED_SPIDER)
    # One of the four is asked for, the other three are in the queue.
    crawl.wait_until(lambda: server.client.zcard("shared:requests") == 3)
    server.client.flushall()
    site.release()
    assert crawl.finish() == 0, crawl.output
    assert "if the queue alone is lost" not in crawl.output
    assert "'bloom/redis/mirror_hits': 0," in crawl.output
    assert set(site.hits) == {"/", "/a", "/b", "/c", "/d"}
    assert len(crawl.our_lines("WARNING")) == 1
    assert not crawl.our_lines("ERROR")
    site.end()
    server.end()


def test_a_queue_on_another_server(tree: Site, tmp_path: Path) -> None:
    """The filter's may lose all: pages are crawled again."""
    queue, own = servers.Server(), servers.Server()
    settings = {
        **SCRAPY_REDIS,
        "BLOOM_REDIS_URL": own.url,
        "REDIS_URL": queue.url,
        "IDLE_SECS": 0,
    }
    crawl = Crawl.held(tree, 20, tmp_path, settings, spider=SHARED_SPIDER)
    own.restart()
    tree.release()
    assert crawl.finish() == 0, crawl.output
    assert len(tree.hits) == PAGES
    queue.end()
    own.end()


def crawlers(url: str, number: int = 2, **options: object) -> list[RedisBackend]:
    """Open a filter several times; the mirrors are not trusted without the server."""
    more = {"url": url, "trust_secs": 0.0, "deadline_secs": 20, **options}
    return [opened("valkey", "k", **more) for _ in range(number)]


def test_nothing_is_written_back(server: servers.Server, caplog: pytest.LogCaptureFixture) -> None:
    """Also not what had grown, nor the key that the first command has made."""
    first, late = crawlers(server.url, capacity=1000)
    for number, fingerprint in enumerate(fps(3000)):
        assert (first, late)[number % 2].add(fingerprint)
    server.restart()
    # What is new, what only the other knew, and what both of them knew.
    assert all(first.add(fingerprint) for fingerprint in [b"new", *fps(2990, 3000), *fps(10)])
    assert len(messages(caplog, WARNING)) == 1
    caplog.clear()
    # The other comes late, and goes on with what the first has begun.
    late._send([])
    assert not late.add(b"new")
    assert not any(late.add(fingerprint) for fingerprint in fps(2990, 3000))
    assert all(late.add(fingerprint) for fingerprint in fps(10, 20))
    assert len(messages(caplog, WARNING)) <= 1
    assert not any(first.add(fingerprint) for fingerprint in fps(20))
    (generation,) = first.live
    names = bitmap_key("k", generation.id), block_key("k", generation.id, 0)
    assert set(server.client.keys()) == {b"k", *(name.encode() for name in names)}
    first.close()
    late.close()

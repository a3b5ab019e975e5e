"""A crawl whose workers share a queue in several shards (BLOOM_REDIS_SHARDS)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from scrapy_bloom.queues.shared_state import read_shard
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.scripts import shard_key
from scrapy_bloom.redis.stored import shard_keys
from tests.support import servers
from tests.support.cli import bloom
from tests.support.crawls import Crawl
from tests.support.shared_crawls import PAGES, SharedCrawl
from tests.support.sites import Site

SHARDS = 4
TWICE = 2  # other addresses of the start page


def keys(crawl: SharedCrawl) -> list[str]:
    return [shard_key(crawl.key, shard) for shard in range(SHARDS)]


def test_two_workers(wide: Site, tmp_path: Path) -> None:
    """Each shard has a part of the filter and of the queue; figures are those of all of them."""
    crawl = SharedCrawl(wide, tmp_path, BLOOM_REDIS_SHARDS=SHARDS, BLOOM_EXPECTED_REQUESTS=10_000)
    crawl.hold(20)
    server = RedisServer(crawl.server.url)
    assert shard_keys(server, crawl.key) == keys(crawl)
    states = [read_shard(server, each) for each in keys(crawl)]
    server.close()
    assert all(each and each.total for each in states)
    crawl.finish()
    assert len(wide.hits) == PAGES
    assert wide.total() == PAGES + TWICE
    assert crawl.starts() == 1
    state = crawl.state()
    assert state.ended_at
    assert state.done == PAGES + TWICE
    assert not crawl.our_lines("", "WARNING")
    assert not crawl.our_lines("", "ERROR")


def test_commands(wide: Site, tmp_path: Path) -> None:
    """Those that look at a queue and its filter, and remove them, do so for all shards."""
    crawl = SharedCrawl(wide, tmp_path, BLOOM_REDIS_SHARDS=SHARDS, BLOOM_EXPECTED_REQUESTS=10_000)
    crawl.finish(crawl.start())
    place = (crawl.server.url, "--key", crawl.key)
    info = bloom("info", *place, "--json", cwd=tmp_path).json
    assert info["recorded"] == PAGES + 1
    assert info["capacity"] == SHARDS * 2700
    assert info["queue"]["done"] == PAGES + TWICE
    assert info["queue"]["ended_at"]
    assert "4 shards" in bloom("info", *place, "--scan", cwd=tmp_path).out
    urls = [f"{wide.url.rstrip('/')}/p/{number}?a=2&b=1" for number in range(1, 9)]
    ran = bloom("forget", *place, *urls, cwd=tmp_path)
    assert "8 requests are crawled again" in ran.out
    assert bloom("info", *place, "--json", cwd=tmp_path).json["forgotten"] == len(urls)
    assert "4 shards" in bloom("copy", *place, "copy", cwd=tmp_path).error
    assert bloom("queue", *place, "--requeue", "--yes", cwd=tmp_path).status == 0
    assert bloom("reset", *place, "--queue", "--yes", cwd=tmp_path).status == 0
    assert bloom("info", *place, "--json", cwd=tmp_path).json["queue"] is None
    crawl.finish(crawl.start())  # goes on with the filter: what is forgotten is crawled
    assert wide.total() == PAGES + TWICE + len(urls) + 1
    assert bloom("reset", *place, "--yes", cwd=tmp_path).status == 0
    assert not servers.keys_for_good(crawl.server.client, f"*{crawl.key}*")


@pytest.mark.parametrize(("made", "asked"), [(1, SHARDS), (SHARDS, 3)])
def test_another_number_of_shards(made: int, asked: int, wide: Site, tmp_path: Path) -> None:
    crawl = SharedCrawl(wide, tmp_path)
    crawl.finish(crawl.start(BLOOM_REDIS_SHARDS=made))
    settings = {**crawl.settings, "BLOOM_REDIS_SHARDS": asked}
    refused = Crawl(wide.url, tmp_path / "refused", settings, spider=crawl.spider)
    message = f"was made with BLOOM_REDIS_SHARDS = {made}, and the setting is {asked}"
    assert message in refused.refusal()


@pytest.mark.parametrize("lost", [0, 2])
def test_a_shard_that_is_lost(lost: int, wide: Site, tmp_path: Path) -> None:
    """All of them start over."""
    crawl = SharedCrawl(wide, tmp_path, BLOOM_REDIS_SHARDS=SHARDS)
    crawl.hold(20)
    client = crawl.server.client
    key = keys(crawl)[lost]
    client.unlink(key, *client.keys(f"{{{key}}}:*"))
    crawl.finish()
    crawl.check_complete(starts=2)
    for worker in crawl.workers:
        errors = worker.our_lines("ERROR")  # two of them if the other worker was faster half-way
        assert errors
        assert all("all 4 shards start over" in error for error in errors), errors
    assert crawl.state().ended_at


def test_a_shard_that_was_lost_while_no_worker_ran(wide: Site, tmp_path: Path) -> None:
    crawl = SharedCrawl(wide, tmp_path, BLOOM_REDIS_SHARDS=SHARDS)
    (worker,) = crawl.hold(20, 1)
    crawl.interrupt(worker)
    client, key = crawl.server.client, keys(crawl)[3]
    client.unlink(key, *client.keys(f"{{{key}}}:*"))
    wide.release()
    crawl.finish(crawl.start())
    crawl.check_complete(starts=2)
    assert crawl.our_lines("all 4 shards start over", "ERROR")


@pytest.fixture
def cluster() -> Iterator[servers.Cluster]:
    cluster = servers.Cluster()
    yield cluster
    cluster.end()


def test_a_master_of_a_cluster_that_is_rolled_back(
    cluster: servers.Cluster, tree: Site, tmp_path: Path
) -> None:
    """Whatever it has lost of the last minute, the workers send to it again."""
    names = (f"crawl-{number}" for number in range(1000))
    key = next(each for each in names if len(masters(cluster, each)) == len(cluster.nodes))
    settings = {"BLOOM_REDIS_URL": cluster.url, "BLOOM_REDIS_CLUSTER": True, "BLOOM_REDIS_KEY": key}
    crawl = SharedCrawl(tree, tmp_path, BLOOM_REDIS_SHARDS=SHARDS, **settings)
    tree.hold_after(20)
    crawl.start(2)
    servers.wait_for(tree.is_holding, lambda: "it does not wait")
    (master, *_) = masters(cluster, key)
    master.client.save()
    tree.hold_after(70)
    servers.wait_for(tree.is_holding, lambda: "it does not wait")
    master.kill()
    master.start()
    crawl.finish()
    assert len(tree.hits) == PAGES
    assert crawl.starts() == 1
    assert not crawl.our_lines("", "ERROR")
    assert len(crawl.our_lines("This worker has rejoined the queue")) == len(crawl.workers)


def masters(cluster: servers.Cluster, key: str) -> set[servers.Server]:
    return {cluster.master_of(shard_key(key, shard)) for shard in range(SHARDS)}

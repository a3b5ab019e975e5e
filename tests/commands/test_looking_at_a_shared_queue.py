"""`scrapy bloom info` and `reset` of a queue that workers share."""

from pathlib import Path

import pytest

from scrapy_bloom.redis.scripts import keys_of
from tests.support import servers
from tests.support.cli import bloom
from tests.support.crawls import Crawl
from tests.support.sites import Site
from tests.support.workspace import fingerprints, in_redis, shared_filter, urls


@pytest.fixture
def key(tmp_path: Path) -> str:
    return f"{tmp_path.name}:bloom"


def settings(key: str) -> dict[str, object]:
    more = in_redis(key)
    return {"SCHEDULER": "scrapy_bloom.CrashSafeScheduler", **more}


def test_who_has_taken_how_much(
    key: str, server: servers.Server, tree: Site, tmp_path: Path
) -> None:
    leases = {**settings(key), "BLOOM_QUEUE_LEASE_SECS": 1}
    Crawl.held(tree, 20, tmp_path, leases).kill()
    place = (server.url, "--key", key)

    def dead() -> bool:
        (worker,) = bloom("info", *place, "--json", cwd=tmp_path).json["queue"]["workers"]
        return not worker["is_alive"]

    servers.wait_for(dead, lambda: "the lease of a killed worker does not end")
    queue = bloom("info", *place, "--json", cwd=tmp_path).json["queue"]
    (worker,) = queue["workers"]
    assert worker["in_flight"] == queue["in_flight"] > 0
    assert queue["done"] > 0
    assert queue["done_per_second"] is None  # nobody does anything
    text = bloom("info", *place, cwd=tmp_path).out
    assert f"{queue['in_flight']:,} in flight; {queue['pending']:,} pending" in text
    assert "expired" in text

    crawl = Crawl.held(tree, 40, tmp_path, settings(key))
    queue = bloom("info", *place, "--json", cwd=tmp_path).json["queue"]
    assert [each["is_alive"] for each in queue["workers"]] == [True]
    assert queue["workers"][0]["name"].endswith(f":{crawl.pid}")
    assert queue["done_per_second"] >= 0
    assert "pages/s" in bloom("info", *place, cwd=tmp_path).out
    tree.release()
    assert crawl.finish() == 0
    queue = bloom("info", *place, "--json", cwd=tmp_path).json["queue"]
    assert (queue["pending"], queue["in_flight"], queue["workers"]) == (0, 0, [])
    assert queue["ended_at"] > 0
    assert "the crawl has ended at " in bloom("info", *place, cwd=tmp_path).out


def test_a_filter_without_a_queue(key: str, server: servers.Server, tmp_path: Path) -> None:
    place = (server.url, "--key", key)
    assert "has no filter" in bloom("info", *place, cwd=tmp_path).error
    shared_filter(server, key, fingerprints(urls(range(10))))
    assert bloom("info", *place, "--json", cwd=tmp_path).json["queue"] is None
    assert "has no queue" in bloom("reset", *place, "--queue", "--yes", cwd=tmp_path).error
    assert bloom("info", *place, "--json", cwd=tmp_path).json["recorded"] == 10


def test_in_a_cluster(key: str, tree: Site, tmp_path: Path) -> None:
    cluster = servers.shared_cluster()
    more = {"BLOOM_REDIS_URL": cluster.url, "BLOOM_REDIS_CLUSTER": True}
    Crawl.held(tree, 20, tmp_path, {**settings(key), **more}).interrupt()
    place = (cluster.url, "--key", key, "-s", "BLOOM_REDIS_CLUSTER=True")
    figures = bloom("info", *place, "--json", cwd=tmp_path).json
    assert figures["recorded"] > figures["queue"]["pending"] > 0
    assert bloom("reset", *place, "--yes", cwd=tmp_path).status == 0
    assert not cluster.client.exists(*keys_of(key))

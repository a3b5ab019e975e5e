"""A crawl whose workers share a queue in Redis: servers that go away or lose it, and refusals."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import servers
from crawls import Crawl
from request_queues import fill
from scrapy_bloom.job.paths import DATABASE
from shared_crawls import PAGES, SharedCrawl, wide_site
from sites import Site
from workspace import in_redis

NOWHERE = "http://127.0.0.1:9/"
SHARED = {"SCHEDULER": "scrapy_bloom.CrashSafeScheduler", "BLOOM_QUEUE": "redis"}


@pytest.fixture
def tree() -> Iterator[Site]:
    site = wide_site()
    yield site
    site.end()


def test_a_server_that_is_gone_for_good(
    tree: Site, durable: servers.Server, tmp_path: Path
) -> None:
    crawl = SharedCrawl(tree, tmp_path, server=durable, BLOOM_REDIS_DEADLINE_SECS=1)
    workers = crawl.hold(20)
    durable.kill()
    crawl.finish(reason="bloom_outage")
    for worker in workers:
        (error,) = worker.told("ERROR")
        assert "cannot be used" in error
    durable.start()
    crawl.end_leases(*workers)
    crawl.finish(crawl.start(), crawl.start())
    assert len(tree.hits) == PAGES
    assert crawl.state().ended_at
    assert crawl.starts() == 1


def test_a_server_that_is_restarted(tree: Site, durable: servers.Server, tmp_path: Path) -> None:
    crawl = SharedCrawl(tree, tmp_path, server=durable)
    crawl.hold(20)
    durable.kill()
    tree.hold_after(40)
    durable.start()
    crawl.finish()
    assert len(tree.hits) == PAGES
    assert not crawl.told("", "ERROR")
    assert crawl.starts() == 1


def test_a_server_that_comes_back_empty(tree: Site, server: servers.Server, tmp_path: Path) -> None:
    """With the filter gone as well, the crawl starts anew."""
    crawl = SharedCrawl(tree, tmp_path, server=server)
    crawl.hold(20)
    server.kill()
    server.start()
    crawl.finish()
    assert len(tree.hits) == PAGES
    assert crawl.starts() == 2
    assert crawl.state().ended_at
    assert not crawl.told("", "ERROR")


def test_a_server_that_has_lost_the_queue_alone(
    tree: Site, server: servers.Server, tmp_path: Path
) -> None:
    crawl = SharedCrawl(tree, tmp_path, server=server)
    workers = crawl.hold(20)
    servers.wait_for(
        lambda: server.client.hexists(crawl.key, "queue"), lambda: "the filter is not marked"
    )
    server.client.delete(*crawl.keys[:4])
    crawl.finish(reason="bloom_queue_failed")
    for worker in workers:
        (error,) = worker.told("ERROR")
        assert "has lost the queue of " in error
        assert "`scrapy bloom reset " in error
    refused = Crawl(tree.url, tmp_path / "refused", crawl.settings, spider=crawl.spider)
    assert refused.finish() == 1
    (error,) = refused.told("ERROR")
    assert "has lost the queue of " in error
    assert error == refused.output.splitlines()[-1]
    assert server.client.keys(f"{{{crawl.key}}}:queue:*") == []


@pytest.mark.parametrize("fields", [["started"], ["started", "starting"]])
def test_a_server_that_has_lost_the_word_that_start_is_through(
    fields: list[str], tree: Site, tmp_path: Path
) -> None:
    """As one that is set back to an older state, or a replica that takes its master's place."""
    crawl = SharedCrawl(tree, tmp_path)
    crawl.hold(20, 1)
    state, client = crawl.keys[3], crawl.server.client
    (worker,) = crawl.state().workers
    client.hdel(state, "started")
    if "starting" not in fields:
        client.hset(state, "starting", worker.id)
    crawl.finish()
    assert len(tree.hits) == PAGES
    assert crawl.state().ended_at
    assert crawl.starts() == 2


def test_the_last_worker_flushes(tree: Site, tmp_path: Path) -> None:
    crawl = SharedCrawl(tree, tmp_path, BLOOM_REDIS_FLUSH=True)
    crawl.hold(20)
    for pages in (PAGES, 2 * PAGES):
        crawl.finish()
        assert not servers.keys_for_good(crawl.server.client, f"*{crawl.key}*")
        assert sum(count > 0 for count in tree.hits.values()) == PAGES
        if pages == PAGES:
            crawl.workers.clear()
            crawl.start()
    assert crawl.starts() == 2


def test_a_pause_flushes_nothing(tree: Site, tmp_path: Path) -> None:
    crawl = SharedCrawl(tree, tmp_path, BLOOM_REDIS_FLUSH=True)
    (worker,) = crawl.hold(20, 1)
    tree.hold_after(0)
    worker._held_by = tree
    assert worker.interrupt() == 0
    assert crawl.state().pending
    crawl.finish(crawl.start())
    assert len(tree.hits) == PAGES


# Refused at the start.


def refusal(crawl: Crawl) -> str:
    assert crawl.finish() == 1, crawl.output
    assert "Traceback" not in crawl.output
    (error,) = crawl.told("ERROR")
    assert error == crawl.output.splitlines()[-1]
    return error


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"BLOOM_QUEUE": "file"}, "BLOOM_QUEUE is 'file'"),
        ({"BLOOM_BACKEND": "local"}, "BLOOM_BACKEND"),
        ({"SCHEDULER": "scrapy.core.scheduler.Scheduler"}, "CrashSafeScheduler"),
        ({"BLOOM_REDIS_ON_OUTAGE": "pass"}, "BLOOM_REDIS_ON_OUTAGE"),
        ({"BLOOM_QUEUE_LEASE_SECS": 0.5}, "BLOOM_QUEUE_LEASE_SECS is '0.5'"),
        ({"BLOOM_QUEUE_LEASE_SECS": 86_401}, "BLOOM_QUEUE_LEASE_SECS is '86401'"),
        ({"DUPEFILTER_CLASS": "scrapy.dupefilters.RFPDupeFilter"}, "DUPEFILTER_CLASS"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_cannot_be(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    crawl = Crawl(NOWHERE, tmp_path, in_redis(tmp_path.name, **{**SHARED, **settings}))
    assert said in refusal(crawl)
    assert not servers.shared("valkey").client.keys(f"*{tmp_path.name}*")


def test_a_job_directory_with_a_queue_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "job" / DATABASE
    path.parent.mkdir()
    fill(path, b"x")
    crawl = Crawl(NOWHERE, tmp_path, in_redis(tmp_path.name, **SHARED, JOBDIR="job"))
    error = refusal(crawl)
    assert f"1 request of the job waits in {path}" in error
    assert "scrapy bloom push" in error


def test_a_server_that_is_down_at_the_start(tmp_path: Path) -> None:
    settings = {
        **SHARED,
        "BLOOM_BACKEND": "redis",
        "BLOOM_REDIS_URL": f"redis://127.0.0.1:{servers.free_port()}/0",
        "BLOOM_REDIS_DEADLINE_SECS": 0.3,
    }
    assert "cannot be used" in refusal(Crawl(NOWHERE, tmp_path, settings))

"""Workers that share their queue, and a fault in mid-crawl: no page is lost.

| in the middle | what the user sees |
|---|---|
| a worker is killed | one INFO line of one of the others |
| a worker stands still for longer than its lease | one INFO line of another, and one of its own |
| replies are lost; the server is killed, and back with its files; a replica takes over | nothing \
new, or the WARNING of an outage |
"""

import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from scrapy_bloom.queues.shared_state import QueueState, Worker, read_state
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.scripts import keys_of
from tests.support import servers
from tests.support.crawls import SPIDER, Crawl, spider_with
from tests.support.proxies import DroppingProxy
from tests.support.redis_faults import (
    KEY,
    LONG,
    GatedSite,
    ended,
    gated_tree,
    locked_server,
    start,
    told,
    url_of,
)

# That a worker has in flight (CONCURRENT_REQUESTS), or was done with, and had not told the server.
MOST = 16 + 32
GONE = "gives no sign of life: its lease is over"
LATE = "This worker's lease of the queue"


@pytest.fixture
def lasting() -> Iterator[servers.Server]:
    server = locked_server("--appendonly", "yes")
    yield server
    server.end()


@pytest.fixture
def cluster() -> Iterator[servers.Cluster]:
    cluster = servers.Cluster(with_replicas=True)
    yield cluster
    cluster.end()


def begin(
    site: GatedSite,
    url: str,
    work_dir: Path,
    number: int = 2,
    spider: Path = SPIDER,
    **settings: Any,
) -> Sequence[Crawl]:
    """So many workers, which share a crawl."""
    shared = {
        "SCHEDULER": "scrapy_bloom.CrashSafeScheduler",
        "BLOOM_QUEUE_LEASE_SECS": LONG,
        **settings,
    }
    return [start(site, url, work_dir / str(n), spider, **shared) for n in range(number)]


def state_of(url: str, *, cluster: bool = False) -> QueueState | None:
    server = RedisServer(url, cluster=cluster)
    try:
        return read_state(server, KEY)
    finally:
        server.close()


def in_the_middle(
    crawls: Sequence[Crawl], site: GatedSite, url: str, *, cluster: bool = False
) -> tuple[Crawl, Worker]:
    """Wait until all have joined, and all that is left is in flight, held back by the site.

    Return the worker that has taken the most, and what the queue says of it.
    """
    found: list[Worker] = []

    def are_there() -> bool:
        state = state_of(url, cluster=cluster)
        if (
            state is None
            or len(state.workers) < len(crawls)
            or state.pending
            or not site.is_reached()
        ):
            return False
        found[:] = state.workers
        return state.leased >= site.site.under_way  # and what was prefetched, or done of late

    servers.wait_for(are_there, lambda: "".join(crawl.output for crawl in crawls))
    most = max(found, key=lambda worker: worker.in_flight)
    assert most.in_flight
    (crawl,) = [each for each in crawls if most.name.endswith(f":{each.pid}")]
    return crawl, most


def all_end(crawls: Sequence[Crawl], site: GatedSite, *, repeats: int = 0) -> None:
    """Wait for the end; each retry may repeat one page, and so many pages more are repeated.

    What a worker asks again may be new to it because its first answer never came, and at the same
    time to another worker.
    """
    for crawl in crawls:
        repeats += int(ended(crawl)["bloom/redis/retries"])
        assert not crawl.told("ERROR")
    assert not site.missing()
    assert site.repeats() <= repeats


def end_leases(url: str, workers: Sequence[Worker] = ()) -> None:
    """End the leases of workers that are killed or stand still, or else all, as time would."""
    server = RedisServer(url)
    for each in workers or state_of(url).workers:
        server.send("HSET", keys_of(KEY)[3], each.id, 1)
    server.send("HDEL", KEY, "look")  # and that time for the next look
    server.close()


def lines(crawls: Sequence[Crawl], text: str) -> list[str]:
    return [line for crawl in crawls for line in told(crawl, "INFO") if text in line]


def test_what_a_killed_worker_had_taken_is_crawled_by_the_others(
    site: GatedSite, server: servers.Server, tmp_path: Path
) -> None:
    url = url_of(server)
    crawls = begin(site, url, tmp_path, number=3)
    victim, before = in_the_middle(crawls, site, url)
    victim.kill()
    end_leases(url, [before])
    site.open()
    others = [crawl for crawl in crawls if crawl is not victim]
    all_end(others, site, repeats=MOST)
    (line,) = lines(others, GONE)
    assert before.name in line


DIES = """
import os
import signal
from scrapy_bloom.queues.shared import SharedStore

apply = SharedStore.apply

def apply_three(self, batch, applied=[]):
    reply = apply(self, batch)
    applied.extend(batch.found)
    if len(applied) > 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return reply

SharedStore.apply = apply_three
"""


def test_what_a_worker_stored_that_is_killed_before_the_reply_is_crawled_once(
    server: servers.Server, tmp_path: Path
) -> None:
    """Only what was in flight is crawled twice, and not what that leads to as well."""
    site = gated_tree()
    try:
        site.open()
        url = url_of(server)
        (victim,) = begin(site, url, tmp_path, 1, spider=spider_with(tmp_path, DIES))
        assert victim.finish() == -signal.SIGKILL, victim.output
        site.site.settle()
        asked = set(site.site.hits)
        end_leases(url)  # before, another worker may find the page once more
        all_end(begin(site, url, tmp_path, 1), site, repeats=MOST)
        assert {path for path, number in site.site.hits.items() if number > 1} <= asked
    finally:
        site.end()


def test_all_workers_are_killed_and_the_same_commands_go_on(
    site: GatedSite, server: servers.Server, tmp_path: Path
) -> None:
    url = url_of(server)
    crawls = begin(site, url, tmp_path)
    in_the_middle(crawls, site, url)
    for crawl in crawls:
        crawl.kill()
    end_leases(url)
    site.open()
    again = begin(site, url, tmp_path)
    all_end(again, site, repeats=len(crawls) * MOST)
    assert len(lines(again, GONE)) == len(crawls)


def test_a_worker_that_stood_still_goes_on_without_harm(
    site: GatedSite, server: servers.Server, tmp_path: Path
) -> None:
    url = url_of(server)
    crawls = begin(site, url, tmp_path)
    victim, before = in_the_middle(crawls, site, url)
    victim.stop()
    end_leases(url, [before])
    others = [crawl for crawl in crawls if crawl is not victim]
    servers.wait_for(lambda: bool(lines(others, GONE)), lambda: others[0].output)
    victim.send(signal.SIGCONT)
    site.open()
    all_end(crawls, site, repeats=MOST)
    assert len(lines(others, GONE)) == 1
    assert len(lines([victim], LATE)) == 1


def test_lost_replies_lose_no_page(site: GatedSite, server: servers.Server, tmp_path: Path) -> None:
    """A proxy drops 2 % of the replies, after the server has executed the command."""
    proxy = DroppingProxy(server.port, 0.02, seed=1)
    try:
        site.open()
        crawls = begin(site, url_of(proxy), tmp_path)
        for crawl in crawls:
            crawl.finish()
        assert proxy.dropped
        all_end(crawls, site)
    finally:
        proxy.end()


def test_a_server_that_is_killed_and_comes_back_with_its_files(
    site: GatedSite, lasting: servers.Server, tmp_path: Path
) -> None:
    url = url_of(lasting)
    crawls = begin(site, url, tmp_path)
    in_the_middle(crawls, site, url)
    lasting.kill()
    lasting.start()
    site.open()
    all_end(crawls, site)


def test_the_crawl_goes_on_when_a_replica_takes_over(
    cluster: servers.Cluster, tmp_path: Path
) -> None:
    """It has all that its master had: only what was not passed on is crawled again."""
    site = gated_tree()
    try:
        crawls = begin(site, cluster.url, tmp_path, BLOOM_REDIS_CLUSTER=True)
        in_the_middle(crawls, site, cluster.url, cluster=True)
        master = cluster.master_of(KEY)
        # Who says meanwhile that a page is done may say it to a master that passes nothing on.
        for crawl in crawls:
            crawl.stop()
        cluster.replace(master)
        for crawl in crawls:
            crawl.send(signal.SIGCONT)
        site.open()
        all_end(crawls, site)
    finally:
        site.end()

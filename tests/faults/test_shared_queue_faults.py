"""Faults of workers that share a queue, and of their server: no page is lost."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import servers
from tests.support.crawls import stat
from tests.support.shared_crawls import PAGES, SharedCrawl
from tests.support.sites import Site

# Requests of a worker that are in flight (CONCURRENT_REQUESTS), or done and not reported yet.
MOST = 16 + 32
START = 2  # other addresses of the start page


@pytest.fixture
def cluster() -> Iterator[servers.Cluster]:
    cluster = servers.Cluster(with_replicas=True)
    yield cluster
    cluster.end()


def finish(crawl: SharedCrawl, *, repeats: int = 0) -> None:
    """Wait for the end; check that at most one page a retry, and so many more, were repeated.

    What a worker asks again may be new to it because its first answer never came, and at the same
    time to another worker.
    """
    crawl.finish()
    assert not crawl.our_lines("", "ERROR")
    assert len(crawl.site.hits) == PAGES
    repeats += sum(stat(worker, "bloom/redis/retries") for worker in crawl.workers)
    assert crawl.site.total() <= PAGES + START + repeats


def test_a_suspended_worker_resumes_without_harm(wide: Site, tmp_path: Path) -> None:
    # Others look for expired leases every quarter of a lease, here every two seconds.
    crawl = SharedCrawl(wide, tmp_path, BLOOM_QUEUE_LEASE_SECS=8)
    victim, other = crawl.hold(20)
    victim.stop()
    crawl.end_leases(victim)
    gone = "has expired without a heartbeat"
    other.wait_until(lambda: bool(crawl.our_lines(gone)))
    victim.send(signal.SIGCONT)
    finish(crawl, repeats=MOST)
    assert len(crawl.our_lines(gone)) == 1
    (late,) = crawl.our_lines("This worker has rejoined the queue")
    assert late in victim.output


def test_a_server_that_is_killed_and_comes_back_with_its_files(
    wide: Site, durable: servers.Server, tmp_path: Path
) -> None:
    crawl = SharedCrawl(wide, tmp_path, server=durable)
    crawl.hold(20)
    durable.kill()
    durable.start()
    finish(crawl)


def test_the_crawl_goes_on_when_a_replica_takes_over(
    cluster: servers.Cluster, wide: Site, tmp_path: Path
) -> None:
    """Only what the master had not passed on is crawled again."""
    settings = {"BLOOM_REDIS_URL": cluster.url}
    crawl = SharedCrawl(wide, tmp_path, **settings)
    wide.hold_after(20)
    crawl.start(2)
    servers.wait_for(wide.is_holding, lambda: "it does not wait")
    # Who says meanwhile that a page is done may say it to a master that passes nothing on.
    for worker in crawl.workers:
        worker.stop()
    cluster.replace(cluster.master_of(crawl.key))
    for worker in crawl.workers:
        worker.send(signal.SIGCONT)
    finish(crawl)

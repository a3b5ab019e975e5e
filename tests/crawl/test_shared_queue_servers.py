"""A crawl whose workers share a queue in Redis: servers that go away or lose it, and refusals."""

import re
import signal
from pathlib import Path

import pytest

from scrapy_bloom.job.jobdir import FILE
from tests.support import servers
from tests.support.crawls import Crawl
from tests.support.proxies import DroppingProxy
from tests.support.request_queues import fill
from tests.support.shared_crawls import SharedCrawl
from tests.support.sites import Site
from tests.support.workspace import in_redis

NOWHERE = "http://127.0.0.1:9/"
SHARED = {"SCHEDULER": "scrapy_bloom.CrashSafeScheduler"}


def test_ctrl_c_does_not_wait_for_the_end_of_an_outage(
    wide: Site, durable: servers.Server, tmp_path: Path
) -> None:
    crawl = SharedCrawl(wide, tmp_path, server=durable, BLOOM_REDIS_DEADLINE_SECS=100_000)
    (worker,) = crawl.hold(20, workers=1)
    durable.kill()
    worker.wait_until(lambda: bool(worker.our_lines("WARNING")))
    worker.send(signal.SIGINT)
    crawl.finish(reason="shutdown")
    (error,) = worker.our_lines("ERROR")
    assert "(waited up to 5 seconds, the crawl is closing)" in error
    durable.start()
    crawl.end_leases(worker)
    crawl.finish(crawl.start())
    crawl.check_complete()


@pytest.mark.parametrize(
    "scheduler", ["scrapy_bloom.CrashSafeScheduler", "scrapy.core.scheduler.Scheduler"]
)
def test_ctrl_c_while_a_crawl_waits_for_a_server_to_start(
    scheduler: str, wide: Site, tmp_path: Path
) -> None:
    """The event loop is blocked, so Scrapy cannot close the spider."""
    settings = {
        "SCHEDULER": scheduler,
        "BLOOM_REDIS_URL": f"redis://127.0.0.1:{servers.free_port()}",
        "BLOOM_REDIS_DEADLINE_SECS": 100_000,
    }
    crawl = Crawl(wide.url, tmp_path, settings)
    crawl.wait_until(lambda: bool(crawl.our_lines("WARNING")))
    crawl.send(signal.SIGINT)
    assert crawl.finish() == 1
    (error,) = crawl.our_lines("ERROR")
    assert "(waited up to 5 seconds, the crawl is closing)" in error
    assert "Traceback" not in crawl.output


def test_a_server_that_is_emptied_while_a_callback_computes(
    wide: Site, server: servers.Server, tmp_path: Path
) -> None:
    """A heartbeat of the thread notices it, before the event loop can send what it has found."""
    code = (
        "import redis, time\n"
        "links = LinkSpider.parse\n"
        "def parse(self, response):\n"
        "    if '/p/30?' in response.url and not LOG.with_name('emptied').exists():\n"
        "        LOG.with_name('emptied').touch()\n"
        f"        redis.Redis.from_url('{server.url}').flushall()\n"
        "        time.sleep(2)\n"
        "    return links(self, response)\n"
        "LinkSpider.parse = parse\n"
    )
    crawl = SharedCrawl(wide, tmp_path, server=server, code=code, BLOOM_QUEUE_LEASE_SECS=4)
    crawl.finish(crawl.start())
    crawl.check_complete(starts=2)
    (line,) = crawl.our_lines("This worker has rejoined the queue")
    assert re.search(r": at least [1-9]\d* requests? (is|are) crawled again", line)
    assert crawl.state().ended_at


_LARGE = """
links = LinkSpider.parse
def parse(self, response):
    for request in links(self, response):
        yield request.replace(meta={"large": "x" * 60_000})
LinkSpider.parse = parse
"""


def test_a_server_that_evicts_the_queue(wide: Site, tmp_path: Path) -> None:
    """The requests of the first page do not fit, so the crawl starts over again and again."""
    options = ("--maxmemory", "4mb", "--maxmemory-policy", "allkeys-lru")
    with servers.Server("valkey", *options) as server:
        crawl = SharedCrawl(
            wide, tmp_path, server=server, code=_LARGE, BLOOM_EXPECTED_REQUESTS=1000
        )
        worker = crawl.start()
        assert worker.finish() == 0, worker.output
        assert server.client.info("stats")["evicted_keys"]
    assert "Spider closed (bloom_queue_failed)" in worker.output
    (error,) = worker.our_lines("ERROR")
    assert " times in a row, " in error
    assert len(worker.output.splitlines()) < 150


def test_a_round_trip_that_takes_longer_than_the_lease(
    wide: Site, server: servers.Server, tmp_path: Path
) -> None:
    with DroppingProxy(server.port) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}?socket_timeout=10"
        crawl = SharedCrawl(
            wide,
            tmp_path,
            server=server,
            BLOOM_REDIS_URL=url,
            BLOOM_QUEUE_LEASE_SECS=1,
            BLOOM_REDIS_DEADLINE_SECS=12,
        )
        workers = crawl.hold(20)
        proxy.delay = 1.2
        crawl.finish(reason="bloom_queue_failed")
        for worker in workers:
            (error,) = worker.our_lines("ERROR")
            assert "BLOOM_QUEUE_LEASE_SECS is 1" in error
        proxy.delay = 0.1
        crawl.finish(crawl.start(BLOOM_QUEUE_LEASE_SECS=10))
        crawl.check_complete()


# Refused at the start.


def test_a_job_directory_with_a_queue_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "job" / FILE
    path.parent.mkdir()
    fill(path, b"x")
    crawl = Crawl(NOWHERE, tmp_path, in_redis(tmp_path.name, **SHARED, JOBDIR="job"))
    error = crawl.refusal()
    assert f"{path} holds 1 pending request, which" in error
    assert "scrapy bloom copy" in error

"""A crawl whose workers share a queue in Redis: servers that go away or lose it, and refusals."""

from pathlib import Path

import pytest

from scrapy_bloom.job.jobdir import DATABASE
from tests.support import servers
from tests.support.crawls import Crawl
from tests.support.request_queues import fill
from tests.support.shared_crawls import PAGES, SharedCrawl
from tests.support.sites import ScriptedSite, Site
from tests.support.workspace import in_redis

NOWHERE = "http://127.0.0.1:9/"
SHARED = {"SCHEDULER": "scrapy_bloom.CrashSafeScheduler"}


def test_a_server_that_is_gone_for_good(
    wide: Site, durable: servers.Server, tmp_path: Path
) -> None:
    crawl = SharedCrawl(wide, tmp_path, server=durable, BLOOM_REDIS_DEADLINE_SECS=1)
    workers = crawl.hold(20)
    durable.kill()
    crawl.finish(reason="bloom_outage")
    for worker in workers:
        (error,) = worker.our_lines("ERROR")
        assert "cannot be used" in error
    durable.start()
    crawl.end_leases(*workers)
    crawl.finish(crawl.start(), crawl.start())
    crawl.check_complete()


# The server is emptied each time when a worker has joined the filter, and not yet its queue.
_EMPTIED = """
from scrapy_bloom.queues.redis_store import RedisStore
times, join = 3, RedisStore._join

def emptied_before(store):
    global times
    times -= 1
    if times >= 0:
        store._filter.server.send("FLUSHALL")
    return join(store)

RedisStore._join = emptied_before
"""


def test_a_server_that_is_emptied_while_a_worker_joins(
    wide: Site, server: servers.Server, tmp_path: Path
) -> None:
    crawl = SharedCrawl(wide, tmp_path, server=server, code=_EMPTIED)
    crawl.start()
    crawl.finish()
    assert len(wide.hits) == PAGES
    assert not crawl.our_lines("", "ERROR")


def test_a_server_that_comes_back_empty(wide: Site, server: servers.Server, tmp_path: Path) -> None:
    """With the filter gone as well, the crawl starts anew."""
    crawl = SharedCrawl(wide, tmp_path, server=server)
    crawl.hold(20)
    server.kill()
    server.start()
    crawl.finish()
    crawl.check_complete(starts=2)
    assert not crawl.our_lines("", "ERROR")


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
    assert len(crawl.our_lines("This worker has rejoined the queue")) == 1
    assert crawl.state().ended_at


def test_a_chain_without_filter_is_not_multiplied_by_a_loss(
    server: servers.Server, tmp_path: Path
) -> None:
    """Requests that the new start() leads to again are not sent again, because no filter asks."""
    code = (
        "import redis\n"
        "def parse(self, response):\n"
        "    if response.url.endswith('/p/20') and not LOG.with_name('emptied').exists():\n"
        "        LOG.with_name('emptied').touch()\n"
        f"        redis.Redis.from_url('{server.url}').flushall()\n"
        "    for href in response.css('a::attr(href)').getall():\n"
        "        yield response.follow(href, self.parse, dont_filter=True)\n"
        "LinkSpider.parse = parse\n"
    )
    length = 40
    site = ScriptedSite({f"/p/{number}": [(f"/p/{number + 1}",)] for number in range(1, length)})
    site.answers["/"] = [("/p/1",)]
    crawl = SharedCrawl(site, tmp_path, server=server, code=code)
    crawl.finish(crawl.start())
    site.end()
    assert crawl.starts() == 2
    assert len(site.hits) == length + 1
    assert max(site.hits.values()) <= 2 + 1  # what was in flight comes back once more


@pytest.mark.parametrize("name", ["pending", "workers"])
def test_a_server_that_has_lost_a_key_of_the_queue(name: str, wide: Site, tmp_path: Path) -> None:
    """As it evicts keys when its memory is full. Without requests, the crawl starts anew."""
    crawl = SharedCrawl(wide, tmp_path)
    crawl.hold(20)
    assert crawl.server.client.delete(crawl.keys[name])
    crawl.finish()
    assert len(wide.hits) == PAGES
    assert crawl.starts() == (1 if name == "workers" else 2)
    assert crawl.state().ended_at
    assert crawl.state().in_flight == 0


# Refused at the start.


def test_a_job_directory_with_a_queue_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "job" / DATABASE
    path.parent.mkdir()
    fill(path, b"x")
    crawl = Crawl(NOWHERE, tmp_path, in_redis(tmp_path.name, **SHARED, JOBDIR="job"))
    error = crawl.refusal()
    assert f"{path} holds 1 pending request, which" in error
    assert "scrapy bloom copy" in error

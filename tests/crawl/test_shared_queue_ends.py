"""A crawl whose workers share a queue: faults just before and after its end."""

from pathlib import Path

import pytest

from scrapy_bloom.queues.store import State
from tests.support import servers
from tests.support.shared_crawls import SharedCrawl
from tests.support.sites import ScriptedSite, Site

# Waits for a file, then yields a page that nothing links to; waits for another one, and ends when
# a server that was away would be asked again.
LATE = """for name in ("go", "end"):
            for _ in range(10_000):
                if LOG.with_name(name).exists():
                    break
                await asyncio.sleep(0.01)
            yield scrapy.Request(self.start_urls[0] + "p/89?late=" + name)
        await asyncio.sleep(2)
        LOG.with_name("ended").touch()"""


def test_start_whose_requests_were_dropped_is_not_through(
    wide: Site, durable: servers.Server, tmp_path: Path
) -> None:
    crawl = SharedCrawl(
        wide,
        tmp_path,
        server=durable,
        first_time=LATE,
        BLOOM_REDIS_DEADLINE_SECS=1,
    )
    (worker,) = crawl.hold(20, 1)
    durable.kill()
    (tmp_path / "go").touch()
    worker.wait_until(lambda: bool(worker.our_lines("ERROR")))
    durable.start()
    (tmp_path / "end").touch()
    worker.wait_until((tmp_path / "ended").exists)
    crawl.finish(reason="bloom_outage")
    crawl.end_leases(worker)  # which it keeps, if it has not met the server again at its close
    crawl.finish(crawl.start())
    crawl.check_complete(starts=2)


# A spider that gets its requests from elsewhere: nobody finds them again if they are lost.

FED = 40
FEED = f"""
from scrapy import signals
from scrapy.exceptions import DontCloseSpider

@classmethod
def from_crawler(cls, crawler, *args, **options):
    spider = super(LinkSpider, cls).from_crawler(crawler, *args, **options)
    crawler.signals.connect(spider.feed, signals.spider_idle)
    return spider

def feed(self):
    if not LOG.with_name("fed").exists():
        LOG.with_name("fed").touch()
        for number in range({FED}):
            self.crawler.engine.crawl(scrapy.Request(self.start_urls[0] + f"fed/{{number}}"))
        raise DontCloseSpider

LinkSpider.from_crawler, LinkSpider.feed = from_crawler, feed
"""


@pytest.mark.parametrize("worker_is", ["going on", "closing"])
def test_requests_without_a_parent_and_a_server_that_loses_them(
    worker_is: str, server: servers.Server, tmp_path: Path
) -> None:
    with ScriptedSite({"/": [()]}) as site:
        crawl = SharedCrawl(site, tmp_path, server=server, code=FEED, CONCURRENT_REQUESTS=1)
        site.hold_after(3)
        worker = crawl.start()
        servers.wait_for(
            lambda: site.is_holding() and crawl.count() + crawl.count(State.IN_FLIGHT) > FED - 5,
            lambda: worker.output,
        )
        if worker_is == "closing":
            worker.begin_pause()
        server.client.flushall()
        if worker_is == "closing":
            crawl.finish(reason="shutdown")
            assert crawl.count()
            crawl.workers.clear()
            crawl.start()
        crawl.finish()
        assert set(site.hits) == {"/", *(f"/fed/{number}" for number in range(FED))}
        assert crawl.starts() == 2
        assert crawl.state().ended_at


def test_a_start_that_yields_what_cannot_be_serialized(wide: Site, tmp_path: Path) -> None:
    """The others wait for what it leads to: start() is not through before it is done."""
    yields = "yield scrapy.Request(self.start_urls[0] + 'p/89?own=1', callback=lambda _: None)"
    crawl = SharedCrawl(wide, tmp_path, first_time=yields)
    crawl.site.hold_after(0)
    workers = [crawl.start() for _ in range(2)]
    servers.wait_for(lambda: wide.under_way >= 1, lambda: workers[0].output)
    assert not crawl.state().is_started
    assert workers[1].running()
    crawl.finish()
    crawl.check_complete()

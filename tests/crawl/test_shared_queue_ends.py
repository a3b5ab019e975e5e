"""A crawl whose workers share a queue: faults just before and after its end."""

import signal
from pathlib import Path

import pytest

from scrapy_bloom.queues.store import State
from tests.support import servers
from tests.support.crawls import Crawl, spider_with
from tests.support.shared_crawls import PAGES, SharedCrawl
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


def test_start_that_ends_well_when_it_is_cancelled_is_not_through(
    wide: Site, tmp_path: Path
) -> None:
    waits = "try:\n            await asyncio.sleep(1000)\n        except asyncio.CancelledError:\n"
    crawl = SharedCrawl(wide, tmp_path, first_time=f"{waits}            return")
    worker = crawl.start()
    servers.wait_for(lambda: len(wide.hits) == PAGES, lambda: worker.output)
    worker.interrupt()
    assert not crawl.state().ended_at
    crawl.finish(crawl.start())
    assert crawl.starts() == 2
    assert crawl.state().ended_at


def test_what_start_yields_after_the_close(wide: Site, tmp_path: Path) -> None:
    code = (
        "from twisted.internet.defer import Deferred\n"
        "from scrapy import signals\n"
        "@classmethod\n"
        "def from_crawler(cls, crawler, *args, **options):\n"
        "    spider = super(LinkSpider, cls).from_crawler(crawler, *args, **options)\n"
        "    crawler.signals.connect(spider.slow_end, signals.spider_closed)\n"
        "    return spider\n"
        "def slow_end(self):\n"
        "    from twisted.internet import reactor\n"
        "    end = Deferred()\n"
        "    reactor.callLater(0.5, end.callback, None)\n"
        "    return end\n"
        "LinkSpider.from_crawler, LinkSpider.slow_end = from_crawler, slow_end\n"
    )
    late = (
        "for number in range(10_000):\n"
        "            await asyncio.sleep(0.01)\n"
        "            yield scrapy.Request(self.start_urls[0] + f'p/89?{number}')"
    )
    crawl = SharedCrawl(wide, tmp_path, code=code, first_time=late, CLOSESPIDER_PAGECOUNT=5)
    crawl.finish(crawl.start(), reason="closespider_pagecount")
    assert not crawl.our_lines("This worker has rejoined")
    assert crawl.our_lines("is unfinished; pending requests")
    assert not crawl.state().workers


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
            lambda: site.is_holding() and crawl.state().pending + crawl.state().in_flight > FED - 5,
            lambda: worker.output,
        )
        if worker_is == "closing":
            worker.begin_pause()
        server.client.flushall()
        if worker_is == "closing":
            crawl.finish(reason="shutdown")
            assert crawl.state().pending
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


def test_two_spiders_with_one_key(wide: Site, tmp_path: Path) -> None:
    crawl = SharedCrawl(wide, tmp_path)
    crawl.hold(20, 1)
    other = spider_with(tmp_path / "worker-0", "LinkSpider.name = 'others'\n")
    refused = Crawl(wide.url, tmp_path / "refused", crawl.settings, spider=other)
    error = refused.refusal()
    assert "belongs to spider 'links', but this crawl runs 'others'" in error
    assert "BLOOM_REDIS_KEY" in error
    crawl.finish()
    assert len(wide.hits) == PAGES
    assert not crawl.our_lines("", "ERROR")


DEADLY = """
import os
import signal

def parse(self, response):
    if response.url.startswith(self.start_urls[0] + "p/44?"):
        os.kill(os.getpid(), signal.SIGKILL)
    return links(self, response)

links = LinkSpider.parse
LinkSpider.parse = parse
"""


def test_a_page_that_kills_its_worker(wide: Site, tmp_path: Path) -> None:
    """It kills four workers, the last one alone; all others are crawled."""
    crawl = SharedCrawl(wide, tmp_path, code=DEADLY)
    for _ in range(4):
        worker = crawl.start()
        assert worker.finish() == -signal.SIGKILL, worker.output
        crawl.end_leases(worker)
    last = crawl.start()
    crawl.finish(last)
    (error,) = last.our_lines("ERROR")
    assert f"{wide.url}p/44?" in error
    assert "was in flight in 4 processes that died, the last time alone" in error
    assert len(wide.hits) == PAGES
    state = crawl.state()
    assert (state.counts[State.DEAD], state.pending, state.in_flight) == (1, 0, 0)
    assert state.ended_at

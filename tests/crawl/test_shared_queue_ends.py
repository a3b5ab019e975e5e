"""A crawl whose workers share a queue: ends at a bad moment, that must not be taken for the end."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import servers
from crawls import Crawl
from shared_crawls import PAGES, SharedCrawl, wide_site
from sites import Site

SELECT = {"TWISTED_REACTOR": "twisted.internet.selectreactor.SelectReactor"}

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


@pytest.fixture
def tree() -> Iterator[Site]:
    site = wide_site()
    yield site
    site.end()


def test_start_whose_requests_were_dropped_is_not_through(
    tree: Site, durable: servers.Server, tmp_path: Path
) -> None:
    crawl = SharedCrawl(
        tree,
        tmp_path,
        server=durable,
        first_time=LATE,
        BLOOM_REDIS_DEADLINE_SECS=1,
    )
    (worker,) = crawl.hold(20, 1)
    durable.kill()
    (tmp_path / "go").touch()
    worker.wait_until(lambda: bool(worker.told("ERROR")))
    durable.start()
    (tmp_path / "end").touch()
    worker.wait_until((tmp_path / "ended").exists)
    crawl.finish(reason="bloom_outage")
    crawl.end_leases(worker)  # which it keeps, if it has not met the server again at its close
    crawl.finish(crawl.start())
    assert crawl.starts() == 2
    assert len(tree.hits) == PAGES


def test_start_that_ends_well_when_it_is_cancelled_is_not_through(
    tree: Site, tmp_path: Path
) -> None:
    waits = "try:\n            await asyncio.sleep(1000)\n        except asyncio.CancelledError:\n"
    crawl = SharedCrawl(tree, tmp_path, first_time=f"{waits}            return")
    worker = crawl.start()
    servers.wait_for(lambda: len(tree.hits) == PAGES, lambda: worker.output)
    worker.interrupt()
    assert not crawl.state().ended_at
    crawl.finish(crawl.start())
    assert crawl.starts() == 2
    assert crawl.state().ended_at


def test_one_that_waits_is_interrupted_without_asyncio(tree: Site, tmp_path: Path) -> None:
    crawl = SharedCrawl(tree, tmp_path, **SELECT)
    worker, other = crawl.hold(20)
    tree.hold_after(0)
    worker._held_by = tree
    worker.interrupt()
    assert "Error while reading start" not in worker.output
    crawl.finish(other)
    assert len(tree.hits) == PAGES


def test_a_worker_that_comes_back_after_the_flush(tree: Site, tmp_path: Path) -> None:
    crawl = SharedCrawl(tree, tmp_path, BLOOM_REDIS_FLUSH=True)
    stopped, other = crawl.hold(20)
    stopped.stop()
    crawl.end_leases(stopped)
    crawl.finish(other)
    answers = tree.total()
    stopped.send(signal.SIGCONT)
    assert stopped.finish() == 0
    (error,) = stopped.told("ERROR")
    assert "has ended while this worker stood still" in error
    assert "Traceback" not in stopped.output
    assert tree.total() <= answers + 16  # that were under way
    assert crawl.starts() == 1
    assert not servers.keys_for_good(crawl.server.client, f"*{crawl.key}*")


def test_a_flush_that_nobody_was_left_for(tree: Site, tmp_path: Path) -> None:
    """The next run does it, and crawls."""
    crawl = SharedCrawl(tree, tmp_path)
    crawl.finish(crawl.start())
    crawl.finish(crawl.start(BLOOM_REDIS_FLUSH=True))
    assert crawl.starts() == 2
    assert set(tree.hits.values()) == {2, 6}  # the start page has three addresses
    assert not servers.keys_for_good(crawl.server.client, f"*{crawl.key}*")


def test_what_start_yields_after_the_close(tree: Site, tmp_path: Path) -> None:
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
    crawl = SharedCrawl(tree, tmp_path, code=code, first_time=late, CLOSESPIDER_PAGECOUNT=5)
    crawl.finish(crawl.start(), reason="closespider_pagecount")
    assert not crawl.told("This worker's lease")
    assert crawl.told("is not over, and nobody is left to crawl")
    assert not crawl.state().workers


@pytest.mark.parametrize("queue", ["job", "redis"])
def test_a_priority_that_is_no_integer(queue: str, tree: Site, tmp_path: Path) -> None:
    """Nobody could make the request again: it stays in memory, as what cannot be serialized."""
    code = (
        "def parse(self, response):\n"
        "    request = scrapy.Request(self.start_urls[0] + 'p/89?half=1')\n"
        "    request.priority = 0.5\n"
        "    yield request\n"
        "LinkSpider.parse = parse\n"
    )
    crawl = SharedCrawl(tree, tmp_path, code=code)
    settings = crawl.settings if queue == "redis" else {"JOBDIR": "job"}
    settings = {"SCHEDULER": crawl.settings["SCHEDULER"], **settings}
    worker = Crawl(tree.url, tmp_path / "worker", settings, spider=crawl.spider)
    assert worker.finish() == 0
    assert tree.hits["/p/89"] == 1
    assert not worker.lines("ERROR")
    assert "'scheduler/unserializable': " in worker.output


def test_a_flush_that_was_cut_off(tree: Site, tmp_path: Path) -> None:
    """The queue was removed, and the filter not: the next run must not take all for seen."""
    crawl = SharedCrawl(tree, tmp_path)
    crawl.finish(crawl.start())
    state, client = crawl.keys[3], crawl.server.client
    kept = {name: client.hget(state, name) for name in ("id", "ended")}
    client.delete(*crawl.keys[:4])
    client.hset(state, mapping={**kept, "flushed": 1})
    crawl.finish(crawl.start(BLOOM_REDIS_FLUSH=True))
    assert crawl.starts() == 2
    assert set(tree.hits.values()) == {2, 6}  # the start page has three addresses
    assert not servers.keys_for_good(client, f"*{crawl.key}*")

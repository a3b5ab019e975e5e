"""CrashSafeScheduler: real crawls that are killed in every way, and resumed."""

import signal
import time
from pathlib import Path

import pytest

from scrapy_bloom.job.jobdir import FILE
from scrapy_bloom.queues.serialized import serialized
from scrapy_bloom.queues.store import Joining
from tests.support.crawls import (
    NO_REACTOR,
    SPIDER,
    Crawl,
    may_have_no_reactor,
    spider_with,
)
from tests.support.request_queues import counts_in, fill
from tests.support.sites import LIMIT, Site, tree_site

PAGES = 40  # of the tree
JOB = {"JOBDIR": "job", "CONCURRENT_REQUESTS": 8}
SAFE = {**JOB, "SCHEDULER": "scrapy_bloom.CrashSafeScheduler"}
BY_PRIORITY = {"SCHEDULER_PRIORITY_QUEUE": "scrapy.pqueues.ScrapyPriorityQueue"}


def in_flight(path: Path) -> int:
    """How many requests were in flight when the last crawl was killed: these are crawled again."""
    return counts_in(path / "job" / FILE)[1]


def crawled_twice(site: Site) -> int:
    """The start page does not count: it is asked for by each run, as Scrapy does not filter it."""
    return sum(count - 1 for path, count in site.hits.items() if path != "/p/0")


def under_way(site: Site, path: Path, settings: dict, *, spider: Path = SPIDER) -> Crawl:
    """A crawl that has got 10 pages, and waits for others."""
    return Crawl.held(site, 10, path, settings, spider=spider)


def finished(site: Site, path: Path, settings: dict) -> Crawl:
    """The crawl that goes on after a kill, and ends well."""
    crawl = Crawl.finished(site.url, path, settings)
    assert "'finish_reason': 'finished'" in crawl.output
    assert not crawl.our_lines("ERROR") + crawl.our_lines("WARNING")
    return crawl


@pytest.mark.parametrize(
    "loop", [{}, pytest.param(NO_REACTOR, marks=may_have_no_reactor)], ids=["asyncio", "no reactor"]
)
def test_two_signals(loop: dict, tree: Site, tmp_path: Path) -> None:
    """Without a reactor, Python cancels what is being downloaded: that is no failure of it."""
    settings = {**SAFE, **loop}
    crawl = under_way(tree, tmp_path, settings)
    crawl.send(signal.SIGTERM)
    crawl.wait_until(lambda: "Received SIGTERM" in crawl.output)
    crawl.send(signal.SIGTERM)
    crawl.finish()
    tree.settle()
    assert len(tree.hits) < PAGES
    again = in_flight(tmp_path)
    assert again > 0
    finished(tree, tmp_path, settings)
    assert len(tree.hits) == PAGES
    assert crawled_twice(tree) <= again
    assert counts_in(tmp_path / "job" / FILE) == (0, 0)


@pytest.mark.parametrize("line", ["Closing spider", "Bloom filter closed"])
def test_a_kill_while_it_is_closed(line: str, tree: Site, tmp_path: Path) -> None:
    crawl = Crawl(tree.url, tmp_path, SAFE)
    end_of_wait = time.monotonic() + LIMIT
    while line not in crawl.output and time.monotonic() < end_of_wait:
        time.sleep(0.001)
    crawl.kill()
    assert len(tree.hits) == PAGES
    crawl = Crawl.finished(tree.url, tmp_path, SAFE)
    assert len(tree.hits) == PAGES
    assert crawled_twice(tree) == 0


@pytest.mark.parametrize(
    ("queue", "order"),
    [
        ({}, {}),
        (
            BY_PRIORITY,
            {"DEPTH_PRIORITY": 1, "SCHEDULER_DISK_QUEUE": "scrapy.squeues.PickleFifoDiskQueue"},
        ),
        (BY_PRIORITY, {"SCHEDULER_START_DISK_QUEUE": ""}),
    ],
    ids=["newest first", "oldest first", "no start queue"],
)
def test_the_order_and_the_stats_are_those_of_scrapys_scheduler(
    queue: dict, order: dict, tmp_path: Path
) -> None:
    tree = tree_site(pages=30)
    # No download before the last response is through, or it is a race which links come first.
    one = {"CONCURRENT_REQUESTS": 1, "SCRAPER_SLOT_MAX_ACTIVE_SIZE": 1}
    settings = {**queue, **order, **JOB, **one}
    orders, stats = [], []
    for scheduler in (None, SAFE["SCHEDULER"]):
        tree.hits.clear()
        crawl = Crawl.finished(
            tree.url, tmp_path / str(scheduler), {**settings, "SCHEDULER": scheduler}
        )
        orders.append(list(tree.hits))
        lines = [line.split("'")[1:] for line in crawl.output.splitlines()]
        stats.append([line for line in lines if line and line[0].startswith("scheduler/")])
    tree.end()
    assert len(orders[0]) == len(orders[1]) == 30
    assert orders[0] == orders[1]
    assert stats[0] == stats[1]
    assert len(stats[0]) == 4


def test_a_job_of_ours_is_refused_under_scrapys_scheduler(tree: Site, tmp_path: Path) -> None:
    crawl = under_way(tree, tmp_path, SAFE)
    crawl.interrupt()
    pending, _ = counts_in(tmp_path / "job" / FILE)
    (line,) = [line for line in crawl.our_lines("INFO") if "is unfinished" in line]
    assert f"; pending requests: {pending}, failed requests: 0. Run the same command" in line
    line = Crawl(tree.url, tmp_path, JOB).refusal()
    assert f"{tmp_path}/job/bloom.sqlite holds" in line
    assert "pending requests, which this crawl's scheduler cannot use" in line
    finished(tree, tmp_path, SAFE)
    assert len(tree.hits) == PAGES


@pytest.mark.parametrize(
    ("name", "queue", "place"),
    [
        ("SCHEDULER_DISK_QUEUE", "scrapy.squeues.LifoMemoryQueue", {}),
        (
            "SCHEDULER_PRIORITY_QUEUE",
            "spider.MyQueue",
            {"JOBDIR": "", "BLOOM_REDIS_URL": "redis://127.0.0.1:9"},
        ),
    ],
)
def test_a_queue_of_unknown_order(
    name: str, queue: str, place: dict, tree: Site, tmp_path: Path
) -> None:
    mine = (
        "from scrapy.pqueues import ScrapyPriorityQueue\nclass MyQueue(ScrapyPriorityQueue): ...\n"
    )
    spider = spider_with(tmp_path, mine)
    crawl = Crawl(tree.url, tmp_path, {**SAFE, **place, name: queue}, spider=spider)
    assert f"{name} is {queue!r}, whose order is unknown" in crawl.refusal()


def test_errors_of_other_code_are_escaped_and_logged_once_per_type(
    tree: Site, tmp_path: Path
) -> None:
    spider = spider_with(
        tmp_path,
        "def fail(self, response):\n"
        "    try:\n"
        "        self.crawler.engine._slot.scheduler.df.clear()\n"
        "    except AttributeError as error:\n"
        "        self.logger.error(error)\n"
        '    raise ValueError("\\x1b[31mred\\u202e")\n'
        "    yield\n"
        "LinkSpider.parse = fail\n",
    )
    crawl = Crawl.finished(tree.url, tmp_path, SAFE, spider=spider)
    assert "clear() is only for a filter in memory or Redis" in crawl.output
    requests = [{"url": f"{tree.url}?{n}", "callback": f"gone\x1b[31m{n}"} for n in range(30)]
    fill(tmp_path / "job" / FILE, *map(serialized, requests), spider=Joining("links"))
    crawl = Crawl.finished(tree.url, tmp_path, SAFE, spider=spider)
    assert sum("cannot be deserialized" in line for line in crawl.our_lines("ERROR")) == 1
    info = crawl.our_lines("INFO")
    assert any("has failed (ValueError: \\x1b[31mred\\u202e)" in line for line in info)
    assert not any("\x1b" in line for line in info + crawl.our_lines("ERROR"))


FEEDER = """
import os, signal
import scrapy
from scrapy.utils.asyncio import call_later
from scrapy.utils.defer import maybe_deferred_to_future
from twisted.internet.defer import Deferred

class FeederSpider(scrapy.Spider):
    name = "feeder"

    async def start(self):
        if not os.path.exists("fed"):
            call_later(0, self.feed)
            await maybe_deferred_to_future(Deferred())
        return
        yield

    def feed(self):
        open("fed", "x").close()
        for number in range(20):
            self.crawler.engine.crawl(scrapy.Request(f"{self.url}p/{number}"))
        call_later(0, os.kill, os.getpid(), signal.SIGKILL)

    def parse(self, response):
        pass
"""


def test_requests_of_a_timer_are_stored_when_its_turn_has_ended(tree: Site, tmp_path: Path) -> None:
    spider = tmp_path / "feeder.py"
    spider.write_text(FEEDER)
    assert Crawl(tree.url, tmp_path, SAFE, spider=spider).finish() == -signal.SIGKILL
    Crawl.finished(tree.url, tmp_path, SAFE, spider=spider)
    assert tree.hits.keys() >= {f"/p/{number}" for number in range(20)}

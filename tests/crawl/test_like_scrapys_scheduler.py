"""CrashSafeScheduler does what Scrapy's scheduler does: real crawls."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import scrapy

from tests.support.crawls import Crawl, spider_with, stat
from tests.support.sites import ScriptedSite
from tests.support.workspace import in_redis

LINKS = 150  # of the first page


@pytest.fixture(params=["JOBDIR", "Redis"])
def scheduler(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    place = {"JOBDIR": "job"} if request.param == "JOBDIR" else in_redis(str(tmp_path))
    return {"SCHEDULER": "scrapy_bloom.CrashSafeScheduler", **place}


@pytest.fixture
def site() -> Iterator[ScriptedSite]:
    with ScriptedSite({"/": [tuple(f"/{number}" for number in range(LINKS))]}) as site:
        yield site


PROXIES = 50
# As rotating proxies do it: the downloader then limits each proxy, and not the host.
WITH_PROXIES = f"""
class Proxies:
    number = 0

    def process_request(self, request, spider=None):
        self.number += 1
        request.meta["download_slot"] = f"proxy {{self.number % {PROXIES}}}"

LinkSpider.custom_settings = {{"DOWNLOADER_MIDDLEWARES": {{Proxies: 700}}}}
"""


PER_IP = {
    "CONCURRENT_REQUESTS_PER_IP": 2,
    "SCHEDULER_PRIORITY_QUEUE": "scrapy.pqueues.ScrapyPriorityQueue",  # the other one refuses it
}


# 0 means that nothing is downloaded before Scrapy 2.18.
NO_LIMIT = {"CONCURRENT_REQUESTS": 0} if scrapy.version_info >= (2, 18) else {}


@pytest.mark.parametrize("limits", [{**NO_LIMIT, "DOWNLOAD_DELAY": 0.01}, PER_IP], ids=str)
def test_as_many_downloads_at_once_through_proxies(
    limits: dict[str, Any], scheduler: dict[str, Any], site: ScriptedSite, tmp_path: Path
) -> None:
    settings = {
        **scheduler,
        "CONCURRENT_REQUESTS": PROXIES,
        "CONCURRENT_REQUESTS_PER_DOMAIN": 2,
        **limits,
    }
    spider = spider_with(tmp_path, WITH_PROXIES)
    crawl = Crawl.held(site, 1, tmp_path, settings, spider=spider)
    crawl.wait_until(lambda: site.under_way >= PROXIES)
    site.release()
    assert crawl.finish() == 0, crawl.output
    assert len(site.hits) == LINKS + 1


MOST, YIELDED = 8, 100
# The recipe of Scrapy's documentation: start() goes on when the scheduler is empty.
LAZY = f"""
from scrapy import signals

class LazySpider(scrapy.Spider):
    name = "lazy"
    yielded = answered = 0

    @classmethod
    def from_crawler(cls, crawler, **kwargs):
        spider = super().from_crawler(crawler, **kwargs)
        crawler.signals.connect(spider.scheduler_empty, signals.scheduler_empty)
        return spider

    async def start(self):
        for number in range({YIELDED}):
            if self.crawler.engine.needs_backout():
                await self.crawler.signals.wait_for(signals.scheduler_empty)
            self.yielded += 1
            self.crawler.stats.max_value("most_ahead", self.yielded - self.answered)
            yield scrapy.Request(f"{{self.url}}{{number}}")

    def scheduler_empty(self):
        engine = self.crawler.engine
        self.crawler.stats.max_value(
            "left", len(engine._slot.scheduler) + len(engine.downloader.active)
        )

    def parse(self, response):
        self.answered += 1
"""


def test_a_lazy_start_yields_no_more_than_is_downloaded(
    scheduler: dict[str, Any], site: ScriptedSite, tmp_path: Path
) -> None:
    spider = tmp_path / "lazy.py"
    spider.write_text(f"import scrapy\n{LAZY}")
    site.delay = 0.02
    settings = {**scheduler, "CONCURRENT_REQUESTS": MOST, "CONCURRENT_REQUESTS_PER_DOMAIN": 2}
    crawl = Crawl.finished(site.url, tmp_path, settings, spider=spider)
    assert len(site.hits) == YIELDED
    # When the signal is sent, all that is pending would have room in the downloader.
    assert stat(crawl, "left") < MOST
    # Those in the downloader, and what it has got and is still to be parsed.
    assert stat(crawl, "most_ahead") <= 8 * MOST


IDLE_SECS, IDLE_CALLS = 0.5, 6
# It gets its pages from elsewhere, one whenever it is idle.
IDLE = f"""
import time
from scrapy import signals
from scrapy.core.engine import ExecutionEngine
from scrapy.exceptions import DontCloseSpider

ExecutionEngine._SLOT_HEARTBEAT_INTERVAL = {IDLE_SECS}

class IdleSpider(scrapy.Spider):
    name = "idle"
    calls = []

    @classmethod
    def from_crawler(cls, crawler, **kwargs):
        spider = super().from_crawler(crawler, **kwargs)
        crawler.signals.connect(spider.idle, signals.spider_idle)
        return spider

    async def start(self):
        yield scrapy.Request(self.url + "start")

    def idle(self):
        self.calls.append(time.monotonic())
        if len(self.calls) == 1:
            self.crawler.engine.crawl(scrapy.Request(self.url + "fed"))
        if len(self.calls) == {IDLE_CALLS}:
            self.crawler.stats.set_value("msecs", int(1000 * (self.calls[-1] - self.calls[1])))
            self.crawler.engine.close_spider(self, "fed")
        raise DontCloseSpider

    def parse(self, response):
        pass
"""


def test_a_spider_that_feeds_itself_when_idle(
    scheduler: dict[str, Any], site: ScriptedSite, tmp_path: Path
) -> None:
    spider = tmp_path / "idle.py"
    settings, code = scheduler, IDLE
    if "BLOOM_REDIS_URL" in scheduler:  # it stays open by itself
        settings, code = {**scheduler, "BLOOM_QUEUE_WHEN_EMPTY": "wait"}, IDLE.replace("raise", "#")
    spider.write_text(f"import scrapy\n{code}")
    crawl = Crawl.finished(site.url, tmp_path, settings, spider=spider)
    assert set(site.hits) == {"/start", "/fed"}
    assert "'finish_reason': 'fed'" in crawl.output
    # From its second call on, the handler is called at each heartbeat of the engine.
    assert stat(crawl, "msecs") > 900 * IDLE_SECS * (IDLE_CALLS - 3)


# What Scrapy's est(), in its telnet console, and exporters of other people evaluate.
MONITORED = f"""
from scrapy import signals
from scrapy.utils.engine import get_engine_status

@classmethod
def from_crawler(cls, crawler, **kwargs):
    spider = super(LinkSpider, cls).from_crawler(crawler, **kwargs)
    crawler.signals.connect(spider.look, signals.request_scheduled)
    return spider

def look(self, request):
    engine, stats = self.crawler.engine, self.crawler.stats
    scheduler = engine._slot.scheduler
    failing = [test for test, result in get_engine_status(engine) if "(exc" in str(result)]
    stats.inc_value("failing", len(failing))
    stats.max_value("most_pending", len(scheduler))
    stats.max_value("in_queues", len(scheduler.mqs) + len(scheduler.dqs))
    if stats.get_value("scheduler/enqueued") == {LINKS}:  # the first page, and all but one link
        self.logger.info("this is the last one")

LinkSpider.from_crawler, LinkSpider.look = from_crawler, look
"""


def test_the_queues_have_a_length(
    scheduler: dict[str, Any], site: ScriptedSite, tmp_path: Path
) -> None:
    settings = {**scheduler, "CONCURRENT_REQUESTS": MOST}
    spider = spider_with(tmp_path, MONITORED)
    crawl = Crawl.held(site, 1, tmp_path, settings, spider=spider)
    crawl.wait_until(lambda: "this is the last one" in crawl.output)
    site.release()
    assert crawl.finish() == 0, crawl.output
    assert stat(crawl, "failing") == 0
    assert LINKS - 4 * MOST < stat(crawl, "most_pending") < LINKS
    assert stat(crawl, "in_queues") == stat(crawl, "most_pending")


# Each errback waits until the other download has failed, too.
WAITING_ERRBACKS = """
from twisted.internet.defer import Deferred
from scrapy.utils.defer import maybe_deferred_to_future

class FailingSpider(scrapy.Spider):
    name = "failing"
    custom_settings = {"RETRY_ENABLED": False}
    failed = []

    async def start(self):
        for number in range(3):
            yield scrapy.Request(f"http://127.0.0.1:9/{number}", errback=self.errback)

    async def errback(self, failure):
        self.failed.append(Deferred())
        if len(self.failed) == 3:
            for each in self.failed:
                each.callback(None)
        await maybe_deferred_to_future(self.failed[-1])
"""


def test_a_failed_download_does_not_hold_its_host(
    scheduler: dict[str, Any], tmp_path: Path
) -> None:
    spider = tmp_path / "failing.py"
    spider.write_text(f"import scrapy\n{WAITING_ERRBACKS}")
    settings = {**scheduler, "CONCURRENT_REQUESTS_PER_DOMAIN": 1}
    crawl = Crawl.finished("", tmp_path, settings, spider=spider)
    assert stat(crawl, "downloader/exception_count") == 3
    assert "'finish_reason': 'finished'" in crawl.output


PAUSES = 20
# Its callbacks unpause the engine: each at once, or all of them after the end of start().
PAUSING = f"""
import asyncio
import scrapy

class PausingSpider(scrapy.Spider):
    name = "pausing"
    answered, ended = asyncio.Event(), asyncio.Event()

    async def start(self):
        for number in range({PAUSES}):
            yield scrapy.Request(f"{{self.url}}{{number}}")
            self.crawler.engine.pause()
            if self.waits == "for answers":
                await self.answered.wait()
                self.answered.clear()
        self.ended.set()

    async def parse(self, response):
        if self.waits == "for nothing":
            await self.ended.wait()
        self.crawler.engine.unpause()
        self.answered.set()
"""


@pytest.mark.parametrize("settings", [{}, {"DOWNLOAD_DELAY": 0.01}], ids=["no delay", "delay"])
@pytest.mark.parametrize("waits", ["for answers", "for nothing"])
def test_a_start_that_pauses_the_engine_after_each_request(
    waits: str,
    settings: dict[str, Any],
    scheduler: dict[str, Any],
    site: ScriptedSite,
    tmp_path: Path,
) -> None:
    spider = tmp_path / "pausing.py"
    spider.write_text(PAUSING)
    settings = {**scheduler, **settings, "CONCURRENT_REQUESTS_PER_DOMAIN": 1}
    crawl = Crawl.finished(site.url, tmp_path, settings, spider=spider, arguments={"waits": waits})
    assert len(site.hits) == PAUSES
    assert "'finish_reason': 'finished'" in crawl.output

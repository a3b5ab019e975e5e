"""A job under CrashSafeScheduler downloads as under Scrapy's scheduler: real crawls of both."""

from pathlib import Path

import pytest

from tests.support.crawls import Crawl, spider_with, stat
from tests.support.sites import ScriptedSite

SAFE = "scrapy_bloom.CrashSafeScheduler"
SCRAPYS = "scrapy.core.scheduler.Scheduler"
schedulers = pytest.mark.parametrize("scheduler", [SCRAPYS, SAFE], ids=["Scrapy's", "ours"])

PROXIES, LINKS = 100, 300
# As rotating proxies do it: the downloader then limits each proxy, and not the host.
WITH_PROXIES = f"""
class Proxies:
    number = 0

    def process_request(self, request, spider=None):
        self.number += 1
        request.meta["download_slot"] = f"proxy {{self.number % {PROXIES}}}"

LinkSpider.custom_settings = {{"DOWNLOADER_MIDDLEWARES": {{Proxies: 700}}}}
"""


@schedulers
def test_as_many_downloads_at_once_through_proxies(scheduler: str, tmp_path: Path) -> None:
    site = ScriptedSite({"/": [tuple(f"/{number}" for number in range(LINKS))]})
    settings = {
        "SCHEDULER": scheduler,
        "JOBDIR": "job",
        "CONCURRENT_REQUESTS": PROXIES,
        "CONCURRENT_REQUESTS_PER_DOMAIN": 2,
    }
    spider = spider_with(tmp_path, WITH_PROXIES)
    crawl = Crawl.held(site, 1, tmp_path, settings, spider=spider)
    crawl.wait_until(lambda: site.under_way == PROXIES)
    site.release()
    assert crawl.finish() == 0, crawl.output
    assert len(site.hits) == LINKS + 1
    site.end()


MOST, YIELDED = 16, 200
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
        if len(self.crawler.engine._slot.scheduler):
            self.crawler.stats.inc_value("false_alarms")

    def parse(self, response):
        self.answered += 1
"""


@schedulers
def test_a_lazy_start_yields_no_more_than_is_downloaded(scheduler: str, tmp_path: Path) -> None:
    spider = tmp_path / "lazy.py"
    spider.write_text(f"import scrapy\n{LAZY}")
    site = ScriptedSite({})
    site.delay = 0.02
    settings = {
        "SCHEDULER": scheduler,
        "JOBDIR": "job",
        "CONCURRENT_REQUESTS": MOST,
        "CONCURRENT_REQUESTS_PER_DOMAIN": 2,
    }
    crawl = Crawl.finished(site.url, tmp_path, settings, spider=spider)
    site.end()
    assert len(site.hits) == YIELDED
    assert stat(crawl, "false_alarms") == 0
    # Those in the downloader, and a few more: what it has got at once is still to be parsed.
    assert stat(crawl, "most_ahead") <= 3 * MOST

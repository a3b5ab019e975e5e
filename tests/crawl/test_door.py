"""Known duplicates are dropped where callbacks yield them: same crawls as with Scrapy's filter."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from scrapy.core.scheduler import Scheduler
from scrapy.spidermiddlewares.referer import RefererMiddleware

from scrapy_bloom.crawl.door import drop_known_duplicates
from tests.support import door_crawls
from tests.support.crawls import ROOT, Crawl, stat, with_modules
from tests.support.sites import LIMIT

# Everything goes the usual way, because somebody of the project would notice that it does not.
NOT_EARLY = {
    "extension ListensToScheduled",
    "extension ListensToDropped",
    "extension LateListener",
    "subclass of OffsiteMiddleware",
    "subclass of the scheduler",
    "subclass with request_seen",
}
if hasattr(RefererMiddleware, "request_scheduled"):  # until Scrapy 2.15
    # It sets the Referer only then, which a project's fingerprinter may read.
    NOT_EARLY.add("fingerprinter reads the Referer")
AFTER_MIDDLEWARES = {
    "DUPEFILTER_DEBUG",
    "fingerprinter reads the Referer",
    "middleware Rewrites",
    "middleware Counts",
    "middleware StopsEarly",
    "subclass of DepthMiddleware",
    "other sites, after a middleware",
}


def test_the_same_crawl_as_with_scrapys_filter() -> None:
    # All crawls are in one process.
    done = subprocess.run(
        [*with_modules(ROOT), sys.executable, door_crawls.__file__],
        stdout=subprocess.PIPE,
        timeout=8 * LIMIT,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found.keys() == door_crawls.VARIANTS.keys()
    for name, both in found.items():
        scrapy, bloom = both["scrapy"], both["bloom"]
        for key in ("pages", "stats", "seen_by_others"):
            assert bloom[key] == scrapy[key], (name, key)
        assert bloom["stats"]["finish_reason"] == (
            "enough" if name == "CloseSpider in mid-generator" else "finished"
        ), name
        place = "after" if name in AFTER_MIDDLEWARES else "before"
        if name.startswith("subclass") and name.endswith(("scheduler", "request_seen")):
            place = None
        assert bloom["place"] == place, name
        dropped = scrapy["asked"] - bloom["asked"]
        if name in NOT_EARLY:
            assert dropped == 0, name
        elif name != "CloseSpider in mid-generator":  # nothing is known
            assert dropped > 0, name


MANY = """
import scrapy
from scrapy.utils.reactor import CallLaterOnce

class ManySpider(scrapy.Spider):
    name = "many"
    url, turns = None, 0

    async def start(self):
        self.loop = CallLaterOnce(self.loop_runs)
        self.loop.schedule()
        yield scrapy.Request("data:,known", self.parse_known)

    def loop_runs(self):
        self.turns += 1
        self.loop.schedule()

    def parse_known(self, response):
        yield scrapy.Request("data:,many", self.parse_many)

    def parse_many(self, response):
        before = self.turns
        for _ in range(20_000):
            yield scrapy.Request("data:,known")
        self.crawler.stats.set_value("turns", self.turns - before)

    def closed(self, reason):
        self.loop.cancel()
"""


def test_the_event_loop_runs_between_known_links(tmp_path: Path) -> None:
    spider = tmp_path / "many.py"
    spider.write_text(MANY)
    crawl = Crawl.finished("", tmp_path, spider=spider)
    assert stat(crawl, "dupefilter/filtered") == 20_000
    assert stat(crawl, "turns") >= 3


def test_a_version_of_scrapy_without_the_hook(caplog: pytest.LogCaptureFixture) -> None:
    """The crawl does without, and a line of the log says so."""
    engine = SimpleNamespace(
        scheduler_cls=Scheduler, scraper=SimpleNamespace(spidermw=SimpleNamespace(middlewares=()))
    )
    nobody = SimpleNamespace(sender=object())
    crawler = SimpleNamespace(
        engine=engine, request_fingerprinter=None, spider=None, signals=nobody
    )
    with caplog.at_level(logging.DEBUG):
        drop_known_duplicates(crawler, SimpleNamespace(debug=False))
    (line,) = caplog.messages
    assert line.startswith("Known duplicates are not dropped early: This version of Scrapy")
    assert "handle_spider_output_async" in line

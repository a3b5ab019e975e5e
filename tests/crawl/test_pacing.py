"""The event loop runs while a spider yields many requests: real crawls."""

from pathlib import Path

import pytest

from tests.support.crawls import LOOPS, Crawl, stat

SAFE = {"JOBDIR": "job", "SCHEDULER": "scrapy_bloom.CrashSafeScheduler"}
NUMBER = 150  # of requests that are yielded
MOST_AT_ONCE = 100  # of them by two callbacks, while the event loop does not run

# What is yielded depends on `url`. Nothing is downloaded.
SPIDER = f"""
import scrapy
from scrapy.utils.reactor import CallLaterOnce


class ManySpider(scrapy.Spider):
    name = "many"
    at_once = most_at_once = 0
    custom_settings = {{"RETRY_ENABLED": False}}

    async def start(self):
        self.loop = CallLaterOnce(self.loop_runs)
        self.loop.schedule()
        if self.url == "start":
            for request in self.many("s"):
                yield request
        elif self.url == "errback":
            yield scrapy.Request("unknown://x", errback=self.parse_failure)
        else:
            for name in "ab":  # both at a time
                yield scrapy.Request(f"data:,{{name}}", getattr(self, f"parse_{{self.url}}"))

    def loop_runs(self):
        self.at_once = 0
        self.loop.schedule()

    def many(self, name):
        for number in range({NUMBER}):
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            yield scrapy.Request(f"data:,{{name}}{{number}}", self.parse_one)

    def parse_plain(self, response):
        yield from self.many(response.text)

    async def parse_async(self, response):
        for request in self.many(response.text):
            yield request

    def parse_failing(self, response):
        for number, request in enumerate(self.many(response.text)):
            if number == 100:
                raise ValueError("in mid-output")
            yield request

    def parse_items(self, response):
        for number in range({NUMBER}):
            yield {{"text": f"{{response.text}}{{number:03}}"}}

    def parse_failure(self, failure):
        return self.many("f") if failure.value else None

    def parse_one(self, response):
        self.crawler.stats.inc_value("parsed")

    def closed(self, reason):
        self.loop.cancel()
        self.crawler.stats.set_value("most_at_once", self.most_at_once)
"""


def crawl(directory: Path, output: str, code: str = SPIDER, **settings: object) -> Crawl:
    spider = directory / "many.py"
    spider.write_text(code)
    run = Crawl.finished(output, directory, {**SAFE, **settings}, spider=spider)
    assert "'finish_reason': 'finished'" in run.output
    return run


# Each kind of output, and each event loop.
@pytest.mark.parametrize(
    ("output", "loop"),
    [
        *(("start", {}), ("plain", {}), ("errback", {})),
        *(pytest.param("async", *loop.values, id=loop.id, marks=loop.marks) for loop in LOOPS),
    ],
)
def test_the_event_loop_runs_meanwhile(output: str, loop: dict, tmp_path: Path) -> None:
    run = crawl(tmp_path, output, **loop)
    times = 2 if output in {"plain", "async"} else 1
    assert stat(run, "parsed") == times * NUMBER
    assert 0 < stat(run, "most_at_once") <= MOST_AT_ONCE
    assert not [line for line in run.lines("ERROR") if "unknown://x" not in line]


def test_an_exception_in_mid_output_is_the_spiders(tmp_path: Path) -> None:
    run = crawl(tmp_path, "failing")
    assert stat(run, "parsed") == 2 * 100
    assert stat(run, "spider_exceptions/ValueError") == 2
    assert len(run.lines("ERROR")) == 2
    assert run.output.count("\nValueError: in mid-output") == 2


def test_the_order_of_items_stays(tmp_path: Path) -> None:
    run = crawl(tmp_path, "items", FEEDS=f'{{"{tmp_path}/items.csv": {{"format": "csv"}}}}')
    items = (tmp_path / "items.csv").read_text().split()[1:]
    for name in "ab":
        assert [item for item in items if item[0] == name] == [
            f"{name}{number:03}" for number in range(NUMBER)
        ]
    assert not run.lines("ERROR")

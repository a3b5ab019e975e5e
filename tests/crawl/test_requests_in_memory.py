"""Only the request that led to one that cannot be serialized waits for it: real crawls."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scrapy_bloom.job.jobdir import FILE
from tests.support.crawls import Crawl, spider_with, stat
from tests.support.request_queues import counts_in
from tests.support.sites import ScriptedSite
from tests.support.workspace import in_redis

LISTS, PRODUCTS = 20, 10  # list pages, and products of each
PAGES = LISTS * (1 + PRODUCTS)
MOST_PAUSED, MOST_KILLED = 20, 60  # pages that are crawled again
SAFE = {
    "SCHEDULER": "scrapy_bloom.CrashSafeScheduler",
    "JOBDIR": "job",
    "CONCURRENT_REQUESTS": 8,
}
# Each list page leads to the next one, and to its products, whose callback cannot be serialized.
CHAIN = """
def parse(self, response):
    for link in self.extractor.extract_links(response):
        if "/list/" in link.url:
            yield scrapy.Request(link.url)
        else:
            yield scrapy.Request(link.url, lambda response: self.parse_product(response))

def parse_product(self, response):
    yield {"url": response.url}

LinkSpider.parse = parse
LinkSpider.parse_product = parse_product
"""
# A callback repeats its own request, with the same object, and goes on for a while.
REPEATS = """
import asyncio

async def start(self):
    yield scrapy.Request(self.start_urls[0], lambda response: self.parse_twice(response))

async def parse_twice(self, response):
    self.repeats = getattr(self, "repeats", 0) + 1
    if self.repeats < 3:
        response.request.dont_filter = True
        yield response.request
    for _ in range(20):
        await asyncio.sleep(0.01)
    for link in self.extractor.extract_links(response):
        yield scrapy.Request(link.url, self.parse_page)

def parse_page(self, response):
    pass

LinkSpider.start = start
LinkSpider.parse_twice = parse_twice
LinkSpider.parse_page = parse_page
"""


@pytest.fixture
def chain() -> Iterator[ScriptedSite]:
    answers: dict[str, list] = {"/": [("/list/0",)]}
    for number in range(LISTS):
        products = tuple(f"/product/{number}-{each_number}" for each_number in range(PRODUCTS))
        following = (f"/list/{number + 1}",) if number + 1 < LISTS else ()
        answers[f"/list/{number}"] = [(*following, *products)]
    site = ScriptedSite(answers)
    yield site
    site.end()


def repeated(site: ScriptedSite) -> int:
    """Return how many pages were crawled again; the start page is crawled by each run."""
    assert len(site.hits) == 1 + PAGES
    return site.total() - site.hits["/"] - PAGES


@pytest.mark.parametrize(
    ("end", "most"), [(Crawl.interrupt, MOST_PAUSED), (Crawl.kill, MOST_KILLED)]
)
def test_a_pause_or_a_kill_repeats_few_pages(
    end: Callable[[Crawl], object], most: int, chain: ScriptedSite, tmp_path: Path
) -> None:
    spider = spider_with(tmp_path, CHAIN)
    for answers in (30, 60, 90):
        end(Crawl.held(chain, answers, tmp_path, SAFE, spider=spider))
    chain.release()
    crawl = Crawl.finished(chain.url, tmp_path, SAFE, spider=spider)
    assert repeated(chain) <= 3 * most
    (line,) = crawl.our_lines("WARNING")
    assert "Unable to serialize request" in line
    assert stat(crawl, "scheduler/unserializable")
    assert stat(crawl, "scheduler/enqueued/memory")
    assert counts_in(tmp_path / "job" / FILE) == (0, 0)


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_request_object_that_is_in_flight_twice(
    chain: ScriptedSite, tmp_path: Path, *, is_shared: bool
) -> None:
    spider = spider_with(tmp_path, REPEATS)
    settings = {**SAFE, "DOWNLOAD_DELAY": 0}
    if is_shared:
        settings |= {"JOBDIR": None, **in_redis(str(tmp_path))}
    crawl = Crawl.finished(chain.url, tmp_path, settings, spider=spider)
    assert chain.hits == {"/": 3, "/list/0": 1}
    assert "'finish_reason': 'finished'" in crawl.output
    again = Crawl.finished(chain.url, tmp_path, settings, spider=spider)
    assert "in flight when" not in again.output
    assert chain.hits["/list/0"] == 1

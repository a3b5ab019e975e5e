"""Requests that are filtered within their run only, where the filter outlives its runs."""

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scrapy import Request
from scrapy.core.scheduler import Scheduler
from scrapy.utils.request import fingerprint
from test_dupefilter import bloom_stats, end, made, opened

from scrapy_bloom.crawl.outcomes import Outcome
from tests.support.cli import bloom
from tests.support.clock import Clock
from tests.support.crawls import Crawl
from tests.support.sites import ScriptedSite
from tests.support.workspace import outliving

pytestmark = pytest.mark.usefixtures("reactor")

SITEMAP = """
from urllib.parse import urlsplit
from scrapy.spiders import SitemapSpider

class Shop(SitemapSpider):
    name = "shop"

    def __init__(self, url, **kwargs):
        super().__init__(**kwargs)
        self.sitemap_urls = [url]

    def parse(self, response):
        # Copied meta: this is no start request, though its meta says so.
        yield response.follow("/article/shared", self.done, meta=response.meta)
        yield {"page": urlsplit(response.url).path}

    def done(self, response):
        yield {"page": urlsplit(response.url).path}
"""
LISTS = """
import scrapy
from scrapy.linkextractors import LinkExtractor
from scrapy.spiders import CrawlSpider, Rule

class Shop(CrawlSpider):
    name = "shop"
    rules = [
        Rule(LinkExtractor(allow="/list/"), process_request="each_run"),
        Rule(LinkExtractor(allow="/item/"), callback="parse_item"),
    ]

    def __init__(self, url, **kwargs):
        super().__init__(**kwargs)
        self.start_urls = [url]

    def each_run(self, request, response):
        return request.replace(meta={**request.meta, "bloom_filter": "run"})

    def parse_item(self, response):
        yield {"page": response.url}
"""


def sitemap(*paths: str) -> bytes:
    """A sitemap; `{}` is to be the address of the site."""
    locs = "".join(f"<url><loc>{{0}}{path}</loc></url>" for path in paths)
    xmlns = "http://www.sitemaps.org/schemas/sitemap/0.9"
    return f'<?xml version="1.0"?><urlset xmlns="{xmlns}">{locs}</urlset>'.encode()


@pytest.fixture
def site() -> Iterator[ScriptedSite]:
    with ScriptedSite({}) as new:
        yield new


def night(site: ScriptedSite, path: Path, spider: str, **settings: Any) -> Crawl:
    """One more run, which ends well."""
    file = path / "spider.py"
    file.write_text(spider)
    site.forget()
    start = "sitemap.xml" if spider is SITEMAP else "list/0"
    crawl = Crawl.finished(f"{site.url}{start}", path, settings, spider=file)
    assert "'finish_reason': 'finished'" in crawl.output
    return crawl


@pytest.mark.parametrize("kind", ["file", "redis", "crawled"])
def test_start_requests_are_crawled_by_each_run(
    kind: str, site: ScriptedSite, tmp_path: Path
) -> None:
    settings = outliving(kind, tmp_path)

    def offer(*paths: str) -> None:
        # The start request is redirected: its target is one, too.
        site.answers["/sitemap.xml"] = ["/today.xml"]
        site.answers["/today.xml"] = [sitemap(*paths).replace(b"{0}", site.url[:-1].encode())]

    offer("/article/1", "/article/2")
    crawl = night(site, tmp_path, SITEMAP, **settings)
    pages = {"/sitemap.xml", "/today.xml", "/article/1", "/article/2", "/article/shared"}
    assert site.hits == dict.fromkeys(pages, 1)
    crawl = night(site, tmp_path, SITEMAP, **settings)
    assert site.hits == {"/sitemap.xml": 1, "/today.xml": 1}
    assert not crawl.our_lines("WARNING")  # start requests lead to what is new
    offer("/article/1", "/article/2", "/article/3")
    night(site, tmp_path, SITEMAP, **settings)
    assert site.hits == {"/sitemap.xml": 1, "/today.xml": 1, "/article/3": 1}


COPIES = """
import scrapy

class Shop(scrapy.Spider):
    name = "shop"
    custom_settings = {"RETRY_ENABLED": False}

    def __init__(self, url, **kwargs):
        super().__init__(**kwargs)
        self.url = url

    async def start(self):
        yield scrapy.Request(self.url, self.parse, errback=self.failed)
        yield scrapy.Request(self.url + "/gone", self.parse, errback=self.failed)

    def crawl_copy(self, path, meta):
        request = scrapy.Request(self.url.replace("/list/0", path), self.done, meta=meta)
        self.crawler.engine.crawl(request)

    def parse(self, response):  # no generator: called before its middlewares see the output
        self.crawl_copy("/item/callback", response.meta)
        return self.later(response)

    def later(self, response):
        self.crawl_copy("/item/generator", response.meta)
        yield scrapy.Request(response.urljoin("/item/yielded"), self.done, meta=response.meta)

    def failed(self, failure):
        self.crawl_copy("/item/errback", failure.request.meta)
        return [scrapy.Request(self.url + "/yielded", self.done, meta=failure.request.meta)]

    def done(self, response):
        pass
"""


@pytest.mark.parametrize("kind", ["file", "crawled"])
def test_a_request_with_the_meta_of_a_start_request_is_none(
    kind: str, site: ScriptedSite, tmp_path: Path
) -> None:
    site.answers = {"/list/0": ["/list/today"], "/list/0/gone": [500]}
    settings = outliving(kind, tmp_path)
    starts = {"/list/0", "/list/today", "/list/0/gone"}
    copies = {f"/item/{name}" for name in ("callback", "generator", "yielded", "errback")}
    for expected in ({*starts, *copies, "/list/0/yielded"}, starts):
        night(site, tmp_path, COPIES, **settings)
        assert site.hits == dict.fromkeys(expected, 1)


INLINE = """
import scrapy
from scrapy.utils.defer import maybe_deferred_to_future

class Shop(scrapy.Spider):
    name = "shop"

    def __init__(self, url, **kwargs):
        super().__init__(**kwargs)
        self.start_urls = [url]

    async def parse(self, response):
        inline = scrapy.Request(response.urljoin("/item/inline"))
        found = await maybe_deferred_to_future(self.crawler.engine.download(inline))
        yield response.follow("/item/next", self.done, meta=found.meta)

    def done(self, response):
        pass
"""


def test_a_page_that_a_callback_downloads_itself_is_not_recorded(
    site: ScriptedSite, tmp_path: Path
) -> None:
    """Although a request that was crawled has a copy of its meta."""
    settings = outliving("crawled", tmp_path)
    night(site, tmp_path, INLINE, **settings)
    assert site.hits == dict.fromkeys(("/list/0", "/item/inline", "/item/next"), 1)
    site.answers["/list/0"] = [("/item/inline", "/item/next")]
    night(site, tmp_path, LISTS, **settings)
    assert site.hits == dict.fromkeys(("/list/0", "/item/inline"), 1)


def test_a_resumed_job_does_not_start_again(site: ScriptedSite, tmp_path: Path) -> None:
    """As with Scrapy's own filter; but this one says so."""
    site.answers["/sitemap.xml"] = [sitemap("/article/1").replace(b"{0}", site.url[:-1].encode())]
    settings = {"JOBDIR": "job", "BLOOM_DIR": "kept"}
    crawl = night(site, tmp_path, SITEMAP, **settings)
    assert not crawl.our_lines("WARNING")
    crawl = night(site, tmp_path, SITEMAP, **settings)
    assert not crawl.lines("ERROR")
    assert not site.hits
    (warning,) = crawl.our_lines("WARNING")
    assert "Nothing new was crawled: 1 request was filtered, because" in warning
    assert 'meta={"bloom_filter": "run"}' in warning


@pytest.mark.parametrize("kind", ["redis", "crash-safe"])
def test_list_pages_that_link_to_each_other_are_crawled_once_a_run(
    kind: str, site: ScriptedSite, tmp_path: Path
) -> None:
    lists = tuple(f"/list/{number}" for number in range(8))
    for number, name in enumerate(lists):
        site.answers[name] = [(*lists, f"/item/{number}", "/item/shared")]
    settings = outliving(kind, tmp_path)
    night(site, tmp_path, LISTS, **settings)
    # The start URL is asked for without the filter.
    assert all(1 <= site.hits[name] <= 2 for name in lists[:1])
    assert all(site.hits[name] == 1 for name in lists[1:])
    assert sum(site.hits[page] for page in site.hits if "item" in page) == 9
    site.answers["/list/5"] = [(*lists, "/item/new")]
    crawl = night(site, tmp_path, LISTS, **settings)
    assert all(site.hits[name] == 1 for name in lists[1:])
    assert [page for page in site.hits if "item" in page] == ["/item/new"]
    assert not crawl.our_lines("WARNING")


def test_a_shared_queue_is_removed_before_each_night(site: ScriptedSite, tmp_path: Path) -> None:
    site.answers["/list/0"] = [("/list/1", "/item/1")]
    site.answers["/list/1"] = [("/list/0", "/item/2")]
    scheduler = "scrapy_bloom.CrashSafeScheduler"
    settings = {**outliving("redis", tmp_path), "SCHEDULER": scheduler}
    place = (settings["BLOOM_REDIS_URL"], "--key", os.fspath(tmp_path))
    lists = {"/list/0": 2, "/list/1": 1}  # a start request does not count as scheduled
    night(site, tmp_path, LISTS, **settings)
    assert site.hits == {**lists, "/item/1": 1, "/item/2": 1}
    site.answers["/list/1"] = [("/list/0", "/item/2", "/item/3")]
    assert bloom("reset", *place, "--queue", "--yes", cwd=tmp_path).status == 0
    night(site, tmp_path, LISTS, **settings)
    assert site.hits == {**lists, "/item/3": 1}


def test_a_run_that_crawls_nothing_says_so(site: ScriptedSite, tmp_path: Path) -> None:
    lists = LISTS.replace(' "bloom_filter": "run"', "")
    site.answers["/list/0"] = [("/list/1", "/item/1")]
    site.answers["/list/1"] = [("/list/0", "/item/2")]
    for expected in ([], ["2"]):
        crawl = night(site, tmp_path, lists, BLOOM_DIR="kept")
        lines = [line for line in crawl.our_lines("INFO") if "Nothing new was crawled" in line]
        assert [line.split("crawled: ")[1].split()[0] for line in lines] == expected
        assert not crawl.our_lines("WARNING")  # its start page was crawled


def test_what_each_meta_means(tmp_path: Path) -> None:
    pages = [f"https://example.com/{number}" for number in range(9)]
    with opened(BLOOM_DIR=tmp_path / "kept") as scheduler:
        assert scheduler.enqueue_request(Request(pages[0]))
        size = bloom_stats(scheduler)["bloom/bytes"]
    with opened(BLOOM_DIR=tmp_path / "kept") as scheduler:

        def passes(page: str, **meta: Any) -> bool:
            return bool(scheduler.enqueue_request(Request(page, meta=meta)))

        assert not passes(pages[0])
        assert not passes(pages[0], bloom_filter="Run")  # true as any other text
        assert passes(pages[0], bloom_filter="run")
        assert not passes(pages[0], bloom_filter="run")
        assert passes(pages[0], bloom_filter=False)
        # What this run has scheduled in any way.
        assert passes(pages[1])
        assert not passes(pages[1], bloom_filter="run")
        assert passes(pages[2], bloom_filter=0)
        assert not passes(pages[2], bloom_filter="run")
        # It is recorded, unless it says otherwise.
        assert passes(pages[3], bloom_filter="run")
        assert not passes(pages[3])
        assert passes(pages[4], bloom_filter="run", bloom_record=False)
        assert not passes(pages[4], bloom_filter="run", bloom_record=False)
        assert passes(pages[4])
        # A start request asks by itself; what was made of its response does not.
        assert passes(pages[5], is_start_request=True)
        assert not passes(pages[5], is_start_request=True)
        assert not passes(pages[5])
    with opened(BLOOM_DIR=tmp_path / "kept") as scheduler:
        assert not passes(pages[5], is_start_request=True, bloom_filter=True)
        assert not passes(pages[5], is_start_request=True, depth=1)
        assert "bloom/error_rate" in bloom_stats(scheduler)
        assert passes(pages[5], is_start_request=True)
    assert bloom_stats(scheduler)["bloom/bytes"] > size  # what is in memory counts
    assert bloom_stats(scheduler)["bloom/count"] == 6


WINDOW = 1000.0
STEPS = st.lists(
    st.tuples(st.integers(0, 30), st.sampled_from([0.0, 0.1, 0.3, 1.0, 1.3, 5.0]), st.booleans()),
    max_size=40,
)


def timed(clock: Clock, **settings: Any) -> Scheduler:
    """A scheduler with our filter, with a window by this clock."""
    scheduler = made(BLOOM_WINDOW_SECS=WINDOW, **settings)
    backend = scheduler.df.backend
    if "BLOOM_REDIS_URL" in settings:
        backend.filter._clock = clock
    elif "BLOOM_RECORD_ON" in settings:
        backend.stored._clock = backend._volatile._clock = clock
    else:
        backend._clock = clock
    return scheduler


@pytest.mark.parametrize("kind", ["file", "crawled"])
def test_a_forgotten_request_counts_for_a_window_from_its_next_crawl_on(
    kind: str, tmp_path: Path
) -> None:
    clock = Clock(time.time() + 1)
    page, other = Request("https://example.com/page"), Request("https://example.com/other")

    def crawled_at(windows: float, *, forget: bool = False) -> list[Request]:
        clock.now += windows * WINDOW
        scheduler = timed(clock, **{**outliving(kind, tmp_path), "BLOOM_DIR": tmp_path})
        scheduler.open(scheduler.crawler.spider)
        new = [each for each in (page, other) if scheduler.enqueue_request(each)]
        if kind == "crawled":
            for each in new:
                end(scheduler, each, Outcome.CRAWLED)
        if forget:
            scheduler.df.backend.forgotten.add([fingerprint(page)])
        scheduler.close("finished")
        return new

    assert crawled_at(0.0, forget=True) == [page, other]
    assert crawled_at(0.8) == [page]
    assert crawled_at(0.8) == [other]
    assert crawled_at(1.0) == [page]


@pytest.mark.parametrize("kind", ["file", "redis", "no mirror", "crawled"])
@settings(max_examples=60)
@given(steps=STEPS)
def test_what_a_run_recorded_never_expires_in_it(
    kind: str, steps: list[tuple[int, float, bool]]
) -> None:
    """However long it sleeps between two requests, in windows, and however often."""
    with tempfile.TemporaryDirectory() as directory:
        wanted = outliving("redis" if kind == "no mirror" else kind, Path(directory))
        if "BLOOM_DIR" in wanted:
            wanted["BLOOM_DIR"] = directory
        wanted["BLOOM_REDIS_MIRROR"] = kind != "no mirror"
        clock = Clock(time.time() + 1)
        scheduler = timed(clock, BLOOM_EXPECTED_REQUESTS=100, **wanted)
        scheduler.open(scheduler.crawler.spider)
        scheduled: set[int] = set()
        for number, windows, is_crawled in steps:
            clock.now += windows * WINDOW
            page = Request(f"https://example.com/{number}")
            assert scheduler.enqueue_request(page) == (number not in scheduled)
            scheduled.add(number)
            if kind == "crawled" and is_crawled:
                end(scheduler, page, Outcome.CRAWLED)
        scheduler.close("finished")

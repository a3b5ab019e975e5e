"""Requests that are crawled once per run: start requests, and those that ask for it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scrapy import Request
from test_dupefilter import bloom_stats, opened

from tests.support.crawls import Crawl
from tests.support.sites import ScriptedSite
from tests.support.workspace import in_redis

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


def offer(site: ScriptedSite, *paths: str) -> None:
    # The start request is redirected: its target is one, too.
    site.answers["/sitemap.xml"] = ["/today.xml"]
    site.answers["/today.xml"] = [sitemap(*paths).replace(b"{0}", site.url[:-1].encode())]


def test_start_requests_are_crawled_by_each_run(site: ScriptedSite, tmp_path: Path) -> None:
    settings = in_redis(tmp_path.as_posix())
    offer(site, "/article/1", "/article/2")
    crawl = night(site, tmp_path, SITEMAP, **settings)
    pages = {"/sitemap.xml", "/today.xml", "/article/1", "/article/2", "/article/shared"}
    assert site.hits == dict.fromkeys(pages, 1)
    crawl = night(site, tmp_path, SITEMAP, **settings)
    assert site.hits == {"/sitemap.xml": 1, "/today.xml": 1}
    assert not crawl.our_lines("WARNING")  # start requests lead to what is new
    offer(site, "/article/1", "/article/2", "/article/3")
    night(site, tmp_path, SITEMAP, **settings)
    assert site.hits == {"/sitemap.xml": 1, "/today.xml": 1, "/article/3": 1}


SEES_META = """
import scrapy

class Shop(scrapy.Spider):
    name = "shop"

    async def start(self):
        yield scrapy.Request(self.url, errback=self.failed)
        yield scrapy.Request(self.url + "/gone", errback=self.failed)

    def parse(self, response):
        self.logger.info("meta %s", sorted({*response.meta, *response.request.meta}))

    def failed(self, failure):
        self.logger.info("meta %s", sorted(failure.request.meta))
"""


def test_callbacks_and_errbacks_do_not_see_the_mark(site: ScriptedSite, tmp_path: Path) -> None:
    site.answers = {"/list/0": ["/list/today"], "/list/0/gone": [500, 500, 500]}
    crawl = night(site, tmp_path, SEES_META, **in_redis(tmp_path.as_posix()))
    lines = [line for line in crawl.lines("INFO") if "meta [" in line]
    assert len(lines) == 2
    assert all("retry_times" in line or "redirect_times" in line for line in lines)
    assert "bloom_" not in "".join(lines)


def test_a_resumed_job_does_not_start_again(site: ScriptedSite, tmp_path: Path) -> None:
    """As with Scrapy's own filter; but this one says so."""
    site.answers["/sitemap.xml"] = [sitemap("/article/1").replace(b"{0}", site.url[:-1].encode())]
    crawl = night(site, tmp_path, SITEMAP, JOBDIR="job")
    assert not crawl.our_lines("WARNING")
    crawl = night(site, tmp_path, SITEMAP, JOBDIR="job")
    assert not crawl.lines("ERROR")
    assert not site.hits
    (warning,) = crawl.our_lines("WARNING")
    assert (
        "Nothing new was crawled: 1 request was a known duplicate, recorded earlier in" in warning
    )
    assert 'meta={"bloom_filter": "run"}' in warning


PLACES = {
    "job": {"JOBDIR": "job"},
    "crash-safe": {"JOBDIR": "job", "SCHEDULER": "scrapy_bloom.CrashSafeScheduler"},
}


@pytest.mark.parametrize("kind", ["redis", "job"])
def test_list_pages_that_link_to_each_other_are_crawled_once_a_run(
    kind: str, site: ScriptedSite, tmp_path: Path
) -> None:
    lists = tuple(f"/list/{number}" for number in range(8))
    for number, name in enumerate(lists):
        site.answers[name] = [(*lists, f"/item/{number}", "/item/shared")]
    settings = in_redis(tmp_path.as_posix()) if kind == "redis" else PLACES[kind]
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


def test_a_run_that_crawls_nothing_says_so(site: ScriptedSite, tmp_path: Path) -> None:
    lists = LISTS.replace(' "bloom_filter": "run"', "")
    site.answers["/list/0"] = [("/list/1", "/item/1")]
    site.answers["/list/1"] = [("/list/0", "/item/2")]
    for expected in ([], ["2"]):
        crawl = night(site, tmp_path, lists, JOBDIR="job")
        lines = [line for line in crawl.our_lines("INFO") if "Nothing new was crawled" in line]
        assert [line.split("crawled: ")[1].split()[0] for line in lines] == expected
        assert not crawl.our_lines("WARNING")  # its start page was crawled


@pytest.mark.parametrize("kind", ["job", "crash-safe"])
def test_a_resumed_crawl_of_known_pages_has_crawled_something(
    kind: str, site: ScriptedSite, tmp_path: Path
) -> None:
    """Each page that is pending at the pause links to nothing but pages that are recorded."""
    lists = tuple(f"/list/{number}" for number in range(40))
    site.answers.update((name, [lists]) for name in lists)
    (tmp_path / "spider.py").write_text(LISTS.replace(' "bloom_filter": "run"', ""))
    paused = PLACES[kind] | {"CLOSESPIDER_PAGECOUNT": 5}
    Crawl.finished(f"{site.url}list/0", tmp_path, paused, spider=tmp_path / "spider.py")
    assert site.hits.keys() < set(lists)
    resumed = Crawl.finished(
        f"{site.url}list/0", tmp_path, PLACES[kind], spider=tmp_path / "spider.py"
    )
    assert site.hits.keys() == set(lists)
    assert "0 new, 40 in all" in resumed.output
    assert "Nothing new was crawled" not in resumed.output


def test_what_each_meta_means(tmp_path: Path) -> None:
    pages = [f"https://example.com/{number}" for number in range(9)]
    with opened(JOBDIR=tmp_path) as scheduler:
        assert scheduler.enqueue_request(Request(pages[0]))
    with opened(JOBDIR=tmp_path) as scheduler:

        def passes(page: str, **meta: Any) -> bool:
            return bool(scheduler.enqueue_request(Request(page, meta=meta)))

        assert not passes(pages[0])
        assert not passes(pages[0], bloom_filter="Run")  # true as any other text
        assert passes(pages[0], bloom_filter="run")
        assert not passes(pages[0], bloom_filter="run")
        assert passes(pages[0], bloom_filter=False)
        # Only requests that ask for it count for the run.
        assert passes(pages[1])
        assert passes(pages[1], bloom_filter="run")
        assert not passes(pages[1], bloom_filter="run")
        # It is recorded, unless it says otherwise.
        assert passes(pages[3], bloom_filter="run")
        assert not passes(pages[3])
        assert passes(pages[4], bloom_filter="run", bloom_record=False)
        assert not passes(pages[4], bloom_filter="run", bloom_record=False)
        assert passes(pages[4])
    # Pages 0, 1 and 3 once for the run, and pages 1 and 4.
    assert bloom_stats(scheduler)["bloom/added"] == 5

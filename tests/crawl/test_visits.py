"""A page that failed, or was redirected to one, is crawled when the site is well: real crawls."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scrapy_bloom.queues.store import State
from tests.support import servers
from tests.support.ill_nights import (
    OrderedSite,
    counts,
    job_of,
    recover,
    total,
    use_server,
)
from tests.support.proxies import DroppingProxy

PAGES = [f"/p{number}" for number in range(100)]


@pytest.fixture
def site() -> Iterator[OrderedSite]:
    with OrderedSite() as new:
        yield new


@pytest.fixture(params=["JOBDIR", "Redis, 3 workers"])
def place(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# Redirects to one page that fails.


def test_redirects_while_replies_are_lost(site: OrderedSite, tmp_path: Path) -> None:
    pages = PAGES
    site.answers = {"/": [tuple(pages)], "/ill": [503]}
    site.answers |= {page: ["/ill"] for page in pages}
    site.answer_after("/ill", *pages)
    server = servers.shared("valkey")
    with DroppingProxy(server.port, 0.1, 7) as proxy:
        job = job_of("Redis, 3 workers", site, tmp_path, CONCURRENT_REQUESTS=4)
        use_server(job, server, proxy.port)
        crawls = job.crawl("ill")
        assert proxy.dropped
    # Each page has entered once, by whatever worker; and one redirect, in the place of its page.
    assert total(crawls, "scheduler/enqueued") == 1 + len(pages) + site.hits["/ill"]
    assert job.failed == set(pages)
    use_server(job, server)
    recover(job, pages)


# What fails is kept.


ERRBACK = """
parse_links = Shop.parse

class Middleware:
    async def process_spider_output(self, response, result):
        async for element in result:
            yield element

def parse(self, response):
    for request in parse_links(self, response):
        yield request.replace(errback=self.failed)

def failed(self, failure):
    yield scrapy.Request(self.url + "/known", errback=self.failed)

Shop.parse, Shop.failed = parse, failed
if IS_WRAPPED:
    Shop.custom_settings = {"SPIDER_MIDDLEWARES": {Middleware: 50}}
"""


@pytest.mark.parametrize(
    ("is_wrapped", "place"), [(False, "JOBDIR"), (True, "JOBDIR"), (False, "Redis, 3 workers")]
)
def test_an_errback_that_yields_a_duplicate(
    is_wrapped: bool, place: str, site: OrderedSite, tmp_path: Path
) -> None:
    site.answers = {"/": [("/known", "/p")], "/p": [503]}
    site.answer_after("/p", "/known")
    job = job_of(place, site, tmp_path, f"IS_WRAPPED = {is_wrapped}\n{ERRBACK}")
    crawls = job.crawl("ill")
    assert job.failed == {"/p"}
    assert total(crawls, "scheduler/failed") == 1
    recover(job, ["/p"])


IN_MEMORY = """
parse_links = Shop.parse

def parse(self, response):
    for request in parse_links(self, response):
        is_product = "product" in request.url
        yield request.replace(callback=lambda response: None) if is_product else request

Shop.parse = parse
"""


def test_a_request_in_memory_that_fails(place: str, site: OrderedSite, tmp_path: Path) -> None:
    """The page that led to it has failed with its reason, and is crawled again."""
    site.answers = {"/": [("/list",)], "/list": [("/product", "/product/2")]}
    site.answers["/product"] = [503]
    job = job_of(place, site, tmp_path, IN_MEMORY)
    crawls = job.crawl("ill")
    assert job.failed == {"/list"}
    assert "HTTP status 503" in job.listed(State.FAILED)["/list"].reason
    assert total(crawls, "scheduler/failed") == 1
    site.answers["/"], site.answers["/product"] = [()], [()]
    job.crawl("well")
    # A worker does not ask the server about a request that it keeps in memory.
    others = {"/product/2": 1} if job.is_shared else {}
    assert site.hits == dict.fromkeys(["/", "/list", "/product"], 1) | others
    assert not counts(job)


# Duplicate filters of a project.

RAISES_ONCE = """
from scrapy_bloom import BloomDupeFilter

class Subclass(BloomDupeFilter):
    def request_seen(self, request):
        if "/p" in request.url and not hasattr(self, "has_raised"):
            self.has_raised = True
            raise OSError("the database is locked")
        return super().request_seen(request)

Shop.custom_settings = {"DUPEFILTER_CLASS": Subclass}
"""
RAISES_IN_ENQUEUE = """
class Broken(scrapy.Request):
    def to_dict(self, *, spider=None):
        raise OSError("the database is locked")

parse_links = Shop.parse

def parse(self, response):
    for request in parse_links(self, response):
        yield request.replace(cls=Broken) if request.url.endswith("/p0") else request

Shop.parse = parse
"""


@pytest.mark.parametrize(
    ("code", "settings"),
    [(RAISES_ONCE, {"DUPEFILTER_CLASS": None}), (RAISES_IN_ENQUEUE, {})],
    ids=["request_seen", "enqueue"],
)
def test_an_error_while_a_request_enters(
    code: str, settings: dict[str, Any], place: str, site: OrderedSite, tmp_path: Path
) -> None:
    site.answers = {"/": [tuple(PAGES[:5])]}
    job = job_of(place, site, tmp_path, code, **settings)
    crawls = job.crawl("1")
    assert site.hits == dict.fromkeys(["/", *PAGES[:5]], 1)
    assert total(crawls, "bloom/errors") == 1
    assert any("the database is locked" in crawl.output for crawl in crawls)
    assert not counts(job)


FILTERS_BY_ITSELF = """
def parse(self, response):
    df = self.crawler.engine._slot.scheduler.df
    for link in response.css("a::attr(href)").getall():
        request = response.follow(link, dont_filter=True)
        if not df.request_seen(request):
            yield request

Shop.parse = parse
"""


def test_a_spider_that_filters_by_itself(place: str, site: OrderedSite, tmp_path: Path) -> None:
    pages = PAGES[:6]
    site.answers = {page: [tuple(pages)] for page in ["/", *pages]}
    # A crawl that went on for ever would end for another reason.
    job = job_of(place, site, tmp_path, FILTERS_BY_ITSELF, CLOSESPIDER_PAGECOUNT=200)
    job.crawl("1")
    assert site.hits.keys() == {"/", *pages}
    # Workers that find a page at the same time crawl it both.
    assert max(site.hits.values()) <= job.workers
    job.crawl("2")
    # A worker does not ask the server: its mirror lacks what other processes have recorded.
    assert site.hits.keys() == {"/", *(pages if job.is_shared else [])}
    assert max(site.hits.values()) <= job.workers


LETS_LISTS_PASS = """
from scrapy_bloom import BloomDupeFilter

class Subclass(BloomDupeFilter):
    def request_seen(self, request):
        return "/list" not in request.url and super().request_seen(request)

Shop.custom_settings = {"DUPEFILTER_CLASS": Subclass}
"""


def test_a_subclass_that_lets_known_requests_pass(
    place: str, site: OrderedSite, tmp_path: Path
) -> None:
    lists = [f"/list/{number}" for number in range(5)]
    site.answers = {"/": [tuple(lists)]}
    site.answers |= {page: [tuple(PAGES[:5])] for page in lists}
    job = job_of(place, site, tmp_path, LETS_LISTS_PASS, DUPEFILTER_CLASS=None)
    job.crawl("1")
    assert site.hits == dict.fromkeys(["/", *lists, *PAGES[:5]], 1)
    job.crawl("2")
    assert site.hits == dict.fromkeys(["/", *lists], 1)


# Hosts that cannot be reached.

# So many failures say that nothing can be reached, and no minute has to pass.
UNREACHABLE = """
from scrapy_bloom.crawl.scheduler import in_flight

in_flight.LEAST_SECS = 0.0
"""


# As with more links than Scrapy consumes before the first downloads end.
WAITING = """
import asyncio

class Shop(Shop):
    async def parse(self, response):
        for request in super().parse(response):
            yield request
        failed = lambda: self.crawler.stats.get_value("downloader/exception_count", 0)
        while failed() < NUMBER and self.settings["BLOOM_RUN"] != "well":
            await asyncio.sleep(0.01)
"""


def test_a_callback_that_waits_while_hosts_are_dead(site: OrderedSite, tmp_path: Path) -> None:
    """Its page has answered, although its request is not done yet."""
    port = servers.free_port()
    site.answers = {"/": [tuple(f"http://127.0.1.{n}:{port}/" for n in range(1, 221))]}
    job = job_of("JOBDIR", site, tmp_path, UNREACHABLE + WAITING.replace("NUMBER", "220"))
    job.crawl("1")
    assert counts(job) == {"failed": 220}


def test_many_dead_hosts(site: OrderedSite, tmp_path: Path) -> None:
    """They close no crawl in which others answer, neither in this night nor in the next."""
    port = servers.free_port()
    dead = [f"http://127.0.{1 + n // 250}.{1 + n % 250}:{port}/" for n in range(250)]
    live = PAGES
    site.answers = {"/": [(*dead, *live)]}
    job = job_of("JOBDIR", site, tmp_path, UNREACHABLE)
    job.crawl("1")
    assert site.hits == dict.fromkeys(["/", *live], 1)
    assert counts(job) == {"failed": len(dead)}
    pages = [f"/new/{number}" for number in range(20)]
    site.answers["/"] = [tuple(pages)]
    job.crawl("2")
    assert site.hits == dict.fromkeys(["/", *pages], 1)
    assert counts(job) == {"failed": len(dead)}


def test_a_network_that_is_lost(site: OrderedSite, tmp_path: Path) -> None:
    """What the crawl has not tried yet stays pending, even if a page answered long ago."""
    pages = [f"/p{number}" for number in range(400)]
    site.answers = {"/": [tuple(pages)]}
    site.answers |= {page: [None] for page in pages}
    job = job_of("Redis", site, tmp_path, UNREACHABLE + WAITING.replace("NUMBER", "150"))
    crawls = job.start("ill")
    job.finish(crawls, "bloom_unreachable")
    left = counts(job)
    assert 200 <= left["failed"] < 300
    assert left["failed"] + left["pending"] == len(pages)
    site.recover()
    job.crawl("well")
    assert site.hits == dict.fromkeys(["/", *pages], 1)
    assert not counts(job)

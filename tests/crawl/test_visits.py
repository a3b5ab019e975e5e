"""A page that failed, or was redirected to one, is crawled when the site is well: real crawls."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import servers
from tests.support.crawls import Crawl
from tests.support.ill_nights import (
    LINKS,
    PLACES,
    OrderedSite,
    clocked_job,
    counts,
    job_of,
    kept,
    listed,
    recover,
    total,
    use_server,
)
from tests.support.proxies import DroppingProxy

SHARED = ["Redis", "Redis, 3 workers"]
PAGES = [f"/p{number}" for number in range(100)]


@pytest.fixture
def site() -> Iterator[OrderedSite]:
    with OrderedSite() as new:
        yield new


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# Redirects to one page that fails.


@pytest.mark.parametrize("place", SHARED)
@pytest.mark.parametrize("rate", [0.03, 0.1])
def test_redirects_while_replies_are_lost(
    rate: float, place: str, site: OrderedSite, tmp_path: Path
) -> None:
    pages = [f"/p{number}" for number in range(200)]
    site.answers = {"/": [tuple(pages)], "/ill": [503]}
    site.answers |= {page: ["/ill"] for page in pages}
    site.answer_after("/ill", *pages)
    server = servers.shared("valkey")
    with DroppingProxy(server.port, rate, 7) as proxy:
        job = job_of(place, site, tmp_path, CONCURRENT_REQUESTS=4)
        use_server(job, server, proxy.port)
        crawls = job.crawl("ill")
        assert proxy.dropped
    # Each page has entered once, by whatever worker; and one redirect, in the place of its page.
    assert total(crawls, "scheduler/enqueued") == 1 + len(pages) + site.hits["/ill"]
    assert kept(job) == sorted(pages)
    use_server(job, server)
    recover(job, pages)


# Notes CPU seconds and memory of a crawl after some redirects.
MEASURED = """
import re, time
from pathlib import Path

class Measured:
    number = 0

    def process_response(self, request, response):
        self.number += response.status == 302
        if response.status == 302 and self.number in (100, 500, 1500, 1900):
            (kib,) = re.findall(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())
            with Path(__file__).with_name("measured").open("a") as file:
                file.write(f"{time.process_time()} {kib}\\n")
        return response

Shop.custom_settings = {"DOWNLOADER_MIDDLEWARES": {Measured: 900}}
"""


@pytest.mark.parametrize("place", ["JOBDIR", "Redis"])
@pytest.mark.parametrize("way", ["straight", "by other pages"])
def test_many_redirects_to_a_page_that_fails(
    way: str, place: str, site: OrderedSite, tmp_path: Path
) -> None:
    """What a waiting request costs does not depend on their number."""
    pages = {f"/p{number}" for number in range(2000)}
    site.answers = {"/": [tuple(sorted(pages))], "/ill": [503]}
    for number, page in enumerate(sorted(pages)):
        step = f"/step{number // 2}"  # two pages wait for it
        site.answers |= {page: ["/ill"]} if way == "straight" else {page: [step], step: ["/ill"]}
    site.answer_after("/ill", *pages)
    job = job_of(place, site, tmp_path, MEASURED)
    job.crawl("ill")
    lines = (tmp_path / "measured").read_text().splitlines()
    secs, kib = zip(*[map(float, line.split()) for line in lines], strict=True)
    assert secs[3] - secs[2] < 3 * (secs[1] - secs[0]), secs
    assert kib[3] - kib[1] < 8 * 1024, kib
    assert set(kept(job)) == pages
    assert sum(counts(job).values()) == len(pages)
    recover(job, pages)


# Redirects to pages that are not crawled yet.


@pytest.mark.parametrize("place", ["Redis, 3 workers", "JOBDIR"])
def test_pages_that_redirect_to_each_other(place: str, site: OrderedSite, tmp_path: Path) -> None:
    """Pages that are crawled in each run; the crawl ends, and the next one tries both again."""
    circle = {"/a": "/b", "/b": "/a"}
    site.answers = {"/": [tuple(circle)]}
    site.answers |= {page: [to] for page, to in circle.items()}
    site.after = dict.fromkeys(circle, lambda: site.asked >= circle.keys())
    once = {"meta": {"bloom_filter": "run"}}
    code = f"Shop.options = {dict.fromkeys(circle, once)}"
    job = job_of(place, site, tmp_path, code, CONCURRENT_REQUESTS=2)
    crawls = job.crawl("ill")
    lines = [line for each in crawls for line in each.our_lines("WARNING")]
    assert len([line for line in lines if "waits for it" in line]) == 1, lines
    assert kept(job) == sorted(circle)
    site.asked.clear()
    recover(job, circle)


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


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_an_errback_that_yields_a_duplicate(
    is_wrapped: bool, place: str, site: OrderedSite, tmp_path: Path
) -> None:
    site.answers = {"/": [("/known", "/p")], "/p": [503]}
    site.answer_after("/p", "/known")
    job = job_of(place, site, tmp_path, f"IS_WRAPPED = {is_wrapped}\n{ERRBACK}")
    crawls = job.crawl("ill")
    assert kept(job) == ["/p"]
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
    (row,) = listed(job)
    assert (row["path"], row["state"]) == ("/list", "failed")
    assert "HTTP status 503" in row["reason"]
    assert total(crawls, "scheduler/failed") == 1
    site.answers["/"], site.answers["/product"] = [()], [()]
    job.crawl("well")
    # A worker does not ask the server about a request that it keeps in memory.
    others = {"/product/2": 1} if job.is_shared else {}
    assert site.hits == dict.fromkeys(["/", "/list", "/product"], 1) | others
    assert not counts(job)


# What ends by an exception of Scrapy's own middlewares has failed; what is ignored has not.
IGNORED = """
import gzip
from scrapy.exceptions import IgnoreRequest

class Packed:
    def process_response(self, request, response):
        if "ignored-response" in request.url:
            raise IgnoreRequest
        if "bomb" not in request.url:
            return response
        body = gzip.compress(bytes(10**6))
        return response.replace(headers={"Content-Encoding": "gzip"}, body=body)

    def process_request(self, request):
        if "ignored-request" in request.url:
            raise IgnoreRequest

Shop.allowed_domains = ["127.0.0.1"]
Shop.custom_settings = {
    "DOWNLOADER_MIDDLEWARES": {Packed: 900},
    "DOWNLOAD_MAXSIZE": 100_000,
    "REDIRECT_MAX_TIMES": 3,
    "ROBOTSTXT_OBEY": True,
}
"""


def test_what_scrapys_middlewares_ignore(place: str, site: OrderedSite, tmp_path: Path) -> None:
    ignored = ["/ignored-request", "/ignored-response", "/robots", "/elsewhere"]
    site.answers = {"/": [("/chain", "/bomb", *ignored, "http://offsite.invalid/")]}
    site.answers["/robots.txt"] = [b"User-agent: *\nDisallow: /robots\n"]
    site.answers |= {"/chain": ["/chain/0"], "/elsewhere": ["http://offsite.invalid/2"]}
    site.answers |= {f"/chain/{number}": [f"/chain/{number + 1}"] for number in range(10)}
    job = job_of(place, site, tmp_path, IGNORED)
    crawls = job.crawl("ill")
    assert total(crawls, "scheduler/failed") == 2
    assert kept(job) == ["/bomb", "/chain"]
    job.write_spider(LINKS)
    recover(job, ["/bomb", "/chain"])


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
    assert any("the database is locked" in each.output for each in crawls)
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
    for night in ("2", "3"):
        job.crawl(night)
        assert site.hits == dict.fromkeys(["/", *lists], 1)


# Hosts that cannot be reached.

# So many failures say that nothing can be reached, and no minute has to pass.
UNREACHABLE = """
from scrapy_bloom.crawl.scheduler import reachability

reachability._LEAST_SECS = 0.0
"""


def test_many_dead_hosts(place: str, site: OrderedSite, tmp_path: Path) -> None:
    """They close no crawl in which others answer, neither in this night nor in the next."""
    port = servers.free_port()
    dead = [f"http://127.0.{1 + n // 250}.{1 + n % 250}:{port}/" for n in range(450)]
    live = [f"/p{number}" for number in range(300)]
    site.answers = {"/": [(*dead, *live)]}
    job = job_of(place, site, tmp_path, UNREACHABLE)
    job.crawl("1")
    assert site.hits == dict.fromkeys(["/", *live], 1)
    assert counts(job) == {"failed": len(dead)}
    pages = [f"/new/{number}" for number in range(100)]
    site.answers["/"] = [tuple(pages)]
    job.crawl("2")
    assert site.hits == dict.fromkeys(["/", *pages], 1)
    assert counts(job) == {"failed": len(dead)}


@pytest.mark.parametrize("place", ["JOBDIR", "Redis"])
def test_a_network_that_is_lost(place: str, site: OrderedSite, tmp_path: Path) -> None:
    """What the crawl has not tried yet stays pending."""
    pages = [f"/p{number}" for number in range(400)]
    site.answers = {"/": [tuple(pages)]}
    site.answers |= {page: [None] for page in pages}
    job = job_of(place, site, tmp_path, UNREACHABLE)
    crawls = job.start("ill")
    job.finish(crawls, "bloom_unreachable")
    left = counts(job)
    assert 200 <= left["failed"] < 300
    assert left["failed"] + left["pending"] == len(pages)
    site.recover()
    job.crawl("well")
    assert site.hits == dict.fromkeys(["/", *pages], 1)
    assert not counts(job)


# Pages that fail in many runs.


def is_logged(text: str, crawls: Collection[Crawl]) -> bool:
    return any(text in crawl.output for crawl in crawls)


def test_a_dead_page_that_is_crawled_after_all(
    place: str, site: OrderedSite, tmp_path: Path
) -> None:
    """When it is new again, because it has expired, it has no tries any more."""
    site.answers = {"/": [("/gone",)], "/gone": [503]}
    window = 4000.0
    with clocked_job(place, site, tmp_path, BLOOM_WINDOW_SECS=window) as (job, set_ahead):
        for night in range(1, 6):
            crawls = job.crawl(f"{night}")
            assert [(row["path"], row["tries"]) for row in listed(job)] == [("/gone", night)]
            assert is_logged("kept for the next run", crawls) == (night < 5)
            assert is_logged("is not tried again, because it has failed in 5 runs", crawls) == (
                night == 5
            )
        job.crawl("6")
        assert site.hits == {"/": 1}
        assert [row["path"] for row in listed(job, "--dead")] == ["/gone"]
        set_ahead(2 * window)
        site.answers["/gone"] = [()]
        job.crawl("7")
        assert site.hits["/gone"] == 1
        assert not counts(job)
        set_ahead(4 * window)
        site.answers["/gone"] = [503]
        crawls = job.crawl("8")
        assert [(row["path"], row["tries"]) for row in listed(job)] == [("/gone", 1)]
        assert is_logged("kept for the next run", crawls)
        recover(job, ["/gone"])

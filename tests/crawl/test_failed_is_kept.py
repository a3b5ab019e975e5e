"""Requests that failed are kept, and the next run crawls them, although no page links to them."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from scrapy_bloom.queues.store import State
from tests.support.crawls import FAILING_SPIDER, stat
from tests.support.jobs import PLACES, Job
from tests.support.sites import ScriptedSite

# What is kept, and the beginning of the reason.
NO_RESPONSE = r"\w+: "
FAILED = {
    "/status-500": "HTTP status 500",
    "/status-403": "HTTP status 403",
    "/status-429": "HTTP status 429",
    "/dropped": NO_RESPONSE,
    "/errback-500": "HTTP status 500",
    "/errback-dropped": NO_RESPONSE,
    "/errback-items-500": "HTTP status 500",
    "/errback-raises-500": "TypeError: no response",
    "/errback-fresh-500": "HTTP status 500",  # the request that the errback yielded
    "/bad-input": "ValueError: bad",
    "/raises-at-once": "ValueError: no price",
    "/raises-later": "ValueError: no price",
    "/async-raises": "ValueError: no price",
    "/swallowed-raises-at-once": "ValueError: no price",
    "/swallowed-raises-later": "ValueError: no price",
    "/item-error": "ValueError: the database is away",
    "/async-item-error": "ValueError: the database is away",
    "/rewrapped-item-error": "ValueError: the database is away",
    "/retried-500": "HTTP status 500",
    "/copied-500": "HTTP status 500",
    "/unfiltered-500": "HTTP status 500",
    "/captcha-500": "HTTP status 500",
    "/captcha-by-middleware-500": "HTTP status 500",
    "/replaced-500": "HTTP status 500",
    "/moved-to-500": "HTTP status 500",
    "/moved-twice": "HTTP status 503",
    "/moved-to-raises": "ValueError: no price",
    "/chain": "IgnoreRequest: max redirections reached",
    "/bomb": "IgnoreRequest: ",
}
RAISES = {path for path, reason in FAILED.items() if "HTTP" not in reason} - {
    *("/dropped", "/errback-dropped", "/errback-raises-500", "/chain", "/bomb"),
    "/moved-to-raises",  # whose page is not redirected in the second run
}
DONE = [
    *("/fine", "/async-fine", "/flaky", "/form", "/status-404", "/allowed-410", "/item-dropped"),
    *("/ignored", "/vetoed", "/refused", "/robots-page", "/stopped", "/stopped-quietly"),
    *("/errback-again", "/errback-fresh", "/retried", "/captcha", "/captcha-by-middleware"),
    *("/replaced-fine", "/moved-to-fine", "/moved-to-known", "/moved-offsite", "/moved-to-ignored"),
]
OFFSITE = "http://offsite.invalid/"
ANSWERS: dict[str, list] = {
    "/robots.txt": [b"User-agent: *\nDisallow: /robots-page\n"],
    "/": [(*FAILED, *DONE, OFFSITE, "/second")],
    "/second": [tuple(FAILED)],  # they stay duplicates in this run
    "/status-403": [403],
    "/status-404": [404],
    "/status-429": [429],
    "/allowed-410": [410],
    "/dropped": [None],
    "/errback-dropped": [None],
    "/flaky": [503, ()],
    "/retried-500": [(), 500],
    "/captcha": [b"captcha", ()],
    "/captcha-by-middleware": [b"captcha", ()],
    "/captcha-500": [b"captcha", 500],
    "/captcha-by-middleware-500": [b"captcha", 500],
    "/errback-again": [503, 503, ()],
    "/errback-fresh": [503, 503, ()],
    "/replaced-500-elsewhere": [500],
    "/moved-to-500": ["/moved-500"],
    "/moved-twice": ["/moved-on"],
    "/moved-on": ["/moved-503"],
    "/moved-503": [503],
    "/moved-to-raises": ["/moved-raises-later"],
    "/moved-to-fine": ["/moved-fine"],
    "/moved-to-known": ["/fine"],
    "/moved-offsite": [OFFSITE],
    "/moved-to-ignored": ["/moved-ignored"],
    "/chain": ["/chain/0"],
    **{f"/chain/{number}": [f"/chain/{number + 1}"] for number in range(5)},
    "/bomb": [b"bomb"],
} | {
    path: [500]
    for path in ("/moved-500", *FAILED)
    if path.endswith("-500") and "captcha" not in path and "moved-to" not in path
}
ANSWERS["/retried-500"] = [(), 500]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def site() -> Iterator[ScriptedSite]:
    with ScriptedSite({}) as new:
        yield new


def repair(site: ScriptedSite) -> None:
    """Let all pages answer well, and none of them link to another."""
    site.answers = {"/robots.txt": [b""]}


def crawled(site: ScriptedSite) -> dict[str, int]:
    """The hits of a run, without those of start page and robots.txt."""
    return {path: n for path, n in site.hits.items() if path not in {"/", "/robots.txt"}}


def test_what_is_kept(place: str, site: ScriptedSite, tmp_path: Path) -> None:
    site.answers = {path: list(answers) for path, answers in ANSWERS.items()}
    job = Job(place, tmp_path, site, FAILING_SPIDER, RETRY_ENABLED=True)
    crawl = job.crawl_alone()
    shown = job.bloom("queue", "--failed", "--json").json["requests"]
    reasons = {row["url"].removeprefix(site.url[:-1]): row["reason"] for row in shown}
    assert set(reasons) == set(FAILED)
    for path, reason in FAILED.items():
        assert re.match(reason, reasons[path]), (path, reasons[path])
    # The page without a filter was linked to twice.
    assert job.counts == {"failed": len(FAILED) + 1}
    assert stat(crawl, "scheduler/failed") == len(shown) == len(FAILED) + 1
    assert f"finished, with {len(shown)} failed requests. The next run, which" in crawl.output

    repair(site)
    crawl = job.crawl_alone("2")
    expected = set(FAILED) - {"/replaced-500"} | {"/replaced-500-elsewhere"}
    assert crawled(site) == dict.fromkeys(expected, 1) | {"/unfiltered-500": 2}
    assert job.failed == RAISES

    job.crawl("3")
    assert crawled(site) == dict.fromkeys(RAISES, 1)


def test_nothing_is_kept(site: ScriptedSite, tmp_path: Path) -> None:
    site.answers = {path: list(answers) for path, answers in ANSWERS.items()}
    settings = {"RETRY_ENABLED": True, "BLOOM_KEEP_FAILED": False}
    job = Job("JOBDIR", tmp_path, site, FAILING_SPIDER, **settings)
    crawl = job.crawl_alone()
    assert not stat(crawl, "scheduler/failed")
    assert not job.counts
    repair(site)
    job.crawl("2")
    assert not crawled(site)


def test_a_callback_that_closes_the_spider(place: str, site: ScriptedSite, tmp_path: Path) -> None:
    site.answers = {"/": [("/closes",)], "/closes": [("/later",)], "/robots.txt": [b""]}
    job = Job(place, tmp_path, site, FAILING_SPIDER)
    job.finish(job.start(), "cancelled")
    assert job.counts == {"pending": 1}
    job.crawl()
    assert set(crawled(site)) == {"/later"}
    assert not job.counts


# Start requests.

STARTS = """
    import scrapy

    class Shop(scrapy.Spider):
        name = "shop"

        async def start(self):
            yield scrapy.Request(self.url)
            yield scrapy.Request(self.url + "filtered")
            yield scrapy.Request(self.url + "unfiltered", dont_filter=True)
            yield scrapy.Request(self.url + "moved-unfiltered", dont_filter=True)

        def parse(self, response):
            yield from response.follow_all(css="a")
"""


FAILING_STARTS = ["/filtered", "/unfiltered", "/moved-unfiltered"]


def test_what_fails_every_night(site: ScriptedSite, tmp_path: Path) -> None:
    """A start page has one row, however often it fails; a page that fails for ever is dead."""
    starts = ["/", "/filtered", "/unfiltered", "/moved-unfiltered", "/moved-here"]
    site.answers = {"/": [("/gone", "/fine")], "/gone": [500], "/filtered": [500]}
    site.answers |= {"/unfiltered": [500], "/moved-here": [500]}
    site.answers["/moved-unfiltered"] = ["/moved-here"]
    job = Job("JOBDIR", tmp_path, site, STARTS)
    for night in range(1, 7):
        crawl = job.crawl_alone(f"night {night}")
        expected = [*starts, "/gone"] if night <= 5 else starts
        assert site.hits == dict.fromkeys([*expected, *(["/fine"] if night == 1 else [])], 1)
        errors = [line for line in crawl.our_lines("ERROR") if "failed in five runs" in line]
        assert len(errors) == (night == 6)  # it is not tried again
        if night < 6:
            assert job.failed == {*FAILING_STARTS, "/gone"}
    assert "scrapy bloom queue --dead" in errors[0]
    assert job.failed | set(job.listed(State.DEAD)) == {*FAILING_STARTS, "/gone"}
    assert sum(job.counts.values()) == 4
    dead = job.listed(State.DEAD)["/gone"]
    assert dead.reason.startswith("HTTP status 500")
    ran = job.bloom("queue", "--dead", "--requeue", "--yes")
    assert ran.status == 0, ran
    assert job.counts["pending"] >= 1
    site.answers = {}
    job.crawl("night 7")
    assert site.hits["/gone"] == 1
    assert max(site.hits.values()) == 1  # what start() yields takes the place of a failed row
    assert not job.counts


# A site in maintenance.

PAGES = [f"/page/{number}" for number in range(20)]


MAINTENANCE = {"RETRY_ENABLED": True, "RETRY_TIMES": 2, "ROBOTSTXT_OBEY": False}


@pytest.mark.parametrize("is_by_one_page", [False, True])
def test_a_site_in_maintenance(is_by_one_page: bool, site: ScriptedSite, tmp_path: Path) -> None:
    """Each page redirects to another, and that one to a page that fails, in two nights."""
    site.answers = {"/": [tuple(PAGES)], "/maintenance": [503]}
    for number, page in enumerate(PAGES):
        step = "/step" if is_by_one_page else f"/step/{number}"
        site.answers |= {page: [step], step: ["/maintenance"]}
    job = Job("JOBDIR", tmp_path, site, FAILING_SPIDER, **MAINTENANCE)
    for night in "12":
        job.crawl(night)
        assert {page: site.hits[page] for page in PAGES} == dict.fromkeys(PAGES, 1)
        assert site.hits["/maintenance"] == 3
        assert job.failed == set(PAGES)
        assert sum(job.counts.values()) == len(PAGES)
        assert not is_by_one_page or job.counts["waiting"] == len(PAGES) - 1
        if night == "1":
            site.answers["/"] = [()]
    site.answers = {page: [503, 503, ()] for page in PAGES}
    job.crawl("3")  # with fresh retries
    assert crawled(site) == dict.fromkeys(PAGES, 3)
    assert not job.counts

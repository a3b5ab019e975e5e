"""Runs of a job: what each of them crawls again, and what happens where two of them meet."""

import random
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.crawls import Crawl
from tests.support.jobs import PLACES, Job
from tests.support.sites import LIMIT, ScriptedSite

NIGHTLY = """
    from pathlib import Path
    import scrapy

    class Shop(scrapy.Spider):
        name = "shop"

        async def start(self):
            with Path(__file__).with_name("started").open("a") as log:
                log.write("x")
            yield scrapy.Request(self.url)
            yield scrapy.Request(self.url + "start")

        def parse(self, response):
            for link in response.css("a::attr(href)").getall():
                meta = {"bloom_filter": "run"} if "list" in link else {}
                yield response.follow(link, meta=meta)
"""
STARTS = ["/", "/start"]
LISTS = [f"/list/{number}" for number in range(6)]
ITEMS = [f"/item/{number}" for number in range(60)]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def site() -> Iterator[ScriptedSite]:
    """A shop: its list pages link to each other and to ten items each; items link back."""
    answers: dict[str, list] = {"/": [tuple(LISTS)], "/start": [("/", LISTS[0])]}
    for number, page in enumerate(LISTS):
        answers[page] = [(*LISTS, *ITEMS[10 * number : 10 * number + 10], "/")]
    answers |= {page: [("/", LISTS[0], ITEMS[0])] for page in ITEMS}
    with ScriptedSite(answers) as new:
        yield new


def add_items(site: ScriptedSite, page: str, *items: str) -> None:
    (links,) = site.answers[page]
    site.answers[page] = [(*links, *items)]


def starts(job: Job) -> int:
    """How often start() has begun."""
    return len((job.directory / "started").read_text())


def lines_with(text: str, crawls: Sequence[Crawl], level: str = "INFO") -> list[str]:
    return [line for crawl in crawls for line in crawl.our_lines(level) if text in line]


# Nights.


def test_nights(place: str, site: ScriptedSite, tmp_path: Path) -> None:
    job = Job(place, tmp_path, site, NIGHTLY, workers=3, CONCURRENT_REQUESTS=4)
    crawls = job.crawl("2026-11-24")
    assert site.hits == dict.fromkeys([*STARTS, *LISTS, *ITEMS], 1)
    assert not lines_with("", crawls, "WARNING")

    add_items(site, LISTS[3], "/item/new", "/list/new")
    site.answers["/list/new"] = [("/item/newer", *ITEMS)]
    crawls = job.crawl("2026-11-25")
    new = ["/item/new", "/list/new", "/item/newer"]
    assert site.hits == dict.fromkeys([*STARTS, *LISTS, *new], 1)
    assert not lines_with("", crawls, "WARNING")
    (begins,) = lines_with("begins", crawls)
    assert "The run '2026-11-25' of " in begins
    assert "unfinished requests of earlier runs: 0" in begins

    crawls = job.crawl("2026-11-26")
    assert site.hits == dict.fromkeys([*STARTS, *LISTS, "/list/new"], 1)
    assert starts(job) == 3


def test_a_night_with_kills(place: str, site: ScriptedSite, tmp_path: Path) -> None:
    """After each kill, what was in flight is crawled again, and nothing else."""
    job = Job(place, tmp_path, site, NIGHTLY, workers=3, CONCURRENT_REQUESTS=4)
    dice = random.Random(place)
    new_items = ITEMS
    for night in "123":
        in_flight = job.crawl_with_kills(night, 3, dice)
        assert set(site.hits) == {*STARTS, *LISTS, *new_items}
        assert all(number <= 1 + in_flight[page] for page, number in site.hits.items())
        assert not job.counts
        new_items = [f"/item/new-{night}"]
        add_items(site, LISTS[5], *new_items)


def test_the_rest_of_yesterday(place: str, site: ScriptedSite, tmp_path: Path) -> None:
    job = Job(place, tmp_path, site, NIGHTLY, CONCURRENT_REQUESTS=4)
    (crawl,) = job.hold(30, "1")
    job.interrupt(crawl)
    yesterday = set(site.hits)
    rest = set(ITEMS) - yesterday
    assert len(rest) > 20
    left = job.counts["pending"]
    add_items(site, LISTS[1], "/item/new")
    crawl = job.crawl_alone("2")
    assert set(site.hits) == {*STARTS, *LISTS, *rest, "/item/new"}
    assert all(site.hits[page] == 1 for page in (*rest, "/item/new", *yesterday - {*LISTS, *ITEMS}))
    # Those that were pending are in the queue, and found again.
    assert all(site.hits[page] <= 2 for page in (*STARTS, *LISTS))
    (begins,) = lines_with("begins", [crawl])
    assert f"unfinished requests of earlier runs: {left}" in begins
    assert not lines_with("", [crawl], "WARNING")
    assert not job.counts


# What is a start request.

COPIED = """
    import scrapy

    class Shop(scrapy.Spider):
        name = "shop"

        async def start(self):
            yield scrapy.Request(self.url)
            yield scrapy.Request(self.url + "failing", errback=self.failed)

        def parse(self, response):
            for link in response.css("a"):
                yield response.follow(link, meta=response.meta)
                url = response.urljoin(link.attrib["href"]) + "?2"
                yield response.request.replace(url=url, dont_filter=False)

        def failed(self, failure):
            url = self.url + "instead"
            yield failure.request.replace(url=url, callback=self.parse, dont_filter=False)
"""


def test_copied_meta_makes_no_start_request(place: str, site: ScriptedSite, tmp_path: Path) -> None:
    """A start page that is redirected, or fails at first, is one all the same."""
    pages = [f"/page/{number}" for number in range(12)]
    site.answers = {"/": ["/en/"], "/en/": [503, (*pages[:2], "/en/")], "/failing": [500]}
    for number, page in enumerate(pages):
        site.answers[page] = [tuple(pages[2 * number + 2 : 2 * number + 4])]
    job = Job(place, tmp_path, site, COPIED, RETRY_ENABLED=True, RETRY_TIMES=1)
    job.crawl("1")
    assert set(site.hits) == {"/", "/en/", "/failing", "/instead", *pages}
    assert all(site.hits[page] == 2 for page in pages)  # with and without a query
    assert (site.hits["/"], site.hits["/failing"]) == (1, 2)
    for night in "23":
        site.answers["/en/"] = [503, (*pages[:2], "/en/")]
        job.crawl(night)
        assert site.hits == {"/": 1, "/en/": 2, "/failing": 2}


# Runs that meet.


def test_a_straggler(site: ScriptedSite, tmp_path: Path) -> None:
    """It returns its requests when another run begins; started again, it has nothing to do."""
    job = Job("Redis", tmp_path, site, NIGHTLY, CONCURRENT_REQUESTS=4)
    (old,) = job.hold(20, "monday")
    (new,) = job.start("tuesday")
    (warning,) = lines_with("begins", [new], "WARNING")
    assert "The run 'tuesday' of " in warning
    assert "unfinished requests of earlier runs: " in warning
    assert "unfinished requests of earlier runs: 0" not in warning
    assert "Workers of the run before: 1, which shut down" in warning
    site.hold_after(8)  # among them are some of the old worker, which reports them
    old.wait_until(lambda: "another run has begun" in old.output)
    job.finish([old], "shutdown")
    job.finish([new])
    assert lines_with("because another run has begun", [old])
    assert not lines_with("", [old], "WARNING")
    assert set(site.hits) == {*STARTS, *LISTS, *ITEMS}
    # What the old one had downloaded, it has done: both have crawled only lists and start pages.
    assert all(site.hits[page] == 1 for page in ITEMS)
    assert all(site.hits[page] <= 2 for page in (*STARTS, *LISTS))
    assert starts(job) == 2
    assert not job.counts


def test_a_crawl_with_the_name_of_an_earlier_run(
    place: str, site: ScriptedSite, tmp_path: Path
) -> None:
    job = Job(place, tmp_path, site, NIGHTLY, CONCURRENT_REQUESTS=2)
    job.crawl("monday")
    (crawl,) = job.hold(3, "tuesday")
    job.interrupt(crawl)
    counts = job.counts
    assert counts["pending"]
    late = job.crawl_alone("monday")
    assert not site.hits
    (warning,) = lines_with("", [late], "WARNING")
    assert "BLOOM_RUN is 'monday', the name of an earlier run of " in warning
    assert "so there is nothing to do in the current run 'tuesday'" in warning
    assert not lines_with("shuts down", [late])
    assert job.counts == counts
    # The current run goes on; no name means it, too.
    job.crawl()
    assert not job.counts
    assert starts(job) == (2 if job.is_shared else 3)


@pytest.mark.parametrize("by", ["kill", "pause"])
def test_a_container_that_always_restarts(
    by: str, place: str, site: ScriptedSite, tmp_path: Path
) -> None:
    """It has one name for ever, so it does not try the page again that fails."""
    site.answers[LISTS[2]] = [(*ITEMS[20:30], "/gone")]
    site.answers["/gone"] = [500]
    job = Job(place, tmp_path, site, NIGHTLY, CONCURRENT_REQUESTS=2)
    pages = {*STARTS, *LISTS, *ITEMS, "/gone"}
    restarts = 0
    while len(site.hits) < 40:
        restarts += 1
        assert restarts < 10
        (crawl,) = job.hold(12, "once")
        if by == "kill":
            job.kill(crawl)
            site.settle()
        else:
            job.interrupt(crawl)
    job.finish(job.start("once"))
    site.settle()
    assert set(site.hits) == pages
    # Before Scrapy 2.15, many more requests than CONCURRENT_REQUESTS can be in flight.
    assert site.total() <= len(pages) + (restarts * 16 if by == "kill" else 0)
    assert job.failed == {"/gone"}
    for _ in range(2):
        crawl = job.crawl_alone("once")
        assert not site.hits
        assert lines_with("(failed requests are for the next run: 1)", [crawl], "WARNING")
    # Without the name, it is tried whenever the crawl is started: that counts once an hour.
    for _ in range(6):
        crawl = job.crawl_alone()
        assert site.hits == {"/gone": 1}
        assert lines_with("1 failed request of earlier runs: tried again", [crawl])
    assert job.failed == {"/gone"}


# A run that has finished.


def test_a_finished_run_stays_finished(place: str, site: ScriptedSite, tmp_path: Path) -> None:
    job = Job(place, tmp_path, site, NIGHTLY)
    job.crawl("friday")
    add_items(site, "/", "/item/new")
    for name in ("friday", ""):
        crawl = job.crawl_alone(name)
        assert not site.hits
        (warning,) = lines_with("The run 'friday' of ", [crawl], "WARNING")
        assert re.search(r" ended at \S.*, and nothing is pending", warning)
        assert "set BLOOM_RUN to a name that it has not had" in warning
        assert not lines_with(" begins; ", [crawl])
    job.crawl("saturday")
    assert set(site.hits) == {*STARTS, *LISTS, "/item/new"}


UNFILTERED = NIGHTLY.replace("Request(self.url)", "Request(self.url, dont_filter=True)")


def test_unfiltered_start_requests_of_a_finished_run(
    place: str, site: ScriptedSite, tmp_path: Path
) -> None:
    """In a JOBDIR, start() runs in each process, as under Scrapy's own scheduler."""
    job = Job(place, tmp_path, site, UNFILTERED)
    job.crawl()
    add_items(site, "/", "/item/new")
    crawl = job.crawl_alone()
    assert set(site.hits) == (set() if job.is_shared else {"/", "/item/new"})
    assert lines_with("nothing is pending", [crawl], "WARNING")
    assert not job.counts


def test_a_finished_run_with_failed_requests_tries_them_again(
    place: str, site: ScriptedSite, tmp_path: Path
) -> None:
    job = Job(place, tmp_path, site, NIGHTLY)
    links, site.answers[LISTS[1]], site.answers[ITEMS[0]] = site.answers[LISTS[1]], [500], [500]
    job.crawl()
    assert job.failed == {LISTS[1], ITEMS[0]}
    site.answers |= {LISTS[1]: links, ITEMS[0]: [()]}
    crawl = job.crawl_alone()
    assert site.hits == dict.fromkeys([LISTS[1], *ITEMS[10:20], ITEMS[0]], 1)
    assert lines_with("2 failed requests of earlier runs: tried again", [crawl])
    assert not lines_with("", [crawl], "WARNING")
    crawl = job.crawl_alone()
    assert not site.hits
    assert lines_with("nothing is pending", [crawl], "WARNING")


# Whose job it is.


def test_another_spider_is_refused(place: str, site: ScriptedSite, tmp_path: Path) -> None:
    job = Job(place, tmp_path, site, NIGHTLY)
    (crawl,) = job.hold(5)
    job.interrupt(crawl)
    counts = job.counts
    site.forget()
    other = tmp_path / "other.py"
    other.write_text(job.spider.read_text().replace('"shop"', '"news"'))
    for run in (None, "2"):
        settings = {**job.settings, "BLOOM_RUN": run}
        error = Crawl(site.url, tmp_path, settings, spider=other).refusal()
        assert "belongs to spider 'shop'" in error
        assert "'news'" in error
        assert ("BLOOM_REDIS_KEY" if job.is_shared else "JOBDIR") in error
    assert not site.hits
    assert job.counts == counts
    job.crawl()
    assert not job.counts


# Windows.


def test_a_run_that_is_longer_than_its_window(
    place: str, site: ScriptedSite, tmp_path: Path
) -> None:
    """Nothing expires while it runs, or it would go on for ever; later, all pages are new."""
    pages = [f"/{number}" for number in range(8)]
    site.answers = {"/": [(pages[0],)]}
    for number, page in enumerate(pages):
        site.answers[page] = [(*pages[: number + 2], "/")]
    site.delay = 0.5
    job = Job(place, tmp_path, site, NIGHTLY, BLOOM_WINDOW_SECS=1)
    job.crawl("1")
    assert site.hits == dict.fromkeys([*STARTS, *pages], 1)
    site.delay = 0.0
    end, night = time.monotonic() + LIMIT, 1
    while night == 1 or pages[0] not in site.hits:
        assert time.monotonic() < end, "nothing expires"
        night += 1
        job.crawl(str(night))
        # In files, the start page may have been recorded in an earlier run, and expire in this one.
        repeated = {page for page, number in site.hits.items() if number > 1}
        assert repeated <= (set() if place == "Redis" else {"/"})
        assert site.hits["/"] <= 2

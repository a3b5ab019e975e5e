"""Runs of a job: what each of them crawls again, and what happens where two of them meet."""

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.crawls import Crawl
from tests.support.jobs import PLACES, Job
from tests.support.sites import ScriptedSite

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
                # Copied meta, also that of a start request: the link is none.
                meta = {**response.meta, "bloom_filter": "run" if "list" in link else True}
                yield response.follow(link, meta=meta)
"""
STARTS = ["/", "/start"]
LISTS = [f"/list/{number}" for number in range(6)]
ITEMS = [f"/item/{number}" for number in range(30)]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def site() -> Iterator[ScriptedSite]:
    """A shop: its list pages link to each other and to five items each; items link back."""
    answers: dict[str, list] = {"/": [tuple(LISTS)], "/start": [("/", LISTS[0])]}
    for number, page in enumerate(LISTS):
        answers[page] = [(*LISTS, *ITEMS[5 * number : 5 * number + 5], "/")]
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
    for night in "12":
        in_flight = job.crawl_with_kills(night, 3, dice)
        assert set(site.hits) == {*STARTS, *LISTS, *new_items}
        assert all(number <= 1 + in_flight[page] for page, number in site.hits.items())
        assert not job.counts
        new_items = [f"/item/new-{night}"]
        add_items(site, LISTS[5], *new_items)


def test_the_rest_of_yesterday(place: str, site: ScriptedSite, tmp_path: Path) -> None:
    job = Job(place, tmp_path, site, NIGHTLY, CONCURRENT_REQUESTS=4)
    (crawl,) = job.hold(16, "1")
    job.interrupt(crawl)
    yesterday = set(site.hits)
    rest = set(ITEMS) - yesterday
    assert len(rest) > 10
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


# Runs that meet.


def test_a_straggler(site: ScriptedSite, tmp_path: Path) -> None:
    """It returns its requests when another run begins; started again, it has nothing to do."""
    job = Job("Redis", tmp_path, site, NIGHTLY, CONCURRENT_REQUESTS=4)
    (old,) = job.hold(14, "monday")
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


@pytest.mark.parametrize(("by", "place"), [("kill", "JOBDIR"), ("pause", "Redis")])
def test_a_container_that_always_restarts(
    by: str, place: str, site: ScriptedSite, tmp_path: Path
) -> None:
    """It has one name for ever, so it does not try the page again that fails."""
    site.answers[LISTS[2]] = [(*ITEMS[10:15], "/gone")]
    site.answers["/gone"] = [500]
    job = Job(place, tmp_path, site, NIGHTLY, CONCURRENT_REQUESTS=2)
    pages = {*STARTS, *LISTS, *ITEMS, "/gone"}
    restarts = 0
    while len(site.hits) < 24:
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

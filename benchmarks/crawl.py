"""A whole crawl with this filter, and with Scrapy's own."""

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import scrapy
from scrapy.core.downloader.handlers.base import BaseDownloadHandler
from scrapy.crawler import Crawler
from scrapy.http import HtmlResponse, Response

from benchmarks.shared.report import Plot, Section, Table, at_least, quartiles
from benchmarks.shared.turns import Course, TurnSpider, crawl_by_turns

SPEED = 1.10
LESS_MB = 15.0

OURS, SCRAPYS = "BloomDupeFilter", "RFPDupeFilter"
SIZED, OURS_JOB, SCRAPYS_JOB = f"{OURS}, sized", f"{OURS}, JOBDIR", f"{SCRAPYS}, JOBDIR"

HOST = "http://www.magazine.example"
SECTIONS = 7  # and the home page: the navigation
CHILDREN = 10
POPULAR = 1000
_WORDS = ("garden", "kitchen", "music", "office", "books", "toys", "travel", "science", "cities")
_TEXT = "<p>" + "Nothing much happens in this text, but it is there. " * 20
_LINK = re.compile(r'<a href="([^"]+)">')


def run(quick: bool) -> Section:  # noqa: FBT001 - every benchmark is called like this
    rounds, pages, few = (4, 600, 200) if quick else (40, 200_000, 40_000)
    crawls = _crawls([OURS, SIZED, SCRAPYS], pages, rounds)
    jobs = _crawls([OURS_JOB, SCRAPYS_JOB], few, rounds)
    ours, sized, scrapys = crawls[OURS], crawls[SIZED], crawls[SCRAPYS]
    share = ours.filtered / (ours.filtered + pages)
    return Section(
        title="A whole crawl",
        method=(
            f"Crawls of a site of {pages:,} pages, which a download handler makes up: a tree of "
            f"{CHILDREN} links to new pages each, and on every page the navigation of "
            f"{SECTIONS + 1} links, its parent, its neighbours, and 2 of {POPULAR:,} popular "
            f"pages, so that {share:.0%} of the requests are duplicates. DUPEFILTER_CLASS is all "
            f"that differs, and for 'sized' BLOOM_EXPECTED_REQUESTS = {pages:,}; nothing is on "
            f"disk. Each crawl is a process of its own, and they take turns: {pages // rounds:,} "
            f"pages of one, as many of the next, {rounds} times, and who begins changes. The ratio "
            "is that of two in one round. Memory is that of the whole process (RSS), and its peak "
            "the highest that the system has seen; memory that the filter was given and has not "
            f"touched is not in it. Then crawls of {few:,} pages with a JOBDIR, likewise."
        ),
        checks=[
            at_least(
                "requests per second relative to RFPDupeFilter",
                median(_ratios(ours, scrapys)),
                SPEED,
                "{:.3f}",
            ),
            at_least("MB less at the peak", scrapys.peak_mb - ours.peak_mb, LESS_MB),
            at_least(
                f"MB less at the peak, with BLOOM_EXPECTED_REQUESTS = {pages:,}",
                scrapys.peak_mb - sized.peak_mb,
                LESS_MB,
            ),
        ],
        tables=[
            _table(crawls, pages, {OURS: SCRAPYS, SIZED: SCRAPYS}),
            _table(jobs, few, {OURS_JOB: SCRAPYS_JOB}),
        ],
        notes=(
            "The pages cost nothing to download, and links are found by a regular expression: a "
            "real crawl does more besides, and the filter is a smaller part of it.\n"
            "CONCURRENT_ITEMS is 8 and not 100, since Scrapy starts as many tasks for each page, "
            "and the log has warnings only; all else is Scrapy's default.\n"
            "Most duplicates are links of the navigation and to popular pages. Figures of one "
            "request, new or not, are in the first section.\n"
            "Own memory is the most after any round, without pages of files: of libraries, and of "
            "the filter in a JOBDIR. Those the system takes back if it wants to.\n"
            f"All of the {pages:,} and {few:,} pages were crawled, once, in each crawl."
        ),
        plots=[
            Plot(
                name="crawl-memory",
                title=f"Memory of a crawl of {pages:,} pages",
                x="pages crawled",
                y="MB of the whole process (RSS)",
                series={
                    name: [
                        (number * pages // rounds, round(mb, 1))
                        for number, mb in enumerate(course.rss_mb, 1)
                    ]
                    for name, course in crawls.items()
                },
                log_x=False,
                log_y=False,
            )
        ],
    )


def _ratios(ours: Course, scrapys: Course) -> list[float]:
    """Of the requests per second, round by round."""
    return [theirs / mine for mine, theirs in zip(ours.secs, scrapys.secs, strict=True)]


def _table(crawls: Mapping[str, Course], pages: int, pairs: Mapping[str, str]) -> Table:
    rows = []
    for name, course in crawls.items():
        each = pages // len(course.secs)
        speeds = (f"{speed:,.0f}" for speed in quartiles([each / secs for secs in course.secs]))
        cpu_us = 1e6 * sum(course.cpu_secs) / pages
        whole = f"{pages / sum(course.secs):,.0f}"
        own = f"{max(course.own_mb):.1f}"
        rows.append((name, *speeds, whole, f"{cpu_us:,.0f}", f"{course.peak_mb:.1f}", own))
    for ours, scrapys in pairs.items():
        mine, theirs = crawls[ours], crawls[scrapys]
        ratios = (f"{ratio:.3f}" for ratio in quartiles(_ratios(mine, theirs)))
        whole = f"{sum(theirs.secs) / sum(mine.secs):.3f}"
        cpu = f"{sum(mine.cpu_secs) / sum(theirs.cpu_secs):.3f}"
        less = f"{mine.peak_mb - theirs.peak_mb:+.1f}"
        own = f"{max(mine.own_mb) - max(theirs.own_mb):+.1f}"
        rows.append((f"{ours}, relative to {scrapys}", *ratios, whole, cpu, less, own))
    return Table(
        (
            f"{pages:,} pages: requests/s",
            "25 %",
            "median",
            "75 %",
            "whole crawl",
            "CPU µs/request",
            "peak MB",
            "own MB",
        ),
        rows,
    )


def _crawls(names: Sequence[str], pages: int, rounds: int) -> dict[str, Course]:
    """Crawl with each filter, a part in each round, by turns."""
    site = {
        "DOWNLOAD_HANDLERS": {"http": Site},
        "PAGES": pages,
        "CONCURRENT_ITEMS": 8,
    }
    ours = {**site, "DUPEFILTER_CLASS": "scrapy_bloom.BloomDupeFilter"}
    with tempfile.TemporaryDirectory() as directory:
        settings: dict[str, dict[str, Any]] = {
            OURS: ours,
            SIZED: {**ours, "BLOOM_EXPECTED_REQUESTS": pages},
            OURS_JOB: {**ours, "JOBDIR": f"{directory}/ours"},
            SCRAPYS: site,
            SCRAPYS_JOB: {**site, "JOBDIR": f"{directory}/scrapys"},
        }
        chosen = {name: settings[name] for name in names}
        courses = crawl_by_turns(LinkSpider, _url(0), chosen, pages, rounds)
    assert {course.crawled for course in courses.values()} == {pages}
    return courses


class LinkSpider(TurnSpider):
    """Follows all links."""

    def requests(self, response: Response) -> Iterator[scrapy.Request]:
        """For all links of a page, found by a regular expression."""
        assert isinstance(response, HtmlResponse)
        return map(scrapy.Request, _LINK.findall(response.text))


class Site(BaseDownloadHandler):
    """A download handler that is the site itself."""

    def __init__(self, crawler: Crawler) -> None:
        super().__init__(crawler)
        self._pages = crawler.settings.getint("PAGES")

    async def download_request(self, request: scrapy.Request) -> Response:
        """Answer at once."""
        found = re.search(r"(\d+)\.html$", request.url)
        page = int(found[1]) if found else 0
        menu = "".join(f'<li><a href="{_url(each)}">page</a>' for each in self._links(page))
        body = f"<html><title>{page}</title><ul>{menu}</ul>{_TEXT}</html>"
        return HtmlResponse(request.url, body=body.encode(), encoding="utf-8")

    def _links(self, page: int) -> Iterator[int]:
        last = self._pages - 1
        yield from range(SECTIONS + 1)
        yield max((page - 1) // CHILDREN, 0)
        yield from (max(page - 1, 0), min(page + 1, last))
        yield from (page * step % min(POPULAR, last) for step in (7, 31))
        first = page * CHILDREN + 1
        yield from range(first, min(first + CHILDREN, last + 1))


def _url(page: int) -> str:
    """The address of a page, as magazines have them: 60 to 80 characters."""
    if page == 0:
        return f"{HOST}/"
    words = "-".join(_WORDS[page * step % len(_WORDS)] for step in (1, 2, 5, 7))
    return f"{HOST}/{_WORDS[page % SECTIONS]}/{words}-{page:06}.html"

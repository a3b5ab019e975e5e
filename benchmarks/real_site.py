"""A whole crawl of a real site, over HTTP, with this filter, and with Scrapy's own."""

from collections.abc import Mapping
from statistics import median
from typing import Any

from benchmarks.shared.report import Section, Table, at_most, quartiles
from benchmarks.shared.turns import Course, TurnSpider, crawl_by_turns
from tests.support.sites import PYTHON_DOC, python_doc_site

CPU = 0.93
PAGES, ROUNDS = 500, 10  # a few more have links
OURS, SCRAPYS = "BloomDupeFilter", "RFPDupeFilter"
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    OURS: {"DUPEFILTER_CLASS": "scrapy_bloom.BloomDupeFilter"},
    SCRAPYS: {},
}


def run(quick: bool) -> Section:  # noqa: FBT001 - every benchmark is called like this
    crawls = 1 if quick else 7
    title = "A whole crawl of a real site"
    if not PYTHON_DOC.exists():
        return Section(title, "Debian's package python3-doc is not installed: not measured.")
    site = python_doc_site()
    url = f"{site.url}index.html"
    measured = [crawl_by_turns(DocSpider, url, SETTINGS, PAGES, ROUNDS) for _ in range(crawls)]
    site.end()
    last = measured[-1][OURS]
    ratios = [each[OURS].all_cpu_secs / each[SCRAPYS].all_cpu_secs for each in measured]
    return Section(
        title=title,
        method=(
            "Crawls of Python's documentation (Debian's package python3-doc), which another "
            f"process serves on loopback: {last.crawled:,} pages with {last.filtered:,} duplicates "
            "among their links. The spider has `allowed_domains`, and requests all links of a page "
            "by `response.follow_all`. DUPEFILTER_CLASS is all that differs, and the log has "
            "warnings only. Each crawl is a process of its own, and two take turns: "
            f"{PAGES // ROUNDS} pages of one, as many of the other, {ROUNDS} times, and who begins "
            f"changes; {crawls} times in all. The time is that of the processor in the crawl's "
            "process, from the first request to the end; the ratio is that of two that took turns."
        ),
        checks=[at_most("CPU of the crawl relative to RFPDupeFilter", median(ratios), CPU)],
        tables=[
            Table(
                ("CPU", "25 %", "median", "75 %"),
                [
                    *(_row(name, measured) for name in SETTINGS),
                    ("ratio", *(f"{each:.3f}" for each in quartiles(ratios))),
                ],
            )
        ],
        notes="Most of the time is Scrapy's: finding the links, and making a request of each.",
    )


def _row(name: str, measured: list[dict[str, Course]]) -> tuple[str, ...]:
    secs = quartiles([each[name].all_cpu_secs for each in measured])
    return (name, *(f"{each:.2f} s" for each in secs))


class DocSpider(TurnSpider):
    """Follows all links of one site."""

    allowed_domains = ("127.0.0.1",)

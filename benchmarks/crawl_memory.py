"""The memory of a whole crawl, with this filter and with Scrapy's own."""

from collections.abc import Iterator
from typing import Any

import scrapy
from scrapy.http import Response

from benchmarks.shared.crawls import TreeSpider, crawl
from benchmarks.shared.machine import resident_bytes
from benchmarks.shared.report import Plot, Section, Table, at_least

LESS_MB = 15.0
SAMPLES = 40
OURS, SIZED, SCRAPYS = "BloomDupeFilter", "BloomDupeFilter, sized", "RFPDupeFilter"


class SampledSpider(TreeSpider):
    """Looks at the memory of its process a number of times."""

    def __init__(self, pages: int, **arguments: Any) -> None:
        super().__init__(pages=pages, **arguments)
        self.samples_mb: list[float] = []

    def parse(self, response: Response, **_: Any) -> Iterator[scrapy.Request]:
        """Request what the page links to."""
        yield from super().parse(response)
        if self.crawled % (self.pages // SAMPLES) == 0:
            self.samples_mb.append(resident_bytes() / 1e6)


def run(quick: bool) -> Section:  # noqa: FBT001 - every benchmark is called like this
    pages = 400 if quick else 200_000
    ours = {"DUPEFILTER_CLASS": "scrapy_bloom.BloomDupeFilter"}
    sized = {**ours, "BLOOM_EXPECTED_REQUESTS": pages}
    crawls = {
        name: crawl(SampledSpider, {"new": 10, "known": 0, "pages": pages}, settings)
        for name, settings in ((OURS, ours), (SIZED, sized), (SCRAPYS, {}))
    }
    scrapys = crawls[SCRAPYS]
    assert {crawled.pages for crawled in crawls.values()} == {pages}
    return Section(
        title="Memory of a whole crawl",
        method=(
            f"Crawls of a made-up site of {pages:,} pages, a tree. DUPEFILTER_CLASS is all that "
            f"differs, and for 'sized' BLOOM_EXPECTED_REQUESTS = {pages:,}; nothing is on disk. "
            "Each crawl is a process of its own. Memory is that of the whole process (RSS), and "
            "its peak the highest that the system has seen."
        ),
        checks=[
            at_least("MB less at the peak", scrapys.peak_mb - crawls[OURS].peak_mb, LESS_MB),
            at_least(
                f"MB less at the peak, with BLOOM_EXPECTED_REQUESTS = {pages:,}",
                scrapys.peak_mb - crawls[SIZED].peak_mb,
                LESS_MB,
            ),
        ],
        tables=[
            Table(
                (f"{pages:,} pages", "peak MB"),
                [(name, f"{crawled.peak_mb:.1f}") for name, crawled in crawls.items()],
            )
        ],
        plots=[
            Plot(
                name="crawl-memory",
                title=f"Memory of a crawl of {pages:,} pages",
                x="pages crawled",
                y="MB of the whole process (RSS)",
                series={
                    name: [
                        (number * pages // SAMPLES, round(mb, 1))
                        for number, mb in enumerate(crawled.samples_mb, 1)
                    ]
                    for name, crawled in crawls.items()
                },
                log_x=False,
                log_y=False,
            )
        ],
    )

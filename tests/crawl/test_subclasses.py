"""Subclasses and spiders that change the filter, next to Scrapy's own."""

from pathlib import Path

import pytest

from tests.support.crawls import BLOOM, Crawl, spider_with
from tests.support.sites import Site

PAGES = 40  # of the tree
SAFE = {"SCHEDULER": "scrapy_bloom.CrashSafeScheduler", "JOBDIR": "job"}

REPLACES = """
from scrapy.dupefilters import RFPDupeFilter

class ReplacingSpider(LinkSpider):
    name = "replacing"
    custom_settings = {"CONCURRENT_REQUESTS": 1}
    responses = 0

    def parse(self, response):
        self.responses += 1
        if self.responses == 20:
            scheduler = self.crawler.engine._slot.scheduler
            other = RFPDupeFilter(fingerprinter=self.crawler.request_fingerprinter)
            for change in (
                lambda: setattr(scheduler, "df", other),
                lambda: scheduler.dqs is not None and scheduler.dqs.pop(),
            ):
                try:
                    change()
                except AttributeError as error:
                    self.logger.info("Refused: %s", error)
        yield from super().parse(response)

del LinkSpider
"""


def test_a_spider_replaces_the_filter(tree: Site, tmp_path: Path) -> None:
    """All pages are new to the other filter, which also gets what would be dropped early."""
    spider = spider_with(tmp_path, REPLACES)
    hits = []
    for kind in ("scrapy.dupefilters.RFPDupeFilter", BLOOM):
        tree.forget()
        Crawl.finished(tree.url, tmp_path, {"DUPEFILTER_CLASS": kind}, spider=spider)
        hits.append(dict(tree.hits))
        assert sum(hits[-1].values()) > len(hits[-1])  # how many are repeated depends on the order
    assert hits[0].keys() == hits[1].keys()
    crawl = Crawl.finished(tree.url, tmp_path, SAFE, spider=spider)
    assert "Refused: the filter of CrashSafeScheduler cannot be replaced" in crawl.output
    assert "Refused: the queue of CrashSafeScheduler has no push(), pop()" in crawl.output


WITHOUT_SUPER = """
from scrapy_bloom import BloomDupeFilter

class Mine(BloomDupeFilter):
    def open(self):
        pass

    def close(self, reason):
        pass
"""


@pytest.mark.parametrize("settings", [{"JOBDIR": "job"}, SAFE], ids=["filter", "queue"])
def test_methods_that_call_no_super(
    settings: dict[str, object], tree: Site, tmp_path: Path
) -> None:
    """The filter is opened and closed all the same, so that the next run has what it recorded."""
    spider = spider_with(tmp_path, WITHOUT_SUPER)
    settings = {**settings, "DUPEFILTER_CLASS": "spider.Mine"}
    for _ in range(2):
        crawl = Crawl.finished(tree.url, tmp_path, settings, spider=spider)
        assert not crawl.lines("ERROR"), crawl.output
        assert "was killed" not in crawl.output
    assert {path for path, count in tree.hits.items() if count > 1} <= {"/p/0"}

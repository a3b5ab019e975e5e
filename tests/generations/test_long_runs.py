"""A run that is longer than the time window: what it has recorded does not expire within it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.crawls import Crawl, spider_with, with_modules
from tests.support.sites import Site, tree_site
from tests.support.workspace import outliving


@pytest.fixture
def few_pages() -> Iterator[Site]:
    site = tree_site(pages=40)
    yield site
    site.end()


JUMPING = """
import time

now, time.ahead = time.time, 0
time.time = lambda: now() + time.ahead
"""
JUMPS = """
import time

parse, pages = LinkSpider.parse, 0

def jump(self, response):
    global pages
    pages += 1
    time.ahead += 5000 * (pages % 8 == 0)  # more than a window and a quarter
    yield from parse(self, response)

LinkSpider.parse = jump
"""


@pytest.mark.parametrize("kind", ["file", "crawled"])
def test_a_machine_that_sleeps_in_mid_run(kind: str, few_pages: Site, tmp_path: Path) -> None:
    """Its clock is far ahead then; so it is when it is put forward."""
    (tmp_path / "sitecustomize.py").write_text(JUMPING)
    crawl = Crawl(
        few_pages.url,
        tmp_path,
        {
            **outliving(kind, tmp_path),
            "BLOOM_WINDOW_SECS": 4000,
            "DOWNLOAD_TIMEOUT": 10**6,  # by the same clock
            "CONCURRENT_REQUESTS": 4,
            "CLOSESPIDER_PAGECOUNT": 200,  # else it may never end
        },
        spider=spider_with(tmp_path, JUMPS),
        prefix=with_modules(tmp_path),
    )
    assert crawl.finish() == 0, crawl.output
    assert "'finish_reason': 'finished'" in crawl.output
    assert len(few_pages.hits) == 40
    assert [page for page, number in few_pages.hits.items() if number > 1] in ([], ["/p/0"])
    assert not crawl.our_lines("WARNING")

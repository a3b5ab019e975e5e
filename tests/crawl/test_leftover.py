"""A crawl that ends early, with a filter for later runs: what happens to its queued requests."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import bloom
from tests.support.crawls import SPIDER, Crawl, spider_with
from tests.support.sites import ScriptedSite, Site
from tests.support.workspace import in_redis

PAGES = 30  # of the tree
LOST = re.compile(
    r"The crawl ended early \((\w+)\), and its queue was in memory: up to ([\d,]+) pending "
    r"requests? (?:was|were) lost, but (.+) still reports them as duplicates to later runs"
)
RISK = "The pending requests are in the memory of this crawl: if it ends early, they are "
HELP = 'set SCHEDULER = "scrapy_bloom.CrashSafeScheduler"'


def ended_early(site: Site, path: Path, settings: dict[str, Any]) -> Crawl:
    crawl = Crawl.held(site, 10, path, {"CONCURRENT_REQUESTS": 4, **settings})
    assert crawl.interrupt() == 0, crawl.output
    assert "'finish_reason': 'shutdown'" in crawl.output
    assert len(site.hits) < PAGES
    return crawl


def finished(site: Site, path: Path, settings: dict[str, Any], spider: Path = SPIDER) -> Crawl:
    crawl = Crawl.finished(site.url, path, settings, spider=spider)
    assert "'finish_reason': 'finished'" in crawl.output
    return crawl


def test_a_lost_queue_is_logged(tree: Site, tmp_path: Path) -> None:
    settings = in_redis(tmp_path.name)
    crawl = ended_early(tree, tmp_path, settings)
    assert RISK in "".join(crawl.our_lines("INFO"))
    (warning,) = crawl.our_lines("WARNING")
    assert HELP in warning
    found = LOST.search(warning)
    assert found
    assert found[1] == "shutdown"
    crawl = finished(tree, tmp_path, settings)
    missing = PAGES - len(tree.hits)
    assert missing >= int(found[2].replace(",", "")) >= 1  # and what only they link to
    assert not LOST.search(crawl.output)  # nothing more is lost
    # What else the warning says will help does.
    where = [f"{settings['BLOOM_REDIS_URL']}#{tmp_path.name}"]
    assert bloom("reset", *where, "--yes", cwd=tmp_path).status == 0
    finished(tree, tmp_path, settings)
    assert len(tree.hits) == PAGES


@pytest.mark.parametrize("settings", [{}, {"JOBDIR": "job"}], ids=["in memory", "job"])
def test_no_warning_where_the_next_run_crawls_it(
    settings: dict[str, Any], tree: Site, tmp_path: Path
) -> None:
    crawl = ended_early(tree, tmp_path, settings)
    assert not crawl.our_lines("WARNING")
    assert "JOBDIR" not in "".join(crawl.our_lines("INFO"))
    tree.forget()
    finished(tree, tmp_path, {**settings, "JOBDIR": None})
    if "JOBDIR" not in settings:
        assert len(tree.hits) == PAGES


def test_no_warning_for_requests_that_are_not_filtered(tmp_path: Path) -> None:
    """The next run crawls all start requests again."""
    site = ScriptedSite({f"/{number}": [()] for number in range(20)})
    spider = spider_with(
        tmp_path,
        "def __init__(self, url, **kwargs):\n"
        "    scrapy.Spider.__init__(self, **kwargs)\n"
        "    self.start_urls = [f'{url}{number}' for number in range(20)]\n"
        "    self.host, self.extractor = urlsplit(url).netloc, LinkExtractor()\n"
        "LinkSpider.__init__ = __init__\n",
    )
    settings = in_redis(tmp_path.name, CLOSESPIDER_PAGECOUNT=1, CONCURRENT_REQUESTS=1)
    crawl = Crawl.finished(site.url, tmp_path, settings, spider=spider)
    assert len(site.hits) < 20
    assert "'finish_reason': 'closespider_pagecount'" in crawl.output
    assert not crawl.our_lines("WARNING")
    finished(site, tmp_path, {**settings, "CLOSESPIDER_PAGECOUNT": 0}, spider)
    assert len(site.hits) == 20
    site.end()

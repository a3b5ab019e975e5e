"""Several crawls in one job directory: one of them runs, the others are refused."""

import json
import time
from contextlib import closing
from pathlib import Path

import pytest

from scrapy_bloom.job.reader import FilterReader
from tests.support.crawls import BASE_SETTINGS, BLOOM, Crawl, run_script
from tests.support.sites import Site

PAGES = 30
SAFE = "scrapy_bloom.CrashSafeScheduler"


def check_once(site: Site) -> None:
    """Check that every page was requested once; the start page has several URLs."""
    assert set(site.hits) == {f"/p/{number}" for number in range(PAGES)}
    assert all(count == 1 for path, count in site.hits.items() if path != "/p/0")


def check_refused(crawl: Crawl) -> None:
    assert crawl.finish() != 0, crawl.output
    errors = crawl.our_lines("ERROR")
    assert len(errors) == 1, crawl.output
    text = "in use by another running crawl; wait for it to end, end it with scrapy"
    assert text in errors[0]


def is_closed(job: Path) -> bool:
    with closing(FilterReader(job / "bloom.sqlite")) as reader:
        return reader.is_closed


@pytest.mark.parametrize("scheduler", [None, SAFE], ids=["scrapys queue", "a queue that survives"])
def test_of_crawls_that_start_at_once_on_a_new_job_one_runs(
    scheduler: str | None, tree: Site, tmp_path: Path
) -> None:
    """It crawls every page once; each of the others has one error and a nonzero exit status."""
    tree.hold_after(0)
    settings = {"JOBDIR": "job", "SCHEDULER": scheduler}
    crawls = [Crawl(tree.url, tmp_path, settings) for _ in range(3)]
    # Held until the last one has tried: else it would come when the first is done.
    end = time.monotonic() + 100
    while sum(crawl.running() for crawl in crawls) > 1 and time.monotonic() < end:
        time.sleep(0.01)
    tree.release()
    (winner,) = [crawl for crawl in crawls if crawl.running()]
    assert winner.finish() == 0, winner.output
    assert not winner.lines("ERROR") + winner.our_lines("WARNING")
    check_once(tree)
    for crawl in crawls:
        if crawl is not winner:
            check_refused(crawl)
    # Nothing of theirs is left: the job is closed.
    assert is_closed(tmp_path / "job")


TWO_CRAWLERS = """
    import json, sys
    from scrapy.crawler import CrawlerProcess
    from tests.support.link_spider import LinkSpider

    process = CrawlerProcess(json.loads(sys.argv[1]))
    crawlers = [process.create_crawler(LinkSpider) for _ in range(2)]
    for crawler in crawlers:
        process.crawl(crawler, url=sys.argv[2])
    process.start()
    print([crawler.stats.get_value("finish_reason") for crawler in crawlers])
"""


def test_two_crawlers_of_one_process_cannot_share_a_job_either(tree: Site, tmp_path: Path) -> None:
    """The second crawl is refused, and does not release the locks of the first."""
    settings = {**BASE_SETTINGS, "DUPEFILTER_CLASS": BLOOM, "JOBDIR": "job"}
    ran = run_script(TWO_CRAWLERS, json.dumps(settings), tree.url, cwd=tmp_path)
    assert ran.stdout.strip() == "['finished', None]", ran.stderr[-3000:]
    errors = [
        line for line in ran.stderr.splitlines() if "[scrapy_bloom." in line and "ERROR" in line
    ]
    assert len(errors) == 1
    assert "job is in use by another running crawl" in errors[0]
    check_once(tree)
    assert is_closed(tmp_path / "job")

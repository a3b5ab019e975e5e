"""Several crawls on one job directory: one of them crawls, the others say so and end."""

import json
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from crawls import BASE_SETTINGS, BLOOM, SUPPORT, Crawl, with_modules
from sites import Site

PAGES = 150
SAFE = "scrapy_bloom.CrashSafeScheduler"


def check_once(site: Site) -> None:
    """Every page was asked for, and once; the start page has several URLs."""
    assert set(site.hits) == {f"/p/{number}" for number in range(PAGES)}
    assert all(count == 1 for path, count in site.hits.items() if path != "/p/0")


def check_refused(crawl: Crawl) -> None:
    assert crawl.finish() != 0, crawl.output
    (error,) = crawl.told("ERROR")
    assert "in use by another running crawl; wait for it to end, or give this one another" in error


@pytest.mark.parametrize("scheduler", [None, SAFE], ids=["scrapys queue", "a queue that survives"])
def test_of_crawls_that_start_at_once_on_a_new_job_one_crawls(
    scheduler: str | None, tree: Site, tmp_path: Path
) -> None:
    """It crawls every page once; each of the others has one error, and another exit status."""
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
    assert not winner.lines("ERROR") + winner.told("WARNING")
    check_once(tree)
    for crawl in crawls:
        if crawl is not winner:
            check_refused(crawl)
    # Nothing of theirs is left: the job is closed.
    assert not (tmp_path / "job/bloom.in-use").exists()
    assert len(list((tmp_path / "job/bloom").glob("*.bloom"))) == 1


def test_a_crawl_that_is_stopped_keeps_its_job_and_one_that_is_killed_does_not(
    tree: Site, tmp_path: Path
) -> None:
    """The lock is the kernel's: no file has to be removed by hand, and none is trusted."""
    settings = {"JOBDIR": "job", "SCHEDULER": SAFE}
    first = Crawl.held(tree, 10, tmp_path, settings)
    first.stop()
    check_refused(Crawl(tree.url, tmp_path, settings))
    first.send(signal.SIGCONT)
    tree.hold_after(30)
    first.wait_until(lambda: tree.total() >= 40 and tree.is_holding())
    first.kill()
    crawl = Crawl(tree.url, tmp_path, settings)
    assert crawl.finish() == 0, crawl.output
    assert len(tree.hits) == PAGES
    assert not crawl.lines("ERROR")


TWO_CRAWLERS = """
    import json, sys
    from scrapy.crawler import CrawlerProcess
    from link_spider import LinkSpider

    process = CrawlerProcess(json.loads(sys.argv[1]))
    crawlers = [process.create_crawler(LinkSpider) for _ in range(2)]
    for crawler in crawlers:
        process.crawl(crawler, url=sys.argv[2])
    process.start()
    print([crawler.stats.get_value("finish_reason") for crawler in crawlers])
"""


def test_two_crawlers_of_one_process_cannot_share_a_job_either(tree: Site, tmp_path: Path) -> None:
    """The second one is refused, and does not let go of what the first one holds."""
    settings = {**BASE_SETTINGS, "DUPEFILTER_CLASS": BLOOM, "JOBDIR": "job"}
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(TWO_CRAWLERS), json.dumps(settings), tree.url],
        cwd=tmp_path,
        env=with_modules(SUPPORT),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.stdout.strip() == "['finished', None]", ran.stderr[-3000:]
    told = [
        line for line in ran.stderr.splitlines() if "[scrapy_bloom." in line and "ERROR" in line
    ]
    assert len(told) == 1
    assert "job/bloom is in use by another running crawl" in told[0]
    check_once(tree)
    assert not (tmp_path / "job/bloom.in-use").exists()

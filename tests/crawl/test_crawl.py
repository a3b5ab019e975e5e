"""Real crawls: run, paused, resumed, killed."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.crawls import Crawl, spider_with
from tests.support.machine import REAL_SITES
from tests.support.sites import Site, python_doc_site, tree_site
from tests.support.workspace import make_older

ALL_AT_ONCE = {"CONCURRENT_REQUESTS_PER_DOMAIN": 50}
# Few at once, so that many wait when a crawl is ended.
JOB = {"JOBDIR": "job", "CONCURRENT_REQUESTS": 4}
DEFAULT_FILTER = {"DUPEFILTER_CLASS": "scrapy.dupefilters.RFPDupeFilter"}
PAGES = 50  # of the tree
SITES = {"tree": lambda: tree_site(PAGES), "python3-doc": python_doc_site}
NEEDED = pytest.mark.skipif(not REAL_SITES, reason="python3-doc is not installed")


@pytest.fixture(
    scope="module",
    params=["tree", pytest.param("python3-doc", marks=[NEEDED, pytest.mark.soak])],
)
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    site = SITES[request.param]()
    yield site
    site.end()


@pytest.fixture(scope="module")
def default_pages(site: Site, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The pages that a crawl with Scrapy's own filter asks for."""
    site.forget()
    Crawl.finished(site.url, tmp_path_factory.mktemp("default"), DEFAULT_FILTER)
    pages = set(site.hits)
    assert len(pages) >= PAGES
    return pages


def test_crawls_the_same_pages_as_the_default_filter(
    site: Site, default_pages: set[str], tmp_path: Path
) -> None:
    site.forget()
    crawl = Crawl.finished(site.url, tmp_path)
    assert "Bloom filter in memory" in crawl.output
    assert [path.suffix for path in tmp_path.iterdir()] == [".log"]
    assert set(site.hits) == default_pages
    assert "finish_reason': 'finished'" in crawl.output
    assert not crawl.lines("ERROR") + crawl.lines("WARNING")


def test_crawls_the_same_pages_when_paused_three_times(
    site: Site, default_pages: set[str], tmp_path: Path
) -> None:
    site.forget()
    for _ in range(3):
        crawl = Crawl.held(site, len(default_pages) // 5, tmp_path, JOB)
        assert crawl.interrupt() == 0
        assert "'finish_reason': 'shutdown'" in crawl.output
        assert len(site.hits) < len(default_pages)
    crawl = Crawl.finished(site.url, tmp_path, JOB)
    assert "'finish_reason': 'finished'" in crawl.output
    assert set(site.hits) == default_pages
    # Nothing twice, but the start page (its request is not filtered) and what redirects to it.
    assert sum(count > 1 for path, count in site.hits.items()) <= 2
    assert not crawl.lines("ERROR") + crawl.lines("WARNING")


def test_every_page_is_crawled_after_a_pause_and_a_kill(tree: Site, tmp_path: Path) -> None:
    """The next run says once what it sets aside and why, crawls everything, and ends."""
    assert Crawl.held(tree, 10, tmp_path, JOB).interrupt() == 0
    assert (tmp_path / "job/requests.queue/active.json").exists()
    Crawl.held(tree, 10, tmp_path, JOB).kill()
    assert len(tree.hits) < PAGES
    tree.forget()
    crawl = Crawl.finished(tree.url, tmp_path, JOB)
    assert "'finish_reason': 'finished'" in crawl.output
    assert set(tree.hits) == {f"/p/{number}" for number in range(PAGES)}
    (warning,) = crawl.lines("WARNING")
    assert not crawl.lines("ERROR")
    assert "did not close" in warning
    assert "scrapy_bloom.CrashSafeScheduler" in warning
    moved = set((tmp_path / "job").rglob("*.set-aside-*"))
    assert {path.name.partition(".set-aside-")[0] for path in moved} == {
        "bloom.sqlite",
        "requests.queue",
    }
    assert all(path.relative_to(tmp_path).as_posix() in warning for path in moved)


def test_a_copy_of_a_job_paused_under_scrapys_own_filter_goes_on(
    tree: Site, tmp_path: Path
) -> None:
    crawl = Crawl.held(tree, 16, tmp_path, {**DEFAULT_FILTER, **JOB})
    assert crawl.interrupt() == 0
    shutil.copytree(tmp_path / "job", tmp_path / "copy")
    crawl = Crawl.finished(tree.url, tmp_path, {**JOB, "JOBDIR": "copy"})
    assert set(tree.hits) == {f"/p/{number}" for number in range(PAGES)}
    assert sum(count > 1 for count in tree.hits.values()) <= 1  # the start page is not filtered
    assert "Imported " in crawl.output
    assert not crawl.lines("ERROR") + crawl.lines("WARNING")


CHANGES_DIRECTORY = """
import os

def parse(self, response, parse=LinkSpider.parse):
    os.makedirs("elsewhere", exist_ok=True)
    os.chdir("elsewhere")
    yield from parse(self, response)

LinkSpider.parse = parse
"""


def test_a_spider_may_change_the_working_directory(tree: Site, tmp_path: Path) -> None:
    spider = spider_with(tmp_path, CHANGES_DIRECTORY)
    settings = {
        **JOB,
        "SCHEDULER": "scrapy_bloom.CrashSafeScheduler",
        "BLOOM_EXPECTED_REQUESTS": "8",  # it has to grow there
    }
    for run in ("first", "second"):
        crawl = Crawl.finished(tree.url, tmp_path, {**settings, "BLOOM_RUN": run}, spider=spider)
        assert not crawl.our_lines("ERROR") + crawl.our_lines("WARNING")
    assert len(tree.hits) == PAGES
    assert tree.total() <= PAGES + 3  # the start page is not filtered


@pytest.mark.parametrize("end", ["killed", "paused and killed", "copied without times"])
def test_a_job_killed_under_scrapys_own_filter_loses_no_page(
    tree: Site, tmp_path: Path, end: str
) -> None:
    """A copy of a paused job looks killed if its files have other times."""
    settings = {**DEFAULT_FILTER, **JOB}
    if end != "killed":
        crawl = Crawl.held(tree, 8, tmp_path, settings)
        assert crawl.interrupt() == 0
        make_older(tmp_path / "job")
    if end == "copied without times":
        os.utime(tmp_path / "job/requests.queue/active.json", (1, 1))
    else:
        Crawl.held(tree, 20, tmp_path, settings).kill()
    tree.forget()
    crawl = Crawl.finished(tree.url, tmp_path, JOB)
    assert len(tree.hits) == PAGES
    (warning,) = crawl.our_lines("WARNING")
    assert "starts over with an empty filter" in warning
    assert "or the files were copied without their times (cp -a keeps them)" in warning


def test_a_job_killed_with_its_queue_empty_loses_no_page(tmp_path: Path) -> None:
    """All that was queued was being downloaded: no file of the queue is left to be younger."""
    tree = tree_site(pages=20)
    settings = {**DEFAULT_FILTER, **JOB, "CONCURRENT_REQUESTS": 1}
    crawl = Crawl.held(tree, 4, tmp_path, settings)
    assert crawl.interrupt() == 0
    make_older(tmp_path / "job")
    tree.hold_after(0)
    crawl = Crawl(tree.url, tmp_path, {**settings, "CONCURRENT_REQUESTS": 50, **ALL_AT_ONCE})
    queue = tmp_path / "job/requests.queue"
    # Unlike rglob, walk takes no offence at a directory that the crawl removes meanwhile.
    crawl.wait_until(
        lambda: [file for *_, files in os.walk(queue) for file in files] == ["active.json"]
    )
    crawl.kill()
    tree.forget()
    crawl = Crawl.finished(tree.url, tmp_path, JOB)
    assert len(tree.hits) == 20
    assert len(crawl.our_lines("WARNING")) == 1
    tree.end()

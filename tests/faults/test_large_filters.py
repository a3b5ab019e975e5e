"""A filter for many more requests than are crawled takes the space and memory of those."""

import sys
from pathlib import Path

import pytest

from tests.support.crawls import Crawl
from tests.support.sites import Site

PAGES = 150
MOST_DISK, MOST_MEMORY = 40 << 20, 40 << 20  # bytes; the filter has 2.7 GB when it is full
OWN = {"DUPEFILTER_CLASS": "scrapy.dupefilters.RFPDupeFilter", "JOBDIR": "own"}


def peak(crawl: Crawl) -> int:
    """Return the most memory that a running crawl has had."""
    lines = Path(f"/proc/{crawl.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def space(directory: Path) -> int:
    return sum(file.lstat().st_blocks * 512 for file in directory.rglob("*"))


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
@pytest.mark.parametrize("scheduler", [None, "scrapy_bloom.CrashSafeScheduler"])
def test_a_crawl_of_some_pages(scheduler: str | None, tree: Site, tmp_path: Path) -> None:
    settings = {"JOBDIR": "job", "SCHEDULER": scheduler, "BLOOM_EXPECTED_REQUESTS": "500M"}
    usual = Crawl.held(tree, 140, tmp_path, OWN)
    most = peak(usual) + MOST_MEMORY
    usual.kill()
    tree.forget()
    Crawl.held(tree, 50, tmp_path, settings).kill()
    crawl = Crawl.held(tree, 80, tmp_path, settings)
    assert peak(crawl) < most
    assert space(tmp_path / "job") < MOST_DISK
    tree.release()
    assert crawl.finish() == 0, crawl.output
    assert space(tmp_path / "job") < MOST_DISK
    assert len(tree.hits) == PAGES

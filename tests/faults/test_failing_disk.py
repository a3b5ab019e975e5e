"""A disk that fails to write: CrashSafeScheduler stops, and what the disk has stays usable.

The kernel reports a failed write at the next sync, once. Then it takes the page for a written one.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.crawls import Crawl, syncing_every
from tests.support.disks import FailingDisk, mounted
from tests.support.sites import Site

PAGES = 150


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FailingDisk]:
    with mounted(FailingDisk, tmp_path / "failing") as disk:
        yield disk


def test_a_crawl_ends_and_loses_no_page(disk: FailingDisk, tree: Site, tmp_path: Path) -> None:
    settings = {
        "SCHEDULER": "scrapy_bloom.CrashSafeScheduler",
        "JOBDIR": f"{disk.path}/job",
    }
    crawl = Crawl.held(tree, 30, tmp_path, settings, spider=syncing_every(0.1, tmp_path))
    disk.fail()
    tree.delay = 0.02
    tree.release()
    assert crawl.finish() == 0, crawl.output
    (line,) = crawl.our_lines("ERROR")
    assert "nothing is lost: free some space or repair the disk, and" in line
    assert "'finish_reason': 'bloom_queue_failed'" in crawl.output
    assert len(tree.hits) < PAGES
    tree.delay = 0
    disk.cut()
    disk.repair()
    disk.restart()
    crawl = Crawl.finished(tree.url, tmp_path, settings)
    assert not crawl.our_lines("WARNING") + crawl.our_lines("ERROR")
    assert len(tree.hits) == PAGES

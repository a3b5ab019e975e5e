"""CrashSafeScheduler after a power cut: the disk is as it was at some instant before."""

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.crawls import Crawl, spider_with
from tests.support.disks import Disk, mounted
from tests.support.sites import Site

PAGES = 80
SAFE = {"SCHEDULER": "scrapy_bloom.CrashSafeScheduler", "JOBDIR": "job"}
CUTS = 2  # one while the crawl runs, one while it opens what a kill has left
MANY_CUTS = 30


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with mounted(Disk, tmp_path / "power") as disk:
        yield disk


RARE, OFTEN = 3600, 0.05  # seconds between two syncs
# So that blocks are written all the time.
FAST = """
from scrapy_bloom.job import file, filter
filter.LocalBackend._least_new, file.SYNC_SECS = 10, {}
"""
VARIANTS: dict[str, tuple[float, dict[str, object]]] = {
    "rare syncs": (RARE, {}),
    "frequent syncs": (OFTEN, {}),
    "growing": (OFTEN, {"BLOOM_EXPECTED_REQUESTS": 20}),
    "a window": (OFTEN, {"BLOOM_WINDOW_SECS": 2}),
}


def cut_at_random(
    disk: Disk, site: Site, path: Path, settings: dict, spider: Path, *, kill_first: bool = False
) -> None:
    """Cut the power of a running crawl's disk, which has some files newer than others."""
    crawl = Crawl.held(site, random.randint(5, 50), path, settings, spider=spider)
    crawl.stop()
    # The kernel may write the pages of either file at any time.
    for file in disk.path.rglob("bloom.sqlite*"):
        if random.random() < 0.5:
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
    if kill_first:
        crawl.kill()
        # It opens what the kill has left.
        crawl = Crawl.held(site, 0, path, settings, spider=spider)
        crawl.stop()
    disk.cut()
    crawl.kill()
    disk.restart()


@pytest.mark.parametrize("number", [CUTS, pytest.param(MANY_CUTS, marks=pytest.mark.soak)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_cuts_at_random_instants(
    variant: str, number: int, disk: Disk, tree: Site, tmp_path: Path
) -> None:
    secs, more = VARIANTS[variant]
    spider = spider_with(tmp_path, FAST.format(secs))
    for cut in range(number):
        tree.forget()
        settings = {**SAFE, **more, "JOBDIR": f"{disk.path}/job-{cut}"}
        work = tmp_path / str(cut)
        cut_at_random(disk, tree, work, settings, spider, kill_first=bool(cut % 2))
        crawl = Crawl.finished(tree.url, work, settings, spider=spider)
        assert not crawl.our_lines("ERROR") + crawl.our_lines("WARNING")
        assert len(tree.hits) == PAGES
        shutil.rmtree(settings["JOBDIR"])


def test_a_cut_with_scrapys_scheduler(disk: Disk, tree: Site, tmp_path: Path) -> None:
    settings = {"JOBDIR": f"{disk.path}/job"}
    crawl = Crawl.held(tree, 30, tmp_path, settings)
    crawl.stop()
    os.sync()  # the filter is as new as it can be
    disk.cut()
    crawl.kill()
    disk.restart()
    tree.forget()
    crawl = Crawl.finished(tree.url, tmp_path, settings)
    (line,) = crawl.our_lines("WARNING")
    assert "The crawl starts over with an empty filter" in line
    assert len(tree.hits) == PAGES


def test_a_cut_after_a_pause_with_scrapys_scheduler(disk: Disk, tree: Site, tmp_path: Path) -> None:
    """The filter says that it was closed, so the disk must have Scrapy's queue."""
    settings: dict[str, object] = {
        "JOBDIR": str(disk.path / "job"),
        # Scrapy writes it when the job is closed already, and fails to read it.
        "EXTENSIONS": '{"scrapy.extensions.spiderstate.SpiderState": null}',
    }
    crawl = Crawl.held(tree, 30, tmp_path, settings)
    assert crawl.interrupt() == 0, crawl.output
    disk.cut()
    disk.restart()
    crawl = Crawl.finished(tree.url, tmp_path, settings)
    assert "Traceback" not in crawl.output
    assert not crawl.our_lines("WARNING") + crawl.our_lines("ERROR")
    assert len(tree.hits) == PAGES

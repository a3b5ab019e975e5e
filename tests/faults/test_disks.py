"""Disks that fill up or lose files during a crawl: no page is lost, one line says what to do."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.crawls import Crawl, syncing_every
from tests.support.disks import Disk, mounted
from tests.support.sites import Site

PAGES = 60
SAFE = "scrapy_bloom.CrashSafeScheduler"
SCHEDULERS = [None, SAFE]
OFTEN = 0.05  # seconds between two syncs


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with mounted(Disk, tmp_path / "small") as disk:
        yield disk


def all_pages(site: Site) -> bool:
    return set(site.hits) == {f"/p/{number}" for number in range(PAGES)}


def on(disk: Disk, path: Path, scheduler: str | None, expected: int = 1000) -> dict[str, object]:
    """Return the settings of a job on a disk; Scrapy's queue cannot stand a full one."""
    job = disk.path / "job"
    job.mkdir()
    (path / "queue").mkdir()
    (job / "requests.queue").symlink_to(path / "queue")
    return {"SCHEDULER": scheduler, "JOBDIR": job, "BLOOM_EXPECTED_REQUESTS": expected}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("secs", [OFTEN, 3600])
def test_a_disk_that_fills_up_in_mid_crawl_costs_no_page(
    secs: float, scheduler: str | None, disk: Disk, tree: Site, tmp_path: Path
) -> None:
    """The queue closes the spider; under Scrapy's scheduler, the next run starts over."""
    spider = syncing_every(secs, tmp_path)
    settings = {**on(disk, tmp_path, scheduler, 100_000), "CONCURRENT_REQUESTS": 4}
    assert Crawl.held(tree, 5, tmp_path, settings, spider=spider).interrupt() == 0
    crawl = Crawl.held(tree, 5, tmp_path, settings, spider=spider)
    disk.fill()
    tree.release()
    assert crawl.finish() == 0, crawl.output
    (error,) = crawl.our_lines("ERROR")
    if scheduler:
        assert "'finish_reason': 'bloom_queue_failed'" in crawl.output
        assert "free some space or repair the disk, and start the crawl again" in error
        assert len(tree.hits) < PAGES
    else:
        assert "'finish_reason': 'finished'" in crawl.output
        assert "free some space" in error or "starts over; check the disk" in error
        assert all_pages(tree)
        tree.forget()
    disk.free()
    crawl = Crawl.finished(tree.url, tmp_path, settings)
    assert "'finish_reason': 'finished'" in crawl.output
    assert not crawl.our_lines("ERROR")  # Scrapy's own spider.state may have found no room
    starts_over = "The crawl starts over with an empty filter" in crawl.output
    assert starts_over == (scheduler is None)
    assert all_pages(tree)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_full_disk_refuses_a_crawl(
    scheduler: str | None, disk: Disk, tree: Site, tmp_path: Path
) -> None:
    settings = on(disk, tmp_path, scheduler)
    assert Crawl.held(tree, 5, tmp_path, settings).interrupt() == 0
    disk.fill()
    assert "free some space" in Crawl(tree.url, tmp_path, settings).refusal()
    disk.free()
    tree.release()
    Crawl.finished(tree.url, tmp_path, settings)
    assert all_pages(tree)


def start(tree: Site, tmp_path: Path, scheduler: str | None, **settings: object) -> Crawl:
    settings = {"JOBDIR": "job", "SCHEDULER": scheduler, "CONCURRENT_REQUESTS": 2, **settings}
    return Crawl.held(tree, 2, tmp_path, settings, spider=syncing_every(OFTEN, tmp_path))


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("fate", ["removed", "replaced", "removed with its directory"])
def test_a_file_removed_or_replaced_under_a_crawl_costs_no_page(
    fate: str, scheduler: str | None, tree: Site, tmp_path: Path
) -> None:
    """For example, by a restored backup, which is not overwritten."""
    crawl = start(tree, tmp_path, scheduler)
    if fate == "replaced":
        (tmp_path / "other").write_bytes(b"a backup")
        (tmp_path / "other").rename(tmp_path / "job/bloom.sqlite")
    elif fate == "removed":
        (tmp_path / "job/bloom.sqlite").unlink()
    else:  # in one step, because the crawl creates files
        (tmp_path / "job").rename(tmp_path / "removed")
        shutil.rmtree(tmp_path / "removed")
    tree.delay = 0.05
    tree.release()
    assert crawl.finish() == 0, crawl.output
    (error,) = crawl.our_lines("ERROR")
    assert "bloom.sqlite was removed, or replaced by another file" in error
    assert "nothing is lost" not in error
    tree.delay = 0
    if fate == "replaced":
        assert (tmp_path / "job/bloom.sqlite").read_bytes() == b"a backup"
    elif fate == "removed":
        line = Crawl(tree.url, tmp_path, {"JOBDIR": "job", "SCHEDULER": scheduler}).refusal()
        assert "the file is missing, and its log " in line
    shutil.rmtree(tmp_path / "job", ignore_errors=True)
    # The next run begins with an empty filter, and crawls all of it again.
    tree.forget()
    Crawl.finished(tree.url, tmp_path, {"JOBDIR": "job", "SCHEDULER": scheduler})
    assert all_pages(tree)


@pytest.mark.parametrize(("length", "scheduler"), [(0, None), (4096, SAFE)])
def test_a_file_that_was_truncated_under_a_crawl_is_not_read_as_an_emptier_one(
    length: int, scheduler: str | None, tree: Site, tmp_path: Path
) -> None:
    crawl = start(tree, tmp_path, scheduler)
    os.truncate(tmp_path / "job/bloom.sqlite", length)
    tree.release()
    assert crawl.finish() == 0, crawl.output
    tree.forget()
    crawl = Crawl(tree.url, tmp_path, {"JOBDIR": "job", "SCHEDULER": scheduler})
    if crawl.finish() == 0:
        assert all_pages(tree)
    else:
        assert not tree.hits
        (error,) = crawl.our_lines("ERROR")
        assert "bloom.sqlite cannot be used: " in error or "database of another" in error
        assert "move it away" in error.lower()

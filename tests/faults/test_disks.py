"""Disks that fill up or lose files during a crawl: no page is lost, one line says what to do."""

import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from subprocess import run

import pytest

from scrapy_bloom.files.file import FileGeneration
from tests.support.crawls import Crawl
from tests.support.disks import Btrfs, Disk, Xfs, mounted
from tests.support.sites import Site

PAGES = 150
FILTER = "kept/bloom/generation-0001.bloom"
SAFE = {"SCHEDULER": "scrapy_bloom.CrashSafeScheduler"}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with mounted(Disk, tmp_path / "small") as disk:
        yield disk


def all_pages(site: Site) -> bool:
    return set(site.hits) == {f"/p/{number}" for number in range(PAGES)}


def on(disk: Disk, path: Path) -> Path:
    """Have the filter of a job on a disk of its own: Scrapy's queue cannot stand a full disk."""
    kept = disk.path / "kept"
    kept.mkdir()
    (path / "job").mkdir()
    (path / "job/bloom").symlink_to(kept)
    return kept


def test_a_disk_that_fills_up_in_mid_crawl_costs_no_page(
    disk: Disk, tree: Site, tmp_path: Path
) -> None:
    """One error names the missing room; the existing file works on; a later run grows again."""
    kept = on(disk, tmp_path)
    settings = {"JOBDIR": "job", "BLOOM_EXPECTED_REQUESTS": 30, "CONCURRENT_REQUESTS": 4}
    crawl = Crawl.held(tree, 5, tmp_path, settings)
    disk.fill()
    tree.release()
    assert crawl.finish() == 0, crawl.output
    assert all_pages(tree)
    (error,) = crawl.lines("ERROR")
    assert "No room for a new generation" in error
    assert "No space left on device" in error
    assert "free some space" in error
    assert "'finish_reason': 'finished'" in crawl.output
    assert [path.name for path in kept.glob("*.bloom*")] == ["generation-0001.bloom"]
    assert not FileGeneration.at(kept / "generation-0001.bloom").in_use
    # With room again, the next run grows, and knows all.
    disk.free()
    tree.forget()
    settings = {**settings, "BLOOM_EXPECTED_REQUESTS": 1000}
    crawl = Crawl.finished(tree.url, tmp_path, settings)
    assert set(tree.hits) == {"/p/0"}
    assert not crawl.lines("ERROR")


def test_a_queue_on_a_disk_that_fills_up_goes_on_when_there_is_room(
    disk: Disk, tree: Site, tmp_path: Path
) -> None:
    """The spider is closed, one error says what to do, and the same command ends the job."""
    settings = {**SAFE, "JOBDIR": disk.path / "kept", "BLOOM_EXPECTED_REQUESTS": 1000}
    crawl = Crawl.held(tree, 5, tmp_path, settings)
    disk.fill()
    tree.release()
    assert crawl.finish() == 0, crawl.output
    assert "'finish_reason': 'bloom_queue_failed'" in crawl.output
    (error,) = crawl.our_lines("ERROR")
    assert f"{disk.path}/kept/requests.sqlite, or its filter, cannot be" in error
    assert "free some space or repair the disk, and start the crawl again" in error
    assert len(tree.hits) < PAGES
    disk.free()
    crawl = Crawl.finished(tree.url, tmp_path, settings)
    assert "'finish_reason': 'finished'" in crawl.output
    assert not crawl.our_lines("ERROR")  # Scrapy's own spider.state may have found no room
    assert all_pages(tree)


def test_a_full_disk_ends_no_crawl_by_a_signal(disk: Disk, tree: Site, tmp_path: Path) -> None:
    """Every bit of a filter has its place on the disk before it is set: otherwise, SIGBUS."""
    kept = on(disk, tmp_path)
    settings = {"JOBDIR": "job", "BLOOM_EXPECTED_REQUESTS": 100_000}
    crawl = Crawl.held(tree, 5, tmp_path, settings)
    disk.fill()
    tree.release()
    assert crawl.finish() == 0, crawl.output
    assert not crawl.our_lines("ERROR")
    assert all_pages(tree)
    assert FileGeneration.at(kept / "generation-0001.bloom").count >= PAGES - 1


@pytest.mark.parametrize("kind", [Btrfs, Xfs])
@pytest.mark.parametrize("scheduler", [None, SAFE["SCHEDULER"]])
@pytest.mark.parametrize("when", ["before the start", "in mid-crawl"])
def test_a_full_disk_that_copies_on_write_ends_no_crawl_by_a_signal(
    kind: type[Disk], scheduler: str | None, when: str, tree: Site, tmp_path: Path
) -> None:
    """Space that was reserved is of no use there: the filter looks for room before it writes."""
    with mounted(kind, tmp_path / "small") as disk:
        settings = {"SCHEDULER": scheduler, "JOBDIR": "job", "BLOOM_EXPECTED_REQUESTS": 100_000}
        if scheduler:
            settings["JOBDIR"] = disk.path / "kept"
        else:
            on(disk, tmp_path)
        assert Crawl.held(tree, 5, tmp_path, settings).interrupt() == 0
        file = disk.path / "kept/generation-0001.bloom"
        if scheduler:
            file = disk.path / "kept/bloom/generation-0001.bloom"
        if kind is Xfs:
            run(["cp", "--reflink=always", file, disk.path / "copy"], check=True, timeout=60)
        if when == "before the start":
            disk.fill()
            assert "free some space" in Crawl(tree.url, tmp_path, settings).refusal()
        else:
            crawl = Crawl.held(tree, 5, tmp_path, settings)
            disk.fill()
            tree.release()
            assert crawl.finish() == 0, crawl.output
            errors = crawl.our_lines("ERROR")
            assert errors
            assert "free some space" in errors[0]
            reason = "bloom_queue_failed" if scheduler else "bloom_outage"
            assert f"'finish_reason': '{reason}'" in crawl.output
        disk.free()
        crawl = Crawl.finished(tree.url, tmp_path, settings)
        assert "'finish_reason': 'finished'" in crawl.output
        assert all_pages(tree)


def start(tree: Site, tmp_path: Path, **settings: object) -> Crawl:
    settings = {"JOBDIR": "kept", "BLOOM_EXPECTED_REQUESTS": 40, **settings}
    return Crawl.held(tree, 2, tmp_path, {**settings, "CONCURRENT_REQUESTS": 2})


def test_a_directory_removed_under_a_crawl_costs_no_page(tree: Site, tmp_path: Path) -> None:
    """The crawl still uses the open file. Errors say that it cannot grow, and that it is gone."""
    crawl = start(tree, tmp_path)
    shutil.rmtree(tmp_path / "kept/bloom")
    tree.release()
    assert crawl.finish() == 0, crawl.output
    assert all_pages(tree)
    assert all(count == 1 for path, count in tree.hits.items() if path != "/p/0")
    no_room, gone = crawl.lines("ERROR")
    assert "No room for a new generation" in no_room
    assert "generation-0002.bloom cannot be created: No such file or directory" in no_room
    assert "kept/bloom/generation-0001.bloom was removed, or replaced by another file" in gone
    # The next run begins with an empty filter, and crawls all of it again.
    tree.forget()
    Crawl.finished(tree.url, tmp_path, {"JOBDIR": "kept"})
    assert all_pages(tree)


@pytest.mark.parametrize("length", [0, 4096])
def test_the_next_run_refuses_a_file_that_was_truncated_under_a_crawl(
    length: int, tree: Site, tmp_path: Path
) -> None:
    """The kernel ends a process that writes to a mapping without a file, before it can log that.

    The next run does: nothing is taken for a smaller or emptier filter.
    """
    crawl = start(tree, tmp_path)
    os.truncate(tmp_path / FILTER, length)
    tree.release()
    assert crawl.finish() == -signal.SIGBUS, crawl.output
    before = (tmp_path / FILTER).read_bytes()
    tree.forget()
    crawl = Crawl(tree.url, tmp_path, {"JOBDIR": "kept"})
    assert crawl.finish() != 0
    assert not tree.hits
    (error,) = crawl.our_lines("ERROR")
    assert re.search(FILTER + " (is cut off|has 4,096 bytes, but its header)", error)
    assert "move all generation-" in error
    assert (tmp_path / FILTER).read_bytes() == before


def test_a_file_replaced_under_a_crawl_is_not_overwritten(tree: Site, tmp_path: Path) -> None:
    """For example, a restored backup: the crawl still uses the file that it opened."""
    crawl = start(tree, tmp_path, BLOOM_EXPECTED_REQUESTS=1000)
    other = tmp_path / "other"
    other.write_bytes(b"a backup")
    other.rename(tmp_path / FILTER)
    tree.release()
    assert crawl.finish() == 0, crawl.output
    assert all_pages(tree)
    (error,) = crawl.lines("ERROR")
    assert "kept/bloom/generation-0001.bloom was removed, or replaced by another file" in error
    assert "the next crawl lacks the requests that this process recorded" in error
    assert (tmp_path / FILTER).read_bytes() == b"a backup"

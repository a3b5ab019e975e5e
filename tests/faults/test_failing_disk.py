"""A disk that fails to write: CrashSafeScheduler stops, and what the disk has stays usable.

The kernel reports a failed write at the next sync, once. Then it takes the page for a written one.
"""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from scrapy_bloom import StorageError
from scrapy_bloom.files.directory import FilterReader
from scrapy_bloom.queues.batch import Batch, Found
from scrapy_bloom.queues.sqlite import RequestDatabase
from tests.support.crawls import Crawl, syncing_every
from tests.support.disks import FailingDisk, mounted
from tests.support.local_filters import fps
from tests.support.logged_filters import LoggedFilter
from tests.support.request_queues import begun
from tests.support.sites import Site

PAGES = 150
FILTER = "bloom/generation-0001.bloom"
NO_SPACE = "No space left on device"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FailingDisk]:
    with mounted(FailingDisk, tmp_path / "failing") as disk:
        yield disk


def restart(disk: FailingDisk) -> None:
    disk.cut()
    disk.repair()
    disk.restart()


@pytest.mark.parametrize("fails", ["all of the disk", "the filter"])
def test_a_crawl_ends_and_loses_no_page(
    fails: str, disk: FailingDisk, tree: Site, tmp_path: Path
) -> None:
    settings = {
        "SCHEDULER": "scrapy_bloom.CrashSafeScheduler",
        "JOBDIR": f"{disk.path}/job",
    }
    crawl = Crawl.held(tree, 30, tmp_path, settings, spider=syncing_every(0.1, tmp_path))
    disk.fail() if fails == "all of the disk" else disk.fail_within(disk.path / "job" / FILTER)
    tree.delay = 0.02
    tree.release()
    assert crawl.finish() == 0, crawl.output
    (line,) = crawl.our_lines("ERROR")
    assert "free some space or repair the disk, and start the crawl again" in line
    assert "'finish_reason': 'bloom_queue_failed'" in crawl.output
    assert len(tree.hits) < PAGES
    tree.delay = 0
    restart(disk)
    crawl = Crawl.finished(tree.url, tmp_path, settings)
    assert not crawl.our_lines("WARNING") + crawl.our_lines("ERROR")
    assert len(tree.hits) == PAGES


@pytest.mark.parametrize("ends", ["close", "die"])
def test_bits_that_the_disk_lacks_are_written_by_the_next_run(ends: str, disk: FailingDisk) -> None:
    """They are in memory, so the filter already reports them as recorded."""
    job, pages = disk.path / "job", fps(200)
    crawl = LoggedFilter(job, capacity=1_000_000)
    crawl.find(*pages)
    crawl.store()
    disk.fail_within(job / FILTER)
    with pytest.raises(OSError, match=NO_SPACE):
        crawl.checkpoint()
    getattr(crawl, ends)()
    disk.repair()
    LoggedFilter(job).close()
    disk.cut()
    disk.restart()
    with closing(FilterReader(job / "bloom")) as reader:
        assert all(reader.are_recorded(pages))


def test_forgotten_pages_that_the_disk_lacks_fail_the_checkpoint(
    disk: FailingDisk, tmp_path: Path
) -> None:
    """There are so many that SQLite makes a checkpoint itself, and hides its errors."""
    job, bloom, pages = tmp_path / "job", disk.path / "bloom", [b"%2000d" % n for n in range(3000)]
    crawl = LoggedFilter(job, bloom, capacity=5000)
    crawl.find(*pages)
    crawl.forget(pages[0])
    crawl.store()
    crawl.checkpoint()
    crawl.forget(*pages[1:])
    crawl.store()
    disk.fail_when_free(2 << 20)
    with pytest.raises((OSError, StorageError)):
        crawl.checkpoint()
    crawl.close()
    restart(disk)
    crawl = LoggedFilter(job, bloom)
    assert not any(each in crawl.backend for each in pages)
    crawl.close()


@pytest.mark.parametrize("tries_again", [False, True])
def test_a_queue_whose_log_the_disk_lacks_is_not_damaged(
    tries_again: bool, disk: FailingDisk
) -> None:
    """Otherwise, SQLite writes pages into the file that its log on the disk cannot complete."""
    path = disk.path / "requests.sqlite"
    found = [Found(bytes(1000), b"page %d" % number) for number in range(3000)]
    database = begun(path)
    database.apply(Batch(found))
    database.close()
    database = begun(path)
    disk.fail_when_free(4 << 20)
    for first in range(1, 3000, 300):
        database.apply(Batch(found, done=list(range(first, first + 300, 2))))
    with pytest.raises(OSError, match=NO_SPACE):
        database.sync()
    database.close()
    if tries_again:
        database = RequestDatabase(path, by_slot=False)
        with pytest.raises(StorageError):
            database.begin()
        database.close()
    restart(disk)
    database = begun(path)
    # Some of the first batches may have reached the disk; each adds 3,000 and removes 150.
    assert database.left in range(3000, 30_000, 2850)
    assert database._db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    database.close()


def test_a_checkpoint_of_sqlite_that_fails_is_the_last_one(disk: FailingDisk) -> None:
    """Only it gets the error: to the next checkpoint, the pages would look written."""
    path = disk.path / "requests.sqlite"
    database = begun(path)
    database.apply(Batch([Found(bytes(3000), b"page %d" % number) for number in range(3000)]))
    database.sync()
    disk.fail_when_free(0)  # the log has all of it; the file itself cannot grow
    database.checkpointed(database.seq)
    with pytest.raises(OSError, match="its checkpoint failed"):
        database.sync()
    database.close()
    disk.repair()
    disk.cut()
    disk.restart()
    database = begun(path)
    assert database.left == 3000
    assert database._db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    database.close()

"""A disk that fails to write: CrashSafeScheduler stops, and what the disk has stays usable.

The kernel reports a failed write at the next sync, once. Then it takes the page for a written one.
"""

from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from scrapy_bloom import StorageError
from scrapy_bloom.job.reader import FilterReader
from scrapy_bloom.queues.sqlite_store import SQLiteStore
from scrapy_bloom.queues.store import Batch, Ended, Entered
from tests.support.crawls import Crawl, syncing_every
from tests.support.disks import FailingDisk, mounted
from tests.support.local_filters import fps
from tests.support.request_queues import SHOP, begun, counts_in
from tests.support.sites import Site
from tests.support.stores import InFiles

PAGES = 150
NO_SPACE = "No space left on device"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FailingDisk]:
    with mounted(FailingDisk, tmp_path / "failing") as disk:
        yield disk


def restart(disk: FailingDisk) -> None:
    disk.cut()
    disk.repair()
    disk.restart()


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
    restart(disk)
    crawl = Crawl.finished(tree.url, tmp_path, settings)
    assert not crawl.our_lines("WARNING") + crawl.our_lines("ERROR")
    assert len(tree.hits) == PAGES


@pytest.mark.parametrize("is_killed", [False, True], ids=["closed", "killed"])
def test_what_the_disk_lacks_is_written_by_the_next_run(is_killed: bool, disk: FailingDisk) -> None:
    """The kernel has it in memory, and the next run sees it there."""
    files, pages = InFiles(disk.path / "job", capacity=1_000_000), fps(200)
    store = files.make()
    store.open(SHOP)
    disk.fail_when_free(0)
    store.apply(Batch([Entered(bytes(30_000), each) for each in pages]))
    with pytest.raises(StorageError, match=NO_SPACE):
        store.sync()
    left = [(path, path.read_bytes()) for path in files.job.glob("bloom.sqlite*")]
    with suppress(StorageError):
        store.close()
    disk.repair()
    for path, data in left if is_killed else ():
        path.write_bytes(data)
    files.open()
    files.close()
    disk.cut()
    disk.restart()
    with closing(FilterReader(files.path)) as reader:
        assert reader.are_seen(pages) == [counts_in(files.path) == (200, 0)] * 200


@pytest.mark.parametrize("tries_again", [False, True])
def test_a_queue_whose_log_the_disk_lacks_is_not_damaged(
    tries_again: bool, disk: FailingDisk
) -> None:
    """Otherwise, SQLite writes pages into the file that its log on the disk cannot complete."""
    path = disk.path / "bloom.sqlite"
    entered = [Entered(bytes(1000)) for _ in range(3000)]
    store = begun(path)
    store.apply(Batch(entered))
    store.close()
    store = begun(path)
    disk.fail_when_free(4 << 20)
    for _ in range(10):
        taken = store.apply(Batch(want=150)).taken
        store.apply(Batch(entered, ended=[Ended(each.id) for each in taken]))
    with pytest.raises(StorageError, match=NO_SPACE):
        store.sync()
    with suppress(StorageError):
        store.close()
    if tries_again:
        with pytest.raises(StorageError):
            begun(path)
    restart(disk)
    store = begun(path)
    # Some of the first batches may have reached the disk; each adds 3,000 and removes 150.
    assert store.pending in range(3000, 30_000, 2850)
    assert is_whole(store)
    store.close()


def is_whole(store: SQLiteStore) -> bool:
    return store._database.file.execute("PRAGMA integrity_check").fetchall() == [("ok",)]

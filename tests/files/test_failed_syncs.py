"""Checkpoints whose syncs fail: nothing more is applied or deleted, and somebody is told."""

import errno
import os
from contextlib import closing
from pathlib import Path

import pytest

from scrapy_bloom import StorageError
from scrapy_bloom.files.directory import FilterReader
from scrapy_bloom.files.forgotten import NAME
from scrapy_bloom.files.log import LogRecords
from tests.support.local_filters import fps
from tests.support.logged_filters import LoggedFilter

ONE = "generation-0001.bloom"


def in_files(directory: Path, *fingerprints: bytes) -> list[bool]:
    """Which fingerprints are in the files, without any log."""
    with closing(FilterReader(directory)) as reader:
        return reader.are_recorded(fingerprints)


@pytest.mark.parametrize("name", ["requests.sqlite-wal", f"{NAME}-wal", ONE, "logs.json.tmp"])
def test_after_a_sync_that_fails_nothing_more_is_applied_or_deleted(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crawl = LoggedFilter(tmp_path)
    pages = fps(6)
    crawl.find(*pages[:2])
    crawl.store()
    crawl.checkpoint()
    crawl.find(*pages[2:4])
    crawl.forget(pages[0])
    crawl.store()
    fsync = os.fsync

    def fails(fd: int) -> None:
        if Path(f"/proc/self/fd/{fd}").readlink().name == name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(fd)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="Input/output"):
        patch.setattr(os, "fsync", fails)
        crawl.checkpoint()
    assert crawl.overlay.failure is not None
    applied = crawl.database.applied
    crawl.find(*pages[4:])
    crawl.store()
    with pytest.raises(OSError, match="Input/output"):
        crawl.checkpoint()
    assert in_files(tmp_path / "bloom", *pages[4:]) == [False, False]
    assert crawl.database._checkpointed == applied == 1
    assert all(each in crawl.backend for each in pages[1:])
    assert pages[0] not in crawl.backend
    crawl.close()  # it was told of
    assert LogRecords.read(tmp_path / "bloom").open
    again = LoggedFilter(tmp_path)
    assert all(each in again.backend for each in pages[1:])
    assert again.find(*pages) == [True] + [False] * 5
    again.close()


@pytest.mark.parametrize("name", ["requests.sqlite-wal", ONE, "logs.json.tmp"])
def test_a_sync_that_fails_at_the_close_is_told_of(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crawl = LoggedFilter(tmp_path)
    crawl.find(*fps(3))
    crawl.store()
    fsync = os.fsync

    def fails(fd: int) -> None:
        if Path(f"/proc/self/fd/{fd}").readlink().name == name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(fd)

    with monkeypatch.context() as patch, pytest.raises(StorageError, match="Input/output error"):
        patch.setattr(os, "fsync", fails)
        crawl.close()
    again = LoggedFilter(tmp_path)
    assert all(each in again.backend for each in fps(3))
    again.close()


def test_a_failure_in_the_thread_just_before_the_close_is_told_of(tmp_path: Path) -> None:
    """Nobody else looks at it any more."""
    crawl = LoggedFilter(tmp_path)
    crawl.find(*fps(3))
    crawl.store()
    store = crawl.backend
    join = store._syncer.join

    def fails_meanwhile() -> None:
        join()
        crawl.overlay.failure = OSError(errno.EIO, os.strerror(errno.EIO))

    store._syncer.join = fails_meanwhile
    with pytest.raises(StorageError, match="could not be written to the disk: Input/output error"):
        crawl.backend.close()
    crawl.database.close()
    assert LogRecords.read(tmp_path / "bloom").open

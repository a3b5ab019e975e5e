"""A filter with a log: a stored request is a duplicate at once, and reaches the files later."""

import errno
import os
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from scrapy_bloom import StorageError
from scrapy_bloom.files.directory import FilterReader
from scrapy_bloom.files.file import FileGeneration
from scrapy_bloom.files.log import LogRecord
from scrapy_bloom.queues import database
from scrapy_bloom.queues.sqlite_queue import SQLiteQueue
from tests.support.clock import Clock
from tests.support.local_filters import WINDOW, fps
from tests.support.logged_filters import LoggedFilter

ONE = "generation-0001.bloom"


def recorded(job: Path) -> LogRecord:
    record = LogRecord.read(job / "bloom")
    assert record is not None
    return record


def recent(job: Path) -> set[bytes]:
    return SQLiteQueue(job / "requests.sqlite").recent()


def in_files(directory: Path, *fingerprints: bytes) -> list[bool]:
    """Which fingerprints are in the files, without any log."""
    with closing(FilterReader(directory)) as reader:
        return reader.are_seen(fingerprints)


def test_adding_while_another_thread_makes_checkpoints(tmp_path: Path) -> None:
    crawl = LoggedFilter(tmp_path, capacity=400)  # it grows several times meanwhile
    many = fps(6000)
    is_over = threading.Event()

    def work() -> None:
        while not is_over.is_set():
            crawl.backend._checkpoint(crawl.overlay)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for number, each in enumerate(many):
            assert crawl.find(each) == [True]
            assert crawl.find(each, many[number // 2]) == [False, False]
            if number % 7 == 0:
                crawl.store()
    finally:
        is_over.set()
        thread.join()
    crawl.store()
    assert crawl.overlay.failure is None
    assert all(each in crawl.backend for each in many)
    assert crawl.backend.status().count == len(many)
    crawl.close()
    assert all(in_files(tmp_path / "bloom", *many))
    files = sorted((tmp_path / "bloom").glob("*.bloom"))
    assert sum(FileGeneration.at(path).count for path in files) == len(many)
    assert len(files) > 3


@pytest.mark.parametrize("dies", [False, True])
def test_a_window_that_turns_after_changes_that_were_not_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, dies: bool
) -> None:
    clock, pages = Clock(), fps(12)
    monkeypatch.setattr(database, "time", SimpleNamespace(time=clock))
    options = {"clock": clock, "window_secs": WINDOW, "capacity": 100}
    for number in range(0, 12, 4):
        crawl = LoggedFilter(tmp_path, f"{number}", **options)
        crawl.find(*pages[number : number + 4])
        crawl.store()
        clock.now += WINDOW / 3
        assert all(each in crawl.backend for each in pages[: number + 4])
        crawl.crawl(4)
        crawl.die() if dies else crawl.close()
    again = LoggedFilter(tmp_path, "8", **options)  # which goes on
    assert all(each in again.backend for each in pages)
    again.close()
    again = LoggedFilter(tmp_path, "12", **options)
    assert not any(each in again.backend for each in pages[:4])
    assert all(each in again.backend for each in pages[4:])
    again.close()
    clock.now += WINDOW
    again = LoggedFilter(tmp_path, "another run", **options)
    assert not any(each in again.backend for each in pages)
    again.close()


def failing_for(name: str) -> Callable[[int], None]:
    fsync = os.fsync

    def fails(fd: int) -> None:
        if Path(f"/proc/self/fd/{fd}").readlink().name == name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(fd)

    return fails


@pytest.mark.parametrize("name", ["requests.sqlite-wal", ONE, "log.json.tmp"])
def test_after_a_sync_that_fails_nothing_more_is_applied_or_deleted(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crawl = LoggedFilter(tmp_path)
    pages = fps(6)
    crawl.find(*pages[:2])
    crawl.store()
    crawl.checkpoint()
    crawl.find(*pages[2:4])
    crawl.store()
    with monkeypatch.context() as patch, pytest.raises(OSError, match="Input/output"):
        patch.setattr(os, "fsync", failing_for(name))
        crawl.checkpoint()
    assert crawl.overlay.failure is not None
    applied = crawl.database.applied
    crawl.find(*pages[4:])
    with pytest.raises(StorageError, match="Input/output error; nothing is lost"):
        crawl.store()
    crawl.store()
    with pytest.raises(OSError, match="Input/output"):
        crawl.checkpoint()
    assert in_files(tmp_path / "bloom", *pages[4:]) == [False, False]
    assert crawl.database._checkpointed == applied == 1
    assert all(each in crawl.backend for each in pages)
    crawl.close()  # the error was logged
    assert recorded(tmp_path).is_open
    again = LoggedFilter(tmp_path)
    assert again.find(*pages) == [False] * 6
    again.close()


@pytest.mark.parametrize("name", ["requests.sqlite-wal", ONE, "log.json.tmp"])
def test_a_sync_that_fails_at_the_close_is_an_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crawl = LoggedFilter(tmp_path)
    crawl.find(*fps(3))
    crawl.store()
    with monkeypatch.context() as patch, pytest.raises(StorageError, match="Input/output error"):
        patch.setattr(os, "fsync", failing_for(name))
        crawl.close()
    again = LoggedFilter(tmp_path)
    assert all(each in again.backend for each in fps(3))
    again.close()

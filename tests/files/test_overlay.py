"""A filter with a log: a stored request is a duplicate at once, and reaches the files later."""

import errno
import os
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from scrapy_bloom import StorageError
from scrapy_bloom.files.directory import FilterReader
from scrapy_bloom.files.file import FileGeneration
from scrapy_bloom.files.log import LogRecord
from scrapy_bloom.queues.database import JobDatabase
from scrapy_bloom.queues.sqlite_queue import SQLiteQueue
from tests.support.clock import Clock
from tests.support.local_filters import WINDOW, fps
from tests.support.logged_filters import LoggedFilter
from tests.support.servers import wait_for

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


def test_a_batch_is_seen_at_once_and_applied_by_a_checkpoint(tmp_path: Path) -> None:
    crawl = LoggedFilter(tmp_path)
    first, second, third = fps(3)
    crawl.find(first, second)
    assert first not in crawl.backend
    crawl.store()
    assert first in crawl.backend
    assert len(crawl.overlay) == 2
    assert in_files(tmp_path / "bloom", first, second) == [False, False]
    crawl.find(third)  # of the next batch
    crawl.checkpoint()
    assert in_files(tmp_path / "bloom", first, second, third) == [True, True, False]
    assert len(crawl.overlay) == 0
    assert crawl.find(first, second, third) == [False] * 3
    crawl.close()
    assert in_files(tmp_path / "bloom", first, second, third) == [True] * 3
    assert recent(tmp_path) == set()


def test_a_checkpoint_syncs_the_log_then_its_record_then_the_filter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crawl = LoggedFilter(tmp_path)
    first, second = fps(2)
    crawl.find(first)
    crawl.store()
    crawl.checkpoint()
    crawl.find(second)
    crawl.store()
    steps: list[str] = []
    fsync = os.fsync

    def noted(fd: int) -> None:
        fsync(fd)
        steps.append(Path(f"/proc/self/fd/{fd}").readlink().name)
        is_recorded = in_files(tmp_path / "bloom", second)
        if len(steps) <= 3:  # the log, and the record
            assert is_recorded == [False]
        assert recorded(tmp_path).seq == (2 if "bloom" in steps else 1)
        assert recent(tmp_path) == {second}

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", noted)
        crawl.checkpoint()
    assert steps == ["requests.sqlite-wal", "log.json.tmp", "bloom", ONE]
    assert recent(tmp_path) == {second}
    crawl.crawl(1)
    assert recent(tmp_path) == set()
    crawl.close()


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


def test_many_changes_wake_up_the_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scrapy_bloom.files.backend._MOST_UNAPPLIED", 10)
    before = set(threading.enumerate())
    crawl = LoggedFilter(tmp_path)
    (syncer,) = set(threading.enumerate()) - before
    assert syncer.daemon  # else a crawl that dies would go on
    for each in fps(30):
        crawl.find(each)
        crawl.store()
    wait_for(lambda: any(in_files(tmp_path / "bloom", *fps(10))), lambda: "not applied")
    crawl.close()
    assert not syncer.is_alive()


def test_a_checkpoint_that_begins_at_the_close_does_not_keep_it_open(tmp_path: Path) -> None:
    """The thread is woken up for a checkpoint and for its end at one instant."""
    crawl = LoggedFilter(tmp_path)
    store = crawl.backend
    syncer = store._syncer
    assert syncer is not None
    cleared = threading.Event()
    clear = store._wake.clear

    def clears() -> None:
        store._is_closing = True  # as `close` does it, at the worst instant
        store._wake.set()
        clear()
        cleared.set()

    store._wake.clear = clears
    store._wake.set()
    assert cleared.wait(10)
    syncer.join(10)
    assert not syncer.is_alive()
    store._wake.clear = clear
    crawl.close()


def test_the_count_after_kills_is_nearly_right_and_does_not_drift(tmp_path: Path) -> None:
    """Also that of generations that were full before their changes were applied."""
    number = 0
    for turn in range(30):
        crawl = LoggedFilter(tmp_path, capacity=2000)
        for each in fps(number, number + 700):
            crawl.find(each)
        number += 700
        crawl.store()
        if turn % 3:
            crawl.checkpoint()
        crawl.die()
    crawl = LoggedFilter(tmp_path, capacity=2000)
    assert crawl.backend.status().count == pytest.approx(number, rel=0.02)
    crawl.close()
    headers = [FileGeneration.at(path) for path in (tmp_path / "bloom").glob("*.bloom")]
    assert sum(each.count for each in headers) == pytest.approx(number, rel=0.02)


def test_a_window_that_turns_with_changes_that_are_not_applied(tmp_path: Path) -> None:
    clock = Clock()
    options = {"clock": clock, "window_secs": WINDOW, "capacity": 100}
    crawl = LoggedFilter(tmp_path, **options)
    pages = fps(12)
    for number, each in enumerate(pages):
        crawl.find(each)
        clock.now += WINDOW / 8
        if number % 5 == 0:
            crawl.store()
    crawl.store()
    assert all(each in crawl.backend for each in pages)  # within a run, nothing of its own expires
    crawl.checkpoint()
    crawl.crawl(1)  # the log has nothing more for the filter
    crawl.die()
    again = LoggedFilter(tmp_path, **options)
    assert all(each in again.backend for each in pages)
    again.close()
    clock.now += 2 * WINDOW
    again = LoggedFilter(tmp_path, "another run", **options)
    assert not any(each in again.backend for each in pages)
    again.close()


def test_a_crawl_that_ends_before_it_begins_leaves_a_closed_filter(tmp_path: Path) -> None:
    crawl = LoggedFilter(tmp_path)
    crawl.find(*fps(3))
    crawl.close()
    database = JobDatabase(tmp_path / "requests.sqlite", by_slot=False)
    crawl.backend = type(crawl.backend)(
        tmp_path / "bloom", crawl.backend._policy, crawl.backend._origin
    )
    crawl.backend.open(database)
    crawl.backend.close()
    database.close()
    assert not recorded(tmp_path).is_open
    assert not FileGeneration.at(tmp_path / "bloom" / ONE).in_use


def failing_for(name: str) -> Callable[[int], None]:
    """Return an fsync that fails for the file of that name."""
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


def test_a_failure_in_the_thread_just_before_the_close_is_an_error(tmp_path: Path) -> None:
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
    assert recorded(tmp_path).is_open

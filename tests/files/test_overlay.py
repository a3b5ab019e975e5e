"""A filter with a log: a recorded request is a duplicate at once, and reaches the filter later."""

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
from scrapy_bloom.files.forgotten import NAME, ForgottenFile
from scrapy_bloom.files.log import LogRecords
from scrapy_bloom.queues.batch import Batch
from scrapy_bloom.queues.job_state import read_recent
from scrapy_bloom.queues.sqlite import RequestDatabase
from tests.support.clock import Clock
from tests.support.local_filters import WINDOW, fps
from tests.support.logged_filters import LoggedFilter
from tests.support.servers import wait_for

ONE = "generation-0001.bloom"


def in_files(directory: Path, *fingerprints: bytes) -> list[bool]:
    """Which fingerprints are in the files, without any log."""
    with closing(FilterReader(directory)) as reader:
        return reader.are_recorded(fingerprints)


def in_file_of_forgotten(directory: Path) -> set[bytes]:
    with closing(ForgottenFile(directory / NAME, readonly=True)) as file:
        return set(file.all())


def test_changes_are_seen_at_once_and_applied_by_a_checkpoint(tmp_path: Path) -> None:
    crawl = LoggedFilter(tmp_path)
    first, second, third = fps(3)
    assert crawl.find(first, second, first) == [True, True, False]
    assert first in crawl.backend
    crawl.checkpoint()  # they are not stored
    assert in_files(tmp_path / "bloom", first, second) == [False, False]
    crawl.store()
    assert in_files(tmp_path / "bloom", first, second) == [False, False]
    crawl.find(third)  # of the next batch
    crawl.checkpoint()
    assert in_files(tmp_path / "bloom", first, second, third) == [True, True, False]
    assert crawl.find(first, second, third) == [False] * 3
    assert len(crawl.overlay) == 1
    crawl.close()
    assert in_files(tmp_path / "bloom", first, second, third) == [True] * 3
    assert read_recent(tmp_path / "requests.sqlite") == []


def test_a_checkpoint_syncs_the_log_then_its_record_then_the_filter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crawl = LoggedFilter(tmp_path)
    first, second = fps(2)
    crawl.find(first)
    crawl.store()
    crawl.checkpoint()
    crawl.find(second)
    crawl.forget(first)
    crawl.store()
    steps: list[str] = []
    fsync = os.fsync

    def noted(fd: int) -> None:
        fsync(fd)
        steps.append(Path(f"/proc/self/fd/{fd}").readlink().name)
        is_recorded = in_files(tmp_path / "bloom", second)
        if len(steps) <= 3:  # the log, and the record
            assert is_recorded == [False]
            assert not (tmp_path / "bloom" / NAME).exists()
        records = LogRecords.read(tmp_path / "bloom")
        assert records.logs[crawl.database.id].seq == (2 if "bloom" in steps else 1)
        assert len(read_recent(tmp_path / "requests.sqlite")) >= 2

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", noted)
        crawl.checkpoint()
    ours = [each for each in steps if "sqlite" not in each or each.endswith("requests.sqlite-wal")]
    assert ours == ["requests.sqlite-wal", "logs.json.tmp", "bloom", ONE]
    assert steps.index("bloom") < steps.index(f"{NAME}-wal")
    assert len(read_recent(tmp_path / "requests.sqlite")) == 2
    crawl.database.apply(Batch(done=[1]))
    assert read_recent(tmp_path / "requests.sqlite") == []
    crawl.close()


@pytest.mark.parametrize("killed", [False, True], ids=["running", "killed"])
def test_what_a_command_forgets_is_not_undone_by_the_log(killed: bool, tmp_path: Path) -> None:
    """`scrapy bloom forget` of a page that the log has recorded, and the filter not yet."""
    (page, other) = fps(2)
    crawl = LoggedFilter(tmp_path)
    crawl.find(page, other)
    crawl.store()
    with closing(ForgottenFile(tmp_path / "bloom" / NAME)) as file:
        file.add([page])
    if killed:
        crawl.die()
    else:
        crawl.checkpoint()
        crawl.close()
    crawl = LoggedFilter(tmp_path)
    assert crawl.find(page, other, page) == [True, False, False]
    crawl.close()
    assert in_file_of_forgotten(tmp_path / "bloom") == set()


def test_a_file_of_forgotten_requests_that_is_empty(tmp_path: Path) -> None:
    """The disk was full when it was made."""
    crawl = LoggedFilter(tmp_path)
    (tmp_path / "bloom" / NAME).touch()
    first, second = fps(2)
    crawl.find(first)
    crawl.store()
    crawl.checkpoint()
    crawl.die()
    again = LoggedFilter(tmp_path)
    assert first in again.backend
    again.forget(first)
    again.store()
    again.checkpoint()
    assert in_file_of_forgotten(tmp_path / "bloom") == {first}
    again.find(second)
    again.close()


def test_forgotten_requests_are_new_once_more_with_and_without_a_checkpoint(tmp_path: Path) -> None:
    crawl = LoggedFilter(tmp_path)
    page, other = fps(2)
    crawl.find(page, other)
    crawl.store()
    crawl.checkpoint()
    crawl.forget(other)
    crawl.store()
    crawl.checkpoint()
    crawl.forget(page)
    assert page not in crawl.backend
    assert other not in crawl.backend
    assert crawl.find(page, other) == [True, True]
    assert crawl.find(page, other) == [False, False]
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
            assert each in crawl.backend
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
    assert all(each in crawl.backend for each in pages)  # within a run, nothing of its own expires
    crawl.store()
    crawl.checkpoint()
    crawl.crawl(1)  # the log has nothing more for the filter
    crawl.die()
    again = LoggedFilter(tmp_path, **options)
    assert all(each in again.backend for each in pages[-7:])
    assert pages[0] not in again.backend
    again.close()


def test_a_page_that_is_crawled_again_expires_a_window_later(
    tmp_path: Path,
) -> None:
    """Also if the process dies before its files have it."""
    clock = Clock()
    options = {"clock": clock, "window_secs": WINDOW, "capacity": 100}
    crawl = LoggedFilter(tmp_path, **options)
    (page,) = fps(1)
    crawl.find(page)
    crawl.close()
    crawl = LoggedFilter(tmp_path, **options)
    clock.now += WINDOW * 0.7
    crawl.forget(page)
    assert crawl.find(page) == [True]
    crawl.store()
    crawl.die()
    crawl = LoggedFilter(tmp_path, **options)
    clock.now += WINDOW * 0.7
    crawl.close()
    crawl = LoggedFilter(tmp_path, **options)
    assert page in crawl.backend
    crawl.close()


def test_a_crawl_that_ends_before_it_begins_leaves_a_closed_filter(tmp_path: Path) -> None:
    crawl = LoggedFilter(tmp_path)
    crawl.find(*fps(3))
    crawl.close()
    database = RequestDatabase(tmp_path / "requests.sqlite", by_slot=False)
    crawl.backend = type(crawl.backend)(
        tmp_path / "bloom", crawl.backend._policy, crawl.backend._origin
    )
    crawl.backend.open(database)
    crawl.backend.close()
    database.close()
    assert LogRecords.read(tmp_path / "bloom").open == ""
    assert not FileGeneration.at(tmp_path / "bloom" / ONE).in_use


def test_unserializable_requests_are_recorded_when_they_are_let_go(tmp_path: Path) -> None:
    crawl = LoggedFilter(tmp_path)
    first, held, last = fps(3)
    crawl.find(first)
    assert crawl.backend.add(held)
    taken_out = crawl.overlay.collected.pop()
    crawl.find(last)
    assert held in crawl.backend
    crawl.store()
    crawl.checkpoint()
    assert in_files(tmp_path / "bloom", first, held, last) == [True, False, True]
    crawl.overlay.collected.append(taken_out)
    crawl.store()
    crawl.checkpoint()
    assert in_files(tmp_path / "bloom", held) == [True]
    assert crawl.backend.status().count == 3
    crawl.close()


def failing_for(name: str) -> Callable[[int], None]:
    """Return an fsync that fails for the file of that name."""
    fsync = os.fsync

    def fails(fd: int) -> None:
        if Path(f"/proc/self/fd/{fd}").readlink().name == name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(fd)

    return fails


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
    with monkeypatch.context() as patch, pytest.raises(OSError, match="Input/output"):
        patch.setattr(os, "fsync", failing_for(name))
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
    crawl.close()  # the error was logged
    assert LogRecords.read(tmp_path / "bloom").open
    again = LoggedFilter(tmp_path)
    assert all(each in again.backend for each in pages[1:])
    assert again.find(*pages) == [True] + [False] * 5
    again.close()


@pytest.mark.parametrize("name", ["requests.sqlite-wal", ONE, "logs.json.tmp"])
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
    assert LogRecords.read(tmp_path / "bloom").open

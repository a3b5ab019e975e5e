"""The file of a job and its log, which other processes read, and kills leave behind."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from scrapy_bloom import StorageError
from scrapy_bloom.job import file as module
from scrapy_bloom.job import jobdir
from scrapy_bloom.job.disk import log_and_index
from scrapy_bloom.job.file import JobFile
from scrapy_bloom.job.filter import LocalBackend
from scrapy_bloom.job.reader import FilterReader
from scrapy_bloom.queues.store import Joining, State
from tests.support.boundaries import dies
from tests.support.clock import Clock
from tests.support.local_filters import WINDOW, file_size_limit, fps, make
from tests.support.processes import FORKING
from tests.support.request_queues import enter, key, page
from tests.support.stores import InFiles

TRUNCATE = "PRAGMA wal_checkpoint(TRUNCATE)"
WAIT = 60.0  # seconds that any single wait may take


@pytest.fixture
def place(caplog: pytest.LogCaptureFixture) -> Iterator[InFiles]:
    """A job that must not start over."""
    caplog.set_level(logging.WARNING)
    place = InFiles()
    enter(place.open(), page("a"))
    place.close()
    yield place
    store = place.open()
    assert enter(store, page("a"), page("b")) == [False, True]
    rows = place.queue().requests(State.PENDING)
    assert {key("a"), key("b")} <= {row.page for row in rows}
    store.close()
    assert not caplog.records
    place.end()


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nobody wait a minute for a lock."""
    monkeypatch.setattr(module, "_PATIENCE_MS", 10)


def _read(path: Path, is_snapshot: bool, pipe: Connection) -> None:
    reader = FilterReader(path, is_snapshot=is_snapshot)
    pipe.send("ready")
    pipe.recv()
    reader.close()


@contextmanager
def command_that_reads(path: Path, *, is_snapshot: bool) -> Iterator[None]:
    """Another process reads a file: two connections of one process share more than their file."""
    pipe, other = FORKING.Pipe()
    process = FORKING.Process(target=_read, args=(path, is_snapshot, other))
    process.start()
    assert pipe.poll(WAIT)
    try:
        yield
    finally:
        pipe.send("end")
        process.join(WAIT)
        assert process.exitcode == 0


@pytest.mark.parametrize("is_snapshot", [False, True])
@pytest.mark.usefixtures("_impatient")
def test_a_command_that_reads_while_a_crawl_closes(is_snapshot: bool, place: InFiles) -> None:
    """SQLite then leaves the log, and may leave the mark of the crawl in the file."""
    store = place.open()
    with command_that_reads(place.path, is_snapshot=is_snapshot):
        enter(store, page("other"))
        store.close()
        assert log_and_index(place.path)[0].stat().st_size
        store = place.open()
        assert store.knows(key("other"))
        place.die()


def test_a_look_at_a_killed_job_does_not_remove_its_empty_log(place: InFiles) -> None:
    """Without it, the job would count as a copy of a running one."""
    log, _ = log_and_index(place.path)
    dies(lambda: place.open() and place.store._database.file._sync_all())
    dies(lambda: place.open() and place.store._database.file.execute(TRUNCATE))
    assert log.stat().st_size == 0
    assert place.queue().move(State.DEAD, None) == 0
    with pytest.raises(StorageError, match="belongs to spider"):
        place.open(Joining("other"))
    JobFile(place.path).close()
    assert log.stat().st_size == 0


def test_an_opening_without_room_can_be_repeated(place: InFiles) -> None:
    """At each size that the log may reach."""
    failures = 0
    for size in range(0, 60_000, 4000):
        try:
            with file_size_limit(size):
                place.open()
        except StorageError:
            failures += 1
        else:
            place.close()
    assert 3 < failures < 14


def test_an_opening_without_room_under_scrapys_scheduler(tmp_path: Path) -> None:
    """The next crawl does not start over, because this one has recorded nothing."""
    failures = 0
    for size in range(0, 60_000, 4000):
        job, clock = tmp_path / f"{size}", Clock()

        def opened(job: Path = job, clock: Clock = clock) -> LocalBackend:
            return make(job, clock, window_secs=WINDOW)

        def begin(size: int = size) -> None:
            with file_size_limit(size), suppress(StorageError):
                opened().begin()
                os._exit(9)

        (backend := opened()).add_many(fps(20))
        backend.close()
        clock.now += WINDOW / 2
        if dies(begin, 10**9):
            continue
        failures += 1
        backend = opened()
        assert all(entry in backend for entry in fps(20)), size
        backend.close()
    assert failures > 1


def test_a_log_without_its_file_is_refused(place: InFiles) -> None:
    """SQLite would apply it to the new file."""
    dies(lambda: place.open() and enter(place.store, page("other")))
    away = place.path.rename(place.path.with_suffix(".away"))
    log = log_and_index(place.path)[0].read_bytes()
    with pytest.raises(StorageError, match="the file is missing, and its log .* is not"):
        place.open()
    assert not place.path.exists()
    assert log_and_index(place.path)[0].read_bytes() == log
    away.rename(place.path)


@pytest.mark.usefixtures("_impatient")
def test_a_filter_is_set_aside_while_a_command_reads_it(tmp_path: Path) -> None:
    dies(lambda: make(tmp_path).add_many(fps(50)))
    path = tmp_path / jobdir.FILE
    with (
        command_that_reads(path, is_snapshot=True),
        pytest.raises(StorageError, match="another process is reading it"),
    ):
        make(tmp_path)
    with command_that_reads(path, is_snapshot=False):
        backend = make(tmp_path, capacity=10)
        assert backend.add_many(fps(100)) == 100
    backend.close()
    backend = make(tmp_path)
    assert all(entry in backend for entry in fps(100))
    backend.close()

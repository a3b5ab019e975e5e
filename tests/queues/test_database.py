"""The file of a job: speed, refusals, copies, links. The rest is the contract's."""

import os
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from scrapy_bloom import StorageError
from scrapy_bloom.job.disk import log_and_index
from scrapy_bloom.job.file import JobFile
from scrapy_bloom.queues.sqlite_queue import check_no_disk_queue
from scrapy_bloom.queues.store import Batch, Entered, State
from tests.support.local_filters import file_size_limit
from tests.support.request_queues import (
    begun,
    counts_in,
    done,
    enter,
    failed,
    name_of,
    names,
    page,
    push,
    taken,
)
from tests.support.stores import InFiles

WAIT = 60.0  # seconds that any single wait may take


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "bloom.sqlite"


@pytest.fixture
def place() -> Iterator[InFiles]:
    place = InFiles(capacity=5000)
    yield place
    place.end()


def test_no_step_reads_all_rows(place: InFiles) -> None:
    """SQLite uses an index for each query, and looks up the next slot, however many there are."""
    store = place.open()
    for start in range(0, 3000, 500):
        slots = [(n, "host" if n % 3 else str(n)) for n in range(start, start + 500)]
        enter(store, *(page(f"page {n}", slot=slot) for n, slot in slots))
    steps: list[int] = []
    place.store._database.file._db.set_progress_handler(lambda: steps.append(1), 10)
    target, first, second, third, fourth = store.apply(Batch(want=5)).taken
    urls = [page("hop"), page("hop"), page("other hop")]
    requests = zip(urls, (target, first, second), strict=True)
    enter(store, *(request._replace(replaces=taken.id) for request, taken in requests))
    done(store, third)
    failed(store, fourth)
    enter(store, page("hop"), page("start", once=True, is_start=True))
    for _ in range(3):
        done(store, *store.apply(Batch(want=1)).taken)
    assert len(steps) < 300
    place.close()
    assert place.queue().move(State.FAILED, State.PENDING) == 1
    assert (place.queue().move(State.PENDING, None, "host") or 0) > 300


def test_a_large_request_is_not_written_again_when_it_is_taken(place: InFiles) -> None:
    store = place.open()
    enter(store, Entered(os.urandom(1_000_000)))
    log, _ = log_and_index(place.path)
    size = log.stat().st_size
    (request,) = store.apply(Batch(want=1)).taken
    assert log.stat().st_size < size + 100_000
    done(store, request)
    place.close()


def test_what_cannot_be_made_leaves_nothing(path: Path) -> None:
    """An empty file would look like a queue that was cut to nothing."""
    with file_size_limit(0), pytest.raises(StorageError, match="cannot be used"):
        JobFile(path)
    assert not list(path.parent.iterdir())


class TestCopies:
    @pytest.mark.parametrize("companions", [("-wal",), ("-wal", "-shm"), ()])
    def test_made_while_it_was_open(
        self, companions: tuple[str, ...], path: Path, tmp_path: Path
    ) -> None:
        database = begun(path)
        push(database, "a")
        copy = tmp_path / "copy" / path.name
        copy.parent.mkdir()
        for more in ("", *companions):
            shutil.copy(f"{path}{more}", f"{copy}{more}")
        push(database, "b")
        copied = begun(copy)
        assert copied._database.file.is_copy
        assert names(copied, 2) == (["a"] if companions else [])
        copied.close()
        database.close()
        database = begun(path)
        assert not database._database.file.was_killed
        database.close()

    def test_made_with_the_means_of_sqlite(self, path: Path, tmp_path: Path) -> None:
        """Such a backup has no write-ahead log of its own."""
        database = begun(path)
        push(database, "a")
        database.close()
        backup = tmp_path / "backup.sqlite"
        with sqlite3.connect(path) as db:
            db.execute("VACUUM INTO ?", (str(backup),))
        db.close()
        with sqlite3.connect(backup) as db:
            db.execute("PRAGMA journal_mode = DELETE")
        db.close()
        backup.replace(path)
        database = begun(path)
        database.sync()
        assert names(database, 1) == ["a"]
        database.close()


def test_the_log_that_is_synced_is_that_of_the_target_of_a_link(tmp_path: Path) -> None:
    target = tmp_path / "disk" / "job"
    target.mkdir(parents=True)
    (tmp_path / "job").symlink_to(target)
    path = tmp_path / "job" / "bloom.sqlite"
    for _ in range(2):
        store = begun(path)
        push(store, "a")
        file = store._database.file
        assert file._wal
        synced = os.fstat(file._wal.fileno())
        assert os.path.samestat(synced, log_and_index(target / path.name)[0].stat())
        assert synced.st_size > 0
        file._sync_all()
        store.close()
    assert file.path == target / path.name
    assert counts_in(path) == (2, 0)


def test_a_directory_that_cannot_be_read(tmp_path: Path) -> None:
    queue = tmp_path / "requests.queue"
    queue.mkdir()
    (queue / "active.json").touch()
    (queue / "0").symlink_to("nowhere")
    with pytest.raises(StorageError, match=f"{tmp_path} cannot be read: No such file .*;"):
        check_no_disk_queue(tmp_path)


def test_a_database_is_used_in_another_place_than_it_was_opened_in(tmp_path: Path) -> None:
    """A shell opens it in one thread and uses it in another."""
    queue = begun(tmp_path / "bloom.sqlite")
    thread = threading.Thread(target=lambda: push(queue, "a"))
    thread.start()
    thread.join(WAIT)
    assert name_of(taken(queue)) == "a"
    queue.close()

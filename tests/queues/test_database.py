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
from scrapy_bloom.job.jobdir import is_database
from scrapy_bloom.queues.sqlite_queue import check_no_disk_queue, has_pending
from scrapy_bloom.queues.sqlite_store import SQLiteStore
from scrapy_bloom.queues.store import Batch, Entered, State
from tests.support.disks import Disk, mounted
from tests.support.local_filters import file_size_limit
from tests.support.request_queues import (
    begun,
    counts_in,
    done,
    enter,
    failed,
    killed,
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
    store = place.open(by_slot=True)
    for start in range(0, 3000, 500):
        slots = [(n, "host" if n % 3 else str(n)) for n in range(start, start + 500)]
        enter(store, *(page(f"page {n}", slot=slot) for n, slot in slots))
    steps: list[int] = []
    place.store._database.file._db.set_progress_handler(lambda: steps.append(1), 10)
    target, first, second, third, fourth = store.apply(Batch(want=5)).taken
    urls = [page("hop"), page("hop"), page("other hop")]
    requests = zip(urls, (target, first, second), strict=True)
    enter(store, *(each._replace(replaces=taken.id) for each, taken in requests))
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


def test_the_file_of_a_job_is_known_by_its_first_bytes(path: Path) -> None:
    assert not is_database(path)
    path.touch()
    assert not is_database(path)
    path.unlink()
    begun(path).close()
    assert is_database(path)


def test_what_cannot_be_made_leaves_nothing(path: Path) -> None:
    """An empty file would look like a queue that was cut to nothing."""
    with file_size_limit(0), pytest.raises(StorageError, match="cannot be used"):
        JobFile(path)
    assert not list(path.parent.iterdir())


@pytest.mark.parametrize("damage", ["foreign", "of another", "newer", "cut off", "zeros"])
def test_what_cannot_be_used_is_left_as_it_was(damage: str, path: Path) -> None:
    if damage == "foreign":
        path.write_text("https://example.com/\n" * 100)
    elif damage == "of another":
        with sqlite3.connect(path) as other:
            other.execute("CREATE TABLE requests (id INTEGER)")
        other.close()
    else:
        database = begun(path, by_slot=True)
        for number in range(500):
            push(database, str(number) * 50)
        database.close()
        if damage == "newer":
            with sqlite3.connect(path) as newer:
                newer.execute("PRAGMA user_version = 99")
            newer.close()
        elif damage == "cut off":
            os.truncate(path, path.stat().st_size // 2)
        else:
            with path.open("r+b") as file:
                file.seek(4096)
                file.write(bytes(8 * 4096))
    before = {each.name: each.read_bytes() for each in path.parent.glob(f"{path.name}*")}
    with pytest.raises(StorageError) as error:
        begun(path, by_slot=True)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    assert {each.name: each.read_bytes() for each in path.parent.glob(f"{path.name}*")} == before


def partly_done(path: Path, number: int) -> SQLiteStore:
    """Queue 200 requests of 100 kB, and return a store in which some of them are done."""
    store = begun(path, by_slot=True)
    for _ in range(200):
        enter(store, Entered(os.urandom(100_000)))
    store.close()
    store = begun(path, by_slot=True)
    done(store, *[taken(store) for _ in range(number)])
    return store


def check(path: Path, left: int) -> None:
    assert counts_in(path) == (left, 0)
    store = begun(path, by_slot=True)
    assert (store._database.file.was_killed, store.pending) == (False, left)
    store.close()


@pytest.mark.parametrize("left", [0, 10, 100])
def test_a_close_shrinks_a_file_that_is_nearly_empty(left: int, path: Path) -> None:
    partly_done(path, 200 - left).close()
    is_large = left == 100
    assert (path.stat().st_size > 20_000_000) == is_large
    assert is_large or path.stat().st_size < left * 110_000 + 100_000
    check(path, left)


def test_a_close_without_room_to_shrink(tmp_path: Path) -> None:
    with mounted(Disk, tmp_path / "small") as disk:
        path = disk.path / "bloom.sqlite"
        store = partly_done(path, 180)
        store._database.file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        disk.fill()
        os.truncate(disk.path / "filler", (disk.path / "filler").stat().st_size - 1_000_000)
        store.close()
        assert path.stat().st_size > 20_000_000
        check(path, 20)


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

    def test_put_back_in_place_of_the_original(self, path: Path, tmp_path: Path) -> None:
        """By its content alone, with a log of another content next to it."""
        database = begun(path)
        for number in range(200):
            push(database, str(number), slot=f"host{number}.example" * 5)
        database.close()
        backup = path.read_bytes()
        database = begun(path)
        done(database, *[taken(database) for _ in range(150)])
        database._database.file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        push(database, "last")
        killed(database)
        path.write_bytes(backup)
        log = log_and_index(path)[0].read_bytes()
        with pytest.raises(StorageError, match="cannot be used"):
            JobFile(path)
        assert path.read_bytes() == backup  # the log is not written into it
        assert log_and_index(path)[0].read_bytes() == log

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


class TestConflicts:
    def test_scrapys_queue_was_broken_by_a_kill(self, tmp_path: Path) -> None:
        queue = tmp_path / "requests.queue"
        queue.mkdir()
        state = queue / "active.json"
        state.write_text("[]")
        os.utime(state, (1, 1))
        with pytest.raises(StorageError, match="a job of Scrapy's own scheduler"):
            check_no_disk_queue(tmp_path)
        assert not has_pending(tmp_path)

    def test_a_directory_that_cannot_be_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "requests.queue").symlink_to("requests.queue")  # round and round

        def refuses(path: Path, **_: object) -> bool:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "exists", refuses)
        with pytest.raises(StorageError, match=f"{tmp_path} cannot be read: Permission denied;"):
            check_no_disk_queue(tmp_path)


def test_a_database_is_used_in_another_place_than_it_was_opened_in(tmp_path: Path) -> None:
    """A shell opens it in one thread and uses it in another."""
    queue = begun(tmp_path / "bloom.sqlite", by_slot=False)
    thread = threading.Thread(target=lambda: push(queue, "a"))
    thread.start()
    thread.join(WAIT)
    assert name_of(taken(queue)) == "a"
    queue.close()

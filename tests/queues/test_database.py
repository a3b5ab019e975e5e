"""The database of a job: refusals, copies, links. The rest is the contract's."""

import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from scrapy_bloom import StorageError
from scrapy_bloom.job.disk import log_and_index
from scrapy_bloom.job.jobdir import is_database
from scrapy_bloom.queues.database import JobDatabase
from scrapy_bloom.queues.serialized import serialized
from scrapy_bloom.queues.sqlite_store import SQLiteStore
from scrapy_bloom.queues.store import Entered
from tests.support.batches import begun as begun_database
from tests.support.disks import Disk, mounted
from tests.support.local_filters import file_size_limit
from tests.support.request_queues import (
    begun,
    counts_in,
    done,
    enter,
    killed,
    names,
    push,
    take,
    taken,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "requests.sqlite"


def test_a_million_hosts_take_no_time(path: Path) -> None:
    """The next slot is looked up, not searched for."""
    database = begun(path, by_slot=True)
    for number in range(2000):
        push(database, str(number), slot=f"host-{number:04}")
    steps = []
    database._database._db.set_progress_handler(lambda: steps.append(1), 10)
    for _ in range(100):
        take(database)
    assert len(steps) < 100 * 20
    database.close()


def test_a_kill_while_it_is_made(path: Path) -> None:
    """A job's database is known by its first bytes."""
    assert not is_database(path)
    path.touch()
    assert not is_database(path)
    database = begun(path, by_slot=True)
    assert is_database(path)
    push(database, "a")
    assert is_database(path)
    database.close()
    assert counts_in(path) == (1, 0)


def test_what_cannot_be_made_leaves_nothing(path: Path) -> None:
    """An empty file would look like a queue that was cut to nothing."""
    with file_size_limit(0), pytest.raises(StorageError, match="cannot be used"):
        JobDatabase(path, by_slot=True)
    assert not list(path.parent.iterdir())


def test_what_cannot_be_serialized() -> None:
    with pytest.raises(ValueError, match="lambda"):
        serialized({"x": lambda: 0})


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
        JobDatabase(path, by_slot=True)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    assert {each.name: each.read_bytes() for each in path.parent.glob(f"{path.name}*")} == before


def test_the_openings_of_a_log_are_its_own(path: Path, tmp_path: Path) -> None:
    store = begun(path)
    database = store._database
    other = begun_database(tmp_path / "other.sqlite")
    assert database.id != other.id
    assert database.has_run(database.run)
    assert not database.has_run(other.run)
    killed(store)
    other.close()
    again = begun_database(path)
    assert again.id == database.id
    assert again.has_run(database.run)
    assert again.run != database.run
    again.close()


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
    database = JobDatabase(path, by_slot=True)
    assert (database.was_killed, database.left) == (False, left)
    database.close()


@pytest.mark.parametrize("left", [0, 10, 100])
def test_a_close_shrinks_a_file_that_is_nearly_empty(left: int, path: Path) -> None:
    partly_done(path, 200 - left).close()
    is_large = left == 100
    assert (path.stat().st_size > 20_000_000) == is_large
    assert is_large or path.stat().st_size < left * 110_000 + 100_000
    check(path, left)


def test_a_close_without_room_to_shrink(tmp_path: Path) -> None:
    with mounted(Disk, tmp_path / "small") as disk:
        path = disk.path / "requests.sqlite"
        store = partly_done(path, 180)
        store._database._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
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
        assert (copied._database.is_copy, copied._database.was_killed) == (True, True)
        assert names(copied, 2) == (["a"] if companions else [])
        copied.close()
        database.close()
        database = JobDatabase(path, by_slot=False)
        assert (database.is_copy, database.was_killed) == (False, False)
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
        database._database.checkpointed(0)
        push(database, "last")
        killed(database)
        path.write_bytes(backup)
        log = log_and_index(path)[0].read_bytes()
        with pytest.raises(StorageError, match="cannot be used"):
            JobDatabase(path, by_slot=False)
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


class TestLinks:
    def test_the_log_that_is_synced_is_that_of_the_target(self, tmp_path: Path) -> None:
        target = tmp_path / "disk" / "job"
        target.mkdir(parents=True)
        (tmp_path / "job").symlink_to(target)
        path = tmp_path / "job" / "requests.sqlite"
        for number in (1, 2):
            store = begun(path)
            push(store, "a")
            database = store._database
            assert database._wal
            synced = os.fstat(database._wal.fileno())
            assert os.path.samestat(synced, log_and_index(target / path.name)[0].stat())
            assert synced.st_size > 0
            database.sync()
            database.checkpointed(number)
            store.close()
        assert database.path == str(target / path.name)
        assert counts_in(path) == (2, 0)

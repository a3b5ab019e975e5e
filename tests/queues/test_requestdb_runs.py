"""The database of a job over several runs: deaths, changes of the filter, copies, links."""

import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from scrapy_bloom import StorageError
from scrapy_bloom.files.log import Change
from scrapy_bloom.job.disk import log_and_index
from scrapy_bloom.queues.batch import Batch, deserialized
from scrapy_bloom.queues.job_state import read_counts, read_dead
from scrapy_bloom.queues.sqlite import RequestDatabase
from tests.support.request_queues import begun, done, killed, name_of, names, push, take


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "requests.sqlite"


def record(*pages: str) -> list[Change]:
    return [Change(forgets=False, fingerprint=page.encode()) for page in pages]


def dead(path: Path) -> list[str]:
    return [deserialized(data)["name"] for data in read_dead(path)]


class TestDeaths:
    @staticmethod
    def die(path: Path, number: int) -> list[str]:
        """Have a process take so many requests, and die; return them."""
        database = begun(path)
        found = names(database, number)
        killed(database)
        return found

    def test_a_request_in_three_processes_that_died_is_a_suspect(self, path: Path) -> None:
        database = begun(path)
        for name in ("innocent", "guilty"):
            push(database, name)
        database.close()
        for _ in range(3):
            assert self.die(path, 1) == ["guilty"]
        database = begun(path)
        assert (database.pending, database.suspects, database.resumed) == (1, 1, 2)
        assert database.died == []
        assert read_counts(path) == (2, 0)
        assert names(database, 2) == ["innocent"]
        assert take(database) is None
        suspect = database.take_suspect()
        assert name_of(suspect) == "guilty"
        killed(database)
        database = begun(path)
        assert [deserialized(data)["name"] for data in database.died] == ["guilty"]
        assert names(database, 2) == ["innocent"]
        assert (database.pending, database.suspects, database.left) == (0, 0, 2)
        killed(database)
        assert dead(path) == ["guilty"]
        database = begun(path)
        assert database.died == []  # it was reported
        assert names(database, 1) == ["innocent"]
        database.close()


class TestChanges:
    def test_the_runs_of_a_log_are_its_own(self, path: Path, tmp_path: Path) -> None:
        database = begun(path)
        other = begun(tmp_path / "other.sqlite")
        assert database.id != other.id
        assert database.has_run(database.run)
        assert not database.has_run(other.run)
        killed(database)
        other.close()
        again = begun(path)
        assert again.id == database.id
        assert again.has_run(database.run)
        assert again.run != database.run
        again.close()


class TestCopies:
    @pytest.mark.parametrize("beside_it", [("-wal",), ("-wal", "-shm"), ()])
    def test_made_while_it_was_open(
        self, beside_it: tuple[str, ...], path: Path, tmp_path: Path
    ) -> None:
        database = begun(path)
        push(database, "a")
        copy = tmp_path / "copy" / path.name
        copy.parent.mkdir()
        for more in ("", *beside_it):
            shutil.copy(f"{path}{more}", f"{copy}{more}")
        push(database, "b")
        copied = RequestDatabase(copy, by_slot=False)
        assert (copied.is_copy, copied.was_killed) == (True, True)
        copied.begin()
        assert names(copied, 2) == (["a"] if beside_it else [])
        copied.close()
        database.close()
        database = RequestDatabase(path, by_slot=False)
        assert (database.is_copy, database.was_killed) == (False, False)
        database.close()

    def test_put_back_in_place_of_the_original(self, path: Path, tmp_path: Path) -> None:
        """By its content alone, with a log beside it that belongs to another content."""
        database = begun(path)
        for number in range(200):
            push(database, str(number), slot=f"host{number}.example" * 5)
        database.close()
        backup = path.read_bytes()
        database = begun(path)
        done(database, *[taken for _ in range(150) if (taken := take(database))])
        database.checkpointed(0)
        push(database, "last")
        killed(database)
        path.write_bytes(backup)
        log = log_and_index(path)[0].read_bytes()
        with pytest.raises(StorageError, match="cannot be used"):
            RequestDatabase(path, by_slot=False)
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
            database = begun(path)
            push(database, "a")
            assert database._log
            synced = os.fstat(database._log.fileno())
            assert os.path.samestat(synced, log_and_index(target / path.name)[0].stat())
            assert synced.st_size > 0
            database.sync()
            database.checkpointed(number)
            database.close()
        assert database.path == str(target / path.name)
        assert read_counts(path) == (2, 0)


def test_a_directory_whose_name_is_no_text(tmp_path: Path) -> None:
    directory = tmp_path / os.fsdecode(b"job\xff")
    directory.mkdir()
    database = begun(directory / "requests.sqlite")
    push(database, "a")
    database.checkpointed(1)
    killed(database)
    database = begun(directory / "requests.sqlite")
    assert (database.was_killed, database.is_copy, database.pending) == (True, False, 1)
    database.close()


def test_starting_over_sets_it_aside(path: Path) -> None:
    database = begun(path)
    database.apply(Batch(changes=record("a")))
    push(database, "a")
    database.checkpointed(1)
    killed(database)
    database = RequestDatabase(path, by_slot=False)
    before = database.id
    aside = Path(database.start_over())
    assert aside.parent == path.parent
    assert aside.name.startswith("requests.sqlite.set-aside-")
    assert read_counts(aside) == (1, 0)
    assert (database.was_killed, database.seq, database.applied) == (False, 0, 0)
    assert database.id != before
    database.begin()
    assert (database.resumed, database.pending, list(database.changes())) == (0, 0, [])
    push(database, "b")
    database.close()
    assert read_counts(path) == (1, 0)

"""The database of a job's requests: its crashes, its refusals. The rest is the contract's."""

import os
import resource
import sqlite3
from pathlib import Path

import pytest

from scrapy_bloom import StorageError
from scrapy_bloom.job.paths import is_database
from scrapy_bloom.queues.batch import serialized
from scrapy_bloom.queues.job_state import read_counts
from scrapy_bloom.queues.sqlite import RequestDatabase
from tests.support.request_queues import begun, push, take


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "requests.sqlite"


def test_a_million_hosts_take_no_time(path: Path) -> None:
    """The next slot is looked up, not searched for."""
    database = begun(path, by_slot=True)
    for number in range(2000):
        push(database, str(number), slot=f"host-{number:04}")
    steps = []
    database._db.set_progress_handler(lambda: steps.append(1), 10)
    for _ in range(100):
        take(database)
    assert len(steps) < 100 * 20
    database.close()


def test_a_kill_while_it_is_made(path: Path) -> None:
    path.touch()
    database = begun(path, by_slot=True)
    push(database, "a")
    database.close()
    assert read_counts(path) == (1, 0)


def test_it_is_known_by_its_first_bytes(path: Path) -> None:
    assert not is_database(path)
    path.touch()
    assert not is_database(path)
    database = begun(path, by_slot=True)
    assert is_database(path)
    push(database, "a")
    assert is_database(path)
    database.close()


def test_what_cannot_be_made_leaves_nothing(path: Path) -> None:
    """An empty file would look like a queue that was cut to nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(StorageError, match="cannot be used"):
            RequestDatabase(path, by_slot=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
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
        RequestDatabase(path, by_slot=True)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    assert {each.name: each.read_bytes() for each in path.parent.glob(f"{path.name}*")} == before

"""The forgotten requests of a filter in files, without the filter."""

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from scrapy_bloom import StorageError
from scrapy_bloom.files.forgotten import NAME, ForgottenFile, files
from scrapy_bloom.generations.forgotten import ForgottenStore, MemoryForgotten
from tests.support.local_filters import fps

ONE, TWO, THREE = fps(3)


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ForgottenStore]:
    new = ForgottenFile(tmp_path / NAME) if request.param == "file" else MemoryForgotten()
    yield new
    new.close()
    new.close()  # again is no harm


def test_what_is_removed_is_gone(store: ForgottenStore) -> None:
    store.remove(ONE)  # before there is a file
    store.add([ONE, TWO, ONE])
    assert sorted(store.all()) == [ONE, TWO]
    for _ in range(2):
        store.remove(ONE)
        assert list(store.all()) == [TWO]
    store.remove(TWO)
    assert not list(store.all())


def test_it_has_what_was_added(tmp_path: Path) -> None:
    store = ForgottenFile(tmp_path / NAME)
    assert not store.has(ONE)
    store.add([ONE])
    assert (store.has(ONE), store.has(TWO)) == (True, False)
    store.close()


def test_news_are_what_others_have_added(tmp_path: Path) -> None:
    store, other = ForgottenFile(tmp_path / NAME), ForgottenFile(tmp_path / NAME)
    assert list(store.news()) == []
    other.add([ONE, TWO])
    assert list(store.news()) == [ONE, TWO]
    assert list(store.news()) == []
    other.remove(ONE)
    other.add([THREE])
    assert list(store.news()) == [THREE]
    for each in (store, other):
        each.close()


def test_what_was_forgotten_long_ago_expires(store: ForgottenStore) -> None:
    store.expire(0.0)  # of nothing
    store.add([ONE])
    store.expire(1000.0)
    assert list(store.all()) == [ONE]
    store.expire(-1000.0)
    assert not list(store.all())


def test_it_is_used_in_other_threads_than_it_was_opened_in(store: ForgottenStore) -> None:
    store.add([ONE])
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.extend(store.all()))
    thread.start()
    thread.join(60)
    assert found == [ONE]


def test_its_files(tmp_path: Path) -> None:
    assert files(tmp_path) == []
    store = ForgottenFile(tmp_path / NAME)
    assert files(tmp_path) == []  # until something is forgotten
    store.add([ONE])
    names = [NAME, f"{NAME}-shm", f"{NAME}-wal"]
    assert sorted(path.name for path in files(tmp_path)) == names
    store.close()
    assert files(tmp_path) == [tmp_path / NAME]


def test_the_format_on_disk(tmp_path: Path) -> None:
    store = ForgottenFile(tmp_path / NAME)
    store.add([ONE])
    store.close()
    with sqlite3.connect(tmp_path / NAME) as db:
        assert db.execute("PRAGMA application_id").fetchone() == (0x626C6F66,)
        assert db.execute("PRAGMA user_version").fetchone() == (1,)
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert db.execute("SELECT id, fingerprint FROM forgotten").fetchall() == [(1, ONE)]
        db.execute("PRAGMA user_version = 2")
    db.close()
    with pytest.raises(StorageError, match=f"{NAME} of the .* has format version 2, and this"):
        ForgottenFile(tmp_path / NAME).add([ONE])

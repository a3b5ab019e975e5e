"""Looking at the database of a job: no file is changed, and none is left."""

import shutil
import tempfile
from contextlib import closing
from pathlib import Path

import pytest

from scrapy_bloom import StorageError
from scrapy_bloom.job import disk
from scrapy_bloom.queues.sqlite_store import SQLiteStore
from scrapy_bloom.queues.store import Entered
from tests.support.request_queues import begun, counts_in, enter
from tests.support.workspace import contents


def with_a_request(path: Path) -> SQLiteStore:
    database = begun(path, by_slot=True)
    enter(database, Entered(b""))
    return database


NAME = "requests.sqlite"


@pytest.mark.parametrize("companions", [("-wal", "-shm"), ("-wal",), ()])
def test_a_look_changes_nothing(companions: tuple[str, ...], tmp_path: Path) -> None:
    database = with_a_request(tmp_path / NAME)
    if not companions:
        database.close()
    killed = tmp_path / "killed"
    killed.mkdir()
    for more in ("", *companions):  # without its -shm, as in a copy
        shutil.copy(tmp_path / f"{NAME}{more}", killed)
    before = contents(killed)
    assert counts_in(killed / NAME) == (1, 0)
    assert contents(killed) == before
    database.close()


def test_a_look_while_it_is_used(tmp_path: Path) -> None:
    with closing(with_a_request(tmp_path / NAME)):
        names = contents(tmp_path).keys()
        assert counts_in(tmp_path / NAME) == (1, 0)
        assert contents(tmp_path).keys() == names
    assert contents(tmp_path).keys() == {NAME}
    assert counts_in(tmp_path / NAME) == (1, 0)
    assert contents(tmp_path).keys() == {NAME}


@pytest.mark.parametrize("companion", ["-wal", "-shm"])
def test_what_cannot_be_read_is_left_as_it_is(companion: str, tmp_path: Path) -> None:
    path = tmp_path / NAME
    for damaged in (path, path.with_name(path.name + companion)):
        damaged.write_bytes(b"no database " * 500)
    before = contents(tmp_path)
    with pytest.raises(StorageError, match="cannot be used"):
        counts_in(path)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("has_index", [True, False])
def test_a_look_while_a_crawl_closes_its_database(
    has_index: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log disappears between two steps of the look."""
    path = tmp_path / "requests.sqlite"
    database = with_a_request(path)
    log, index = disk.log_and_index(path)
    if not has_index:
        index.unlink()
    module, name = (disk, "_connected") if has_index else (tempfile, "mkdtemp")
    next_step = getattr(module, name)

    def closed_before(*given: object) -> object:
        monkeypatch.undo()
        database.close()
        assert not log.exists()
        return next_step(*given)

    monkeypatch.setattr(module, name, closed_before)
    assert counts_in(path) == (1, 0)
    assert counts_in(path) == (1, 0)
    assert not log.exists() or not log.read_bytes()


def test_a_look_sees_one_state(tmp_path: Path) -> None:
    path = tmp_path / "requests.sqlite"
    database = with_a_request(path)
    with closing(disk.connect_readonly(path)) as db:
        enter(database, Entered(b""))
        assert db.execute("SELECT count(*) FROM requests").fetchall() == [(1,)]
    assert counts_in(path) == (2, 0)
    database.close()

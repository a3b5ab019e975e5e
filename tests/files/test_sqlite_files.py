"""Looking at the databases of a job and of a filter: no file is changed, and none is left."""

import shutil
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from scrapy_bloom import StorageError
from scrapy_bloom.files.forgotten import ForgottenFile
from scrapy_bloom.job import disk
from scrapy_bloom.queues.batch import Batch, Found
from scrapy_bloom.queues.job_state import read_counts
from scrapy_bloom.queues.sqlite import RequestDatabase
from tests.support.request_queues import begun
from tests.support.workspace import contents


def with_a_request(path: Path) -> RequestDatabase:
    database = begun(path, by_slot=True)
    database.apply(Batch([Found(b"")]))
    return database


def with_a_fingerprint(path: Path) -> ForgottenFile:
    file = ForgottenFile(path)
    file.add([b"page"])
    return file


def forgotten_in(path: Path) -> list[bytes]:
    with closing(ForgottenFile(path, readonly=True)) as file:
        assert len(file) == 1
        assert file.has(b"page")
        return list(file.all())


KINDS = {
    "requests.sqlite": (with_a_request, read_counts, (1, 0)),
    "forgotten.sqlite": (with_a_fingerprint, forgotten_in, [b"page"]),
}


@pytest.mark.parametrize("companions", [("-wal", "-shm"), ("-wal",), ()])
@pytest.mark.parametrize("name", KINDS)
def test_a_look_changes_nothing(name: str, companions: tuple[str, ...], tmp_path: Path) -> None:
    make, look, found = KINDS[name]
    database = make(tmp_path / name)
    if not companions:
        database.close()
    killed = tmp_path / "killed"
    killed.mkdir()
    for more in ("", *companions):  # without its -shm, as in a copy
        shutil.copy(tmp_path / f"{name}{more}", killed)
    before = contents(killed)
    assert look(killed / name) == found
    assert contents(killed) == before
    database.close()


@pytest.mark.parametrize("name", KINDS)
def test_a_look_while_it_is_used(name: str, tmp_path: Path) -> None:
    make, look, found = KINDS[name]
    with closing(make(tmp_path / name)):
        names = contents(tmp_path).keys()
        assert look(tmp_path / name) == found
        assert contents(tmp_path).keys() == names
    assert contents(tmp_path).keys() == {name}
    assert look(tmp_path / name) == found
    assert contents(tmp_path).keys() == {name}


@pytest.mark.parametrize("look", [read_counts, forgotten_in])
@pytest.mark.parametrize("companion", ["-wal", "-shm"])
def test_what_cannot_be_read_is_left_as_it_is(
    look: Callable[[Path], object], companion: str, tmp_path: Path
) -> None:
    path = tmp_path / "forgotten.sqlite"
    for damaged in (path, path.with_name(path.name + companion)):
        damaged.write_bytes(b"no database " * 500)
    before = contents(tmp_path)
    with pytest.raises(StorageError, match="cannot be used"):
        look(path)
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
    assert read_counts(path) == (1, 0)
    assert read_counts(path) == (1, 0)
    assert not log.exists() or not log.read_bytes()


def test_a_look_sees_one_state(tmp_path: Path) -> None:
    path = tmp_path / "requests.sqlite"
    database = with_a_request(path)
    with closing(disk.connect_readonly(path)) as db:
        database.apply(Batch([Found(b"")]))
        assert db.execute("SELECT count(*) FROM requests").fetchall() == [(1,)]
    assert read_counts(path) == (2, 0)
    database.close()

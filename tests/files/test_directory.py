"""What is free for a copy: no filter that a crawl uses, or was killed with."""

from pathlib import Path

import pytest

from backends import local_backend
from local_filters import fps, make
from scrapy_bloom import LockedError, UncleanShutdownError
from scrapy_bloom.files.backend import notes_in_memory
from scrapy_bloom.files.directory import check_free
from scrapy_bloom.files.forgotten import files
from scrapy_bloom.job.recovery import Job


def test_a_directory_that_is_free(tmp_path: Path) -> None:
    check_free(tmp_path / "away")
    check_free(tmp_path)
    make(tmp_path / "bloom").close()
    before = sorted(tmp_path.rglob("*"))
    check_free(tmp_path / "bloom")
    assert sorted(tmp_path.rglob("*")) == before


def test_one_that_a_crawl_uses(tmp_path: Path) -> None:
    backend = make(tmp_path)
    with pytest.raises(LockedError, match="in use by another running crawl"):
        check_free(tmp_path)
    backend.begin()
    backend._store.unlock()
    with pytest.raises(UncleanShutdownError, match="was not closed by its last one"):
        check_free(tmp_path)
    backend.close()
    check_free(tmp_path)


def test_one_of_a_job_that_was_killed(tmp_path: Path) -> None:
    Job(tmp_path).begin()
    check_free(tmp_path / "kept")  # not the job's own
    with pytest.raises(UncleanShutdownError, match=f"{tmp_path} was killed"):
        check_free(tmp_path / "bloom")
    Job(tmp_path).end()
    check_free(tmp_path / "bloom")


def test_one_beside_a_queue_that_scrapy_has_not_closed(tmp_path: Path) -> None:
    """Only the first run after one with Scrapy's own filter is judged by that."""
    (tmp_path / "requests.queue").mkdir()
    (tmp_path / "requests.queue" / "p0").write_bytes(b"request")
    with pytest.raises(UncleanShutdownError, match="was killed"):
        check_free(tmp_path / "bloom")
    make(tmp_path / "bloom").close()
    check_free(tmp_path / "bloom")


def test_the_files_of_what_is_forgotten(tmp_path: Path) -> None:
    assert files(tmp_path) == []
    backend = make(tmp_path)
    backend.add(b"page")
    backend.forgotten.add([b"page"])
    names = ["forgotten.sqlite", "forgotten.sqlite-wal", "forgotten.sqlite-shm"]
    assert sorted(files(tmp_path)) == sorted(tmp_path / name for name in names)
    backend.close()
    assert files(tmp_path) == [tmp_path / "forgotten.sqlite"]


def test_many_at_once() -> None:
    backend = local_backend(None, capacity=100, error_rate=1e-9)
    backend.open()
    assert backend.add_many([*fps(50), *fps(10)]) == 50
    assert backend.add_many(fps(45, 60)) == 10
    backend.close()


def test_notes_of_a_run_err_next_to_never() -> None:
    notes = notes_in_memory()
    assert all(map(notes.add, fps(20_001)))
    status = notes.status()
    assert (status.location, status.error_rate) == ("memory", 1e-12)
    assert [each.capacity for each in status.generations] == [20_000, 40_000]

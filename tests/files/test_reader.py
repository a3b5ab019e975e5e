"""A filter in files as `scrapy bloom` reads it: nothing is locked, and nothing changes."""

from pathlib import Path

import pytest

from scrapy_bloom import StorageError
from scrapy_bloom.files.directory import FilterReader, filter_directory, found_files
from scrapy_bloom.job import jobdir
from scrapy_bloom.queues.sqlite_queue import SQLiteQueue
from tests.support.clock import Clock
from tests.support.local_filters import WINDOW, fps, make
from tests.support.logged_filters import LoggedFilter

ORIGIN = {"salt": bytes(range(16)), "spider": "shop", "fingerprinter": "a.B"}
ONE = "generation-0001.bloom"


@pytest.fixture
def grown(tmp_path: Path) -> Path:
    """A filter of three generations, in a job directory."""
    backend = make(tmp_path / "bloom", capacity=10, **ORIGIN)
    for fingerprint in fps(60):
        assert backend.add(fingerprint)
    backend.close()
    return tmp_path


def test_the_figures_of_a_filter(grown: Path) -> None:
    found = FilterReader(grown)
    assert found.location == str(grown / "bloom")
    assert (found.spider, found.fingerprinter) == ("shop", "a.B")
    assert found.salt == ORIGIN["salt"].hex()
    assert found.names == [f"generation-000{number}.bloom" for number in (1, 2, 3)]
    assert [each.count for each in found.generations] == [10, 20, 30]
    assert [next(fills) > 0 for fills in found.block_fills()] == [True] * 3
    assert found.is_closed
    assert found.is_in_use is False
    asked = [*fps(3), *fps(58, 62)]
    assert found.are_seen(asked) == [True] * 5 + [False] * 2
    found.close()
    with pytest.raises(ValueError, match="closed"):
        found.files[0].sync()


def test_the_bits_cannot_be_changed(grown: Path) -> None:
    found = FilterReader(grown)
    with pytest.raises((TypeError, ValueError, BufferError)):
        found.files[0].filter.add(b"more")
    found.close()


def test_a_crawl_that_runs(tmp_path: Path) -> None:
    crawl = LoggedFilter(tmp_path)
    asked = [b"in the log", b"other"]
    crawl.find(asked[0])
    crawl.store()
    found = FilterReader(tmp_path, recent=SQLiteQueue(tmp_path / "requests.sqlite").recent())
    assert found.location == str(tmp_path / "bloom")
    assert found.is_closed is False
    assert found.is_in_use is True
    assert found.are_seen(asked) == [True, False]
    assert found.generations[-1].count == 1
    crawl.close()
    found.close()


def test_what_has_expired_is_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    backend = make(tmp_path, clock, window_secs=WINDOW)
    assert backend.add(b"old")
    clock.now += WINDOW / 2
    assert backend.add(b"young")
    backend.close()
    monkeypatch.setattr("time.time", clock)
    for later, window, seen in (
        (0, 0.0, [True, True]),
        (WINDOW * 0.9, 0.0, [False, True]),
        (WINDOW * 0.9, 2 * WINDOW, [True, True]),
        (3 * WINDOW, 0.0, [False, False]),
    ):
        before, clock.now = clock.now, clock.now + later
        found = FilterReader(tmp_path, window=window) if window else FilterReader(tmp_path)
        assert found.are_seen([b"old", b"young"]) == seen
        found.close()
        clock.now = before


def test_a_filter_next_to_another(grown: Path) -> None:
    assert filter_directory(grown) == filter_directory(grown / "bloom") == grown / "bloom"
    (grown / ONE).touch()
    with pytest.raises(StorageError, match="there is a filter in .* and another in"):
        filter_directory(grown)


def test_no_filter(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="holds no filter; .* the files of a filter$"):
        found_files(tmp_path)
    with pytest.raises(StorageError, match=r"\(there is no such file or directory\)$"):
        found_files(tmp_path / "away")


def test_files_that_a_crawl_just_removes(grown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second look finds those that are left; what is missing then is missing."""
    looks = []
    filter_files = jobdir.filter_files

    def first_one_too_many(place: Path) -> list[Path]:
        found = filter_files(place)
        if found:
            looks.append(place)
        return [*found, place / "generation-0009.bloom"] if len(looks) == 2 else found

    monkeypatch.setattr(jobdir, "filter_files", first_one_too_many)
    assert len(found_files(grown)) == 3
    assert len(looks) == 3  # of which the first was for the directory
    (grown / "bloom" / ONE).unlink()
    with pytest.raises(StorageError, match=f"^{grown}/bloom does not hold all generations"):
        found_files(grown)

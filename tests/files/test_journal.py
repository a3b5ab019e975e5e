"""What a crawl has recorded since its queue was last on the disk: found, settled, read back."""

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from scrapy_bloom.files.journal import Journal, read_journal

from backends import local_backend
from local_filters import file_size_limit
from scrapy_bloom.files.backend import LocalBackend
from scrapy_bloom.files.mapping import FilterFile
from scrapy_bloom.files.reader import FilterReader
from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.generations.lookup import Lookup
from scrapy_bloom.job.recovery import Job
from servers import wait_for


def fingerprints(number: int) -> list[bytes]:
    return [each.to_bytes(20, "big") for each in range(number)]


def journal_of(directory: Path, bits: BloomFilter, sync_queue=lambda: None) -> Journal:
    journal = Journal(directory, sync_queue)
    journal.stand_before(Lookup([bits]), bits.add)
    return journal


def test_what_was_added_is_found_while_another_thread_settles(tmp_path: Path) -> None:
    bits = BloomFilter(50_000, 1e-12)
    journal = journal_of(tmp_path, bits)
    is_over = threading.Event()

    def settle() -> None:
        while not is_over.is_set():
            journal.settle()

    thread = threading.Thread(target=settle)
    thread.start()
    try:
        for each in fingerprints(30_000):
            assert journal.add(each)
            assert each in journal
            assert not journal.add(each)
    finally:
        is_over.set()
        thread.join()
    journal.settle()
    assert all(each in bits for each in fingerprints(30_000))
    assert read_journal(tmp_path) == []
    journal.close(settled=True)
    assert read_journal(tmp_path) is None


def test_a_queue_that_cannot_be_written_keeps_all_out_of_the_filter(tmp_path: Path) -> None:
    bits = BloomFilter(1000, 1e-9)
    failing = [True]

    def sync_queue() -> None:
        if failing[0]:
            raise OSError("the disk")

    journal = journal_of(tmp_path, bits, sync_queue)
    first, second = fingerprints(2)
    journal.add(first)
    with pytest.raises(OSError, match="the disk"):
        journal.settle()
    journal.add(second)
    assert first in journal
    assert first not in bits
    assert sorted(read_journal(tmp_path) or ()) == [first, second]
    failing[0] = False
    journal.settle()
    assert first in bits
    assert second in bits
    journal.close(settled=True)


def test_an_end_that_was_being_written(tmp_path: Path) -> None:
    journal = journal_of(tmp_path, BloomFilter(1000, 1e-9))
    for each in fingerprints(3):
        journal.add(each)
    journal.close(settled=False)
    (path,) = (path for path in tmp_path.iterdir() if path.stat().st_size)
    whole = path.read_bytes()
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        assert read_journal(tmp_path) == fingerprints(length // 24)


def test_an_empty_fingerprint_is_one_like_any_other(tmp_path: Path) -> None:
    journal = journal_of(tmp_path, BloomFilter(1000, 1e-9))
    for each in (b"a", b""):
        journal.add(each)
    journal.close(settled=False)
    assert read_journal(tmp_path) == [b"a", b""]


def test_only_what_is_not_settled_is_read_back(tmp_path: Path) -> None:
    """Each file is used again and again."""
    assert read_journal(tmp_path) is None
    for name in ("journal-1", "journal-2"):
        (tmp_path / name).write_bytes(b"\0\0\0\1a")
    assert read_journal(tmp_path) == [b"a", b"a"]
    journal = journal_of(tmp_path, BloomFilter(1000, 1e-9))
    for each in fingerprints(6):
        assert journal.add(each)
        assert read_journal(tmp_path) == [each]
        journal.settle()
        assert read_journal(tmp_path) == []
    journal.close(settled=True)


def test_a_file_that_cannot_be_removed_is_left_to_the_next_run(tmp_path: Path) -> None:
    journal = journal_of(tmp_path, BloomFilter(1000, 1e-9))
    (tmp_path / "journal-1").unlink()
    (tmp_path / "journal-1").mkdir()
    journal.close(settled=True)
    assert (tmp_path / "journal-1").is_dir()


def test_its_files_are_made_as_others_are(tmp_path: Path) -> None:
    journal = journal_of(tmp_path, BloomFilter(1000, 1e-9))
    (tmp_path / "plain").touch()
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1
    journal.close(settled=True)


def test_it_tells_when_it_is_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scrapy_bloom.files.journal._LONG", 3)
    journal = journal_of(tmp_path, BloomFilter(1000, 1e-9))
    told: list[int] = []
    for number, each in enumerate(fingerprints(5)):
        if number == 4:
            journal.when_long = lambda: None
        journal.add(each)
        if number == 0:
            journal.when_long = lambda: told.append(len(journal._new))
    assert told == [3, 4]
    journal.close(settled=False)
    silent = journal_of(tmp_path, BloomFilter(1000, 1e-9))
    for each in fingerprints(5):  # to nobody
        silent.add(each)
    silent.close(settled=True)


def test_half_of_a_record_is_cut_off_again(tmp_path: Path) -> None:
    """A disk that is full takes the beginning of what does not fit."""
    journal = journal_of(tmp_path, BloomFilter(1000, 1e-9))
    first, second, third, fourth = fingerprints(4)
    journal.add(first)
    with file_size_limit(30):
        journal.add(second)  # told to nobody
        assert read_journal(tmp_path) == [first]
        told: list[OSError] = []
        journal.when_full = told.append
        journal.add(third)
    assert [error.errno for error in told] == [errno.ENOSPC]
    assert all(each in journal for each in (first, second, third))
    assert journal.add(fourth)
    assert read_journal(tmp_path) == [first, fourth]
    journal.settle()
    assert read_journal(tmp_path) == []
    journal.close(settled=True)


def crash_safe(job: Path, capacity: int = 1000) -> LocalBackend:
    """Make the filter of a job whose queue survives, written to the disk at the close only."""
    return local_backend(
        job / "bloom",
        capacity=capacity,
        error_rate=1e-9,
        job=Job(job, "auto", crash_safe=True),
        sync_secs=0,
    )


def test_more_than_it_may_hold_is_settled_sooner(tmp_path: Path) -> None:
    many = fingerprints(120_000)
    backend = crash_safe(tmp_path, capacity=50_000)  # it grows meanwhile
    backend.open()
    backend.begin()
    for each in many:
        backend.add(each)
    assert all(each in backend for each in many)
    assert len(read_journal(tmp_path / "bloom") or ()) < len(many)
    assert backend.status().count == len(many)
    backend.close()
    again = local_backend(tmp_path / "bloom", capacity=50_000, error_rate=1e-9)
    again.open()
    assert all(each in again for each in many)
    again.close()


def test_a_long_one_wakes_up_the_thread_that_settles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scrapy_bloom.files.journal._LONG", 10)
    before = set(threading.enumerate())
    backend = crash_safe(tmp_path)
    backend.open()
    backend.begin()
    (syncer,) = set(threading.enumerate()) - before
    assert syncer.name == "scrapy_bloom sync"
    assert syncer.daemon  # else a crawl that dies would go on
    assert all(map(backend.add, fingerprints(10)))
    wait_for(lambda: read_journal(tmp_path / "bloom") == [], lambda: "not settled")
    backend.close()
    assert not syncer.is_alive()


def test_a_disk_that_is_full_costs_no_count_and_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = fingerprints(500)
    backend = crash_safe(tmp_path)
    backend.open()
    backend.begin()
    backend.add(many[0])

    class Full:
        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert backend._store.journal is not None
    with monkeypatch.context() as patch:
        patch.setattr(backend._store.journal, "_file", Full())
        assert backend.add(many[1])
        assert "No space left on device" in caplog.text
        assert all(map(backend.add, many[2:]))
    assert not any(map(backend.add, many))
    status = backend.status()
    assert (status.count, status.errors) == (500, 499)
    assert "could not be written to the disk: No space left on device" in status.failure
    (told,) = (each for each in caplog.records if each.levelname == "ERROR")
    assert "No space left on device" in told.getMessage()
    assert "the crawl is killed" in told.getMessage()
    assert not told.exc_info
    backend.close()
    again = local_backend(tmp_path / "bloom", capacity=1000, error_rate=1e-9)
    again.open()
    assert again.status().count == 500
    assert all(each in again for each in many)
    again.close()


def test_writing_to_the_disk_leaves_the_locks_of_the_databases(tmp_path: Path) -> None:
    """Else another process, `scrapy bloom forget`, would remove a log that is in use."""
    backend = crash_safe(tmp_path)
    backend.open()
    first, second = fingerprints(2)
    backend.add(first)
    backend.add(second)
    backend.forgotten.add([first])
    assert backend._store is not None
    backend._store.settle()
    path = tmp_path / "bloom/forgotten.sqlite"
    script = (
        "import sqlite3, sys\n"
        "db = sqlite3.connect(sys.argv[1])\n"
        "print(db.execute('SELECT count(*) FROM forgotten').fetchone())\n"
        "db.close()\n"
    )
    command = [sys.executable, "-c", script, str(path)]
    other = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert other.stdout == "(1,)\n"
    assert path.with_name("forgotten.sqlite-wal").exists()
    backend.forgotten.add([second])
    assert backend.add(first)
    assert backend.add(second)
    backend.close()


def test_who_cannot_read_it_leaves_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = local_backend(tmp_path, capacity=1000, error_rate=1e-6)
    backend.open()
    backend.close()
    (tmp_path / "journal-1").mkdir()
    closed = []
    close = FilterFile.close
    monkeypatch.setattr(FilterFile, "close", lambda file: (closed.append(file.path), close(file)))
    with pytest.raises(IsADirectoryError):
        FilterReader(tmp_path)
    assert [path.name for path in closed] == ["generation-0001.bloom"]

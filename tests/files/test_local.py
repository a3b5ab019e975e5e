"""The local backend: lock, import, unclean shutdown, sync."""

import errno
import os
import re
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from scrapy_bloom import (
    StorageError,
)
from scrapy_bloom.files import backend as backend_module
from scrapy_bloom.files.file import FileGeneration
from tests.support.local_filters import FILTER_NAME, abandon, add, make


def test_too_little_memory_for_a_filter_is_one_clear_error() -> None:
    code = """
        import resource
        from scrapy_bloom.exceptions import StorageError
        from scrapy_bloom.generations.memory import MemoryBackend
        from scrapy_bloom.generations.policy import Policy

        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        try:
            MemoryBackend(Policy(expected=10**9, error_rate=1e-6)).open()
        except StorageError as error:
            print(error)
    """
    output = subprocess.check_output([sys.executable, "-c", textwrap.dedent(code)], text=True)
    assert re.match(
        "there is not enough memory for a filter of 3,7.* bytes; lower BLOOM_EXPECTED", output
    )


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No mark in a file takes their place, which a kill would leave for ever."""

    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    make(tmp_path).close()
    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(StorageError, match="without locks .* give the crawl another"):
        make(tmp_path)
    monkeypatch.undo()
    make(tmp_path).close()


def test_the_lock_is_released_when_opening_fails(tmp_path: Path) -> None:
    (tmp_path / FILTER_NAME).write_bytes(b"foreign")
    for _ in range(2):
        with pytest.raises(StorageError, match="is not a filter"):
            make(tmp_path)


def test_a_crash_before_begin_is_clean(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    abandon(make(tmp_path))
    make(tmp_path).close()
    assert not caplog.records


def wait_until(condition) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_failing_disk_is_logged_once_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backend_module, "SYNC_SECS", 0.02)
    backend = make(tmp_path)
    backend.begin()

    def fails(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        assert backend.add(b"page")
        wait_until(lambda: backend.status().errors == 1)
        assert backend.add(b"other")
        wait_until(lambda: backend.status().errors == 2)
        with pytest.raises(StorageError, match="could not be written to the disk: Input/output"):
            backend.close()
    (record,) = caplog.records
    assert "The crawl continues" in record.getMessage()
    # It stays marked as not closed, and the directory is free again.
    assert FileGeneration.at(tmp_path / FILTER_NAME).in_use
    make(tmp_path).close()


def test_a_filter_whose_header_cannot_be_written_at_the_close_stays_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make(tmp_path)
    add(backend, b"page")
    fsync, synced = os.fsync, []

    def fails_the_second_time(fd: int) -> None:
        if Path(f"/proc/self/fd/{fd}").readlink().name == FILTER_NAME:
            synced.append(fd)
            if len(synced) == 2:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(fd)

    with (
        monkeypatch.context() as patch,
        pytest.raises(StorageError, match="treat it as not closed"),
    ):
        patch.setattr(os, "fsync", fails_the_second_time)
        backend.close()
    assert FileGeneration.at(tmp_path / FILTER_NAME).in_use


def test_opening_a_big_filter_reads_and_keeps_nothing_of_it(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import resource, sys
        from pathlib import Path
        from scrapy_bloom.files.backend import LocalBackend
        from scrapy_bloom.generations.policy import Policy

        def rss():
            return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

        def opened(name, expected):
            policy = Policy(expected=expected, error_rate=1e-6)
            backend = LocalBackend(Path(sys.argv[1], name), policy)
            backend.open()
            return backend

        opened("small", 1000).close()  # imports filelock: on Python 3.10 with asyncio and sqlite3
        before = rss()
        backend = opened("big", 100_000_000)
        assert backend.status().nbytes > 360_000_000
        print(rss() - before)
        backend.close()
    """)
    for _ in ("made", "reopened"):
        done = subprocess.run(
            [sys.executable, "-c", script, os.fspath(tmp_path)],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert int(done.stdout) < 5_000_000


def test_a_directory_that_cannot_be_synced_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some network file systems refuse that; the files themselves are on the disk."""
    fsync = os.fsync

    def refuses(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", refuses)
    backend = make(tmp_path, capacity=10)
    assert all(add(backend, *(b"%d" % number for number in range(100))))
    assert len(backend.status().generations) == 4
    backend.close()


def test_what_a_killed_creation_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "generation-0007.bloom.tmp").write_bytes(b"half")
    (tmp_path / "notes.tmp").write_bytes(b"mine")
    make(tmp_path).close()
    assert not (tmp_path / "generation-0007.bloom.tmp").exists()
    assert (tmp_path / "notes.tmp").exists()

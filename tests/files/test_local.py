"""The local backend: lock, import, unclean shutdown, sync."""

import errno
import logging
import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from scrapy_bloom import (
    FingerprinterMismatchError,
    LockedError,
    SeenFileError,
    StorageError,
    UncleanShutdownError,
)
from scrapy_bloom.files.backend import LocalBackend
from scrapy_bloom.files.header import read_header
from scrapy_bloom.job.recovery import Job

FILTER_NAME = "generation-0001.bloom"


def make(directory: Path | None, **options: object) -> LocalBackend:
    job = Job(options.pop("job_dir", None), options.pop("on_unclean_shutdown", "auto"))
    backend = LocalBackend(
        directory, **{"capacity": 2000, "error_rate": 1e-6, "sync_secs": 0, "job": job, **options}
    )
    backend.open()
    return backend


def abandon(backend: LocalBackend) -> None:
    """End a backend as a crash does: nothing written, the lock gone with the process."""
    backend._store._directory.unlock()


def add(backend: LocalBackend, *fingerprints: bytes) -> list[bool]:
    backend.begin()
    return [backend.add(fingerprint) for fingerprint in fingerprints]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job directory as Scrapy leaves one, with a queue."""
    (tmp_path / "requests.queue").mkdir()
    (tmp_path / "requests.queue/active.json").write_text("[0]")
    return tmp_path


def test_no_memory_for_a_filter_is_told_in_one_line() -> None:
    code = """
        import resource
        from scrapy_bloom.exceptions import StorageError
        from scrapy_bloom.files.backend import LocalBackend

        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        try:
            LocalBackend(None, capacity=10**9, error_rate=1e-6).open()
        except StorageError as error:
            print(error)
    """
    output = subprocess.check_output([sys.executable, "-c", textwrap.dedent(code)], text=True)
    assert re.match("there is no memory for a filter of 3,7.* bytes; lower BLOOM_EXPECTED", output)


def test_one_crawl_at_a_time(tmp_path: Path) -> None:
    first = make(tmp_path)
    with pytest.raises(LockedError, match="in use by another running crawl"):
        make(tmp_path)
    first.close()
    make(tmp_path).close()


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


def test_many_filters_in_one_process(tmp_path: Path) -> None:
    backends = [make(tmp_path / str(number)) for number in range(64)]
    for number, backend in enumerate(backends):
        assert backend.add(b"%d" % number)
    for number, backend in enumerate(backends):
        assert b"%d" % number in backend
        assert b"%d" % (number + 1) not in backend
        backend.close()


def test_other_fingerprinter(tmp_path: Path) -> None:
    make(tmp_path, fingerprinter="a.B").close()
    with pytest.raises(FingerprinterMismatchError, match=r"'a\.B'.*'c\.D'"):
        make(tmp_path, fingerprinter="c.D")
    make(tmp_path, fingerprinter="a.B").close()


def test_a_crash_before_begin_is_clean(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    abandon(make(tmp_path))
    make(tmp_path, on_unclean_shutdown="stop").close()
    assert not caplog.records


def test_a_directory_is_made(tmp_path: Path) -> None:
    make(tmp_path / "a/b/c").close()
    assert (tmp_path / "a/b/c" / FILTER_NAME).exists()


def test_a_file_in_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "bloom").write_text("mine")
    with pytest.raises(StorageError, match="bloom is a file, and"):
        make(tmp_path / "bloom")
    assert (tmp_path / "bloom").read_text() == "mine"


class TestUncleanShutdown:
    def test_auto_sets_filter_and_queue_aside(
        self, job: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        backend = make(job / "bloom", job_dir=job)
        add(backend, b"page")
        abandon(backend)
        content = (job / "bloom" / FILTER_NAME).read_bytes()
        backend = make(job / "bloom", job_dir=job)
        assert b"page" not in backend
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        (old,) = (job / "bloom").glob("*.set-aside-*")
        assert old.read_bytes() == content
        (queue,) = job.glob("requests.queue.set-aside-*")
        assert (queue / "active.json").read_text() == "[0]"
        assert not (job / "requests.queue").exists()
        assert str(old) in record.getMessage()
        assert str(queue) in record.getMessage()
        backend.close()

    def test_auto_keeps_a_filter_without_job(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        backend = make(tmp_path)
        add(backend, b"page")
        abandon(backend)
        backend = make(tmp_path)
        assert b"page" in backend
        (record,) = caplog.records
        assert "What was recorded is kept (at least 1 requests)" in record.getMessage()
        assert backend.add(b"other")
        backend.close()
        caplog.clear()
        make(tmp_path).close()
        assert not caplog.records

    def test_keep(self, job: Path) -> None:
        backend = make(job / "bloom", job_dir=job)
        add(backend, b"page")
        abandon(backend)
        backend = make(job / "bloom", job_dir=job, on_unclean_shutdown="keep")
        assert b"page" in backend
        # Scrapy's queue would fail on every pop, and the crawl never end.
        assert not (job / "requests.queue").exists()
        assert len(list(job.glob("requests.queue.set-aside-*"))) == 1
        backend.close()

    def test_reset_without_job(self, tmp_path: Path) -> None:
        backend = make(tmp_path)
        add(backend, b"page")
        abandon(backend)
        backend = make(tmp_path, on_unclean_shutdown="reset")
        assert b"page" not in backend
        backend.close()

    def test_stop(self, job: Path) -> None:
        backend = make(job / "bloom", job_dir=job)
        add(backend, b"page")
        abandon(backend)
        with pytest.raises(UncleanShutdownError, match='"reset".*"keep".*Nothing was changed'):
            make(job / "bloom", job_dir=job, on_unclean_shutdown="stop")
        names = sorted(path.name for path in job.iterdir())
        assert names == ["bloom", "bloom.in-use", "requests.queue"]

    def test_a_crash_between_the_two_renames_loses_nothing(
        self, job: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend = make(job / "bloom", job_dir=job)
        add(backend, b"page")
        abandon(backend)
        rename = Path.rename

        def dies(path: Path, target: Path) -> Path:
            if path.name == FILTER_NAME:
                raise KeyboardInterrupt
            return rename(path, target)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Path, "rename", dies)
            make(job / "bloom", job_dir=job)
        assert not (job / "requests.queue").exists()
        backend = make(job / "bloom", job_dir=job)
        assert b"page" not in backend
        backend.close()

    def test_the_job_remembers_it_when_the_filter_is_elsewhere_now(
        self, job: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        backend = make(job / "bloom", job_dir=job)
        add(backend, b"page")
        abandon(backend)
        (job / "requests.seen").write_bytes(b"\x00\x04seen")
        backend = make(job / "other", job_dir=job)
        assert b"seen" not in backend
        assert not (job / "requests.queue").exists()
        assert "did not close" in caplog.text
        backend.begin()
        backend.close()
        caplog.clear()
        backend = make(job / "another", job_dir=job)
        assert b"seen" not in backend
        assert not caplog.records
        backend.close()

    def test_the_job_remembers_it_when_the_filter_was_moved_away(self, job: Path) -> None:
        backend = make(job / "bloom", job_dir=job)
        add(backend, b"page")
        abandon(backend)
        (job / "bloom" / FILTER_NAME).unlink()
        with pytest.raises(UncleanShutdownError, match=f"did not close {job} "):
            make(job / "bloom", job_dir=job, on_unclean_shutdown="stop")
        make(job / "bloom", job_dir=job).close()
        assert not (job / "requests.queue").exists()

    def test_a_clean_run_leaves_no_mark(self, job: Path) -> None:
        backend = make(job / "bloom", job_dir=job)
        add(backend, b"page")
        assert (job / "bloom.in-use").exists()
        backend.close()
        assert not (job / "bloom.in-use").exists()

    def test_the_count_does_not_drift_over_many_kills(self, tmp_path: Path) -> None:
        backend = make(tmp_path, capacity=25_000)
        add(backend, *(b"%d" % number for number in range(20_000)))
        backend.close()
        number = 20_000
        for _ in range(40):
            backend = make(tmp_path, capacity=25_000)
            add(backend, *(b"%d" % n for n in range(number, number + 70)))
            number += 70
            abandon(backend)
        backend = make(tmp_path, capacity=25_000)
        assert backend.status().count == pytest.approx(number, rel=0.01)
        backend.close()

    def test_several_times_within_a_second(self, job: Path) -> None:
        for _ in range(4):
            backend = make(job / "bloom", job_dir=job)
            add(backend, b"page")
            abandon(backend)
        assert len(list((job / "bloom").glob("*.set-aside-*"))) == 3


def binary(fingerprints: list[bytes]) -> bytes:
    return b"".join(len(fp).to_bytes(2, "big") + fp for fp in fingerprints)


class TestImport:
    FINGERPRINTS = tuple(number.to_bytes(20, "big") for number in range(500))

    @pytest.mark.parametrize("as_text", [False, True])
    def test_at_the_first_open(
        self, job: Path, caplog: pytest.LogCaptureFixture, as_text: bool
    ) -> None:
        caplog.set_level(logging.INFO)
        fps = self.FINGERPRINTS
        content = "".join(fp.hex() + "\n" for fp in fps).encode() if as_text else binary(fps)
        (job / "requests.seen").write_bytes(content)
        backend = make(job / "bloom", job_dir=job)
        assert backend.status().count == 500
        assert all(fp in backend for fp in fps)
        backend.close()
        assert (job / "requests.seen").read_bytes() == content
        assert "Imported 500 requests" in caplog.text
        # Only once: what Scrapy's filter records later is not ours.
        caplog.clear()
        (job / "requests.seen").write_bytes(content + b"\x00\x01x")
        backend = make(job / "bloom", job_dir=job)
        assert backend.status().count == 500
        assert b"x" not in backend
        backend.close()

    def test_a_cut_off_record_is_told(self, job: Path, caplog: pytest.LogCaptureFixture) -> None:
        (job / "requests.seen").write_bytes(binary(self.FINGERPRINTS)[:-3])
        backend = make(job / "bloom", job_dir=job)
        assert backend.status().count == 499
        assert "Ignored an incomplete request at the end" in caplog.text
        backend.close()

    def test_more_than_expected_get_the_room_they_need(self, job: Path) -> None:
        (job / "requests.seen").write_bytes(binary(self.FINGERPRINTS))
        backend = make(job / "bloom", job_dir=job, capacity=10)
        assert backend.status().capacity == 500
        assert backend.status().error_rate_now <= 1e-6
        backend.close()

    def test_records_of_different_lengths_get_the_room_they_need(self, job: Path) -> None:
        many = [b"x" * 250, *(b"%d" % number for number in range(5000))]
        (job / "requests.seen").write_bytes(binary(many))
        backend = make(job / "bloom", job_dir=job, capacity=10)
        assert backend.status().capacity == 5001
        backend.close()

    @pytest.mark.parametrize("state", ["none", "stale"])
    def test_not_from_a_job_that_was_killed_under_scrapys_filter(
        self, job: Path, caplog: pytest.LogCaptureFixture, state: str
    ) -> None:
        """Its queue is broken: what it held would look seen and never be crawled."""
        (job / "requests.seen").write_bytes(binary(self.FINGERPRINTS))
        (job / "requests.queue/0").write_bytes(b"queued")
        active = job / "requests.queue/active.json"
        if state == "none":
            active.unlink()
        else:
            os.utime(active, (time.time() - 60, time.time() - 60))
        with pytest.raises(UncleanShutdownError):
            make(job / "bloom", job_dir=job, on_unclean_shutdown="stop")
        backend = make(job / "bloom", job_dir=job)
        assert backend.status().count == 0
        assert "starts over with an empty filter" in caplog.text
        assert (job / "requests.seen").exists()
        assert not (job / "requests.queue").exists()
        backend.close()

    def test_keep_imports_it_all_the_same(
        self, job: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (job / "requests.seen").write_bytes(binary(self.FINGERPRINTS))
        (job / "requests.queue/active.json").unlink()
        backend = make(job / "bloom", job_dir=job, on_unclean_shutdown="keep")
        assert backend.status().count == 500
        assert "What was recorded is kept" in caplog.text
        backend.close()

    def test_progress_is_logged(
        self, job: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        caplog.set_level(logging.INFO)
        monkeypatch.setattr("scrapy_bloom.job.requests_seen._PROGRESS_SECS", 0)
        many = [number.to_bytes(20, "big") for number in range(25_000)]
        (job / "requests.seen").write_bytes(binary(many))
        make(job / "bloom", job_dir=job).close()
        lines = [r.getMessage() for r in caplog.records if "a second" in r.getMessage()]
        assert len(lines) == 2
        assert "requests.seen: 40 %, 10,000 requests" in lines[0]

    def test_a_foreign_file_leaves_no_filter(self, job: Path) -> None:
        (job / "requests.seen").write_bytes(binary(self.FINGERPRINTS) + b"\xff\xff\xff")
        with pytest.raises(SeenFileError, match="neither format"):
            make(job / "bloom", job_dir=job)
        assert not list((job / "bloom").glob("*.bloom*"))

    def test_not_after_a_reset(self, job: Path) -> None:
        """Its queue is gone: whatever requests.seen holds must be crawled again."""
        (job / "requests.seen").write_bytes(binary(self.FINGERPRINTS))
        backend = make(job / "bloom", job_dir=job)
        add(backend, b"page")
        abandon(backend)
        backend = make(job / "bloom", job_dir=job)
        assert backend.status().count == 0
        backend.close()
        (job / "bloom" / FILTER_NAME).unlink()  # as if killed before the new one was made
        backend = make(job / "bloom", job_dir=job)
        assert backend.status().count == 0
        backend.close()


RECORDER = """
import sys
from pathlib import Path
from scrapy_bloom.files.backend import LocalBackend

backend = LocalBackend(Path(sys.argv[1]), capacity=200_000, error_rate=1e-6)
backend.open()
backend.begin()
print(backend.status().count, flush=True)
number = 0
while True:
    backend.add(b"%s %d" % (sys.argv[2].encode(), number))
    number += 1
    if number % 100 == 0:
        print(number, flush=True)
"""


def test_nothing_is_forgotten_after_kill_9(tmp_path: Path) -> None:
    """What a process recorded before SIGKILL is found, and the count is right within 1 %."""
    recorded: dict[str, int] = {}
    count = 0
    for name, wanted in (("a", 100), ("b", 3000), ("c", 12_345), ("d", 50_000)):
        process = subprocess.Popen(
            [sys.executable, "-c", RECORDER, os.fspath(tmp_path), name],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert int(process.stdout.readline()) == count
        told = 0
        while told < wanted:
            told = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split("\n")
        process.wait(30)
        process.stdout.close()
        recorded[name] = max([told, *(int(line) for line in rest[:-1])])
        backend = make(tmp_path)
        for each, last in recorded.items():
            assert all(b"%s %d" % (each.encode(), n) in backend for n in range(last))
        # 100 more may have been recorded and not yet told.
        total = sum(recorded.values())
        count = backend.status().count
        assert 0.99 * total <= count <= total + 100 * len(recorded)
        backend.close()


def wait_until(condition) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_changed_is_written_out_regularly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    fsync = os.fsync

    def counted(fd: int) -> None:
        synced.append(fd)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", counted)
    backend = make(tmp_path, sync_secs=0.02)
    backend.begin()
    at_begin = len(synced)
    time.sleep(0.2)
    assert len(synced) == at_begin  # nothing changed
    backend.add(b"page")
    wait_until(lambda: len(synced) > at_begin)
    backend.close()


def test_a_failing_disk_is_told_once_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = make(tmp_path, sync_secs=0.02)
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
    assert "The crawl goes on" in record.getMessage()
    # It stays marked as not closed, and the directory is free again.
    assert read_header(tmp_path / FILTER_NAME)[1].in_use
    make(tmp_path).close()


def test_memory_alone_touches_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    backend = make(None)
    assert add(backend, b"page", b"page") == [True, False]
    assert backend.status().location == "memory"
    backend.close()
    assert list(tmp_path.iterdir()) == []


def test_opening_a_big_filter_reads_and_keeps_nothing_of_it(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import resource, sys
        from pathlib import Path
        from scrapy_bloom.files.backend import LocalBackend

        def rss():
            return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

        before = rss()
        backend = LocalBackend(Path(sys.argv[1]), capacity=100_000_000, error_rate=1e-6)
        backend.open()
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


def test_what_cannot_be_set_aside_is_one_clear_error(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make(job / "bloom", job_dir=job)
    add(backend, b"page")
    abandon(backend)

    def refuses(path: Path, target: Path) -> Path:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuses)
        with pytest.raises(
            StorageError, match="cannot be prepared for the crawl: .*requests.queue"
        ):
            make(job / "bloom", job_dir=job)
    make(job / "bloom", job_dir=job).close()

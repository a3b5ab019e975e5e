"""A filter that was not closed is set aside with its queue."""

import errno
import logging
import os
from pathlib import Path

import pytest

from scrapy_bloom import StorageError
from tests.support.local_filters import FILTER_NAME, add, fps, left_by_a_kill, make


class TestUncleanShutdown:
    def test_filter_and_queue_are_set_aside(
        self, job: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        left_by_a_kill(job / "bloom", job_dir=job)
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

    def test_a_crash_between_the_two_renames_loses_nothing(
        self, job: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        left_by_a_kill(job / "bloom", job_dir=job)
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

    def test_a_queue_without_the_filter_that_was_killed_with_it(
        self, job: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (job / "requests.seen").write_bytes(b"\x00\x04seen")
        (job / "requests.queue/p0").write_bytes(b"request")
        os.utime(job / "requests.queue/active.json", (1, 1))  # of an earlier pause
        backend = make(job / "bloom", job_dir=job)
        assert b"seen" not in backend
        assert not (job / "requests.queue").exists()
        assert "did not close" in caplog.text
        backend.begin()
        backend.close()
        caplog.clear()
        backend = make(job / "bloom", job_dir=job)
        assert b"seen" not in backend
        assert not caplog.records
        backend.close()

    def test_an_older_filter_was_put_in_place_of_the_one_that_was_killed(self, job: Path) -> None:
        make(job / "bloom", job_dir=job).close()
        older = (job / "bloom" / FILTER_NAME).read_bytes()
        left_by_a_kill(job / "bloom", job_dir=job)
        (job / "bloom" / FILTER_NAME).write_bytes(older)
        # Only a clean close writes the state of a queue.
        (job / "requests.queue/active.json").unlink()
        (job / "requests.queue/p0").write_bytes(b"request")
        make(job / "bloom", job_dir=job).close()
        assert not (job / "requests.queue").exists()

    def test_the_times_of_the_queue_do_not_count_after_a_clean_run(self, job: Path) -> None:
        backend = make(job / "bloom", job_dir=job)
        add(backend, b"page")
        backend.close()
        (job / "requests.queue/p0").write_bytes(b"request")
        os.utime(job / "requests.queue/active.json", (1, 1))
        backend = make(job / "bloom", job_dir=job)
        assert b"page" in backend
        assert (job / "requests.queue").exists()
        backend.close()

    def test_several_times_within_a_second(self, job: Path) -> None:
        for _ in range(4):
            left_by_a_kill(job / "bloom", job_dir=job)
        assert len(list((job / "bloom").glob("*.set-aside-*"))) == 3


def test_what_cannot_be_set_aside_is_one_clear_error(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_by_a_kill(job / "bloom", job_dir=job)

    def refuses(path: Path, target: Path) -> Path:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuses)
        with pytest.raises(
            StorageError, match="cannot be prepared for the crawl: .*requests.queue"
        ):
            make(job / "bloom", job_dir=job)
    make(job / "bloom", job_dir=job).close()


def test_a_filter_that_was_not_closed_is_named_by_its_newest_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = make(tmp_path, capacity=10)
    backend.begin()
    for fingerprint in fps(60):
        backend.add(fingerprint)
    backend._lock.close()
    make(tmp_path).close()
    (message,) = caplog.messages
    assert f"did not close {tmp_path / 'generation-0003.bloom'} " in message

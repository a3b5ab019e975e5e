"""A new filter takes in what Scrapy's own one has recorded in its job."""

import logging
from pathlib import Path

import pytest

from tests.support.local_filters import FILTER_NAME, left_by_a_kill, make


def binary(fingerprints: list[bytes]) -> bytes:
    return b"".join(len(fp).to_bytes(2, "big") + fp for fp in fingerprints)


class TestImport:
    FINGERPRINTS = tuple(number.to_bytes(20, "big") for number in range(500))

    def test_at_the_first_open(self, job: Path, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        fps, content = self.FINGERPRINTS, binary(self.FINGERPRINTS)
        (job / "requests.seen").write_bytes(content)
        backend = make(job / "bloom", job_dir=job)
        assert backend.status().count == 500
        assert all(fp in backend for fp in fps)
        backend.close()
        assert (job / "requests.seen").read_bytes() == content
        assert "Imported 500 requests" in caplog.text
        assert [each.number for each in backend.status().generations] == [1]
        # Only once: what Scrapy's filter records later is not ours.
        caplog.clear()
        (job / "requests.seen").write_bytes(content + b"\x00\x01x")
        backend = make(job / "bloom", job_dir=job)
        assert backend.status().count == 500
        assert b"x" not in backend
        backend.close()

    def test_an_incomplete_record_is_logged(
        self, job: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (job / "requests.seen").write_bytes(binary(self.FINGERPRINTS)[:-3])
        backend = make(job / "bloom", job_dir=job)
        assert backend.status().count == 499
        assert "Ignored an incomplete request at the end" in caplog.text
        backend.close()

    def test_more_than_expected_get_the_room_they_need(self, job: Path) -> None:
        (job / "requests.seen").write_bytes(binary(self.FINGERPRINTS))
        backend = make(job / "bloom", job_dir=job, capacity=10)
        assert backend.status().capacity == 625  # a quarter more
        assert backend.status().error_rate_now <= 1e-6
        backend.close()

    def test_progress_is_logged(
        self, job: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        caplog.set_level(logging.INFO)
        monkeypatch.setattr("scrapy_bloom.job.requests_seen._PROGRESS_SECS", 0)
        many = [number.to_bytes(20, "big") for number in range(25_000)]
        (job / "requests.seen").write_bytes(binary(many))
        make(job / "bloom", job_dir=job).close()
        lines = [r.getMessage() for r in caplog.records if "per second" in r.getMessage()]
        assert len(lines) == 2
        assert "requests.seen: 40 %, 10,000 requests" in lines[0]

    def test_not_after_a_reset(self, job: Path) -> None:
        """Its queue is gone: whatever requests.seen holds must be crawled again."""
        (job / "requests.seen").write_bytes(binary(self.FINGERPRINTS))
        left_by_a_kill(job / "bloom", job_dir=job)
        backend = make(job / "bloom", job_dir=job)
        assert backend.status().count == 0
        backend.close()
        (job / "bloom" / FILTER_NAME).unlink()  # as if killed before the new one was made
        backend = make(job / "bloom", job_dir=job)
        assert backend.status().count == 0
        backend.close()

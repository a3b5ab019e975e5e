"""What is read in a job directory."""

import os
from pathlib import Path

from scrapy_bloom.job.recovery import Job


def test_the_times_of_the_queue_count_where_scrapys_own_filter_has_run(tmp_path: Path) -> None:
    queue = tmp_path / "requests.queue"
    queue.mkdir()
    (queue / "active.json").write_text("[0]")
    os.utime(queue / "active.json", (1, 1))  # as a copy may have it
    job = Job(tmp_path)
    assert job.was_killed(has_filter=False)
    assert not job.was_killed(has_filter=True)
    (tmp_path / "requests.seen").write_text("0" * 41)
    assert job.was_killed(has_filter=True)
    os.utime(queue / "active.json")
    assert not job.was_killed(has_filter=True)


def test_a_queue_with_requests_and_without_its_state_was_killed(tmp_path: Path) -> None:
    queue = tmp_path / "requests.queue"
    queue.mkdir()
    assert not Job(tmp_path).was_killed(has_filter=True)
    (queue / "p0").write_bytes(b"request")
    for has_filter in (True, False):
        assert Job(tmp_path).was_killed(has_filter=has_filter)

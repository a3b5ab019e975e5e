"""What is read and written in a job directory."""

import os
from pathlib import Path

import pytest

from scrapy_bloom.job import jobdir
from scrapy_bloom.job.recovery import Job


@pytest.mark.parametrize("filter_id", ["", "0123abcd"])
def test_a_marker_names_its_filter_until_it_is_removed(filter_id: str, tmp_path: Path) -> None:
    assert not Job(tmp_path).may_have_used(filter_id)
    Job(tmp_path).begin(filter_id)
    assert Job(tmp_path).may_have_used(filter_id)
    assert Job(tmp_path).may_have_used("another") is (filter_id == "")
    Job(tmp_path).end()
    assert not Job(tmp_path).may_have_used(filter_id)


def test_an_incomplete_marker_may_name_any_filter(tmp_path: Path) -> None:
    Job(tmp_path).begin("0123abcd")
    whole = (tmp_path / jobdir.IN_USE).read_text()
    named = whole.index("0123abcd\n") + len("0123abcd\n")
    for length in range(len(whole)):
        (tmp_path / jobdir.IN_USE).write_text(whole[:length])
        assert Job(tmp_path).may_have_used("another") is (length < named)


def test_the_times_of_the_queue_count_where_scrapys_own_filter_has_run(tmp_path: Path) -> None:
    queue = tmp_path / "requests.queue"
    queue.mkdir()
    (queue / "active.json").write_text("[0]")
    os.utime(queue / "active.json", (1, 1))  # as a copy may have it
    job = Job(tmp_path, "keep")
    assert job.was_killed(has_filter=False)
    job.begin()
    assert job.was_killed(has_filter=True)
    job.end()
    assert not job.was_killed(has_filter=True)
    (tmp_path / "requests.seen").write_text("0" * 41)
    assert job.was_killed(has_filter=True)
    os.utime(queue / "active.json")
    assert not job.was_killed(has_filter=True)

"""What is read and written in a job directory."""

import os
from pathlib import Path

import pytest

from scrapy_bloom.job import paths as jobdir
from scrapy_bloom.job.recovery import Job


@pytest.mark.parametrize("filter_id", ["", "0123abcd"])
def test_a_mark_names_its_filter_until_it_is_cleared(filter_id: str, tmp_path: Path) -> None:
    assert jobdir.filter_in_use(tmp_path) is None
    jobdir.mark_as_used(tmp_path, filter_id)
    assert jobdir.filter_in_use(tmp_path) == filter_id
    Job(tmp_path).end()
    assert jobdir.filter_in_use(tmp_path) is None


def test_a_mark_that_was_being_written_names_no_other_filter(tmp_path: Path) -> None:
    jobdir.mark_as_used(tmp_path, "0123abcd")
    whole = (tmp_path / jobdir.IN_USE).read_text()
    named = whole.index("0123abcd\n") + len("0123abcd\n")
    for length in range(len(whole)):
        (tmp_path / jobdir.IN_USE).write_text(whole[:length])
        assert jobdir.filter_in_use(tmp_path) == ("" if length < named else "0123abcd")


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

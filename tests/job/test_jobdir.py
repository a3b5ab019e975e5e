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
    jobdir.mark_as_ended(tmp_path)
    assert jobdir.filter_in_use(tmp_path) is None


def test_a_mark_that_was_being_written_names_no_other_filter(tmp_path: Path) -> None:
    jobdir.mark_as_used(tmp_path, "0123abcd")
    whole = (tmp_path / jobdir.IN_USE).read_text()
    named = whole.index("0123abcd\n") + len("0123abcd\n")
    for length in range(len(whole)):
        (tmp_path / jobdir.IN_USE).write_text(whole[:length])
        assert jobdir.filter_in_use(tmp_path) == ("" if length < named else "0123abcd")


def test_a_run_of_ours_that_ended_well_needs_no_times_of_scrapys_files(tmp_path: Path) -> None:
    seen, queue = tmp_path / "requests.seen", tmp_path / "requests.queue"
    queue.mkdir()
    (queue / "active.json").write_text("[0]")
    os.utime(queue / "active.json", (1, 1))  # as a copy may have it
    seen.write_text("0" * 41)
    assert Job(tmp_path, "stop").was_killed(has_filter=True)
    job = Job(tmp_path, "keep")
    job.begin()
    assert job.was_killed(has_filter=True)
    job.end()
    assert not job.was_killed(has_filter=True)
    assert job.was_killed(has_filter=False)
    (note,) = tmp_path.glob("bloom.*")
    whole = note.read_text()
    for length in range(whole.index("\n")):
        note.write_text(whole[:length])
        assert job.was_killed(has_filter=True)
    note.write_text(whole)
    with seen.open("a") as file:
        file.write("1" * 41)  # a run with Scrapy's own filter
    assert job.was_killed(has_filter=True)


def test_scrapys_filter_ran_last_though_its_file_is_empty(tmp_path: Path) -> None:
    """What Scrapy 2.19 records is in a buffer for a while: a killed run leaves an empty file."""
    queue = tmp_path / "requests.queue"
    queue.mkdir()
    (queue / "active.json").write_text("[0]")
    job = Job(tmp_path, "keep")
    job.begin()
    job.end()
    (queue / "0").write_bytes(b"queued")
    os.utime(queue / "active.json", (1, 1))  # older than what is queued: the run was killed
    assert not job.was_killed(has_filter=True)  # nothing tells of a run with Scrapy's filter
    (tmp_path / "requests.seen").touch()
    assert job.was_killed(has_filter=True)
    job.end()
    assert not job.was_killed(has_filter=True)
    (tmp_path / "requests.seen").unlink()
    assert not job.was_killed(has_filter=True)

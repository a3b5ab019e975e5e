"""What is read and written in a job directory."""

from pathlib import Path

import pytest

from scrapy_bloom import jobdir


@pytest.mark.parametrize("filter_id", ["", "0123abcd"])
def test_a_mark_names_its_filter_until_it_is_cleared(filter_id: str, tmp_path: Path) -> None:
    assert jobdir.marked_filter(tmp_path) is None
    jobdir.set_mark(tmp_path, filter_id)
    assert jobdir.marked_filter(tmp_path) == filter_id
    jobdir.clear_mark(tmp_path)
    assert jobdir.marked_filter(tmp_path) is None


def test_a_mark_that_was_being_written_names_no_filter(tmp_path: Path) -> None:
    jobdir.set_mark(tmp_path, "0123abcd")
    whole = jobdir.mark_path(tmp_path).read_text()
    for length in range(len(whole)):
        jobdir.mark_path(tmp_path).write_text(whole[:length])
        assert jobdir.marked_filter(tmp_path) == ""

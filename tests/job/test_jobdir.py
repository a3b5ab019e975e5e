"""What is read and written in a job directory."""

from pathlib import Path

import pytest

from scrapy_bloom.job import paths as jobdir


@pytest.mark.parametrize("filter_id", ["", "0123abcd"])
def test_a_mark_names_its_filter_until_it_is_cleared(filter_id: str, tmp_path: Path) -> None:
    assert jobdir.filter_in_use(tmp_path) is None
    jobdir.set_in_use(tmp_path, filter_id)
    assert jobdir.filter_in_use(tmp_path) == filter_id
    jobdir.clear_in_use(tmp_path)
    assert jobdir.filter_in_use(tmp_path) is None


def test_a_mark_that_was_being_written_names_no_other_filter(tmp_path: Path) -> None:
    jobdir.set_in_use(tmp_path, "0123abcd")
    whole = jobdir.in_use_path(tmp_path).read_text()
    named = whole.index("0123abcd\n") + len("0123abcd\n")
    for length in range(len(whole)):
        jobdir.in_use_path(tmp_path).write_text(whole[:length])
        assert jobdir.filter_in_use(tmp_path) == ("" if length < named else "0123abcd")
        assert not jobdir.was_machine_restarted(tmp_path)


def test_a_note_tells_whether_the_machine_was_restarted(tmp_path: Path) -> None:
    assert not jobdir.was_machine_restarted(tmp_path)
    jobdir.set_in_use(tmp_path, "0123abcd")
    assert not jobdir.was_machine_restarted(tmp_path)
    note = jobdir.in_use_path(tmp_path)
    text, filter_id, _ = note.read_text().splitlines()
    note.write_text(f"{text}\n{filter_id}\n01234567-89ab-cdef-0123-456789abcdef\n")
    assert jobdir.was_machine_restarted(tmp_path)
    assert jobdir.filter_in_use(tmp_path) == "0123abcd"
    note.write_text(f"{text}\n{filter_id}\n")  # as older versions wrote it
    assert not jobdir.was_machine_restarted(tmp_path)

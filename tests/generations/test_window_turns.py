"""Time windows in files, with a clock of our own: each opening begins a run."""

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from scrapy_bloom.job.jobdir import QUEUE
from tests.support.clock import Clock
from tests.support.local_filters import WINDOW, files, fps, make
from tests.support.servers import wait_for

DAY = 86_400.0
WEEK = 7 * DAY


def run(place: Path, clock: Clock, pages: Iterable[bytes], **options: object) -> list[bytes]:
    """Return the pages that a run finds new."""
    backend = make(place, clock, **{"window_secs": WINDOW, **options})
    backend.begin()
    new = [page for page in pages if backend.add(page)]
    backend.close()
    return new


def test_with_a_week_each_page_is_crawled_every_seventh_night(tmp_path: Path) -> None:
    start, page_of = Clock().now, {night: b"found on night %d" % night for night in range(7)}
    for night in range(30):
        # Each night, it begins at another minute, and takes some hours.
        clock = Clock(start + night * DAY + 600 * (night * 7 % 5))
        pages = [page for found, page in page_of.items() if found <= night]
        new = run(tmp_path, clock, pages, window_secs=WEEK)
        assert new == [page_of[night % 7]]


@pytest.mark.parametrize("pages", [5, 20, 100])
def test_the_error_rate_holds_with_nine_live_parts_that_grow(tmp_path: Path, pages: int) -> None:
    clock, most = Clock(), 0
    for number in range(40):  # the last run of a part begins just before the next part
        clock.now += WINDOW / 16
        run(tmp_path, clock, fps(number * pages, (number + 1) * pages), capacity=80)
        backend = make(tmp_path, clock, capacity=80, window_secs=WINDOW)
        live = backend.status().generations
        backend.close()
        most = max(most, len({each.first_run for each in live}))
        assert sum(each.error_rate for each in live) <= 1e-9 * (1 + 1e-9)
    assert most >= 9


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_job_of_scrapys_scheduler_that_was_paused_continues_its_run(
    tmp_path: Path, is_paused: bool
) -> None:
    clock, options = Clock(), {"job_dir": tmp_path}
    assert run(tmp_path / "bloom", clock, [b"page"], **options)
    queue = tmp_path / QUEUE
    queue.mkdir()
    if is_paused:
        (queue / "0").touch()
    (queue / "active.json").touch()
    clock.now += 3 * WINDOW
    assert run(tmp_path / "bloom", clock, [b"page"], **options) == [b"page"] * (not is_paused)


def test_a_window_can_be_set_and_unset(tmp_path: Path, clock: Clock) -> None:
    none = {"window_secs": 0}
    assert run(tmp_path, clock, [b"first"], **none)
    clock.now += 5 * WINDOW
    assert run(tmp_path, clock, [b"first", b"second"], **none) == [b"second"]
    clock.now += WINDOW / 2
    assert not run(tmp_path, clock, [b"first", b"second"])
    clock.now += WINDOW / 2  # after the last run without a window
    assert run(tmp_path, clock, [b"first", b"second"]) == [b"first", b"second"]
    clock.now += 5 * WINDOW
    assert not run(tmp_path, clock, [b"first", b"second"], **none)


def test_a_shortened_window_counts_from_the_next_run(tmp_path: Path, clock: Clock) -> None:
    assert run(tmp_path, clock, [b"page"])
    clock.now += WINDOW / 10
    assert run(tmp_path, clock, [b"page"], window_secs=WINDOW / 10) == [b"page"]


def test_without_a_crawl_nothing_expires(tmp_path: Path, clock: Clock) -> None:
    assert run(tmp_path, clock, [b"page"])
    clock.now += 2 * WINDOW
    backend = make(tmp_path, clock, window_secs=WINDOW)
    assert b"page" in backend
    backend.close()
    assert files(tmp_path) == ["generation-0001.bloom"]


def test_a_crash_between_expiry_and_removal(tmp_path: Path, clock: Clock) -> None:
    assert run(tmp_path, clock, [b"old"])
    clock.now += WINDOW / 2
    assert run(tmp_path, clock, [b"newer"])
    content = (tmp_path / "generation-0001.bloom").read_bytes()
    clock.now += WINDOW / 2
    assert run(tmp_path, clock, [b"newest"])
    assert "generation-0001.bloom" not in files(tmp_path)
    (tmp_path / "generation-0001.bloom").write_bytes(content)  # as if not yet removed
    assert run(tmp_path, clock, [b"old", b"newer"]) == [b"old"]
    assert "generation-0001.bloom" not in files(tmp_path)


def test_files_that_expire_are_removed_and_not_kept_open(tmp_path: Path, clock: Clock) -> None:
    assert run(tmp_path, clock, [b"page"])
    clock.now += WINDOW
    backend = make(tmp_path, clock, window_secs=WINDOW)
    backend.begin()
    first = tmp_path / "generation-0001.bloom"
    wait_for(lambda: not first.exists(), lambda: "not removed")
    opened = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
    ours = [path for path in opened if path.startswith(f"{tmp_path}/generation-")]
    assert ours
    assert not [path for path in ours if "generation-0001" in path]
    backend.close()


def test_what_stands_in_the_place_of_an_expired_file_is_left_there(
    tmp_path: Path, clock: Clock
) -> None:
    first = tmp_path / "generation-0001.bloom"
    assert run(tmp_path, clock, [b"page"])
    clock.now += WINDOW
    backend = make(tmp_path, clock, window_secs=WINDOW)
    first.unlink()
    first.write_text("mine")
    backend.begin()
    backend.close()
    assert first.read_text() == "mine"

"""Time windows in job directories, with a clock of our own: each opening begins a run."""

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import pytest

from scrapy_bloom.job.jobdir import FILE, QUEUE
from tests.support.clock import Clock
from tests.support.local_filters import WINDOW, fps, make
from tests.support.servers import wait_for


def run(place: Path, clock: Clock, pages: Iterable[bytes], **options: object) -> list[bytes]:
    """Return the pages that a run finds new."""
    backend = make(place, clock, **{"window_secs": WINDOW, **options})
    backend.begin()
    new = [page for page in pages if backend.add(page)]
    backend.close()
    return new


@pytest.mark.parametrize("pages", [5, 100])
def test_the_error_rate_holds_with_nine_live_parts_that_grow(tmp_path: Path, pages: int) -> None:
    clock, most = Clock(), 0
    for number in range(40):  # the last run of a part begins just before the next part
        clock.now += WINDOW / 16
        run(tmp_path, clock, fps(number * pages, (number + 1) * pages), capacity=80)
        backend = make(tmp_path, clock, capacity=80, window_secs=WINDOW)
        live = backend.status().generations
        backend.close()
        most = max(most, len({entry.first_run for entry in live}))
        assert sum(entry.error_rate for entry in live) <= 1e-9 * (1 + 1e-9)
    assert most >= 9


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_job_of_scrapys_scheduler_that_was_paused_continues_its_run(
    tmp_path: Path, is_paused: bool
) -> None:
    clock = Clock()
    assert run(tmp_path, clock, [b"page"])
    queue = tmp_path / QUEUE
    queue.mkdir()
    if is_paused:
        (queue / "0").touch()
    (queue / "active.json").touch()
    clock.now += 3 * WINDOW
    assert run(tmp_path, clock, [b"page"]) == [b"page"] * (not is_paused)


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
    assert len(backend.status().generations) == 1
    backend.close()


def test_blocks_that_expire_are_deleted_while_the_crawl_runs(tmp_path: Path, clock: Clock) -> None:
    assert run(tmp_path, clock, fps(500), capacity=10**6)
    with closing(sqlite3.connect(tmp_path / FILE)) as db:
        blocks = "SELECT generation, count(*) FROM blocks GROUP BY generation"
        assert 200 < dict(db.execute(blocks))[1] < 500
        clock.now += WINDOW
        backend = make(tmp_path, clock, window_secs=WINDOW)
        assert backend.add(b"page")
        backend._file._wake.set()
        wait_for(lambda: db.execute(blocks).fetchall() == [(2, 1)], lambda: "not deleted")
    backend.close()

"""Time windows, with a clock of our own."""

import itertools
import logging
import os
from pathlib import Path

import pytest

from tests.support.clock import Clock
from tests.support.local_filters import WINDOW, files, fps, make
from tests.support.servers import wait_for


class TestWindow:
    def test_a_request_counts_for_a_window_and_at_most_a_quarter_more(
        self, place: Path | None, clock: Clock
    ) -> None:
        for offset in (0, 1, 100, 249, 250, 251, 600):
            backend = make(place and place / str(offset), clock, window_secs=WINDOW)
            backend.add(b"first")
            clock.now += offset
            assert backend.add(b"page")
            clock.now += WINDOW - 1e-3
            assert b"page" in backend
            assert not backend.add(b"page")
            clock.now += WINDOW / 4 + 2e-3
            assert b"page" not in backend
            assert backend.add(b"page")
            backend.close()

    def test_the_reported_window_is_exact_although_a_turn_takes_time(
        self, place: Path | None
    ) -> None:
        times = itertools.count(1_700_000_000, 0.01)
        backend = make(place, lambda: next(times), window_secs=WINDOW)
        for number in range(3):
            assert backend.add(b"%d" % number)
            times = itertools.count(next(times) + WINDOW / 4, 0.01)
        assert backend.add(b"last")
        newest = backend.status().generations[-1]
        assert 4 * (newest.open_until - newest.created_at) == pytest.approx(WINDOW, abs=1e-4)
        backend.close()

    def test_expired_files_are_removed_and_logged(
        self, tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        backend = make(tmp_path, clock, window_secs=WINDOW)
        for fingerprint in fps(10):
            backend.add(fingerprint)
        clock.now += WINDOW / 4
        backend.add(b"second quarter")
        assert files(tmp_path) == ["generation-0001.bloom", "generation-0002.bloom"]
        assert "A quarter of the time window has ended: generation 2 records" in caplog.text
        clock.now += WINDOW + 1
        backend.add(b"much later")
        assert (
            "10 requests recorded more than 1000 seconds ago have expired, with generation"
            in caplog.text
        )
        assert backend.status().expired == 10
        clock.now += 2 * WINDOW
        backend.add(b"later still")
        clock.now += 2 * WINDOW
        backend.add(b"at the end")
        assert backend.status().expired >= 12  # in all
        assert backend.status().count <= 2
        backend.close()
        assert "generation-0001.bloom" not in files(tmp_path)

    def test_a_window_can_be_set_and_unset(self, tmp_path: Path, clock: Clock) -> None:
        backend = make(tmp_path, clock)
        backend.add(b"before")
        backend.close()
        clock.now += 5 * WINDOW
        backend = make(tmp_path, clock, window_secs=WINDOW)
        assert not backend.add(b"before")  # counts from when the window was set
        assert backend.add(b"within")
        backend.close()
        clock.now += WINDOW * 1.25 + 1
        backend = make(tmp_path, clock, window_secs=WINDOW)
        backend.begin()
        assert b"before" not in backend
        assert backend.add(b"within")
        backend.close()
        clock.now += 5 * WINDOW
        backend = make(tmp_path, clock)
        clock.now += 5 * WINDOW
        assert not backend.add(b"within")
        backend.close()

    def test_a_shortened_window_counts_from_now(self, tmp_path: Path, clock: Clock) -> None:
        backend = make(tmp_path, clock, window_secs=WINDOW)
        backend.add(b"page")
        backend.close()
        clock.now += 1
        backend = make(tmp_path, clock, window_secs=WINDOW / 10)
        backend.begin()
        clock.now += WINDOW / 10 * 1.25 + 1
        assert b"page" not in backend
        backend.close()

    def test_a_crash_between_expiry_and_removal(
        self, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend = make(tmp_path, clock, window_secs=WINDOW)
        backend.add(b"old")
        clock.now += WINDOW / 2
        backend.add(b"newer")
        backend.close()
        content = (tmp_path / "generation-0001.bloom").read_bytes()
        clock.now += WINDOW * 0.9
        backend = make(tmp_path, clock, window_secs=WINDOW)
        backend.begin()
        backend.close()
        assert "generation-0001.bloom" not in files(tmp_path)
        (tmp_path / "generation-0001.bloom").write_bytes(content)  # as if not yet removed
        backend = make(tmp_path, clock, window_secs=WINDOW)
        assert b"old" not in backend
        assert b"newer" in backend
        assert "generation-0001.bloom" not in files(tmp_path)
        backend.close()


def test_files_that_expire_are_removed_and_not_kept_open(tmp_path: Path) -> None:
    clock = Clock()
    backend = make(tmp_path, clock, window_secs=WINDOW)
    for number in range(6):  # two windows
        assert backend.add(b"page %d" % number)
        clock.now += WINDOW / 3
    first = tmp_path / "generation-0001.bloom"
    wait_for(lambda: not first.exists(), lambda: "not removed")
    opened = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
    ours = [path for path in opened if path.startswith(f"{tmp_path}/generation-")]
    assert ours
    assert not [path for path in ours if "generation-0001" in path]
    backend.close()


def test_what_stands_in_the_place_of_an_expired_file_is_left_there(tmp_path: Path) -> None:
    clock, first = Clock(), tmp_path / "generation-0001.bloom"
    backend = make(tmp_path, clock, window_secs=WINDOW)
    for number in range(6):  # two windows
        assert backend.add(b"page %d" % number)
        clock.now += WINDOW / 3
        if number == 0:
            first.unlink()
            first.write_text("mine")
    backend.close()
    assert first.read_text() == "mine"


@pytest.mark.parametrize(("behind", "is_logged"), [(1.0, False), (1.5, True)])
def test_a_clock_that_went_back_is_logged(
    behind: float, is_logged: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    make(tmp_path, clock, window_secs=WINDOW).close()
    clock.now -= behind
    backend = make(tmp_path, clock, window_secs=WINDOW)
    backend.begin()
    assert bool(caplog.messages) is is_logged
    assert not is_logged or f"is {behind:.0f} seconds behind" in caplog.text
    backend.close()


def test_without_a_crawl_nothing_turns(tmp_path: Path) -> None:
    clock = Clock()
    backend = make(tmp_path, clock, window_secs=WINDOW)
    backend.add(b"page")
    backend.close()
    clock.now += 2 * WINDOW
    backend = make(tmp_path, clock, window_secs=WINDOW)
    assert b"page" in backend
    assert len(backend.status().generations) == 1
    assert backend.status().generations[0].number == 1
    backend.begin()
    assert b"page" not in backend
    assert backend.status().generations[-1].number == 2
    backend.close()


@pytest.mark.parametrize("is_in_memory", [False, True])
def test_an_empty_quarter_becomes_the_next_quarter(tmp_path: Path, is_in_memory: bool) -> None:
    clock = Clock()
    backend = make(None if is_in_memory else tmp_path, clock, window_secs=WINDOW)
    backend.begin()
    clock.now += WINDOW
    assert backend.add(b"page")
    (only,) = backend.status().generations
    assert (only.number, only.open_until) == (1, clock.now + WINDOW / 4)
    backend.close()


def test_nothing_that_a_run_recorded_expires_in_it_even_over_a_pause(tmp_path: Path) -> None:
    clock = Clock()
    options = {"window_secs": WINDOW, "capacity": 40, "is_one_run": True}
    backend = make(tmp_path, clock, **options)
    backend.add(b"of the run before")
    backend.close()
    clock.now += WINDOW / 2
    backend = make(tmp_path, clock, **options)
    backend.begin()
    run_from = backend.kept_from
    assert run_from == 2
    pages = [b"page %d" % number for number in range(30)]  # it grows several times
    for page in pages:
        assert backend.add(page)
        clock.now += WINDOW / 10
    assert not any(map(backend.add, pages))
    assert backend.is_duplicate(pages[0])
    assert b"of the run before" not in backend
    backend.close()
    clock.now += 2 * WINDOW
    backend = make(tmp_path, clock, **options)
    backend.kept_from = run_from
    assert not any(map(backend.add, pages))
    backend.close()
    clock.now += 2 * WINDOW
    backend = make(tmp_path, clock, **options)
    assert all(map(backend.add, pages))
    backend.close()

"""The directory of a filter: what is free for a copy, what a kill left, what expires."""

import os
import re
from pathlib import Path

import pytest

from scrapy_bloom import LockedError, UncleanShutdownError
from scrapy_bloom.files.directory import check_free
from scrapy_bloom.generations.memory import practically_exact_set
from scrapy_bloom.job.locks import lock_job
from scrapy_bloom.job.recovery import Job
from tests.support.backends import local_backend
from tests.support.clock import Clock
from tests.support.local_filters import WINDOW, fps, make
from tests.support.servers import wait_for


def test_a_directory_that_a_crawl_uses_is_not_free(tmp_path: Path) -> None:
    backend = make(tmp_path)
    with pytest.raises(LockedError, match="in use by another running crawl"):
        check_free(tmp_path)
    backend.begin()
    backend.unlock()
    with pytest.raises(UncleanShutdownError, match=f"^{tmp_path} is in use by a crawl, or"):
        check_free(tmp_path)
    backend.close()
    check_free(tmp_path)


def test_the_directory_of_a_killed_job_is_not_free(tmp_path: Path) -> None:
    Job(tmp_path).begin()
    check_free(tmp_path / "kept")  # not the job's own
    with pytest.raises(UncleanShutdownError, match=f"{tmp_path} was killed"):
        check_free(tmp_path / "bloom")
    Job(tmp_path).end()
    check_free(tmp_path / "bloom")


def test_a_killed_job_without_a_filter_has_no_number_of_requests(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Job(tmp_path).begin()
    with lock_job(tmp_path):
        make(tmp_path / "bloom", job=Job(tmp_path, "keep")).close()
    (told,) = caplog.messages
    assert "The filter keeps the recorded requests, so it reports" in told


@pytest.mark.parametrize("verdict", ["keep", "stop"])
def test_a_filter_that_was_not_closed_is_named_by_its_newest_file(
    verdict: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = make(tmp_path, capacity=10)
    backend.begin()
    for fingerprint in fps(60):
        backend.add(fingerprint)
    backend.unlock()
    newest = tmp_path / "generation-0003.bloom"
    try:
        make(tmp_path, job=Job(None, verdict)).close()
    except UncleanShutdownError as error:
        assert verdict == "stop"
        assert f"did not close {newest} " in str(error)
    else:
        (told,) = caplog.messages
        assert f"did not close {newest} " in told
        kept = re.search("at least ([0-9]+) requests", told)
        assert kept
        assert 30 <= int(kept[1]) <= 60


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


def test_kept_settings_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    make(tmp_path, capacity=100, error_rate=1e-3).close()
    for changes, said in (
        ({}, None),
        ({"salt": None}, None),
        ({"salt": bytes(16)}, "its own salt"),
        ({"capacity": 99}, None),
        ({"capacity": 101}, "keeps them: room for 100 requests. The settings"),
        ({"capacity": 101, "window_secs": WINDOW}, None),
        ({"error_rate": 1e-4}, "keeps them: an error rate of 0.0005. The"),
    ):
        caplog.clear()
        make(tmp_path, **{"capacity": 100, "error_rate": 1e-3, **changes}).close()
        told = caplog.messages
        assert len(told) == bool(said), told
        assert not said or re.search(said, told[0])


@pytest.mark.parametrize(("behind", "is_told"), [(1.0, False), (1.5, True)])
def test_a_clock_that_went_back_is_logged(
    behind: float, is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    make(tmp_path, clock, window_secs=WINDOW).close()
    clock.now -= behind
    backend = make(tmp_path, clock, window_secs=WINDOW)
    backend.begin()
    assert bool(caplog.messages) is is_told
    assert not is_told or f"is {behind:.0f} seconds behind" in caplog.text
    backend.close()


def test_what_is_crawled_again_counts_once_in_the_newest_quarter(tmp_path: Path) -> None:
    clock = Clock()
    backend = make(tmp_path, clock, window_secs=WINDOW)
    assert backend.add(b"page")
    clock.now += WINDOW / 3
    assert backend.add(b"other")
    backend.forgotten.add([b"page"])
    assert backend.add(b"page")
    backend.forgotten.add([b"page"])
    assert backend.add(b"page")  # it is in the newest one now
    assert [each.count for each in backend.status().generations] == [1, 2]
    for _ in range(2):  # met of late
        assert not backend.add(b"other")
    backend.forgotten.add([b"other"])
    assert backend.add(b"other")
    assert not backend.add(b"other")
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


def test_what_is_forgotten_needs_no_room_in_a_full_filter() -> None:
    backend = local_backend(None, capacity=10, error_rate=1e-9)
    backend.open()
    assert backend.add_many(fps(10)) == 10
    backend.forgotten.add(fps(1))
    assert backend.add_many(fps(10)) == 1
    assert len(backend.status().generations) == 1
    backend.close()


def test_a_practically_exact_set() -> None:
    found = practically_exact_set()
    assert all(map(found.add, fps(20_001)))
    status = found.status()
    assert (status.location, status.error_rate) == ("memory", 1e-12)
    assert [each.capacity for each in status.generations] == [20_000, 40_000]

"""Growth and time windows, with a clock of our own."""

import logging
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from scrapy_bloom import FilterFileError
from scrapy_bloom.files.backend import LocalBackend
from scrapy_bloom.files.header import read_header
from scrapy_bloom.filters.sizing import Geometry, choose_geometry
from scrapy_bloom.generations.policy import Generation, Policy
from scrapy_bloom.job.recovery import Job

WINDOW = 1000.0
SALT = bytes(range(16))


class Clock:
    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["files", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path if request.param == "files" else None


def make(place: Path | None, clock: Clock | None = None, **options: object) -> LocalBackend:
    backend = LocalBackend(
        place,
        **{
            "capacity": 100,
            "error_rate": 1e-9,
            "sync_secs": 0,
            "salt": SALT,
            "clock": clock or Clock(),
            **options,
        },
    )
    backend.open()
    return backend


def fps(*numbers: int) -> list[bytes]:
    return [number.to_bytes(20, "big") for number in range(*numbers)]


def files(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir() if path.name != "lock")


class TestGrowth:
    def test_the_error_rate_holds_far_beyond_the_expected_number(self, tmp_path: Path) -> None:
        """The figures of the promise: expected 100,000, recorded 3,000,000, p = 1e-3."""
        backend = make(tmp_path, capacity=100_000, error_rate=1e-3)
        recorded = sum(backend.add(fingerprint) for fingerprint in fps(3_000_000))
        status = backend.status()
        assert status.count == recorded > 2_997_000  # the rest were false positives
        assert len(status.generations) == 5
        assert status.nbytes <= 1.8 * choose_geometry(3_000_000, 1e-3).nbytes
        wrong = sum(fingerprint in backend for fingerprint in fps(10**7, 10**7 + 500_000))
        assert wrong / 500_000 <= 1e-3
        assert status.error_rate_now == pytest.approx(wrong / 500_000, rel=0.15)
        # Those that were not recorded as they filled up: as many as expected.
        assert status.expected_false_drops == pytest.approx(3_000_000 - recorded, rel=0.15)
        assert all(fingerprint in backend for fingerprint in fps(0, 3_000_000, 7))
        backend.close()

    def test_it_grows_by_the_first_request_that_has_no_room(
        self, place: Path | None, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        backend = make(place)
        for fingerprint in fps(100):
            assert backend.add(fingerprint)
        assert not any(backend.add(fingerprint) for fingerprint in fps(100))
        assert len(backend.status().generations) == 1
        assert not caplog.records
        assert backend.add(b"one more")
        one, two = backend.status().generations
        assert (one.capacity, one.error_rate, one.count) == (100, 5e-10, 100)
        assert (two.capacity, two.error_rate, two.count) == (200, 2.5e-10, 1)
        (record,) = caplog.records
        assert record.getMessage().startswith(
            "The filter is full with 100 requests and grows: generation 2 has room for 200 more"
        )
        assert not any(backend.add(fingerprint) for fingerprint in fps(100))
        backend.close()

    def test_every_generation_has_its_file_and_comes_back(self, tmp_path: Path) -> None:
        backend = make(tmp_path)
        for fingerprint in fps(1000):
            assert backend.add(fingerprint)
        before = backend.status()
        backend.close()
        assert files(tmp_path) == [f"generation-000{number}.bloom" for number in (1, 2, 3, 4)]
        states = [read_header(tmp_path / name)[1] for name in files(tmp_path)]
        assert [state.count for state in states] == [100, 200, 400, 300]
        assert not any(state.in_use for state in states)
        backend = make(tmp_path)
        assert backend.status() == before
        assert backend.status().count == 1000
        assert not any(backend.add(fingerprint) for fingerprint in fps(1000))
        for fingerprint in fps(1000, 1600):
            assert backend.add(fingerprint)
        assert len(backend.status().generations) == 5
        backend.close()

    def test_the_sum_of_the_rates_stays_below_what_was_asked(self) -> None:
        policy, live = Policy(expected=10, error_rate=1e-12), []
        for number in range(1, 25):
            size = policy.next(live) if live else policy.first()
            live.append(
                Generation(
                    number=number,
                    geometry=Geometry(1, 1),
                    capacity=size.capacity,
                    error_rate=size.error_rate,
                    created_at=0.0,
                )
            )
        assert sum(each.error_rate for each in live) <= 1e-12
        assert [each.capacity for each in live[:4]] == [10, 20, 40, 80]

    def test_changed_settings_count_for_the_next_generation(self, tmp_path: Path) -> None:
        backend = make(tmp_path)
        for fingerprint in fps(100):
            backend.add(fingerprint)
        backend.close()
        backend = make(tmp_path, capacity=5000, error_rate=1e-3)
        backend.add(b"one more")
        one, two = backend.status().generations
        assert (one.capacity, one.error_rate) == (100, 5e-10)
        assert two.capacity == 4900
        assert two.error_rate == pytest.approx(5e-4)
        backend.close()

    def test_stricter_settings_than_before(self, tmp_path: Path) -> None:
        backend = make(tmp_path, error_rate=1e-2, on_full="warn")
        for fingerprint in fps(101):
            backend.add(fingerprint)
        assert len(backend.status().generations) == 1
        assert backend.status().generations[0].error_rate == 1e-2
        backend.close()
        backend = make(tmp_path, error_rate=1e-3)
        for fingerprint in fps(101, 300):
            backend.add(fingerprint)
        status = backend.status()
        assert [each.error_rate for each in status.generations] == [1e-2, 5e-4]
        assert status.error_rate == pytest.approx(1.05e-2)  # it does not claim to be better
        backend.close()

    @pytest.mark.parametrize("on_full", ["warn", "close"])
    def test_it_does_not_grow_when_it_shall_not(self, place: Path | None, on_full: str) -> None:
        backend = make(place, on_full=on_full)
        for fingerprint in fps(500):
            backend.add(fingerprint)
        (only,) = backend.status().generations
        assert only.error_rate == (1e-9 if on_full == "warn" else 5e-10)
        assert backend.status().load == pytest.approx(5, abs=0.01)
        backend.close()

    def test_a_closed_filter_goes_on_when_the_setting_is_raised(self, tmp_path: Path) -> None:
        for expected, last, capacities in (
            (100, 90, [100]),
            (100, 100, [100]),
            (100, 105, [100]),
            (350, 106, [100, 250]),
            (350, 400, [100, 250]),
        ):
            backend = make(tmp_path, on_full="close", capacity=expected)
            for fingerprint in fps(last):
                backend.add(fingerprint)
            assert [each.capacity for each in backend.status().generations] == capacities
            backend.close()

    def test_so_does_one_that_is_not_full_yet(self, place: Path | None) -> None:
        backend = make(place, on_full="close")
        for fingerprint in fps(90):
            backend.add(fingerprint)
        if place:
            backend.close()
            backend = make(place, on_full="close", capacity=1000)
            for fingerprint in fps(500):
                backend.add(fingerprint)
            assert [each.capacity for each in backend.status().generations] == [100, 900]
        backend.close()

    def test_so_does_a_quarter_of_a_window(self, tmp_path: Path, clock: Clock) -> None:
        backend = make(tmp_path, clock, on_full="close", window_secs=WINDOW)
        for fingerprint in fps(100):
            backend.add(fingerprint)
        backend.close()
        backend = make(tmp_path, clock, on_full="close", window_secs=WINDOW, capacity=1000)
        for fingerprint in fps(300):
            backend.add(fingerprint)
        assert [each.capacity for each in backend.status().generations] == [100, 900]
        backend.close()

    def test_a_missing_generation_is_noticed(self, tmp_path: Path) -> None:
        backend = make(tmp_path)
        for fingerprint in fps(1000):
            backend.add(fingerprint)
        backend.close()
        for name in files(tmp_path)[:-1]:
            (tmp_path / name).rename(tmp_path / "away")
            before = {each: (tmp_path / each).read_bytes() for each in files(tmp_path)}
            with pytest.raises(FilterFileError, match="does not hold all generations"):
                make(tmp_path)
            assert before == {each: (tmp_path / each).read_bytes() for each in files(tmp_path)}
            (tmp_path / "away").rename(tmp_path / name)
        make(tmp_path).close()

    def test_generations_of_different_filters_are_noticed(self, tmp_path: Path) -> None:
        for name, salt in (("a", SALT), ("b", bytes(16))):
            backend = make(tmp_path / name, salt=salt)
            for fingerprint in fps(200):
                backend.add(fingerprint)
            backend.close()
        (tmp_path / "b/generation-0002.bloom").replace(tmp_path / "a/generation-0002.bloom")
        with pytest.raises(FilterFileError, match="belong to different filters"):
            make(tmp_path / "a")

    def test_a_foreign_file_among_those_that_are_over_is_not_removed(
        self, tmp_path: Path, clock: Clock
    ) -> None:
        backend = make(tmp_path / "a", clock, window_secs=WINDOW)
        for _ in range(3):
            backend.add(b"page")
            clock.now += 2 * WINDOW
        backend.close()
        assert "generation-0001.bloom" not in files(tmp_path / "a")
        make(tmp_path / "b", salt=bytes(16)).close()
        foreign = (tmp_path / "b/generation-0001.bloom").rename(
            tmp_path / "a/generation-0001.bloom"
        )
        with pytest.raises(FilterFileError, match="belong to different filters"):
            make(tmp_path / "a", clock, window_secs=WINDOW)
        assert foreign.exists()

    def test_an_unclean_shutdown_sets_all_generations_aside(self, tmp_path: Path) -> None:
        backend = make(tmp_path)
        for fingerprint in fps(1000):
            backend.add(fingerprint)
        backend._store._directory.unlock()
        backend = make(tmp_path, job=Job(None, "reset"))
        assert backend.status().count == 0
        assert len([name for name in files(tmp_path) if ".set-aside-" in name]) == 4
        backend.close()


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class TestNoRoom:
    def test_the_crawl_goes_on_and_growth_is_tried_again(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        backend = make(tmp_path, capacity=10_000)
        with file_size_limit(80_000):
            for fingerprint in fps(14_000):
                assert backend.add(fingerprint)
            assert len(backend.status().generations) == 1
            assert backend.status().errors == 8  # tried each 5 % beyond the capacity
        (record,) = caplog.records
        assert record.levelno == logging.ERROR
        assert re.search(
            "No room for a new generation: .*generation-0002.bloom cannot be created: File too "
            "large; the filter takes .* bytes: make room.*growing is tried again",
            record.getMessage(),
        )
        assert files(tmp_path) == ["generation-0001.bloom"]
        for fingerprint in fps(14_000, 15_000):
            assert backend.add(fingerprint)
        assert len(backend.status().generations) == 2
        assert not any(backend.add(fingerprint) for fingerprint in fps(15_000))
        backend.close()

    def test_a_window_cannot_turn(
        self, tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
    ) -> None:
        backend = make(tmp_path, clock, window_secs=WINDOW)
        assert backend.add(b"early")
        clock.now += WINDOW / 4
        with file_size_limit(5000):
            assert backend.add(b"in spite")
        assert "remembered for longer than BLOOM_WINDOW_SECS" in caplog.text
        clock.now += WINDOW / 16
        assert backend.add(b"late")
        assert [each.count for each in backend.status().generations] == [2, 1]
        # Nothing recorded less than a window ago is forgotten, although it turned late.
        clock.now += WINDOW * 15 / 16 - 1
        assert not backend.add(b"in spite")
        backend.close()


class TestWindow:
    def test_a_request_counts_for_a_window_and_at_most_a_quarter_more(
        self, place: Path | None, clock: Clock
    ) -> None:
        for offset in (0, 1, 100, 249, 250, 251, 600):
            options = {"window_secs": WINDOW, "is_crawl": False}  # in no run, which would keep it
            backend = make(place and place / str(offset), clock, **options)
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

    def test_the_same_over_many_runs(self, tmp_path: Path, clock: Clock) -> None:
        """A spider that runs at intervals: each page again once its window is over."""
        crawled_at: dict[bytes, float] = {}
        for _run in range(60):
            backend = make(tmp_path, clock, window_secs=WINDOW)
            backend.begin()
            for fingerprint in fps(50):
                is_new = backend.add(fingerprint)
                age = clock.now - crawled_at.get(fingerprint, 0)
                assert is_new or age <= 1.25 * WINDOW
                assert not is_new or age >= WINDOW
                if is_new:
                    crawled_at[fingerprint] = clock.now
                clock.now += 0.1
            assert len(backend.status().generations) <= 6
            backend.close()
            clock.now += 130
        assert len(files(tmp_path)) <= 6

    def test_expired_files_are_removed_and_it_is_told(
        self, tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        backend = make(tmp_path, clock, window_secs=WINDOW)
        for fingerprint in fps(10):
            backend.add(fingerprint)
        clock.now += WINDOW / 4
        backend.add(b"second quarter")
        assert files(tmp_path) == ["generation-0001.bloom", "generation-0002.bloom"]
        assert "A quarter of the time window is over: generation 2 takes" in caplog.text
        clock.now += WINDOW + 1
        backend.add(b"much later")
        assert files(tmp_path) == ["generation-0003.bloom"] or files(tmp_path) == [
            "generation-0002.bloom",
            "generation-0003.bloom",
        ]
        assert "10 requests recorded more than 1000 seconds ago are forgotten" in caplog.text
        assert backend.status().expired >= 10
        assert backend.status().count <= 2
        backend.close()

    def test_a_long_pause_expires_all(self, tmp_path: Path, clock: Clock) -> None:
        backend = make(tmp_path, clock, window_secs=WINDOW)
        for fingerprint in fps(1000):
            backend.add(fingerprint)
        backend.close()
        clock.now += 100 * WINDOW
        backend = make(tmp_path, clock, window_secs=WINDOW)
        backend.begin()
        assert not any(fingerprint in backend for fingerprint in fps(1000))
        assert backend.status().count == 0
        assert len(files(tmp_path)) == 1
        backend.close()

    def test_the_error_rate_holds_with_all_quarters_full(self, clock: Clock) -> None:
        backend = make(None, clock, capacity=8000, error_rate=1e-2, window_secs=WINDOW)
        for quarter in range(6):
            for number in range(9000):
                backend.add(b"%d/%d" % (quarter, number))
            clock.now += WINDOW / 4
        status = backend.status()
        assert status.error_rate_now <= 1e-2
        assert sum(each.error_rate for each in status.generations) <= 1e-2
        wrong = sum(fingerprint in backend for fingerprint in fps(100_000))
        assert wrong / 100_000 <= 1e-2

    def test_a_clock_that_jumps_back_loses_nothing(self, place: Path | None, clock: Clock) -> None:
        backend = make(place, clock, window_secs=WINDOW)
        for step in (0, 300, -5000, 10, 250, 250, -10):
            clock.now += step
            backend.add(b"%d" % step)
        for known in (b"0", b"300", b"-5000", b"10", b"250", b"-10"):
            assert known in backend
        backend.close()

    def test_a_clock_that_went_back_between_runs_is_told(
        self, tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
    ) -> None:
        backend = make(tmp_path, clock, window_secs=WINDOW)
        backend.add(b"page")
        backend.close()
        clock.now -= 500
        backend = make(tmp_path, clock, window_secs=WINDOW)
        assert not backend.add(b"page")
        (record,) = caplog.records
        assert "The clock is 500 seconds behind" in record.getMessage()
        backend.close()

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
        backend = make(tmp_path, clock, window_secs=WINDOW / 10, is_crawl=False)
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


class AgainstDict(RuleBasedStateMachine):
    """Add, ask, grow, expire, close and reopen, beside a dict of when each was recorded."""

    window = WINDOW

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.clock = Clock()
        self.latest = self.clock.now
        self.recorded_at: dict[bytes, float] = {}
        self.open()

    def open(self) -> None:
        self.backend = make(
            Path(self.directory.name), self.clock, capacity=40, window_secs=self.window
        )
        self.backend.begin()
        self.begun = self.latest
        self.in_this_run: set[bytes] = set()

    @rule(number=st.integers(0, 300))
    def add(self, number: int) -> None:
        fingerprint = number.to_bytes(20, "big")
        self.check(fingerprint, is_new := self.backend.add(fingerprint))
        if is_new:
            self.recorded_at[fingerprint] = self.latest
            self.in_this_run.add(fingerprint)

    @rule(seed=st.integers(0, 10**6))
    def add_many(self, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(100):
            self.add(rng.randrange(301))

    @rule(number=st.integers(0, 300))
    def ask(self, number: int) -> None:
        fingerprint = number.to_bytes(20, "big")
        self.check(fingerprint, fingerprint not in self.backend)

    def check(self, fingerprint: bytes, is_new: bool) -> None:
        if fingerprint not in self.recorded_at:
            assert is_new
        else:
            recorded = self.recorded_at[fingerprint]
            age, into_the_run = self.latest - recorded, recorded - self.begun
            is_kept = fingerprint in self.in_this_run and into_the_run <= self.window
            if not self.window or age < self.window or is_kept:
                assert not is_new
            # Kept by whole generations: others may be, too.
            elif age > 1.25 * self.window and into_the_run < -self.window / 4:
                assert is_new

    @rule(secs=st.floats(0.001, 3000))
    def wait(self, secs: float) -> None:
        self.clock.now = self.latest = self.latest + secs

    @rule(secs=st.floats(1, 3000))
    def the_clock_jumps_back_and_recovers(self, secs: float) -> None:
        self.clock.now = self.latest - secs
        for fingerprint, recorded in self.recorded_at.items():
            if not self.window or self.latest - recorded < self.window:
                assert not self.backend.add(fingerprint)
        self.clock.now = self.latest

    @rule()
    def reopen(self) -> None:
        self.backend.close()
        self.open()

    @invariant()
    def is_bounded(self) -> None:
        status = self.backend.status()
        asked = [*status.generations, *status.volatile]
        assert sum(each.error_rate for each in asked) <= 1e-9
        assert files(Path(self.directory.name)) == [
            f"generation-{each.number:04d}.bloom" for each in self.backend._live
        ]

    def teardown(self) -> None:
        self.backend.close()
        self.directory.cleanup()


@pytest.mark.parametrize("window", [WINDOW, 0.0])
def test_any_sequence_of_uses(window: float) -> None:
    machine = type("Machine", (AgainstDict,), {"window": window})
    run_state_machine_as_test(machine, settings=settings(max_examples=60, stateful_step_count=30))


RECORDER = """
import signal, sys
from pathlib import Path
from scrapy_bloom.files.backend import LocalBackend

backend = LocalBackend(
    Path(sys.argv[1]), capacity=5000, error_rate=1e-3
)
backend.open()
known, last = map(int, sys.argv[2:])
for number in range(known):
    assert number.to_bytes(20, "big") in backend, number
backend.begin()
number = known
while number < last:
    backend.add(number.to_bytes(20, "big"))
    number += 1
    if number % 50 == 0:
        print(number, flush=True)
if last < 150_000:
    signal.pause()
backend.close()
"""


def test_nothing_is_forgotten_through_twenty_kills_and_growth(tmp_path: Path) -> None:
    rng = random.Random(20)
    targets = [*sorted(rng.sample(range(100, 135_000), 20)), 150_000]
    known = 0
    for target in targets:
        # Killed while it records. Should we be late, it waits for that, and has told something.
        last = 150_000 if target == 150_000 else max(target, known) + 500
        process = subprocess.Popen(
            [sys.executable, "-c", RECORDER, os.fspath(tmp_path), str(known), str(last)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout
        for line in process.stdout:
            known = int(line)
            if target != 150_000 and known >= target:
                process.kill()
                break
        for line in process.stdout.read().split("\n")[:-1]:
            known = int(line)  # told before it died
        process.stdout.close()
        status = process.wait(60)
        assert status == (0 if target == 150_000 else -signal.SIGKILL)
    assert known == 150_000
    backend = make(tmp_path, capacity=5000, error_rate=1e-3)
    assert all(fingerprint in backend for fingerprint in fps(150_000))
    assert len(backend.status().generations) == 5
    # Some fingerprints look seen, at the error rate, and the counts of kills are a little low.
    assert backend.status().count == pytest.approx(150_000, rel=0.01)
    backend.close()


@pytest.mark.parametrize(
    ("where", "grown"),
    [
        ("os.posix_fallocate", False),
        ("os.fsync", False),
        ("pathlib.Path.rename", False),
        ("scrapy_bloom.files.mapping._sync_directory", True),
        ("scrapy_bloom.files.store.FileStore.save_count", True),
    ],
)
def test_a_kill_while_growing(tmp_path: Path, where: str, grown: bool) -> None:
    """The filter is as it was before, or as it is after: never between."""
    script = textwrap.dedent("""
        import os, signal, sys
        from pathlib import Path
        from pkgutil import resolve_name
        from scrapy_bloom.files.backend import LocalBackend

        backend = LocalBackend(Path(sys.argv[1]), capacity=100, error_rate=1e-9, sync_secs=0)
        backend.open()
        for number in range(100):
            assert backend.add(number.to_bytes(20, "big"))
        owner, name = sys.argv[2].rpartition(".")[::2]
        dies = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
        setattr(resolve_name(owner), name, dies)
        backend.add(b"one more")
        raise SystemExit("survived")
    """)
    process = subprocess.run(
        [sys.executable, "-c", script, os.fspath(tmp_path), where], timeout=60, check=False
    )
    assert process.returncode == -signal.SIGKILL
    backend = make(tmp_path, error_rate=1e-9)
    assert backend.status().count == 100
    assert len(backend.status().generations) == (2 if grown else 1)
    assert all(fingerprint in backend for fingerprint in fps(100))
    assert backend.add(b"one more")
    assert len(backend.status().generations) == 2
    backend.close()

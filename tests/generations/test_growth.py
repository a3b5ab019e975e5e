"""A filter that grows: its files, its error rate, and no room for more."""

import logging
import math
import re
from pathlib import Path

import pytest

from scrapy_bloom import FilterFileError
from scrapy_bloom.files.file import FileGeneration
from scrapy_bloom.filters.sizing import choose_geometry
from tests.support.clock import Clock
from tests.support.local_filters import WINDOW, file_size_limit, files, fps, make


class TestGrowth:
    @pytest.mark.parametrize(
        ("expected", "asked"),
        [(10_000, 200_000), pytest.param(100_000, 500_000, marks=pytest.mark.soak)],
    )
    def test_the_error_rate_holds_far_beyond_the_expected_number(
        self, tmp_path: Path, expected: int, asked: int
    ) -> None:
        """Thirty times what was expected, at p = 1e-3."""
        backend = make(tmp_path, capacity=expected, error_rate=1e-3)
        number = 30 * expected
        recorded = sum(backend.add(fingerprint) for fingerprint in fps(number))
        status = backend.status()
        assert status.count == recorded > 0.999 * number  # the rest were false positives
        assert len(status.generations) == 5
        assert status.nbytes <= 1.8 * choose_geometry(number, 1e-3).nbytes
        wrong = sum(fingerprint in backend for fingerprint in fps(10**7, 10**7 + asked))
        assert wrong / asked <= 1e-3
        tolerance = 3 / math.sqrt(wrong)  # three standard deviations
        assert status.error_rate_now == pytest.approx(wrong / asked, rel=tolerance)
        # Those that were not recorded as they filled up: as many as expected.
        assert status.expected_false_positives == pytest.approx(number - recorded, rel=0.15)
        assert all(fingerprint in backend for fingerprint in fps(0, number, 7))
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
        states = [FileGeneration.at(tmp_path / name) for name in files(tmp_path)]
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

    def test_stricter_settings_than_before(self, tmp_path: Path) -> None:
        backend = make(tmp_path, error_rate=2e-2)
        for fingerprint in fps(100):
            backend.add(fingerprint)
        backend.close()
        backend = make(tmp_path, error_rate=1e-3)
        for fingerprint in fps(100, 300):
            backend.add(fingerprint)
        status = backend.status()
        assert [each.error_rate for each in status.generations] == [1e-2, 5e-4]
        assert status.error_rate == pytest.approx(1.05e-2)  # it does not claim to be better
        backend.close()

    def test_a_full_filter_grows_by_what_the_setting_asks_for(self, tmp_path: Path) -> None:
        for expected, last, capacities in (
            (100, 90, [100]),
            (350, 100, [100]),
            (350, 101, [100, 250]),
            (350, 350, [100, 250]),
        ):
            backend = make(tmp_path, capacity=expected)
            for fingerprint in fps(last):
                backend.add(fingerprint)
            assert [each.capacity for each in backend.status().generations] == capacities
            backend.close()

    def test_a_missing_generation_is_noticed(self, tmp_path: Path) -> None:
        backend = make(tmp_path)
        for fingerprint in fps(1000):
            backend.add(fingerprint)
        backend.close()
        for name in files(tmp_path)[:-1]:
            (tmp_path / name).rename(tmp_path / "away")
            before = {each: (tmp_path / each).read_bytes() for each in files(tmp_path)}
            with pytest.raises(FilterFileError, match=f"^{tmp_path} does not hold all generations"):
                make(tmp_path)
            assert before == {each: (tmp_path / each).read_bytes() for each in files(tmp_path)}
            (tmp_path / "away").rename(tmp_path / name)
        make(tmp_path).close()


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
            "large; the file takes .* bytes: free some space.*tries again",
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
        assert "stay recorded for longer than BLOOM_WINDOW_SECS" in caplog.text
        clock.now += WINDOW / 16
        assert backend.add(b"late")
        assert [each.count for each in backend.status().generations] == [2, 1]
        # Nothing recorded less than a window ago expires, although it turned late.
        clock.now += WINDOW * 15 / 16 - 1
        assert not backend.add(b"in spite")
        backend.close()


def test_kept_settings_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    make(tmp_path, capacity=100, error_rate=1e-3).close()
    for changes, expected in (
        ({}, None),
        ({"capacity": 99}, None),
        ({"capacity": 101}, "keeps them: room for 100 requests. The settings"),
        ({"capacity": 101, "window_secs": WINDOW}, None),
        ({"error_rate": 1e-4}, "keeps them: an error rate of 0.0005. The"),
    ):
        caplog.clear()
        make(tmp_path, **{"capacity": 100, "error_rate": 1e-3, **changes}).close()
        messages = caplog.messages
        assert len(messages) == bool(expected), messages
        assert not expected or re.search(expected, messages[0])

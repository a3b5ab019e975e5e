"""A filter that grows: its error rate, and no room for more."""

import logging
import math
import re
from pathlib import Path

import pytest

from scrapy_bloom.filters.sizing import choose_geometry
from tests.support.local_filters import WINDOW, file_size_limit, fps, make


class TestGrowth:
    @pytest.mark.parametrize(
        ("expected", "asked"),
        [(3000, 30_000), pytest.param(100_000, 500_000, marks=pytest.mark.soak)],
    )
    def test_the_error_rate_holds_far_beyond_the_expected_number(
        self, tmp_path: Path, expected: int, asked: int
    ) -> None:
        """Thirty times what was expected, at p = 1e-2."""
        backend = make(tmp_path, capacity=expected, error_rate=1e-2)
        number = 30 * expected
        recorded = sum(backend.add(fingerprint) for fingerprint in fps(number))
        status = backend.status()
        assert status.count == recorded > 0.99 * number  # the rest were false positives
        assert len(status.generations) == 5
        assert status.nbytes <= 1.8 * choose_geometry(number, 1e-2).nbytes
        wrong = sum(fingerprint in backend for fingerprint in fps(10**7, 10**7 + asked))
        assert wrong / asked <= 1e-2
        tolerance = 3 / math.sqrt(wrong)  # three standard deviations
        assert status.error_rate_now == pytest.approx(wrong / asked, rel=tolerance)
        # Those that were not recorded as they filled up: as many as expected.
        assert status.expected_false_positives == pytest.approx(number - recorded, rel=0.15)
        assert all(fingerprint in backend for fingerprint in fps(0, number, 7))
        backend.close()


def test_without_room_the_crawl_goes_on_and_growth_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = make(tmp_path, capacity=10_000)
    backend.begin()
    with file_size_limit(0):
        for fingerprint in fps(14_000):
            assert backend.add(fingerprint)
        assert len(backend.status().generations) == 1
        assert backend.status().errors == 8  # tried each 5 % beyond the capacity
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    no_room = "No room for a new generation: .*bloom.sqlite cannot be used: .*tries again"
    assert re.search(no_room, record.getMessage())
    for fingerprint in fps(14_000, 15_000):
        assert backend.add(fingerprint)
    assert len(backend.status().generations) == 2
    backend.close()
    backend = make(tmp_path)
    assert len(backend.status().generations) == 2
    assert not any(backend.add(fingerprint) for fingerprint in fps(15_000))
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


def test_a_filter_that_does_not_fit_into_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path, capacity=5 * 10**10).close()
    (warning,) = caplog.messages
    assert re.search(r"bloom.sqlite takes up to 26\d\.\d GiB of memory when it is full", warning)

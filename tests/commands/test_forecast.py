"""The figures of a report: how full a filter will be, and how its bits are distributed."""

from dataclasses import replace

import pytest

from scrapy_bloom.commands.report import course, grown
from scrapy_bloom.files.backend import LocalBackend
from scrapy_bloom.generations.policy import Generation, Policy
from tests.support.reports import make


def generations(backend: LocalBackend) -> list[Generation]:
    return [replace(each, created_at=1.0) for each in backend.status().generations]


def test_it_is_what_a_crawl_does() -> None:
    backend = make(None, 150, capacity=200, error_rate=1e-9)
    policy = Policy(expected=200, error_rate=1e-9)
    for total in (150, 200, 201, 600, 601, 3000):
        forecast = grown(generations(backend), policy, 3000 if total == 150 else total)
        if total == 150:
            at_first = forecast
            continue
        for number in range(backend.status().count, total):
            assert backend.add(number.to_bytes(20, "big"))
        assert forecast == generations(backend)
    assert [each.count for each in at_first] == [each.count for each in generations(backend)]
    assert len(at_first) == 4


def test_more_requests_expected_than_there_is_room_for() -> None:
    live = generations(make(None, 150, capacity=200))
    policy = Policy(expected=5000, error_rate=1e-6)
    assert [each.count for each in grown(live, policy, 9000)] == [200, 4800, 4000]


def test_the_course_is_that_of_the_generations_filling() -> None:
    backend = make(None, 700, capacity=200, error_rate=1e-9)
    points = {point.requests: point for point in course(generations(backend))}
    assert min(points) == 0
    assert max(points) == 700
    assert {200, 201, 600, 601} <= set(points)
    assert points[0].error_rate == 0
    rates = [points[each].error_rate for each in sorted(points)]
    assert rates == sorted(rates)
    again = make(None, 0, capacity=200, error_rate=1e-9)
    for number in range(700):
        if number in points:
            status = again.status()
            assert points[number].error_rate == pytest.approx(status.error_rate_now)
        again.add(number.to_bytes(20, "big"))

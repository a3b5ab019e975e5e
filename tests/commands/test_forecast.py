"""The figures of a report: how full a filter will be, and how its bits are distributed."""

from dataclasses import replace

from scrapy_bloom.commands.report import grown
from scrapy_bloom.files.backend import LocalBackend
from scrapy_bloom.generations.policy import Generation, Policy
from tests.support.reports import make


def generations(backend: LocalBackend) -> list[Generation]:
    return [replace(each, first_run=1.0, last_run=1.0) for each in backend.status().generations]


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

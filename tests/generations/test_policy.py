"""How generations are sized and when they end: the figures, without any store."""

from typing import Any

import pytest

from scrapy_bloom.filters.sizing import (
    MAX_CAPACITY,
    SMALLEST_ERROR_RATE,
    Geometry,
    choose_geometry,
)
from scrapy_bloom.generations.policy import (
    FilterStatus,
    Generation,
    Policy,
    check_generation,
    combined_rate,
    kept_settings,
)

P = 1e-3


def generation(number: int = 1, **changes: object) -> Generation:
    figures = {"capacity": 100, "error_rate": P, "number": number}
    figures |= {"first_run": 1000.0, "last_run": 1000.0}
    figures |= changes
    figures.setdefault("geometry", choose_geometry(figures["capacity"], figures["error_rate"]))
    return Generation(**figures)


def size_of(new: Generation) -> tuple[int, float]:
    assert new.geometry == choose_geometry(new.capacity, new.error_rate)
    return new.capacity, new.error_rate


class TestFirst:
    def test_without_a_window(self) -> None:
        policy = Policy(expected=1000, error_rate=P)
        assert size_of(policy.first()) == (1000, P / 2)
        assert size_of(policy.first(at_least=999)) == (1000, P / 2)
        assert size_of(policy.first(at_least=5000)) == (5000, P / 2)
        first = policy.first(7.0)
        assert (first.number, first.first_run, first.last_run, first.count) == (1, 7.0, 7.0, 0)

    def test_with_a_window(self) -> None:
        policy, newest = Policy(expected=1000, error_rate=P, window=100.0), generation(3)
        assert size_of(policy.first()) == (1000, pytest.approx(P / 18))
        assert size_of(policy.first(at_least=3000)) == (3000, pytest.approx(P / 18))
        new = policy.after_turn(newest, [], 7.0)
        assert size_of(new) == (125, pytest.approx(P / 18))
        assert (new.number, new.first_run, new.last_run) == (4, 7.0, 7.0)
        expiring = [generation(count=100), generation(count=60)]
        assert size_of(policy.after_turn(newest, expiring, 7.0)) == (200, pytest.approx(P / 18))

    def test_limits(self) -> None:
        policy = Policy(expected=2, error_rate=P, window=1.0)
        assert policy.after_turn(generation(), [], 7.0).capacity == 1
        most = Policy(expected=MAX_CAPACITY, error_rate=2e-19).first(at_least=2 * MAX_CAPACITY)
        assert size_of(most) == (MAX_CAPACITY, SMALLEST_ERROR_RATE)


class TestNext:
    def test_it_has_room_for_all_that_are_expected_now(self) -> None:
        policy = Policy(expected=5000, error_rate=P)
        live = [generation(error_rate=P / 2), generation(2, capacity=200, error_rate=P / 4)]
        new = policy.next(live)
        assert (new.number, new.capacity, new.last_run) == (3, 4700, live[1].last_run)

    @pytest.mark.parametrize(
        ("rates", "share"),
        [
            ((P,), P / 2),
            ((P / 2, P / 2), P / 4),
            ((5 * P,), P / 2),
            ((P, P / 8), P / 16),
            ((P / 2, P / 4), P / 8),
            ((0.75 * P,), P / 8),
        ],
    )
    def test_its_rate_is_half_of_what_is_left_or_of_the_newest(
        self, rates: tuple[float, ...], share: float
    ) -> None:
        live = [generation(number, error_rate=rate) for number, rate in enumerate(rates, 1)]
        policy = Policy(expected=100, error_rate=P)
        assert policy.next(live).error_rate == pytest.approx(share)

    def test_within_a_part_of_a_window(self) -> None:
        policy = Policy(expected=400, error_rate=P, window=100.0)
        live = [generation(error_rate=P / 12), generation(2, error_rate=P / 24)]
        assert size_of(policy.next(live)) == (200, pytest.approx(P / 48))
        # With a window, the expected number is of all parts together.
        more = Policy(expected=10**6, error_rate=P, window=100.0)
        assert more.next(live).capacity == 200


def test_the_settings_that_a_filter_keeps() -> None:
    policy = Policy(expected=100, error_rate=0.1)
    for rate, is_kept in ((0.1, False), (6 * (0.1 / 6), False), (0.1 * (1 + 1e-8), True)):
        kept = kept_settings(policy, [generation(error_rate=rate)])
        assert bool(kept) is is_kept
        assert not is_kept or kept == ["an error rate of 0.1"]
    sixths = [generation(error_rate=1e-4 / 6)] * 6
    assert sum(sixth.error_rate for sixth in sixths) > 1e-4  # as floats go
    assert not kept_settings(Policy(expected=100, error_rate=1e-4), sixths)
    more = Policy(expected=101, error_rate=0.1)
    assert kept_settings(more, [generation()]) == ["room for 100 requests"]


def status_of(live: list[Generation], configured_rate: float) -> FilterStatus:
    return FilterStatus(location="here", generations=live, configured_rate=configured_rate)


def test_the_fill_of_a_filter_is_that_of_all_its_bits() -> None:
    live = [generation(1, count=100), generation(2, capacity=90_000, count=10_000)]
    status = status_of(live, P)
    bits = [entry.geometry.num_bits for entry in live]
    set_bits = sum(entry.fill_ratio * m for entry, m in zip(live, bits, strict=True))
    assert status.fill_ratio == pytest.approx(set_bits / sum(bits))
    assert status.error_rate == 2 * P


def test_the_rate_of_several_filters() -> None:
    assert combined_rate([]) == 0
    assert combined_rate([0.5, 0.5, 0.5]) == pytest.approx(0.875)
    assert combined_rate([1e-20] * 3) == pytest.approx(3e-20)
    assert combined_rate([1.0, 0.5]) == pytest.approx(1)
    assert combined_rate([0.1, 0.2]) == pytest.approx(1 - 0.9 * 0.8)


LAST = 253_402_300_799  # of the year 9999


def stored(**changes: Any) -> Generation:
    return generation(**{"number": 5, "capacity": 20_000, **changes})


ROOM = 16 * choose_geometry(20_000, 1e-3).num_bits


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"number": 2**32 - 1},
        {"first_run": 0},
        {"first_run": LAST, "last_run": LAST},
        {"count": ROOM},
        {
            "geometry": Geometry(1, 1),
            "capacity": 10**6,
            "error_rate": 0.9999999,
            "count": 16 * 10**6,
        },
    ],
)
def test_what_can_be(changes: dict[str, object]) -> None:
    check_generation(stored(**changes))

"""How generations are sized and when they end: the figures, without any store."""

from typing import Any

import pytest

from scrapy_bloom.filters.sizing import (
    MAX_CAPACITY,
    SMALLEST_ERROR_RATE,
    Geometry,
    block_error_rate,
    choose_geometry,
    classic_error_rate,
    expected_false_positives,
)
from scrapy_bloom.generations.policy import (
    FilterStatus,
    Generation,
    Policy,
    Size,
    check_generation,
    check_time,
    combined_rate,
    kept_settings,
    rate_asked,
)

P = 1e-3


def generation(number: int = 1, **changes: object) -> Generation:
    figures = {"capacity": 100, "error_rate": P, "number": number}
    figures |= {"first_run": 1000.0, "last_run": 1000.0}
    figures |= changes
    figures.setdefault("geometry", choose_geometry(figures["capacity"], figures["error_rate"]))
    return Generation(**figures)


def sized(capacity: int, error_rate: float) -> Size:
    return Size(capacity=capacity, error_rate=error_rate)


class TestFirst:
    def test_without_a_window(self) -> None:
        policy = Policy(expected=1000, error_rate=P)
        assert policy.first() == sized(1000, P / 2)
        assert policy.first(at_least=999) == sized(1000, P / 2)
        assert policy.first(at_least=5000) == sized(5000, P / 2)

    def test_with_a_window(self) -> None:
        policy = Policy(expected=1000, error_rate=P, window=100.0)
        assert policy.first() == sized(1000, pytest.approx(P / 18))
        assert policy.first(at_least=3000) == sized(3000, pytest.approx(P / 18))
        assert policy.after_turn([]) == sized(125, pytest.approx(P / 18))
        expiring = [generation(count=100), generation(count=60)]
        assert policy.after_turn(expiring) == sized(200, pytest.approx(P / 18))

    def test_limits(self) -> None:
        assert Policy(expected=2, error_rate=P, window=1.0).after_turn([]).capacity == 1
        most = Policy(expected=MAX_CAPACITY, error_rate=2e-19).first(at_least=2 * MAX_CAPACITY)
        assert most == sized(MAX_CAPACITY, SMALLEST_ERROR_RATE)


class TestNext:
    def test_it_has_room_for_all_that_are_expected_now(self) -> None:
        policy = Policy(expected=5000, error_rate=P)
        live = [generation(error_rate=P / 2), generation(2, capacity=200, error_rate=P / 4)]
        assert policy.next(live).capacity == 4700

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
        live = [generation(number, error_rate=each) for number, each in enumerate(rates, 1)]
        policy = Policy(expected=100, error_rate=P)
        assert policy.next(live).error_rate == pytest.approx(share)

    def test_within_a_part_of_a_window(self) -> None:
        policy = Policy(expected=400, error_rate=P, window=100.0)
        live = [generation(error_rate=P / 12), generation(2, error_rate=P / 24)]
        assert policy.next(live) == sized(200, pytest.approx(P / 48))
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
    assert sum(each.error_rate for each in sixths) > 1e-4  # as floats go
    assert not kept_settings(Policy(expected=100, error_rate=1e-4), sixths)
    more = Policy(expected=101, error_rate=0.1)
    assert kept_settings(more, [generation()]) == ["room for 100 requests"]


def test_the_rate_that_a_filter_was_made_for() -> None:
    grown = [generation(error_rate=P / 2), generation(2, error_rate=P / 4)]
    assert rate_asked(grown, P) == P
    assert rate_asked([generation()], P / 2) == P


def test_the_figures_of_a_generation() -> None:
    full = generation(capacity=20_000, count=20_000)
    shape = full.geometry
    assert full.offered == 20_000
    assert full.error_rate_now == block_error_rate(*shape, 20_000) <= P
    assert full.expected_false_positives == expected_false_positives(*shape, 20_000)
    assert 0.3 < full.fill_ratio < 0.6
    over = generation(capacity=1000, count=20_000)
    assert over.offered > 20_000
    assert over.fill_ratio > full.fill_ratio
    copy = over.figures
    assert copy == over
    over.count += 1
    assert copy.count == 20_000
    made = Generation.of(sized(100, P), 3, 5.0, count=2)
    assert vars(made) == vars(
        generation(3, first_run=5.0, last_run=5.0, count=2, capacity=100, error_rate=P)
    )


def test_the_figures_of_a_filter() -> None:
    live = [
        generation(1, capacity=10_000, count=10_000),
        generation(2, capacity=20_000, count=20_000),
        generation(3, capacity=40_000, count=10_000),
    ]
    status = FilterStatus(location="here", generations=live, error_rate=P)
    assert (status.capacity, status.count) == (70_000, 40_000)
    assert status.nbytes == sum(each.geometry.nbytes for each in live)
    bits = [each.geometry.num_bits for each in live]
    fill = sum(each.fill_ratio * m for each, m in zip(live, bits, strict=True)) / sum(bits)
    assert status.fill_ratio == pytest.approx(fill)
    now = [each.error_rate_now for each in live]
    assert status.error_rate_now == pytest.approx(combined_rate(now))
    drops = sum(each.expected_false_positives for each in live)
    drops += now[0] * 20_000 + (now[0] + now[1]) * 10_000
    assert status.expected_false_positives == pytest.approx(drops)
    stored = FilterStatus.of("there", live[:2], P)
    assert (stored.location, stored.error_rate) == ("there", 2 * P)
    assert stored.generations == live[:2]
    assert stored.generations[0] is not live[0]


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


def test_a_hundredth_is_left_for_other_roundings() -> None:
    shape = Geometry(5, 10)
    rate = classic_error_rate(shape.num_bits, 10, 20_000)
    check_generation(stored(geometry=shape, error_rate=rate / 1.009))
    with pytest.raises(ValueError, match="does not fit"):
        check_generation(stored(geometry=shape, error_rate=rate / 1.011))


def test_a_filter_of_two_blocks_may_be_half_empty() -> None:
    for blocks, fits in ((1, True), (2, True), (3, False)):
        found = stored(geometry=Geometry(blocks, 5), capacity=100)
        if fits:
            check_generation(found)
        else:
            with pytest.raises(ValueError, match="does not fit"):
                check_generation(found)


def test_times() -> None:
    for value in (0, LAST):
        check_time("it", value)
    for value in (-1, LAST + 1):
        with pytest.raises(ValueError, match=f"it is {value}, which is not a time"):
            check_time("it", value)

"""Figures of a generation that cannot be are refused, and no others."""

import pytest

from scrapy_bloom.filters.sizing import Geometry, choose_geometry, classic_error_rate
from scrapy_bloom.generations.policy import Generation, check_generation, check_time

LAST = 253_402_300_799


def generation(**changes: object) -> Generation:
    figures = {"capacity": 20_000, "error_rate": 1e-3, "created_at": 1e9, "number": 5}
    figures |= {"geometry": choose_geometry(20_000, 1e-3), **changes}
    return Generation(**figures)


ROOM = 16 * choose_geometry(20_000, 1e-3).num_bits


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"number": 2**32 - 1},
        {"created_at": 0},
        {"created_at": LAST, "open_until": LAST},
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
    check_generation(generation(**changes))


def test_a_hundredth_is_left_for_other_roundings() -> None:
    shape = Geometry(5, 10)
    rate = classic_error_rate(shape.num_bits, 10, 20_000)
    check_generation(generation(geometry=shape, error_rate=rate / 1.009))
    with pytest.raises(ValueError, match="does not fit"):
        check_generation(generation(geometry=shape, error_rate=rate / 1.011))


def test_a_filter_of_two_blocks_may_be_half_empty() -> None:
    for blocks, fits in ((1, True), (2, True), (3, False)):
        found = generation(geometry=Geometry(blocks, 5), capacity=100)
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

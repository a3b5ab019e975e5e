"""The formulas, against golden values from the literature and against each other."""

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scrapy_bloom.filters.sizing import (
    BLOCK_BITS,
    Contents,
    block_error_rate,
    choose_geometry,
    classic_error_rate,
    classic_fill_ratio,
    expected_false_positives,
    expected_offered,
)
from tests.support.backends import local_backend
from tests.support.local_filters import file_size_limit


# Whole blocks are 8 KiB each; from p = 0.05 upwards they alone exceed 1 % at a million.
@pytest.mark.parametrize("p", [0.05, 0.01, 1e-4, 1e-6, 1e-9])
@pytest.mark.parametrize("n", [10**6, 10**7, 10**10])
def test_blocks_cost_less_than_one_per_cent(n: int, p: float) -> None:
    geometry = choose_geometry(n, p)
    assert geometry.num_bits <= 1.01 * n * math.log(1 / p) / math.log(2) ** 2
    assert 0.9 * p < block_error_rate(*geometry, n) <= p


@given(st.integers(1, 10**9), st.floats(1e-15, 0.999))
@settings(max_examples=30)
def test_a_geometry_keeps_its_promise_and_wastes_no_block(n: int, p: float) -> None:
    geometry = choose_geometry(n, p)
    assert block_error_rate(*geometry, n) <= p
    assert geometry.num_bits == geometry.num_blocks * BLOCK_BITS
    assert geometry.nbytes * 8 == geometry.num_bits
    if geometry.num_blocks > 1:
        fewer = geometry.num_blocks - 1
        best = max(1, round(-math.log2(p)))
        rates = [block_error_rate(fewer, k, n) for k in range(max(1, best - 1), best + 2)]
        assert min(rates) > p


@pytest.mark.parametrize(("n", "k"), [(1, 1), (2, 1), (3, 2), (1000, 7)])
def test_block_error_rate_is_the_mean_over_the_block_loads(n: int, k: int) -> None:
    # Two blocks: the loads are binomial, summed here by the definition.
    total = sum(
        math.comb(n, load) / 2**n * classic_error_rate(BLOCK_BITS, k, load) for load in range(n + 1)
    )
    assert block_error_rate(2, k, n) == pytest.approx(total, rel=1e-9)


def test_expected_false_positives_is_the_sum_over_the_crawl() -> None:
    geometry = choose_geometry(20_000, 0.01)
    for count in (1, 100, 20_000, 60_000):
        steps = min(count, 200)
        middles = (round((number + 0.5) * count / steps) for number in range(steps))
        total = sum(block_error_rate(*geometry, middle) for middle in middles) * count / steps
        assert expected_false_positives(*geometry, count) == pytest.approx(
            total, rel=0.02, abs=1e-9
        )
    assert expected_false_positives(*geometry, 0) == 0


@pytest.mark.parametrize("recorded", [100, 200, 1000, 20_000, 60_000])
def test_what_came_of_one_hash_has_a_closed_form(recorded: int) -> None:
    """With one hash, p(n) is 1 - e^(-n/m), and dn/dr = 1/(1 - p) can be solved."""
    for num_bits in (BLOCK_BITS, 1000 * BLOCK_BITS):
        came = -num_bits * math.log1p(-recorded / BLOCK_BITS)
        found = expected_offered(num_bits, 1, recorded * num_bits // BLOCK_BITS)
        assert found == pytest.approx(came, rel=1e-6, abs=0.6)


def test_of_a_filter_full_to_the_brim_it_is_known_that_more_came() -> None:
    assert 10**6 < expected_offered(BLOCK_BITS, 3, 10**6) < 10**10


@pytest.mark.parametrize(
    ("capacity", "error_rate", "error"),
    [
        (0, 0.1, ValueError),
        (-1, 0.1, ValueError),
        (10**12 + 1, 0.1, ValueError),
        (10, 0, ValueError),
        (10, 1, ValueError),
        (10, 1.5, ValueError),
        (10, -0.1, ValueError),
        (10, 1e-20, ValueError),
        (10, math.nan, ValueError),
        (10, math.inf, ValueError),
        (10.5, 0.1, TypeError),
        ("10", 0.1, TypeError),
        (True, 0.1, TypeError),
        (10, "0.1", TypeError),
        (10, None, TypeError),
    ],
)
def test_what_cannot_be_sized(capacity: int, error_rate: float, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^(capacity|error_rate) is .*(use|must be)"):
        choose_geometry(capacity, error_rate)


@pytest.mark.parametrize(
    ("capacity", "error_rate", "number"),
    [(1000, 1e-2, 20_000), (1000, 1e-6, 30_000)],
)
def test_the_reported_rate_is_right_far_beyond_the_capacity(
    capacity: int, error_rate: float, number: int, tmp_path: Path
) -> None:
    """Also of its false positives, which nobody counts."""
    # With a random salt, one run of some hundreds would be off by more.
    backend = local_backend(tmp_path, capacity=capacity, error_rate=2 * error_rate, salt=bytes(16))
    backend.open()
    backend.begin()
    with file_size_limit(5000):  # so that it cannot grow
        recorded = sum(
            backend.add(each_number.to_bytes(20, "big")) for each_number in range(number)
        )
    status = backend.status()
    assert status.count == recorded < 0.95 * number
    assert status.generations[0].offered == pytest.approx(number, rel=0.02)
    assert status.expected_false_positives == pytest.approx(number - recorded, rel=0.05)
    never_added = (each_number.to_bytes(21, "big") for each_number in range(20_000))
    measured = sum(entry in backend for entry in never_added) / 20_000
    assert status.error_rate_now == pytest.approx(measured, rel=0.07)
    backend.close()


@pytest.mark.parametrize("num_hashes", [1, 7, 20])
@pytest.mark.parametrize("number", [0, 1, 1000, 5000])
def test_the_number_of_requests_follows_from_the_fill(number: int, num_hashes: int) -> None:
    fill = classic_fill_ratio(BLOCK_BITS, num_hashes, number)
    assert Contents.of([fill, fill], num_hashes).requests == 2 * number


def test_the_figures_of_all_blocks_are_added_up() -> None:
    found = Contents.of([0.0, 0.5, 1.0], 2)
    assert (found.fill_ratio, found.error_rate) == (0.5, 1.25 / 3)
    each = [Contents.of([fill], 2).requests for fill in (0.5, 1 - 1 / BLOCK_BITS, 1.0)]
    assert each[0] < each[1] < each[2] < math.inf
    assert found.requests == pytest.approx(each[0] + each[2], abs=1)

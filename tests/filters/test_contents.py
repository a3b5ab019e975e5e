"""What the bits of a filter tell of it."""

import math

import pytest

from scrapy_bloom.filters.sizing import BLOCK_BITS, Contents, block_load, classic_fill_ratio


@pytest.mark.parametrize("num_hashes", [1, 7, 20])
@pytest.mark.parametrize("number", [0, 1, 1000, 5000])
def test_the_load_of_a_block_is_what_fills_it_that_much(number: int, num_hashes: int) -> None:
    fill = classic_fill_ratio(BLOCK_BITS, num_hashes, number)
    assert block_load(fill, num_hashes) == pytest.approx(number, rel=1e-9)


def test_a_full_block_holds_more_than_one_that_lacks_a_bit() -> None:
    assert block_load(1 - 1 / BLOCK_BITS, 1) < block_load(1.0, 1) < math.inf


def test_blocks_are_added_up() -> None:
    found = Contents.of([0.0, 0.5, 1.0], 2)
    assert (found.fill_ratio, found.error_rate) == (0.5, 1.25 / 3)
    assert found.requests == round(block_load(0.5, 2) + block_load(1.0, 2))

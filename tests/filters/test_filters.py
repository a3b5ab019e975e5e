"""BloomFilter, used without Scrapy."""

import pytest

from scrapy_bloom import BloomFilter
from scrapy_bloom.filters.sizing import BLOCK_BITS, BLOCK_BYTES, Geometry, choose_geometry

SALT = bytes(range(16))


def numbered(numbers: range) -> list[bytes]:
    return [number.to_bytes(20, "big") for number in numbers]


@pytest.mark.parametrize(
    ("capacity", "error_rate", "queries"),
    [
        (100_000, 1e-2, 50_000),
        pytest.param(200_000, 1e-3, 300_000, marks=pytest.mark.soak),
        pytest.param(1_000_000, 1e-4, 3_000_000, marks=pytest.mark.soak),
    ],
)
def test_the_error_rate_is_what_was_asked_for(
    capacity: int, error_rate: float, queries: int
) -> None:
    seen = BloomFilter(capacity, error_rate, salt=SALT)  # each run counts the same
    for fingerprint in numbered(range(capacity)):
        seen.add(fingerprint)
    assert all(fingerprint in seen for fingerprint in numbered(range(capacity)))
    wrong = sum(
        number.to_bytes(20, "big") in seen for number in range(capacity, capacity + queries)
    )
    assert 0.85 * error_rate <= wrong / queries <= 1.15 * error_rate
    assert seen.estimated_error_rate == pytest.approx(wrong / queries, rel=0.15)
    assert seen.approximate_count == pytest.approx(capacity, rel=0.001)
    assert 0.45 < seen.fill_ratio < 0.52


@pytest.mark.parametrize(
    ("salt", "error"), [(b"short", ValueError), (bytes(17), ValueError), ("0" * 16, TypeError)]
)
def test_bad_salts(salt: bytes, error: type[Exception]) -> None:
    with pytest.raises(error, match="salt must"):
        BloomFilter(10, 0.1, salt=salt)


def test_shape() -> None:
    seen = BloomFilter(1_000_000, 1e-4)
    assert (seen.num_blocks, seen.num_hashes) == choose_geometry(1_000_000, 1e-4)
    assert seen.num_bits == seen.num_blocks * BLOCK_BITS == 8 * seen.nbytes
    assert (seen.capacity, seen.error_rate) == (1_000_000, 1e-4)
    assert repr(seen) == (
        "BloomFilter(capacity=1000000, error_rate=0.0001, num_blocks=293, num_hashes=13)"
    )


def test_salts_are_random_unless_given() -> None:
    assert BloomFilter(10, 0.1).salt != BloomFilter(10, 0.1).salt
    assert len(BloomFilter(10, 0.1).salt) == 16
    assert BloomFilter(10, 0.1, salt=SALT).salt == SALT


def test_a_full_filter_still_answers() -> None:
    full = {"load": lambda _: b"\xff" * BLOCK_BYTES}
    seen = BloomFilter(10, 0.1, salt=SALT, geometry=Geometry(8, 3), **full)
    assert b"anything" in seen
    assert not seen.add(b"anything")
    assert seen.estimated_error_rate == seen.fill_ratio == 1
    assert seen.approximate_count > 10

"""Limits of a filter's stored figures, in a file or in Redis; all else is refused.

A checksum tells only that nobody has changed the figures since. The program that wrote them may
have been broken, or hostile: a capacity of 0 divides by zero, a number of blocks of 10^30 fills the
memory, an error rate of nan compares with nothing.
"""

from scrapy_bloom.filters.sizing import MAX_HASHES, check_size, classic_error_rate
from scrapy_bloom.generations.policy import Generation

_MOST_GENERATIONS = 2**32 - 1  # what a file has room for
_LAST_TIME = 253_402_300_799  # of the year 9999


def check_generation(generation: Generation, oldest: int = 1) -> None:
    """Check that a filter of ours may have a generation with these figures, or raise ValueError.

    Args:
        generation: as it was stored.
        oldest: the number of the filter's oldest generation that it names, if it does.
    """
    if not 1 <= oldest <= generation.number <= _MOST_GENERATIONS:
        raise ValueError(f"its number is {generation.number}, that of the oldest one {oldest}")
    _check_geometry(generation)
    check_time("created_at", generation.created_at)
    check_time("open_until", generation.open_until)
    # Who records a request sets a bit. What was lost and recorded again may have been counted
    # again, but not that often.
    most = 16 * max(generation.geometry.num_bits, generation.capacity)
    if not 0 <= generation.count <= most:
        raise ValueError(f"its count is {generation.count}; it has room for {generation.capacity}")


def _check_geometry(generation: Generation) -> None:
    """Check that a filter of that shape keeps its error rate, and is not far too large for it."""
    capacity, error_rate = generation.capacity, generation.error_rate
    check_size(capacity, error_rate)
    num_blocks, num_hashes, _ = generation.geometry
    num_bits = generation.geometry.num_bits
    shape = f"num_blocks is {num_blocks} and num_hashes {num_hashes}"
    if num_blocks < 1 or not 1 <= num_hashes <= MAX_HASHES:
        raise ValueError(f"{shape}; allowed are 1 to {MAX_HASHES} hashes, and at least one block")
    # A hundredth more, for other roundings; that blocks are filled unevenly makes a filter larger.
    rate = classic_error_rate(num_bits, num_hashes, capacity)
    half = classic_error_rate(num_bits // 2, num_hashes, capacity)
    if rate > 1.01 * error_rate or (num_blocks > 2 and half < error_rate):
        raise ValueError(
            f"{shape}, which does not fit a capacity of {capacity} and an error_rate of "
            f"{error_rate}"
        )


def check_asked(error_rate: float) -> None:
    """Check that a value is an error rate that was asked for, or 0, or raise ValueError."""
    if not 0 <= error_rate < 1:
        raise ValueError(f"the error_rate that was asked for is {error_rate}")


def check_time(name: str, value: float) -> None:
    """Check that a value is a time, in seconds since 1970, or raise ValueError."""
    if not 0 <= value <= _LAST_TIME:
        raise ValueError(f"{name} is {value}, which is no time")

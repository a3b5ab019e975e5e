"""Limits of a filter's stored figures, in a file or in Redis; all else is refused.

A checksum tells only that nobody has changed the figures since. The program that wrote them may
have been broken, or hostile: a capacity of 0 divides by zero, a number of blocks of 10^30 fills the
memory, an error rate of nan compares with nothing.
"""

from scrapy_bloom.filters.sizing import check_geometry
from scrapy_bloom.generations.policy import Generation

_MOST_GENERATIONS = 2**32 - 1  # what a file has room for
_LAST_TIME = 253_402_300_799  # of the year 9999


def check_generation(generation: Generation, oldest: int = 1) -> None:
    """Check that a filter of ours may have a generation with these figures.

    Args:
        generation: as it was stored.
        oldest: the number of the filter's oldest generation that it names, if it does.

    Raises:
        ValueError: not so; it says why.
    """
    if not 1 <= oldest <= generation.number <= _MOST_GENERATIONS:
        raise ValueError(f"its number is {generation.number}, that of the oldest one {oldest}")
    check_geometry(generation.geometry, generation.capacity, generation.error_rate)
    check_time("created_at", generation.created_at)
    check_time("open_until", generation.open_until)
    # Who records a request sets a bit. What was lost and recorded again may have been counted
    # again, but not that often.
    most = 16 * max(generation.geometry.num_bits, generation.capacity)
    if not 0 <= generation.count <= most:
        raise ValueError(f"its count is {generation.count}; it has room for {generation.capacity}")


def check_time(name: str, value: float) -> None:
    """Check that a value is a time, in seconds since 1970.

    Raises:
        ValueError: not so.
    """
    if not 0 <= value <= _LAST_TIME:
        raise ValueError(f"{name} is {value}, which is no time")

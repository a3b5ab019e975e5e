"""The mathematics of filters: from capacity and rate to bits and hashes, and back.

The formulas of a Bloom filter, with the names used in this package:

    n  capacity     number of different requests for which the filter is sized
    p  error_rate   false-positive rate: how probably a new request is reported as a duplicate
    m  num_bits     size in bits          m = n ln(1/p) / (ln 2)^2
    k  num_hashes   bits per request      k = (m/n) ln 2; then half of the bits are set
       p from m, k, n                     p = (1 - e^(-kn/m))^k
       m/n                                9.6 bits at p = 1 %, 4.8 bits more for each factor 10

Sources: B. H. Bloom, "Space/time trade-offs in hash coding with allowable errors", CACM 13(7),
1970; A. Broder and M. Mitzenmacher, "Network applications of Bloom filters: a survey", Internet
Mathematics 1(4), 2004.

This package's filter is an array of blocks of 65,536 bits, and a fingerprint sets all its bits in
one of them (F. Putze, P. Sanders, J. Singler, "Cache-, hash- and space-efficient Bloom filters",
2007). `block_error_rate` includes that some blocks receive more fingerprints than others.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

BLOCK_BITS = 65_536
BLOCK_BYTES = BLOCK_BITS // 8

MIN_ERROR_RATE = 1e-15  # the lowest that a user may set
SMALLEST_ERROR_RATE = 1e-19  # of one generation among others; MAX_HASHES allow 5e-20
MAX_CAPACITY = 10**12
MAX_HASHES = 64


class Geometry(NamedTuple):
    """The shape of a filter: `num_blocks` of 65,536 bits, and `num_hashes` bits per request."""

    num_blocks: int
    num_hashes: int

    @property
    def num_bits(self) -> int:
        """m, the number of bits, a multiple of 65,536."""
        return self.num_blocks * BLOCK_BITS

    @property
    def nbytes(self) -> int:
        """Size of all blocks in bytes."""
        return self.num_blocks * BLOCK_BYTES


def classic_fill_ratio(num_bits: int, num_hashes: int, count: int) -> float:
    """Return the expected share of set bits after `count` elements: 1 - e^(-kn/m).

    >>> classic_fill_ratio(19_170_117, 13, 0)
    0.0
    >>> round(classic_fill_ratio(1_442_695, 1, 1_000_000), 3)  # the optimum: half
    0.5
    """
    return abs(math.expm1(-num_hashes * count / num_bits))


def classic_error_rate(num_bits: int, num_hashes: int, count: int) -> float:
    """Return the false-positive rate of a filter without blocks: (1 - e^(-kn/m))^k.

    >>> round(classic_error_rate(20_000_000, 10, 1_000_000), 7)
    8.89e-05
    """
    return float(classic_fill_ratio(num_bits, num_hashes, count) ** num_hashes)


@lru_cache(maxsize=1024)  # each look at the stats asks for all full generations again
def block_error_rate(num_blocks: int, num_hashes: int, count: int) -> float:
    """Return the false-positive rate of a filter in blocks that contains `count` fingerprints.

    The load of a block is binomial, and the rate is the mean of a block's rate over the loads.

    >>> block_error_rate(1, 1, 0)
    0.0
    >>> block_error_rate(1, 3, 5000) == classic_error_rate(65_536, 3, 5000)
    True
    """
    if count <= 0:
        return 0.0
    if num_blocks == 1:
        return classic_error_rate(BLOCK_BITS, num_hashes, count)
    mean = count // num_blocks
    spread = 10 * math.isqrt(mean) + 30  # further from the mean, weights make no difference
    total = weighted = 0.0
    weight = 1.0  # each follows from the one before, without factorials, so any count is exact
    for load in range(max(0, mean - spread), min(count, mean + spread) + 1):
        total += weight
        weighted += weight * classic_error_rate(BLOCK_BITS, num_hashes, load)
        weight *= (count - load) / (load + 1) / (num_blocks - 1)
    return weighted / total


def expected_false_positives(num_blocks: int, num_hashes: int, count: int) -> float:
    """Return the expected false positives while a filter records its first `count` requests.

    The result is the sum of the rate over the crawl, well below `count` times the final rate.

    >>> geometry = choose_geometry(1_000_000, 1e-6)
    >>> 0.05 < expected_false_positives(*geometry, 1_000_000) < 0.1
    True
    """
    if count <= 0:
        return 0.0
    step = count / 64  # Simpson's rule: the rate is smooth in the count, close to a power of it
    rates = [block_error_rate(num_blocks, num_hashes, round(part * step)) for part in range(65)]
    inner = 4 * sum(rates[1::2]) + 2 * sum(rates[2:-1:2])
    return (rates[0] + inner + rates[-1]) * step / 3


@lru_cache(maxsize=1024)
def expected_offered(num_bits: int, num_hashes: int, recorded: int) -> int:
    """Return the estimated number of fingerprints that came, from the number recorded.

    The others were false positives, which are not counted: far beyond the capacity, most requests.
    With n that came, r recorded and p(n) the false-positive rate, dn/dr = 1/(1 - p(n)).

    >>> expected_offered(65_536, 3, 2000)  # far from full
    2000
    >>> round(expected_offered(65_536, 3, 25_000) / 25_000, 2)
    1.17
    """
    if classic_error_rate(num_bits, num_hashes, recorded) < 1e-3:
        return recorded

    def slope(came: float) -> float:
        return 1 / (1 - min(classic_error_rate(num_bits, num_hashes, round(came)), 0.999))

    came, step = 0.0, recorded / 256
    for _ in range(256):  # the Runge-Kutta method
        first = slope(came)
        second = slope(came + step / 2 * first)
        third = slope(came + step / 2 * second)
        fourth = slope(came + step * third)
        came += step / 6 * (first + 2 * second + 2 * third + fourth)
    return round(came)


def choose_geometry(capacity: int, error_rate: float) -> Geometry:
    """Return the geometry with the fewest blocks, then hashes, that keeps the rate up to capacity.

    Raises TypeError or ValueError, as `check_size`.

    >>> choose_geometry(1_000_000, 1e-6)
    Geometry(num_blocks=440, num_hashes=20)
    """
    check_size(capacity, error_rate)
    best_k = max(1, round(-math.log2(error_rate)))
    candidates = range(max(1, best_k - 1), min(best_k + 1, MAX_HASHES) + 1)
    num_blocks = min(_fewest_blocks(capacity, error_rate, k) for k in candidates)
    # A filter of few blocks has spare room, and fewer hashes are faster. The rate falls with k up
    # to the optimum, so a bisection finds the lowest sufficient k.
    high = min(k for k in candidates if block_error_rate(num_blocks, k, capacity) <= error_rate)
    num_hashes = 1 + bisect_left(
        range(1, high), True, key=lambda k: block_error_rate(num_blocks, k, capacity) <= error_rate
    )
    return Geometry(num_blocks, num_hashes)


def _fewest_blocks(capacity: int, error_rate: float, num_hashes: int) -> int:
    """Return the smallest number of blocks that keeps `error_rate` with `num_hashes`."""
    without_blocks = capacity * -math.log(error_rate) / math.log(2) ** 2
    high = max(1, int(without_blocks / BLOCK_BITS))
    low = 1
    while block_error_rate(high, num_hashes, capacity) > error_rate:
        low = high + 1
        high += max(1, high // 50)
    return low + bisect_left(
        range(low, high),
        True,
        key=lambda blocks: block_error_rate(blocks, num_hashes, capacity) <= error_rate,
    )


def check_size(capacity: int, error_rate: float) -> None:
    """Raise TypeError or ValueError unless a filter can have this capacity and rate."""
    if isinstance(capacity, bool) or not isinstance(capacity, int):
        raise TypeError(
            f"capacity is {capacity!r}; it must be a whole number (int) of fingerprints"
        )
    if not 1 <= capacity <= MAX_CAPACITY:
        raise ValueError(f"capacity is {capacity}; use 1 to {MAX_CAPACITY:,} fingerprints")
    if isinstance(error_rate, bool) or not isinstance(error_rate, (int, float)):
        raise TypeError(f"error_rate is {error_rate!r}; it must be a number, 0 < p < 1")
    if not SMALLEST_ERROR_RATE <= error_rate < 1:
        raise ValueError(
            f"error_rate is {error_rate}; use a number between 0 and 1, at least "
            f"{SMALLEST_ERROR_RATE}"
        )


def block_fills(chunks: Iterable[bytes | memoryview]) -> Iterator[float]:
    """Yield the share of set bits of each block, 0 to 1; each chunk has some whole blocks."""
    for chunk in chunks:
        for start in range(0, len(chunk), BLOCK_BYTES):
            block = int.from_bytes(chunk[start : start + BLOCK_BYTES], "little")
            yield block.bit_count() / BLOCK_BITS


class Contents(NamedTuple):
    """Figures of a filter that are computed from its bits.

    The false-positive rate is the mean of fill^k over the blocks. A block with X of B bits set has
    -(B/k) ln(1 - X/B) fingerprints (S. J. Swamidass, P. Baldi, "Mathematical correction for
    fingerprint similarity measures to improve chemical retrieval", 2007), within about 1 %, unless
    the filter is far beyond its capacity.
    """

    fill_ratio: float
    error_rate: float
    requests: int

    @classmethod
    def of(cls, fills: Iterable[float], num_hashes: int) -> "Contents":
        """Compute the figures from the share of set bits of each block, for at least one block."""
        almost_full = 1 - 0.5 / BLOCK_BITS  # a full block has no finite estimate
        blocks = 0
        fill = rate = load = 0.0
        for block_fill in fills:
            blocks += 1
            fill += block_fill
            rate += block_fill**num_hashes
            load -= math.log1p(-min(block_fill, almost_full)) * BLOCK_BITS / num_hashes
        return cls(fill / blocks, rate / blocks, round(load))

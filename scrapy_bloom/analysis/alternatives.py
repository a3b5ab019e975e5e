"""Other ways to remember a crawl's requests: their bytes, and how often they err."""

import math
from typing import NamedTuple

SCRAPY_SET_BYTES = 91  # for each request; measured, see docs/benchmarks.md
REDIS_SET_BYTES = 90  # 40 hexadecimal digits, as scrapy-redis keeps them; Redis 7: 88 to 97
MD5_TABLE_BYTES = 32  # 16 for a digest, in a table that is half full


class Alternative(NamedTuple):
    """A way to remember requests: its bytes with all of them, and how many it takes for seen."""

    name: str
    bytes: int
    expected_false_drops: float


def alternatives(requests: int, nbytes: int) -> list[Alternative]:
    """Return the other ways to remember so many requests.

    Args:
        requests: n, how many different ones, at least 1.
        nbytes: the size of the filter, and so of the bitmap.
    """
    return [
        Alternative("Scrapy's set, in memory", requests * SCRAPY_SET_BYTES, 0.0),
        Alternative("Redis set (scrapy-redis)", requests * REDIS_SET_BYTES, 0.0),
        Alternative("MD5 hash table", requests * MD5_TABLE_BYTES, md5_collisions(requests)),
        Alternative("bitmap of that size", nbytes, bitmap_collisions(requests, nbytes * 8)),
    ]


def bitmap_collisions(requests: int, num_bits: int) -> float:
    """Return how many requests a bitmap with one hash takes for seen as it records them.

    These set no new bit: n - m (1 - e^(-n/m)).

    >>> round(bitmap_collisions(100_000, 1_000_000))
    4837
    """
    return requests + num_bits * math.expm1(-requests / num_bits)


def md5_collisions(requests: int) -> float:
    """Return how many 128-bit digests collide: pairs, n (n - 1) / 2, by the number of digests.

    >>> md5_collisions(10**9) < 1e-20
    True
    """
    return requests * (requests - 1) / 2 / 2**128

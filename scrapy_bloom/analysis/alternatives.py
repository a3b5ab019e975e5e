"""Other ways to remember a crawl's requests: their bytes, and how often they err."""

import math
from typing import Any

SCRAPY_SET_BYTES = 91  # for each request; measured, see docs/benchmarks.md
REDIS_SET_BYTES = 90  # 40 hexadecimal digits, as scrapy-redis keeps them; Redis 7: 88 to 97
MD5_TABLE_BYTES = 32  # 16 for a digest, in a table that is half full


def alternatives(requests: int, nbytes: int) -> list[dict[str, Any]]:
    """Return what the other ways take and get wrong with so many requests.

    `nbytes` is the size of the filter, and so of the bitmap.
    """
    return [
        {"name": name, "bytes": size, "expected_false_drops": drops}
        for name, size, drops in (
            ("Scrapy's set, in memory", requests * SCRAPY_SET_BYTES, 0.0),
            ("Redis set (scrapy-redis)", requests * REDIS_SET_BYTES, 0.0),
            ("MD5 hash table", requests * MD5_TABLE_BYTES, md5_collisions(requests)),
            ("bitmap of that size", nbytes, bitmap_collisions(requests, nbytes * 8)),
        )
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

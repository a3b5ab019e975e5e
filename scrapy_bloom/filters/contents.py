"""Estimates of a filter's contents from its bits."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from scrapy_bloom.filters.sizing import BLOCK_BITS


class Contents(NamedTuple):
    """Holds what the bits of a filter tell of it, all from one look at them.

    Attributes:
        fill_ratio: share of bits that are set, 0 to 1.
        error_rate: its false-positive rate now, 0 to 1. A fingerprint that was never added falls
            into each block with equal chance, and is taken for seen if its k positions there are
            all set. So it is the mean of fill^k over the blocks.
        requests: different fingerprints in it. Per block, -(B/k) ln(1 - X/B) with X of B bits set
            (S. J. Swamidass, P. Baldi, "Mathematical correction for fingerprint similarity
            measures to improve chemical retrieval", 2007). Within about 1 % as long as the filter
            is not far over its capacity.
    """

    fill_ratio: float
    error_rate: float
    requests: int

    @classmethod
    def of(cls, block_fills: Iterable[float], num_hashes: int) -> "Contents":
        """Sum over all blocks.

        Args:
            block_fills: the share of set bits of each, at least one.
            num_hashes: k.
        """
        blocks = 0
        fill = rate = load = 0.0
        for each in block_fills:
            blocks += 1
            fill += each
            rate += each**num_hashes
            load += block_load(each, num_hashes)
        return cls(fill / blocks, rate / blocks, round(load))


def block_load(fill: float, num_hashes: int) -> float:
    """Estimate how many fingerprints are in a block with that share of set bits; see `Contents`."""
    almost_full = 1 - 0.5 / BLOCK_BITS  # a full block has no finite estimate
    return -math.log1p(-min(fill, almost_full)) * BLOCK_BITS / num_hashes

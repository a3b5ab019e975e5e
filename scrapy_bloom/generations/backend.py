"""The protocol of a backend, which keeps a filter for a crawl, and the figures of a filter."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from scrapy_bloom.generations.forgotten import Forgotten
from scrapy_bloom.generations.policy import Generation, rate_asked


@dataclass(frozen=True, kw_only=True)
class FilterStatus:
    """A filter's figures at one moment."""

    location: str  # where the filter is stored, for messages: a path, or "memory"
    generations: Sequence[Generation]  # live generations, oldest first, at least one
    error_rate: float  # the configured rate (p), or the sum over all generations if it is higher
    errors: int = 0  # failures of the storage so far
    failure: str = ""  # text of the last failure
    expired: int = 0  # requests that expired in this run
    volatile: Sequence[Generation] = ()  # in memory for this run; not included in the counts
    more: Mapping[str, int] = field(default_factory=dict)  # further figures, by names of stats

    @classmethod
    def of(cls, location: str, live: Sequence[Generation], asked: float) -> "FilterStatus":
        """Return the figures of a stored filter that this process does not record in.

        Args:
            location: where the filter is stored, for messages.
            live: its live generations, oldest first.
            asked: the error rate that was configured when the filter was created.
        """
        return cls(
            location=location,
            generations=[each.figures for each in live],
            error_rate=rate_asked(live, asked),
        )

    @property
    def capacity(self) -> int:
        """Return for how many requests all generations together are sized."""
        return sum(each.capacity for each in self.generations)

    @property
    def count(self) -> int:
        """Return how many requests are recorded and have not expired."""
        return sum(each.count for each in self.generations)

    @property
    def load(self) -> float:
        """Return the load of the newest generation: its count divided by its capacity."""
        newest = self.generations[-1]
        return newest.count / newest.capacity

    @property
    def nbytes(self) -> int:
        """Return the size of all bits, in bytes."""
        return sum(each.geometry.nbytes for each in [*self.generations, *self.volatile])

    @property
    def fill_ratio(self) -> float:
        """Return the share of set bits, 0 to 1, estimated from the counts."""
        set_bits = math.fsum(each.geometry.num_bits * each.fill_ratio for each in self.generations)
        return set_bits / sum(each.geometry.num_bits for each in self.generations)

    @property
    def error_rate_now(self) -> float:
        """Return the current false-positive rate, 0 to 1."""
        return combined_rate(each.error_rate_now for each in [*self.generations, *self.volatile])

    @property
    def expected_false_positives(self) -> float:
        """Return the expected number of false positives while the live generations filled."""
        # While one generation filled, each older generation had its final false-positive rate.
        drops = sum(each.expected_false_positives for each in self.volatile)
        before = 0.0
        for each in self.generations:
            drops += each.expected_false_positives + before * each.count
            before += each.error_rate_now
        return drops


def combined_rate(rates: Iterable[float]) -> float:
    """Return the probability that at least one of several filters has a false positive.

    It is 1 - (1 - p1) (1 - p2) ..., which is close to the sum of small rates.

    >>> combined_rate([0.5, 0.5]), combined_rate([1e-20, 1e-20])
    (0.75, 2e-20)
    """
    return abs(math.expm1(math.fsum(math.log1p(-min(rate, 1 - 1e-15)) for rate in rates)))


class Backend(Protocol):
    """Keeps a filter of fingerprints for a crawl.

    The methods are called in this order: `open`, `begin`, `add` any number of times, `close`.
    """

    @property
    def forgotten(self) -> Forgotten:
        """Return the forgotten requests, which are to be crawled again."""

    def open(self) -> None:
        """Open the filter without changing stored data; raises BloomError."""

    def begin(self) -> None:
        """Begin the crawl: from now on until `close`, an end counts as unclean."""

    def add(self, fingerprint: bytes) -> bool:
        """Record a fingerprint; return whether it was new."""

    def __contains__(self, fingerprint: bytes) -> bool:
        """Return whether a fingerprint is recorded, with false positives."""

    def status(self) -> FilterStatus:
        """Return the filter's current figures; after `close`, the last figures."""

    def close(self) -> None:
        """Write all changes to the disk, and end; raises BloomError."""

"""What each backend offers a crawl, wherever it keeps the filter, and the figures of a filter."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from scrapy_bloom.generations.forgotten import Forgotten
from scrapy_bloom.generations.policy import Generation, rate_asked


@dataclass(frozen=True, kw_only=True)
class FilterStatus:
    """A filter's figures at one moment."""

    location: str  # where the filter is kept, for people: a path, or "memory"
    generations: Sequence[Generation]  # the live ones, oldest first, at least one
    error_rate: float  # as asked for (p), or as its generations were made for if that is more
    errors: int = 0  # failures of the storage so far
    failure: str = ""  # the last of them, for people
    expired: int = 0  # requests forgotten in this run, because their time window was over
    volatile: Sequence[Generation] = ()  # in memory, filter in this run, too; not in the counts
    more: Mapping[str, int] = field(default_factory=dict)  # by the names of their stats

    @classmethod
    def of(cls, location: str, live: Sequence[Generation], asked: float) -> "FilterStatus":
        """Return the figures of a filter that no crawl of ours has open, as they are stored.

        The error rate that was asked for when the filter was made is one of them.
        """
        return cls(
            location=location,
            generations=[each.figures for each in live],
            error_rate=rate_asked(live, asked),
        )

    @property
    def capacity(self) -> int:
        """Requests that all generations together are sized for."""
        return sum(each.capacity for each in self.generations)

    @property
    def count(self) -> int:
        """Requests recorded so far, and not expired."""
        return sum(each.count for each in self.generations)

    @property
    def load(self) -> float:
        """Return how full the newest generation is: 1 at its capacity."""
        newest = self.generations[-1]
        return newest.count / newest.capacity

    @property
    def nbytes(self) -> int:
        """Size of the bits, in bytes."""
        return sum(each.geometry.nbytes for each in [*self.generations, *self.volatile])

    @property
    def fill_ratio(self) -> float:
        """Share of bits that are set, 0 to 1; expected from the counts, without reading them."""
        set_bits = math.fsum(each.geometry.num_bits * each.fill_ratio for each in self.generations)
        return set_bits / sum(each.geometry.num_bits for each in self.generations)

    @property
    def error_rate_now(self) -> float:
        """The false-positive rate with what is recorded now, 0 to 1."""
        return any_errs(each.error_rate_now for each in [*self.generations, *self.volatile])

    @property
    def expected_false_positives(self) -> float:
        """Expected false positives while the live generations filled."""
        # While a generation took what was new, those before it erred at their final rates.
        drops = sum(each.expected_false_positives for each in self.volatile)
        before = 0.0
        for each in self.generations:
            drops += each.expected_false_positives + before * each.count
            before += each.error_rate_now
        return drops


def any_errs(rates: Iterable[float]) -> float:
    """Return the chance that at least one of several filters has a false positive.

    It is 1 - (1 - p) (1 - p) ...: close to the sum of the rates, as long as that is small.

    >>> any_errs([0.5, 0.5]), any_errs([1e-20, 1e-20])
    (0.75, 2e-20)
    """
    return abs(math.expm1(math.fsum(math.log1p(-min(rate, 1 - 1e-15)) for rate in rates)))


class Backend(Protocol):
    """Keeps a filter for a crawl.

    It takes fingerprints, never URLs, and is used in this order: `open`, `begin`, any number of
    `add`, `close`.
    """

    @property
    def forgotten(self) -> Forgotten:
        """Return the requests that are to be crawled again."""

    def open(self) -> None:
        """Make the filter ready, leaving what is stored as it is; raises BloomError."""

    def begin(self) -> None:
        """Begin the crawl: from now to `close`, its end counts as unclean."""

    def add(self, fingerprint: bytes) -> bool:
        """Record a fingerprint; True if it was new."""

    def __contains__(self, fingerprint: bytes) -> bool:
        """Return whether a fingerprint is recorded (or, at the error rate, seems to be)."""

    def status(self) -> FilterStatus:
        """Return the filter's figures now; after `close`, the last ones."""

    def close(self) -> None:
        """Make everything durable and end; the last call. Raises BloomError."""

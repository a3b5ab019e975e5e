"""What a backend tells about its filter."""

from dataclasses import dataclass

from scrapy_bloom import sizing
from scrapy_bloom.sizing import Geometry


@dataclass(frozen=True, kw_only=True)
class FilterStatus:
    """A filter's figures at one moment.

    Attributes:
        location: where the filter is kept, for people: a path, or "memory".
        geometry: blocks and hashes.
        capacity: requests it is sized for (n).
        error_rate: the highest rate it is sized for (p).
        count: requests recorded so far.
        errors: failures of the storage so far.
    """

    location: str
    geometry: Geometry
    capacity: int
    error_rate: float
    count: int
    errors: int = 0

    @property
    def nbytes(self) -> int:
        """Size of the bits, in bytes."""
        return self.geometry.nbytes

    @property
    def fill_ratio(self) -> float:
        """Share of bits that are set, 0 to 1; expected from the count, without reading them."""
        return sizing.classic_fill_ratio(
            self.geometry.num_bits, self.geometry.num_hashes, self.count
        )

    @property
    def error_rate_now(self) -> float:
        """The false-positive rate with what is recorded now, 0 to 1."""
        return sizing.block_error_rate(*self.geometry, self.count)

    @property
    def expected_false_drops(self) -> float:
        """Requests expected to have been taken for seen ones since the filter was empty."""
        return sizing.expected_false_drops(*self.geometry, self.count)

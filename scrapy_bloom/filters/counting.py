"""A Bloom filter that can remove fingerprints, with a 4-bit counter in place of each bit.

L. Fan, P. Cao, J. Almeida, A. Z. Broder, "Summary cache: a scalable wide-area web cache sharing
protocol", IEEE/ACM Transactions on Networking 8(3), 2000: four bits are enough, since at half load
a counter passes 15 once in 10^15.

A block of 65,536 counters is 32 KiB: two counters to a byte, the lower four bits first.
"""

from collections.abc import Iterable, Iterator
from typing import ClassVar

from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.filters.hashing import block_of
from scrapy_bloom.filters.sizing import BLOCK_BITS

_MOST = 15  # the largest value of a counter
_COUNTED = bytes((byte & 15 > 0) + (byte >> 4 > 0) for byte in range(256))


class CountingBloomFilter(BloomFilter):
    """A `BloomFilter` that can also remove fingerprints, in four times the space.

    It is a set: adding a fingerprint twice has no effect, and one `discard` removes it. Discarding
    a fingerprint that was added does not remove any other fingerprint.

    A counter that has reached 15 keeps this value, because the number of fingerprints that share it
    is then unknown. So there are no false negatives, but a fingerprint that shares such a counter
    may still be found after it was discarded.

    >>> seen = CountingBloomFilter(1000, 0.001)
    >>> seen.add(b"page 1"), seen.add(b"page 2")
    (True, True)
    >>> seen.discard(b"page 1"), seen.discard(b"page 1")
    (True, False)
    >>> b"page 1" in seen, b"page 2" in seen
    (False, True)

    The arguments are those of `BloomFilter`: `capacity` is how many different fingerprints are
    expected at a time.

    Attributes:
        saturated: how often a counter at 15 should have been raised, since this object was created.
    """

    _block_bytes: ClassVar = BLOCK_BITS // 2
    saturated = 0

    def add_hashed(self, block_hash: int, positions: list[int]) -> bool:
        """Record what a hasher returned for `num_hashes`; return whether it was new."""
        if self.has_hashed(block_hash, positions):
            return False
        buffer = self._buffer
        for index, shift in self._places(block_hash, {*positions}):
            if buffer[index] >> shift & _MOST < _MOST:
                buffer[index] += 1 << shift
            else:
                self.saturated += 1
        return True

    def has_hashed(self, block_hash: int, positions: list[int]) -> bool:
        """Return whether the filter has what a hasher returned for at least `num_hashes`."""
        buffer = self._buffer
        places = self._places(block_hash, positions[: self.num_hashes])
        return all(buffer[index] >> shift & _MOST for index, shift in places)

    def discard(self, fingerprint: bytes) -> bool:
        """Remove a fingerprint that was added.

        Args:
            fingerprint: one for which `add` returned True, and which was not discarded since.

        Returns:
            False if the filter does not have it, and was not changed. True if it was removed.
            Never discard a fingerprint that was not added: if it is a false positive, this lowers
            the counters of others, and removes up to `num_hashes` of them.

        Raises:
            TypeError: fingerprint is not bytes.
        """
        block_hash, positions = self._locate(fingerprint)
        if not self.has_hashed(block_hash, positions):
            return False
        buffer = self._buffer
        for index, shift in self._places(block_hash, {*positions}):
            if buffer[index] >> shift & _MOST < _MOST:
                buffer[index] -= 1 << shift
        return True

    def _places(self, block_hash: int, positions: Iterable[int]) -> Iterator[tuple[int, int]]:
        """Return the byte of each counter, and its lowest bit there."""
        start = block_of(block_hash, self.num_blocks) * self._block_bytes
        return ((start + (position >> 1), position % 2 * 4) for position in positions)

    def _fills(self) -> Iterator[float]:
        for block in range(self.num_blocks):
            yield sum(bytes(self.blocks(block, block + 1)).translate(_COUNTED)) / BLOCK_BITS

"""A Bloom filter that can remove fingerprints: it has a 4-bit counter instead of each bit.

L. Fan, P. Cao, J. Almeida, A. Z. Broder, "Summary cache: a scalable wide-area web cache sharing
protocol", IEEE/ACM Transactions on Networking 8(3), 2000: four bits are enough, since at half load
a counter passes 15 once in 10^15.

A block of 65,536 counters is four planes of 65,536 bits, one after the other: the ones of all
counters, then their twos, fours and eights. A plane is laid out as a block of the plain filter is.
Counting is then a handful of operations on all positions of a fingerprint at once. With the four
bits of a counter side by side it would be a loop, which takes twice as long in Python.
"""

from collections.abc import Iterator
from functools import reduce
from itertools import compress
from operator import or_
from typing import ClassVar

from bitarray import bitarray
from bitarray.util import zeros

from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.filters.hashing import BLOCK_HASH_BITS
from scrapy_bloom.filters.sizing import BLOCK_BITS, BLOCK_BYTES

COUNTER_BITS = 4

Planes = tuple[bitarray, bitarray, bitarray, bitarray]


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

    Args:
        capacity: how many different fingerprints are expected at a time, 1 to 10**12.
        error_rate: p, the false-positive rate at that number, 1e-15 <= p < 1.
        salt: 16 bytes mixed into every hash; random if None. Filters can be merged only if they
            have the same salt.

    Attributes:
        saturated: how often a counter at 15 should have been raised, since this object was created.

    Raises:
        TypeError: an argument is of a wrong type.
        ValueError: an argument is out of range.
    """

    _block_bytes: ClassVar = COUNTER_BITS * BLOCK_BYTES
    saturated = 0

    def add_hashed(self, block_hash: int, positions: list[int]) -> bool:
        """Record a fingerprint hashed with this filter's salt; return whether it was new."""
        ones, twos, fours, eights = self._planes((block_hash * self._num_blocks) >> BLOCK_HASH_BITS)
        one = ones[positions]
        if one.all():
            return False
        first = positions[0]
        if (one[0] or twos[first] or fours[first] or eights[first]) and (
            one | twos[positions] | fours[positions] | eights[positions]
        ).all():
            return False
        # Positions that coincide count once.
        if not one.any():
            ones[positions] = 1
            return True
        two = twos[positions]
        carry = one & two
        if carry.any():
            four, eight = fours[positions], eights[positions]
            full = carry & four & eight
            if full.any():
                self.saturated += len({*compress(positions, full)})
            eights[positions] = eight | carry & four
            fours[positions] = four ^ carry | full
            twos[positions] = two ^ one | full
            ones[positions] = ~one | full
        else:
            twos[positions] = two | one
            ones[positions] = ~one
        return True

    def has_hashed(self, block_hash: int, positions: list[int]) -> bool:
        """Return whether the filter has a fingerprint that was hashed with its salt."""
        ones, twos, fours, eights = self._planes((block_hash * self._num_blocks) >> BLOCK_HASH_BITS)
        first = positions[0]
        if not (ones[first] or twos[first] or fours[first] or eights[first]):
            return False
        own = positions[: self._num_hashes]
        one = ones[own]
        return one.all() or (one | twos[own] | fours[own] | eights[own]).all()

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
        return self.discard_hashed(*self._locate(fingerprint))

    def discard_hashed(self, block_hash: int, positions: list[int]) -> bool:
        """Remove a fingerprint hashed with this filter's salt; return whether it was there."""
        ones, twos, fours, eights = self._planes((block_hash * self._num_blocks) >> BLOCK_HASH_BITS)
        one, two = ones[positions], twos[positions]
        four, eight = fours[positions], eights[positions]
        low = one | two
        if not (low | four | eight).all():
            return False
        full = one & two & four & eight
        ones[positions] = ~one | full
        borrow = ~one
        if borrow.any():
            twos[positions] = two ^ borrow
            borrow = ~low
            if borrow.any():
                fours[positions] = four ^ borrow
                borrow &= ~four
                eights[positions] = eight ^ borrow
        return True

    def _planes(self, block: int) -> Planes:
        planes: Planes | None = self._views[block] if block < self._num_views else None
        return self._view(block) if planes is None else planes

    @staticmethod
    def _viewed(block: memoryview) -> Planes:
        ones, twos, fours, eights = (
            bitarray(buffer=block[plane * BLOCK_BYTES : (plane + 1) * BLOCK_BYTES], endian="big")
            for plane in range(COUNTER_BITS)
        )
        return ones, twos, fours, eights

    def block_fills(self) -> Iterator[float]:
        """Yield the share of counters above 0 of each block, 0 to 1."""
        for block in range(self.num_blocks):
            set_counters = reduce(or_, self._viewed(self._memory(block, block + 1)))
            yield set_counters.count() / BLOCK_BITS

    def _merge(self, start: int, data: memoryview) -> None:
        """Add up the counters: a fingerprint that is in both must be discarded twice."""
        for number in range(len(data) // self._block_bytes):
            theirs = self._viewed(data[number * self._block_bytes :])
            planes = self._viewed(self._memory(start + number, start + number + 1))
            carry = zeros(BLOCK_BITS, endian="big")
            for plane, more in zip(planes, theirs, strict=True):
                either = plane ^ more
                both = plane & more
                plane ^= more  # noqa: PLW2901 - in place: it is the filter's own memory
                plane ^= carry  # noqa: PLW2901
                carry = both | either & carry
            self.saturated += carry.count()
            for plane in planes:
                plane |= carry  # noqa: PLW2901

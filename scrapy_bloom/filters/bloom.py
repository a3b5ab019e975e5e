"""The Bloom filter, whose blocks may be read when they are needed."""

import contextlib
import mmap
import sys
from collections.abc import Callable, Iterator
from typing import ClassVar, TypeAlias

from bitarray import bitarray

from scrapy_bloom.filters import sizing
from scrapy_bloom.filters.hashing import BLOCK_HASH_BITS, checked_salt, make_hasher

# A view of a block takes about 350 bytes, and 0.3 µs to create. So each filter keeps the views of
# its first 512 MB (23 MB of views), and creates the others when they are needed.
_MAX_VIEWS = 65_536
Load: TypeAlias = Callable[[int], bytes | None]  # reads a block, or returns None if it is empty
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python has a name for it since 3.13


def _zeros(nbytes: int) -> memoryview:
    """Return zeros, which take no memory until they are written; raises MemoryError."""
    try:
        if sys.platform != "linux":
            return memoryview(mmap.mmap(-1, nbytes))
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        memory = mmap.mmap(-1, nbytes, flags)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            # With them, one bit would take 2 MB.
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{nbytes:,} bytes: {error}") from None
    return memoryview(memory)


class BloomFilter:
    """A set of fingerprints with false positives, and without false negatives.

    A fingerprint that was added is always found. One that was never added is found with a
    probability of at most `error_rate`, as long as the filter contains at most `capacity`
    fingerprints. In a crawl, such a false positive is a new request that is skipped.

    >>> seen = BloomFilter(1000, 0.001)
    >>> seen.add(b"page 1")  # new
    True
    >>> seen.add(b"page 1")  # a duplicate
    False
    >>> b"page 1" in seen, b"page 2" in seen
    (True, False)

    Args:
        capacity: how many different fingerprints are expected, 1 to 10**12.
        error_rate: p, the false-positive rate at that number, 1e-15 <= p < 1.
        salt: 16 bytes mixed into every hash; random if None.
        geometry: numbers of blocks and hashes of a stored filter; None: the fewest that suffice.
        load: returns a block of a stored filter by its number; None if it is empty.

    Raises:
        TypeError: an argument is of a wrong type.
        ValueError: an argument is out of range.
        MemoryError: the system has no address space for all blocks.

    Attributes:
        num_blocks: number of blocks of 65,536 bits.
        num_hashes: k, the number of bits that a fingerprint sets.
        num_bits: m, the number of bits (or counters).
        nbytes: the size of all blocks in bytes.
        changed: for each block, 1 if a fingerprint was added to it. Set it to 0 before you copy the
            block.
    """

    _block_bytes: ClassVar = sizing.BLOCK_BYTES

    def __init__(
        self,
        capacity: int,
        error_rate: float,
        *,
        salt: bytes | None = None,
        geometry: sizing.Geometry | None = None,
        load: Load | None = None,
    ) -> None:
        geometry = geometry or sizing.choose_geometry(capacity, error_rate)
        self.capacity = capacity
        self.error_rate = error_rate
        self.salt = checked_salt(salt)
        self.num_blocks, self.num_hashes = geometry
        self.num_bits = geometry.num_bits
        self.nbytes = self.num_blocks * self._block_bytes
        self.changed = bytearray(self.num_blocks)
        self._buffer = _zeros(self.nbytes)
        self._num_views = min(self.num_blocks, _MAX_VIEWS)
        self._views: list[bitarray | None] = [None] * self._num_views
        self._second = min(1, self.num_hashes - 1)
        self._locate = make_hasher(self.salt, self.num_hashes)
        self._load = load
        # For each block: 1 if `load` must be called first.
        self._missing = bytearray() if load is None else bytearray(b"\1") * self.num_blocks

    def add(self, fingerprint: bytes) -> bool:
        """Record a fingerprint.

        Args:
            fingerprint: any bytes, as Scrapy's request fingerprinter returns them.

        Returns:
            True if it was new. False if it was added before, or is a false positive.

        Raises:
            TypeError: fingerprint is not bytes.
        """
        block_hash, positions = self._locate(fingerprint)
        return self.add_hashed(block_hash, positions)

    def __contains__(self, fingerprint: bytes) -> bool:
        block_hash, positions = self._locate(fingerprint)
        return self.has_hashed(block_hash, positions)

    def add_hashed(self, block_hash: int, positions: list[int]) -> bool:
        """Record what a hasher returned for `num_hashes`; return whether it was new."""
        # This is block_of(), inlined here and below, because a call would double the time.
        block = (block_hash * self.num_blocks) >> BLOCK_HASH_BITS
        bits = self._views[block] if block < self._num_views else None
        if bits is None:
            bits = self._view(block)
        # In most cases, the first bit alone shows that a fingerprint is new.
        if bits[positions[0]] and bits[positions].all():
            return False
        bits[positions] = 1
        self.changed[block] = 1  # last, so that a thread that has cleared it meanwhile writes again
        return True

    def has_hashed(self, block_hash: int, positions: list[int]) -> bool:
        """Return whether the filter has what a hasher returned for at least `num_hashes`."""
        block = (block_hash * self.num_blocks) >> BLOCK_HASH_BITS
        bits = self._views[block] if block < self._num_views else None
        if bits is None:
            bits = self._view(block)
        if not (bits[positions[0]] and bits[positions[self._second]]):
            return False
        return bits[positions[: self.num_hashes]].all()

    def _view(self, block: int) -> bitarray:
        memory = self._buffer[block * sizing.BLOCK_BYTES : (block + 1) * sizing.BLOCK_BYTES]
        if self._load is not None and self._missing[block]:
            if data := self._load(block):
                memory[:] = data
            self._missing[block] = 0
        view = bitarray(buffer=memory, endian="big")
        if block < self._num_views:
            self._views[block] = view
        return view

    @property
    def fill_ratio(self) -> float:
        """The share of bits that are set, 0 to 1. Counting them takes time in a large filter."""
        return self._contents().fill_ratio

    @property
    def estimated_error_rate(self) -> float:
        """The current false-positive rate, 0 to 1, computed from the bits of all blocks."""
        return self._contents().error_rate

    @property
    def approximate_count(self) -> int:
        """The number of different fingerprints, estimated from the bits within about 1 %."""
        return self._contents().requests

    def _contents(self) -> sizing.Contents:
        return sizing.Contents.of(self._fills(), self.num_hashes)

    def _fills(self) -> Iterator[float]:
        return sizing.block_fills(self.blocks(block, block + 1) for block in range(self.num_blocks))

    def blocks(self, start: int, stop: int) -> memoryview:
        """Return a read-only view of the blocks from `start` up to, but not including, `stop`."""
        size = self._block_bytes
        for block in range(start, min(stop, len(self._missing))):
            if self._missing[block]:
                self._view(block)
        return self._buffer[start * size : stop * size].toreadonly()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(capacity={self.capacity}, error_rate={self.error_rate}, "
            f"num_blocks={self.num_blocks}, num_hashes={self.num_hashes})"
        )

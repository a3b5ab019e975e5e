"""The Bloom filter, whose blocks may be read when they are needed."""

import contextlib
import mmap
import sys
from collections.abc import Callable, Iterator
from typing import ClassVar

from bitarray import bitarray

from scrapy_bloom.filters.hashing import BLOCK_HASH_BITS, checked_salt, make_hasher
from scrapy_bloom.filters.sizing import (
    BLOCK_BYTES,
    Contents,
    Geometry,
    block_fills,
    choose_geometry,
)

# A view of a block takes about 350 bytes, and 0.3 µs to create. So each filter keeps the views of
# its first 512 MB (23 MB of views), and creates the others when they are needed.
_MAX_VIEWS = 65_536
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

    Raises:
        TypeError: an argument is of a wrong type.
        ValueError: an argument is out of range.
        MemoryError: the system has no address space for all blocks.

    Attributes:
        changed: for each block, 1 if a fingerprint was added to it. Set it to 0 before you copy the
            block.
    """

    _block_bytes: ClassVar = BLOCK_BYTES

    def __init__(self, capacity: int, error_rate: float, *, salt: bytes | None = None) -> None:
        self._begin(choose_geometry(capacity, error_rate), capacity, error_rate, checked_salt(salt))

    @classmethod
    def stored(
        cls,
        geometry: Geometry,
        *,
        capacity: int,
        error_rate: float,
        salt: bytes,
        load: Callable[[int], bytes | None] | None = None,
    ) -> "BloomFilter":
        """Return a filter of a known geometry, whose blocks are read when they are needed.

        Args:
            geometry: the blocks and hashes of the filter.
            capacity: the number of fingerprints for which it was sized, for information.
            error_rate: the false-positive rate p for which it was sized, for information.
            salt: the 16 bytes with which the blocks were filled.
            load: returns a block by its number, in `BLOCK_BYTES` bytes; None if it is empty.
                Without this function, all blocks are empty.

        Raises:
            MemoryError: the system has no address space for all blocks.
        """
        new = cls.__new__(cls)
        new._begin(geometry, capacity, error_rate, salt)  # noqa: SLF001 - our own
        if load is not None:
            new._load, new._missing = load, bytearray(b"\1") * geometry.num_blocks  # noqa: SLF001
        return new

    def _begin(self, geometry: Geometry, capacity: int, error_rate: float, salt: bytes) -> None:
        self.capacity = capacity
        self.error_rate = error_rate
        self.geometry = geometry
        self.salt = salt
        self._buffer = _zeros(geometry.num_blocks * self._block_bytes)
        self._num_blocks, self._num_hashes = geometry
        self._num_views = min(self._num_blocks, _MAX_VIEWS)
        self._views: list[bitarray | None] = [None] * self._num_views
        self._second = min(1, geometry.num_hashes - 1)
        self._locate = make_hasher(salt, geometry.num_hashes)
        self._load: Callable[[int], bytes | None] | None = None
        self._missing = bytearray()  # for each block: 1 if `_load` must be called first
        self.changed = bytearray(geometry.num_blocks)

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
        """Record a fingerprint that was hashed with this filter's salt; return whether it was new.

        Args:
            block_hash: the block hash from a hasher of `make_hasher`.
            positions: exactly `num_hashes` bit positions from that hasher.
        """
        # This is block_of(), inlined here and below, because a call would double the time.
        block = (block_hash * self._num_blocks) >> BLOCK_HASH_BITS
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
        """Return whether the filter has a fingerprint that was hashed with its salt.

        Args:
            block_hash: the block hash from a hasher of `make_hasher`.
            positions: at least `num_hashes` bit positions from that hasher; the first are used.
        """
        block = (block_hash * self._num_blocks) >> BLOCK_HASH_BITS
        bits = self._views[block] if block < self._num_views else None
        if bits is None:
            bits = self._view(block)
        if not (bits[positions[0]] and bits[positions[self._second]]):
            return False
        return bits[positions[: self._num_hashes]].all()

    def _view(self, block: int) -> bitarray:
        memory = self._buffer[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        if self._load is not None and self._missing[block]:
            if data := self._load(block):
                memory[:] = data
            self._missing[block] = 0
        view = bitarray(buffer=memory, endian="big")
        if block < self._num_views:
            self._views[block] = view
        return view

    @property
    def num_blocks(self) -> int:
        """Number of blocks of 65,536 bits."""
        return self.geometry.num_blocks

    @property
    def num_hashes(self) -> int:
        """k, the number of bits that a fingerprint sets."""
        return self.geometry.num_hashes

    @property
    def num_bits(self) -> int:
        """m, the number of bits (or counters)."""
        return self.geometry.num_bits

    @property
    def nbytes(self) -> int:
        """The size of all blocks in bytes."""
        return self.num_blocks * self._block_bytes

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

    def _contents(self) -> Contents:
        return Contents.of(self.block_fills(), self.num_hashes)

    def block_fills(self) -> Iterator[float]:
        """Yield the share of set bits of each block, 0 to 1, and count them one block at a time."""
        for block in range(self.num_blocks):
            yield from block_fills(self.blocks(block, block + 1))

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

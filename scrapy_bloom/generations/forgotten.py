"""The forgotten requests: an exact set of fingerprints that are new once more.

A Bloom filter cannot delete fingerprints. So forgotten fingerprints are stored in a set next to the
filter, and count as new although their bits are set. The set is read only for duplicates, and only
if bits in memory show that it may contain the fingerprint.
"""

import math
from collections.abc import Iterable, Sequence
from time import monotonic
from typing import Protocol

from bitarray import bitarray
from bitarray.util import zeros

_FIRST_ROOM = 4096  # fingerprints in the first table of bits; each next table has four times more
_BITS_EACH = 16  # per fingerprint, of which two are set: 1.4 % false positives
_LOOK_SECS = 1.0  # between two reads of the fingerprints that others have forgotten


class ForgottenStore(Protocol):
    """Stores the set in memory, in a file or in Redis; each method may raise a StorageError."""

    def news(self) -> Iterable[bytes]:
        """Return the fingerprints added by others since the last call, at first the whole set."""

    def all(self) -> Iterable[bytes]:
        """Return the whole set."""

    def add(self, fingerprints: Sequence[bytes]) -> None:
        """Add fingerprints; if they are in the set, they count as added now."""

    def take(self, fingerprint: bytes) -> bool:
        """Remove a fingerprint; return whether it was in the set."""

    def has(self, fingerprint: bytes) -> bool:
        """Return whether a fingerprint is in the set."""

    def expire(self, secs: float) -> None:
        """Remove fingerprints that were added more than `secs` seconds ago."""

    def close(self) -> None:
        """Close the file or connection."""


class MemoryForgotten:
    """The forgotten requests of a filter in memory."""

    def __init__(self) -> None:
        self._forgotten_at: dict[bytes, float] = {}

    def news(self) -> Iterable[bytes]:
        """Return nothing, because no other crawl uses the set."""
        return ()

    def all(self) -> Iterable[bytes]:
        """Return the whole set."""
        return self._forgotten_at

    def add(self, fingerprints: Sequence[bytes]) -> None:
        """Add fingerprints; if they are in the set, they count as added now."""
        self._forgotten_at |= dict.fromkeys(fingerprints, monotonic())

    def take(self, fingerprint: bytes) -> bool:
        """Remove a fingerprint; return whether it was in the set."""
        return self._forgotten_at.pop(fingerprint, None) is not None

    def has(self, fingerprint: bytes) -> bool:
        """Return whether a fingerprint is in the set."""
        return fingerprint in self._forgotten_at

    def expire(self, secs: float) -> None:
        """Remove fingerprints that were added more than `secs` seconds ago."""
        first = monotonic() - secs
        self._forgotten_at = {
            each: when for each, when in self._forgotten_at.items() if when >= first
        }

    def close(self) -> None:
        """Do nothing, because memory needs no closing."""


class Forgotten:
    """The set of forgotten fingerprints, with bits in memory that avoid most reads of its store.

    Each method may raise a StorageError.

    Attributes:
        is_empty: whether the set was empty at the last read.
    """

    def __init__(self, store: ForgottenStore) -> None:
        self.is_empty = True
        self._store = store
        self._front = _Front()
        self._misses = 0  # reads of the store in vain, for false positives of the bits
        self._look_at = math.inf  # on a monotonic clock

    def open(self) -> None:
        """Read the set."""
        self._front = _Front()
        self._look()

    def use(self, store: ForgottenStore) -> None:
        """Use another store from now on, and read its set."""
        self._store = store
        self._front = _Front()
        self.show(store.all())

    def take(self, fingerprint: bytes) -> bool:
        """Remove a fingerprint; return whether it was in the set."""
        return self.may_have(fingerprint) and (self._store.take(fingerprint) or self._missed())

    def __contains__(self, fingerprint: bytes) -> bool:
        return self.may_have(fingerprint) and (self._store.has(fingerprint) or self._missed())

    def may_have(self, fingerprint: bytes) -> bool:
        """Return False if a fingerprint is certainly not in the set, without reading the store."""
        if monotonic() >= self._look_at:
            self._look()
        return not self.is_empty and fingerprint in self._front

    def add(self, fingerprints: Sequence[bytes]) -> None:
        """Add fingerprints, so that they are new once more, in this run or a later one."""
        self._store.add(fingerprints)
        self.show(fingerprints)

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def _look(self) -> None:
        self._look_at = monotonic() + _LOOK_SECS
        self.show(self._store.news())

    def show(self, fingerprints: Iterable[bytes]) -> None:
        """Add fingerprints that are in the store already."""
        self._front.add(fingerprints)
        self.is_empty = not len(self._front)

    def _missed(self) -> bool:
        """Return False; after many reads of the store in vain, build the bits again."""
        self._misses += 1
        if self._misses > max(_FIRST_ROOM, len(self._front)):
            front = _Front()
            front.add(self._store.all())
            self._front, self._misses = front, 0
        return False


class _Front:
    """A small Bloom filter in memory, about two bytes per fingerprint.

    It is not a `BloomFilter` because every duplicate is looked up here: Python has cached the
    hash() of its fingerprint, so a lookup takes 0.1 us, instead of 0.6 us with MurmurHash3.
    """

    def __init__(self) -> None:
        self._tables: list[tuple[bitarray, int]] = []
        self._length = self._room = 0

    def __len__(self) -> int:
        return self._length

    def add(self, fingerprints: Iterable[bytes]) -> None:
        for fingerprint in fingerprints:
            if self._length >= self._room:
                room = _FIRST_ROOM * 4 ** len(self._tables)
                self._room += room
                self._tables.append((zeros(_BITS_EACH * room), _BITS_EACH * room - 1))
            self._length += 1
            bits, mask = self._tables[-1]
            # Python salts this hash, and caches it in the object.
            value = hash(fingerprint)
            bits[value & mask] = bits[value >> 32 & mask] = 1

    def __contains__(self, fingerprint: bytes) -> bool:
        value = hash(fingerprint)
        for bits, mask in self._tables:  # noqa: SIM110 - any() takes 50 % longer
            if bits[value & mask] and bits[value >> 32 & mask]:
                return True
        return False

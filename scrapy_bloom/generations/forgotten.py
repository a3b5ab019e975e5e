"""The requests that are to be crawled again, whatever the filter says: an exact set.

A Bloom filter cannot forget. So forgotten fingerprints are kept next to it: one that is in this set
is new once, although its bits are set. The set is asked only about what the filter reports as a
duplicate, and only if bits in memory say that the fingerprint may be in it.
"""

import math
from collections.abc import Iterable, Sequence
from time import monotonic
from typing import Protocol

from bitarray import bitarray
from bitarray.util import zeros

_FIRST_ROOM = 4096  # fingerprints in the first table of bits; in the next, four times as many
_BITS_EACH = 16  # with two bits a fingerprint: 1.4 % of the others are asked for in vain
_LOOK_SECS = 1.0  # between two looks at what others have forgotten


class ForgottenStore(Protocol):
    """Keeps the set in memory, in a file or in Redis. Each method may raise a StorageError."""

    def news(self) -> Iterable[bytes]:
        """Return what others have added since the last call; everything at the first call."""

    def all(self) -> Iterable[bytes]:
        """Return the whole set."""

    def add(self, fingerprints: Sequence[bytes]) -> None:
        """Add fingerprints; those that are there count as added now."""

    def take(self, fingerprint: bytes) -> bool:
        """Take a fingerprint out; return whether it was there."""

    def has(self, fingerprint: bytes) -> bool:
        """Return whether a fingerprint is in the set."""

    def expire(self, secs: float) -> None:
        """Remove what was added longer ago than that."""

    def close(self) -> None:
        """Close what the set is kept in."""


class MemoryForgotten:
    """The forgotten requests of a filter in memory."""

    def __init__(self) -> None:
        self._forgotten_at: dict[bytes, float] = {}

    def news(self) -> Iterable[bytes]:
        """Return nothing: there are no others."""
        return ()

    def all(self) -> Iterable[bytes]:
        """Return the whole set."""
        return self._forgotten_at

    def add(self, fingerprints: Sequence[bytes]) -> None:
        """Add fingerprints; those that are there count as added now."""
        self._forgotten_at |= dict.fromkeys(fingerprints, monotonic())

    def take(self, fingerprint: bytes) -> bool:
        """Take a fingerprint out; return whether it was there."""
        return self._forgotten_at.pop(fingerprint, None) is not None

    def has(self, fingerprint: bytes) -> bool:
        """Return whether a fingerprint is in the set."""
        return fingerprint in self._forgotten_at

    def expire(self, secs: float) -> None:
        """Remove what was added longer ago than that."""
        first = monotonic() - secs
        self._forgotten_at = {
            each: when for each, when in self._forgotten_at.items() if when >= first
        }

    def close(self) -> None:
        """Do nothing: memory needs no closing."""


class Forgotten:
    """The set, behind bits in memory that keep almost all questions away from its store.

    Each method may fail as that does: StorageError.

    Attributes:
        is_empty: nothing was in it when it was last looked at.
    """

    def __init__(self, store: ForgottenStore) -> None:
        self.is_empty = True
        self._store = store
        self._front = _Front()
        self._misses = 0  # of the store, though the bits were set
        self._look_at = math.inf  # on a monotonic clock

    def open(self) -> None:
        """Read what is there."""
        self._front = _Front()
        self._look()

    def use(self, store: ForgottenStore) -> None:
        """Keep the set there from now on, and read what is there."""
        self._store = store
        self._front = _Front()
        self._show(store.all())

    def take(self, fingerprint: bytes) -> bool:
        """Take a fingerprint out; return whether it was forgotten."""
        return self.may_have(fingerprint) and (self._store.take(fingerprint) or self._missed())

    def __contains__(self, fingerprint: bytes) -> bool:
        return self.may_have(fingerprint) and (self._store.has(fingerprint) or self._missed())

    def may_have(self, fingerprint: bytes) -> bool:
        """Return False if a fingerprint is not forgotten, without a question to the store."""
        if monotonic() >= self._look_at:
            self._look()
        return not self.is_empty and fingerprint in self._front

    def add(self, fingerprints: Sequence[bytes]) -> None:
        """Let recorded fingerprints be new once more, in this run or a later one."""
        self._store.add(fingerprints)
        self._show(fingerprints)

    def expire(self, secs: float) -> None:
        """Remove what was forgotten longer ago than that."""
        self._store.expire(secs)

    def close(self) -> None:
        """End the run."""
        self._store.close()

    def _look(self) -> None:
        self._look_at = monotonic() + _LOOK_SECS
        self._show(self._store.news())

    def _show(self, fingerprints: Iterable[bytes]) -> None:
        self._front.add(fingerprints)
        self.is_empty = not len(self._front)

    def _missed(self) -> bool:
        """Return False; build the bits again after many questions in vain."""
        self._misses += 1
        if self._misses > max(_FIRST_ROOM, len(self._front)):
            front = _Front()
            front.add(self._store.all())
            self._front, self._misses = front, 0
        return False


class _Front:
    """Bits in memory that tell what cannot be in the set; about two bytes a fingerprint.

    No `BloomFilter`, although it works as one: every duplicate is asked for here, and the hash() of
    its fingerprint is known already. That takes 0.1 us; another MurmurHash3 and its positions take
    0.6 us.
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
            # It is salted, and kept in the object: a repeated link has it already.
            value = hash(fingerprint)
            bits[value & mask] = bits[value >> 32 & mask] = 1

    def __contains__(self, fingerprint: bytes) -> bool:
        value = hash(fingerprint)
        for bits, mask in self._tables:  # noqa: SIM110 - any() takes half as long again
            if bits[value & mask] and bits[value >> 32 & mask]:
                return True
        return False

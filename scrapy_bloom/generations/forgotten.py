"""The forgotten requests: an exact set of fingerprints that are new once more.

A Bloom filter cannot delete fingerprints. So forgotten fingerprints are stored in a set next to the
filter, and count as new although their bits are set.
"""

import math
from collections.abc import Iterable, Sequence
from time import monotonic
from typing import Protocol

_LOOK_SECS = 1.0  # between two reads of the fingerprints that others have forgotten


class ForgottenStore(Protocol):
    """Stores the set in memory, in a file or in Redis; each method may raise a StorageError."""

    def news(self) -> Iterable[bytes]:
        """Return the fingerprints added by others since the last call, at first the whole set."""

    def all(self) -> Iterable[bytes]:
        """Return the whole set."""

    def add(self, fingerprints: Sequence[bytes]) -> None:
        """Add fingerprints; if they are in the set, they count as added now."""

    def remove(self, fingerprint: bytes) -> None:
        """Remove a fingerprint, if it is in the set."""

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

    def remove(self, fingerprint: bytes) -> None:
        """Remove a fingerprint, if it is in the set."""
        self._forgotten_at.pop(fingerprint, None)

    def expire(self, secs: float) -> None:
        """Remove fingerprints that were added more than `secs` seconds ago."""
        first = monotonic() - secs
        self._forgotten_at = {
            each: when for each, when in self._forgotten_at.items() if when >= first
        }

    def close(self) -> None:
        """Do nothing, because memory needs no closing."""


class Forgotten:
    """The set of forgotten fingerprints, in memory and in its store.

    Each method may raise a StorageError.

    Attributes:
        known: the fingerprints in the store, as of the last look. If other crawls share the store,
            they may have removed some of them.
    """

    def __init__(self, store: ForgottenStore) -> None:
        self.known: set[bytes] = set()
        self._store = store
        self._look_at = math.inf  # on a monotonic clock

    def open(self) -> None:
        """Read what others have added, at first the whole set."""
        self._look_at = monotonic() + _LOOK_SECS
        self.show(self._store.news())

    def use(self, store: ForgottenStore) -> None:
        """Use another store from now on, and read its set."""
        self._store = store
        self.known = set(store.all())

    def take(self, fingerprint: bytes) -> bool:
        """Remove a fingerprint; return whether it was in the set."""
        if fingerprint not in self:
            return False
        self._store.remove(fingerprint)
        self.known.discard(fingerprint)
        return True

    def __contains__(self, fingerprint: bytes) -> bool:
        if monotonic() >= self._look_at:
            self.open()
        return fingerprint in self.known

    def add(self, fingerprints: Sequence[bytes]) -> None:
        """Add fingerprints, so that they are new once more, in this run or a later one."""
        self._store.add(fingerprints)
        self.show(fingerprints)

    def show(self, fingerprints: Iterable[bytes]) -> None:
        """Add fingerprints that are in the store already."""
        self.known.update(fingerprints)

    def close(self) -> None:
        """Close the store."""
        self._store.close()

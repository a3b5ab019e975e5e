"""Asking and recording over several filters as if they were one."""

from collections.abc import Sequence

from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.filters.hashing import make_hasher


class Recent(set[bytes]):
    """Fingerprints met of late that the generations hold; to be emptied when these change.

    A link that is on every page is found here, without a look at its bits.

    Args:
        most: how many; then it is emptied, since what is met often is soon back.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def note(self, fingerprint: bytes) -> None:
        """Note a fingerprint that they hold."""
        if len(self) >= self._most:
            self.clear()
        self.add(fingerprint)


class Lookup:
    """The filters of all live generations, oldest first, asked at once.

    A fingerprint is hashed once for all of them: they have one salt, and those with fewer hashes
    take the first ones.
    """

    def __init__(self, live: Sequence[BloomFilter]) -> None:
        self.newest = live[-1]
        # The newest of the others first: it is the largest, and holds most of what is asked for.
        self._others = list(reversed(live[:-1]))
        self._num_hashes = self.newest.num_hashes
        most = max(each.num_hashes for each in live)
        self._exact = most == self._num_hashes
        self._locate = make_hasher(self.newest.salt, most)

    def add(self, fingerprint: bytes) -> bool:
        """Record a fingerprint in the newest generation, unless any holds it; True if new."""
        block_hash, positions = self._locate(fingerprint)
        for each in self._others:
            if each.has_hashed(block_hash, positions):
                return False
        if not self._exact:
            positions = positions[: self._num_hashes]
        return self.newest.add_hashed(block_hash, positions)

    def __contains__(self, fingerprint: bytes) -> bool:
        block_hash, positions = self._locate(fingerprint)
        if self.newest.has_hashed(block_hash, positions):
            return True
        # Mostly there are none, and a generator takes longer than this look.
        return bool(self._others) and any(
            each.has_hashed(block_hash, positions) for each in self._others
        )

"""A crawl's view of a shared filter: which generations count, and their mirrors."""

import logging
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.filters.hashing import Hashed, make_hasher
from scrapy_bloom.generations.lifecycle import Run
from scrapy_bloom.generations.lookup import Recent
from scrapy_bloom.generations.policy import Origin, Policy
from scrapy_bloom.redis.keys.meta import FilterInfo, RedisGeneration, Stored
from scrapy_bloom.text import counted

logger = logging.getLogger(__name__)

MAX_MIRROR_BYTES = 1 << 30  # of all generations together; the server is asked for the others
_MOST_RECENT = 65_536  # 6 MB of fingerprints


@dataclass(frozen=True, eq=False)
class View:
    """The generations of a shared filter, as a crawl knows them; at each change another view."""

    info: FilterInfo
    live: Sequence[RedisGeneration] = ()  # oldest first; empty if none is known
    # Expired, with a mirror, and this run has recorded in them: it asks their mirrors.
    kept: Sequence[RedisGeneration] = ()
    # To find one in a mirror takes seven times as long.
    _recent: Recent = field(default_factory=lambda: Recent(_MOST_RECENT), init=False)

    @property
    def newest(self) -> RedisGeneration:
        """Return the generation that takes what is new."""
        return self.live[-1]

    @cached_property
    def older(self) -> Sequence[RedisGeneration]:
        """Return the other live ones, newest first."""
        return self.live[-2::-1]

    @cached_property
    def mirrors(self) -> Sequence[BloomFilter]:
        """Return the mirrors, the newest first."""
        asked = [*self.kept, *self.live]
        return [each.mirror for each in reversed(asked) if each.mirror is not None]

    @cached_property
    def locate(self) -> Callable[[bytes], Hashed]:
        """Return what hashes a fingerprint for all of them: see `make_hasher`."""
        most = max(each.geometry.num_hashes for each in [*self.kept, *self.live])
        return make_hasher(bytes.fromhex(self.info.salt), most)

    def hash_of_unknown(self, fingerprint: bytes) -> Hashed | None:
        """Hash a fingerprint; None if a mirror has it."""
        if fingerprint in self._recent:
            return None
        block_hash, positions = hashed = self.locate(fingerprint)
        for mirror in self.mirrors:
            if mirror.has_hashed(block_hash, positions):
                self.note_known(fingerprint)
                return None
        return hashed

    def note_known(self, fingerprint: bytes) -> None:
        """Note that a generation has a fingerprint; without mirrors, the server is asked anyway."""
        if self.mirrors:
            self._recent.note(fingerprint)

    def is_of(self, stored: Stored) -> bool:
        """Check that this filter is stored."""
        return stored.info is not None and stored.info.epoch == self.info.epoch

    def is_lost(self, stored: Stored) -> bool:
        """Check whether all is gone, or a crawler that knew less has written back what was lost.

        Not so if the filter was removed on purpose, or if there is another one.
        """
        if stored.info is None:
            return not stored.was_reset
        number = stored.generations[-1].number if stored.generations else 0
        return self.is_of(stored) and number < self.newest.number

    def then(self, stored: Stored, run: Run, *, mirror: bool) -> "View":
        """Return the view of what is stored now; what is known of the same generations stays.

        The run keeps some of the generations that have expired. With `mirror`, each one gets a
        mirror, as long as there is room.
        """
        assert stored.info is not None
        known = {each.id: each for each in self.live} if self.is_of(stored) else {}
        kept = list(self.kept) if self.is_of(stored) else []
        live = []
        for each in stored.generations:
            same = known.pop(each.id, each)
            same.count, same.open_until = each.count, each.open_until
            live.append(same)
        kept += [each for each in known.values() if each.mirror is not None and run.keeps(each)]
        if mirror:
            _add_mirrors(live, kept, salt=bytes.fromhex(stored.info.salt))
        return View(stored.info, live, kept)


def _add_mirrors(
    live: Sequence[RedisGeneration], kept: Sequence[RedisGeneration], salt: bytes
) -> None:
    used = sum(each.geometry.nbytes for each in [*kept, *live] if each.mirror is not None)
    for each in reversed(live):
        nbytes = each.geometry.nbytes
        if each.mirror is None and used + nbytes <= MAX_MIRROR_BYTES:
            used += nbytes
            each.mirror = BloomFilter.over(
                memoryview(mmap.mmap(-1, nbytes)),
                each.geometry,
                capacity=each.capacity,
                error_rate=each.error_rate,
                salt=salt,
            )
            each.complete = bytearray(each.geometry.num_blocks)


def log_differences(view: View, policy: Policy, origin: Origin, name: str) -> None:
    """Log how a filter that is there differs from what a crawl's settings ask for."""
    live, differences = view.live, []
    if origin.salt not in {None, bytes.fromhex(view.info.salt)}:
        differences.append("its own salt (BLOOM_SALT is for a new one)")
    capacity = sum(each.capacity for each in live)
    if not policy.window and policy.first().capacity > capacity:
        differences.append(f"room for {counted(capacity, 'request')}")
    error_rate = sum(each.error_rate for each in live)
    if policy.is_exceeded(error_rate):
        differences.append(f"an error rate of {error_rate:.2g}")
    if bool(policy.window) != bool(view.newest.open_until):
        differences.append("a time window" if view.newest.open_until else "no time window")
    if differences:
        logger.info(
            "This crawl joins %s, which was made with other settings and stays as it is: %s. "
            "The settings count for further generations; all crawlers that share a filter "
            "should have the same",
            name,
            ", ".join(differences),
        )

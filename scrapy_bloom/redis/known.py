"""Knowledge that a crawl has of a shared filter: which generations count, and their mirrors."""

import mmap
from collections.abc import Callable

from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.filters.hashing import Hashed, make_hasher
from scrapy_bloom.generations.lifecycle import Run
from scrapy_bloom.generations.policy import Policy
from scrapy_bloom.redis.keys.meta import FilterInfo, RedisGeneration, Stored

MAX_MIRROR_BYTES = 1 << 30  # of all generations together; what is beyond is asked for each time


class KnownGenerations:
    """The generations of a shared filter, as far as this crawl knows of them.

    Args:
        policy: has the window.
        mirror: whether to keep a mirror of each generation.

    Attributes:
        info: what all of them have in common.
        live: oldest first; empty before the first `adopt`, and after `forget`. Each `adopt` makes
            another list.
        kept: expired, with a mirror, and this run has recorded in them: it asks their mirrors.
        run: says which ones.
        mirrors: of all that have one, newest first.
        locate: hashes a fingerprint for all of them; see `scrapy_bloom.filters.hashing`.
        voided: how often all that was known here turned out to be void.
    """

    info: FilterInfo
    locate: Callable[[bytes], Hashed]

    def __init__(self, policy: Policy, *, mirror: bool) -> None:
        self.live: list[RedisGeneration] = []
        self.kept: list[RedisGeneration] = []
        self.mirrors: list[BloomFilter] = []
        self.voided = 0
        self.run = Run(policy)
        self._with_mirror = mirror

    @property
    def newest(self) -> RedisGeneration:
        """Return the generation that takes what is new."""
        return self.live[-1]

    @property
    def older(self) -> list[RedisGeneration]:
        """Return the other live ones, newest first."""
        return self.live[-2::-1]

    def are_of(self, stored: Stored) -> bool:
        """Check that what is stored is the filter that is known here."""
        return stored.info is not None and stored.info.epoch == self.info.epoch

    def adopt(self, stored: Stored) -> None:
        """Go on with these generations: at least one, of this filter or another one."""
        assert stored.info is not None
        if self.live and not self.are_of(stored):
            self.forget()
        self.info = stored.info
        known = {each.id: each for each in self.live}
        self.live = []
        for each in stored.generations:
            same = known.pop(each.id, each)
            same.count, same.open_until = each.count, each.open_until
            self.live.append(same)
        gone = [each for each in known.values() if each.mirror is not None]
        self.kept += [each for each in gone if self.run.keeps(each)]
        self._mirror()
        most = max(each.geometry.num_hashes for each in [*self.kept, *self.live])
        self.locate = make_hasher(bytes.fromhex(self.info.salt), most)

    def forget(self) -> None:
        """Forget all of them: they are void."""
        self.live, self.kept, self.mirrors = [], [], []
        self.voided += 1
        self.run.begin_anew()

    def begin_run(self, now: float) -> None:
        """Keep what is recorded from now on, also when it expires."""
        self.run.begin(self.newest.number if self.live else 1, now)

    def _mirror(self) -> None:
        """Give a mirror to each new generation, as long as there is room for it."""
        asked = [*self.kept, *self.live]
        used = sum(each.geometry.nbytes for each in asked if each.mirror is not None)
        for each in reversed(self.live):
            nbytes = each.geometry.nbytes
            fits = used + nbytes <= MAX_MIRROR_BYTES
            if each.mirror is None and self._with_mirror and fits:
                used += nbytes
                each.mirror = BloomFilter.over(
                    memoryview(mmap.mmap(-1, nbytes)),
                    each.geometry,
                    capacity=each.capacity,
                    error_rate=each.error_rate,
                    salt=bytes.fromhex(self.info.salt),
                )
                each.complete = bytearray(each.geometry.num_blocks)
        self.mirrors = [each.mirror for each in reversed(asked) if each.mirror is not None]

"""Divide the limits of slots among the workers of a shared queue, without a state per slot.

Each worker knows how many workers take requests, n, and its rank r among them, in the order in
which they joined. The hash of its name puts a slot into one of n parts, i = floor(hash * n / 2^32).
Of a limit L, a worker has the share L // n, and 1 more if (i + r) % n < L % n. The shares of all
workers sum to L. A slot with a delay has its whole limit in the worker with (i + r) % n == 0, whose
downloader keeps the delay. So the slots of which a worker has a share are contiguous by hash.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from scrapy_bloom.queues.store import ANY_NUMBER, END_OF_SLOTS, Share, slot_key

_HASHES = 2**32
_GROWS_SECS = 1.0  # until all workers know that the membership has changed


class Limit(NamedTuple):
    """The limit of a slot of the downloader."""

    concurrency: int = 0  # how many of its requests may be downloaded at a time; 0: any number
    delay: float = 0.0  # seconds between its downloads


class Limits(NamedTuple):
    """The limits of the slots of a crawl."""

    usual: Limit = Limit()  # the limit of each slot without a limit of its own
    slots: Mapping[str, Limit] = MappingProxyType({})  # the limits of slots that have their own


class Membership(NamedTuple):
    """The place of a worker among those that take requests."""

    workers: int  # how many there are
    rank: int  # its place in the order in which they joined, from 0 on; -1: it is none of them

    def share(self, limit: Limit, slot_hash: int) -> int:
        """Return the share of a limit of a slot."""
        concurrency, delay = limit
        if not concurrency and not delay:
            return ANY_NUMBER
        place = (slot_hash * self.workers // _HASHES + self.rank) % self.workers
        if self.rank < 0 or (delay and place):
            return 0
        if delay:
            return concurrency or ANY_NUMBER
        return concurrency // self.workers + (place < concurrency % self.workers)

    def cuts(self, limit: Limit) -> Iterator[int]:
        """Return the hashes from which on the share of a limit is another."""
        for place in (0, 1 if limit.delay else limit.concurrency % self.workers):
            part = (place - self.rank) % self.workers
            yield -(-part * _HASHES // self.workers)


NO_MEMBER = Membership(1, -1)


class Shares:
    """The shares that a worker has of the limits of slots.

    A share that has fallen counts at once. A share that has grown counts after a second, or after
    the delay of the slot if that is longer: until then, another worker may not know of the change,
    or may have begun a download just before.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._special = [(slot_key(slot), limit) for slot, limit in limits.slots.items()]
        self._longest = max(_secs(limit) for limit in (limits.usual, *limits.slots.values()))
        self._membership = NO_MEMBER
        self._former: list[tuple[float, Membership]] = []  # each with the time of its end

    def change(self, membership: Membership, now: float) -> bool:
        """Set the membership, as the last reply tells it; return whether it has changed."""
        former = self._membership
        self._membership = membership = membership if membership.rank >= 0 else NO_MEMBER
        if membership == former:
            return False
        self._former = [ended for ended in self._former if ended[0] > now - self._longest]
        if self._former or former != NO_MEMBER or membership.workers > 1:  # else it is the first
            self._former.append((now, former))
        return True

    def of(self, slot: str, now: float) -> int:
        """Return how many requests of a slot this worker may download at a time."""
        limit = self._limits.slots.get(slot, self._limits.usual)
        return self._least(limit, slot_key(slot), now)

    def ranges(self, now: float) -> list[Share]:
        """Return the slots of which this worker has a share, in the order of their keys."""
        usual = self._limits.usual
        cuts = {cut for member in self._counted(usual, now) for cut in member.cuts(usual)}
        own = {key + b"\0": limit for key, limit in self._special}
        after = {key + b"\1" for key, _ in self._special}
        firsts = sorted({*(cut.to_bytes(4, "big") for cut in cuts | {0}), *own, *after})
        return [
            Share(first, last, number)
            for first, last in zip(firsts, [*firsts[1:], END_OF_SLOTS], strict=True)
            if (number := self._least(own.get(first, usual), first, now))
        ]

    def _least(self, limit: Limit, key: bytes, now: float) -> int:
        slot_hash = int.from_bytes(key[:4], "big")
        return min(member.share(limit, slot_hash) for member in self._counted(limit, now))

    def _counted(self, limit: Limit, now: float) -> Iterator[Membership]:
        """Return the memberships that no share of a limit may exceed."""
        yield self._membership
        for ended, membership in self._former:
            if ended > now - _secs(limit):
                yield membership


def _secs(limit: Limit) -> float:
    return max(_GROWS_SECS, limit.delay)

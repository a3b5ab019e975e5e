"""The queue of CrashSafeScheduler in several shards, each with the filter of its requests.

A shard is complete in itself: see `scrapy_bloom.queues.shared`. What a batch has found goes to its
shards at once; what is done waits until all of them have answered. So whatever happens between two
shards, a request leaves its queue only when all that it led to is stored.
"""

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.queues.batch import Found, Limits
from scrapy_bloom.queues.shared import Reply, SharedBatch, SharedStore, VoidError
from scrapy_bloom.redis.backend import MOST_LOSSES, RedisBackend
from scrapy_bloom.redis.filter import OtherFilterError, SharedFilter
from scrapy_bloom.redis.shards import ShardedBackend, shard_of


def shard_of_request(found: Found, shards: int) -> int:
    """Return which shard has a request, pending or not, and its fingerprint."""
    return shard_of(found.data if found.fingerprint is None else found.fingerprint, shards)


def store_of(
    shards: Sequence[SharedFilter],
    spider: str,
    *,
    by_slot: bool,
    lease_secs: float,
    limits: Limits | None = None,
    most_of_slot: int = 0,
) -> "SharedStore | ShardedStore":
    """Make a worker's end of a queue, with the filters of its shards: see `SharedStore`."""
    stores = [
        SharedStore(
            each,
            spider,
            by_slot=by_slot,
            lease_secs=lease_secs,
            limits=limits,
            most_of_slot=most_of_slot,
            has_start=each is shards[0],
        )
        for each in shards
    ]
    return stores[0] if len(stores) == 1 else ShardedStore(stores)


def rejoin(
    store: "SharedStore | ShardedStore",
    backend: RedisBackend | ShardedBackend,
    error: OtherFilterError,
) -> None:
    """Go on with the filter and queue that there are, after the server has lost what was there.

    Raises a StorageError, also if it goes on losing them.
    """
    for _ in range(MOST_LOSSES):
        try:
            backend.start_over(error)
            store.join()
        except OtherFilterError as again:
            error = again
        else:
            return
    raise StorageError(f"the queue in {store.name} is lost each time it is made; start again")


class ShardedStore:
    """One worker's end of all shards: see `SharedStore`, which has the same names.

    Each batch goes to all shards, in turn. So they have its number in common, and each renews the
    worker's lease. The first shard has the spider's start().
    """

    def __init__(self, stores: Sequence[SharedStore]) -> None:
        self.name = stores[0].name
        self.shards = len(stores)
        self.limits = Limits()  # a shard sees its part of a slot only
        self._stores = stores
        self._waiting = SharedBatch()  # until all shards have what it led to
        self._parts: list[SharedBatch] = []  # of the batch that is under way
        self._replies: dict[int, Reply] = {}  # to them
        self._last_known: dict[int, int] = {}  # by the shards that were joined again
        self._turn = 0

    @property
    def others(self) -> int:
        """Return how many other workers there are: whoever leaves, leaves the first shard last."""
        return self._stores[0].others

    @property
    def pending(self) -> int:
        """Return how many requests can be taken."""
        return sum(each.pending for each in self._stores)

    @property
    def aside(self) -> int:
        """Return how many requests are set aside."""
        return sum(each.aside for each in self._stores)

    @property
    def held(self) -> int:
        """Return how many requests this worker has."""
        return sum(each.held for each in self._stores)

    @property
    def ended_at(self) -> float:
        """Return since when nothing is left, in seconds since 1970; 0: something is."""
        ends = [each.ended_at for each in self._stores]
        return max(ends) if all(ends) else 0.0

    def join(self) -> None:
        """Become a new worker, which holds nothing; what it held before is pending again."""
        self._last_known = {}
        self._join_rest()

    def _join_rest(self) -> Sequence[int]:
        for shard, each in enumerate(self._stores):
            if shard not in self._last_known:
                self._last_known[shard] = each.join()
        self._waiting, self._parts, self._replies = SharedBatch(), [], {}
        last_known = [self._last_known[shard] for shard in range(self.shards)]
        self._last_known = {}
        return last_known

    def apply(self, batch: SharedBatch) -> Reply:
        """Apply a batch; raises VoidError if a shard does not know this worker any more.

        After any other error, the next call goes on with what is left of this batch.
        """
        if not self._last_known and self._apply(batch):
            return self._merged(batch)
        raise VoidError(self.name, *self._join_rest())

    def _apply(self, batch: SharedBatch) -> bool:
        """Send each shard its part, if it has not answered that; False: one forgot this worker."""
        if not self._parts:
            self._parts, self._turn = self._split(batch), self._turn + 1
        in_turn = [(self._turn + place) % self.shards for place in range(self.shards)]
        in_turn.sort(key=lambda shard: self._stores[shard].pending > 0)  # so the rest is to be had
        for place, shard in enumerate(in_turn):
            if shard in self._replies:
                continue
            store, part = self._stores[shard], self._parts[shard]
            others = [each for each in self._stores if each is not store]
            is_alone = batch.stands_still or not any(each.held for each in others)
            part.has_others = not is_alone or any(each.pending for each in others)
            if not any(each.has_suspect for each in others):
                want = batch.want - sum(len(each.taken) for each in self._replies.values())
                room = [self._stores[each].pending + 1 for each in in_turn[place:]]
                part.want = math.ceil(want * room[0] / sum(room))
            reply = store.attempt(part)
            if reply is None:
                return False
            self._replies[shard] = reply
        return True

    def _split(self, batch: SharedBatch) -> list[SharedBatch]:
        # A shard knows which ids are its own.
        parts = [
            SharedBatch(
                done=self._waiting.done,
                set_aside=batch.set_aside,
                downloads=batch.downloads,
                stands_still=batch.stands_still,
                may_start=batch.may_start,
                start_ended=self._waiting.start_ended,
                is_over=batch.is_over,
            )
            for _ in self._stores
        ]
        for found in batch.found:
            parts[shard_of_request(found, self.shards)].found.append(found)
        for each in self._waiting.recorded:
            parts[shard_of(each, self.shards)].recorded.append(each)
        for each in batch.forgotten:
            parts[shard_of(each, self.shards)].forgotten.append(each)
        return parts

    def _merged(self, batch: SharedBatch) -> Reply:
        replies = [self._replies[shard] for shard in range(self.shards)]
        self._parts, self._replies = [], {}
        self._waiting = SharedBatch(
            done=batch.done, recorded=batch.recorded, start_ended=batch.start_ended
        )
        answers = [iter(each.answers) for each in replies]
        shards = [shard_of_request(found, self.shards) for found in batch.found]
        expired: Counter[str] = Counter()
        for each in replies:
            expired.update(dict(each.expired))
        return Reply(
            # If the first answer was lost, all of them are recorded.
            answers="".join(next(answers[shard], "n") for shard in shards),
            taken=[taken for each in replies for taken in each.taken],
            runs_start=replies[0].runs_start,
            is_started=replies[0].is_started,
            left=sum(each.left for each in replies),
            pending=self.pending,
            held=self.held,
            has_suspect=any(each.has_suspect for each in replies),
            counters=tuple(each for reply in replies for each in reply.counters),
            ended_at=self.ended_at,
            died=[data for each in replies for data in each.died],
            expired=list(expired.items()),
            is_stopped=any(each.is_stopped for each in replies),
            number=replies[0].number,
        )

    def requeue(self, kind: str) -> int:
        """Let requests that were set "aside", or are "dead", be pending again; how many."""
        return sum(each.requeue(kind) for each in self._stores)

    def leave(self) -> None:
        """Give back what was taken and is not done, and leave the queue to the others."""
        with suppress(OtherFilterError):
            self.apply(SharedBatch())  # what waits
        for each in reversed(self._stores):
            each.leave()

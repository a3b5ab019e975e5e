"""The queue of CrashSafeScheduler in several shards, each with the filter of its requests.

Each shard is a queue with a filter of its own. The requests that a batch has found go to their
shards at once; the requests that it reports as done are sent with the next batch, when all shards
have replied. So a request leaves its queue only when every request it led to is stored, whichever
shard fails.
"""

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.queues.batch import Found, Limits
from scrapy_bloom.queues.shared import RejoinedError, Reply, SharedBatch, SharedStore
from scrapy_bloom.redis.backend import MOST_LOSSES, RedisBackend
from scrapy_bloom.redis.filter import OtherFilterError, SharedFilter
from scrapy_bloom.redis.shards import ShardedBackend, shard_of


def shard_of_request(found: Found, shards: int) -> int:
    """Return the index of the shard that stores a request and its fingerprint."""
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
    """Return the access of a worker to a queue, split or not.

    `SharedStore` documents the arguments; `shards` are the filters of all shards.
    """
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
    """Join the current filter and queue after the server has lost the former ones.

    Raises a StorageError, also if the server loses them again and again.
    """
    for _ in range(MOST_LOSSES):
        try:
            backend.start_over(error)
            store.join()
        except OtherFilterError as again:
            error = again
        else:
            return
    raise StorageError(
        f"the server loses the queue in {store.name} again and again; check its memory and its "
        "maxmemory-policy, and start the crawl again"
    )


class ShardedStore:
    """The access of one worker to all shards, with the interface of `SharedStore`.

    Each batch goes to all shards, one after the other. So its number is the same in all shards, and
    each shard renews the worker's lease. The first shard has the spider's start().
    """

    def __init__(self, stores: Sequence[SharedStore]) -> None:
        self.name = stores[0].name
        self.shards = len(stores)
        self.limits = Limits()  # none: a shard has only a part of the requests of a slot
        self._stores = stores
        self._deferred = SharedBatch()  # sent when all shards have what these requests led to
        self._parts: list[SharedBatch] = []  # of the current batch
        self._replies: dict[int, Reply] = {}  # to the parts
        self._last_known: dict[int, int] = {}  # results of `join`, by shard
        self._turn = 0

    @property
    def others(self) -> int:
        """Return how many other workers there are: each worker leaves the first shard last."""
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
    def leased(self) -> int:
        """Return how many requests are leased to this worker."""
        return sum(each.leased for each in self._stores)

    @property
    def ended_at(self) -> float:
        """Return when the queue became empty, in seconds since 1970; 0: it is not empty."""
        ends = [each.ended_at for each in self._stores]
        return max(ends) if all(ends) else 0.0

    def join(self) -> None:
        """Join all shards as a new worker; requests of the former worker are pending again."""
        self._last_known = {}
        self._join_rest()

    def _join_rest(self) -> Sequence[int]:
        for shard, each in enumerate(self._stores):
            if shard not in self._last_known:
                self._last_known[shard] = each.join()
        self._deferred, self._parts, self._replies = SharedBatch(), [], {}
        last_known = [self._last_known[shard] for shard in range(self.shards)]
        self._last_known = {}
        return last_known

    def apply(self, batch: SharedBatch) -> Reply:
        """Apply a batch; raises RejoinedError if a shard does not know this worker any more.

        After any other error, the next call sends only the parts that have no reply yet.
        """
        if not self._last_known and self._apply(batch):
            return self._merged(batch)
        raise RejoinedError(self.name, *self._join_rest())

    def _apply(self, batch: SharedBatch) -> bool:
        """Send each shard its part, unless it has replied.

        Returns:
            False if a shard does not know this worker any more.
        """
        if not self._parts:
            self._parts, self._turn = self._split(batch), self._turn + 1
        in_turn = [(self._turn + place) % self.shards for place in range(self.shards)]
        # Shards that seem empty come first, and the others fill up what these did not give.
        in_turn.sort(key=lambda shard: self._stores[shard].pending > 0)
        for place, shard in enumerate(in_turn):
            if shard in self._replies:
                continue
            store, part = self._stores[shard], self._parts[shard]
            others = [each for each in self._stores if each is not store]
            is_alone = batch.stands_still or not any(each.leased for each in others)
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
        # Each shard gets all ids: the ids of other shards have no effect there.
        parts = [
            SharedBatch(
                done=self._deferred.done,
                set_aside=batch.set_aside,
                downloads=batch.downloads,
                stands_still=batch.stands_still,
                may_start=batch.may_start,
                start_ended=self._deferred.start_ended,
                is_over=batch.is_over,
            )
            for _ in self._stores
        ]
        for found in batch.found:
            parts[shard_of_request(found, self.shards)].found.append(found)
        for each in self._deferred.recorded:
            parts[shard_of(each, self.shards)].recorded.append(each)
        for each in batch.forgotten:
            parts[shard_of(each, self.shards)].forgotten.append(each)
        return parts

    def _merged(self, batch: SharedBatch) -> Reply:
        replies = [self._replies[shard] for shard in range(self.shards)]
        self._parts, self._replies = [], {}
        self._deferred = SharedBatch(
            done=batch.done, recorded=batch.recorded, start_ended=batch.start_ended
        )
        answers = [iter(each.answers) for each in replies]
        shards = [shard_of_request(found, self.shards) for found in batch.found]
        expired: Counter[str] = Counter()
        for each in replies:
            expired.update(dict(each.expired))
        return Reply(
            # If the first reply was lost, all requests count as new: they are recorded now.
            answers="".join(next(answers[shard], "n") for shard in shards),
            taken=[taken for each in replies for taken in each.taken],
            runs_start=replies[0].runs_start,
            is_started=replies[0].is_started,
            left=sum(each.left for each in replies),
            pending=self.pending,
            leased=self.leased,
            has_suspect=any(each.has_suspect for each in replies),
            counters=tuple(each for reply in replies for each in reply.counters),
            ended_at=self.ended_at,
            died=[data for each in replies for data in each.died],
            expired=list(expired.items()),
            is_stopped=any(each.is_stopped for each in replies),
            number=replies[0].number,
        )

    def requeue(self, kind: str) -> int:
        """Make all requests that are "aside" or "dead" pending again; return their number."""
        return sum(each.requeue(kind) for each in self._stores)

    def leave(self) -> None:
        """Return the unfinished requests of this worker to the queue, and leave it."""
        with suppress(OtherFilterError):
            self.apply(SharedBatch())  # sends what was deferred
        for each in reversed(self._stores):
            each.leave()

"""Collect a worker's changes of a shared queue in batches, and keep what the server might lose."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from scrapy_bloom.queues.batch import Found
from scrapy_bloom.queues.shared import BEYOND_LIMIT, Reply, SharedBatch, shard_of_request
from scrapy_bloom.redis.filter import NEW, LostKeysError

_MOST_BATCHES = 4  # with more of them, the output of callbacks is not consumed

# How long, and how many bytes of, queued requests are kept in case the server loses them.
_KEPT_SECS, _MOST_KEPT_BYTES = 60.0, 1 << 26


class Collected:
    """Changes of the queue and its filter, in batches that are not sent yet.

    Each change is in the last batch, or in a new one if the last one is full. So a request is
    reported as done in the batch of the requests that it led to, or later.

    Attributes:
        batches: the batches in the order in which they are to be sent; none of them is empty.
    """

    def __init__(self) -> None:
        self.batches: deque[SharedBatch] = deque()

    def __bool__(self) -> bool:
        return bool(self.batches)

    @property
    def fills_a_batch(self) -> bool:
        """Return whether the first batch is full."""
        return len(self.batches) > 1 or (bool(self.batches) and self.batches[0].is_full)

    @property
    def has_room(self) -> bool:
        """Return whether there is room for more changes."""
        return len(self.batches) <= _MOST_BATCHES

    def found(self) -> Iterator[tuple[Found, Any]]:
        """Return the requests that were found, as `add_found` has got them."""
        for batch in self.batches:
            yield from zip(batch.found, batch.requests, strict=True)

    def add_found(self, found: Found, request: Any = None) -> None:
        """Add a request that was found.

        Args:
            found: the request as it is queued.
            request: what the caller needs when the batch is answered.
        """
        if not (self.batches and self.batches[-1].has_room_for(found)):
            self.batches.append(SharedBatch())
        self.batches[-1].found.append(found)
        self.batches[-1].requests.append(request)

    def add(self, name: str, change: Any) -> None:
        """Append `change` to the list `name` of the last batch; True: set the flag `name`."""
        if not self.batches or self.batches[-1].is_full:
            self.batches.append(SharedBatch())
        if change is True:
            setattr(self.batches[-1], name, True)
        else:
            getattr(self.batches[-1], name).append(change)

    def next_batch(self) -> SharedBatch:
        """Remove the first batch, and return it; an empty one if there is none."""
        return self.batches.popleft() if self.batches else SharedBatch()


class Kept:
    """Recently queued requests that the crawl would not find again if the server lost them.

    With one shard, these are the requests without a parent. With several, all recent requests are
    kept, because the parent may be done in a shard that has lost nothing.

    Args:
        shards: how many shards the queue has.
    """

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._bytes = 0
        self._requests: deque[tuple[float, int, Found]] = deque()  # time, and number of the batch
        self._dropped = -1  # number of the last batch of which a request was dropped

    def add(self, batch: SharedBatch, reply: Reply) -> None:
        """Keep the requests that a batch has queued, and drop those that are too old."""
        now = time.monotonic()
        for index, found in enumerate(batch.found):
            if (self._shards > 1 or not found.has_parent) and is_queued(found, reply, index):
                self._requests.append((now, reply.number, found))
                self._bytes += len(found.data)
        while self._requests and (
            self._requests[0][0] < now - _KEPT_SECS or self._bytes > _MOST_KEPT_BYTES
        ):
            _, self._dropped, found = self._requests.popleft()
            self._bytes -= len(found.data)

    def lost(self, last_known: Sequence[int]) -> list[Found]:
        """Return the requests to be sent again after the worker has rejoined the queue.

        Args:
            last_known: as in `RejoinedError`.

        Raises:
            LostKeysError: a shard has lost requests that are not kept any more.
        """
        if self._shards > 1 and min(last_known) < self._dropped:
            raise LostKeysError("a shard has lost more requests than are kept")
        lost = []
        for _ in range(len(self._requests)):
            at, number, found = self._requests.popleft()
            if number > last_known[shard_of_request(found, self._shards)]:
                lost.append(found)
                self._bytes -= len(found.data)
            else:  # renumbered 0, because the new worker counts its batches from 1
                self._requests.append((at, 0, found))
        self._dropped = min(self._dropped, 0)
        return lost

    def start_over(self) -> list[Found]:
        """Return the kept requests without a parent, for the queue that replaces the lost one."""
        lost = [found for _, _, found in self._requests if not found.has_parent]
        self._requests.clear()
        self._bytes, self._dropped = 0, -1
        return lost


def is_queued(found: Found, reply: Reply, index: int) -> bool:
    """Return whether the server has queued the request at `index` of a batch."""
    answer = reply.answers[index]
    is_filtered = found.fingerprint is not None and found.kind != "u"
    return answer in NEW if is_filtered else answer != BEYOND_LIMIT

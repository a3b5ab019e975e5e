"""Collect the changes of a store in batches, and keep what a server might lose."""

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator

from scrapy_bloom.queues.store import Batch, Ended, Entered

MAX_BATCH, MAX_BATCH_BYTES = 48, 262_144  # in Redis, so that a script takes less than 5 ms
_MOST_BATCHES = 4  # with more of them, the output of callbacks is not consumed

# How long, and how many bytes of, queued requests are kept in case the server loses them.
_KEPT_SECS, _MOST_KEPT_BYTES = 60.0, 1 << 26


class Collected:
    """Changes of a store, in batches that are not sent yet.

    Each change is in the last batch, or in a new one if the last one is full. So a request is
    reported as ended in the batch of the requests that it led to, or later. A batch has at most
    `most` changes, and `most_bytes` of serialized requests, or one larger request.
    """

    def __init__(self, most: int = MAX_BATCH, most_bytes: float = MAX_BATCH_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        # Each with the time of its first change, on a monotonic clock; none of them is empty.
        self._batches: deque[tuple[float, Batch]] = deque()

    def __bool__(self) -> bool:
        return bool(self._batches)

    @property
    def since(self) -> float:
        """Return the time of the first change, on a monotonic clock."""
        return self._batches[0][0]

    @property
    def fills_a_batch(self) -> bool:
        """Return whether the first batch is full."""
        return len(self._batches) > 1 or (
            bool(self._batches) and self._batches[0][1].changes >= self._most
        )

    @property
    def has_room(self) -> bool:
        """Return whether there is room for more changes."""
        return len(self._batches) <= _MOST_BATCHES

    @property
    def entering(self) -> int:
        """Return how many requests are to enter the queue."""
        return sum(len(batch.entered) for _, batch in self._batches)

    @property
    def ending(self) -> int:
        """Return how many requests have ended."""
        return sum(len(batch.ended) for _, batch in self._batches)

    def entered(self) -> Iterator[Entered]:
        """Return the requests that are to enter the queue."""
        for _, batch in self._batches:
            yield from batch.entered

    def enter(self, entered: Entered) -> None:
        """Add a request that is to enter the queue."""
        self._with_room_for(len(entered.data)).entered.append(entered)

    def end(self, ended: Ended) -> None:
        """Add a request that has ended."""
        self.last().ended.append(ended)

    def last(self) -> Batch:
        """Return the batch to which the caller adds one change of another kind."""
        return self._with_room_for(0)

    def _with_room_for(self, nbytes: int) -> Batch:
        """Return the batch to which the caller adds a change with so many bytes of requests."""
        last = self._batches[-1][1] if self._batches else None
        if last is None or last.changes >= self._most or not self._has_room_for(nbytes, last):
            last = Batch()
            self._batches.append((time.monotonic(), last))
        return last

    def _has_room_for(self, nbytes: int, batch: Batch) -> bool:
        if not nbytes or self._most_bytes == math.inf:
            return True
        used = sum(len(entered.data) for entered in batch.entered)
        return not used or used + nbytes <= self._most_bytes

    def next_batch(self) -> Batch:
        """Remove the first batch, and return it; an empty one if there is none."""
        return self._batches.popleft()[1] if self._batches else Batch()

    def put_back(self, batch: Batch) -> None:
        """Make a batch that was not applied the first one again."""
        if batch.changes or batch.start_ended or batch.is_over:
            self._batches.appendleft((time.monotonic(), batch))

    def clear(self) -> None:
        """Drop all changes."""
        self._batches.clear()


class Kept:
    """Recently queued requests without a parent: if the server lost one, nothing would lead to it.

    A request with a parent needs no copy: the server has lost together that it was queued, and that
    its parent was done.
    """

    def __init__(self) -> None:
        self._bytes = 0
        self._requests: deque[tuple[float, int, Entered]] = deque()  # time, and number of the batch

    def add(self, queued: Iterable[Entered], number: int) -> None:
        """Keep the requests that a batch of some number has queued; drop those that are too old."""
        now = time.monotonic()
        for entered in queued:
            if not entered.has_parent:
                self._requests.append((now, number, entered._replace(context=None)))
                self._bytes += len(entered.data)
        while self._requests and (
            self._requests[0][0] < now - _KEPT_SECS or self._bytes > _MOST_KEPT_BYTES
        ):
            _, _, entered = self._requests.popleft()
            self._bytes -= len(entered.data)

    def lost(self, last_known: int) -> list[Entered]:
        """Return the requests to be sent again after the worker has joined the queue again.

        `last_known` is the number of the last earlier batch that the server has; -1: it has none.
        """
        lost = []
        for _ in range(len(self._requests)):
            at, number, entered = self._requests.popleft()
            if number > last_known:
                lost.append(entered)
                self._bytes -= len(entered.data)
            else:  # renumbered 0, because the new worker counts its batches from 1
                self._requests.append((at, 0, entered))
        return lost

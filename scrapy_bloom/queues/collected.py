"""Collect the changes of a store in batches, and keep what a server might lose."""

import math
import time
from collections import deque
from collections.abc import Iterable

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
        self.since = 0.0  # when the last batch was begun, on a monotonic clock
        self._most = most
        self._most_bytes = most_bytes
        self._batches: deque[Batch] = deque()  # none of them is empty

    def __bool__(self) -> bool:
        return bool(self._batches)

    @property
    def fills_a_batch(self) -> bool:
        """Return whether the first batch is full."""
        is_full = any(batch.changes >= self._most for batch in self._batches)
        return is_full or len(self._batches) > 1

    @property
    def has_room(self) -> bool:
        """Return whether there is room for more changes."""
        return len(self._batches) <= _MOST_BATCHES

    @property
    def entering(self) -> int:
        """Return how many requests are to enter the queue."""
        return sum(len(batch.entered) for batch in self._batches)

    @property
    def ending(self) -> int:
        """Return how many requests have ended."""
        return sum(len(batch.ended) for batch in self._batches)

    def enter(self, entered: Entered) -> None:
        """Add a request that is to enter the queue."""
        last = self.last()
        used = sum(len(other.data) for other in last.entered) if self._most_bytes < math.inf else 0
        if used and used + len(entered.data) > self._most_bytes:
            last = self._begin_batch()
        last.entered.append(entered)

    def end(self, ended: Ended) -> None:
        """Add a request that has ended."""
        self.last().ended.append(ended)

    def last(self) -> Batch:
        """Return the batch to which the caller adds a change of another kind."""
        if not self._batches or self._batches[-1].changes >= self._most:
            return self._begin_batch()
        return self._batches[-1]

    def _begin_batch(self) -> Batch:
        self.since = time.monotonic()
        self._batches.append(Batch())
        return self._batches[-1]

    def next_batch(self) -> Batch:
        """Remove the first batch, and return it; an empty one if there is none."""
        return self._batches.popleft() if self._batches else Batch()

    def clear(self) -> list[Entered]:
        """Drop all changes; return the requests that were to enter the queue."""
        entered = [entered for batch in self._batches for entered in batch.entered]
        self._batches.clear()
        return entered


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
        lost = [entered for _, number, entered in self._requests if number > last_known]
        self._bytes -= sum(len(entered.data) for entered in lost)
        # Renumbered 0, because the new worker counts its batches from 1.
        self._requests = deque(
            (at, 0, entered) for at, number, entered in self._requests if number <= last_known
        )
        return lost

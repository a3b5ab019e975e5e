"""Collect a worker's changes of a shared queue in batches, and keep what the server might lose."""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from scrapy_bloom.queues.batch import Found

MAX_BATCH, MAX_BATCH_BYTES = 48, 262_144  # so that a script takes less than 5 ms
_MOST_BATCHES = 4  # with more of them, the output of callbacks is not consumed

# How long, and how many bytes of, queued requests are kept in case the server loses them.
_KEPT_SECS, _MOST_KEPT_BYTES = 60.0, 1 << 26


@dataclass
class SharedBatch:
    """A worker's changes of the queue and its filter, at most `MAX_BATCH`, and its wishes.

    Ids in `done`, `set_aside` and `downloaded` that do not belong to this worker have no effect.

    Attributes:
        found: requests to be queued.
        recorded: fingerprints that are recorded without a request.
        forgotten: fingerprints to be forgotten, so that their requests are crawled again.
        done: ids of requests that are done.
        set_aside: ids of requests that this worker cannot deserialize.
        downloaded: requests that are downloaded, if their slots have limits: the id, the slot, and
            for how many seconds no other worker may take a request of the slot.
        want: how many requests to take.
        downloads: how many downloads each slot has, without slots that have none.
        stands_still: whether all requests in flight in this worker wait, perhaps for a suspect.
        may_start: whether this worker can run the spider's start().
        start_ended: whether start() has ended in this worker.
        is_over: whether this worker has found that the crawl has ended.
        made_at: the time of the first change, on a monotonic clock.
    """

    found: list[Found] = field(default_factory=list)
    recorded: list[bytes] = field(default_factory=list)
    forgotten: list[bytes] = field(default_factory=list)
    done: list[bytes] = field(default_factory=list)
    set_aside: list[bytes] = field(default_factory=list)
    downloaded: list[tuple[bytes, str, float]] = field(default_factory=list)
    want: int = 0
    downloads: Mapping[str, int] = field(default_factory=dict)
    stands_still: bool = False
    may_start: bool = False
    start_ended: bool = False
    is_over: bool = False
    made_at: float = field(default_factory=time.monotonic)

    @property
    def is_full(self) -> bool:
        """Return whether no more changes fit into the batch."""
        filtered = len(self.found) + len(self.recorded) + len(self.forgotten)
        taken = len(self.done) + len(self.set_aside) + len(self.downloaded)
        return filtered + taken >= MAX_BATCH

    def has_room_for(self, found: Found) -> bool:
        """Return whether a request that was found fits into the batch.

        A script applies `found` before `forgotten`, so a request that was forgotten does not fit.
        """
        if self.is_full or found.fingerprint in self.forgotten:
            return False
        nbytes = sum(len(each.data) for each in self.found)
        return not self.found or nbytes + len(found.data) <= MAX_BATCH_BYTES


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

    def found(self) -> Iterator[Found]:
        """Return the requests that were found."""
        for batch in self.batches:
            yield from batch.found

    def add_found(self, found: Found) -> None:
        """Add a request that was found."""
        if not (self.batches and self.batches[-1].has_room_for(found)):
            self.batches.append(SharedBatch())
        self.batches[-1].found.append(found)

    def last(self) -> SharedBatch:
        """Return the batch to which the caller adds one change of another kind."""
        if not self.batches or self.batches[-1].is_full:
            self.batches.append(SharedBatch())
        return self.batches[-1]

    def next_batch(self) -> SharedBatch:
        """Remove the first batch, and return it; an empty one if there is none."""
        return self.batches.popleft() if self.batches else SharedBatch()


class Kept:
    """Recently queued requests without a parent: if the server lost one, nothing would lead to it.

    A request with a parent needs no copy: the server has lost together that it was queued, and that
    its parent was done.
    """

    def __init__(self) -> None:
        self._bytes = 0
        self._requests: deque[tuple[float, int, Found]] = deque()  # time, and number of the batch

    def add(self, queued: Iterable[Found], number: int) -> None:
        """Keep the requests that a batch has queued, and drop those that are too old.

        Args:
            queued: the requests.
            number: the number of the batch.
        """
        now = time.monotonic()
        for found in queued:
            if not found.has_parent:
                self._requests.append((now, number, found._replace(request=None)))
                self._bytes += len(found.data)
        while self._requests and (
            self._requests[0][0] < now - _KEPT_SECS or self._bytes > _MOST_KEPT_BYTES
        ):
            _, _, found = self._requests.popleft()
            self._bytes -= len(found.data)

    def lost(self, last_known: int) -> list[Found]:
        """Return the requests to be sent again after the worker has joined the queue again.

        Args:
            last_known: the number of the last earlier batch that the server has; -1: it has none.
        """
        lost = []
        for _ in range(len(self._requests)):
            at, number, found = self._requests.popleft()
            if number > last_known:
                lost.append(found)
                self._bytes -= len(found.data)
            else:  # renumbered 0, because the new worker counts its batches from 1
                self._requests.append((at, 0, found))
        return lost

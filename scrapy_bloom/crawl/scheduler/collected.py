"""Collect a worker's changes of a shared queue, in order, and split them into batches."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from scrapy import Request

from scrapy_bloom.queues.batch import Found
from scrapy_bloom.queues.shared import (
    BEYOND_LIMIT,
    MAX_BATCH,
    MAX_BATCH_BYTES,
    Reply,
    SharedBatch,
    shard_of_request,
)
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.filter import NEW, LostKeysError
from scrapy_bloom.redis.forgotten import RedisForgotten

# How long, and how many bytes of, requests are kept that the crawl would not find again if the
# server lost them.
_KEPT_SECS, _MOST_KEPT_BYTES = 60.0, 1 << 26

# Limits of the collected changes; beyond them, the output of callbacks is not consumed.
_ROOM_CHANGES, _ROOM_BYTES = 4 * MAX_BATCH, 16 * MAX_BATCH_BYTES


class Entry(NamedTuple):
    """A request that was found.

    Attributes:
        found: the request as it is queued.
        request: the request for the signal `request_dropped`, if the server reports a duplicate;
            None: no signal is sent.
        has_parent: whether a callback, an errback or start() has yielded the request, or the
            downloader has replaced another request by it. Then the crawl finds it again if the
            server loses it.
    """

    found: Found
    request: Request | None
    has_parent: bool


@dataclass
class Parcel(SharedBatch):
    """A batch with the data that the worker needs when it is sent and answered.

    Attributes:
        entries: the entries of the requests in `found`.
        era: how often the worker had rejoined the queue when the batch was made.
        sent_at: the time of sending on a monotonic clock, when the lease begins.
        is_last: whether to leave the queue instead of sending a batch.
        lost: requests of earlier batches that the server has lost, and the crawl would not find
            again.
    """

    entries: list[Entry] = field(default_factory=list)
    era: int = 0
    sent_at: float = 0.0
    is_last: bool = False
    lost: list[Entry] = field(default_factory=list)


class Collected:
    """Changes of the queue and its filter, in the order in which they happened.

    The order ensures that a request is reported as done in the batch of the requests that it led
    to, or later.

    Attributes:
        found: how many of the changes are requests that were found.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.found = self._bytes = 0
        self._changes: deque[tuple[str, Any]] = deque()
        for each in entries:
            self.add_found(each)

    def __len__(self) -> int:
        return len(self._changes)

    @property
    def fills_a_batch(self) -> bool:
        """Return whether there are enough changes for a batch."""
        return len(self._changes) >= MAX_BATCH or self._bytes >= MAX_BATCH_BYTES

    @property
    def has_room(self) -> bool:
        """Return whether there is room for more changes."""
        return len(self._changes) < _ROOM_CHANGES and self._bytes < _ROOM_BYTES

    @property
    def entries(self) -> Sequence[Entry]:
        """Return the requests that were found."""
        return [each for kind, each in self._changes if kind == "found"]

    def add_found(self, entry: Entry) -> None:
        """Add a request that was found."""
        self._changes.append(("found", entry))
        self.found += 1
        self._bytes += len(entry.found.data)

    def add(self, name: str, each: Any) -> None:
        """Add a change: a value for the attribute of a `SharedBatch` with this name."""
        self._changes.append((name, each))

    def parcel(self) -> Parcel:
        """Remove the first changes, as many as fit into a batch, and return that batch."""
        parcel, nbytes = Parcel(), 0
        for _ in range(min(len(self._changes), MAX_BATCH)):
            name, each = self._changes[0]
            if name == "found":
                size = len(each.found.data)
                if parcel.found and nbytes + size > MAX_BATCH_BYTES:
                    break
                if each.found.fingerprint in parcel.forgotten:
                    break  # a script applies `found` before `forgotten`
                nbytes += size
                parcel.found.append(each.found)
                parcel.entries.append(each)
            elif isinstance(each, bool):
                setattr(parcel, name, each)
            else:
                getattr(parcel, name).append(each)
            self._changes.popleft()
        self.found -= len(parcel.found)
        self._bytes -= nbytes
        return parcel


class Kept:
    """Recently queued requests that the crawl would not find again if the server lost them.

    Without shards, these are the requests without a parent. With shards, all recent requests are
    kept, because the parent may be done in another shard that lost nothing.

    Args:
        shards: how many shards the queue has.
    """

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._bytes = 0
        self._entries: deque[tuple[float, int, Entry]] = deque()  # time, and number of the batch
        self._dropped = -1  # number of the last batch of which a request was dropped

    def add(self, batch: Parcel, reply: Reply) -> None:
        """Keep the requests that a batch has queued, and drop those that are too old."""
        now = time.monotonic()
        for index, entry in enumerate(batch.entries):
            if (self._shards > 1 or not entry.has_parent) and is_queued(entry, reply, index):
                self._entries.append((now, reply.number, entry._replace(request=None)))
                self._bytes += len(entry.found.data)
        while self._entries and (
            self._entries[0][0] < now - _KEPT_SECS or self._bytes > _MOST_KEPT_BYTES
        ):
            _, self._dropped, entry = self._entries.popleft()
            self._bytes -= len(entry.found.data)

    def lost(self, last_known: Sequence[int]) -> list[Entry]:
        """Return the requests to be sent again after the worker has rejoined the queue.

        Args:
            last_known: as in `RejoinedError`.

        Raises:
            LostKeysError: some of the requests are not kept any more.
        """
        if self._shards > 1 and min(last_known) < self._dropped:
            raise LostKeysError("a shard has lost more requests than are kept")
        lost = []
        for _ in range(len(self._entries)):
            at, number, entry = self._entries.popleft()
            if number > last_known[shard_of_request(entry.found, self._shards)]:
                lost.append(entry)
                self._bytes -= len(entry.found.data)
            else:  # 0 is before all batches of the new worker
                self._entries.append((at, 0, entry))
        self._dropped = min(self._dropped, 0)
        return lost

    def start_over(self) -> list[Entry]:
        """Return the kept requests without a parent, for the queue that replaces the lost one."""
        lost = [entry for _, _, entry in self._entries if not entry.has_parent]
        self._entries.clear()
        self._bytes, self._dropped = 0, -1
        return lost


def is_queued(entry: Entry, reply: Reply, index: int) -> bool:
    """Return whether the server has queued the request at `index` of a batch."""
    answer = reply.answers[index]
    is_filtered = entry.found.fingerprint is not None and entry.found.kind != "u"
    return answer in NEW if is_filtered else answer != BEYOND_LIMIT


class QueuedForgotten(RedisForgotten):
    """The forgotten fingerprints of a filter that is changed by the batches of its queue.

    The event loop sends nothing to the server: fingerprints to be forgotten go into a batch, and a
    thread reads the fingerprints that other workers have added.

    Args:
        server: the connection.
        keys: the keys of all shards of the filter.
        forget: adds a fingerprint to be forgotten to the next batch.
        forgets: how often any worker has forgotten fingerprints so far.
    """

    def __init__(
        self,
        server: RedisServer,
        keys: Sequence[str],
        forget: Callable[[bytes], object],
        forgets: int,
    ) -> None:
        super().__init__(server, keys)
        self._forget = forget
        self._news: list[bytes] = []
        self._forgets = forgets

    def read_news(self, forgets: int) -> None:
        """Read what other workers have added, if anything; called in a thread."""
        if forgets != self._forgets:
            self._news += super().news()
            self._forgets = forgets

    def news(self) -> Iterable[bytes]:
        """Return the fingerprints that others have added since the last call."""
        news, self._news = self._news, []
        return news

    def add(self, fingerprints: Sequence[bytes]) -> None:
        """Add fingerprints; if they are in the set, they count as added now."""
        for each in fingerprints:
            self._forget(each)

    def take(self, fingerprint: bytes) -> bool:  # noqa: ARG002 - the script of the batch does it
        """Take a fingerprint out; return whether it was there."""
        return False

    def has(self, fingerprint: bytes) -> bool:  # noqa: ARG002 - the script of the batch decides
        """Return whether a fingerprint is in the set."""
        return True

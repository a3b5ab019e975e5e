"""What a worker has to tell the queue that it shares: in order, in batches of a bounded size."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from scrapy import Request

from scrapy_bloom.queues.batch import Found
from scrapy_bloom.queues.sharded import shard_of_request
from scrapy_bloom.queues.shared import BEYOND_LIMIT, MAX_BATCH, MAX_BATCH_BYTES, Reply, SharedBatch
from scrapy_bloom.redis.filter import NEW, LostKeysError
from scrapy_bloom.redis.forgotten import RedisForgotten

# How long, and how much, is kept of what would not be found again if the server lost it.
_KEPT_SECS, _MOST_KEPT_BYTES = 60.0, 1 << 26

# What is collected before the output of callbacks has to wait.
_ROOM_CHANGES, _ROOM_BYTES = 4 * MAX_BATCH, 16 * MAX_BATCH_BYTES


class Entry(NamedTuple):
    """A request that was found.

    Attributes:
        found: as it is queued.
        request: for the signal, if it turns out to be a duplicate; None: that would be no news.
        has_parent: a callback or errback has yielded it, or start(), or the downloader has replaced
            another one by it. If the server loses it, it is found again.
    """

    found: Found
    request: Request | None
    has_parent: bool


@dataclass
class Parcel(SharedBatch):
    """A batch, and how it is sent.

    Attributes:
        entries: what `found` was made of.
        era: how often all was void when it was made.
        sent_at: when, on a monotonic clock: the lease lasts from then on.
        is_last: leave the queue, in place of sending anything.
        lost: what the server has lost of earlier batches, and nobody would find again.
    """

    entries: list[Entry] = field(default_factory=list)
    era: int = 0
    sent_at: float = 0.0
    is_last: bool = False
    lost: list[Entry] = field(default_factory=list)


class Collected:
    """Changes of the queue and its filter, in the order in which they happened.

    So what is done follows all that it led to, in the same batch or an earlier one.

    Attributes:
        found: how many requests were found.
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
        """Return whether it is time to send some."""
        return len(self._changes) >= MAX_BATCH or self._bytes >= MAX_BATCH_BYTES

    @property
    def has_room(self) -> bool:
        """Return whether more may be collected."""
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
        """Add to what a `SharedBatch` has under this name."""
        self._changes.append((name, each))

    def parcel(self) -> Parcel:
        """Take out what came first, as much as a batch may have."""
        parcel, nbytes = Parcel(), 0
        for _ in range(min(len(self._changes), MAX_BATCH)):
            name, each = self._changes[0]
            if name == "found":
                size = len(each.found.data)
                if parcel.found and nbytes + size > MAX_BATCH_BYTES:
                    break
                if each.found.fingerprint in parcel.forgotten:
                    break  # of one batch, what is found comes before what is forgotten
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
    """What was queued lately and would not be found again if the server lost it.

    In one shard, that is what has no parent. Where there are more, a parent may be in another one.

    Args:
        shards: of the queue.
    """

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._bytes = 0
        self._entries: deque[tuple[float, int, Entry]] = deque()  # when, and in which batch
        self._dropped = -1  # number of a batch of which something is not kept any more

    def add(self, batch: Parcel, reply: Reply) -> None:
        """Keep what a batch has found, for a while."""
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
        """Return what is to be sent again; see `RejoinedError`. The worker has joined again.

        Raises LostKeysError if some of it is not kept any more.
        """
        if self._shards > 1 and min(last_known) < self._dropped:
            raise LostKeysError("a shard has lost more than what is kept")
        lost = []
        for _ in range(len(self._entries)):
            at, number, entry = self._entries.popleft()
            if number > last_known[shard_of_request(entry.found, self._shards)]:
                lost.append(entry)
                self._bytes -= len(entry.found.data)
            else:  # it comes before all batches of the new worker
                self._entries.append((at, 0, entry))
        self._dropped = min(self._dropped, 0)
        return lost

    def start_over(self) -> list[Entry]:
        """Return what is to be sent to another queue: nothing leads to it."""
        lost = [entry for _, _, entry in self._entries if not entry.has_parent]
        self._entries.clear()
        self._bytes, self._dropped = 0, -1
        return lost


def is_queued(entry: Entry, reply: Reply, index: int) -> bool:
    """Return whether a batch has queued one of its requests; it had not been seen, for example."""
    if not reply.answers:
        return True
    answer = reply.answers[index]
    is_filtered = entry.found.fingerprint is not None and entry.found.kind != "u"
    return answer in NEW if is_filtered else answer != BEYOND_LIMIT


class QueuedForgotten:
    """The forgotten fingerprints of a filter that is changed by the batches of its queue.

    The event loop asks and changes nothing on the server: what is forgotten goes with a batch, and
    a thread reads the news.

    Args:
        stored: what is on the server, of each shard.
        forget: collects what is forgotten.
        forgets: how often any worker has forgotten fingerprints until now.
    """

    def __init__(
        self, stored: Sequence[RedisForgotten], forget: Callable[[bytes], object], forgets: int
    ) -> None:
        self._stored = stored
        self._forget = forget
        self._heard: list[bytes] = []
        self._forgets = forgets

    def hear(self, forgets: int) -> None:
        """Read the news, in a thread, if the filter has any."""
        if forgets != self._forgets:
            self._heard += chain.from_iterable(each.news() for each in self._stored)
            self._forgets = forgets

    def news(self) -> Iterable[bytes]:
        """Return what others have added since the last call."""
        heard, self._heard = self._heard, []
        return heard

    def all(self) -> Iterable[bytes]:
        """Return the whole set."""
        return chain.from_iterable(each.all() for each in self._stored)

    def add(self, fingerprints: Sequence[bytes]) -> None:
        """Add fingerprints; those that are there count as added now."""
        for each in fingerprints:
            self._forget(each)

    def take(self, fingerprint: bytes) -> bool:  # noqa: ARG002 - the script does it
        """Take a fingerprint out; return whether it was there."""
        return False

    def has(self, fingerprint: bytes) -> bool:  # noqa: ARG002 - the script knows
        """Return whether a fingerprint is in the set."""
        return True

    def expire(self, secs: float) -> None:
        """Remove what was added longer ago than that."""
        for each in self._stored:
            each.expire(secs)

    def close(self) -> None:
        """Do nothing: the queue closes the connection."""

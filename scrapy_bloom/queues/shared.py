"""The queue of CrashSafeScheduler in Redis or Valkey, with its filter: one script per batch.

`scrapy_bloom.redis.scripts` documents the stored keys. The methods block while they wait for the
server, so a thread calls them.
"""

import os
import secrets
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, NamedTuple

from scrapy_bloom.exceptions import SettingError, StorageError
from scrapy_bloom.queues.batch import LARGEST_PRIORITY, Found, Limits, Taken
from scrapy_bloom.queues.collected import Kept, SharedBatch
from scrapy_bloom.redis import scripts
from scrapy_bloom.redis.backend import MOST_LOSSES, RedisBackend
from scrapy_bloom.redis.batch_script import BATCH
from scrapy_bloom.redis.filter import NEW, LostKeysError, OtherFilterError, SharedFilter
from scrapy_bloom.text import escaped

_LONGEST_PAUSE = 86_400  # seconds; to the script, a longer pause means a clock set back
_ORDER = struct.Struct(">QB")  # priority and rank
_WORKER, _TOKEN = scripts.WORKER_BYTES, scripts.TOKEN_BYTES


class Member(NamedTuple):
    """A request as a sorted set of the queue stores it."""

    slot: str
    priority: int
    rank: int
    position: int  # within priority and rank, a lower position is taken first
    deaths: int
    data: bytes

    @classmethod
    def parsed(cls, member: bytes) -> "Member":
        """Parse a member of a sorted set."""
        slot, _, rest = member.partition(b"\0")
        priority, rank = _ORDER.unpack_from(rest)
        position, deaths = struct.unpack_from(">QB", rest, _ORDER.size)
        data = rest[_ORDER.size + 9 + _WORKER * deaths :]
        name = slot.decode(errors="surrogatepass")
        return cls(name, LARGEST_PRIORITY - priority, rank - 128, position, deaths, data)


def slot_name(slot: str) -> bytes:
    """Return the name of a slot as a member has it: without NUL, which ends the name there."""
    return slot.encode(errors="surrogatepass").replace(b"\0", b"\1")


def member_start(found: Found) -> bytes:
    """Return the beginning of the member of a request: slot, priority and rank."""
    order = _ORDER.pack(LARGEST_PRIORITY - found.clipped_priority, found.rank + 128)
    return slot_name(found.slot) + b"\0" + order


@dataclass
class Reply:
    """The reply to a batch.

    Attributes:
        queued: whether each request found was queued; True if the first reply was lost.
        taken: requests that this batch has leased to the worker.
        runs_start: whether this worker has to run the spider's start().
        is_started: whether start() has ended.
        left: how many requests are pending, or in flight in any worker.
        pending: how many requests can be taken.
        counters: how many requests entered the queue, and how many left it.
        ended_at: when the queue became empty, in seconds since 1970; 0: it is not empty.
        died: serialized requests that this batch has made dead letters.
        expired: for each worker whose lease has expired, its name and how many requests it had.
        is_stopped: whether `scrapy bloom stop` asks this worker to end.
        forgotten: fingerprints that any worker or command has forgotten since the last reply.
    """

    queued: list[bool] = field(default_factory=list)
    taken: list[Taken] = field(default_factory=list)
    runs_start: bool = False
    is_started: bool = False
    left: int = 0
    pending: int = 0
    counters: tuple[int, int] = (0, 0)
    ended_at: float = 0.0
    died: list[bytes] = field(default_factory=list)
    expired: dict[str, int] = field(default_factory=dict)
    is_stopped: bool = False
    forgotten: Sequence[bytes] = ()


class RejoinedError(OtherFilterError):
    """The server has lost changes of this worker, or its lease, so the worker has joined again.

    Requests that the worker had taken are pending again, and it has a new id.

    Attributes:
        lost: requests of earlier batches that the queue may lack.
    """

    def __init__(self, name: str, lost: Sequence[Found]) -> None:
        super().__init__(f"the queue in {name} was replaced, or has no lease of this worker")
        self.lost = lost


class SharedStore:
    """The access of one worker to a shared queue and its filter.

    Each method may raise an OutageError or a RefusedError; then it may be called again with the
    same arguments.

    Args:
        filter_: the filter, which the worker has joined.
        spider: the name of the spider; all workers of a queue run the same spider.
        by_slot: take requests round-robin by slot; otherwise by priority alone.
        lease_secs: how long a worker keeps its requests without a heartbeat.
        limits: the limits of downloads that all workers share, if `by_slot`.

    Attributes:
        name: where the queue is, for messages.
        worker: the id of this worker.
        limits: the limits of downloads that all workers share.
        pending: how many requests can be taken.
        others: how many other workers there were when this worker joined or left.
        aside: how many requests were set aside when this worker joined.
        ended_at: when the queue became empty, in seconds since 1970; 0: it is not empty.
    """

    def __init__(
        self,
        filter_: SharedFilter,
        spider: str,
        *,
        by_slot: bool,
        lease_secs: float,
        limits: Limits | None = None,
    ) -> None:
        self.name = f"{filter_.server.address}, key {escaped(filter_.key)}"
        self.worker = b""
        self.limits = limits or Limits()
        self.pending = self.others = self.aside = 0
        self.ended_at = 0.0
        self._filter = filter_
        self._spider = spider
        self._by_slot = int(by_slot)
        self._lease_ms = round(1000 * lease_secs)
        self._next_worker = b""  # while the worker is joining: its id when it has joined
        self._number = 0  # of the last batch that was applied
        self._kept = Kept()

    def join(self) -> list[Found]:
        """Join the queue as a new worker; requests of the former worker are pending again.

        Returns:
            Requests of earlier batches that a queue in place of the former one lacks.
        """
        self._next_worker = b""
        self._join()
        return self._kept.lost(-1)

    def _join(self) -> int:
        """Join the queue; return the number of the last earlier batch that the server has."""
        self._next_worker = self._next_worker or secrets.token_hex(_WORKER // 2).encode()
        if self.worker:  # the server may have lost bits, or the lease has expired
            self._filter.drop_mirrors()
        name = f"{socket.gethostname()}:{os.getpid()}"
        words = [self._next_worker, name, self._spider, self._lease_ms, self.worker]
        answer = self._filter.run(scripts.JOIN, *words, self._filter.live[-1].number)
        if answer[0] == b"spider":
            raise SettingError(
                f"{self._filter.name} has the queue of the spider {escaped(answer[1].decode())}, "
                f"and this one is {self._spider!r}; set another BLOOM_REDIS_KEY, for example one "
                'with "%(spider)s"'
            )
        _, self.others, self.pending, self.aside, ended, kept_from, last_known = answer
        self.ended_at = _seconds(ended)
        self._filter.kept_from = int(kept_from)
        self.worker, self._next_worker, self._number = self._next_worker, b"", 0
        return int(last_known or -1)

    def apply(self, batch: SharedBatch) -> Reply:
        """Apply a batch; raises RejoinedError if the server does not know this worker any more."""
        if self._next_worker:
            raise RejoinedError(self.name, self._kept.lost(self._join()))
        while (answer := self._filter.run(BATCH, *self._words(batch)))[0] == b"version":
            self._filter.refresh()
        if answer[0] == b"lost":
            raise LostKeysError(f"{self._filter.server.address} has lost keys of {self.name}")
        if answer[0] != b"ok":
            raise RejoinedError(self.name, self._kept.lost(self._join()))
        self._number += 1
        reply = self._reply(batch, answer)
        self._kept.add(compress(batch.found, reply.queued), self._number)
        return reply

    def _reply(self, batch: SharedBatch, answer: Sequence[Any]) -> Reply:
        """Return the parsed reply, and keep what it tells about the queue and the filter."""
        _, letters, counts, entries, start, left, pending, pushed, done, *rest = answer
        ended, died, expired, is_stopped = rest
        self.pending, self.ended_at = pending, _seconds(ended)
        queued = [True] * len(batch.found)
        for place, letter in enumerate(letters.decode()):  # none after a lost reply
            found = batch.found[place]
            is_filtered = found.fingerprint is not None and found.is_filtered
            queued[place] = letter in NEW or not is_filtered
            if found.fingerprint is not None and found.is_recorded:
                self._filter.add_to_mirror(found.fingerprint, letter)
        for fingerprint in batch.recorded:
            self._filter.add_to_mirror(fingerprint, "n")
        self._filter.update_counts(*counts)
        names = [name.decode(errors="backslashreplace") for name in expired[::2]]
        return Reply(
            queued=queued,
            taken=[_taken(entry) for entry in entries],
            runs_start=start == self.worker,
            is_started=start == b"done",
            left=left,
            pending=pending,
            counters=(int(pushed), int(done)),
            ended_at=self.ended_at,
            died=[Member.parsed(each).data for each in died],
            expired=dict(zip(names, expired[1::2], strict=True)),
            is_stopped=bool(is_stopped),
        )

    def _words(self, batch: SharedBatch) -> list[Any]:
        filter_ = self._filter
        words: list[Any] = [filter_.version, self.worker, self._number + 1, self._lease_ms]
        words += [*filter_.layout, len(batch.found)]
        for found in batch.found:
            words += [int(found.is_filtered), int(found.is_recorded), int(found.newest_first)]
            words += [member_start(found), found.data]
            words += (
                filter_.bits_of(found.fingerprint) if found.fingerprint is not None else [b"", b""]
            )
        words.append(len(batch.recorded))
        for fingerprint in batch.recorded:
            words += filter_.bits_of(fingerprint)
        words += [len(batch.forgotten), *batch.forgotten]
        for ids in (batch.done, batch.set_aside):
            tokens = [each[_WORKER:] for each in ids if each.startswith(self.worker)]
            words += [len(tokens), *tokens]
        downloaded = [each for each in batch.downloaded if each[0].startswith(self.worker)]
        words.append(len(downloaded))
        for id_, slot, pause in downloaded:
            pause_ms = round(1000 * min(pause, _LONGEST_PAUSE))
            words += [id_[_WORKER:], slot_name(slot), pause_ms]
        words += [batch.want, self._by_slot, len(batch.downloads)]
        for slot, number in batch.downloads.items():
            words += [slot_name(slot), number]
        words += [*map(int, self.limits.usual), len(self.limits.slots)]
        for slot, limit in self.limits.slots.items():
            words += [slot_name(slot), *map(int, limit)]
        flags = (batch.stands_still, batch.may_start, batch.start_ended, batch.is_over)
        return [*words, *map(int, flags)]

    def leave(self) -> None:
        """Return the unfinished requests of this worker to the queue, and leave it."""
        is_through = False
        while not is_through:
            try:
                answer = self._filter.run(scripts.LEAVE, self.worker)
            except OtherFilterError:
                answer = (b"ok", True, 0, 0, b"")
            _, is_through, self.others, self.pending, ended = answer
            self.ended_at = _seconds(ended)

    def rejoin(self, backend: RedisBackend, error: OtherFilterError) -> list[Found]:
        """Join the current filter and queue after the server has lost the former ones.

        Returns the result of `join`. Raises a StorageError, also if the server loses them again and
        again.
        """
        for _ in range(MOST_LOSSES):
            try:
                backend.start_over(error)
                return self.join()
            except OtherFilterError as again:
                error = again
        raise StorageError(
            f"the server loses the queue in {self.name} again and again; check its memory and its "
            "maxmemory-policy, and start the crawl again"
        )


def _taken(entry: bytes) -> Taken:
    """Return a leased request; its id is the worker and the token, which only that worker uses."""
    member = Member.parsed(entry[_WORKER + _TOKEN :])
    return Taken(entry[: _WORKER + _TOKEN], member.data, member.slot)


def _seconds(milliseconds: bytes) -> float:
    return int(milliseconds) / 1000 if milliseconds else 0.0

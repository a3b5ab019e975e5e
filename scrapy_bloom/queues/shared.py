"""The queue of CrashSafeScheduler in Redis or Valkey, with its filter: one script per batch.

`scrapy_bloom.redis.scripts` documents the stored keys. The methods block while they wait for the
server, so a thread calls them.
"""

import os
import secrets
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from scrapy_bloom.exceptions import SettingError
from scrapy_bloom.queues.batch import Found, Limits, Taken
from scrapy_bloom.redis import scripts
from scrapy_bloom.redis.batch_script import BATCH
from scrapy_bloom.redis.filter import LostKeysError, OtherFilterError, SharedFilter
from scrapy_bloom.text import escaped

MOST_DEATHS = 3  # a request becomes a suspect after so many deaths, also in the scripts

MAX_BATCH, MAX_BATCH_BYTES = 48, 262_144  # so that a script takes less than 5 ms

BEYOND_LIMIT = "x"  # the answer to a request beyond BLOOM_MAX_PAGES_PER_SLOT

_LARGEST = 2**63 - 1  # the largest priority
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
        return cls(name, _LARGEST - priority, rank - 128, position, deaths, data)


def slot_name(slot: str) -> bytes:
    """Return the name of a slot as a member has it: without NUL, which ends the name there."""
    return slot.encode(errors="surrogatepass").replace(b"\0", b"\1")


def order_of(found: Found) -> bytes:
    """Return the beginning of the member of a request: slot, priority and rank."""
    priority = max(-_LARGEST, min(found.priority, _LARGEST))
    return slot_name(found.slot) + b"\0" + _ORDER.pack(_LARGEST - priority, found.rank + 128)


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
        has_others: whether other shards have requests that are pending, or in flight in this
            worker, so that it takes no suspect.
        may_start: whether this worker can run the spider's start().
        start_ended: whether start() has ended in this worker.
        is_over: whether this worker has found that the crawl has ended.
        requests: what the worker keeps with each request in `found` until the reply.
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
    has_others: bool = False
    may_start: bool = False
    start_ended: bool = False
    is_over: bool = False
    requests: list[Any] = field(default_factory=list)
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


@dataclass(frozen=True)
class Reply:
    """The server's reply to a batch.

    Attributes:
        answers: one character for each request found: "n" if it is new and was queued; "f" if it
            was queued because its fingerprint was forgotten; `BEYOND_LIMIT` if its slot has reached
            its limit of requests; otherwise the request is a duplicate. Empty if the first reply
            was lost.
        taken: requests that this batch has leased to the worker.
        runs_start: whether this worker has to run the spider's start().
        is_started: whether start() has ended.
        left: how many requests are pending, or in flight in any worker.
        pending: how many requests can be taken.
        leased: how many requests are leased to this worker.
        has_suspect: whether a suspect is leased to this worker.
        counters: for each shard, how many requests entered the queue, and how many left it.
        ended_at: when the queue became empty, in seconds since 1970; 0: it is not empty.
        died: serialized requests that this batch has made dead letters.
        expired: for each worker whose lease has expired, its name and how many requests it had.
        is_stopped: whether `scrapy bloom stop` asks this worker to end.
        number: the number of the batch.
    """

    answers: str
    taken: Sequence[Taken]
    runs_start: bool
    is_started: bool
    left: int
    pending: int
    leased: int
    has_suspect: bool
    counters: tuple[int, ...]
    ended_at: float
    died: Sequence[bytes]
    expired: Sequence[tuple[str, int]]
    is_stopped: bool
    number: int


class RejoinedError(OtherFilterError):
    """The server has lost changes of this worker, or its lease, so the worker has joined again.

    Requests that the worker had taken are pending again, and it has a new id.

    Attributes:
        last_known: for each shard, the number of the last earlier batch that the shard still has;
            empty if the queue was replaced.
    """

    def __init__(self, name: str, *last_known: int) -> None:
        super().__init__(f"the queue in {name} was replaced, or has no lease of this worker")
        self.last_known = last_known


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
        most_of_slot: how many requests of a slot are ever queued; 0: any number.
        has_start: whether this shard has the spider's start().
    """

    shards = 1

    def __init__(
        self,
        filter_: SharedFilter,
        spider: str,
        *,
        by_slot: bool,
        lease_secs: float,
        limits: Limits | None = None,
        most_of_slot: int = 0,
        has_start: bool = True,
    ) -> None:
        self.filter = filter_
        self.name = f"{filter_.server.address}, key {escaped(filter_.key)}"
        self._spider = spider
        self._by_slot = int(by_slot)
        self._lease_ms = round(1000 * lease_secs)
        self.limits = limits or Limits()
        self._most_of_slot = most_of_slot
        self._has_start = int(has_start)
        self._worker = b""
        self._number = 0  # of the last batch that was applied
        self.others = self.aside = self.pending = self.leased = 0
        self.has_suspect = False
        self.ended_at = 0.0

    def _run(self, script: str, *args: Any) -> Any:
        return self.filter.server.script(script, self.filter.keys, *args)

    def join(self) -> int:
        """Join the queue as a new worker; requests of the former worker are pending again.

        Returns:
            The number of the last batch of the former worker that the server has; -1: none.
        """
        former = self._worker
        if former:  # the server may have lost bits, or the lease has expired
            self.filter.drop_mirrors()
        worker = secrets.token_hex(_WORKER // 2).encode()
        name = f"{socket.gethostname()}:{os.getpid()}"
        answer = self._run(
            scripts.JOIN,
            *(self.filter.id, worker, name, self._spider, self._lease_ms, former),
            *(self.filter.live[-1].number, self._has_start),
        )
        if answer[0] == b"spider":
            raise SettingError(
                f"{self.filter.name} has the queue of the spider {escaped(answer[1].decode())}, "
                f"and this one is {self._spider!r}; set another BLOOM_REDIS_KEY, for example one "
                'with "%(spider)s"'
            )
        if answer[0] == b"other":
            raise OtherFilterError(f"{self.filter.name} was removed, or lost")
        self._worker, self._number = worker, 0
        _, self.others, self.pending, self.aside, ended, kept_from, last_known = answer
        self.leased, self.has_suspect = 0, False
        self.ended_at = _seconds(ended)
        self.filter.kept_from = int(kept_from)
        return int(last_known or -1)

    def apply(self, batch: SharedBatch) -> Reply:
        """Apply a batch; raises RejoinedError if the server does not know this worker any more."""
        reply = self.attempt(batch)
        if reply is None:
            raise RejoinedError(self.name, self.join())
        return reply

    def attempt(self, batch: SharedBatch) -> Reply | None:
        """Apply a batch; return None if the server does not know this worker, which must rejoin."""
        while True:
            answer = self._run(BATCH, *self._words(batch))
            kind = answer[0]
            if kind == b"ok":
                self._number += 1
                return self._handle_reply(batch, answer)
            if kind == b"version":
                self.filter.refresh()
            elif kind == b"lost":
                raise LostKeysError(f"{self.filter.server.address} has lost keys of {self.name}")
            elif kind == b"other":
                raise OtherFilterError(f"{self.filter.name} was removed, or lost")
            else:
                return None

    def _words(self, batch: SharedBatch) -> list[Any]:
        filter_ = self.filter
        words: list[Any] = [filter_.id, filter_.version]
        words += [self._worker, self._number + 1, self._lease_ms, *filter_.layout]
        words += [self._most_of_slot, len(batch.found)]
        for found in batch.found:
            words += [found.kind, int(found.newest_first), int(found.is_limited)]
            words += [order_of(found), found.data]
            words += (
                filter_.bits_of(found.fingerprint) if found.fingerprint is not None else [b"", b""]
            )
        words.append(len(batch.recorded))
        for fingerprint in batch.recorded:
            words += filter_.bits_of(fingerprint)
        words += [len(batch.forgotten), *batch.forgotten]
        for ids in (batch.done, batch.set_aside):
            # Batch numbers start at 1 for each worker, so a token is valid only for its worker.
            tokens = [each[_WORKER:] for each in ids if each.startswith(self._worker)]
            words += [len(tokens), *tokens]
        downloaded = [each for each in batch.downloaded if each[0].startswith(self._worker)]
        words.append(len(downloaded))
        for id_, slot, pause in downloaded:
            words += [id_[_WORKER:], slot_name(slot), round(1000 * min(pause, _LONGEST_PAUSE))]
        words += [batch.want, self._by_slot, len(batch.downloads)]
        for slot, number in batch.downloads.items():
            words += [slot_name(slot), number]
        words += [*map(int, self.limits.usual), len(self.limits.slots)]
        for slot, limit in self.limits.slots.items():
            words += [slot_name(slot), *map(int, limit)]
        words += [int(batch.stands_still), int(batch.has_others)]
        return [*words, int(batch.may_start), int(batch.start_ended), int(batch.is_over)]

    def _handle_reply(self, batch: SharedBatch, answer: Sequence[Any]) -> Reply:
        _, raw, counts, entries, start, left, pending, leased, pushed, done, ended, *rest = answer
        answers = raw.decode()
        self.pending, self.leased, self.ended_at = pending, leased, _seconds(ended)
        for index, found in enumerate(batch.found):
            # After a lost reply, nobody knows whether the limit of its slot was reached.
            answer = answers[index] if answers else BEYOND_LIMIT if found.is_limited else "n"
            if found.fingerprint is not None and found.kind != "?" and answer != BEYOND_LIMIT:
                self.filter.add_to_mirror(found.fingerprint, answer)
        for fingerprint in batch.recorded:
            self.filter.add_to_mirror(fingerprint, "n")
        self.filter.update_counts(*counts)
        died, expired, has_suspect, is_stopped = rest
        self.has_suspect = bool(has_suspect)
        taken = [
            Taken(entry[: _WORKER + _TOKEN], member.data, member.slot)
            for entry in entries
            for member in [Member.parsed(entry[_WORKER + _TOKEN :])]
        ]
        names = [name.decode(errors="backslashreplace") for name in expired[::2]]
        return Reply(
            answers=answers,
            taken=taken,
            runs_start=start == self._worker,
            is_started=start == b"done",
            left=left,
            pending=pending,
            leased=leased,
            has_suspect=self.has_suspect,
            counters=(int(pushed), int(done)),
            ended_at=self.ended_at,
            died=[Member.parsed(each).data for each in died],
            expired=list(zip(names, expired[1::2], strict=True)),
            is_stopped=bool(is_stopped),
            number=self._number,
        )

    def requeue(self, kind: str) -> int:
        """Make all requests that are "aside" or "dead" pending again; return their number."""
        number = 0
        while True:
            answer = self._run(scripts.REQUEUE, self.filter.id, kind)
            if answer[0] == b"other":
                raise OtherFilterError(f"{self.filter.name} was removed, or lost")
            number += int(answer[1])
            if not answer[2]:
                break
        if number:
            self.ended_at, self.pending = 0.0, self.pending + number
        return number

    def leave(self) -> None:
        """Return the unfinished requests of this worker to the queue, and leave it."""
        while True:
            answer = self._run(scripts.LEAVE, self.filter.id, self._worker)
            if answer[0] == b"other":
                self.others = self.pending = self.aside = 0
                self.ended_at = 0.0
                return
            _, is_through, self.others, self.pending, self.aside, ended = answer
            self.ended_at = _seconds(ended)
            if is_through:
                return


def _seconds(milliseconds: bytes) -> float:
    return int(milliseconds) / 1000 if milliseconds else 0.0

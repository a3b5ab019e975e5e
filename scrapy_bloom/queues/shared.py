"""The queue of CrashSafeScheduler in Redis or Valkey, with its filter: one script per batch.

A queue has one shard or several, each with the filter of its requests. The requests that a batch
has found go to their shards at once. What the batch reports as done goes to a shard when all other
shards have replied: to the last shard at once, and to the others with the next batch. So a request
leaves the queue only when every request it led to is stored, whichever shard fails.

`scrapy_bloom.redis.scripts` documents the stored keys. The methods block while they wait for the
server, so a thread calls them.
"""

import math
import os
import secrets
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, NamedTuple

from scrapy_bloom.exceptions import SettingError, StorageError
from scrapy_bloom.queues.batch import LARGEST_PRIORITY, Found, Limits, Taken
from scrapy_bloom.queues.collected import Kept, SharedBatch, shard_of_request
from scrapy_bloom.redis import scripts
from scrapy_bloom.redis.backend import MOST_LOSSES, RedisBackend
from scrapy_bloom.redis.batch_script import BATCH
from scrapy_bloom.redis.filter import NEW, LostKeysError, OtherFilterError, SharedFilter
from scrapy_bloom.redis.scripts import shard_of
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
    """The reply of all shards to a batch.

    Attributes:
        queued: whether each request found was queued; True if the first reply was lost.
        taken: requests that this batch has leased to the worker.
        runs_start: whether this worker has to run the spider's start().
        is_started: whether start() has ended.
        left: how many requests are pending, or in flight in any worker.
        pending: how many requests can be taken.
        counters: for each shard, how many requests entered the queue, and how many left it.
        ended_at: when the queue became empty, in seconds since 1970; 0: it is not empty.
        died: serialized requests that this batch has made dead letters.
        expired: for each worker whose lease has expired, its name and how many requests it had.
        is_stopped: whether `scrapy bloom stop` asks this worker to end.
        forgotten: fingerprints that any worker or command has forgotten since the last reply.
        number: the number of the batch.
    """

    queued: list[bool] = field(default_factory=list)
    taken: list[Taken] = field(default_factory=list)
    runs_start: bool = False
    is_started: bool = False
    left: int = 0
    pending: int = 0
    counters: tuple[int, ...] = ()
    ended_at: float = 0.0
    died: list[bytes] = field(default_factory=list)
    expired: dict[str, int] = field(default_factory=dict)
    is_stopped: bool = False
    forgotten: Sequence[bytes] = ()
    number: int = 0


class RejoinedError(OtherFilterError):
    """The server has lost changes of this worker, or its lease, so the worker has joined again.

    Requests that the worker had taken are pending again, and it has a new id.

    Attributes:
        lost: requests of earlier batches that the queue may lack.
    """

    def __init__(self, name: str, lost: Sequence[Found]) -> None:
        super().__init__(f"the queue in {name} was replaced, or has no lease of this worker")
        self.lost = lost


@dataclass(eq=False)
class QueueShard:
    """A shard of a queue, as its last reply has described it to this worker.

    Attributes:
        index: its place among the shards.
        filter: the filter of its requests.
        number: the number of the last batch that was applied.
        others: how many other workers there were when this worker joined or left.
        aside: how many requests were set aside then.
        pending: how many requests can be taken.
        leased: how many requests are leased to this worker.
        has_suspect: whether a suspect is leased to this worker.
        counters: how many requests entered the shard, and how many left it.
        ended_at: when the shard became empty, in seconds since 1970; 0: it is not empty.
    """

    index: int
    filter: SharedFilter
    number: int = 0
    others: int = 0
    aside: int = 0
    pending: int = 0
    leased: int = 0
    has_suspect: bool = False
    counters: tuple[int, int] = (0, 0)
    ended_at: float = 0.0


class SharedStore:
    """The access of one worker to a shared queue and its filter.

    Each batch goes to all shards, one after the other. So its number is the same in all shards, and
    each shard renews the worker's lease. The first shard has the spider's start(). Each method may
    raise an OutageError or a RefusedError; then it may be called again with the same arguments.

    Args:
        filters: all shards of the filter, which the worker has joined.
        spider: the name of the spider; all workers of a queue run the same spider.
        by_slot: take requests round-robin by slot; otherwise by priority alone.
        lease_secs: how long a worker keeps its requests without a heartbeat.
        limits: the limits of downloads that all workers share, if `by_slot`. Several shards have no
            limits, because a shard has only a part of the requests of a slot.

    Attributes:
        shards: the shards, as the last replies have described them.
        name: where the queue is, for messages.
        worker: the id of this worker, in all shards.
        limits: the limits of downloads that all workers share.
    """

    def __init__(
        self,
        filters: Sequence[SharedFilter],
        spider: str,
        *,
        by_slot: bool,
        lease_secs: float,
        limits: Limits | None = None,
    ) -> None:
        self.shards = [QueueShard(index, each) for index, each in enumerate(filters)]
        self.name = f"{filters[0].server.address}, key {escaped(filters[0].key)}"
        self.worker = b""
        self.limits = limits or Limits()
        self._spider = spider
        self._by_slot = int(by_slot)
        self._lease_ms = round(1000 * lease_secs)
        self._next_worker = b""  # while the worker is joining: its id when it has joined all shards
        self._kept = Kept(len(filters))
        self._reset_batch()

    def _reset_batch(self) -> None:
        # The parts of the current batch that have no reply yet, in the order of sending.
        self._parts: dict[QueueShard, SharedBatch] = {}
        # The replies of the other shards, in one.
        self._reply = Reply()
        # What the previous batch reported as done, for the shards that replied before others did.
        self._late = SharedBatch()

    @property
    def others(self) -> int:
        """Return how many other workers there are: each worker leaves the first shard last."""
        return self.shards[0].others

    @property
    def pending(self) -> int:
        """Return how many requests can be taken."""
        return sum(each.pending for each in self.shards)

    @property
    def aside(self) -> int:
        """Return how many requests are set aside."""
        return sum(each.aside for each in self.shards)

    @property
    def ended_at(self) -> float:
        """Return when the queue became empty, in seconds since 1970; 0: it is not empty."""
        ends = [each.ended_at for each in self.shards]
        return max(ends) if all(ends) else 0.0

    def join(self) -> list[Found]:
        """Join the queue as a new worker; requests of the former worker are pending again.

        Returns:
            Requests of earlier batches that a queue in place of the former one lacks.
        """
        self._next_worker = b""
        self._join_all()
        return self._kept.start_over()

    def _join_all(self) -> list[int]:
        """Join all shards; return for each the number of the last earlier batch that it has."""
        self._next_worker = self._next_worker or secrets.token_hex(_WORKER // 2).encode()
        last_known = [self._join(shard) for shard in self.shards]
        self.worker, self._next_worker = self._next_worker, b""
        self._reset_batch()
        return last_known

    def _join(self, shard: QueueShard) -> int:
        if self.worker:  # the server may have lost bits, or the lease has expired
            shard.filter.drop_mirrors()
        name = f"{socket.gethostname()}:{os.getpid()}"
        words = [self._next_worker, name, self._spider, self._lease_ms, self.worker]
        words += [shard.filter.live[-1].number, int(shard.index == 0)]
        answer = shard.filter.run(scripts.JOIN, *words)
        if answer[0] == b"spider":
            raise SettingError(
                f"{shard.filter.name} has the queue of the spider {escaped(answer[1].decode())}, "
                f"and this one is {self._spider!r}; set another BLOOM_REDIS_KEY, for example one "
                'with "%(spider)s"'
            )
        _, others, pending, aside, ended, kept_from, last_known = answer
        shard.number, shard.leased, shard.has_suspect = 0, 0, False
        shard.others, shard.pending, shard.aside = others, pending, aside
        shard.ended_at = _seconds(ended)
        shard.filter.kept_from = int(kept_from)
        return int(last_known or -1)

    def apply(self, batch: SharedBatch) -> Reply:
        """Apply a batch; raises RejoinedError if a shard does not know this worker any more.

        After any other error, the next call sends only the parts that have no reply yet.
        """
        if self._next_worker or not self._apply(batch):
            raise RejoinedError(self.name, self._kept.lost(self._join_all()))
        reply = self._reply
        reply.pending, reply.ended_at = self.pending, self.ended_at
        reply.counters = tuple(each for shard in self.shards for each in shard.counters)
        queued = list(compress(batch.found, reply.queued))
        self._kept.add(queued, reply.number)
        return reply

    def _apply(self, batch: SharedBatch) -> bool:
        """Send each shard its part, unless it has replied.

        Returns:
            False if a shard does not know this worker any more.
        """
        if not self._parts:
            self._split(batch)
        for shard, part in list(self._parts.items()):
            others = [each for each in self.shards if each is not shard]
            if not any(each.has_suspect for each in others):
                room = [each.pending + 1 for each in self._parts]
                part.want = math.ceil((batch.want - len(self._reply.taken)) * room[0] / sum(room))
            is_alone = batch.stands_still or not any(each.leased for each in others)
            has_others = not is_alone or any(each.pending for each in others)
            while True:
                answer = shard.filter.run(BATCH, *self._words(shard, part), int(has_others))
                if answer[0] != b"version":
                    break
                shard.filter.refresh()
            if answer[0] == b"lost":
                address = shard.filter.server.address
                raise LostKeysError(f"{address} has lost keys of {self.name}")
            if answer[0] != b"ok":
                return False
            del self._parts[shard]
            self._add_reply(shard, batch, part, answer)
        return True

    def _split(self, batch: SharedBatch) -> None:
        """Make the parts of a batch. What a part stores does not change once it was sent."""
        number = len(self.shards)
        self._reply = Reply([True] * len(batch.found))
        first = (self.shards[0].number + 1) % number
        in_turn = [*self.shards[first:], *self.shards[:first]]
        # Shards that seem empty come first, and the others fill up what these did not give.
        in_turn.sort(key=lambda shard: shard.pending > 0)
        for shard in in_turn:
            self._parts[shard] = SharedBatch(
                done=[*self._late.done],  # the ids of other shards have no effect
                set_aside=batch.set_aside,
                downloaded=batch.downloaded,
                downloads=batch.downloads,
                stands_still=batch.stands_still,
                may_start=batch.may_start,
                start_ended=self._late.start_ended,
                is_over=batch.is_over,
            )
        last = self._parts[in_turn[-1]]
        last.done += batch.done
        last.start_ended |= batch.start_ended
        parts = [self._parts[shard] for shard in self.shards]
        for found in batch.found:
            parts[shard_of_request(found, number)].found.append(found)
        for each in batch.forgotten:
            parts[shard_of(each, number)].forgotten.append(each)
        for each in self._late.recorded:
            parts[shard_of(each, number)].recorded.append(each)
        late = SharedBatch(
            done=[each for each in batch.done if each[-1] != in_turn[-1].index],
            start_ended=batch.start_ended and last is not parts[0],
        )
        for each in batch.recorded:
            part = parts[shard_of(each, number)]
            (part if part is last else late).recorded.append(each)
        self._late = late

    def _add_reply(
        self, shard: QueueShard, batch: SharedBatch, part: SharedBatch, answer: Sequence[Any]
    ) -> None:
        """Add the reply of a shard, and keep what it tells about the shard and its filter."""
        _, raw, counts, entries, start, left, pending, leased, pushed, done, ended, *rest = answer
        died, expired, has_suspect, is_stopped = rest
        shard.number += 1
        shard.pending, shard.leased, shard.ended_at = pending, leased, _seconds(ended)
        shard.has_suspect, shard.counters = bool(has_suspect), (int(pushed), int(done))
        reply = self._reply
        number = len(self.shards)
        places = [
            place
            for place, found in enumerate(batch.found)
            if shard_of_request(found, number) == shard.index
        ]
        for place, letter in zip(places, raw.decode(), strict=False):  # none after a lost reply
            found = batch.found[place]
            is_filtered = found.fingerprint is not None and found.is_filtered
            reply.queued[place] = letter in NEW or not is_filtered
            if found.fingerprint is not None and found.is_recorded:
                shard.filter.add_to_mirror(found.fingerprint, letter)
        for fingerprint in part.recorded:
            shard.filter.add_to_mirror(fingerprint, "n")
        shard.filter.update_counts(*counts)
        for entry in entries:
            member = Member.parsed(entry[_WORKER + _TOKEN :])
            id_ = entry[: _WORKER + _TOKEN] + bytes([shard.index])
            reply.taken.append(Taken(id_, member.data, member.slot))
        if shard.index == 0:
            reply.runs_start, reply.is_started = start == self.worker, start == b"done"
        reply.left += left
        reply.died += [Member.parsed(each).data for each in died]
        for name, number in zip(expired[::2], expired[1::2], strict=True):
            text = name.decode(errors="backslashreplace")
            reply.expired[text] = reply.expired.get(text, 0) + number
        reply.is_stopped |= bool(is_stopped)
        reply.number = shard.number

    def _words(self, shard: QueueShard, batch: SharedBatch) -> list[Any]:
        filter_ = shard.filter
        words: list[Any] = [filter_.version, self.worker, shard.number + 1, self._lease_ms]
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
            tokens = [self._token(each) for each in ids if self._is_leased(each, shard)]
            words += [len(tokens), *tokens]
        downloaded = [each for each in batch.downloaded if self._is_leased(each[0], shard)]
        words.append(len(downloaded))
        for id_, slot, pause in downloaded:
            pause_ms = round(1000 * min(pause, _LONGEST_PAUSE))
            words += [self._token(id_), slot_name(slot), pause_ms]
        words += [batch.want, self._by_slot, len(batch.downloads)]
        for slot, number in batch.downloads.items():
            words += [slot_name(slot), number]
        words += [*map(int, self.limits.usual), len(self.limits.slots)]
        for slot, limit in self.limits.slots.items():
            words += [slot_name(slot), *map(int, limit)]
        flags = (batch.stands_still, batch.may_start, batch.start_ended, batch.is_over)
        return [*words, *map(int, flags)]

    # The id of a request: worker, token, index of the shard. Batch numbers start at 1 for each
    # worker, so a token is valid only for its worker.

    def _is_leased(self, id_: bytes, shard: QueueShard) -> bool:
        return id_.startswith(self.worker) and id_[-1] == shard.index

    def _token(self, id_: bytes) -> bytes:
        return id_[_WORKER : _WORKER + _TOKEN]

    def leave(self) -> None:
        """Return the unfinished requests of this worker to the queue, and leave it."""
        late = self._late
        with suppress(OtherFilterError):
            if late.done or late.recorded or late.start_ended:
                self.apply(SharedBatch())
        for shard in reversed(self.shards):
            is_through = False
            while not is_through:
                try:
                    answer = shard.filter.run(scripts.LEAVE, self.worker)
                except OtherFilterError:
                    answer = (b"ok", True, 0, 0, 0, b"")
                _, is_through, shard.others, shard.pending, shard.aside, ended = answer
                shard.ended_at = _seconds(ended)

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


def _seconds(milliseconds: bytes) -> float:
    return int(milliseconds) / 1000 if milliseconds else 0.0

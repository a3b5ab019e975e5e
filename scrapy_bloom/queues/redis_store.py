"""The store of CrashSafeScheduler in Redis or Valkey: one script applies a batch.

`scrapy_bloom.redis.scripts` documents the stored keys. The methods block while they wait for the
server, so a thread calls them.
"""

import json
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any, NamedTuple

from scrapy_bloom.exceptions import SettingError, StorageError
from scrapy_bloom.queues.collected import Kept
from scrapy_bloom.queues.store import (
    LARGEST_PRIORITY,
    MOST_DEATHS,
    MOST_TRIES,
    Batch,
    Closed,
    End,
    Ended,
    Entered,
    Fate,
    Joining,
    Limits,
    Opened,
    RejoinedError,
    Reply,
    State,
    Stored,
    Taken,
    differing,
    once_in,
)
from scrapy_bloom.redis import layout, scripts
from scrapy_bloom.redis.backend import RedisBackend
from scrapy_bloom.redis.batch_script import BATCH
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.filter import LostKeysError, OtherFilterError
from scrapy_bloom.text import escaped

logger = logging.getLogger(__name__)

# Each request is in one of these sets, or in one of the two for State.DEAD.
SETS: Mapping[State, Sequence[str]] = {
    State.PENDING: ("pending",),
    State.IN_FLIGHT: ("leased",),
    State.SUSPECT: ("suspects",),
    State.FAILED: ("failed",),
    State.DEAD: ("dead", "given_up"),
    State.UNREADABLE: ("unreadable",),
}
FAILURES = ("failed", "given_up")

_LONGEST_PAUSE = 86_400  # seconds
_ORDER = struct.Struct(">QB")  # priority and rank
_WORKER, _TOKEN = scripts.WORKER_BYTES, scripts.TOKEN_BYTES
_FATES = {"u": Fate.UNFINISHED, "f": Fate.FAILED, "-": Fate.OTHER}


class Member(NamedTuple):
    """A request as a sorted set of the queue stores it."""

    slot: str
    priority: int
    rank: int
    position: int  # within priority and rank, a lower position is taken first
    tries: int
    deaths: int
    data: bytes

    @classmethod
    def parsed(cls, member: bytes) -> "Member":
        """Parse a member of a sorted set."""
        slot, priority, rank, rest = _parsed_order(member)
        position, tries, deaths = struct.unpack_from(">QBB", rest)
        return cls(slot, priority, rank, position, tries, deaths, rest[10 + _WORKER * deaths :])


def _parsed_order(member: bytes) -> tuple[str, int, int, bytes]:
    """Return slot, priority and rank at the beginning of a member, and the rest of it."""
    slot, _, rest = member.partition(b"\0")
    priority, rank = _ORDER.unpack_from(rest)
    return slot_of(slot), LARGEST_PRIORITY - priority, rank - 128, rest[_ORDER.size :]


def parsed_request(name: str, state: State, member: bytes) -> Stored:
    """Return a request of a sorted set; raises struct.error or ValueError if it is not one.

    Args:
        name: one of the `SETS` of the state.
        state: the state.
        member: the member of the set.
    """
    if name not in FAILURES:
        slot, priority, rank, position, tries, deaths, data = Member.parsed(
            member[_WORKER + _TOKEN :] if name == "leased" else member
        )
        return Stored(data, state, slot, priority, rank, position, deaths, tries)
    start = 5 if name == "failed" else 0  # epoch, and whether it is given up next
    (length,) = struct.unpack_from(">I", member, start)
    fingerprint = member[start + 4 : start + 4 + length]
    tries, reason_length = struct.unpack_from(">BH", member, start + 4 + length)
    start += 7 + length
    reason = member[start : start + reason_length].decode(errors="replace")
    start += reason_length
    (newest_first,) = struct.unpack_from(">?", member, start)
    position = -1 if newest_first else 1  # it has none
    slot, priority, rank, data = _parsed_order(member[start + 1 :])
    return Stored(data, state, slot, priority, rank, position, 0, tries, reason, fingerprint)


def packed_request(request: Stored) -> tuple[str, bytes]:
    """Return the name of the set and the member of a request of a copied queue.

    Its position is negative if the newest comes first. Requests in flight and unreadable ones
    become pending. The epoch of the copy is 1.
    """
    order = slot_name(request.slot) + b"\0"
    order += _ORDER.pack(LARGEST_PRIORITY - request.priority, request.rank + 128)
    if (fingerprint := request.fingerprint) is not None:
        is_failed = request.state is State.FAILED
        reason = request.reason.encode(errors="replace")
        parts = (
            struct.pack(">I?", 1, request.tries + 1 >= MOST_TRIES) if is_failed else b"",
            struct.pack(">I", len(fingerprint)),
            fingerprint,
            struct.pack(">BH", min(request.tries, 255), len(reason)),
            reason,
            struct.pack(">?", request.position < 0),
            order,
            request.data,
        )
        return "failed" if is_failed else "given_up", b"".join(parts)
    name = {State.SUSPECT: "suspects", State.DEAD: "dead"}.get(request.state, "pending")
    position = request.position if request.position > 0 else 2**53 + request.position
    deaths = min(request.deaths, MOST_DEATHS)
    workers = b"".join(b"%016x" % each for each in range(deaths))  # any ids: these workers are dead
    numbers = struct.pack(">QBB", position, min(request.tries, 255), deaths)
    return name, order + numbers + workers + request.data


def slot_of(name: bytes) -> str:
    """Return the slot of a name in a member, which is untrusted."""
    try:
        return name.decode(errors="surrogatepass")
    except UnicodeDecodeError:
        return name.decode(errors="backslashreplace")


def slot_name(slot: str) -> bytes:
    """Return the name of a slot as a member has it: without NUL, which ends the name there."""
    return slot.encode(errors="surrogatepass").replace(b"\0", b"\1")


def member_start(entered: Entered) -> bytes:
    """Return the beginning of the member of a request: slot, priority and rank."""
    order = _ORDER.pack(LARGEST_PRIORITY - entered.clipped_priority, entered.rank + 128)
    return slot_name(entered.slot) + b"\0" + order


def read_counts(server: RedisServer, key: str) -> dict[State, int]:
    """Return how many requests of each state a queue has."""
    keys = layout.named_keys(key)
    names = [name for some in SETS.values() for name in some]
    sizes = server.transaction(*[("ZCARD", keys[name]) for name in names])
    by_name = dict(zip(names, sizes, strict=True))
    return {state: sum(by_name[name] for name in some) for state, some in SETS.items()}


def move_slice(
    server: RedisServer,
    key: str,
    name: str,
    to: State | None,
    *,
    first: bytes,
    last: bytes,
    slot: str | None = None,
) -> tuple[int, bytes]:
    """Make some requests of a set pending, or drop them.

    Args:
        server: the connection.
        key: the key of the filter.
        name: the name of the set.
        to: PENDING or None.
        first: where to begin, in the form of ZRANGEBYLEX.
        last: where to end.
        slot: only requests of this slot.

    Returns:
        The number of requests that were moved, and where to go on; empty at the end.
    """
    values = {
        "from": name,
        "to": to or "",
        "first": first,
        "last": last,
        "has_slot": slot is not None,
        "slot": slot_name(slot or ""),
    }
    words = layout.words_of(layout.MOVE, values)
    number, going_on = server.script(scripts.MOVE, layout.keys_of(key), *words)
    return number, going_on


class RedisStore:
    """The access of one worker to a shared queue and its filter; implements `Store`.

    Each method may raise an OutageError or a RefusedError; then it may be called again with the
    same arguments.

    Args:
        backend: the filter, which the worker has joined.
        by_slot: take requests round-robin by slot; otherwise by priority alone.
        lease_secs: how long a worker keeps its requests without a heartbeat.
        limits: the limits of downloads that all workers share, if `by_slot`.

    Attributes:
        name: where the queue is, for messages.
        run: the id of the current run.
        worker: the id of this worker.
        pending: how many requests can be taken.
        ended_at: when the queue became empty, in seconds since 1970; 0: it is not empty.
    """

    def __init__(
        self,
        backend: RedisBackend,
        *,
        by_slot: bool,
        lease_secs: float,
        limits: Limits | None = None,
    ) -> None:
        self.name = f"{backend.server.address}, key {escaped(backend.key)}"
        self.run = self.worker = b""
        self.pending = 0
        self.ended_at = 0.0
        self._backend = backend
        self._filter = backend.filter
        self._by_slot = by_slot
        self._limits = limits or Limits()
        self._lease_ms = round(1000 * lease_secs)
        self._joining = Joining("")
        self._began = ""  # when the run began
        self._is_retired = False
        self._next_worker = b""  # while the worker is joining: its id when it has joined
        self._number = 0  # of the last batch that was applied
        self._kept = Kept()
        self._slow_since: float | None = None  # on a monotonic clock
        self._is_slow_logged = False

    # Joining.

    def open(self, joining: Joining) -> Opened:
        """Join the queue as a new worker, and begin a run if its name is new."""
        self._joining, self._began, self._is_retired = joining, "", False
        self.run = run = secrets.token_bytes(8)  # if this worker begins it
        reply = self._joined(None)
        counts = {state: int(reply[state.value]) for state in State}
        if counts[State.UNREADABLE] and not (reply["others"] or self._is_retired):
            self._requeue_unreadable()
        return Opened(
            run=self._joining.run,
            began=self.run == run,
            counts=counts,
            is_first=not reply["earlier"],
            is_late=self._is_retired,
            retried=reply["retried"],
            others=reply["others"],
            differing=differing(json.loads(reply["arguments"]), joining.arguments),
            ended_at=self.ended_at,
        )

    def _requeue_unreadable(self) -> None:
        self.ended_at = 0.0
        server, key, first = self._filter.server, self._filter.key, b"-"
        while first:
            number, first = move_slice(
                server, key, "unreadable", State.PENDING, first=first, last=b"+"
            )
            self.pending += number

    def _joined(self, error: OtherFilterError | None) -> Mapping[str, Any]:
        """Join the queue as a new worker, and return the reply.

        Args:
            error: if the server has lost the filter or the queue.

        Raises a StorageError, also if the server loses them again and again.
        """
        while True:
            try:
                if error is not None:
                    self._backend.start_over(error)
                self._next_worker = b""
                return self._join()
            except OtherFilterError as again:
                error = again

    def _join(self) -> Mapping[str, Any]:
        """Join the queue, and return the reply."""
        self._next_worker = self._next_worker or secrets.token_hex(_WORKER // 2).encode()
        if self.worker:  # the server may have lost bits, or the lease has expired
            self._filter.drop_mirrors()
        words = layout.words_of(
            layout.JOIN,
            {
                "id": self._filter.id,
                "worker": self._next_worker,
                "name": f"{socket.gethostname()}:{os.getpid()}",
                "spider": self._joining.spider,
                "lease": self._lease_ms,
                "former": self.worker,
                "newest": self._filter.live[-1].number,
                "run": self.run.hex(),
                "run_name": self._joining.run.encode(errors="surrogatepass"),
                "began": self._began,
                "arguments": json.dumps(dict(self._joining.arguments)),
            },
        )
        answer = self._filter.run(scripts.JOIN, *words)
        if answer[0] == b"spider":
            raise SettingError(
                f"{self._filter.name} belongs to spider {escaped(answer[1].decode())!r}, but this "
                f"crawl runs {self._joining.spider!r}; set another BLOOM_REDIS_KEY, for example "
                'one with "%(spider)s"'
            )
        reply = layout.parsed_reply(layout.JOIN_REPLY, answer)
        self.pending, self.ended_at = reply["pending"], _seconds(reply["ended"])
        self._is_retired = self._is_retired or bool(reply["is_late"])
        self._adopt_run(reply["run"], reply["run_name"], reply["began"], reply["kept"])
        self.worker, self._next_worker, self._number = self._next_worker, b"", 0
        return reply

    def _adopt_run(self, run: bytes, name: bytes, began: bytes, kept: bytes) -> None:
        """Belong to a run, under whose name this worker joins again after a loss."""
        self.run = bytes.fromhex(run.decode())
        self._joining = replace(self._joining, run=name.decode(errors="surrogatepass"))
        self._began = began.decode()
        self._filter.kept_from = min(int(kept), self._filter.run_from)

    # Batches.

    def knows(self, fingerprint: bytes, *, once: bool = False) -> bool:
        """Return whether a fingerprint is certainly recorded, without asking the server."""
        return self._filter.knows(once_in(self.run, fingerprint) if once else fingerprint)

    def apply(self, batch: Batch) -> Reply:
        """Apply a batch.

        Raises a RejoinedError if the server has lost the queue or changes of it, or does not know
        this worker any more; a StorageError if replies come too late for the lease.
        """
        begun = time.monotonic()
        try:
            reply = self._exchanged(batch)
        except OtherFilterError as error:
            self._joined(error)
            raise RejoinedError(self.name, self._kept.lost(-1)) from error
        self._number += 1
        answer = self._parsed(batch, reply)
        self._check_speed(begun)
        self._kept.add(compress(batch.entered, answer.queued), self._number)
        return answer

    def _check_speed(self, begun: float) -> None:
        """Warn if the lease ends before the reply comes, and give up after the deadline."""
        lease_secs, now = self._lease_ms / 1000, time.monotonic()
        if now < begun + lease_secs:
            self._slow_since, self._is_slow_logged = None, False
        elif self._slow_since is None:  # may be the end of an outage
            self._slow_since = begun
        else:
            text = (
                f"{self._filter.server.address} takes {now - begun:.1f} seconds for an answer, and "
                f"BLOOM_QUEUE_LEASE_SECS is {lease_secs:g}, so each lease has expired before this "
                "worker can crawl anything. Set BLOOM_QUEUE_LEASE_SECS to several times as much"
            )
            if now >= self._filter.server.deadline(self._slow_since):
                raise StorageError(text)
            if not self._is_slow_logged:
                self._is_slow_logged = True
                logger.warning("%s", text)

    def _exchanged(self, batch: Batch) -> Mapping[str, Any]:
        """Send a batch, as often as its arguments have changed, and return the reply."""
        if not self._filter.live:  # an outage has interrupted a call that found the filter lost
            raise OtherFilterError
        if self._next_worker:  # or one that found this worker unknown
            raise self._rejoined()
        self._filter.keep_up()
        while True:
            words = layout.words_of(layout.BATCH, self._values(batch))
            answer = self._filter.run(BATCH, *words)
            if answer[0] == b"ok":
                return layout.parsed_reply(layout.BATCH_REPLY, answer)
            if answer[0] == b"lost":
                raise LostKeysError(f"{self._filter.server.address} has lost keys of {self.name}")
            if answer[0] == b"back":
                raise self._rejoined()
            if answer[0] == b"run":
                self._is_retired = True
                self._adopt_run(*answer[1:])
            else:
                self._filter.refresh()

    def _rejoined(self) -> RejoinedError:
        """Join again, and return what tells the caller to start over."""
        last = self._join()["last"]
        return RejoinedError(self.name, self._kept.lost(int(last or -1)))

    def _parsed(self, batch: Batch, reply: Mapping[str, Any]) -> Reply:
        """Return the parsed reply, and keep what it tells about the queue and the filter."""
        self.pending, self.ended_at = reply["pending"], _seconds(reply["ended"])
        fingerprints = []
        for entered in batch.entered:
            if entered.fingerprint is not None:
                fingerprints.append(entered.fingerprint)
                if entered.once:
                    fingerprints.append(once_in(self.run, entered.fingerprint))
        fingerprints += batch.recorded
        for fingerprint, place in zip(fingerprints, reply["places"].decode(), strict=False):
            if place != "n":
                self._filter.add_to_mirror(fingerprint, place)
        self._filter.update_count(reply["count"])
        names = [name.decode(errors="backslashreplace") for name in reply["expired"][::2]]
        fates = zip(batch.asked, reply["fates"].decode(), strict=True)
        queued = [each == "1" for each in reply["queued"].decode()]
        return Reply(
            queued=queued or [True] * len(batch.entered),  # nothing after a lost reply
            taken=[_taken(entry) for entry in reply["taken"]],
            fates={fingerprint: _FATES[letter] for fingerprint, letter in fates},
            pending=self.pending,
            left=reply["left"],
            runs_start=reply["start"] == self.worker,
            is_started=reply["start"] == b"done",
            ended_at=self.ended_at,
            counters=(int(reply["pushed"]), int(reply["done"])),
            is_stopped=bool(reply["is_stopped"]),
            is_retired=self._is_retired,
            died=[Member.parsed(each).data for each in reply["died"]],
            given_up=reply["given_up"],
            expired=dict(zip(names, reply["expired"][1::2], strict=True)),
        )

    def _values(self, batch: Batch) -> dict[str, Any]:
        """Return the arguments of a batch, by their names."""
        takes = not self._is_retired
        return {
            **self._filter.arguments,
            "lasting": self._filter.lasting,
            "run": self.run.hex(),
            "worker": self.worker,
            "number": self._number + 1,
            "lease": self._lease_ms,
            "entered": [self._entered(each) for each in batch.entered],
            "recorded": [{"bits": self._filter.bits_of(each)} for each in batch.recorded],
            "ended": [_ended(each) for each in batch.ended if self._has(each.id)],
            "asked": batch.asked,
            "downloaded": [
                {
                    "token": id_[_WORKER:],
                    "slot": slot_name(slot),
                    "pause": round(1000 * min(pause, _LONGEST_PAUSE)),
                }
                for id_, slot, pause in batch.downloaded
                if self._has(id_)
            ],
            "want": batch.want if takes else 0,
            "by_slot": self._by_slot,
            "downloads": [
                {"slot": slot_name(slot), "number": number}
                for slot, number in batch.downloads.items()
            ],
            "limit": self._limits.usual.concurrency,
            "has_delay": self._limits.usual.has_delay,
            "limits": [
                {
                    "slot": slot_name(slot),
                    "limit": limit.concurrency,
                    "has_delay": limit.has_delay,
                }
                for slot, limit in self._limits.slots.items()
            ],
            "stands_still": batch.stands_still,
            "may_start": batch.may_start and takes,
            "start_ended": batch.start_ended and takes,
            "is_over": batch.is_over and takes,
        }

    def _has(self, id_: bytes) -> bool:
        """Return whether a request was taken under the current id of this worker."""
        return id_.startswith(self.worker)

    def _entered(self, entered: Entered) -> dict[str, Any]:
        bits = once = None
        if entered.fingerprint is not None:
            bits = self._filter.bits_of(entered.fingerprint)
            if entered.once:
                once = self._filter.bits_of(once_in(self.run, entered.fingerprint))
        return {
            "is_filtered": entered.is_filtered,
            "is_recorded": entered.is_recorded,
            "newest_first": entered.newest_first,
            "order": member_start(entered),
            "data": entered.data,
            "via": entered.via,
            "bits": bits,
            "once": once,
            "fingerprint": entered.fingerprint or b"",
        }

    def counts(self) -> Mapping[State, int]:
        """Return how many requests of each state there are."""
        return read_counts(self._filter.server, self._filter.key)

    def close(self) -> Closed:
        """Return the unfinished requests of this worker to the queue, and leave it."""
        reply: Mapping[str, Any] = {"is_through": not self.worker, "others": 0, "ended": b""}
        while not reply["is_through"]:
            try:
                answer = self._filter.run(scripts.LEAVE, self._filter.id, self.worker)
            except OtherFilterError:  # the server has lost the queue
                return Closed()
            reply = layout.parsed_reply(layout.LEAVE_REPLY, answer)
        return Closed(self.counts(), reply["others"], _seconds(reply["ended"]))


def _ended(ended: Ended) -> dict[str, Any]:
    """Return the arguments of a batch for a request that has ended."""
    first = ended.first if ended.end is End.FAILED else None
    return {
        "token": ended.id[_WORKER:],
        "how": ended.end.value,
        "via": ended.via,
        "fingerprint": (first and first.fingerprint) or b"",
        "tries": ended.tries,
        "reason": ended.reason.encode(errors="replace"),
        "newest_first": bool(first and first.newest_first),
        "order": member_start(first) if first else b"",
        "data": first.data if first else b"",
    }


def _taken(entry: bytes) -> Taken:
    """Return a leased request; its id is the worker and the token, which only that worker uses."""
    member = Member.parsed(entry[_WORKER + _TOKEN :])
    return Taken(entry[: _WORKER + _TOKEN], member.data, member.slot, member.tries)


def _seconds(milliseconds: bytes) -> float:
    return int(milliseconds) / 1000 if milliseconds else 0.0

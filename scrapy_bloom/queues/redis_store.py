"""The store of CrashSafeScheduler in Redis or Valkey: one script applies a batch.

`scrapy_bloom.redis.scripts` documents the stored keys. The methods block while they wait for the
server, so a thread calls them.
"""

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
    MOST_DEATHS,
    MOST_TRIES,
    Batch,
    Closed,
    End,
    Ended,
    Entered,
    Joining,
    Limits,
    Opened,
    RejoinedError,
    Reply,
    Row,
    State,
    Taken,
    once_in,
    packed_order,
    parsed_order,
)
from scrapy_bloom.redis import layout, scripts
from scrapy_bloom.redis.backend import RedisBackend
from scrapy_bloom.redis.batch_script import BATCH
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.filter import LostKeysError, OtherFilterError
from scrapy_bloom.redis.layout import ENTERED_FLAGS, FLAGS
from scrapy_bloom.text import escaped

logger = logging.getLogger(__name__)

# The key of the rows of each state. Failed and waiting rows have one key.
KEY_OF: Mapping[State, str] = {
    State.PENDING: "pending",
    State.IN_FLIGHT: "leased",
    State.SUSPECT: "suspects",
    State.WAITING: "kept",
    State.FAILED: "kept",
    State.DEAD: "dead",
    State.UNREADABLE: "unreadable",
}

ID_BYTES = 8  # at the end of each member

_LONGEST_PAUSE = 86_400  # seconds
_WORKER = scripts.WORKER_BYTES
_LETTERS = {State.WAITING: b"w", State.FAILED: b"f", State.DEAD: b"d"}  # of other states: p
_NUMBERS = struct.Struct(">cBIQ")  # letter, tries, epoch, position
_LENGTH = struct.Struct(">I")
_TEXTS = 9  # after the numbers of a row
_NEWEST_FIRST = 2**53  # minus a position: in a member, if the newest comes first


class Flight(NamedTuple):
    """The id of a request that was taken.

    Attributes:
        entry: its member of `leased`.
        page: the page of its row; None if it has none.
        hops: the hops of its row.
        is_recorded: whether page and hops are recorded when the row is done.
        once: whether they are recorded for the run, too.
    """

    entry: bytes
    page: bytes | None
    hops: tuple[bytes, ...]
    is_recorded: bool
    once: bool

    @property
    def pages(self) -> Sequence[bytes]:
        """Its page, and hops."""
        return self.hops if self.page is None else (self.page, *self.hops)


def packed_row(row: Row, died: bytes) -> bytes:
    """Return a row as it is stored, with epoch 0.

    Args:
        row: the row, which no worker has.
        died: the ids of the workers that died with it.
    """
    flags = "".join(letter for name, letter in FLAGS.items() if getattr(row, name))
    texts = [
        *(flags.encode(), row.order, row.page or b"", row.waits_for),
        *(row.reason.encode(errors="replace"), _packed_texts(row.hops), died, b"", row.first),
    ]
    letter = _LETTERS.get(row.state, b"p")
    numbers = _NUMBERS.pack(letter, min(row.tries, 255), 0, row.position)
    return numbers + _packed_texts(texts) + row.data


def parsed_row(state: State, packed: bytes) -> Row:
    """Return a stored row; raise struct.error or ValueError if it is not one.

    Args:
        state: the state of the set that has the row; of one in `kept`, failed or waiting.
        packed: what is stored.
    """
    letter, tries, epoch, position = _NUMBERS.unpack_from(packed)
    texts, rest = _parsed_texts(packed[_NUMBERS.size :], _TEXTS)
    flags, order, page, waits_for, reason, hops, died, _, first = texts
    if state in (State.FAILED, State.WAITING):
        state = State.WAITING if letter == _LETTERS[State.WAITING] else State.FAILED
    slot, priority, rank, _ = parsed_order(order)
    row = Row(
        rest,
        state,
        slot,
        priority,
        rank,
        position=position,
        first=first,
        page=page or None,
        hops=tuple(_parsed_texts(hops)[0]),
        tries=tries,
        deaths=len(died) // _WORKER,
        epoch=epoch,
        reason=reason.decode(errors="replace"),
        waits_for=waits_for,
    )
    for name, letter_of_flag in FLAGS.items():
        setattr(row, name, letter_of_flag.encode() in flags)
    row.was_taken |= state is State.IN_FLIGHT
    return row


def _packed_texts(texts: Sequence[bytes]) -> bytes:
    return b"".join(part for text in texts for part in (_LENGTH.pack(len(text)), text))


def _parsed_texts(packed: bytes, number: int = 2**32) -> tuple[list[bytes], bytes]:
    """Return so many texts, or all, and the bytes after them."""
    texts: list[bytes] = []
    start = 0
    while len(texts) < number and (start < len(packed) or number < 2**32):
        (length,) = _LENGTH.unpack_from(packed, start)
        start += _LENGTH.size
        if len(packed) < start + length:
            raise ValueError("a text is too short")
        texts.append(packed[start : start + length])
        start += length
    return texts, packed[start:]


def copied_row(row: Row, number: int) -> tuple[bytes, bytes, list[tuple[str, bytes]]]:
    """Return the id of a row of a copied queue, its bytes, and its members, each with its key.

    Requests in flight and unreadable ones become pending. What failed or waits counts as of an
    earlier epoch than that of the copy, which is 1.

    Args:
        row: the row.
        number: its number in the copy, from 1 on.
    """
    id_ = number.to_bytes(ID_BYTES, "big")
    if row.state in (State.IN_FLIGHT, State.UNREADABLE):
        row = replace(row, state=State.PENDING)
    deaths = min(row.deaths, MOST_DEATHS - (row.state is not State.SUSPECT))
    died = b"".join(b"%016x" % each for each in range(deaths))  # any ids: these workers are dead
    position = _NEWEST_FIRST - row.position if row.newest_first else row.position
    in_order = row.order + position.to_bytes(8, "big") + id_
    kept, is_at_rest = bytes([row.is_start]) + bytes(4) + id_, row.state in _LETTERS
    own = {"dead": id_, "kept": kept}.get(KEY_OF[row.state], in_order)
    members = [(KEY_OF[row.state], own)]
    if KEY_OF[row.state] == "kept" and row.tries + 1 >= MOST_TRIES:
        members.append(("last_tries", kept))
    if row.state is State.WAITING:
        members.append(("waiting", _packed_texts([row.waits_for]) + bytes(4) + id_))
    has_page = row.page is not None and (row.was_taken or row.once or is_at_rest)
    pages = row.pages if has_page else row.hops
    members += [("open", _packed_texts([page]) + id_) for page in pages]
    return id_, packed_row(row, died), members


def read_counts(server: RedisServer, key: str) -> dict[State, int]:
    """Return how many rows of each state a queue has."""
    keys = layout.named_keys(key)
    names = [*dict.fromkeys(KEY_OF.values()), "waiting"]
    sizes = server.transaction(*[("ZCARD", keys[name]) for name in names])
    by_name = dict(zip(names, sizes, strict=True))
    counts = {state: by_name[name] for state, name in KEY_OF.items()}
    counts[State.WAITING] = by_name["waiting"]
    counts[State.FAILED] -= by_name["waiting"]
    return counts


def move_slice(
    server: RedisServer,
    key: str,
    state: State,
    to: State | None,
    *,
    first: bytes = b"-",
    last: bytes = b"+",
    slot: bytes | None = None,
) -> tuple[int, bytes]:
    """Make some rows of a state pending, or drop them.

    Args:
        server: the connection.
        key: the key of the filter.
        state: pending, failed, dead or unreadable.
        to: PENDING or None.
        first: where to begin, in the form of ZRANGEBYLEX.
        last: where to end.
        slot: only rows of the slot with this name.

    Returns:
        The number of rows that were moved, and where to go on; empty at the end.
    """
    values = {
        "from": KEY_OF[state],
        "to": to or "",
        "first": first,
        "last": last,
        "has_slot": slot is not None,
        "slot": slot or b"",
    }
    words = layout.words_of(layout.MOVE, values)
    number, going_on = server.script(scripts.MOVE, layout.keys_of(key), *words)
    return number, going_on


def slot_name(slot: str) -> bytes:
    """Return the name of a slot as rows have it."""
    return packed_order(slot, 0, 0).partition(b"\0")[0]


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
            is_first=bool(self.run) and not reply["earlier"],
            is_late=self._is_retired,
            retried=reply["retried"],
            others=reply["others"],
            ended_at=self.ended_at,
        )

    def _requeue_unreadable(self) -> None:
        self.ended_at = 0.0
        server, key, first = self._filter.server, self._filter.key, b"-"
        while first:
            number, first = move_slice(server, key, State.UNREADABLE, State.PENDING, first=first)
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
                "is_crawl": self._joining.is_crawl,
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
                self._is_retired = self._joining.is_crawl
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
        taken = zip(reply["taken"][::2], reply["taken"][1::2], strict=True)
        return Reply(
            queued=[each == "1" for each in reply["queued"].decode()],
            added=reply["added"],
            taken=[_taken(entry, packed) for entry, packed in taken],
            pending=self.pending,
            left=reply["left"],
            runs_start=reply["start"] == self.worker,
            is_started=reply["start"] == b"done",
            ended_at=self.ended_at,
            counters=(int(reply["pushed"]), int(reply["done"])),
            is_stopped=bool(reply["is_stopped"]),
            is_retired=self._is_retired,
            died=reply["died"],
            given_up=reply["given_up"],
            circles=reply["circles"],
            expired=dict(zip(names, reply["expired"][1::2], strict=True)),
        )

    def _values(self, batch: Batch) -> dict[str, Any]:
        """Return the arguments of a batch, by their names."""
        takes = not self._is_retired
        return {
            **self._filter.arguments,
            "lasting": self._filter.lasting,
            "keeps_failed": self._joining.keeps_failed,
            "run": self.run.hex(),
            "worker": self.worker,
            "number": self._number + 1,
            "lease": self._lease_ms,
            "entered": [self._entered(each) for each in batch.entered],
            "recorded": [self._filter.bits_of(each) for each in batch.recorded],
            "ended": [self._ended(each) for each in batch.ended],
            "downloaded": [
                {
                    "entry": id_.entry,
                    "slot": slot_name(slot),
                    "pause": round(1000 * min(pause, _LONGEST_PAUSE)),
                }
                for id_, slot, pause in batch.downloaded
                if id_.entry.startswith(self.worker)
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

    def _entered(self, entered: Entered) -> dict[str, Any]:
        fingerprint, replaces = entered.fingerprint, entered.replaces
        has_once = fingerprint is not None and entered.once
        flags = {**FLAGS, **ENTERED_FLAGS}
        del flags["was_taken"]
        return {
            "flags": "".join(flags[name] for name in flags if getattr(entered, name)),
            "order": entered.order,
            "data": entered.data,
            "fingerprint": fingerprint or b"",
            "bits": b"" if fingerprint is None else self._filter.bits_of(fingerprint),
            "once": self._once_bits_of(fingerprint or b"") if has_once else b"",
            "replaces": replaces.entry if replaces else b"",
            "records": self._records(replaces, replaces.pages) if replaces else [],
        }

    def _ended(self, ended: Ended) -> dict[str, Any]:
        flight: Flight = ended.id
        pages = flight.pages
        if ended.end is End.TAKEN_OVER:
            pages = [] if flight.page is None else [flight.page]
        return {
            "entry": flight.entry,
            "how": ended.end.value,
            "reason": ended.reason.encode(errors="replace"),
            "awaits": list(dict.fromkeys(ended.awaits)),
            "pages": pages,
            "records": self._records(flight, pages),
        }

    def _records(self, flight: Flight, pages: Sequence[bytes]) -> list[bytes]:
        """Return the bits that are recorded when a row is done; the script may keep them."""
        records = []
        for page in pages if flight.is_recorded else ():
            once = self._once_bits_of(page) if flight.once else b""
            records += [self._filter.lasting_bits_of(page), once]
        return records

    def _once_bits_of(self, fingerprint: bytes) -> bytes:
        return self._filter.lasting_bits_of(once_in(self.run, fingerprint))

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


def _taken(entry: bytes, packed: bytes) -> Taken:
    """Return a request that was taken."""
    row = parsed_row(State.IN_FLIGHT, packed)
    # Without hops, the page was recorded when it entered, but not for this run.
    is_recorded = row.is_filtered and bool(row.hops or row.once)
    flight = Flight(entry, row.page, tuple(row.hops), is_recorded, row.once)
    return Taken(flight, row.data, row.slot, row.tries)


def _seconds(milliseconds: bytes) -> float:
    return int(milliseconds) / 1000 if milliseconds else 0.0

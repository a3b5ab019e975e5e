"""The store of CrashSafeScheduler in Redis or Valkey: one script applies a batch.

`scrapy_bloom.redis.layout` documents the stored keys. The methods block while they wait for the
server, so a thread calls them.
"""

import math
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any, NamedTuple

from scrapy_bloom.exceptions import SettingError, StorageError
from scrapy_bloom.queues.collected import Kept
from scrapy_bloom.queues.redis_queue import RedisQueue, parsed_row
from scrapy_bloom.queues.store import (
    Batch,
    End,
    Ended,
    Entered,
    Joining,
    Opened,
    QueueStatus,
    RejoinedError,
    Reply,
    Share,
    State,
    Taken,
    once_in,
    slot_key,
)
from scrapy_bloom.redis.backend import NEW, LostFilterError, RedisBackend
from scrapy_bloom.redis.layout import flags_of
from scrapy_bloom.text import escaped

# Names of a script's reply that are those of `Reply`.
_AS_THEY_ARE = (
    *("added", "pending", "unfinished", "runs_start", "is_started", "is_stopped", "died"),
    *("given_up", "circles", "workers", "rank"),
)

_WORKER_BYTES = 16  # of the id of a worker


class Flight(NamedTuple):
    """The id of a request that was taken."""

    entry: bytes  # its member of `leased`
    page: bytes | None  # that of its row
    pages: Sequence[bytes]  # its page, and hops
    is_recorded: bool  # whether these are recorded when the row is done
    once: bool  # whether they are recorded for the run, too


class RedisStore:
    """The access of one worker to a shared queue and its filter.

    The class implements `Store` as described there. Each method may raise an OutageError or a
    RefusedError; then it may be called again with the same arguments.

    Args:
        backend: the filter, which the worker has joined.
        lease_secs: how long a worker keeps its requests without a heartbeat.
    """

    def __init__(self, backend: RedisBackend, *, lease_secs: float) -> None:
        self.name = f"{backend.server.address}, key {escaped(backend.key)}"
        self.run = self.worker = b""  # their ids
        self.pending = 0  # how many requests can be taken
        self._filter = backend
        self._queue = RedisQueue(backend.server, backend.key)
        self._cursor = b""  # where to begin in `pending`
        self._lease_ms = round(1000 * lease_secs)
        self._joining = Joining("")
        self._began = 0  # when the run began, in ms since 1970
        self._is_retired = False
        self._number = 0  # of the last batch that was applied
        self._kept = Kept()
        self._slow_since = math.inf  # on a monotonic clock

    # Joining.

    def open(self, joining: Joining) -> Opened:
        self._joining, self._began, self._is_retired = joining, 0, False
        self.run = run = secrets.token_bytes(8)  # if this worker begins it
        counts = self._queue.counts()
        reply = self._joined(is_lost=False)
        ended_at = reply["ended"] / 1000
        if counts[State.UNREADABLE] and not (reply["others"] or self._is_retired):
            self.pending += self._queue.move(State.UNREADABLE, State.PENDING)
            ended_at = 0.0
        return Opened(
            run=self._joining.run,
            began=self.run == run,
            counts=counts,
            is_first=bool(self.run) and reply["runs"] <= 1,
            is_late=self._is_retired,
            retried=reply["retried"],
            others=reply["others"],
            ended_at=ended_at,
        )

    def _joined(self, *, is_lost: bool) -> Mapping[str, Any]:
        """Join the queue as a new worker, perhaps of a new filter, and return the reply."""
        while True:
            try:
                if is_lost:
                    self._filter.start_over()
                return self._join()
            except LostFilterError:
                is_lost = True

    def _join(self) -> Mapping[str, Any]:
        """Join the queue, and return the reply."""
        worker = secrets.token_hex(_WORKER_BYTES // 2).encode()
        if self.worker:  # the server may have lost bits, or the lease has expired
            self._filter.drop_mirrors()
        reply = self._filter.run(
            "join",
            {
                "worker": worker,
                "name": f"{socket.gethostname()}:{os.getpid()}",
                "spider": self._joining.spider,
                "lease": self._lease_ms,
                "former": self.worker,
                "run": self.run.hex(),
                "run_name": self._joining.run,
                "began": self._began,
                "is_crawl": self._joining.is_crawl,
            },
        )
        if reply["status"] == b"spider":
            other = reply["spider"].decode(errors="replace")
            raise SettingError(
                f"{self._filter.name} belongs to spider {escaped(other)!r}, but this crawl runs "
                f"{self._joining.spider!r}; set another BLOOM_REDIS_KEY, for example one with "
                '"%(spider)s"'
            )
        self.pending = reply["pending"]
        self._is_retired = self._is_retired or reply["is_late"]
        if self.worker:  # the server may have an older state
            self._filter.refresh()
        self._adopt_run(reply)
        self.worker, self._number = worker, 0
        return reply

    def _adopt_run(self, reply: Mapping[str, Any]) -> None:
        """Belong to the run of a reply, under whose name this worker joins again after a loss.

        Each worker has the filter do what is due, so no batch of the run is applied before that.
        """
        self.run = bytes.fromhex(reply["run"].decode())
        name = reply["run_name"].decode(errors="surrogatepass")
        self._joining = replace(self._joining, run=name)
        self._began = reply["began"]
        self._filter.begin_run(self._began / 1000)

    # Batches.

    def knows(self, fingerprint: bytes, *, once: bool = False) -> bool:
        return self._filter.knows(once_in(self.run, fingerprint) if once else fingerprint)

    def apply(self, batch: Batch) -> Reply:
        """Apply a batch as described there.

        Raises a RejoinedError if the server has lost the queue or changes of it, or does not know
        this worker any more; a StorageError if replies come too late for the lease.
        """
        begun = time.monotonic()
        try:
            reply = self._exchanged(batch)
        except LostFilterError as error:
            self._joined(is_lost=True)
            raise RejoinedError(self.name, self._kept.lost(-1)) from error
        self._number += 1
        answer = self._parsed(batch, reply)
        self._check_speed(begun)
        self._kept.add(compress(batch.entered, answer.queued), self._number)
        return answer

    def _check_speed(self, begun: float) -> None:
        """Raise a StorageError if replies have come too late for the lease until the deadline."""
        secs, lease_secs = time.monotonic() - begun, self._lease_ms / 1000
        if secs < lease_secs:
            self._slow_since = math.inf
        elif begun + secs >= self._filter.server.deadline(self._slow_since):
            raise StorageError(
                f"{self._filter.server.address} takes {secs:.1f} seconds for an answer, and "
                f"BLOOM_QUEUE_LEASE_SECS is {lease_secs:g}, so each lease has expired before this "
                "worker can crawl anything. Set BLOOM_QUEUE_LEASE_SECS to several times as much"
            )
        else:  # the first slow reply may be the end of an outage
            self._slow_since = min(self._slow_since, begun)

    def _exchanged(self, batch: Batch) -> Mapping[str, Any]:
        """Send a batch until it is applied; the server may have to make keys first."""
        if not self._filter.live:  # an outage has interrupted a call that found the filter lost
            raise LostFilterError
        self._filter.keep_up()
        while True:
            reply = self._filter.run("batch", self._values(batch))
            match reply["status"]:
                case b"ok":
                    return reply
                case b"back":
                    raise self._rejoined()
                case b"run":
                    self._is_retired = self._joining.is_crawl
                    self._adopt_run(reply)
                case b"version":
                    self._filter.refresh()

    def _rejoined(self) -> RejoinedError:
        """Join again, and return what tells the caller to start over."""
        last = self._join()["last"]
        return RejoinedError(self.name, self._kept.lost(last))

    def _parsed(self, batch: Batch, reply: Mapping[str, Any]) -> Reply:
        """Return the parsed reply, and keep what it tells about the queue and the filter."""
        self.pending = reply["pending"]
        fingerprints = self._fingerprints_of(batch)
        for fingerprint, place in zip(fingerprints, reply["places"], strict=False):
            if place != NEW:
                self._filter.add_to_mirror(fingerprint, place)
        self._filter.live[-1].count = reply["count"]
        self._cursor = reply["cursor"] or self._cursor
        return Reply(
            queued=[letter == "1" for letter in reply["queued"].decode()],
            taken=[_taken(*entry_and_row) for entry_and_row in reply["taken"]],
            ended_at=reply["ended"] / 1000,
            counters=(reply["pushed"], reply["done"]),
            is_retired=self._is_retired,
            expired={
                name.decode(errors="backslashreplace"): number for name, number in reply["expired"]
            },
            **{name: reply[name] for name in _AS_THEY_ARE},
        )

    def _fingerprints_of(self, batch: Batch) -> list[bytes]:
        """Return the fingerprints that enter, that of its run after it, and the recorded ones."""
        fingerprints = []
        for entered in batch.entered:
            if entered.fingerprint is not None:
                fingerprints.append(entered.fingerprint)
                if entered.once:
                    fingerprints.append(once_in(self.run, entered.fingerprint))
        return fingerprints + list(batch.recorded)

    def _values(self, batch: Batch) -> dict[str, Any]:
        """Return the arguments of a batch, by their names."""
        takes = not self._is_retired
        return {
            **self._filter.stored.arguments,
            "keeps_failed": self._joining.keeps_failed,
            "run": self.run.hex(),
            "worker": self.worker,
            "number": self._number + 1,
            "lease": self._lease_ms,
            "entered": [self._entered(request) for request in batch.entered],
            "recorded": [self._filter.bits_of(page) for page in batch.recorded],
            "ended": [self._ended(ended) for ended in batch.ended],
            "want": batch.want if takes else 0,
            "downloads": {slot_key(slot): number for slot, number in batch.downloads.items()},
            "shares": self._in_turn(batch.shares),
            "stands_still": batch.stands_still,
            "may_start": batch.may_start and takes,
            "start_ended": batch.start_ended and takes,
            "is_over": batch.is_over and takes,
        }

    def _in_turn(self, shares: Sequence[Share]) -> list[Share]:
        """Return shares, beginning where the last batch has stopped."""
        cursor = self._cursor
        later = [share._replace(first=max(share.first, cursor)) for share in shares]
        earlier = [share._replace(last=min(share.last, cursor)) for share in shares]
        return [share for share in later + earlier if share.first < share.last]

    def _entered(self, entered: Entered) -> dict[str, Any]:
        fingerprint, replaces = entered.fingerprint, entered.replaces
        has_once = fingerprint is not None and entered.once
        return {
            "flags": flags_of(entered),
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

    def close(self) -> QueueStatus | None:
        is_through = not self.worker
        while not is_through:
            try:
                is_through = self._filter.run("leave", {"worker": self.worker})["is_through"]
            except LostFilterError:  # the server has lost the queue
                return None
        status = self._queue.status()
        return None if status.live_workers else status


def _taken(entry: bytes, packed: bytes) -> Taken:
    """Return a request that was taken."""
    row = parsed_row(State.IN_FLIGHT, packed)
    # Without hops, the page was recorded when it entered, but not for this run.
    is_recorded = row.is_filtered and bool(row.hops or row.once)
    flight = Flight(entry, row.page, tuple(row.pages), is_recorded, row.once)
    return Taken(flight, row.data, row.slot, row.tries)

"""The queue of CrashSafeScheduler in Redis or Valkey, shared by many workers.

What a worker has taken stays in the queue, leased to it, until it is done. If the worker dies, the
others get it. `scrapy_bloom.queues.scripts` has the steps.
"""

import logging
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.queues import scripts
from scrapy_bloom.queues.batch import Taken
from scrapy_bloom.queues.lease import Lease
from scrapy_bloom.queues.members import (
    WORKER_BYTES,
    keys_of_queue,
    parsed,
    parsed_leased,
    prefix,
    slot_name,
)
from scrapy_bloom.queues.recent import Push, RecentPushes
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.text import counted, escaped

logger = logging.getLogger(__name__)

_LOOK_AGAIN_SECS = 0.25  # when nothing was to be taken
_MOST_REJOINS = 10  # of one step

Row = tuple[bytes, bytes]  # the worker that has taken a request, and its position


class SharedRequests:
    """The requests of a crawl that are not done yet, shared by its workers; see `RequestQueue`.

    Each method may raise an OutageError or a RefusedError. If the server has lost the queue, but
    not the filter, any may raise a StorageError, the constructor too.

    Args:
        server: the connection, which stays open at the close.
        renewing: one more to the same server, for the thread that renews the lease.
        key: the filter's name.
        by_slot: requests are taken slot by slot; else by priority alone.
        lease_secs: how long a worker keeps what it has taken without a sign of life.
        most_in_flight: how many are taken and not done at most, as the server knows; 0: any number.
        prefetch: how many are taken with one round trip.
        record: called with what a dead worker pushed last, and may not have recorded; and with what
            is pushed again, since the server has lost it.

    Attributes:
        id: of this queue; another one if the server has lost it, and a new one was begun.
        ended_at: since when nothing is left of the crawl, in seconds since 1970; 0: something is.
        can_start: whether nobody seems to have run the spider's start(), nor another to run it now.
        is_last: whether no other worker was there when this one came, or, after the close, left.
        set_aside_for_later: after the close, how many requests could not be made again.
        flush, was_flushed: have the close remove a queue that is over, if it is the last; it did.
    """

    def __init__(
        self,
        server: RedisServer,
        renewing: RedisServer,
        key: str,
        *,
        by_slot: bool,
        lease_secs: float,
        most_in_flight: int = 16,
        prefetch: int = 4,
        record: Callable[[bytes], object] = lambda _: None,
    ) -> None:
        self.name = f"{server.address}, key {escaped(key)}"
        self.ended_at = 0.0
        self.can_start, self.set_aside_for_later = True, 0
        self.is_last = self.flush = self.was_flushed = False
        self._server = server
        self._renewing = renewing
        self._key = key
        self._keys = keys_of_queue(key)
        self._by_slot = int(by_slot)
        self._lease_ms = round(1000 * lease_secs)
        self._most_in_flight = most_in_flight
        self._prefetch = prefetch
        self._record = record
        self.id = b""
        self._waiting = 0  # as the server last said
        self._former = b""  # what this worker was before its lease ended
        self._to_push: deque[Push] = deque()
        self._pushed = RecentPushes()
        self._look_again = 0.0  # on a monotonic clock
        self._join()
        self._lease = Lease(self._renew, lease_secs)

    @property
    def pending(self) -> int:
        """Return how many requests can be taken, here or by others, as far as is known here."""
        return self._waiting + len(self._held)

    def _run(self, script: str, *args: Any) -> Any:
        return self._server.script(script, self._keys, self._worker, *args)

    def _renew(self) -> bool:
        args = self._keys, self._worker, self._lease_ms
        return bool(self._renewing.script(scripts.RENEW, *args, patient=False))

    # Coming and going.

    def _enter(self) -> None:
        """Become a new worker, which holds nothing."""
        self._worker = secrets.token_hex(WORKER_BYTES // 2).encode()
        self._number = 0  # of the last push
        self._token = 0  # of the last take
        self._held: deque[tuple[Taken, str]] = deque()  # taken and not handed out, with the slot
        self._slots: dict[Row, str] = {}  # of what was handed out, and is not done
        self._done: list[bytes] = []  # positions that the server has not been told of

    def _join(self) -> None:
        self._enter()
        name = f"{socket.gethostname()}:{os.getpid()}"
        answer = self._run(scripts.JOIN, name, self._lease_ms, secrets.token_hex(8), self._former)
        if answer[0] == 2:
            raise StorageError(
                f"The crawl of the queue in {self.name} has ended while this worker stood still, "
                "and was flushed (BLOOM_REDIS_FLUSH): nothing is left to do"
            )
        if not answer[0]:
            raise StorageError(
                f"{self._server.address} has lost the queue of {self._key!r}, and not the filter: "
                "what waited in the queue looks seen, and nobody would ever crawl it. Start over, "
                "with another BLOOM_REDIS_KEY or after `scrapy bloom reset REDIS-URL --key "
                f"{self._key}`; with --queue, that command keeps the filter, and the crawl goes on "
                "without those pages"
            )
        _, queue, last, returned, others, self._waiting, ended = answer
        self.is_last = not others
        is_same, self.id = queue == self.id, queue
        self._note_end(ended)
        if not self._former:
            return
        # What the server does not know any more, though it has answered that it does.
        lost = self._pushed.since(int(last.split(b" ", 1)[0]) if last else 0) if is_same else ()
        self._to_push.extendleft(reversed(lost))
        self._pushed = RecentPushes()
        self._former = b""
        logger.info(
            "This worker's lease of the queue in %s %s: it goes on with a new one, and %s "
            "pending again",
            self.name,
            "had ended, or the server has lost it" if is_same else "was lost by the server",
            counted(returned + len(lost), "request is", "requests are"),
        )

    def _rejoin(self) -> None:
        self._former = self._former or self._worker
        self._join()
        self._lease.renewed()

    def _note_end(self, ended: bytes | None) -> None:
        self.ended_at = float(ended) / 1000 if ended else 0.0

    def close(self) -> None:
        """Give back what was taken and is not done, and leave the queue to the others."""
        self._server.hurry()
        self._lease.end()
        self._held.clear()
        self.is_last = False  # in an outage, nobody knows
        answer = self._run(scripts.LEAVE, int(self.flush), len(self._done), *self._done)
        others, self.set_aside_for_later, self._waiting, ended, was_flushed = answer
        self.is_last, self.was_flushed = not others, bool(was_flushed)
        self._note_end(ended)

    # The spider's start().

    def claim_start(self) -> bool:
        """Return whether this worker is the one to run the spider's start()."""
        self.can_start = False
        return bool(self._run(scripts.START))

    def end_start(self, queue: bytes, *, is_through: bool) -> None:
        """Note that start() is through for this queue, by its id; or let another worker try.

        If the lease has ended meanwhile, and another worker runs it, that is left to that one.
        """
        self._run(scripts.STARTED, queue, "1" if is_through else "")

    # The steps of a request.

    def push(self, data: bytes, *, slot: str, priority: int, rank: int, newest_first: bool) -> int:
        """Add a pending request; sent twice, it is stored once."""
        self._to_push.append(Push(prefix(slot, priority, rank), int(newest_first), data))
        self._push_all()
        self._look_again = 0.0
        return self._number

    def _push_all(self) -> None:
        rejoins = 0
        while self._to_push:
            push = self._to_push[0]
            position = self._run(scripts.PUSH, self._number + 1, *push[:3])
            if position:
                self._number += 1
                self._waiting += 1
                self.ended_at = 0.0
                self._member = push.prefix + position + push.data
                self._pushed.add(self._number, self._to_push.popleft())
                if push.is_again:
                    self._record(push.data)
            else:
                rejoins = self._again(rejoins)

    def take_back(self) -> None:
        """Remove the request that was pushed last, unless another worker has taken it already."""
        self._pushed.drop_last()
        self._waiting -= self._run(scripts.TAKE_BACK, self._member)

    def take(self, active: Callable[[str], int] = lambda _: 0) -> Taken | None:
        """Take the next request, if any; the server is asked for several at once."""
        in_flight = len(self._slots) + len(self._done)
        if self._held:
            if self._lease.may_be_over() or 0 < self._most_in_flight <= in_flight:
                self._ask(active)
        elif time.monotonic() >= self._look_again or (self._done and not self._slots):
            self._ask(active)
        if not self._held:
            return None
        taken, slot = self._held.popleft()
        self._slots[taken.id] = slot
        return taken

    def _ask(self, active: Callable[[str], int]) -> None:
        """Tell the server what is done, and take more."""
        rejoins = number = 0
        answer: Any = [0]
        while not answer[0]:
            number = self._prefetch - len(self._held)
            token = f"{self._token + 1:08x}"
            busy = [
                word
                for slot in set(self._slots.values())
                if (downloads := active(slot))
                for word in (slot_name(slot), downloads)
            ]
            answer = self._run(
                scripts.TAKE,
                *(self._number, token, number, self._lease_ms, self._by_slot),
                *(len(self._done), *self._done),
                *busy,
            )
            if not answer[0]:
                rejoins = self._again(rejoins)
                self._push_all()
        self._token += 1
        self._done.clear()
        _, self._waiting, leased, start, ended, dead, members = answer
        # Of itself, it says so only while it runs it, or if the server has lost that it is through.
        self.can_start = start in {None, self._worker}
        self._note_end(ended)
        for name, newest, held in dead:
            if newest:
                self._record(parsed(newest).data)
            logger.info(
                "The worker %s gives no sign of life: its lease is over, and %s pending again, "
                "which it had taken of the queue in %s",
                escaped((name or b"?").decode(errors="backslashreplace")),
                counted(held, "request is", "requests are"),
                self.name,
            )
        for _, position, member in map(parsed_leased, members):
            self._held.append((Taken((self._worker, position), member.data), member.slot))
        if len(members) < number:
            self._look_again = time.monotonic() + _LOOK_AGAIN_SECS
        if leased and not (self._held or self._slots):
            # The server has forgotten that they are done: a replica has taken its place.
            self._rejoin()

    def _again(self, rejoins: int) -> int:
        if rejoins == _MOST_REJOINS:
            raise StorageError(
                f"The queue in {self.name} ends each lease at once; check the clock of the server, "
                "and BLOOM_QUEUE_LEASE_SECS"
            )
        self._rejoin()
        return rejoins + 1

    def done(self, row: Row) -> None:
        """Remove a request that is in flight, and done, unless the lease has ended meanwhile."""
        # What was taken from a former self is not this worker's to remove.
        if self._slots.pop(row, None) is not None:
            self._done.append(row[1])

    def set_aside(self, row: Row) -> None:
        """Keep a request for the first worker of a later run: no worker of this one gets it."""
        if self._slots.pop(row, None) is not None:
            self._run(scripts.SET_ASIDE, row[1])

"""Read the figures of a queue in Redis, and change the queue, without being one of its workers.

`scrapy_bloom.redis.layout` documents the keys. They are untrusted: damaged values are refused.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from scrapy_bloom.exceptions import RefusedError, StorageError
from scrapy_bloom.queues.redis_store import (
    HASH_BYTES,
    ID_BYTES,
    KEY_OF,
    move_slice,
    parsed_row,
    read_counts,
)
from scrapy_bloom.queues.store import (
    QueueStatus,
    Row,
    RunBegin,
    State,
    Worker,
    packed_order,
    parsed_order,
    slot_key,
    slot_name,
)
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.layout import QUEUE_FIELDS, keys_of, named_keys
from scrapy_bloom.redis.lua_scripts import packed, reply_of, script
from scrapy_bloom.redis.stored import ID, check_text, parsed_whole

_READ = 100  # how many rows are read at once
_ORDER = packed_order("", 0, 0)  # after the name of a slot


class RedisQueue:
    """A queue on a server, for commands; implements `Queue`.

    Args:
        server: the connection.
        key: the key of the filter.
    """

    def __init__(self, server: RedisServer, key: str) -> None:
        self._server = server
        self._key = key
        self._keys = named_keys(key)

    def counts(self) -> Mapping[State, int]:
        """Return how many requests of each state there are."""
        return read_counts(self._server, self._key)

    def status(self) -> QueueStatus:
        """Return the figures of the queue."""
        status = read_state(self._server, self._key)  # None: the queue was removed meanwhile
        return status or QueueStatus(dict.fromkeys(State, 0))

    def runs(self) -> list[RunBegin]:
        """Return the begins of all runs."""
        begins = []
        for name, value in self._server.send("HGETALL", self._keys["runs"]).items():
            try:
                began, entered, done, failed, dead, ended = (
                    parsed_whole(number, "figure of a run") for number in value.split(b" ")
                )
                text, counts = name.decode(errors="backslashreplace"), (entered, done, failed, dead)
                begins.append(RunBegin(text, began / 1000, *counts, ended / 1000))
            except ValueError as error:
                raise _damaged(self._server, self._key, error) from None
        return begins

    def slots(self) -> Mapping[str, int]:
        """Return how many requests of each slot are pending, in the order of taking."""
        found: dict[str, int] = {}
        start = b"-"
        while some := self._slots_from(start):
            for slot, number in zip(some[::2], some[1::2], strict=True):
                found[parsed_order(slot[HASH_BYTES:] + _ORDER)[0]] = number
            start = b"(" + some[-2] + b"\1"
        return found

    def _slots_from(self, first: bytes) -> list[Any]:
        values = packed({"first": first})
        reply = reply_of(self._server.script(script("slots"), keys_of(self._key), values))
        return list(reply["slots"])

    def requests(self, state: State, slot: str | None = None) -> Iterator[Row]:
        """Return the rows of a state, or of one of its slots; of each slot in the order of taking.

        Failed, waiting and dead ones are in the order in which they entered.
        """
        first, last = _range(state, slot)
        key, rows = self._keys[KEY_OF[state]], self._keys["rows"]
        while some := self._server.send("ZRANGEBYLEX", key, first, last, "LIMIT", 0, _READ):
            stored = self._server.send("HMGET", rows, *[member[-ID_BYTES:] for member in some])
            for row_bytes in filter(None, stored):  # one may be done meanwhile
                row = self._parsed(state, row_bytes)
                if row.state is state and (slot is None or slot_name(slot) == slot_name(row.slot)):
                    yield row
            first = b"(" + some[-1]

    def _parsed(self, state: State, stored: bytes) -> Row:
        try:
            return parsed_row(state, stored)
        except ValueError as error:
            raise _damaged(self._server, self._key, error) from None

    def move(self, state: State, to: State | None, slot: str | None = None) -> int:
        """Make failed or dead rows pending as they first entered, or drop these or pending ones.

        Returns their number. Crawls may use the queue meanwhile.
        """
        name, moved = None if slot is None else slot_name(slot), 0
        first, last = _range(state, slot)
        while first:
            number, first = move_slice(
                self._server, self._key, state, to, first=first, last=last, slot=name
            )
            moved += number
        return moved


def _range(state: State, slot: str | None) -> tuple[bytes, bytes]:
    """Return the members of a set that may be of a slot, in the form of ZRANGEBYLEX."""
    if slot is None or state not in (State.PENDING, State.SUSPECT):
        return b"-", b"+"
    return b"[" + slot_key(slot) + b"\0", b"(" + slot_key(slot) + b"\1"


def read_state(server: RedisServer, key: str) -> QueueStatus | None:
    """Return the figures of the queue of a filter, None without a queue; raises StorageError."""
    names = ("id", "crawl", "run_name", "pushed", "done", "start", "ended")
    filter_id, crawl, run, pushed, done, start, ended = server.send("HMGET", key, *names)
    if filter_id is None or (crawl is None and pushed is None):
        return None
    counts = read_counts(server, key)
    try:
        return QueueStatus(
            spider=(crawl or b"").decode(errors="backslashreplace"),
            run=(run or b"").decode(errors="backslashreplace"),
            counts=counts,
            done=parsed_whole(done or b"0", "number of requests done"),
            is_started=start == b"done",
            ended_at=parsed_whole(ended or b"0", "end of the crawl") / 1000,
            workers=_workers(server, named_keys(key)),
        )
    except ValueError as error:
        raise _damaged(server, key, error) from None


def read_unused(server: RedisServer, key: str, done: str, hint: str = "") -> QueueStatus | None:
    """Return the figures of a queue; raise a StorageError if workers use it: nothing was `done`."""
    state = read_state(server, key)
    if state and state.live_workers:
        raise StorageError(
            f"{state.users} the queue {key!r} in {server.address} now; nothing was {done}. Stop "
            "the workers, and try again (a killed worker counts until its lease expires, "
            f"BLOOM_QUEUE_LEASE_SECS){hint}"
        )
    return state


def _workers(server: RedisServer, names: dict[str, str]) -> list[Worker]:
    fields, now = server.send("HGETALL", names["workers"]), 1000 * server.now()
    ends = {name: until for name, until in fields.items() if b":" not in name}
    for worker in ends:
        check_text(ID, worker, "worker")
    counts = server.batches(
        [("ZLEXCOUNT", names["leased"], b"[" + each, b"(" + each + b"\xff") for each in ends]
    )

    def field(worker: bytes, name: bytes, what: str) -> int:
        return parsed_whole(fields.get(worker + name, b"0"), what)

    workers = []
    for (worker, until), in_flight in zip(ends.items(), counts, strict=True):
        left = parsed_whole(until, "end of a lease") - now
        lease = field(worker, b":lease", "lease")
        workers.append(
            Worker(
                worker.decode(),
                fields.get(worker + b":name", b"?").decode(errors="backslashreplace"),
                in_flight,
                is_alive=left >= 0,
                done=field(worker, b":done", "number of requests done"),
                heartbeat_secs=max(0.0, (lease - left) / 1000),
                lease_secs=lease / 1000,
            )
        )
    return workers


def remove_queue(server: RedisServer, key: str) -> None:
    """Remove the queue of a filter and all its requests, for all workers."""
    filter_key, *others = keys_of(key)
    server.transaction(("UNLINK", *others), ("HDEL", filter_key, *QUEUE_FIELDS))


def stop_workers(server: RedisServer, key: str, ids: Iterable[str]) -> None:
    """Ask workers, by their ids, to shut down gracefully at their next batch."""
    server.script(script("stop"), keys_of(key), packed({"workers": list(ids)}))


def _damaged(server: RedisServer, key: str, error: ValueError) -> RefusedError:
    return RefusedError(
        f"the queue {key!r} in {server.address} is damaged ({error}); it was left as it is. "
        "Delete it with `scrapy bloom reset --queue --force`"
    )

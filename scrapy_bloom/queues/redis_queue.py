"""Read the rows and figures of a queue in Redis, and change them, without being a worker.

`scrapy_bloom.redis.layout` documents the keys. They are untrusted: damaged values are refused.
"""

from collections.abc import Iterable, Iterator, Mapping

from scrapy_bloom.exceptions import RefusedError, StorageError
from scrapy_bloom.queues.store import (
    MOST_DEATHS,
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
from scrapy_bloom.redis.layout import FLAGS, is_field_of_queue, keys_of, named_keys
from scrapy_bloom.redis.lua_scripts import packed, reply_of, script, unpacked
from scrapy_bloom.redis.stored import ID, check_text, parsed_whole

# The key of the rows of each state. Failed and waiting rows have one key.
_KEY_OF: Mapping[State, str] = {
    State.PENDING: "pending",
    State.IN_FLIGHT: "leased",
    State.SUSPECT: "suspects",
    State.WAITING: "kept",
    State.FAILED: "kept",
    State.DEAD: "dead",
    State.UNREADABLE: "unreadable",
}

_ID_BYTES = 8  # at the end of each member of a set
_HASH_BYTES = 4  # at the beginning of each member of `pending`
_WORKER_BYTES = 16  # of the id of a worker
_LETTERS = {State.WAITING: "w", State.FAILED: "f", State.DEAD: "d"}  # of other states: p
_ORDER = packed_order("", 0, 0)  # after the name of a slot
_READ = 100  # how many rows are read at once


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

    def counts(self) -> dict[State, int]:
        """Return how many requests of each state there are."""
        names = [*dict.fromkeys(_KEY_OF.values()), "waiting"]
        sizes = self._server.transaction(*[("ZCARD", self._keys[name]) for name in names])
        by_name = dict(zip(names, sizes, strict=True))
        waiting = by_name["waiting"]
        counts = {state: by_name[name] for state, name in _KEY_OF.items()}
        return counts | {State.WAITING: waiting, State.FAILED: by_name["kept"] - waiting}

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
        slots: dict[str, int] = {}
        first = b"-"
        while some := self._server.script(script("slots"), [self._keys["pending"]], first):
            for slot, number in zip(some[::2], some[1::2], strict=True):
                slots[parsed_order(slot[_HASH_BYTES:] + _ORDER)[0]] = number
            first = b"(" + some[-2] + b"\1"
        return slots

    def requests(self, state: State, slot: str | None = None) -> Iterator[Row]:
        """Return the rows of a state, or of one of its slots; of each slot in the order of taking.

        Failed, waiting and dead ones are in the order in which they entered.
        """
        first, last = _range(state, slot)
        key, rows = self._keys[_KEY_OF[state]], self._keys["rows"]
        while some := self._server.send("ZRANGEBYLEX", key, first, last, "LIMIT", 0, _READ):
            stored = self._server.send("HMGET", rows, *[member[-_ID_BYTES:] for member in some])
            for row_bytes in filter(None, stored):  # one may be done meanwhile
                try:
                    row = parsed_row(state, row_bytes)
                except ValueError as error:
                    raise _damaged(self._server, self._key, error) from None
                if row.state is state and (slot is None or slot_name(slot) == slot_name(row.slot)):
                    yield row
            first = b"(" + some[-1]

    def move(self, state: State, to: State | None, slot: str | None = None) -> int:
        """Make failed or dead rows pending as they first entered, or drop these or pending ones.

        Unreadable ones become pending as they are. Returns their number. Crawls may use the queue
        meanwhile.
        """
        first, last = _range(state, slot)
        values = {
            "from": _KEY_OF[state],
            "to": to or "",
            "last": last,
            "slot": False if slot is None else slot_name(slot),
        }
        moved = 0
        while first:
            words = packed({**values, "first": first})
            reply = reply_of(self._server.script(script("move"), keys_of(self._key), words))
            moved, first = moved + reply["number"], reply["first"]
        return moved


def _range(state: State, slot: str | None) -> tuple[bytes, bytes]:
    """Return the members of a set that may be of a slot, in the form of ZRANGEBYLEX."""
    if slot is None or state not in (State.PENDING, State.SUSPECT):
        return b"-", b"+"
    return b"[" + slot_key(slot) + b"\0", b"(" + slot_key(slot) + b"\1"


def parsed_row(state: State, stored: bytes) -> Row:
    """Return a stored row of the set of a state; raise a ValueError if it is not one."""
    try:
        letter, tries, epoch, position, flags, order, page, *others = unpacked(stored)
        waits_for, reason, hops, died, _, first, data = others
        if state in (State.FAILED, State.WAITING):
            state = State.WAITING if letter == b"w" else State.FAILED
        slot, priority, rank, _ = parsed_order(order)
        row = Row(
            data,
            state,
            slot,
            priority,
            rank,
            position=position,
            first=first,
            page=page or None,
            hops=tuple(hops),
            tries=tries,
            deaths=len(died) // _WORKER_BYTES,
            epoch=epoch,
            reason=reason.decode(errors="replace"),
            waits_for=waits_for,
        )
        for name, letter_of_flag in FLAGS.items():
            setattr(row, name, letter_of_flag.encode() in flags)
    except Exception as error:
        raise ValueError(f"{stored[:60]!r} is not a request of CrashSafeScheduler") from error
    row.was_taken |= state is State.IN_FLIGHT
    return row


def load_rows(server: RedisServer, key: str, filter_id: str, rows: Mapping[int, Row]) -> bool:
    """Add rows of another queue, by their new ids; return False if the filter has another id.

    Requests that were in flight are pending. What has failed or waits counts as of epoch 0.
    """
    loaded = []
    for id_, row in rows.items():
        state = State.PENDING if row.state is State.IN_FLIGHT else row.state
        deaths = min(row.deaths, MOST_DEATHS - (state is not State.SUSPECT))
        died = b"".join(b"%016x" % number for number in range(deaths))  # any ids of dead workers
        flags = "".join(letter for name, letter in FLAGS.items() if getattr(row, name))
        values = [
            *(_LETTERS.get(row.state, "p"), min(row.tries, 255), 0, row.position, flags, row.order),
            *(row.page or b"", row.waits_for, row.reason.encode(errors="replace"), [*row.hops]),
            *(died, [], row.first, row.data),
        ]
        loaded.append((id_, _KEY_OF[state], packed(values)))
    words = packed({"id": filter_id, "rows": loaded})
    return bool(reply_of(server.script(script("load"), keys_of(key), words))["status"] == b"ok")


def read_state(server: RedisServer, key: str) -> QueueStatus | None:
    """Return the figures of the queue of a filter, None without a queue; raises StorageError."""
    names = ("id", "crawl", "run_name", "pushed", "done", "start", "ended")
    filter_id, crawl, run, pushed, done, start, ended = server.send("HMGET", key, *names)
    if filter_id is None or (crawl is None and pushed is None):
        return None
    counts = RedisQueue(server, key).counts()
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
        [("ZLEXCOUNT", names["leased"], b"[" + id_, b"(" + id_ + b"\xff") for id_ in ends]
    )

    def field(worker: bytes, name: bytes, what: str) -> int:
        return parsed_whole(fields.get(worker + name, b"0"), what)

    workers = []
    for (worker, until), in_flight in zip(ends.items(), counts, strict=True):
        remaining = parsed_whole(until, "end of a lease") - now
        lease = field(worker, b":lease", "lease")
        workers.append(
            Worker(
                worker.decode(),
                fields.get(worker + b":name", b"?").decode(errors="backslashreplace"),
                in_flight,
                is_alive=remaining >= 0,
                done=field(worker, b":done", "number of requests done"),
                heartbeat_secs=max(0.0, (lease - remaining) / 1000),
                lease_secs=lease / 1000,
            )
        )
    return workers


def remove_queue(server: RedisServer, key: str) -> None:
    """Remove the queue of a filter and all its requests, for all workers."""
    fields = [name for name in server.send("HKEYS", key) if is_field_of_queue(name)]
    commands = [("HDEL", key, *fields)] if fields else []
    server.transaction(("UNLINK", *keys_of(key)[1:]), *commands)


def stop_workers(server: RedisServer, key: str, ids: Iterable[str]) -> None:
    """Ask workers, by their ids, to shut down gracefully at their next batch."""
    if fields := [word for worker in ids for word in (f"{worker}:stop", 1)]:
        server.send("HSET", named_keys(key)["workers"], *fields)


def _damaged(server: RedisServer, key: str, error: ValueError) -> RefusedError:
    return RefusedError(
        f"the queue {key!r} in {server.address} is damaged ({error}); it was left as it is. "
        "Delete it with `scrapy bloom reset --queue --force`"
    )

"""Read the rows and figures of a queue in Redis, and change them, without being a worker.

`scrapy_bloom.redis.layout` documents the keys. They are untrusted: damaged values are refused.
"""

from collections.abc import Iterable, Iterator, Mapping

from scrapy_bloom.exceptions import RefusedError, StorageError
from scrapy_bloom.job.filter import pack_fingerprints
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
from scrapy_bloom.redis.layout import FLAGS, flags_of, is_field_of_queue, named_keys
from scrapy_bloom.redis.lua_scripts import packed, unpacked
from scrapy_bloom.redis.server import RedisServer
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
_LOADED, _LARGE_BYTES = 100, 100_000  # rows that are loaded at once, or fewer if one is large


class RedisQueue:
    """The queue of a filter on a server, for commands; implements `Queue` as described there."""

    def __init__(self, server: RedisServer, key: str) -> None:
        self._server = server
        self._key = key
        self._keys = named_keys(key)

    def counts(self) -> dict[State, int]:
        names = [*dict.fromkeys(_KEY_OF.values()), "waiting"]
        sizes = self._server.transaction([("ZCARD", self._keys[name]) for name in names])
        by_name = dict(zip(names, sizes, strict=True))
        waiting = by_name["waiting"]
        counts = {state: by_name[name] for state, name in _KEY_OF.items()}
        return counts | {State.WAITING: waiting, State.FAILED: by_name["kept"] - waiting}

    def status(self) -> QueueStatus:
        return self.find() or QueueStatus(dict.fromkeys(State, 0))

    def find(self) -> QueueStatus | None:
        """Return the figures of the queue, None without a queue."""
        names = ("id", "crawl", "run_name", "pushed", "done", "start", "ended")
        filter_id, crawl, run, pushed, done, start, ended = self._server.send(
            "HMGET", self._key, *names
        )
        if filter_id is None or (crawl is None and pushed is None):
            return None
        counts = self.counts()
        try:
            return QueueStatus(
                spider=(crawl or b"").decode(errors="backslashreplace"),
                run=(run or b"").decode(errors="backslashreplace"),
                counts=counts,
                done=parsed_whole(done or b"0", "number of requests done"),
                is_started=start == b"done",
                ended_at=parsed_whole(ended or b"0", "end of the crawl") / 1000,
                workers=self._workers(),
            )
        except ValueError as error:
            raise self._damaged(error) from None

    def find_unused(self, done: str, hint: str = "") -> QueueStatus | None:
        """Return the figures; raise a StorageError if workers use the queue: nothing was `done`."""
        status = self.find()
        if status and status.live_workers:
            raise StorageError(
                f"{status.users} the queue {self._key!r} in {self._server.address} now; nothing "
                f"was {done}. Stop the workers, and try again (a killed worker counts until its "
                f"lease expires, BLOOM_QUEUE_LEASE_SECS){hint}"
            )
        return status

    def _workers(self) -> list[Worker]:
        fields = self._server.send("HGETALL", self._keys["workers"])
        now = 1000 * self._server.now()
        ends = {name: until for name, until in fields.items() if b":" not in name}
        for worker in ends:
            check_text(ID, worker, "worker")
        leased = self._keys["leased"]
        counts = self._server.transaction(
            [("ZLEXCOUNT", leased, b"[" + id_, b"(" + id_ + b"\xff") for id_ in ends]
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

    def runs(self) -> list[RunBegin]:
        begins = []
        for name, value in self._server.send("HGETALL", self._keys["runs"]).items():
            try:
                began, entered, done, failed, dead, ended = (
                    parsed_whole(number, "figure of a run") for number in value.split(b" ")
                )
            except ValueError as error:
                raise self._damaged(error) from None
            text, counts = name.decode(errors="backslashreplace"), (entered, done, failed, dead)
            begins.append(RunBegin(text, began / 1000, *counts, ended / 1000))
        return begins

    def slots(self) -> Mapping[str, int]:
        slots: dict[str, int] = {}
        first = b"-"
        while some := self._server.run("slots", [self._keys["pending"]], {"first": first})["slots"]:
            for slot, number in zip(some[::2], some[1::2], strict=True):
                slots[parsed_order(slot[_HASH_BYTES:] + _ORDER)[0]] = number
            first = b"(" + some[-2] + b"\1"
        return slots

    def requests(self, state: State, slot: str | None = None) -> Iterator[Row]:
        first, last = _range(state, slot)
        key, rows = self._keys[_KEY_OF[state]], self._keys["rows"]
        while some := self._server.send("ZRANGEBYLEX", key, first, last, "LIMIT", 0, _READ):
            stored = self._server.send("HMGET", rows, *[member[-_ID_BYTES:] for member in some])
            for row_bytes in filter(None, stored):  # one may be done meanwhile
                try:
                    row = parsed_row(state, row_bytes)
                except ValueError as error:
                    raise self._damaged(error) from None
                if row.state is state and (slot is None or slot_name(slot) == slot_name(row.slot)):
                    yield row
            first = b"(" + some[-1]

    def move(self, state: State, to: State | None, slot: str | None = None) -> int:
        first, last = _range(state, slot)
        values = {
            "from": _KEY_OF[state],
            "to": "" if to is None else to.label,
            "last": last,
            "slot": False if slot is None else slot_name(slot),
        }
        moved = 0
        while first:
            reply = self._server.run("move", [*self._keys.values()], {**values, "first": first})
            moved, first = moved + reply["number"], reply["first"]
        return moved

    def load(self, filter_id: str, rows: Iterable[Row], first: int = 1) -> tuple[int, int]:
        """Add rows of another queue, with ids from `first` on, unless the filter has another id.

        Requests that were in flight are pending. What has failed or waits counts as of epoch 0.
        Returns the number of the rows, and the last position.
        """
        number = last = nbytes = 0
        loaded: list[tuple[int, str, bytes]] = []

        def send() -> None:
            self._server.run("load", [*self._keys.values()], {"id": filter_id, "rows": loaded})

        for number, row in enumerate(rows, 1):
            state = State.PENDING if row.state is State.IN_FLIGHT else row.state
            loaded.append((first + number - 1, _KEY_OF[state], _packed_row(row, state)))
            last, nbytes = max(last, abs(row.position)), nbytes + len(row.data)
            if len(loaded) == _LOADED or nbytes > _LARGE_BYTES:
                send()
                loaded, nbytes = [], 0
        send()
        return number, last

    def remove(self) -> None:
        """Remove the queue and all its requests, for all workers."""
        fields = filter(is_field_of_queue, self._server.send("HKEYS", self._key))
        _, *others = self._keys.values()
        self._server.transaction(
            [("UNLINK", *others), *[("HDEL", self._key, name) for name in fields]]
        )

    def stop(self, ids: Iterable[str]) -> None:
        """Ask workers, by their ids, to shut down gracefully at their next batch."""
        fields = [word for worker in ids for word in (f"{worker}:stop", 1)]
        if fields:
            self._server.send("HSET", self._keys["workers"], *fields)

    def _damaged(self, error: ValueError) -> RefusedError:
        return RefusedError(
            f"the queue {self._key!r} in {self._server.address} is damaged ({error}); it was left "
            "as it is. Delete it with `scrapy bloom reset --queue --force`"
        )


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
        names = {name for name, letter in FLAGS.items() if letter.encode() in flags}
        row = Row(
            data=data,
            state=state,
            slot=slot,
            priority=priority,
            rank=rank,
            position=-position if "newest_first" in names else position,
            takes=int(state is State.IN_FLIGHT or "was_taken" in names),
            is_filtered="is_filtered" in names,
            is_start="is_start" in names,
            once="once" in names,
            first=first,
            page=page or None,
            packed_hops=pack_fingerprints(hops),
            tries=tries,
            deaths=len(died) // _WORKER_BYTES,
            epoch=epoch,
            reason=reason.decode(errors="replace"),
            waits_for=waits_for,
        )
    except Exception as error:
        raise ValueError(f"{stored[:60]!r} is not a request of CrashSafeScheduler") from error
    return row


def _packed_row(row: Row, state: State) -> bytes:
    """Return a row as it is stored in the set of a state."""
    deaths = min(row.deaths, MOST_DEATHS - (state is not State.SUSPECT))
    died = b"".join(b"%016x" % number for number in range(deaths))  # any ids of dead workers
    values = [
        *(_LETTERS.get(state, "p"), min(row.tries, 255), 0, abs(row.position), flags_of(row)),
        *(row.order, row.page or b"", row.waits_for, row.reason.encode(errors="replace")),
        *([*row.hops], died, [], row.first, row.data),
    ]
    return packed(values)

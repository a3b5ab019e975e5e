"""Steps of a crawl, each a batch of a store; queues without a filter; and queues in Redis."""

import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scrapy_bloom.generations.policy import Origin, Policy
from scrapy_bloom.job.filter import LocalBackend
from scrapy_bloom.queues.redis_queue import RedisQueue
from scrapy_bloom.queues.redis_store import RedisStore
from scrapy_bloom.queues.serialized import deserialized, serialized
from scrapy_bloom.queues.sqlite_queue import SQLiteQueue
from scrapy_bloom.queues.sqlite_store import SQLiteStore
from scrapy_bloom.queues.store import (
    Batch,
    End,
    Ended,
    Entered,
    Joining,
    QueueStatus,
    Reply,
    Row,
    State,
    Store,
    Taken,
    parsed_order,
)
from scrapy_bloom.redis.backend import RedisBackend
from scrapy_bloom.redis.layout import named_keys
from scrapy_bloom.redis.server import RedisServer
from tests.support.redis_filters import url_of

LONG = 600.0  # seconds: a lease that only `lapse` ends
SHOP = Joining("shop")
FINGERPRINTER = "scrapy.utils.request.RequestFingerprinter"


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


def request(name: str, **options: Any) -> Entered:
    """A request with a name as its data."""
    return Entered(serialized({"name": name}), **options)


def page(name: str, **options: Any) -> Entered:
    """A filtered request whose fingerprint is made from its name."""
    return request(name)._replace(fingerprint=name.encode().rjust(20, b"."), **options)


def start_page(name: str, **options: Any) -> Entered:
    """A start request that is not filtered; its fingerprint is made from its name."""
    flags = {"is_filtered": False, "is_recorded": False, "once": True, "is_start": True}
    return page(name, **{**flags, **options})


def enter(store: Store, *requests: Entered) -> list[bool]:
    """Queue requests in one batch; return which were queued."""
    return store.apply(Batch([*requests])).queued


def push(store: Store, name: str, **options: Any) -> bool:
    """Queue a request in a batch of its own; return whether it was queued."""
    return enter(store, request(name, **options))[0]


def take(store: Store, downloads: Mapping[str, int] | None = None, **options: Any) -> Taken | None:
    """Take a request, if there is one."""
    batch = Batch(want=1, downloads=Counter(downloads), **options)
    return next(iter(store.apply(batch).taken), None)


def taken(store: Store) -> Taken:
    """Take a request, which there must be."""
    found = take(store)
    assert found
    return found


def name_of(taken: Taken) -> str:
    return str(deserialized(taken.data)["name"])


def names(store: Store, number: int) -> list[str]:
    """Take so many requests, if there are; their names."""
    return [name_of(found) for _ in range(number) if (found := take(store))]


def done(store: Store, *requests: Taken, awaits: Sequence[bytes] = ()) -> Reply:
    return store.apply(
        Batch(ended=[Ended(each_request.id, awaits=awaits) for each_request in requests])
    )


def unreadable(store: Store, request: Taken) -> Reply:
    return store.apply(Batch(ended=[Ended(request.id, End.UNREADABLE)]))


def failed(store: Store, request: Taken, reason: str = "503") -> Reply:
    return store.apply(Batch(ended=[Ended(request.id, End.FAILED, reason)]))


def replaced(store: Store, request: Taken, by: Entered) -> bool:
    """Have a retry or a redirect take the row of a request; return whether it is pending."""
    return enter(store, by._replace(replaces=request.id))[0]


def key(name: str) -> bytes:
    """The fingerprint of a page."""
    return page(name).fingerprint or b""


def first_name(row: Row) -> str:
    """The name of a request as it first entered."""
    data = parsed_order(row.first)[3][1:] if row.first else row.data
    return str(deserialized(data)["name"])


def flights(store: Store, *requests: Entered) -> list[Taken]:
    """Queue requests, and take each at once."""
    found = []
    for each_request in requests:
        assert enter(store, each_request) == [True]
        found.append(taken(store))
        assert found[-1].data == each_request.data
    return found


def redirect(store: Store, name: str, to: str) -> bool:
    """Queue a page, take it, and redirect it; return whether the redirect is pending."""
    return replaced(store, flights(store, page(name))[0], page(to))


def fail(store: Store, *requests: Entered) -> None:
    """Queue requests, take them, and have them fail."""
    for flight in flights(store, *requests):
        failed(store, flight)


def finish(store: Store, *requests: Taken) -> None:
    """End requests as done, and rows that wait for them, in as many batches as that takes."""
    counters = done(store, *requests).counters
    while (reply := store.apply(Batch())).counters != counters:
        assert reply.taken == []
        counters = reply.counters


def take_all(store: Store) -> list[Taken]:
    """Take what is pending, in as many batches as that takes."""
    found: list[Taken] = []
    while some := store.apply(Batch(want=10_000)).taken:
        found += some
    return found


def fail_many(store: Store, number: int, prefix: str = "") -> None:
    """Have so many pages fail, some in each batch."""
    enter(store, *(page(f"{prefix}{each_number}") for each_number in range(number)))
    found = take_all(store)
    assert len(found) == number
    for start in range(0, number, 40):
        some = found[start : start + 40]
        store.apply(Batch(ended=[Ended(entry.id, End.FAILED, "503") for entry in some]))


def fill_shared(server: RedisServer, key: str, rows: Iterable[Row]) -> None:
    """Add rows to a queue on a server as the scripts would; they have no positions yet."""
    first = int(server.send("HGET", key, "numbered") or 0) + 1
    stored = (row._replace(position=number) for number, row in enumerate(rows, first))
    filter_id = server.send("HGET", key, "id").decode()
    count, last = RedisQueue(server, key).load(filter_id, stored, first)
    server.send("HSET", key, "numbered", last)
    server.send("HINCRBY", key, "pushed", count)


def begun(path: Path, *, spider: Joining = SHOP) -> SQLiteStore:
    """Open the queue of a job, without a filter."""
    store = SQLiteStore(path, None)
    store.open(spider)
    return store


def fill(path: Path, *requests: bytes, spider: Joining = SHOP) -> None:
    """Leave requests in the queue of a job that is not running."""
    store = begun(path, spider=spider)
    store.apply(Batch([Entered(each_request, newest_first=False) for each_request in requests]))
    store.close()


def killed(
    store: SQLiteStore | LocalBackend | sqlite3.Connection, path: Path | None = None
) -> None:
    """Close what has a file open, and leave its files as a kill does at this instant."""
    path = path or Path(store.name)
    parts = [path, *path.parent.glob(f"{path.name}-wal")]
    contents = {part: part.read_bytes() for part in parts}
    store.close()
    for part, data in contents.items():
        part.write_bytes(data)  # the file is still the same one


def counts_in(path: Path) -> tuple[int, int]:
    """How many requests of a job are pending, and in flight."""
    counts = SQLiteQueue(path).status().counts
    waiting = (State.PENDING, State.SUSPECT, State.UNREADABLE)
    return sum(counts[state] for state in waiting), counts[State.IN_FLIGHT]


class InRedis:
    """A queue at one of `redis_filters.PLACES`, with its filter, and the workers that share it.

    Without a URL, the server is that of all tests.
    """

    def __init__(self, place: str, key: str, *, url: str = "") -> None:
        self.place = place
        self.key = key
        self.url = url or url_of(place)
        self._servers: list[RedisServer] = []
        self.server = self.connect()
        self.keys = named_keys(key)
        self.window_secs, self.is_endless = 0.0, False

    def connect(self) -> RedisServer:
        server = RedisServer(f"{self.url}?socket_timeout=10", deadline_secs=10)
        self._servers.append(server)
        return server

    def backend(self) -> RedisBackend:
        """The filter, joined, and made if there is none."""
        policy = Policy(
            expected=1000, error_rate=1e-9, window=self.window_secs, is_endless=self.is_endless
        )
        origin = Origin(fingerprinter=FINGERPRINTER)
        backend = RedisBackend(self.connect(), self.key, policy, origin)
        backend.join()
        return backend

    def filter(self) -> RedisBackend:
        """The filter, joined."""
        return self.backend()

    def make(self, *, lease_secs: float = LONG) -> RedisStore:
        """A new worker, not opened yet; `lapse` ends its lease."""
        return RedisStore(self.backend(), lease_secs=lease_secs)

    def open(self, joining: Joining = SHOP) -> RedisStore:
        """A new worker."""
        store = self.make()
        store.open(joining)
        return store

    def age(self, secs: float) -> None:
        """Move the begins of runs, and what they have recorded, into the past."""
        for name, value in self.server.send("HGETALL", self.key).items():
            if name.startswith(b"gen:"):
                figures = json.loads(value)
                times = {
                    each_name: figures[each_name] - secs for each_name in ("first_run", "last_run")
                }
                self.server.send("HSET", self.key, name, json.dumps(figures | times))
            elif name in {b"began", b"tried_at"}:
                self.server.send("HINCRBY", self.key, name, -round(1000 * secs))

    def lapse(self, worker: RedisStore) -> None:
        """Have a lease end now, as it does when the worker stands still for that long."""
        self._lapse(worker.worker.decode())

    def lapse_all(self) -> None:
        for worker in self.state().workers:
            self._lapse(worker.id)

    def _lapse(self, worker: str) -> None:
        self.server.send("HSET", self.keys["workers"], worker, 1)
        self.server.send("HDEL", self.key, "look")

    def counts(self) -> tuple[int, int]:
        """How many are pending, and in flight."""
        counts = self.queue().counts()
        return counts[State.PENDING], counts[State.IN_FLIGHT]

    def queue(self) -> RedisQueue:
        return RedisQueue(self.server, self.key)

    def state(self) -> QueueStatus:
        state = self.queue().find()
        assert state
        return state

    def end(self) -> None:
        for server in self._servers:
            server.close()

"""Steps of a crawl, each a batch of a store; queues without a filter; and queues in Redis."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from scrapy_bloom.generations.policy import Origin, Policy
from scrapy_bloom.queues.redis_queue import QueueState, RedisQueue, read_state
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
    Limits,
    Reply,
    State,
    Store,
    Taken,
)
from scrapy_bloom.redis.backend import RedisBackend
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.filter import SharedFilter
from scrapy_bloom.redis.layout import named_keys
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
    return request(name, fingerprint=name.encode().rjust(20, b"."), **options)


def enter(store: Store, *requests: Entered) -> list[bool]:
    """Queue requests in one batch; return which were queued."""
    return store.apply(Batch([*requests])).queued


def push(store: Store, name: str, **options: Any) -> bool:
    """Queue a request in a batch of its own; return whether it was queued."""
    return enter(store, request(name, **options))[0]


def take(
    store: Store, downloads: Mapping[str, int] = MappingProxyType({}), **options: Any
) -> Taken | None:
    """Take a request, if there is one."""
    return next(iter(store.apply(Batch(want=1, downloads=downloads, **options)).taken), None)


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


def done(store: Store, *requests: Taken) -> Reply:
    return store.apply(Batch(ended=[Ended(each.id) for each in requests]))


def unreadable(store: Store, request: Taken) -> Reply:
    return store.apply(Batch(ended=[Ended(request.id, End.UNREADABLE)]))


def failed(
    store: Store,
    request: Taken,
    first: Entered,
    reason: str = "503",
    via: Iterable[bytes] = (),
) -> Reply:
    """End a request as failed; `first` is the request as it first entered."""
    assert first.fingerprint is not None
    fingerprints = [first.fingerprint, *via]
    ended = Ended(request.id, End.FAILED, fingerprints, first, request.tries, reason)
    return store.apply(Batch(ended=[ended]))


def leave_dead_letter(there: "InFile | InRedis", request: Entered) -> None:
    """Let a request become a dead letter: four processes die that have it in flight."""
    store = there.open()
    enter(store, request)
    for _ in range(4):
        taken(store)
        there.die(store)
        store = there.open()
    assert take(store) is None
    there.leave(store)


def begun(path: Path, *, by_slot: bool = False) -> SQLiteStore:
    """Open the queue of a job, without a filter."""
    store = SQLiteStore(path, None, by_slot=by_slot)
    store.open(SHOP)
    return store


def fill(path: Path, *requests: bytes) -> None:
    """Leave requests in the queue of a job that is not running."""
    store = begun(path)
    store.apply(Batch([Entered(each, newest_first=False) for each in requests]))
    store.close()


def killed(store: SQLiteStore) -> None:
    """Close a store, and leave its files as a kill does at this instant."""
    path = Path(store.name)
    parts = [path, *path.parent.glob(f"{path.name}-wal"), *path.parent.glob("bloom/*")]
    contents = {part: part.read_bytes() for part in parts}
    store.close()
    for part, data in contents.items():
        part.write_bytes(data)  # the file is still the same one


def counts_in(path: Path) -> tuple[int, int]:
    """How many requests of a job are pending, and in flight."""
    counts = SQLiteQueue(path).counts()
    waiting = (State.PENDING, State.SUSPECT, State.UNREADABLE)
    return sum(counts[state] for state in waiting), counts[State.IN_FLIGHT]


class InFile:
    """A queue in a file."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "queue" / "requests.sqlite"
        self.path.parent.mkdir(exist_ok=True)
        self._opened: list[SQLiteStore] = []

    def open(self, *, by_slot: bool = False) -> SQLiteStore:
        """The next run."""
        queue = begun(self.path, by_slot=by_slot)
        self._opened.append(queue)
        return queue

    def leave(self, queue: SQLiteStore) -> None:
        queue.close()

    def die(self, queue: SQLiteStore) -> None:
        """End it as a kill does: the files are as they were at that instant."""
        killed(queue)

    def counts(self) -> tuple[int, int]:
        """How many are pending, and in flight."""
        return counts_in(self.path)

    def end(self) -> None:
        for each in self._opened:
            each.close()


class InRedis:
    """A queue on a server, with its filter, and the workers that share it.

    Args:
        place: one of `redis_filters.PLACES`.
        key: of the filter.
        url: of the server; else it is that of all tests.
    """

    def __init__(self, place: str, key: str, *, url: str = "") -> None:
        self.place = place
        self.key = key
        self.url = url or url_of(place)
        self._servers: list[RedisServer] = []
        self.server = self.connect()
        self.keys = named_keys(key)
        self.window_secs = 0.0

    def connect(self) -> RedisServer:
        server = RedisServer(f"{self.url}?socket_timeout=10", deadline_secs=10)
        self._servers.append(server)
        return server

    def backend(self) -> RedisBackend:
        """The filter, joined, and made if there is none."""
        policy = Policy(expected=1000, error_rate=1e-9, window=self.window_secs)
        origin = Origin(fingerprinter=FINGERPRINTER)
        backend = RedisBackend(self.connect(), self.key, policy, origin)
        backend.filter.join()
        return backend

    def filter(self) -> SharedFilter:
        """The filter, joined."""
        return self.backend().filter

    def make(
        self, *, by_slot: bool = False, lease_secs: float = LONG, limits: Limits | None = None
    ) -> RedisStore:
        """A new worker, not opened yet; `lapse` ends its lease."""
        return RedisStore(self.backend(), by_slot=by_slot, lease_secs=lease_secs, limits=limits)

    def open(
        self, joining: Joining = SHOP, *, by_slot: bool = False, limits: Limits | None = None
    ) -> RedisStore:
        """A new worker."""
        store = self.make(by_slot=by_slot, limits=limits)
        store.open(joining)
        return store

    def leave(self, worker: RedisStore) -> None:
        worker.close()

    def lapse(self, worker: RedisStore) -> None:
        """Have a lease end now, as it does when the worker stands still for that long."""
        self._lapse(worker.worker.decode())

    die = lapse

    def lapse_all(self) -> None:
        for each in self.state().workers:
            self._lapse(each.id)

    def _lapse(self, worker: str) -> None:
        self.server.send("HSET", self.keys["workers"], worker, 1)
        self.server.send("HDEL", self.key, "look")

    def counts(self) -> tuple[int, int]:
        """How many are pending, and in flight."""
        counts = self.queue().counts()
        return counts[State.PENDING], counts[State.IN_FLIGHT]

    def queue(self) -> RedisQueue:
        return RedisQueue(self.server, self.key)

    def state(self) -> QueueState:
        state = read_state(self.server, self.key)
        assert state
        return state

    def end(self) -> None:
        for server in self._servers:
            server.close()

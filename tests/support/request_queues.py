"""The two stores of CrashSafeScheduler's requests: in a file, and on the servers of all tests."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from scrapy_bloom.generations.policy import Origin, Policy
from scrapy_bloom.job.disk import log_and_index
from scrapy_bloom.queues.batch import Batch, Found, Taken, deserialized, serialized
from scrapy_bloom.queues.collected import SharedBatch
from scrapy_bloom.queues.job_state import read_counts
from scrapy_bloom.queues.shared import SharedStore
from scrapy_bloom.queues.shared_state import QueueState, read_state, requeue
from scrapy_bloom.queues.sqlite import RequestDatabase
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.filter import SharedFilter
from scrapy_bloom.redis.scripts import keys_of
from tests.support.redis_filters import url_of

LONG = 600.0  # seconds: a lease that only `lapse` ends
Store = RequestDatabase | SharedStore
NAMES = ("filter", "pending", "leased", "workers", "suspects", "dead", "aside", "downloading")
NAMES = (*NAMES, "forgotten")
FINGERPRINTER = "scrapy.utils.request.RequestFingerprinter"


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


def push(store: Store, name: str, **options: Any) -> None:
    """Put a request into a store, as a batch of its own."""
    find(store, Found(serialized({"name": name}), **options))


def find(store: Store, *found: Found) -> None:
    """Put requests into a store with one batch."""
    if isinstance(store, SharedStore):
        store.apply(SharedBatch([*found]))
    else:
        store.apply(Batch([*found]))


def take(store: Store, downloads: Mapping[str, int] = MappingProxyType({})) -> Taken | None:
    if isinstance(store, SharedStore):
        return next(iter(store.apply(SharedBatch(want=1, downloads=downloads)).taken), None)
    return store.take(Batch(), lambda slot: downloads.get(slot, 0))


def leave_dead_letter(there: "InFile | InRedis", request: Found) -> None:
    """Let a request become a dead letter: four processes die that have it in flight."""
    store = there.open()
    find(store, request)
    for _ in range(4):
        assert take(store) or store.take_suspect()
        there.die(store)
        store = there.open()
    assert take(store) is None
    there.leave(store)


def done(store: Store, *requests: Taken) -> None:
    rows = [each.id for each in requests]
    if isinstance(store, SharedStore):
        store.apply(SharedBatch(done=rows))
    else:
        store.apply(Batch(done=rows))


def set_aside(store: Store, taken: Taken) -> None:
    if isinstance(store, SharedStore):
        store.apply(SharedBatch(set_aside=[taken.id]))
    else:
        store.set_aside(taken.id)


def name_of(taken: Taken) -> str:
    return deserialized(taken.data)["name"]


def names(queue: Store, number: int) -> list[str]:
    """Take so many requests, if there are; their names."""
    return [name_of(taken) for _ in range(number) if (taken := take(queue))]


def begun(path: Path, *, by_slot: bool = False) -> RequestDatabase:
    database = RequestDatabase(path, by_slot=by_slot)
    database.begin()
    return database


def fill(path: Path, *requests: bytes) -> None:
    """Leave requests in the queue of a job that is not running."""
    database = begun(path)
    database.apply(Batch([Found(each, newest_first=False) for each in requests]))
    database.close()


def killed(database: RequestDatabase) -> None:
    """Close a database, and leave its files as a kill does at this instant."""
    path = Path(database.path)
    parts = {part: part.read_bytes() for part in (path, log_and_index(path)[0])}
    database.close()
    for part, data in parts.items():
        part.write_bytes(data)  # the file is still the same one


class InFile:
    """A queue in a file."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "queue" / "requests.sqlite"
        self.path.parent.mkdir(exist_ok=True)
        self._opened: list[RequestDatabase] = []

    def open(self, *, by_slot: bool = False) -> RequestDatabase:
        """The next run."""
        queue = RequestDatabase(self.path, by_slot=by_slot)
        self._opened.append(queue)
        queue.begin()
        return queue

    def leave(self, queue: RequestDatabase) -> None:
        queue.close()

    def die(self, queue: RequestDatabase) -> None:
        """End it as a kill does: the files are as they were at that instant."""
        killed(queue)

    def counts(self) -> tuple[int, int]:
        """How many are pending, and in flight."""
        return read_counts(self.path)

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
        self.keys = dict(zip(NAMES, keys_of(key), strict=True))

    def connect(self) -> RedisServer:
        server = RedisServer(f"{self.url}?socket_timeout=10", deadline_secs=10)
        self._servers.append(server)
        return server

    def filter(self) -> SharedFilter:
        """The filter, joined, and made if there is none."""
        policy, origin = Policy(expected=1000, error_rate=1e-9), Origin(fingerprinter=FINGERPRINTER)
        found = SharedFilter(self.connect(), self.key, policy, origin)
        found.join()
        return found

    def open(self, *, by_slot: bool = False) -> SharedStore:
        """A new worker, whose lease only `lapse` ends."""
        store = SharedStore(self.filter(), "shop", by_slot=by_slot, lease_secs=LONG)
        store.join()
        if not store.others:
            requeue(self.server, self.key, "aside")
        return store

    def leave(self, worker: SharedStore) -> None:
        worker.leave()

    def lapse(self, worker: SharedStore) -> None:
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
        return self.state().pending, self.state().leased

    def state(self) -> QueueState:
        state = read_state(self.server, self.key)
        assert state
        return state

    def end(self) -> None:
        for server in self._servers:
            server.close()

"""The two stores of CrashSafeScheduler's requests: in a file, and on the servers of all tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from redis_filters import url_of
from scrapy_bloom.crawl.scheduler.shared_queue import SharedStore
from scrapy_bloom.job.sqlite_files import beside
from scrapy_bloom.queues.batch import Batch, Found, Taken, deserialized, serialized
from scrapy_bloom.queues.members import keys_of_queue
from scrapy_bloom.queues.redis import SharedRequests
from scrapy_bloom.queues.shared_state import QueueState, read_state
from scrapy_bloom.queues.sqlite import RequestDatabase, read_counts
from scrapy_bloom.redis.connection.server import RedisServer

LONG = 600.0  # seconds: a lease that only `lapse` ends


def push(queue: Any, name: str, **options: Any) -> Any:
    """Put a request into a store, as a batch of its own, or into a shared queue."""
    values = {"slot": "", "priority": 0, "rank": 0, "newest_first": True, **options}
    data = serialized({"name": name})
    if isinstance(queue, SharedRequests):
        return queue.push(data, **values)
    return queue.apply(Batch([Found(data, **values)]))


def take(queue: Any, active: Callable[[str], int] = lambda _: 0) -> Taken | None:
    return queue.take(active) if isinstance(queue, SharedRequests) else queue.take(Batch(), active)


def done(store: Any, *requests: Taken) -> None:
    store.apply(Batch(done=[each.id for each in requests]))


def withdraw(store: Any) -> None:
    """Remove the request that was queued last."""
    if isinstance(store, SharedStore):
        store.requests.take_back()
    else:
        store.withdraw_last()


def name_of(taken: Any) -> str:
    return deserialized(taken.data)["name"]


def names(queue: Any, number: int) -> list[str]:
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
    parts = {part: part.read_bytes() for part in (path, beside(path)[0])}
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
        queue = RequestDatabase(self.path, by_slot=by_slot)
        self._opened.append(queue)
        queue.begin()
        return queue

    def open_store(self, *, by_slot: bool = False) -> RequestDatabase:
        return self.open(by_slot=by_slot)

    def die(self, queue: RequestDatabase) -> None:
        """End it as a kill does: the files are as they were at that instant."""
        killed(queue)

    def bury(self) -> None:
        """Nobody has to wait for what has died."""

    def counts(self) -> tuple[int, int]:
        """How many are pending, and in flight."""
        return read_counts(self.path)

    def end(self) -> None:
        for each in self._opened:
            each.close()


class InRedis:
    """A queue on a server, and its workers, whose leases last until they are told to end.

    Args:
        place: one of `redis_filters.PLACES`.
        key: of the filter.
        url: of another server.
    """

    def __init__(self, place: str, key: str, *, url: str = "") -> None:
        self.key = key
        self.place = place
        self.url = url or url_of(place)
        self._is_cluster = place == "cluster"
        self._servers: list[RedisServer] = []
        self._opened: list[SharedRequests] = []
        self.server = self.connect()

    def connect(self, url: str = "", *, deadline_secs: float = 10) -> RedisServer:
        url = f"{url or self.url}?socket_timeout=10"
        server = RedisServer(url, cluster=self._is_cluster, deadline_secs=deadline_secs)
        self._servers.append(server)
        return server

    def open(
        self,
        *,
        by_slot: bool = False,
        url: str = "",
        lease_secs: float = LONG,
        deadline_secs: float = 10,
        prefetch: int = 1,
    ) -> SharedRequests:
        """A worker, reached at another URL if there is one."""
        queue = SharedRequests(
            self.connect(url, deadline_secs=deadline_secs),
            self.connect(url),
            self.key,
            by_slot=by_slot,
            lease_secs=lease_secs,
            prefetch=prefetch,
        )
        self._opened.append(queue)
        return queue

    def open_store(self, *, by_slot: bool = False) -> SharedStore:
        return SharedStore(self.open(by_slot=by_slot))

    def die(self, queue: SharedRequests | SharedStore) -> None:
        """End a worker as a kill does; its lease goes on until `bury`, or `lapse`."""
        if isinstance(queue, SharedStore):
            queue = queue.requests
        queue._lease.end()
        self._opened.remove(queue)

    def bury(self) -> None:
        """End the leases of all workers that have died."""
        alive = {each._worker for each in self._opened}
        for name in self.workers():
            if name not in alive:
                self.lapse(name)

    def lapse(self, worker: bytes | SharedRequests) -> None:
        """Have a lease end now, as it does when the worker stands still for that long."""
        if isinstance(worker, SharedRequests):
            worker._lease._renewed_at -= worker._lease.secs
            worker = worker._worker
        self.server.send("HSET", self.keys[2], worker, 1)
        self.server.send("HDEL", self.keys[3], "look")

    def workers(self) -> list[bytes]:
        return [name for name in self.server.send("HKEYS", self.keys[2]) if b":" not in name]

    @property
    def keys(self) -> list[str]:
        """Those of pending requests, leased ones, workers and state, and the filter's."""
        return list(keys_of_queue(self.key))

    def state(self) -> QueueState:
        state = read_state(self.server, self.key)
        assert state
        return state

    def counts(self) -> tuple[int, int]:
        """How many are pending, and in flight."""
        state = self.state()
        return state.pending, state.in_flight

    def end(self) -> None:
        for each in self._opened:
            each._lease.end()
        for server in self._servers:
            server.close()


def store_in(place: str, directory: Path, *, url: str = "") -> InFile | InRedis:
    """The store of that name: "file", or one of `redis_filters.PLACES`."""
    return InFile(directory) if place == "file" else InRedis(place, str(directory), url=url)

"""The stores of CrashSafeScheduler, each made by a factory: in memory, in files, and in Redis."""

import math
import secrets
import shutil
import sqlite3
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from scrapy_bloom.job.jobdir import FILE
from scrapy_bloom.queues.redis_queue import RedisQueue
from scrapy_bloom.queues.redis_store import RedisStore
from scrapy_bloom.queues.sqlite_queue import SQLiteQueue
from scrapy_bloom.queues.sqlite_store import SQLiteStore
from scrapy_bloom.queues.store import Batch, Joining, Opened, Queue, State, Store
from tests.support.backends import local_backend
from tests.support.memory_store import MemoryJob, MemoryStore
from tests.support.request_queues import SHOP, killed
from tests.support.request_queues import InRedis as Shared

# Where a sync takes no time, if there is such a place.
IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


class Place(ABC):
    """A place with one store, which one process after another opens."""

    store: Store  # that is open
    opened: Opened  # what the last opening returned
    slice_size = math.inf  # how many rows a batch ends, or makes pending, of those that wait

    def open(self, joining: Joining = SHOP) -> Store:
        """Open the store as the next process."""
        self.store = self.make()
        self.opened = self.store.open(joining)
        return self.store

    @abstractmethod
    def make(self) -> Store:
        """Make a store, not opened yet."""

    @abstractmethod
    def die(self) -> list[bytes]:
        """End the process as a kill does; return the requests that have become dead, if known."""

    def close(self) -> None:
        """End the process."""
        self.store.close()

    @abstractmethod
    def age(self, secs: float) -> None:
        """Move all times that are stored into the past; no process has the store open."""

    @abstractmethod
    def queue(self) -> Queue:
        """The queue as commands use it, while no crawl runs or while one does."""

    def end(self) -> None:  # noqa: B027 - a job in memory has nothing to remove
        """Remove everything."""


class InMemory(Place):
    """A job in memory."""

    def __init__(self) -> None:
        self.job = MemoryJob()

    def make(self) -> Store:
        return MemoryStore(self.job)

    def die(self) -> list[bytes]:
        return []

    def age(self, secs: float) -> None:
        self.job.tried_at -= secs

    def queue(self) -> Queue:
        return self.job


class InFiles(Place):
    """A job directory; it is created."""

    slice_size = 500
    store: SQLiteStore

    def __init__(self, job: Path | None = None, **options: Any) -> None:
        self.is_ours = job is None
        self.job = job or Path(tempfile.mkdtemp(dir=IN_MEMORY))
        self.path = self.job / FILE
        self.options = {"capacity": 1000, "error_rate": 1e-9, **options}
        self.job.mkdir(parents=True, exist_ok=True)

    def make(self) -> SQLiteStore:
        backend = local_backend(self.job, **self.options)
        return SQLiteStore(self.path, backend)

    def die(self) -> list[bytes]:
        killed(self.store)
        return []

    def age(self, secs: float) -> None:
        db = sqlite3.connect(self.path, isolation_level=None)
        db.execute("UPDATE job SET began = began - ?1, tried_at = tried_at - ?1", (secs,))
        times = "first_run = first_run - ?1, last_run = last_run - ?1"
        db.execute(f"UPDATE generations SET {times}", (secs,))
        killed(db, self.path)  # or SQLite would remove the log

    def queue(self) -> SQLiteQueue:
        return SQLiteQueue(self.path)

    def end(self) -> None:
        if self.is_ours:
            shutil.rmtree(self.job)


class InRedis(Place):
    """A key, perhaps a random one, at one of `redis_filters.PLACES`.

    The worker's lease ends only when it dies.
    """

    store: RedisStore
    slice_size = 100

    def __init__(self, place: str = "valkey", key: str = "") -> None:
        self.shared = Shared(place, key or secrets.token_hex(8))

    def make(self) -> RedisStore:
        return self.shared.make()

    def die(self) -> list[bytes]:
        has_leases = self.queue().status().counts[State.IN_FLIGHT] > 0
        self.shared.lapse(self.store)
        if not has_leases:
            return []
        other = self.shared.open()  # finds that the lease has expired
        died = other.apply(Batch()).died
        other.close()
        return died

    def age(self, secs: float) -> None:
        self.shared.age(secs)

    def queue(self) -> RedisQueue:
        return self.shared.queue()

    def end(self) -> None:
        self.shared.end()

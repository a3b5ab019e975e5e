"""How a shared queue stands: what waits, who has taken how much, and whether the crawl is over."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from scrapy_bloom.exceptions import RefusedError
from scrapy_bloom.queues.members import keys_of_queue
from scrapy_bloom.redis.connection.server import RedisServer

_WORKER = re.compile(rb"[0-9a-f]{16}")
_NUMBER = re.compile(rb"[0-9]{1,15}")  # milliseconds have 13 digits
_ASIDE = b"unreadable000000"  # see `scrapy_bloom.queues.scripts`


@dataclass(frozen=True)
class Worker:
    """A crawler that shares the queue: its lease, where it runs, and what it has taken."""

    id: str
    name: str  # host:pid
    is_alive: bool  # else its lease is over
    in_flight: int


@dataclass(frozen=True)
class QueueState:
    """The figures of a shared queue at one moment."""

    pending: int
    done: int  # since it began
    is_started: bool  # whether the spider's start() is through
    ended_at: float  # seconds since 1970; 0: the crawl is not over
    workers: Sequence[Worker]
    set_aside: int = 0  # requests that no worker can make again

    @property
    def waiting(self) -> int:
        """Return how many requests are in the queue, taken by a worker or not."""
        return self.pending + self.in_flight + self.set_aside

    @property
    def in_flight(self) -> int:
        """Return how many requests all workers have taken."""
        return sum(each.in_flight for each in self.workers)


def read_state(server: RedisServer, key: str) -> QueueState | None:
    """Return how the queue of a filter stands, None if it has none; raises a StorageError.

    Anybody may have written it: a damaged one is refused.
    """
    try:
        return _read_state(server, key)
    except ValueError as error:
        raise RefusedError(
            f"the queue {key!r} in {server.address} is damaged ({error}); it was left as it is: "
            "delete it with `scrapy bloom reset --queue --force`"
        ) from None


def _read_state(server: RedisServer, key: str) -> QueueState | None:
    pending, leased, of_workers, of_state, _ = keys_of_queue(key)
    # Not as a transaction: on a Cluster, redis-py would make no dicts of the answers.
    state = server.send("HGETALL", of_state)
    if not state or b"flushed" in state:
        return None
    waiting, fields = server.send("ZCARD", pending), server.send("HGETALL", of_workers)
    now = 1000 * server.now()
    alive = {
        _matching(_WORKER, name, "worker"): int(_matching(_NUMBER, until, "end of a lease"))
        for name, until in fields.items()
        if b":" not in name
    }
    counts = server.batches(
        [("ZLEXCOUNT", leased, b"[" + name, b"(" + name + b"\xff") for name in [*alive, _ASIDE]]
    )
    workers = [
        Worker(
            id=name.decode(),
            name=fields.get(name + b":name", b"?").decode(errors="backslashreplace"),
            is_alive=until >= now,
            in_flight=count,
        )
        for (name, until), count in zip(alive.items(), counts[:-1], strict=True)
    ]
    return QueueState(
        pending=waiting,
        done=int(_matching(_NUMBER, state.get(b"done", b"0"), "number of requests done")),
        is_started=b"started" in state,
        ended_at=int(_matching(_NUMBER, state.get(b"ended", b"0"), "end of the crawl")) / 1000,
        workers=workers,
        set_aside=counts[-1],
    )


def _matching(pattern: re.Pattern[bytes], value: bytes, what: str) -> bytes:
    if pattern.fullmatch(value):
        return value
    raise ValueError(f"the {what} is {value[:60]!a}")


def remove_queue(server: RedisServer, key: str) -> None:
    """Remove the queue of a filter, for all crawlers, with all that waits in it."""
    *keys, of_filter = keys_of_queue(key)
    server.transaction(("UNLINK", *keys), ("HDEL", of_filter, "queue"))

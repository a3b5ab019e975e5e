"""Read the figures of a queue in Redis, and change the queue, without being one of its workers.

`scrapy_bloom.redis.scripts` documents the keys. They are untrusted: damaged values are refused.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from scrapy_bloom.exceptions import RefusedError
from scrapy_bloom.queues.batch import round_robin
from scrapy_bloom.queues.shared import Member, slot_name
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.scripts import REQUEUE, TOKEN_BYTES, WORKER_BYTES, keys_of
from scrapy_bloom.redis.stored import ID, check_text, parsed_whole

SETS = ("pending", "suspects", "dead", "aside", "leased")  # each request is in one of them

_READ = 100  # how many requests are read at once

# Removes the queue, but not the filter. Keys: those of all scripts.
_REMOVE = """
redis.call('UNLINK', unpack(KEYS, 2, 8))
redis.call('HDEL', KEYS[1], 'pushed', 'done', 'start', 'crawl', 'kept', 'ended', 'last',
           'look', 'crew')
"""

# Asks workers to end. Keys: those of all scripts. Arguments: the names of the workers.
_STOP = """
local names, fields = {}, redis.call('HGETALL', KEYS[4])
for _, name in ipairs(ARGV) do names[name] = true end
for index = 1, #fields, 2 do
  local worker = string.match(fields[index], '^(.+):name$')
  if worker and names[fields[index + 1]] then redis.call('HSET', KEYS[4], worker .. ':stop', 1) end
end
"""

# Removes at most 100 requests, and returns their number. Keys: those of all scripts. Arguments:
# "dead" or "pending"; a range of its members, in the form of ZRANGEBYLEX. Requests are counted as
# done before they are removed, so that no entry seems to be missing if the script fails half-way.
_DROP = r"""
local from = KEYS[ARGV[1] == 'dead' and 6 or 2]
local members = redis.call('ZRANGEBYLEX', from, ARGV[2], ARGV[3], 'LIMIT', 0, 100)
if #members > 0 then
  redis.call('HINCRBY', KEYS[1], 'done', #members)
  redis.call('ZREM', from, unpack(members))
end
return #members
"""

# Returns at most 100 slots, each with its number of pending requests. Keys: those of all scripts.
# Arguments: a range of members of pending, in the form of ZRANGEBYLEX.
_HOSTS = r"""
local found, from = {}, ARGV[1]
for _ = 1, 100 do
  local member = redis.call('ZRANGEBYLEX', KEYS[2], from, ARGV[2], 'LIMIT', 0, 1)[1]
  if not member then break end
  local slot = string.sub(member, 1, string.find(member, '\0', 1, true) - 1)
  from = '(' .. slot .. '\1'
  found[#found + 1] = slot
  found[#found + 1] = redis.call('ZLEXCOUNT', KEYS[2], '[' .. slot .. '\0', from)
end
return found
"""


@dataclass(frozen=True)
class Worker:
    """A crawl process that shares the queue, with its lease and its numbers of requests."""

    id: str
    name: str  # host:pid
    lease_left: float  # seconds; negative: the lease has expired
    lease_secs: float  # how long the lease lasts after a heartbeat
    in_flight: int
    done: int  # how many requests it has finished

    @property
    def is_alive(self) -> bool:
        """Return whether its lease has not expired."""
        return self.lease_left >= 0

    @property
    def heartbeat_secs(self) -> float:
        """Return how many seconds ago the worker sent its last heartbeat."""
        return max(0.0, self.lease_secs - self.lease_left)


@dataclass(frozen=True)
class QueueState:
    """The figures of a queue in Redis at one moment.

    Attributes:
        crawl: the name of the spider; empty if no worker has joined the queue yet.
        pending, suspects, dead, aside, leased: how many requests are in the set of this name.
        done: how many requests have left the queue since it was created.
        is_started: whether the spider's start() has ended.
        ended_at: when the queue became empty, in seconds since 1970; 0: it is not empty.
        workers: the workers of the queue, also those whose lease has expired.
    """

    crawl: str
    pending: int
    suspects: int
    dead: int
    aside: int
    leased: int
    done: int
    is_started: bool
    ended_at: float
    workers: Sequence[Worker]

    @property
    def total(self) -> int:
        """Return how many requests are in the queue, including those in flight or dead."""
        return sum(getattr(self, name) for name in SETS)

    @property
    def live_workers(self) -> Sequence[Worker]:
        """Return the workers whose lease is valid."""
        return [each for each in self.workers if each.is_alive]


def read_state(server: RedisServer, key: str) -> QueueState | None:
    """Return the figures of the queue of a filter, None without a queue; raises StorageError."""
    found = server.send("HMGET", key, "id", "crawl", "pushed", "done", "start", "ended")
    filter_id, crawl, pushed, done, start, ended = found
    if filter_id is None or (crawl is None and pushed is None):
        return None
    names = _keys(key)
    counts = server.transaction(*[("ZCARD", names[each]) for each in SETS])
    try:
        return QueueState(
            crawl=(crawl or b"").decode(errors="backslashreplace"),
            done=parsed_whole(done or b"0", "number of requests done"),
            is_started=start == b"done",
            ended_at=parsed_whole(ended or b"0", "end of the crawl") / 1000,
            workers=_workers(server, names),
            **dict(zip(SETS, counts, strict=True)),
        )
    except ValueError as error:
        raise _damaged(server, key, error) from None


def _workers(server: RedisServer, names: dict[str, str]) -> list[Worker]:
    fields, now = server.send("HGETALL", names["workers"]), 1000 * server.now()
    ends = {name: until for name, until in fields.items() if b":" not in name}
    for worker in ends:
        check_text(ID, worker, "worker")
    counts = server.batches(
        [("ZLEXCOUNT", names["leased"], b"[" + each, b"(" + each + b"\xff") for each in ends]
    )
    return [
        Worker(
            id=worker.decode(),
            name=fields.get(worker + b":name", b"?").decode(errors="backslashreplace"),
            lease_left=(parsed_whole(until, "end of a lease") - now) / 1000,
            lease_secs=parsed_whole(fields.get(worker + b":lease", b"0"), "lease") / 1000,
            in_flight=count,
            done=parsed_whole(fields.get(worker + b":done", b"0"), "number of requests done"),
        )
        for (worker, until), count in zip(ends.items(), counts, strict=True)
    ]


def read_requests(server: RedisServer, key: str, name: str) -> Iterator[Member]:
    """Return the requests in one of the `SETS` of a queue, in order; raises StorageError."""
    start = b"-"
    before = WORKER_BYTES + TOKEN_BYTES if name == "leased" else 0
    while some := server.send("ZRANGEBYLEX", _keys(key)[name], start, "+", "LIMIT", 0, _READ):
        for member in some:
            try:
                yield Member.parsed(member[before:])
            except (struct.error, ValueError):
                error = ValueError(f"{member[:60]!r} is no request of CrashSafeScheduler")
                raise _damaged(server, key, error) from None
        start = b"(" + some[-1]


def read_hosts(server: RedisServer, key: str) -> dict[str, int]:
    """Return how many requests of each slot are pending; the slot that is next comes first."""
    found: dict[str, int] = {}
    last = server.send("HGET", key, "last") or b""
    for first, end in ((b"(" + last + b"\1", b"+"), (b"-", b"(" + last + b"\1")):
        start = first
        while some := server.script(_HOSTS, keys_of(key), start, end):
            for slot, number in zip(some[::2], some[1::2], strict=True):
                found[slot.decode(errors="surrogatepass")] = number
            start = b"(" + some[-2] + b"\1"
    return found


def read_next(server: RedisServer, key: str, slots: Mapping[str, int], most: int) -> list[bytes]:
    """Return the first pending requests, serialized, round-robin by slot.

    Args:
        server: the connection.
        key: the key of the filter.
        slots: how many requests of each slot are pending.
        most: how many requests to return.
    """

    def read(slot: str, number: int) -> list[bytes]:
        name = slot_name(slot)
        words = (b"[" + name + b"\0", b"(" + name + b"\1", "LIMIT", 0, number)
        members = server.send("ZRANGEBYLEX", _keys(key)["pending"], *words)
        return [Member.parsed(member).data for member in members]

    return round_robin(slots, most, read)


def requeue(server: RedisServer, key: str, name: str) -> int:
    """Make all requests that are "aside" or "dead" pending again; return their number."""
    number, left = 0, 1
    while left:
        moved, left = server.script(REQUEUE, keys_of(key), name)
        number += moved
    return number


def remove_queue(server: RedisServer, key: str) -> None:
    """Remove the queue of a filter and all its requests, for all workers."""
    server.script(_REMOVE, keys_of(key))


def drop_dead(server: RedisServer, key: str) -> int:
    """Remove the dead letters of a queue; return their number."""
    return _drop(server, key, "dead", "-", "+")


def drop_host(server: RedisServer, key: str, host: str) -> int:
    """Remove the pending requests of a host, also during a crawl; return their number."""
    name = slot_name(host)
    return _drop(server, key, "pending", b"[" + name + b"\0", b"(" + name + b"\1")


def _drop(server: RedisServer, key: str, *words: str | bytes) -> int:
    number = 0
    while some := server.script(_DROP, keys_of(key), *words):
        number += some
    return number


def stop_workers(server: RedisServer, key: str, names: Iterable[str]) -> None:
    """Ask workers, by their names, to shut down gracefully at their next batch."""
    server.script(_STOP, keys_of(key), *names)


def _keys(key: str) -> dict[str, str]:
    return {name.rpartition(":")[2]: name for name in keys_of(key)[1:]}


def _damaged(server: RedisServer, key: str, error: ValueError) -> RefusedError:
    return RefusedError(
        f"the queue {key!r} in {server.address} is damaged ({error}); it was left as it is. "
        "Delete it with `scrapy bloom reset --queue --force`"
    )

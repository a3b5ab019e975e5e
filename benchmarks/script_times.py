"""How long each script of a shared queue keeps its server busy; memory of a pending request."""

import itertools
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import scrapy

from benchmarks.shared.report import Section, Table, at_most
from scrapy_bloom.generations.policy import Origin, Policy
from scrapy_bloom.queues.collected import MAX_BATCH
from scrapy_bloom.queues.redis_queue import RedisQueue
from scrapy_bloom.queues.redis_store import RedisStore
from scrapy_bloom.queues.serialized import serialized
from scrapy_bloom.queues.shares import Limit, Limits, Membership, Shares
from scrapy_bloom.queues.store import (
    ALL_SLOTS,
    Batch,
    End,
    Ended,
    Entered,
    Joining,
    Row,
    Share,
    State,
)
from scrapy_bloom.redis.backend import RedisBackend
from scrapy_bloom.redis.layout import named_keys
from scrapy_bloom.redis.lua_scripts import script
from scrapy_bloom.redis.server import RedisServer
from tests.support.servers import PROGRAMS, Server

LIMIT_MS, MEMORY = 5.0, 1.2
HOSTS, BUSY = 500, 250
MANY_HOSTS, WORKERS, LIMIT = 200, 20, 8
WANT = 16  # as a worker prefetches
LARGE = 1_000_000  # bytes of a large request
NAMES = {script(name): name for name in ("batch", "join", "leave", "move", "record", "change")}


@dataclass(frozen=True)
class Sizes:
    """Requests pending, failed, and unreadable; leased or waiting; repetitions."""

    pending: int
    leased: int
    repeats: int
    compared: int


FULL, QUICK = Sizes(1_000_000, 50_000, 200, 100_000), Sizes(5000, 2000, 20, 5000)
Times = dict[str, list[float]]


class MeteredServer(RedisServer):
    """A connection that asks the server how long each script took.

    Attributes:
        step: what is measured now.
        times: milliseconds of each script, by that.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.step = ""
        self.times: Times = {}

    def script(self, text: str, keys: Sequence[str], *args: Any) -> Any:
        """Run a script, and note its time."""
        before = self._microseconds()
        between = self._microseconds()
        answer = super().script(text, keys, *args)
        taken = (self._microseconds() - between - (between - before)) / 1000
        name = NAMES.get(text, "other")
        self.times.setdefault(f"{name}: {self.step}" if self.step else name, []).append(taken)
        return answer

    def _microseconds(self) -> float:
        used = self.call(lambda client: client.info("cpu"))
        secs = used["used_cpu_user_main_thread"] + used["used_cpu_sys_main_thread"]
        return 1e6 * float(secs)


def run(quick: bool) -> Section:  # noqa: FBT001 - every benchmark is called like this
    sizes = QUICK if quick else FULL
    measured: dict[str, Times] = {}
    for program in PROGRAMS:
        name = program.capitalize()
        measured[name] = {}
        for measure in (_measure, _shares):
            with Server(program) as server:
                times = measure(server, sizes)
            for step, values in times.items():
                measured[name].setdefault(step, []).extend(values)
    of_times = (median, _usual_most, max)
    memory = {
        each_program.capitalize(): _memory(each_program, sizes.compared)
        for each_program in PROGRAMS
    }
    return Section(
        title="The scripts of a shared queue",
        method=(
            f"A queue with {sizes.pending:,} pending requests of {HOSTS} hosts, {BUSY} of which or "
            "all, have downloads, as many unreadable ones, and as many that have failed in an "
            "earlier run; in turn by host and by priority "
            f"alone; and {MANY_HOSTS:,} hosts with a delay, which {WORKERS} workers share. "
            "A worker's batches are as large as it makes them. The time is the processor "
            "time of the one thread that serves all clients, with the reading of the batch and the "
            f"writing of the answer. Memory is the growth of used_memory by {sizes.compared:,} "
            "requests."
        ),
        checks=[
            *(
                at_most(
                    f"{name}: milliseconds of a script, 99 % of each kind",
                    max(map(_usual_most, times.values())),
                    LIMIT_MS,
                    "{:.1f}",
                )
                for name, times in measured.items()
            ),
            *(
                at_most(
                    f"{name}: memory of a pending request over scrapy-redis's",
                    ours / theirs,
                    MEMORY,
                    "{:.2f}",
                )
                for name, (ours, theirs) in memory.items()
            ),
        ],
        tables=[
            Table(
                (f"{name}, ms", "times", "median", "99 %", "the longest"),
                [
                    (step, f"{len(values):,}", *(f"{of(values):.2f}" for of in of_times))
                    for step, values in times.items()
                ],
            )
            for name, times in measured.items()
        ]
        + [
            Table(
                ("bytes of a pending request", "ours", "scrapy-redis's"),
                [(name, f"{ours:.0f}", f"{theirs:.0f}") for name, (ours, theirs) in memory.items()],
            )
        ],
    )


def _usual_most(values: Sequence[float]) -> float:
    """What 99 % of the values are below: the machine does other things as well."""
    return sorted(values)[(len(values) * 99 - 1) // 100]


class Crowd:
    """Workers of one queue, alone on a server, each with the same measured connection."""

    def __init__(self, server: Server) -> None:
        self.connection = MeteredServer(server.url)
        self.loader = RedisServer(server.url)
        self.client = server.client
        self.store = self.worker()
        self._numbers = itertools.count(1)

    def worker(self, *, run: str = "") -> RedisStore:
        """Return a further worker."""
        backend = RedisBackend(
            self.connection, "k", Policy(expected=1_000_000, error_rate=1e-9), Origin()
        )
        backend.join()
        store = RedisStore(backend, lease_secs=60.0)
        store.open(Joining("spider", run))
        return store

    def fill(
        self,
        state: State,
        count: int,
        hosts: int = HOSTS,
        waits_for: bytes = b"",
    ) -> None:
        """Add rows as the scripts would; those that failed or wait have done so in this run.

        Args:
            state: pending, unreadable, failed or waiting.
            count: how many.
            hosts: of so many hosts.
            waits_for: of waiting rows: the page.
        """
        filter_id = self.client.hget("k", "id").decode()
        last = self.client.hincrby("k", "numbered", count)
        rows = (
            Row(
                data=_data(number),
                state=state,
                slot=host_of(number, hosts),
                position=number,
                page=_fingerprint(next(self._numbers)),
                is_filtered=True,
                takes=int(state is not State.PENDING),
                reason="503 Service Unavailable" if state is State.FAILED else "",
                waits_for=waits_for,
            )
            for number in range(last - count + 1, last + 1)
        )
        RedisQueue(self.loader, "k").load(filter_id, rows, last - count + 1)
        self.client.hincrby("k", "pushed", count)
        self.client.hset("k", "epoch", 0)  # as their rows have it

    def lease(self, worker: RedisStore, count: int) -> None:
        """Have a worker take so many requests."""
        while count > 0:
            count -= len(worker.apply(Batch(want=min(count, MAX_BATCH))).taken)

    def entered(self, count: int, size: int = 0, *, once: bool = False) -> list[Entered]:
        """Return so many new requests."""
        numbers = [next(self._numbers) for _ in range(count)]
        return [
            Entered(_data(number, size), _fingerprint(number), host_of(number), once=once)
            for number in numbers
        ]


@dataclass(frozen=True)
class Steps:
    """What a worker does, so many times each.

    Attributes:
        crowd: the worker, its queue, and others.
        repeats: how often.
        downloads: of each host that has any.
        shares: the hosts of which requests are taken.
    """

    crowd: Crowd
    repeats: int
    downloads: Mapping[str, int]
    shares: Sequence[Share] = ALL_SLOTS

    def exchange(
        self,
        *,
        new: int = 0,
        size: int = 0,
        want: int = 0,
        is_new: bool = True,
        once: bool = False,
        end: End = End.DONE,
    ) -> None:
        """Send batches of requests, and take some, which end in the next one."""
        store, ended = self.crowd.store, list[Ended]()
        entered = self.crowd.entered(new, size, once=once)
        for _ in range(self.repeats):
            if is_new:
                entered = self.crowd.entered(new, size, once=once)
            batch = Batch(
                entered, ended=ended, want=want, downloads=self.downloads, shares=self.shares
            )
            taken = store.apply(batch).taken
            ended = [Ended(entry.id, end, "503") for entry in taken]
        store.apply(Batch(ended=ended))

    def lose(self, worker: RedisStore) -> None:
        """Let the lease of a worker be over, and return what it had."""
        crowd = self.crowd
        crowd.client.hset(_key("workers"), worker.worker, 1)
        while crowd.client.zcard(_key("leased")):
            crowd.client.hdel("k", "look")  # as if it were a second later
            crowd.store.apply(Batch())

    def join_again(self, worker: RedisStore) -> None:
        """Let a worker join again, and return what it had."""
        worker._join()  # noqa: SLF001 - a private step of `apply` that is measured alone
        self.lose(worker)

    def retry(self) -> None:
        """Begin a run, and make what has failed and waits pending in it."""
        self.crowd.store = self.crowd.worker(run="the next one")
        while self.crowd.store.apply(Batch()).pending < self.crowd.store.apply(Batch()).unfinished:
            pass

    def end_waiting(self, page: bytes) -> None:
        """End the rows that wait for a page, which is done."""
        self.crowd.client.zadd(_key("worklist"), {page: 0})
        while RedisQueue(self.crowd.loader, "k").counts()[State.WAITING]:
            self.crowd.store.apply(Batch())


def _measure(server: Server, sizes: Sizes) -> Times:
    crowd = Crowd(server)
    crowd.fill(State.PENDING, sizes.pending)
    crowd.fill(State.UNREADABLE, sizes.pending)
    crowd.fill(State.FAILED, sizes.pending)
    steps = Steps(crowd, sizes.repeats, {host_of(number): 1 + number % 3 for number in range(BUSY)})

    def named(name: str, step: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        crowd.connection.step = name
        step(*args, **kwargs)
        crowd.connection.step = ""

    named(f"{MAX_BATCH} new requests", steps.exchange, new=MAX_BATCH)
    named(f"{MAX_BATCH} new requests, {WANT} taken", steps.exchange, new=MAX_BATCH, want=WANT)
    named(f"{MAX_BATCH} duplicates", steps.exchange, new=MAX_BATCH, is_new=False)
    named(f"{MAX_BATCH} new in the run", steps.exchange, new=MAX_BATCH, once=True)
    once = {"new": MAX_BATCH, "is_new": False, "once": True}
    named(f"{MAX_BATCH} duplicates of the run", steps.exchange, **once)
    named(f"{WANT} taken", steps.exchange, want=WANT)
    named(f"{WANT} unreadable", steps.exchange, want=WANT, end=End.UNREADABLE)
    named(f"{MAX_BATCH} failed", steps.exchange, want=MAX_BATCH, end=End.FAILED)
    for what, end in (
        ("a worker that died", steps.lose),
        ("one that joins again", steps.join_again),
        ("one that leaves", RedisStore.close),
    ):
        worker = crowd.worker()
        crowd.lease(worker, sizes.leased)
        named(f"{sizes.leased:,} leases of {what}", end, worker)
    login = _fingerprint(0)
    crowd.fill(State.WAITING, sizes.leased, waits_for=login)
    named(f"{sizes.leased:,} rows waiting for a page that is done", steps.end_waiting, login)
    crowd.fill(State.WAITING, sizes.leased, waits_for=login)
    large = Steps(crowd, max(20, sizes.repeats // 5), steps.downloads)
    named("a new request of 1 MB", large.exchange, new=1, size=LARGE)
    named("requests of 1 MB taken", large.exchange, want=WANT)
    named(
        f"{sizes.pending:,} failed ones and {sizes.leased:,} waiting ones tried again", steps.retry
    )
    queue = RedisQueue(crowd.connection, "k")
    named(f"{sizes.pending:,} unreadable ones moved", queue.move, State.UNREADABLE, State.PENDING)
    busy = Steps(crowd, sizes.repeats, {host_of(number): 1 for number in range(HOSTS)})
    named(f"{WANT} taken, and all hosts are busy", busy.exchange, want=WANT)
    return crowd.connection.times


def _key(name: str) -> str:
    return named_keys("k")[name]


def _shares(server: Server, sizes: Sizes) -> Times:
    crowd = Crowd(server)
    crowd.fill(State.PENDING, sizes.pending, MANY_HOSTS)
    shares = Shares(Limits(Limit(LIMIT, delay=1.0)))
    shares.change(Membership(1, 0), 0.0)
    shares.change(Membership(WORKERS, 0), 0.0)
    ours = shares.ranges(9.0)
    full = {host_of(number, MANY_HOSTS): LIMIT for number in range(MANY_HOSTS)}
    own = {host: LIMIT for host in full if shares.of(host, 9.0)}
    for what, want, downloads, some in (
        ("1 taken", 1, {}, ours),
        (f"{WANT} taken", WANT, {}, ours),
        ("none taken, all full", WANT, own, ours),
        ("none taken, none with a share", WANT, {}, ()),
    ):
        crowd.connection.step = f"{what}, {len(own)} of {MANY_HOSTS} hosts with a share"
        Steps(crowd, sizes.repeats, downloads, some).exchange(want=want)
        crowd.connection.step = ""
    return crowd.connection.times


def host_of(number: int, hosts: int = HOSTS) -> str:
    return f"www.shop-{number % hosts:04}.example"


def _data(number: int, size: int = 0) -> bytes:
    return b"%-*d" % (max(size, 250), number)


def _fingerprint(number: int) -> bytes:
    return struct.pack(">20s", b"%d" % number)


def _memory(program: str, count: int) -> tuple[float, float]:
    """Bytes of a pending request in our queue, and in that of scrapy-redis."""
    from scrapy_redis.queue import PriorityQueue  # type: ignore[import-untyped]  # noqa: PLC0415

    spider = scrapy.Spider("memory")
    sizes = []
    for is_ours in (True, False):
        with ExitStack() as stack:
            server = stack.enter_context(Server(program))
            client = server.client
            crowd = Crowd(server)
            before = client.info("memory")["used_memory"]
            if is_ours:
                entered = (
                    Entered(serialized(request.to_dict(spider=spider)), None, host_of(number))
                    for number, request in enumerate(requests(spider, count))
                )
                while some := [*itertools.islice(entered, MAX_BATCH)]:
                    crowd.store.apply(Batch(some))
            else:
                theirs = PriorityQueue(client, spider, "theirs:requests")
                for request in requests(spider, count):
                    theirs.push(request)
            sizes.append((client.info("memory")["used_memory"] - before) / count)
    return sizes[0], sizes[1]


def requests(spider: scrapy.Spider, count: int) -> Iterator[scrapy.Request]:
    for number in range(count):
        host = f"https://{host_of(number)}"
        yield scrapy.Request(
            f"{host}/books/product-{number:08}.html?ref=1",
            callback=spider.parse,
            headers={"Referer": f"{host}/books/page-{number // 20}.html"},
            meta={"depth": 3, "link_text": "More about this book"},
        )

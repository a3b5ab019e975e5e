"""A queue that workers share, beside scrapy-redis's: speed, memory of the server, round trips."""

import gc
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any

import redis
import scrapy

from benchmarks.shared.machine import in_fresh_process
from benchmarks.shared.paused import in_paused_crawl
from benchmarks.shared.report import Section, Table, at_least, at_most, quartiles
from benchmarks.shared.servers import Server, programs, running
from benchmarks.shared.sites import TINY, WHOLE, Size, served
from benchmarks.shared.workers import OURS, SCRAPY_REDIS, Crowd, settings_of

SPEED, MEMORY = 1.0, 1.2
WORKERS = 2
HOSTS = 1000
FILTERED = 20_000  # of the requests that are added: the filter has figures of its own
BATCH = 8  # taken, of CONCURRENT_REQUESTS that may be in flight
TIMEOUT_SECS = 1800.0
QUIET_SECS = 60.0


@dataclass
class Steps:
    """What was measured with many pending requests.

    Attributes:
        name: of the scheduler.
        url: of the server.
        count: requests to add.
        taken: how many of them are taken and done afterwards.
        nbytes: of the server, for a request.
        secs: of each step, by its name.
        trips: likewise, round trips.
        queue_trips: of these, those for the queue.
        ping_secs: of as many round trips that do nothing.
    """

    name: str
    url: str
    count: int
    taken: int
    nbytes: float = 0.0
    secs: dict[str, list[float]] = field(default_factory=dict)
    trips: dict[str, list[int]] = field(default_factory=dict)
    queue_trips: dict[str, list[int]] = field(default_factory=dict)
    ping_secs: list[float] = field(default_factory=list)


def run(quick: bool) -> Section:  # noqa: FBT001 - every benchmark is called like this
    rounds, count, taken = (1, 2000, 160) if quick else (3, 100_000, 8000)
    size = TINY if quick else WHOLE
    program = next(iter(programs().values()))
    with tempfile.TemporaryDirectory() as directory, running(program) as server:
        speeds, cpus, requests = _crawls(Path(directory), server, size, rounds)
    steps = {name: _steps(program, name, count, taken) for name in (OURS, SCRAPY_REDIS)}
    ratios = _ratios(speeds)
    ours, theirs = steps[OURS], steps[SCRAPY_REDIS]
    return Section(
        title="A shared queue",
        method=(
            f"{WORKERS} workers crawl the example site, {requests:,} requests, which the benchmark "
            "serves, with CrashSafeScheduler, BLOOM_QUEUE = 'redis' and BloomDupeFilter; and with "
            "scrapy-redis's scheduler and its own set, in turn, on one server, which is emptied in "
            f"between; {rounds} times each. Speed is requests per second from the first request to "
            "the last one. Then, in a fresh process and with a fresh server for each, the start() "
            f"of a spider adds {count:,} requests for {HOSTS:,} hosts to the scheduler of its own "
            f"engine, which is paused (all but the first {FILTERED:,} with dont_filter), and takes "
            f"{taken:,}, {BATCH} at once, which are done before the next ones are taken. Memory is "
            "that of the queue's keys (MEMORY USAGE, SAMPLES 0). A round trip is one sending of "
            "one or more commands at once."
        ),
        checks=[
            at_least("requests per second over scrapy-redis's", median(ratios), SPEED, "{:.2f}"),
            at_most(
                f"memory of {count:,} pending requests over scrapy-redis's",
                ours.nbytes / theirs.nbytes,
                MEMORY,
                "{:.2f}",
            ),
            at_most("round trips of one take, the most", max(ours.trips["take"]), 2, "{:.0f}"),
            at_most(
                "round trips of one push, beside the filter's, the most",
                max(ours.queue_trips["add"][1:]),  # the first one loads the script
                1,
                "{:.0f}",
            ),
        ],
        tables=[
            Table(
                ("two workers", "25 %", "median", "75 %"),
                [
                    *(_row(f"{name}, requests/s", speeds[name], "{:,.0f}") for name in speeds),
                    *(_row(f"{name}, CPU µs/request", cpus[name], "{:,.0f}") for name in cpus),
                    _row("requests/s, ratio in one round", ratios, "{:.3f}"),
                ],
            ),
            Table(
                (
                    *(f"{count:,} pending", "bytes", "round trips", "of these, for the queue"),
                    "the most in one step",
                    *("µs, median", "99.9 %", "the longest step, ms"),
                ),
                [row for each in steps.values() for row in _step_rows(each)],
            ),
        ],
        notes=(
            "Adding includes the fingerprint and the filter, or the set. Done: the server is told "
            "with the next take; scrapy-redis has no such step, since what is taken is gone.\n"
            "The longest step is that of a machine which does other things as well: beside it is "
            "the longest of as many PINGs, on the same connection."
        ),
    )


def _row(name: str, values: Sequence[float], form: str) -> Sequence[str]:
    return (name, *map(form.format, quartiles(values)))


def _ratios(speeds: Mapping[str, Sequence[float]]) -> Sequence[float]:
    return [mine / other for mine, other in zip(speeds[OURS], speeds[SCRAPY_REDIS], strict=True)]


def _step_rows(steps: Steps) -> Iterator[Sequence[str]]:
    for what, secs in (*steps.secs.items(), ("PING", steps.ping_secs)):
        trips, of_queue = steps.trips.get(what, [1]), steps.queue_trips.get(what, [0])
        ordered = sorted(secs)
        yield (
            f"{steps.name}: {what}",
            f"{steps.nbytes:.0f}" if what == "add" else "",
            f"{mean(trips):.2f}",
            f"{mean(of_queue):.2f}",
            f"{max(trips)}",
            f"{1e6 * median(secs):.0f}",
            f"{1e6 * ordered[len(ordered) * 999 // 1000]:.0f}",
            f"{1e3 * ordered[-1]:.1f}",
        )


def _crawls(
    directory: Path, server: Server, size: Size, rounds: int
) -> tuple[Mapping[str, list[float]], Mapping[str, list[float]], int]:
    """Speeds, and µs of processor time for a request, with each scheduler; requests of a crawl."""
    speeds: dict[str, list[float]] = {OURS: [], SCRAPY_REDIS: []}
    cpus: dict[str, list[float]] = {OURS: [], SCRAPY_REDIS: []}
    order = list(speeds)
    requests = 0
    for number in range(rounds):
        for name in order:
            place = directory / f"{name}-{number}"
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            with server.client() as client:
                client.flushall()
            requests, secs = _crawl(place, server, name, size, requests)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            speeds[name].append(requests / secs)
            cpus[name].append(1e6 * cpu / requests)
        order.reverse()
    return speeds, cpus, requests


def _crawl(
    directory: Path, server: Server, name: str, size: Size, expected: int
) -> tuple[int, float]:
    """Addresses asked for in a crawl, and the seconds from the first to the last.

    Ours ends by itself; scrapy-redis's is ended after as many requests as ours had.
    """
    with served(size) as site:
        crowd = Crowd(directory, site.url, settings_of(name, server.url, 10_000), WORKERS)
        try:
            crowd.start()
            crowd.wait_until(lambda: site.total > 0)
            begun = last = time.monotonic()
            total = 0
            while any(worker.running() for worker in crowd.workers):
                if site.total != total:
                    total, last = site.total, time.monotonic()
                if name == SCRAPY_REDIS and len(site.hits) >= expected:
                    break
                assert time.monotonic() < last + QUIET_SECS, crowd.complaints()
                time.sleep(0.01)
            assert len(site.hits) > site.pages, crowd.complaints()
            return len(site.hits), last - begun
        finally:
            crowd.end()


def _steps(program: Path, name: str, count: int, taken: int) -> Steps:
    with running(program) as server:
        return in_fresh_process(TIMEOUT_SECS, _in_crawl, Steps(name, server.url, count, taken))


def _in_crawl(steps: Steps) -> Steps:
    """Measure in a crawl, which ends the use of this process for any other."""
    settings = settings_of(steps.name, steps.url, 2_000_000)
    named = {key: value for key, value in settings.items() if value is not None}
    in_paused_crawl(named, partial(_measure, steps))
    assert steps.secs, "not measured"
    return steps


def _measure(steps: Steps, scheduler: Any, spider: scrapy.Spider) -> None:
    with _counted_trips() as trips, redis.Redis.from_url(steps.url) as client:

        def timed(what: str, step: Callable[..., Any], *args: Any) -> Any:
            trips.clear()
            begun = perf_counter()
            answer = step(*args)
            steps.secs.setdefault(what, []).append(perf_counter() - begun)
            steps.trips.setdefault(what, []).append(len(trips))
            steps.queue_trips.setdefault(what, []).append(sum(trips))
            return answer

        for number in range(steps.count):
            request = _request(spider, number, is_filtered=number < FILTERED)
            if number < FILTERED:
                assert timed("add", scheduler.enqueue_request, request)
            else:
                assert timed("add, dont_filter", scheduler.enqueue_request, request)
        steps.nbytes = _nbytes(client) / steps.count
        # For isinstance, all schedulers are alike.
        is_ours = getattr(scheduler, "is_crash_safe", False)
        gc.collect()
        for _ in range(0, steps.taken, BATCH):
            taken = [timed("take", scheduler.next_request) for _ in range(BATCH)]
            assert None not in taken
            for request in taken if is_ours else ():
                ended = scheduler._queue._in_flight._ended  # noqa: SLF001 - what a crawl reaches through Deferreds
                timed("done", ended, request)
        for _ in range(2 * steps.taken):
            begun = perf_counter()
            client.ping()
            steps.ping_secs.append(perf_counter() - begun)


def _request(spider: scrapy.Spider, number: int, *, is_filtered: bool) -> scrapy.Request:
    host = f"https://www.shop-{number % HOSTS}.example"
    return scrapy.Request(
        f"{host}/books/product-{number:08}.html?ref=1",
        callback=spider.parse,
        headers={"Referer": f"{host}/books/page-{number // 20}.html"},
        meta={"depth": 3, "link_text": "More about this book"},
        dont_filter=not is_filtered,
    )


def _nbytes(client: Any) -> int:
    """Memory of the queue."""
    queue = [*client.scan_iter("*:queue:*"), *client.scan_iter("*:requests")]
    return sum(client.memory_usage(key, samples=0) for key in queue)


@contextmanager
def _counted_trips() -> Iterator[list[bool]]:
    """Whatever this thread sends is added to the list: whether it is for the queue."""
    trips: list[bool] = []
    kind: Any = redis.connection.AbstractConnection
    send = kind.send_packed_command

    def counted(connection: Any, command: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is threading.main_thread():  # not that of the lease
            sent = command if isinstance(command, bytes) else b"".join(command)
            trips.append(b":queue:" in sent or b":requests" in sent)
        return send(connection, command, *args, **kwargs)

    kind.send_packed_command = counted
    try:
        yield trips
    finally:
        kind.send_packed_command = send

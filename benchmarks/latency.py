"""A crawl whose queue is on a server, by how far away that is; four workers; an outage."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks.shared.distant import DistantServer, ping_secs
from benchmarks.shared.instant_site import AT_ONCE, HOSTS, LINKS, MENU, TICK_SECS, Course, crawl
from benchmarks.shared.report import Check, Section, Table, at_least, at_most, quartiles
from benchmarks.shared.scrapy_redis import SCRAPY_REDIS, settings_of
from tests.support.servers import PROGRAMS, Server
from tests.support.worker_faults import OURS

SCRAPYS = "Scrapy in memory"
MILLISECONDS = (0.0, 0.5, 1.0)
FAR = MILLISECONDS[-1]
SPEEDS = {SCRAPYS: {0.0: 0.85, FAR: 0.75}, SCRAPY_REDIS: {0.0: 2.0, FAR: 8.0}}
TRIPS, SERVER_CPU, TOGETHER, GAP_MS = 0.2, 0.30, 230.0, 50.0
WORKERS = 4
SITE_SECS = 0.26  # so that a worker has 60 pages a second
LEASE_SECS = 60  # the crawls of settings_of are killed, and have a short one


@dataclass(frozen=True)
class Sizes:
    """Rounds; pages of a crawl, and of that of one worker of a slow site; seconds of the outage."""

    rounds: int
    slow_rounds: int
    pages: int
    slow_pages: int
    outage_secs: float


@dataclass(frozen=True)
class Run:
    """One crawl: pages a second; round trips and the server's processor time (µs) for a page."""

    speed: float
    trips: float
    server_us: float


FULL, QUICK = Sizes(5, 3, 3000, 1200, 10.0), Sizes(1, 1, 400, 300, 2.0)
Runs = Mapping[tuple[str, float], list[Run]]


def run(quick: bool) -> Section:  # noqa: FBT001 - every benchmark is called like this
    sizes = QUICK if quick else FULL
    with ExitStack() as stack:
        server = stack.enter_context(Server(next(iter(PROGRAMS))))
        distant = {ms: DistantServer(server.port, ms / 1e3) for ms in MILLISECONDS if ms}
        for entry in distant.values():
            stack.callback(entry.end)
        ports = {0.0: server.port} | {ms: entry.port for ms, entry in distant.items()}
        pings = {ms: f"{1e3 * ping_secs(port)[1]:.2f}" for ms, port in ports.items()}
        runs = _by_distance(server, ports, sizes)
        slow = _of_slow_site(server, ports[FAR], sizes)
        outages = {
            name: _in_outage(server, name, distant[FAR], sizes)
            for name in (SCRAPYS, OURS, SCRAPY_REDIS)
        }
    return Section(
        title="Distance of the queue",
        method=(
            f"A site of {sizes.pages:,} pages on {HOSTS} hosts, each with {LINKS} links, of which "
            f"one is new ({MENU} on the first page), is crawled with {AT_ONCE} requests in flight. "
            "A download handler answers them in the crawl's process, at once: the only network is "
            "that to the queue. The contenders are CrashSafeScheduler and BloomDupeFilter in the "
            "server; scrapy-redis and its own set; Scrapy's scheduler and filter in memory. The "
            "server is on loopback, as it is, or behind a proxy that delays each direction by half "
            f"of the round trip. {sizes.rounds} rounds, with all in turn, each crawl in a fresh "
            "process and with an emptied server. Speed is from the first page to the last; a ratio "
            "is of two crawls of one round. A round trip is one read of the server from a client "
            "(`total_reads_processed`): what is sent at once, up to 16 KiB. Next, each answer "
            f"takes {SITE_SECS:g} s, which leaves a worker about 60 pages a second; speed is that "
            "of all workers together, from 20 to 80 % of the pages. Last, the proxy stops for "
            f"{sizes.outage_secs:g} s after a third of the pages, and then forwards what came."
        ),
        checks=[*_checks(runs, slow), *_outage_checks(outages[OURS], sizes)],
        tables=[
            Table(
                (
                    *("one worker", "PING, ms", "pages/s, 25 %", "median", "75 %"),
                    *("over Scrapy", "over scrapy-redis", "round trips/page", "server CPU µs/page"),
                ),
                [_row(runs, pings, *each_run) for each_run in runs],
            ),
            Table(
                (f"{SITE_SECS:g} s an answer, {FAR:g} ms", "pages/s, 25 %", "median", "75 %"),
                [(name, *map("{:,.1f}".format, quartiles(slow[name]))) for name in slow],
            ),
            Table(
                ("an outage", "longest gap before, ms", "since it began, ms", "pages", "ended"),
                [
                    (name, f"{before:,.0f}", f"{since:,.0f}", f"{pages:,}", reason)
                    for name, (before, since, pages, reason) in outages.items()
                ],
            ),
        ],
        notes=(
            f"A gap is between two calls of a timer of {1e3 * TICK_SECS:g} ms in the worker, from "
            "its first page on. That of Scrapy in memory, which has no outage, is Scrapy's own.\n"
            "The server's processor time includes what it does without commands (INFO cpu)."
        ),
    )


def _checks(runs: Runs, slow: Mapping[str, Sequence[float]]) -> Iterator[Check]:
    for other, limits in SPEEDS.items():
        for ms, limit in limits.items():
            ratio = median(_ratios(runs, (OURS, ms), other))
            yield at_least(f"pages/s over {other}, {ms:g} ms away", ratio, limit, "{:.2f}")
    trips = max(median(each_run.trips for each_run in runs[OURS, ms]) for ms in MILLISECONDS)
    yield at_most("round trips a page, the most at any distance", trips, TRIPS, "{:.2f}")
    cpu = max(_cpu_ratio(runs, ms) for ms in MILLISECONDS)
    yield at_most("server CPU over scrapy-redis's, likewise", cpu, SERVER_CPU, "{:.2f}")
    speed = median(slow[_workers(WORKERS)])
    yield at_least(f"pages/s of {WORKERS} workers, {FAR:g} ms away", speed, TOGETHER, "{:.0f}")


def _outage_checks(outage: tuple[float, float, int, str], sizes: Sizes) -> Iterator[Check]:
    _, since, pages, reason = outage
    what = f"gap of the event loop in an outage of {sizes.outage_secs:g} s, ms, the longest"
    yield at_most(what, since, GAP_MS, "{:.0f}")
    is_met = (pages, reason) == (sizes.pages, "finished")
    told = f"{pages:,} of {sizes.pages:,}, {reason}"
    yield Check("pages crawled after it, by itself", "all, finished", told, is_met)


def _ratios(runs: Runs, whose: tuple[str, float], other: str) -> list[float]:
    others = runs[other, 0.0 if other == SCRAPYS else whose[1]]
    return [a.speed / b.speed for a, b in zip(runs[whose], others, strict=True)]


def _cpu_ratio(runs: Runs, ms: float) -> float:
    pairs = zip(runs[OURS, ms], runs[SCRAPY_REDIS, ms], strict=True)
    return median(ours.server_us / theirs.server_us for ours, theirs in pairs)


def _row(runs: Runs, pings: Mapping[float, str], name: str, ms: float) -> Sequence[str]:
    these = runs[name, ms]
    speeds = map("{:,.0f}".format, quartiles([entry.speed for entry in these]))
    if name == SCRAPYS:
        return (name, "", *speeds, *4 * ("",))
    ratios = (f"{median(_ratios(runs, (name, ms), other)):.2f}" for other in SPEEDS)
    trips = median(entry.trips for entry in these)
    cpu_us = median(entry.server_us for entry in these)
    figures = (*speeds, *ratios, f"{trips:.2f}", f"{cpu_us:,.0f}")
    return (f"{name}, {ms:g} ms away", pings[ms], *figures)


def _by_distance(server: Server, ports: Mapping[float, int], sizes: Sizes) -> Runs:
    order = [(SCRAPYS, 0.0), *((name, ms) for ms in ports for name in (OURS, SCRAPY_REDIS))]
    runs: dict[tuple[str, float], list[Run]] = {entry: [] for entry in order}
    for _ in range(sizes.rounds):
        for name, ms in order:
            before = _reads_and_cpu(server)
            courses = _crawled(server, name, ports[ms], sizes.pages)
            assert courses[0].reason == "finished", courses[0].reason
            pairs = zip(_reads_and_cpu(server), before, strict=True)
            costs = ((now - then) / sizes.pages for now, then in pairs)
            runs[name, ms].append(Run(_speed(courses, 0.0, 1.0), *costs))
        order.append(order.pop(0))
    return runs


def _of_slow_site(server: Server, port: int, sizes: Sizes) -> Mapping[str, Sequence[float]]:
    contenders = {SCRAPYS: (SCRAPYS, 1), _workers(1): (OURS, 1), _workers(WORKERS): (OURS, WORKERS)}
    speeds: dict[str, list[float]] = {who: [] for who in contenders}
    for _ in range(sizes.slow_rounds):
        for who, (name, workers) in contenders.items():
            pages = sizes.slow_pages if workers == 1 else sizes.pages
            courses = _crawled(server, name, port, pages, workers=workers, secs=SITE_SECS)
            speeds[who].append(_speed(courses, 0.2, 0.8))
    return speeds


def _workers(number: int) -> str:
    return f"{OURS}, {number} worker{'s' if number > 1 else ''}"


def _in_outage(
    server: Server, name: str, distant: DistantServer, sizes: Sizes
) -> tuple[float, float, int, str]:
    """Longest gaps before it and since then, in ms; pages crawled; why the spider was closed."""
    begun: list[float] = []

    def be_away() -> None:
        begun.append(time.monotonic())
        with distant.away():
            time.sleep(sizes.outage_secs)

    (course,) = _crawled(server, name, distant.port, sizes.pages, at_a_third=be_away)
    first = course.pages[0][0]
    gaps = [(at, 1e3 * (at - last)) for last, at in pairwise(course.ticks) if last > first]
    before = max((gap for at, gap in gaps if at < begun[0]), default=0.0)
    since = max((gap for at, gap in gaps if at >= begun[0]), default=0.0)
    return before, since, len({number for _, number in course.pages}), course.reason


def _crawled(server: Server, name: str, port: int, pages: int, **more: Any) -> Sequence[Course]:
    """Crawl with the server emptied."""
    with server.client as client:
        client.flushall()
    settings: Mapping[str, object] = {}
    if name != SCRAPYS:
        url = f"redis://127.0.0.1:{port}/0"
        settings = settings_of(name, url, 10 * pages, BLOOM_QUEUE_LEASE_SECS=LEASE_SECS)
    # Without what keeps workers of scrapy-redis open: a single one ends by itself.
    return crawl({**settings, "EXTENSIONS": {}}, pages, **more)


def _speed(courses: Sequence[Course], begin: float, end: float) -> float:
    """Pages a second, of this part of all pages in the order in which they came."""
    times = sorted(at for course in courses for at, _ in course.pages)
    first, last = (int(part * (len(times) - 1)) for part in (begin, end))
    return (last - first) / (times[last] - times[first])


def _reads_and_cpu(server: Server) -> tuple[int, float]:
    """Reads of the server from its clients so far, and its processor time in µs."""
    with server.client as client:
        info = {**client.info("stats"), **client.info("cpu")}
    return info["total_reads_processed"], 1e6 * (info["used_cpu_user"] + info["used_cpu_sys"])

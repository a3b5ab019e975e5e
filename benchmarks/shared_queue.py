"""Two workers that share a queue, beside those of scrapy-redis: requests per second."""

import resource
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.shared.report import Section, Table, at_least, quartiles
from benchmarks.shared.servers import Server, programs, running
from benchmarks.shared.sites import TINY, WHOLE, Size, served
from benchmarks.shared.workers import OURS, SCRAPY_REDIS, Crowd, settings_of

SPEED = 1.0
WORKERS = 2
QUIET_SECS = 60.0


def run(quick: bool) -> Section:  # noqa: FBT001 - every benchmark is called like this
    rounds, size = (1, TINY) if quick else (3, WHOLE)
    program = next(iter(programs().values()))
    with tempfile.TemporaryDirectory() as directory, running(program) as server:
        speeds, cpus, requests = _crawls(Path(directory), server, size, rounds)
    ratios = _ratios(speeds)
    return Section(
        title="A shared queue",
        method=(
            f"{WORKERS} workers crawl the example site, {requests:,} requests, which the benchmark "
            "serves, with CrashSafeScheduler and BloomDupeFilter in Redis; and with scrapy-redis's "
            "scheduler and its own set, in turn, on one server, which is emptied in between; "
            f"{rounds} times each. Speed is requests per second from the first request to the last "
            "one. The memory of a pending request is among the figures of the scripts, and round "
            "trips are among those of the distance."
        ),
        checks=[
            at_least("requests per second over scrapy-redis's", median(ratios), SPEED, "{:.2f}"),
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
        ],
    )


def _row(name: str, values: Sequence[float], form: str) -> Sequence[str]:
    return (name, *map(form.format, quartiles(values)))


def _ratios(speeds: Mapping[str, Sequence[float]]) -> Sequence[float]:
    return [mine / other for mine, other in zip(speeds[OURS], speeds[SCRAPY_REDIS], strict=True)]


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

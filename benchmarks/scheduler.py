"""CrashSafeScheduler beside Scrapy's own: speed of a crawl, and frontiers of up to a million."""

import gc
import logging
import re
import resource
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from logging.handlers import BufferingHandler
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import scrapy
from scrapy.core.scheduler import Scheduler
from scrapy.crawler import CrawlerProcess
from scrapy.exceptions import CloseSpider
from twisted.internet.defer import Deferred

from benchmarks.shared.machine import in_fresh_process, resident_bytes
from benchmarks.shared.report import Section, Table, at_least, at_most, quartiles
from scrapy_bloom import CrashSafeScheduler
from tests.support.cli import bloom
from tests.support.crawls import BLOOM
from tests.support.example_crawls import TINY, WHOLE, ExampleSite, Size, start

SPEED = 1.0
ENQUEUE_US = 70.0
MEMORY_MB = 60.0
RESUME_SECS = 1.0
TIMEOUT_SECS = 900.0
COUNTS = [10_000, 100_000, 1_000_000]
BATCH = 500
AT_ONCE = 8  # taken, and then done

OURS, SCRAPYS = "CrashSafeScheduler", "Scrapy's Scheduler"
_COMMANDS = ("info", "queue")
_PATHS = {OURS: "scrapy_bloom.CrashSafeScheduler", SCRAPYS: "scrapy.core.scheduler.Scheduler"}


@dataclass(frozen=True)
class _Crawl:
    """One crawl of the example site: requests a second, and µs of processor time per request."""

    speed: float
    cpu_us: float


@dataclass(frozen=True)
class _Job:
    """A job with many pending requests."""

    first: "Frontier"  # with requests being added
    again: "Frontier"  # the job resumed
    renamed: "Frontier"  # once more, by a spider that lacks the callback of all requests
    disk_mb: float
    commands: Mapping[str, float]  # seconds


@dataclass
class Frontier:
    """What was measured with many pending requests."""

    count: int  # requests to add
    hosts: int  # for how many hosts
    taken: int  # how many of them are taken and done afterwards
    first_secs: float = 0.0  # of from_crawler, open, and the first request
    close_secs: float = 0.0
    pending: int = 0  # how many there were at first
    growth_mb: float = 0.0  # of the process, while the requests were added
    enqueue_us: float = 0.0  # for one request that is new
    next_us: float = 0.0  # for one request
    done_us: float = 0.0  # for one request
    lacks_callback: bool = False  # whether no stored request can be read
    errors: int = 0  # log lines about that
    aside_secs: float = 0.0  # to set all requests aside
    longest_ms: float = 0.0  # that one call took, while the event loop waited


def run(quick: bool) -> Section:  # noqa: FBT001 - every benchmark is called like this
    rounds, counts, hosts = (1, [500, 2000], 50) if quick else (7, COUNTS, 1000)
    count = counts[-1]
    size = TINY if quick else WHOLE
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        pages, crawls = _crawls(directory, size, rounds)
        jobs = {
            (name, number): _job(directory, name, number, hosts)
            for number in counts
            for name in _PATHS
        }
    largest = jobs[OURS, count].first
    speeds, cpus = [], []
    for ours, scrapys in zip(crawls[OURS], crawls[SCRAPYS], strict=True):
        speeds.append(ours.speed / scrapys.speed)
        cpus.append(ours.cpu_us / scrapys.cpu_us)
    return Section(
        title="Scheduler",
        method=(
            f"Crawls of the example site, {pages:,} pages, served by another process, with a "
            "JOBDIR and BloomDupeFilter: one with CrashSafeScheduler, one with Scrapy's, in turn, "
            f"{rounds} of each, each in a fresh process. Speed is requests per second from the "
            "opening of the spider to its closing, as Scrapy's stats have it. Then, in a fresh "
            f"process for each scheduler, the start() of a spider adds {count:,} requests for "
            f"{hosts:,} hosts to the scheduler of its own running engine, with the same filter; "
            "takes some; and is closed. Memory is how much the process (RSS) grew meanwhile, with "
            "the pages of the filter that were touched. Another process resumes the job: measured "
            "are `from_crawler`, `open` and the first `next_request` together, and `close`. All "
            "this is repeated with fewer requests. At last, a spider without the callback of the "
            "requests resumes the job, so all are set aside as unreadable. The commands run in a "
            "process that has imported their modules."
        ),
        checks=[
            at_least("requests per second relative to Scrapy's", median(speeds), SPEED, "{:.2f}"),
            at_most(
                f"µs to enqueue one of {count:,} requests, with the filter",
                largest.enqueue_us,
                ENQUEUE_US,
                "{:.1f}",
            ),
            at_most(
                f"MB for {count:,} pending requests",
                largest.growth_mb,
                MEMORY_MB,
                "{:.1f}",
            ),
            at_most(
                f"s to the first request of {count:,}",
                jobs[OURS, count].again.first_secs,
                RESUME_SECS,
                "{:.2f}",
            ),
        ],
        tables=[
            Table(
                ("crawl", "25 %", "median", "75 %"),
                [
                    *(
                        row
                        for name, these in crawls.items()
                        for row in (
                            _row(f"{name}, requests/s", [c.speed for c in these], "{:,.0f}"),
                            _row(f"{name}, CPU µs/request", [c.cpu_us for c in these], "{:,.0f}"),
                        )
                    ),
                    _row("requests/s, ratio in one round", speeds, "{:.3f}"),
                    _row("CPU, ratio in one round", cpus, "{:.3f}"),
                ],
            ),
            Table(
                (
                    "scheduler",
                    "pending",
                    "MB",
                    "enqueue µs",
                    "next µs",
                    "done µs",
                    "on disk MB",
                ),
                [_frontier_row(*names, job) for names, job in jobs.items()],
            ),
            Table(
                (
                    "resumed",
                    "pending",
                    "first request s",
                    "close s",
                    *(f"{c} s" for c in _COMMANDS),
                ),
                [_resumed_row(*names, job) for names, job in jobs.items()],
            ),
            Table(
                ("unreadable", "log lines", "set aside s", "longest wait of the event loop ms"),
                [
                    (
                        f"{job.renamed.pending:,}",
                        f"{job.renamed.errors}",
                        f"{job.renamed.aside_secs:.2f}",
                        f"{job.renamed.longest_ms:.1f}",
                    )
                    for (name, _), job in jobs.items()
                    if name == OURS
                ],
            ),
        ],
        notes=(
            "Done: the request goes into a batch once it has ended, and is deleted when that is "
            "stored. Scrapy's scheduler has no such step: what is taken is gone.\n"
            "Enqueue includes the fingerprint and the filter, with both schedulers.\n"
            f"Scrapy's scheduler keeps a file open for each of the {hosts:,} hosts."
        ),
    )


def _row(name: str, values: Sequence[float], form: str) -> Sequence[str]:
    return (name, *map(form.format, quartiles(values)))


def _resumed_row(name: str, pending: int, job: _Job) -> Sequence[str]:
    commands = [f"{job.commands[command]:.2f}" if job.commands else "-" for command in _COMMANDS]
    again = job.again
    return (name, f"{pending:,}", f"{again.first_secs:.2f}", f"{again.close_secs:.2f}", *commands)


def _frontier_row(name: str, pending: int, job: _Job) -> Sequence[str]:
    first = job.first
    done = f"{first.done_us:.1f}" if first.done_us else "-"
    return (
        name,
        f"{pending:,}",
        f"{first.growth_mb:.1f}",
        f"{first.enqueue_us:.1f}",
        f"{first.next_us:.1f}",
        done,
        f"{job.disk_mb:,.0f}",
    )


def _crawls(directory: Path, size: Size, rounds: int) -> tuple[int, Mapping[str, list[_Crawl]]]:
    """The number of pages, and the crawls with each scheduler."""
    crawls: dict[str, list[_Crawl]] = {name: [] for name in _PATHS}
    order = list(_PATHS)
    with ExampleSite(size) as site:
        for number in range(rounds):
            for name in order:
                job = directory / f"{name}-{number}".replace(" ", "-")
                crawls[name].append(_crawl(job, site, _PATHS[name]))
            order.reverse()
        return site.pages, crawls


def _crawl(directory: Path, site: ExampleSite, scheduler: str) -> _Crawl:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = start(site.url, directory, {"JOBDIR": directory / "job", "SCHEDULER": scheduler})
    assert run.finish() == 0, run.output
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert _stat(run.output, "item_scraped_count") == site.pages, run.output
    requests = _stat(run.output, "downloader/request_count")
    secs = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return _Crawl(requests / _stat(run.output, "elapsed_time_seconds"), 1e6 * secs / requests)


def _stat(output: str, name: str) -> float:
    found = re.search(rf"'{name}': ([\d.]+)", output)
    assert found, output
    return float(found[1])


def _job(directory: Path, name: str, count: int, hosts: int) -> _Job:
    job = directory / "frontier" / f"{name}-{count}".replace(" ", "-")
    first = in_fresh_process(
        TIMEOUT_SECS, _in_crawl, name, job, Frontier(count, hosts, count // 400 * AT_ONCE)
    )
    nbytes = sum(file.stat().st_size for file in job.rglob("*") if file.is_file())
    again = in_fresh_process(TIMEOUT_SECS, _in_crawl, name, job, Frontier(0, hosts, 0))
    assert first.next_us > 0, first
    assert again.pending == count - first.taken, again
    commands, renamed = {}, again
    if name == OURS:
        commands = {command: _seconds(command, job) for command in _COMMANDS}
        lacking = Frontier(0, hosts, 0, lacks_callback=True)
        renamed = in_fresh_process(TIMEOUT_SECS, _in_crawl, name, job, lacking)
        assert renamed.pending == count - first.taken, renamed
    return _Job(first, again, renamed, nbytes / 1e6, commands)


def _seconds(command: str, job: Path) -> float:
    for _ in range(2):  # the first time, modules are imported
        begun = perf_counter()
        ran = bloom(command, str(job), cwd=job)
        assert ran.status == 0, ran
    return perf_counter() - begun


def _in_crawl(name: str, job: Path, frontier: Frontier) -> Frontier:
    """Measure in a crawl, which ends the use of this process for any other."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    settings = {
        "SCHEDULER": _timed({OURS: CrashSafeScheduler, SCRAPYS: Scheduler}[name]),
        "DUPEFILTER_CLASS": BLOOM,
        "BLOOM_EXPECTED_REQUESTS": 2_000_000,
        "JOBDIR": str(job),
    }
    fixed = {"LOG_ENABLED": False, "TELNETCONSOLE_ENABLED": False, "CLOSESPIDER_ERRORCOUNT": 1}
    process = CrawlerProcess({**settings, **fixed})
    spider = MeasuredSpider if frontier.lacks_callback else ParsingSpider
    process.crawl(spider, frontier=frontier)
    process.start(install_signal_handlers=False)  # or SIGTERM would not end this process
    return frontier


class MeasuredSpider(scrapy.Spider):
    """Measures the scheduler of its engine, which is paused: it downloads nothing."""

    name = "measured"
    frontier: Frontier

    async def start(self) -> Any:
        """Measure, and close the spider."""
        engine: Any = self.crawler.engine
        engine.pause()  # no host of the requests exists
        self.frontier.pending = len(engine.scheduler)
        if self.frontier.lacks_callback:
            _set_aside(engine.scheduler, self.frontier)
        elif self.frontier.pending:
            begun = perf_counter()
            assert engine.scheduler.next_request() is not None
            self.frontier.first_secs = engine.scheduler.secs + perf_counter() - begun
        _add(engine.scheduler, self.frontier, self)
        _take(engine.scheduler, self.frontier)
        raise CloseSpider("measured")
        yield  # it is a generator


class ParsingSpider(MeasuredSpider):
    """Has the callback of the requests."""

    def parse_page(self, response: Any) -> None:
        """Do nothing: no request is downloaded."""


def _timed(kind: Any) -> type[Any]:
    class Timed(kind):  # type: ignore[misc]
        @classmethod
        def from_crawler(cls, crawler: scrapy.crawler.Crawler) -> Any:
            begun = perf_counter()
            new = super().from_crawler(crawler)
            new.secs = perf_counter() - begun
            return new

        def open(self, spider: scrapy.Spider) -> Deferred[None] | None:
            begun = perf_counter()
            opened: Deferred[None] | None = super().open(spider)
            self.secs += perf_counter() - begun
            return opened

        def close(self, reason: str) -> Deferred[None] | None:
            begun, spider = perf_counter(), self.spider
            closed: Deferred[None] | None = super().close(reason)
            spider.frontier.close_secs = perf_counter() - begun
            return closed

    return Timed


def _set_aside(scheduler: Any, frontier: Frontier) -> None:
    handler = BufferingHandler(capacity=1_000_000)
    handler.setLevel(logging.ERROR)
    logging.getLogger("scrapy_bloom").addHandler(handler)
    while len(scheduler):
        begun = perf_counter()
        assert scheduler.next_request() is None
        secs = perf_counter() - begun
        frontier.aside_secs += secs
        frontier.longest_ms = max(frontier.longest_ms, 1000 * secs)
    frontier.errors = len(handler.buffer)


def _add(scheduler: Any, frontier: Frontier, spider: scrapy.Spider) -> None:
    hosts, callback = frontier.hosts, getattr(spider, "parse_page", None)
    gc.collect()
    before = resident_bytes()
    secs = 0.0
    for first in range(0, frontier.count, BATCH):
        batch = [
            scrapy.Request(
                f"https://www.shop-{n % hosts}.example/books/product-{n:08}.html?ref=1", callback
            )
            for n in range(first, min(first + BATCH, frontier.count))
        ]
        begun = perf_counter()
        for request in batch:
            assert scheduler.enqueue_request(request)
        secs += perf_counter() - begun
    gc.collect()
    frontier.growth_mb = (resident_bytes() - before) / 1e6
    frontier.enqueue_us = 1e6 * secs / max(frontier.count, 1)


def _take(scheduler: Any, frontier: Frontier) -> None:
    # For isinstance, all schedulers are alike.
    is_ours = getattr(scheduler, "is_crash_safe", False)
    next_secs = done_secs = 0.0
    for _ in range(0, frontier.taken, AT_ONCE):
        begun = perf_counter()
        taken = [scheduler.next_request() for _ in range(AT_ONCE)]
        next_secs += perf_counter() - begun
        assert None not in taken
        if is_ours:
            in_flight = scheduler.dqs.in_flight  # what a crawl reaches through Deferreds
            flights = [in_flight.find(request, None) for request in taken]  # no response yet
            begun = perf_counter()
            for flight in flights:
                in_flight.end(flight)
            done_secs += perf_counter() - begun
    if frontier.taken:
        frontier.next_us = 1e6 * next_secs / frontier.taken
        frontier.done_us = 1e6 * done_secs / frontier.taken

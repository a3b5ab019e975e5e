"""Workers that share filter and queue in a server that is killed: is every page crawled?

The file is the workers' spider as well.
"""

import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import mean
from typing import Any
from urllib.parse import urlsplit

import redis
import scrapy
from redis.backoff import ExponentialBackoff
from redis.retry import Retry
from scrapy import signals
from scrapy.core.engine import ExecutionEngine
from scrapy.crawler import Crawler
from scrapy.exceptions import DontCloseSpider
from scrapy.linkextractors import LinkExtractor

from benchmarks.shared.report import Section, Table, all_of, at_most
from benchmarks.shared.servers import Master, programs

ROOT = Path(__file__).resolve().parent.parent
LIMIT_SECS = 240.0  # that any single wait may take
SITE_SECS = 0.02  # before each answer
NEIGHBOURS = 4  # on each side, that a page links to
IDLE_SECS = 1.0  # after which a worker without work ends
AT_ONCE = 4

OURS, SCRAPY_REDIS = "BloomDupeFilter", "scrapy-redis's set"
_FILTERS = {
    OURS: "scrapy_bloom.BloomDupeFilter",
    SCRAPY_REDIS: "scrapy_redis.dupefilter.RFPDupeFilter",
}

# Seconds between two signals of an idle spider; there is no setting for it.
ExecutionEngine._SLOT_HEARTBEAT_INTERVAL = 0.2  # noqa: SLF001


class Worker(scrapy.Spider):
    """Follows every link. The queue's connection waits, as docs/scrapy-redis.md says."""

    name = "worker"
    custom_settings = {  # noqa: RUF012 - as Scrapy has it
        "REDIS_PARAMS": {
            "retry": Retry(ExponentialBackoff(cap=1, base=0.05), 40),
            "retry_on_error": [redis.ConnectionError, redis.TimeoutError],
        }
    }

    def __init__(self, url: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.start_urls = [url]
        self._busy_at = time.monotonic()

    @classmethod
    def from_crawler(cls, crawler: Crawler, *args: Any, **kwargs: Any) -> "Worker":
        """Build it."""
        spider = super().from_crawler(crawler, *args, **kwargs)
        crawler.signals.connect(spider.busy, signals.response_received)
        crawler.signals.connect(spider.idle, signals.spider_idle)
        return spider

    async def start(self) -> Any:
        """All workers begin with the home page, and one of them crawls it."""
        yield scrapy.Request(self.start_urls[0])

    def parse(self, response: Any) -> Any:
        """Follow the links of a page."""
        for link in LinkExtractor().extract_links(response):
            yield scrapy.Request(link.url)

    def busy(self) -> None:
        """Note that there is work."""
        self._busy_at = time.monotonic()

    def idle(self) -> None:
        """Wait for what the other workers find."""
        if time.monotonic() - self._busy_at < IDLE_SECS:
            raise DontCloseSpider


class Site(ThreadingHTTPServer):
    """Pages that link to two children each, to their neighbours, and to the home page.

    Attributes:
        hits: answers for each page.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, pages: int) -> None:
        super().__init__(("127.0.0.1", 0), _Pages)
        self.pages = pages
        self.hits: Counter[int] = Counter()
        self._lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/"
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def hit(self, number: int) -> None:
        """Count an answer."""
        with self._lock:
            self.hits[number] += 1

    def links(self, number: int) -> Sequence[int]:
        """The pages that a page links to."""
        near = range(number - NEIGHBOURS, number + NEIGHBOURS + 1)
        # Neighbours only where they are of the same age: else all is found in the first minute.
        found = [n for n in near if n.bit_length() == number.bit_length()]
        return [n for n in (*found, 2 * number, 2 * number + 1, 1) if 0 < n <= self.pages]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a worker that ended."""


class _Pages(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Site

    def do_GET(self) -> None:
        path = urlsplit(self.path).path.strip("/")
        number = int(path) if path.isdigit() else 0 if path else 1
        time.sleep(SITE_SECS)
        body = "".join(f'<a href="/{n}">{n}</a>' for n in self.server.links(number)).encode()
        self.send_response(200 if number else 404)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        if number:
            self.server.hit(number)

    def log_message(self, *args: Any) -> None:
        pass


@dataclass(frozen=True)
class Way:
    """How the server loses something.

    Attributes:
        name: for people.
        keep: what will be left of the server's state, some time before.
        lose: kills the server, and brings it back with what was kept.
        secs: between the two, at least and at most; else it is a part of the crawl.
        options: of the server.
        has_replica: whether it has one.
    """

    name: str
    keep: Callable[[Master], None]
    lose: Callable[[Master, float], None]
    secs: tuple[float, float] | None = None
    options: Sequence[str] = ()
    has_replica: bool = False


def _keep_nothing(_: Master) -> None:
    pass


def _restart(server: Master, pause: float) -> None:
    server.kill()
    time.sleep(pause)
    server.start()


def _flush(server: Master, _: float) -> None:
    with server.client() as client:
        client.flushall()


def _save(server: Master) -> None:
    with server.client() as client:
        client.save()


def _copy(server: Master) -> None:
    shutil.copytree(server.directory, server.directory.with_name("copy"))


def _restart_from_copy(server: Master, pause: float) -> None:
    server.kill()
    time.sleep(pause)
    shutil.rmtree(server.directory)
    server.directory.with_name("copy").rename(server.directory)
    server.start()


def _take_over(server: Master, pause: float) -> None:
    server.kill()
    time.sleep(pause)
    server.be_replaced()


WAYS = (
    Way("killed, back empty", _keep_nothing, _restart),
    Way("flushed, not killed", _keep_nothing, _flush),
    Way("killed, back from a snapshot", _save, _restart),
    Way(
        "killed, back without its last second",
        _copy,
        _restart_from_copy,
        (0.3, 1.0),
        options=("--appendonly", "yes"),
    ),
    Way("killed, its replica takes over", Master.promote, _take_over, (0.1, 0.5), has_replica=True),
)


@dataclass(frozen=True)
class Outcome:
    """What became of a crawl.

    Attributes:
        way: how the server lost something.
        name: whose filter it was.
        lost_at: pages that were crawled when that happened.
        missing: pages that were never crawled.
        crawled: answers of the site.
        warnings: of our filter that something was lost, for each worker.
        has_ended: every worker ended by itself, and was finished.
    """

    way: str
    name: str
    lost_at: int
    missing: Sequence[int]
    crawled: int
    warnings: Sequence[Sequence[str]]
    has_ended: bool


def crawl(
    way: Way, name: str, directory: Path, *, pages: int, workers: int, seed: str, program: Path
) -> Outcome:
    """Crawl a site with some workers, whose server loses something meanwhile.

    Args:
        way: how.
        name: of the filter, a key of `_FILTERS`.
        directory: for logs and the server's files.
        pages: of the site.
        workers: how many.
        seed: the instants are drawn with it.
        program: the server.
    """
    rng = random.Random(seed)
    first, second = rng.uniform(0.1, 0.3), rng.uniform(0.35, 0.6)
    with ExitStack() as stack:
        site = Site(pages)
        stack.callback(site.server_close)
        stack.callback(site.shutdown)
        server = Master(program, directory / "server", *way.options)
        stack.callback(server.end)
        if way.has_replica:
            server.replicate()
        processes = [_started(server, site, name, directory / f"{n}.log") for n in range(workers)]
        for each in processes:
            stack.callback(_end, each)
        if way.secs is None:
            _wait_for(lambda: len(site.hits) >= first * pages, f"pages, {directory}")
            way.keep(server)
        _wait_for(lambda: len(site.hits) >= second * pages, f"pages, {directory}")
        if way.secs is not None:
            way.keep(server)
            time.sleep(rng.uniform(*way.secs))
        lost_at = len(site.hits)
        way.lose(server, rng.uniform(0, 0.5))
        _wait_for(lambda: all(each.poll() is not None for each in processes), f"end, {directory}")
        logs = [(directory / f"{n}.log").read_text(errors="replace") for n in range(workers)]
        return Outcome(
            way=way.name,
            name=name,
            lost_at=lost_at,
            missing=sorted(set(range(1, pages + 1)) - set(site.hits)),
            crawled=site.hits.total(),
            warnings=[re.findall(r".*\[scrapy_bloom\S*\] WARNING: .* lost.*", log) for log in logs],
            has_ended=all("Spider closed (finished)" in log for log in logs),
        )


def _started(server: Master, site: Site, name: str, log: Path) -> "subprocess.Popen[bytes]":
    settings: Mapping[str, object] = {
        "SCHEDULER": "scrapy_redis.scheduler.Scheduler",
        "SCHEDULER_PERSIST": True,
        "DUPEFILTER_CLASS": _FILTERS[name],
        "BLOOM_BACKEND": "redis",
        "BLOOM_EXPECTED_REQUESTS": 10_000,
        "REDIS_URL": server.url,
        "TELNETCONSOLE_ENABLED": False,
        "REMOTE_CONTROL_ENABLED": False,
        "DOWNLOAD_DELAY": 0,
        "CONCURRENT_REQUESTS_PER_DOMAIN": 16,
        "LOG_LEVEL": "INFO",
    }
    options = [part for key, value in settings.items() for part in ("-s", f"{key}={value}")]
    command = [sys.executable, "-m", "scrapy", "runspider", __file__, "-a", f"url={site.url}"]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with log.open("wb") as output:
        return subprocess.Popen(
            [*command, *options],
            cwd=log.parent,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdout=output,
            stderr=output,
        )


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()


def _wait_for(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LIMIT_SECS
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(what)
        time.sleep(0.005)


@contextmanager
def _kept_if_wrong(wrong: list[Outcome]) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="restarts-"))
    yield directory
    if not wrong:
        shutil.rmtree(directory)


def run(quick: bool) -> Section:  # noqa: FBT001 - every benchmark is called like this
    pages, workers, rounds = (200, 2, 1) if quick else (1500, 3, 4)
    program = next(iter(programs().values()))
    cases = [(way, name, n) for n in range(rounds) for way in WAYS for name in _FILTERS]
    wrong: list[Outcome] = []
    with _kept_if_wrong(wrong) as directory, ThreadPoolExecutor(AT_ONCE) as pool:

        def outcome(case: tuple[Way, str, int]) -> Outcome:
            way, name, number = case
            return crawl(
                way,
                name,
                directory / f"{way.name}-{name}-{number}".replace(" ", "-"),
                pages=pages,
                workers=workers,
                seed=f"{way.name} {number}",
                program=program,
            )

        outcomes = list(pool.map(outcome, cases))
        ours = [each for each in outcomes if each.name == OURS]
        theirs = [each for each in outcomes if each.name == SCRAPY_REDIS]
        wrong += [each for each in outcomes if each.missing or not each.has_ended]
    complete = [mine for mine, other in zip(ours, theirs, strict=True) if not other.missing]
    return Section(
        title="A server that loses something",
        method=(
            f"{workers} workers share scrapy-redis's queue and a filter on one server, as "
            f"docs/scrapy-redis.md says, and crawl a site of {pages:,} pages, each of which links "
            f"to two children, up to {2 * NEIGHBOURS} neighbours, and the home page. At a random "
            "instant, after 35 to 60 % of the pages, the server loses something. The same is done "
            "with scrapy-redis's own set in place of the filter, with the same instants. A page is "
            "crawled when the site has answered it."
        ),
        checks=[
            all_of(
                f"crawls with every page, of those where {SCRAPY_REDIS} leads to every page",
                sum(not each.missing for each in complete),
                len(complete),
            ),
            all_of(
                "crawls in which all workers end by themselves",
                sum(each.has_ended for each in ours),
                len(ours),
            ),
            at_most(
                "WARNINGs of one worker that the filter was lost, the most",
                max(len(lines) for each in ours for lines in each.warnings),
                1,
                "{:.0f}",
            ),
        ],
        tables=[_table(outcomes)],
        notes="".join(
            f"Not every page: {each.name}, {each.way}, after {each.lost_at:,} pages: "
            f"{len(each.missing):,} missing.\n"
            for each in wrong
        )
        + "A page that was crawled before the loss is crawled again where the server has forgotten "
        "it: that is meant so, since what else it has forgotten is not known.",
    )


def _table(outcomes: Sequence[Outcome]) -> Table:
    rows = []
    for way in WAYS:
        for name in _FILTERS:
            these = [each for each in outcomes if (each.way, each.name) == (way.name, name)]
            rows.append(
                (
                    f"{way.name}: {name}",
                    f"{len(these)}",
                    f"{sum(not each.missing for each in these)}",
                    f"{max(len(each.missing) for each in these):,}",
                    f"{mean(each.crawled for each in these):,.0f}",
                )
            )
    return Table(("the server", "crawls", "every page", "missing, most", "answers, mean"), rows)

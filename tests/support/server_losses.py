"""Workers that share filter and queue in a server that is killed: is every page crawled?

The file is the workers' spider as well.
"""

import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
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

from tests.support.servers import Master, Server

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECS = 240.0  # that any single wait may take
SITE_SECS = 0.02  # before each answer
NEIGHBOURS = 4  # on each side, that a page links to
IDLE_SECS = 1.0  # after which a worker without work ends

OURS, SCRAPY_REDIS = "BloomDupeFilter", "scrapy-redis's set"
FILTERS = {
    OURS: "scrapy_bloom.BloomDupeFilter",
    SCRAPY_REDIS: "scrapy_redis.dupefilter.RFPDupeFilter",
}

# Seconds between two signals of an idle spider; there is no setting for it.
ExecutionEngine._SLOT_HEARTBEAT_INTERVAL = 0.2


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

    Args:
        pages: how many there are.
        links_to_all: whether each page links to all of them instead.

    Attributes:
        hits: answers for each page.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, pages: int, *, links_to_all: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), _Pages)
        self.pages = pages
        self.links_to_all = links_to_all
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
        if self.links_to_all:
            return range(1, self.pages + 1)
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
    keep: Callable[[Server], None]
    lose: Callable[[Server, float], None]
    secs: tuple[float, float] | None = None
    options: Sequence[str] = ()
    has_replica: bool = False


def _keep_nothing(_: Server) -> None:
    pass


def _restart(server: Server, pause: float) -> None:
    server.kill()
    time.sleep(pause)
    server.start()


def _flush(server: Server, _: float) -> None:
    server.client.flushall()


def _save(server: Server) -> None:
    server.client.save()


def _copy(server: Server) -> None:
    shutil.copytree(server.directory, _copy_of(server))


def _restart_from_copy(server: Server, pause: float) -> None:
    server.kill()
    time.sleep(pause)
    shutil.rmtree(server.directory)
    _copy_of(server).rename(server.directory)
    server.start()


def _copy_of(server: Server) -> Path:
    return server.directory.with_name(f"{server.directory.name}-copy")


def _stop_replicating(server: Server) -> None:
    assert isinstance(server, Master)
    server.promote()


def _take_over(server: Server, pause: float) -> None:
    assert isinstance(server, Master)
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
    Way(
        "killed, its replica takes over",
        _stop_replicating,
        _take_over,
        (0.1, 0.5),
        has_replica=True,
    ),
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


def crawl(way: Way, name: str, directory: Path, *, site: Site, workers: int, seed: str) -> Outcome:
    """Crawl a site with some workers, whose server loses something meanwhile.

    Args:
        way: how.
        name: of the filter, a key of `FILTERS`.
        directory: for logs.
        site: what to crawl; ended with the crawl.
        workers: how many.
        seed: the instants are drawn with it.
    """
    rng = random.Random(seed)
    first, second = rng.uniform(0.1, 0.3), rng.uniform(0.35, 0.6)
    with ExitStack() as stack:
        pages = site.pages
        stack.callback(site.server_close)
        stack.callback(site.shutdown)
        directory.mkdir(parents=True)
        server = (Master if way.has_replica else Server)("valkey", *way.options)
        stack.callback(server.end)
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


def _started(server: Server, site: Site, name: str, log: Path) -> "subprocess.Popen[bytes]":
    settings: Mapping[str, object] = {
        "SCHEDULER": "scrapy_redis.scheduler.Scheduler",
        "SCHEDULER_PERSIST": True,
        "DUPEFILTER_CLASS": FILTERS[name],
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

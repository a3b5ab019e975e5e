"""Jobs whose site is ill in a night: pages fail, and others are redirected to them."""

import textwrap
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support import servers
from tests.support.crawls import Crawl, stat
from tests.support.jobs import Job
from tests.support.machine import REQUIRED
from tests.support.sites import LIMIT, ScriptedSite

# A job in each place, and how many workers it has.
PLACES = {"JOBDIR": ("JOBDIR", 1), "Redis": ("Redis", 1), "Redis, 3 workers": ("Redis", 3)}

LINKS = """
import scrapy

class Shop(scrapy.Spider):
    name = "shop"
    starts = ["/"]
    options = {}  # of requests, by their paths

    def __init__(self, url, **kwargs):
        super().__init__(**kwargs)
        self.url = url[:-1]
        self.start_urls = [self.url + path for path in self.starts]

    def parse(self, response):
        for link in response.css("a::attr(href)").getall():
            yield response.follow(link, **self.options.get(link, {}))
"""


class OrderedSite(ScriptedSite):
    """A site that answers some pages only when something else has happened."""

    def __init__(self) -> None:
        super().__init__({})
        self.after: dict[str, Callable[[], bool]] = {}  # when paths are answered

    def hit(self, path: str) -> None:
        servers.wait_for(
            lambda: path not in self.after or self.after[path](),
            lambda: f"{path} has no answer",
            LIMIT,
        )
        super().hit(path)

    def answer_after(self, path: str, *others: str) -> None:
        """Answer a path when others were answered."""
        self.after[path] = lambda: self.hits.keys() >= set(others)

    def recover(self) -> None:
        """Let all pages answer well, without links."""
        self.after.clear()
        self.answers = {}


def job_of(place: str, site: OrderedSite, directory: Path, code: str = "", **settings: Any) -> Job:
    """Return a job with the spider of links and more code."""
    kind, workers = PLACES[place]
    spider = LINKS + textwrap.dedent(code)
    return Job(kind, directory, site, spider, workers=workers, **settings)


def use_server(job: Job, server: servers.Server, port: int = 0, options: str = "") -> None:
    """Have a job use a server of its own, perhaps by a proxy at a port."""
    job.server = server
    job.settings["BLOOM_REDIS_URL"] = f"redis://127.0.0.1:{port or server.port}/0{options}"


def counts(job: Job) -> dict[str, int]:
    """Return how many requests `scrapy bloom info` counts in each state that has any."""
    figures = job.bloom("info", "--json").json["queue"]
    states = ("pending", "in_flight", "suspect", "waiting", "failed", "dead", "unreadable")
    return {state: figures[state] for state in states if figures.get(state)}


def total(crawls: Collection[Crawl], name: str) -> int:
    return sum(stat(crawl, name) for crawl in crawls)


def recover(job: Job, pages: Collection[str], starts: Collection[str] = ("/",)) -> None:
    """The site is well in two nights: the first one crawls what had failed, once."""
    assert isinstance(job.site, OrderedSite)
    job.site.recover()
    job.crawl("well")
    assert job.site.hits == dict.fromkeys([*pages, *starts], 1)
    assert not counts(job)
    job.crawl("well again")
    assert job.site.hits == dict.fromkeys(starts, 1)
    assert not counts(job)


# The clock of a crawl, which a file sets forward, and that of its server.
_AHEAD = """
import time
from pathlib import Path

now, ahead = time.time, Path(__file__).with_name("ahead")
time.time = lambda: now() + float(ahead.read_text()[:-1])
"""
_FAKETIME = next(iter(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")), None)
if "libfaketime" in REQUIRED and _FAKETIME is None:
    raise RuntimeError("libfaketime is not installed")


@contextmanager
def clocked_job(
    place: str, site: OrderedSite, directory: Path, **settings: Any
) -> Iterator[tuple[Job, Callable[[float], None]]]:
    """Yield a job, and a function that sets all its clocks so many seconds ahead.

    A job in Redis has a server of its own, and needs libfaketime.
    """
    ahead = directory / "ahead"

    def set_ahead(secs: float) -> None:
        (new := directory / "new").write_text(f"+{secs}s")
        new.rename(ahead)

    set_ahead(0)
    # No lease expires when the clock of the server is set ahead.
    job = job_of(place, site, directory, _AHEAD, BLOOM_QUEUE_LEASE_SECS=86_400, **settings)
    if not job.is_shared:
        yield job, set_ahead
        return
    if _FAKETIME is None:
        pytest.skip("libfaketime is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", f"{_FAKETIME}")
        patch.setenv("FAKETIME_TIMESTAMP_FILE", f"{ahead}")
        patch.setenv("FAKETIME_NO_CACHE", "1")
        patch.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
        server = servers.Server()
    with server:
        use_server(job, server, options="?socket_timeout=10")
        yield job, set_ahead

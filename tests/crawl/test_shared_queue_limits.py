"""A crawl whose workers share a queue: long ones, large ones, and servers that are away."""

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import servers
from tests.support.crawls import Crawl, stat
from tests.support.shared_crawls import SharedCrawl
from tests.support.sites import ScriptedSite, Site

FOUND = 600  # requests of one callback
MOST_CONSUMED = 500  # of them, by a worker that cannot send any
OUTAGE_SECS = 2

MANY = f"""
def parse(self, response):
    for number in range({FOUND}):
        LOG.with_name("consumed").write_text(str(number))
        yield scrapy.Request(f"data:,{{number}}", self.parse_one)

def parse_one(self, response):
    with LOG.with_name("parsed").open("a") as log:
        log.write(response.text + "\\n")

LinkSpider.parse, LinkSpider.parse_one = parse, parse_one
"""

# The longest gap between two runs of the event loop, from the first answer on, in steps of another
# thread: a machine that stops the process stops both.
STEP_SECS = 0.005
GAPS = f"""
import threading, time
from scrapy.utils.asyncio import create_looping_call

def parse(self, response):
    if not hasattr(self, "gap"):
        self.gap = self.steps = self.last = 0
        threading.Thread(target=self.step, daemon=True).start()
        self.loop = create_looping_call(self.look)
        self.loop.start({STEP_SECS})
    return links(self, response)

def step(self):
    while True:
        time.sleep({STEP_SECS})
        self.steps += 1

def look(self):
    self.gap = max(self.gap, self.steps - self.last)
    self.last = self.steps

def closed(self, reason):
    self.loop.stop()
    self.crawler.stats.set_value("gap", self.gap)

links = LinkSpider.parse
LinkSpider.parse, LinkSpider.step = parse, step
LinkSpider.look, LinkSpider.closed = look, closed
"""


@pytest.fixture
def alone() -> Iterator[Site]:
    """A site of one page."""
    with ScriptedSite({"/": [()]}) as site:
        yield site


# A callback that yields more than the queue takes.


def consumed(crawl: SharedCrawl) -> int:
    found = (crawl.directory / "consumed").read_text() if crawl.workers else ""
    return int(found or 0)


def wait_for_a_full_buffer(crawl: SharedCrawl) -> None:
    """Wait until nothing more is consumed: what stands still for a second waits."""
    last = [-1, 0]

    def stands_still() -> bool:
        last[1] = last[1] + 1 if consumed(crawl) == last[0] else 0
        last[0] = consumed(crawl)
        return last[0] > 0 and last[1] > 20

    servers.wait_for(stands_still, lambda: f"consumed: {last[0]}")


def hold_back(crawl: SharedCrawl) -> Crawl:
    """A worker with a callback that has filled the buffer, since the server does not answer."""
    crawl.site.hold_after(0)
    worker = crawl.start()
    servers.wait_for(crawl.site.is_holding, lambda: worker.output)
    (crawl.directory / "consumed").write_text("")
    crawl.server.pause()
    crawl.site.release()
    wait_for_a_full_buffer(crawl)
    assert consumed(crawl) <= MOST_CONSUMED
    return worker


def parsed(crawl: SharedCrawl) -> set[int]:
    return {int(line) for line in (crawl.directory / "parsed").read_text().split()}


@pytest.mark.parametrize("end", ["goes on", "is interrupted", "has an outage"])
def test_a_worker_whose_callback_waits_for_room(
    end: str, alone: Site, server: servers.Server, tmp_path: Path
) -> None:
    """If the worker ends, the callback's request is not done, and the next run finds the others."""
    deadline = 1 if end == "has an outage" else 60
    crawl = SharedCrawl(
        alone, tmp_path, server=server, code=MANY, BLOOM_REDIS_DEADLINE_SECS=deadline
    )
    if end != "goes on":
        crawl.settings["BLOOM_REDIS_URL"] = f"{server.url}?socket_timeout=1"
    worker = hold_back(crawl)
    if end == "is interrupted":
        worker.send(signal.SIGINT)
    if end != "goes on":
        assert worker.finish() == 0, worker.output
        (error,) = worker.our_lines("ERROR")
        assert "The spider is closed (reason bloom_outage)" in error
        assert consumed(crawl) <= MOST_CONSUMED
    server.go_on()
    if end != "goes on":
        crawl.end_leases(worker)
        worker = crawl.start()
    crawl.finish(worker)
    assert parsed(crawl) == set(range(FOUND))
    assert alone.total() == (1 if end == "goes on" else 2)
    assert crawl.state().ended_at


# A machine that is suspended: one of its clocks goes on.
_SUSPENDED = """
import time
clock_gettime = time.clock_gettime

def with_suspension(clock):
    is_later = clock == time.CLOCK_BOOTTIME and LOG.with_name("suspended").exists()
    return clock_gettime(clock) + (1000 if is_later else 0)

time.clock_gettime = with_suspension
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no CLOCK_BOOTTIME")
def test_a_suspended_machine_hands_out_nothing_after_its_lease(
    wide: Site, server: servers.Server, tmp_path: Path
) -> None:
    crawl = SharedCrawl(wide, tmp_path, server=server, code=_SUSPENDED)
    crawl.settings["BLOOM_REDIS_URL"] = f"{server.url}?socket_timeout=1"
    (worker,) = crawl.hold(20, 1)
    server.pause()
    (tmp_path / "suspended").touch()
    wide.release()
    worker.wait_until(lambda: bool(crawl.our_lines("does not answer", "WARNING")))
    assert wide.total() <= 20 + 16  # which were downloading, CONCURRENT_REQUESTS
    server.go_on()
    crawl.finish()
    crawl.check_complete()


# The event loop goes on while the server is away.


def test_the_event_loop_runs_while_the_server_is_stopped(
    wide: Site, durable: servers.Server, tmp_path: Path
) -> None:
    crawl = SharedCrawl(wide, tmp_path, server=durable, code=GAPS)
    crawl.settings["BLOOM_REDIS_URL"] = f"{durable.url}?socket_timeout={OUTAGE_SECS}"
    (worker,) = crawl.hold(20, 1)
    durable.pause()
    wide.hold_after(10)
    time.sleep(OUTAGE_SECS)
    worker.wait_until(lambda: bool(worker.our_lines("WARNING")))
    durable.go_on()
    crawl.finish()
    crawl.check_complete()
    assert crawl.our_lines("is back after")
    assert 0 < stat(worker, "gap") < OUTAGE_SECS / 2 / STEP_SECS

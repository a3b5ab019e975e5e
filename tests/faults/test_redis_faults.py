"""Faults of Redis at the start of a crawl, and in the middle.

All refusals and outages that a connection can meet are in tests/redis/connection.
"""

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support import servers
from tests.support.crawls import Crawl
from tests.support.sites import Site

PAGES, GATE = 60, 12
PASSWORD = "geheim-8Y2k"  # of every server, and in every URL: no log may show it
KEY = "links:bloom"
# Seconds without an answer that mean a stalled server: a busy machine stands still for less.
STALLED = "?socket_timeout=4"
SHORT = {"BLOOM_REDIS_DEADLINE_SECS": 1}  # a fault lasts for longer
WAITED = (
    "(waited up to 1 seconds, BLOOM_REDIS_DEADLINE_SECS); check that the server runs, has room, "
    "and that BLOOM_REDIS_URL is right"
)
CLOSED = (
    "The spider is closed (reason {}), and requests that are still in progress stay in the queue; "
    "start the crawl again"
)
SHARED = {"SCHEDULER": "scrapy_bloom.CrashSafeScheduler", "BLOOM_QUEUE_LEASE_SECS": 2}


def locked_server(*options: str) -> servers.Server:
    return servers.Server("valkey", "--requirepass", PASSWORD, *options)


@pytest.fixture
def server() -> Iterator[servers.Server]:
    """A server with a password."""
    with locked_server() as server:
        yield server


@pytest.fixture
def saving_server() -> Iterator[servers.Server]:
    with locked_server("--appendonly", "yes", "--appendfsync", "always") as server:
        yield server


def admin(server: servers.Server) -> redis.Redis:
    """Connect to the server as another client, which tries nothing again."""
    return redis.Redis(port=server.port, password=PASSWORD, retry=Retry(NoBackoff(), 0))


def url_of(port: int, user: str = "") -> str:
    return f"redis://{user}:{PASSWORD}@127.0.0.1:{port}/0"


def start(
    site: Site, url: str, work_dir: Path, *, held_after: int | None = None, **settings: Any
) -> Crawl:
    """Start a crawl with its filter at a URL; wait until the site holds back, if it shall."""
    settings = {
        "BLOOM_REDIS_URL": url,
        "BLOOM_REDIS_DEADLINE_SECS": 60,  # no fault lasts for so long
        "BLOOM_EXPECTED_REQUESTS": 5000,
        **settings,
    }
    if held_after is None:
        return Crawl(site.url, work_dir, settings)
    return Crawl.held(site, held_after, work_dir, settings)


def ended(crawl: Crawl, reason: str = "finished") -> dict[str, float]:
    """Wait for the end of a crawl that has begun; return its stats about the filter.

    It ends with exit status 0 and its reason in the stats, without a traceback or a password.
    """
    assert crawl.finish() == 0, crawl.output
    assert f"'finish_reason': '{reason}'" in crawl.output, crawl.output
    assert "Traceback" not in crawl.output, crawl.output
    assert PASSWORD not in crawl.output
    found = re.findall(r"'(bloom/[\w/]+)': ([\d.e+-]+)", crawl.output)
    return {name: float(value) for name, value in found}


def without_port(line: str) -> str:
    return re.sub(r"redis://127\.0\.0\.1:\d+/0", "SERVER", line)


def problems(crawl: Crawl, *levels: str) -> list[str]:
    """Return our log lines of these levels, by default all problems, with SERVER for the URL."""
    lines = [
        line
        for level in levels or ("WARNING", "ERROR", "CRITICAL")
        for line in crawl.our_lines(level)
    ]
    return [without_port(line.split(": ", 1)[1]) for line in lines]


def check_one_outage(crawl: Crawl, reason: str = "") -> None:
    """Check that the log says that one outage began and ended, and of nothing else."""
    (warning,) = problems(crawl)
    assert warning.startswith(f"SERVER does not answer: {reason}")
    assert sum("SERVER is back after " in line for line in problems(crawl, "INFO")) == 1


def repeats(site: Site) -> int:
    """Return how many pages of a tree were crawled again; its start page has three URLs."""
    return site.total() - PAGES - 2


# At the start.


def test_a_crawl_waits_for_a_server_that_still_loads_its_data(tree: Site, tmp_path: Path) -> None:
    """It loads for half a minute, or until the test ends it, and answers twice a second."""
    slow = ("--key-load-delay", "2000", "--loading-process-events-interval-bytes", "1024")
    server = locked_server(*slow)
    client = admin(server)
    client.mset({f"other:{number}": "x" * 30 for number in range(16_000)})
    client.save()
    server.kill()
    restart = threading.Thread(target=server.start)
    restart.start()
    crawl = start(tree, url_of(server.port), tmp_path)
    crawl.wait_until(lambda: bool(problems(crawl)))
    assert not tree.hits
    client.config_set("key-load-delay", 0)
    restart.join()
    stats = ended(crawl)
    server.end()
    assert stats["bloom/redis/retries"] >= 1
    check_one_outage(crawl)
    assert len(tree.hits) == PAGES
    assert repeats(tree) == 0


# Faults in the middle, and how they end.


REFUSED = "Error 111 connecting to 127.0.0.1:{port}. "
FAULTS: dict[str, tuple[Callable, Callable, str]] = {
    "killed": (servers.Server.kill, servers.Server.start, REFUSED),
    "stalled": (servers.Server.pause, servers.Server.go_on, "Timeout "),
}  # others: tests/redis/connection


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shorter_than_the_deadline_costs_retries_only(
    fault: str, tree: Site, saving_server: servers.Server, tmp_path: Path
) -> None:
    make, repair, reason = FAULTS[fault]
    crawl = start(tree, url_of(saving_server.port) + STALLED, tmp_path, held_after=GATE)
    make(saving_server)
    tree.release()
    crawl.wait_until(lambda: bool(problems(crawl)))
    repair(saving_server)
    stats = ended(crawl)
    assert stats["bloom/redis/retries"] >= 1
    assert "bloom/errors" not in stats
    # If the server is killed, its connections may be reset at first.
    check_one_outage(crawl, "" if fault == "killed" else reason)
    assert len(tree.hits) == PAGES
    # What was under way may be new twice, as its first answer never came.
    assert repeats(tree) <= stats["bloom/redis/retries"]


def test_a_fault_longer_than_the_deadline_closes_the_spider_and_the_crawl_resumes(
    tree: Site, saving_server: servers.Server, tmp_path: Path
) -> None:
    url = url_of(saving_server.port)
    crawl = start(tree, url, tmp_path, held_after=GATE, **SHARED, **SHORT)
    saving_server.kill()
    tree.release()
    ended(crawl, "bloom_outage")
    # One, although the end of the crawl cannot be stored on the server either.
    (outage,) = problems(crawl)
    assert outage.startswith(f"SERVER cannot be used: {REFUSED.format(port=saving_server.port)}")
    assert f"{WAITED}. {CLOSED.format('bloom_outage')}" in outage
    assert len(tree.hits) < PAGES  # else it would have been over anyway
    saving_server.start()
    crawl = start(tree, url, tmp_path, **SHARED)
    ended(crawl)
    assert not problems(crawl)
    assert len(tree.hits) == PAGES


# Faults that lose what the server had.

LOST = (
    f"The filter '{KEY}' in SERVER was lost: removed, flushed, evicted, or not saved before a "
    "restart. The crawl starts over with an empty filter; check persistence (appendonly yes) and "
    "maxmemory-policy (noeviction)"
)


def flush(server: servers.Server) -> None:
    admin(server).flushall()


def restart_empty(server: servers.Server) -> None:
    server.kill()
    server.start()


@pytest.mark.parametrize(("lose", "has_mirror"), [(flush, True), (restart_empty, False)])
def test_what_the_server_has_lost_is_crawled_again_with_one_warning(
    lose: Callable, has_mirror: bool, tree: Site, server: servers.Server, tmp_path: Path
) -> None:
    # Room for so many that no count is sent in between: what is read with each request shows it.
    settings = {"BLOOM_REDIS_MIRROR": has_mirror, "BLOOM_EXPECTED_REQUESTS": 100_000}
    crawl = start(tree, url_of(server.port), tmp_path, held_after=GATE, **settings)
    lose(server)
    tree.release()
    stats = ended(crawl)
    assert [line for line in problems(crawl) if " does not answer: " not in line] == [LOST]
    assert "bloom/errors" not in stats
    assert len(tree.hits) == PAGES
    assert repeats(tree) > 0


# Refusals, which do not pass by themselves.


NO_PERMISSION = (
    "SERVER, key links:bloom: ResponseError: User crawler has no permissions to run the 'bitfield' "
    "command; the user needs "
)


def test_a_refusal_closes_the_spider_and_the_crawl_resumes_when_it_is_put_right(
    tree: Site, server: servers.Server, tmp_path: Path
) -> None:
    """No traceback, and no crawl that goes round in circles because nothing is filtered."""
    rules = ("on", f">{PASSWORD}", "~*", "+@all")
    admin(server).execute_command("ACL", "SETUSER", "crawler", *rules)
    url = url_of(server.port, "crawler")
    # If it should go on all the same, it would never end.
    crawl = start(tree, url, tmp_path, held_after=GATE, CLOSESPIDER_PAGECOUNT=500, **SHARED)
    admin(server).execute_command("ACL", "SETUSER", "crawler", "-bitfield")
    tree.release()
    ended(crawl, "bloom_queue_failed")
    (refused,) = problems(crawl)
    assert refused.startswith(NO_PERMISSION)
    assert CLOSED.format("bloom_queue_failed") in refused
    admin(server).execute_command("ACL", "SETUSER", "crawler", "+bitfield")
    crawl = start(tree, url, tmp_path, **SHARED)
    ended(crawl)
    assert not problems(crawl, "ERROR", "CRITICAL")
    assert len(tree.hits) == PAGES

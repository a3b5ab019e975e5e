"""Faults of Redis in the middle of a crawl: every page is crawled, some twice, none is lost.

| in the middle | what the user sees |
|---|---|
| restart, stall, full memory, demotion: shorter than the deadline | one WARNING, one INFO when it \
is over, `bloom/redis/retries` |
| the same, longer than the deadline | one ERROR, and the spider is closed with `bloom_outage`; \
started again, the job continues |
| ... with BLOOM_REDIS_ON_OUTAGE = "pass" | one ERROR; the crawl continues unfiltered |
| connections killed, replies dropped | nothing but a slower crawl |
| data lost: restart without persistence, FLUSHALL, blocks overwritten | one WARNING |
| another type at our keys, BITFIELD withdrawn | one ERROR that says what to do, and as above |
"""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import servers
from tests.support.crawls import Crawl
from tests.support.redis_faults import (
    KEY,
    PASSWORD,
    SHORT,
    WAITED,
    WatchedProxy,
    admin,
    ended,
    locked_server,
    patient_url_of,
    problems,
    reports_one_outage,
    start,
    url_of,
)
from tests.support.sites import ScriptedSite, Site, tree_site

PAGES, GATE = 90, 20
CLOSED = (
    "The spider is closed (reason bloom_outage), and requests that are still in progress are "
    "crawled unfiltered; start the crawl again"
)
PASSED = "Requests are crawled unfiltered until "


@pytest.fixture
def site() -> Iterator[Site]:
    """A site whose pages link to their children, to their parent and to the start."""
    site = tree_site(PAGES)
    yield site
    site.release()
    site.end()


def repeats(site: Site) -> int:
    """Return how many pages of a tree were crawled again; its start page has three URLs."""
    return site.total() - PAGES - 2


@pytest.fixture
def cascade() -> Iterator[Site]:
    """A site whose pages link to later ones only: without a filter, too, its crawl ends."""
    names = ["/", *(f"/p/{n}" for n in range(1, PAGES))]
    answers: dict[str, list] = {
        name: [tuple(names[m] for m in (2 * n + 1, 2 * n + 2, 4 * n + 3) if m < PAGES)]
        for n, name in enumerate(names)
    }
    site = ScriptedSite(answers)
    yield site
    site.release()
    site.end()


@pytest.fixture
def saving_server() -> Iterator[servers.Server]:
    server = locked_server("--appendonly", "yes", "--appendfsync", "always")
    yield server
    server.end()


# Faults, and how they end.


def fill_the_memory(server: servers.Server) -> None:
    admin(server).config_set("maxmemory", 1)


def make_room(server: servers.Server) -> None:
    admin(server).config_set("maxmemory", 0)


def demote(server: servers.Server) -> None:
    """Make it the replica of a server that is not there: it keeps its data and takes no writes."""
    admin(server).execute_command("REPLICAOF", "127.0.0.1", servers.free_port())


def promote(server: servers.Server) -> None:
    admin(server).execute_command("REPLICAOF", "NO", "ONE")


REFUSED = "Error 111 connecting to 127.0.0.1:{port}. "
FAULTS: dict[str, tuple[Callable, Callable, str]] = {
    "killed": (servers.Server.kill, servers.Server.start, REFUSED),
    "stalled": (servers.Server.pause, servers.Server.go_on, "Timeout "),
    "out of memory": (
        fill_the_memory,
        make_room,
        "command not allowed when used memory > 'maxmemory'",
    ),
    "a replica": (demote, promote, "You can't write against a read only replica"),
}
faults = pytest.mark.parametrize("fault", FAULTS)


@faults
def test_a_fault_shorter_than_the_deadline_costs_retries_only(
    fault: str, site: Site, saving_server: servers.Server, tmp_path: Path
) -> None:
    make, repair, _ = FAULTS[fault]
    proxy = WatchedProxy(saving_server)
    try:
        crawl = start(site, patient_url_of(proxy), tmp_path, held_after=GATE)
        make(saving_server)
        tries = proxy.tries
        site.release()
        # It waits, and tries again; after one time-out, if that is how it fails.
        crawl.wait_until(lambda: proxy.tries >= tries + (2 if fault == "stalled" else 5))
        repair(saving_server)
        stats = ended(crawl)
    finally:
        proxy.end()
    assert stats["bloom/redis/retries"] >= 1
    assert "bloom/errors" not in stats
    assert reports_one_outage(crawl)
    assert len(site.hits) == PAGES
    # What was under way may be new twice, as its first answer never came.
    assert repeats(site) <= stats["bloom/redis/retries"]


@faults
def test_a_fault_longer_than_the_deadline_closes_the_spider_and_the_job_resumes(
    fault: str, site: Site, server: servers.Server, tmp_path: Path
) -> None:
    make, repair, reason = FAULTS[fault]
    settings = {"JOBDIR": "job", "BLOOM_REDIS_DEADLINE_SECS": SHORT}
    crawl = start(site, patient_url_of(server), tmp_path, held_after=GATE, **settings)
    make(server)
    site.release()
    stats = ended(crawl, "bloom_outage")
    check_outage(crawl, reason.format(port=server.port), CLOSED)
    assert stats["bloom/errors"] >= 1
    assert len(site.hits) < PAGES  # else it would have been over anyway
    repair(server)
    crawl = start(site, url_of(server), tmp_path, JOBDIR="job")
    ended(crawl)
    assert not problems(crawl)  # the job was closed cleanly
    assert len(site.hits) == PAGES


def check_outage(crawl: Crawl, reason: str, consequence: str) -> None:
    """Check for one ERROR, although the server cannot be told of the end of the crawl either."""
    (outage,) = problems(crawl)
    assert outage.startswith(f"SERVER cannot be used: {reason}")
    assert f"{WAITED}. {consequence}" in outage


def test_without_its_server_a_crawl_that_is_told_to_pass_continues_unfiltered(
    cascade: Site, server: servers.Server, tmp_path: Path
) -> None:
    """To its end; what the mirror knew is not crawled again."""
    settings = {"BLOOM_REDIS_ON_OUTAGE": "pass", "BLOOM_REDIS_DEADLINE_SECS": SHORT}
    crawl = start(cascade, patient_url_of(server), tmp_path, held_after=GATE, **settings)
    known = set(cascade.hits)
    server.kill()
    cascade.release()
    stats = ended(crawl)
    check_outage(crawl, REFUSED.format(port=server.port), PASSED + "the server is back, and")
    assert stats["bloom/errors"] >= 1
    assert len(cascade.hits) == PAGES
    assert cascade.total() > PAGES  # pages with several links, which nobody filtered any more
    assert all(cascade.hits[page] == 1 for page in known)


# Faults that go on all the time.


def test_dropped_replies_cost_retries_only(
    site: Site, server: servers.Server, tmp_path: Path
) -> None:
    """The server has executed the command that is sent again: "duplicate" would lose the page."""
    proxy = WatchedProxy(server, rate=0.12)
    try:
        crawl = start(site, url_of(proxy), tmp_path)
        stats = ended(crawl)
    finally:
        proxy.end()
    assert proxy.dropped >= 5
    assert stats["bloom/redis/retries"] >= 5
    assert "bloom/errors" not in stats
    # By chance so many in a row that it looks like an outage.
    assert all(" does not answer: " in line for line in problems(crawl, "WARNING", "ERROR"))
    assert len(site.hits) == PAGES
    assert repeats(site) <= proxy.dropped


def test_killed_connections_are_opened_again_without_a_word(
    site: Site, server: servers.Server, tmp_path: Path
) -> None:
    """The server kills the connection each time the crawl gets a page."""
    client = admin(server)
    one_at_a_time = threading.Lock()  # or the site's threads would kill each other's connections
    killed = 0
    answer = site.hit

    def kill_and_answer(path: str) -> None:
        nonlocal killed
        with one_at_a_time:
            killed += client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        answer(path)

    site.hit = kill_and_answer  # type: ignore[method-assign]
    crawl = start(site, url_of(server), tmp_path)
    stats = ended(crawl)
    assert killed >= 5
    assert stats["bloom/redis/retries"] >= 1
    assert not problems(crawl)
    assert len(site.hits) == PAGES
    assert repeats(site) <= stats["bloom/redis/retries"]


# Faults that lose what the server had.

LOST = (
    f"The filter '{KEY}' in SERVER was lost: removed, flushed, evicted, or not saved before a "
    "restart. The crawl starts over with an empty filter; check persistence (appendonly yes) and "
    "maxmemory-policy (noeviction)"
)


def blocks_key(server: servers.Server) -> bytes:
    (key,) = admin(server).keys(f"{{{KEY}}}:blocks:*")
    return key


def flush(server: servers.Server) -> None:
    admin(server).flushall()


def overwrite_our_blocks(server: servers.Server) -> None:
    admin(server).set(blocks_key(server), "something else")


def restart_empty(server: servers.Server) -> None:
    server.kill()
    server.start()


@pytest.mark.parametrize(
    ("lose", "has_mirror"),
    [(flush, True), (flush, False), (restart_empty, True), (overwrite_our_blocks, False)],
)
def test_what_the_server_has_lost_is_crawled_again_with_one_warning(
    lose: Callable, has_mirror: bool, site: Site, server: servers.Server, tmp_path: Path
) -> None:
    # Room for so many that no count is sent in between: what is read with each request shows it.
    settings = {"BLOOM_REDIS_MIRROR": has_mirror, "BLOOM_EXPECTED_REQUESTS": 100_000}
    crawl = start(site, url_of(server), tmp_path, held_after=GATE, **settings)
    lose(server)
    site.release()
    stats = ended(crawl)
    assert [line for line in problems(crawl) if " does not answer: " not in line] == [LOST]
    assert "bloom/errors" not in stats
    assert len(site.hits) == PAGES
    assert repeats(site) > 0


# Refusals, which do not pass by themselves.


def put_a_list_in_place_of_our_blocks(server: servers.Server) -> Callable[[], object]:
    key, client = blocks_key(server), admin(server)
    client.delete(key)
    client.lpush(key, "something else")
    return lambda: client.delete(key)


def withdraw_bitfield(server: servers.Server) -> Callable[[], object]:
    client = admin(server)
    client.execute_command("ACL", "SETUSER", "crawler", "-bitfield")
    return lambda: client.execute_command("ACL", "SETUSER", "crawler", "+bitfield")


WRONG_TYPE = (
    "SERVER: ResponseError: WRONGTYPE Operation against a key holding the wrong kind of value; "
    "something else has that key: set BLOOM_REDIS_KEY to another name"
)
NO_PERMISSION = (
    "SERVER: ResponseError: User crawler has no permissions to run the 'bitfield' command; "
    "the user needs "
)


@pytest.fixture
def crawlers_url(server: servers.Server) -> str:
    """The URL of a user with all rights."""
    rules = ("on", f">{PASSWORD}", "~*", "+@all")
    admin(server).execute_command("ACL", "SETUSER", "crawler", *rules)
    return url_of(server, "crawler")


@pytest.mark.parametrize(
    ("refuse", "reason"),
    [(put_a_list_in_place_of_our_blocks, WRONG_TYPE), (withdraw_bitfield, NO_PERMISSION)],
)
def test_a_refusal_closes_the_spider_and_the_job_resumes_when_it_is_put_right(
    refuse: Callable,
    reason: str,
    site: Site,
    server: servers.Server,
    crawlers_url: str,
    tmp_path: Path,
) -> None:
    """No traceback, and no crawl that goes round in circles because nothing is filtered."""
    settings = {"JOBDIR": "job"}
    # If it should go on all the same, it would never end.
    limited = {**settings, "CLOSESPIDER_PAGECOUNT": 500}
    crawl = start(site, crawlers_url, tmp_path, held_after=GATE, **limited)
    put_right = refuse(server)
    site.release()
    stats = ended(crawl, "bloom_outage")
    (refusal,) = problems(crawl)
    assert refusal.startswith(reason)
    assert CLOSED in refusal
    assert stats["bloom/errors"] >= 1
    put_right()
    crawl = start(site, crawlers_url, tmp_path, **settings)
    ended(crawl)
    assert not problems(crawl, "ERROR", "CRITICAL")
    assert len(site.hits) == PAGES

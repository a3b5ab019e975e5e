"""Faults of Redis in the middle of a crawl: every page is crawled, some twice, none is lost.

| in the middle | what the user sees |
|---|---|
| restart, with persistence; stall; full memory; demoted; failed save; pause; loading: short | \
one WARNING, one INFO when it is over, `bloom/redis/retries` |
| killed; stall; full memory; demoted; failed save: longer than the deadline | one ERROR, and the \
spider is closed with `bloom_outage`; started again, the job goes on |
| ... with BLOOM_REDIS_ON_OUTAGE = "pass" | one ERROR; the crawl goes on, `bloom/errors` |
| slow replies; connections killed; dropped replies | nothing but a slower crawl |

What loses data is in `test_redis_loses.py`, refusals are in `test_redis_refuses.py`. In
`test_redis_crawl.py`: two workers and a server that is killed and restarted twice
(`test_every_page_is_crawled_though_the_server_is_killed_and_restarted`), and a killed server that
comes back in the same crawl under "pass", or with its data before the next run under "close"
(`test_an_outage_that_lasts`).
"""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import servers
from tests.support.crawls import Crawl
from tests.support.redis_faults import (
    CLOSED,
    PASSED,
    SHORT,
    SLOW_TO_LOAD,
    WAITED,
    GatedSite,
    WatchedProxy,
    admin,
    ended,
    gated_cascade,
    gated_tree,
    is_quiet,
    locked_server,
    patient_url_of,
    restarted_and_loading,
    start,
    start_until_the_middle,
    tells_of_one_outage,
    told,
    url_of,
)


@pytest.fixture
def saving_server() -> Iterator[servers.Server]:
    """It keeps everything through a crash."""
    server = locked_server("--appendonly", "yes", "--appendfsync", "always")
    yield server
    server.end()


# Faults, and how they end.


def crash(server: servers.Server) -> None:
    server.kill()


def shut_down(server: servers.Server) -> None:
    admin(server).shutdown(nosave=True)
    server.kill()  # it has ended, or does now: either way it is gone after this


def stall(server: servers.Server) -> None:
    server.pause()


def fill_the_memory(server: servers.Server) -> None:
    admin(server).config_set("maxmemory", 1)


def make_room(server: servers.Server) -> None:
    admin(server).config_set("maxmemory", 0)


def demote(server: servers.Server) -> None:
    """A replica of one that is not there: it has all data, and takes no writes."""
    admin(server).execute_command("REPLICAOF", "127.0.0.1", servers.free_port())


def promote(server: servers.Server) -> None:
    admin(server).execute_command("REPLICAOF", "NO", "ONE")


def fail_to_save(server: servers.Server) -> None:
    """The dump can't be written, for there is a directory in its place: writes are refused."""
    (server.directory / "dump.rdb").mkdir()
    admin(server).config_set("save", "3600 1")
    _save_in_the_background(server, "err")


def save(server: servers.Server) -> None:
    (server.directory / "dump.rdb").rmdir()
    _save_in_the_background(server, "ok")


def _save_in_the_background(server: servers.Server, status: str) -> None:
    client = admin(server)
    client.bgsave()

    def is_done() -> bool:
        info = client.info("persistence")
        return not info["rdb_bgsave_in_progress"] and info["rdb_last_bgsave_status"] == status

    servers.wait_for(is_done, lambda: f"no {status}")


def pause_writes(server: servers.Server) -> None:
    admin(server).execute_command("CLIENT", "PAUSE", 60_000, "WRITE")


def go_on_with_writes(server: servers.Server) -> None:
    admin(server).execute_command("CLIENT", "UNPAUSE")


PASSING: dict[str, tuple[Callable, Callable]] = {
    "shut down and restarted": (shut_down, servers.Server.start),
    "stalled": (stall, servers.Server.go_on),
    "out of memory": (fill_the_memory, make_room),
    "a replica": (demote, promote),
    "unable to save": (fail_to_save, save),
    "writes paused": (pause_writes, go_on_with_writes),
}


@pytest.mark.parametrize("fault", PASSING)
def test_a_fault_shorter_than_the_deadline_costs_retries_only(
    fault: str, site: GatedSite, saving_server: servers.Server, tmp_path: Path
) -> None:
    make, mend = PASSING[fault]
    proxy = WatchedProxy(saving_server)
    try:
        crawl = start_until_the_middle(site, patient_url_of(proxy), tmp_path)
        make(saving_server)
        tries = proxy.tries()
        site.open()
        # It waits, and tries again; after one time-out, if that is how it fails.
        times_out = fault in {"stalled", "writes paused"}
        crawl.wait_until(lambda: proxy.tries() >= tries + (2 if times_out else 5))
        mend(saving_server)
        stats = ended(crawl)
    finally:
        proxy.end()
    assert stats["bloom/redis/retries"] >= 1
    assert "bloom/errors" not in stats
    assert tells_of_one_outage(crawl)
    assert not site.missing()
    # What was under way may be new twice, as its first answer never came.
    assert site.repeats() <= stats["bloom/redis/retries"]


def test_a_restarted_server_that_loads_for_long_costs_retries_only(
    site: GatedSite, tmp_path: Path
) -> None:
    """It is there, and says -LOADING to all that it is asked."""
    server = locked_server(*SLOW_TO_LOAD)
    proxy = WatchedProxy(server)
    try:
        url = url_of(proxy)
        crawl = start_until_the_middle(site, url, tmp_path)
        with restarted_and_loading(server) as load:
            tries = proxy.tries()
            site.open()
            crawl.wait_until(lambda: proxy.tries() >= tries + 8)
            load()
            stats = ended(crawl)
    finally:
        proxy.end()
        server.end()
    assert stats["bloom/redis/retries"] >= 3
    outage, *more = told(crawl, "WARNING", "ERROR", "CRITICAL")
    assert outage.startswith("SERVER does not answer: ")
    # What the crawl still recorded while the server's data was saved.
    assert all("has lost its latest changes" in line for line in more)
    assert not site.missing()
    assert site.repeats() == 0 or more


# Faults that last longer than the deadline.

REFUSED = "Error 111 connecting to 127.0.0.1:{port}. "
LASTING: dict[str, tuple[Callable, Callable, str]] = {
    "killed, all data lost": (crash, servers.Server.start, REFUSED),
    "stalled": (stall, servers.Server.go_on, "Timeout "),
    "out of memory": (
        fill_the_memory,
        make_room,
        "command not allowed when used memory > 'maxmemory'",
    ),
    "a replica": (demote, promote, "You can't write against a read only replica"),
    "unable to save": (
        fail_to_save,
        save,
        "MISCONF Valkey is configured to save RDB snapshots",
    ),
}


@pytest.mark.parametrize("fault", LASTING)
def test_a_fault_longer_than_the_deadline_closes_the_spider_and_the_job_goes_on_later(
    fault: str, site: GatedSite, server: servers.Server, tmp_path: Path
) -> None:
    make, mend, reason = LASTING[fault]
    settings = {"JOBDIR": "job", "BLOOM_REDIS_DEADLINE_SECS": SHORT}
    crawl = start_until_the_middle(site, patient_url_of(server), tmp_path, **settings)
    make(server)
    site.open()
    stats = ended(crawl, "bloom_outage")
    assert_told_of_outage(crawl, reason.format(port=server.port), CLOSED)
    assert stats["bloom/errors"] >= 1
    assert site.missing()  # else it would have been over anyway
    mend(server)
    crawl = start(site, url_of(server), tmp_path, JOBDIR="job")
    ended(crawl)
    assert is_quiet(crawl)  # the job was closed cleanly
    assert not site.missing()


def assert_told_of_outage(crawl: Crawl, reason: str, consequence: str) -> None:
    """One ERROR, though the filter can't be told that the crawl is over, either."""
    (outage,) = told(crawl, "WARNING", "ERROR", "CRITICAL")
    assert outage.startswith(f"SERVER cannot be used: {reason}")
    assert f"{WAITED}. {consequence}" in outage


def test_a_server_that_never_comes_back_is_done_without_if_told_to_pass(
    server: servers.Server, tmp_path: Path
) -> None:
    """The crawl goes on without any filter, to its end; what was known is not crawled again."""
    site = gated_cascade()
    settings = {"BLOOM_REDIS_ON_OUTAGE": "pass", "BLOOM_REDIS_DEADLINE_SECS": SHORT}
    crawl = start_until_the_middle(site, patient_url_of(server), tmp_path, **settings)
    known = set(site.site.hits)
    server.kill()
    site.open()
    stats = ended(crawl)
    assert_told_of_outage(
        crawl, REFUSED.format(port=server.port), PASSED + "the server is back, and"
    )
    assert stats["bloom/errors"] >= 1
    assert not site.missing()
    assert site.repeats() > 0  # pages with several links, which nobody filtered any more
    assert all(site.site.hits[page] == 1 for page in known)
    site.end()


# Faults that go on all the time.


def test_a_slow_server_makes_a_slow_crawl_and_nothing_else(
    server: servers.Server, tmp_path: Path
) -> None:
    site = gated_tree(pages=15)
    site.open()
    proxy = WatchedProxy(server)
    proxy.delays = [0.02, 0.1, 0.05]
    try:
        crawl = start(site, url_of(proxy), tmp_path)
        stats = ended(crawl)
    finally:
        proxy.end()
    assert proxy.replies >= 15  # none of which is waited for in vain
    assert stats["bloom/redis/retries"] == 0
    assert is_quiet(crawl)
    assert not site.missing()
    assert site.repeats() == 0
    site.end()


def test_dropped_replies_show_in_the_retries_only(
    site: GatedSite, server: servers.Server, tmp_path: Path
) -> None:
    """The server has executed what is asked again: then "seen before" would lose the page."""
    site.open()
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
    assert all(" does not answer: " in line for line in told(crawl, "WARNING", "ERROR"))
    assert not site.missing()
    assert site.repeats() <= proxy.dropped


def test_killed_connections_are_made_again_without_a_word(
    site: GatedSite, server: servers.Server, tmp_path: Path
) -> None:
    """CLIENT KILL, each time the crawl gets a page."""
    client = admin(server)
    one_at_a_time = threading.Lock()  # or the site's threads would kill each other's connections
    killed = 0
    answer = site.site.hit

    def kill_and_answer(path: str) -> None:
        nonlocal killed
        with one_at_a_time:
            killed += client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        answer(path)

    site.site.hit = kill_and_answer
    site.open()
    crawl = start(site, url_of(server), tmp_path)
    stats = ended(crawl)
    assert killed >= 5
    assert stats["bloom/redis/retries"] >= 1
    assert is_quiet(crawl)
    assert not site.missing()
    assert site.repeats() <= stats["bloom/redis/retries"]

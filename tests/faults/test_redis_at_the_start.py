"""Faults of Redis that are there when a crawl starts: it refuses at once, and says what to do.

Whatever it is, the user sees the same things: exit status 1; one ERROR of the filter, the last
line of the log; no page asked for; no password; and what was in Redis before is unchanged. All
refusals that a connection can meet are in tests/redis/connection.
"""

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scrapy_bloom.exceptions import TROUBLESHOOTING
from tests.support import servers
from tests.support.crawls import Crawl
from tests.support.redis_faults import (
    KEY,
    PASSWORD,
    SHORT,
    SLOW_TO_LOAD,
    WAITED,
    WatchedProxy,
    admin,
    ended,
    locked_server,
    patient_url_of,
    problems,
    reports_one_outage,
    restarted_and_loading,
    start,
    url_of,
)
from tests.support.sites import Site, tree_site

PAGES = 40
RIGHTS = (
    "the user needs ~KEY and ~{KEY}* (KEY: BLOOM_REDIS_KEY) and, in this order, +@connection "
    "+@transaction +@string +@bitmap +@hash +@sortedset -@dangerous +info +time +exists +expire "
    "+persist +rename +unlink +eval +evalsha, for a Cluster +cluster|slots"
)
LOGIN = (
    "check user and password in BLOOM_REDIS_URL (or REDIS_URL, REDIS_PARAMS; for a command, "
    "its URL or REDISCLI_AUTH)"
)


@pytest.fixture
def site() -> Iterator[Site]:
    site = tree_site(PAGES)
    yield site
    site.end()


def refusal(crawl: Crawl, site: Site) -> str:
    """Return the one error of a crawl that does not begin."""
    assert crawl.finish() == 1, crawl.output
    (line,) = [each.removesuffix(f" ({TROUBLESHOOTING})") for each in problems(crawl)]
    before_the_traceback, _, _ = crawl.output.partition("Traceback")
    assert line.partition("SERVER")[2] in before_the_traceback
    assert PASSWORD not in crawl.output
    assert not site.hits
    return line


def contents(server: servers.Server) -> dict[bytes, tuple[bytes, bytes | None]]:
    client = admin(server)
    return {key: (client.type(key), client.dump(key)) for key in client.keys("*")}


def test_something_else_at_our_key_is_refused_and_left_as_it_is(
    site: Site, server: servers.Server, tmp_path: Path
) -> None:
    admin(server).hset(KEY, "something", "else")
    before = contents(server)
    assert refusal(start(site, url_of(server), tmp_path), site) == (
        f"the key '{KEY}' of SERVER is no filter of scrapy_bloom, or a damaged one ("
        "it has no field 'id'); it was left as it is: set BLOOM_REDIS_KEY to another name"
    )
    assert contents(server) == before


def test_a_read_only_replica_is_refused_after_the_deadline(
    site: Site, server: servers.Server, tmp_path: Path
) -> None:
    """Although the filter can be read: a crawl could not record a single request."""
    ended(start(site, url_of(server), tmp_path))
    site.forget()
    admin(server).config_set("repl-diskless-sync-delay", 0)
    replica = locked_server(
        *("--masterauth", PASSWORD, "--replicaof", "127.0.0.1", str(server.port))
    )
    try:
        servers.wait_for(lambda: contents(replica) == contents(server), lambda: "no copy")
        line = refusal(
            start(site, patient_url_of(replica), tmp_path, BLOOM_REDIS_DEADLINE_SECS=SHORT), site
        )
    finally:
        replica.end()
    expected = f"SERVER cannot be used: You can't write against a read only replica {WAITED}"
    assert line == expected


def test_an_acl_without_bitfield_is_refused_and_the_rights_are_named(
    site: Site, server: servers.Server, tmp_path: Path
) -> None:
    """Before the first request: otherwise each would be crawled unfiltered, again and again."""
    rules = ("on", f">{PASSWORD}", "~*", "+@all", "-bitfield")
    admin(server).execute_command("ACL", "SETUSER", "crawler", *rules)
    # If it should begin all the same, it would never end.
    crawl = start(site, url_of(server, "crawler"), tmp_path, CLOSESPIDER_PAGECOUNT=500)
    line = refusal(crawl, site)
    assert line.startswith("SERVER: ")
    assert "no permissions to run the 'bitfield' command" in line
    assert line.endswith(f"; {RIGHTS}")


def test_a_wrong_login_is_refused_at_once(
    site: Site, server: servers.Server, tmp_path: Path
) -> None:
    url = url_of(server).replace(f":{PASSWORD}@", f":not-{PASSWORD}@")
    line = refusal(start(site, url, tmp_path), site)
    assert "waited" not in line  # for any deadline
    assert line.startswith("SERVER: AuthenticationError: ")
    assert line.endswith(f"; {LOGIN}")


def test_a_web_server_at_the_port_is_refused_at_once(site: Site, tmp_path: Path) -> None:
    line = refusal(start(site, url_of(site.server_address[1]), tmp_path), site)
    assert "waited" not in line
    assert line.startswith("SERVER: InvalidResponse: Protocol ")
    assert "BLOOM_REDIS_URL" in line  # what to do about it


def test_a_server_that_never_answers_is_refused_after_the_deadline(
    site: Site, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begun = time.monotonic()
        url = url_of(silent.getsockname()[1])
        line = refusal(start(site, url, tmp_path, BLOOM_REDIS_DEADLINE_SECS=SHORT), site)
        assert time.monotonic() - begun >= SHORT
    assert line.startswith("SERVER cannot be used: Timeout ")
    assert line.endswith(WAITED)


def test_a_crawl_waits_for_a_server_that_still_loads_its_data(site: Site, tmp_path: Path) -> None:
    """The user sees a late start, one WARNING why, and `bloom/redis/retries`."""
    server = locked_server(*SLOW_TO_LOAD)
    proxy = WatchedProxy(server)
    try:
        with restarted_and_loading(server) as load:
            crawl = start(site, url_of(proxy), tmp_path)
            crawl.wait_until(lambda: proxy.tries >= 4)
            assert not site.hits
            load()
            stats = ended(crawl)
    finally:
        proxy.end()
        server.end()
    assert stats["bloom/redis/retries"] >= 1
    assert reports_one_outage(crawl)
    assert len(site.hits) == PAGES
    assert site.total() == PAGES + 2

"""Faults of Redis that lose what it knew, in the middle of a crawl: every page is crawled.

| in the middle | what the user sees |
|---|---|
| restart without persistence; FLUSHALL; eviction; our blocks overwritten | one WARNING |
"""

import itertools
import time
from pathlib import Path

import pytest

from tests.support import servers
from tests.support.redis_faults import (
    KEY,
    GatedSite,
    admin,
    blocks,
    ended,
    start_until_the_middle,
    told,
    url_of,
)

LOST = (
    f"The filter '{KEY}' in SERVER was lost: removed, flushed, evicted, or not saved before a "
    "restart. An empty filter was begun, and pages are crawled again, so that none is left out. "
    "Check persistence (appendonly yes) and maxmemory-policy (noeviction)"
)
EVICTS = (
    "SERVER removes keys when its memory is full (maxmemory-policy allkeys-lru): the filter would "
    "be lost, and pages be crawled again; set it to noeviction"
)


def flush(server: servers.Server) -> None:
    admin(server).flushall()


def overwrite_our_blocks(server: servers.Server) -> None:
    (key,) = blocks(server)
    admin(server).set(key, "something else")


def restart_empty(server: servers.Server) -> None:
    server.kill()
    server.start()


LOSING = {
    "flushed": flush,
    "restarted without persistence": restart_empty,
    "overwritten": overwrite_our_blocks,
}


@pytest.mark.parametrize("has_mirror", [True, False], ids=["a mirror", "no mirror"])
@pytest.mark.parametrize("fault", LOSING)
def test_what_the_server_has_lost_is_crawled_again_with_one_warning(
    fault: str, has_mirror: bool, site: GatedSite, server: servers.Server, tmp_path: Path
) -> None:
    # Room for so many that no count is told in between: what is read with each request tells it.
    settings = {"BLOOM_REDIS_MIRROR": has_mirror, "BLOOM_EXPECTED_REQUESTS": 100_000}
    crawl = start_until_the_middle(site, url_of(server), tmp_path, **settings)
    LOSING[fault](server)
    site.open()
    stats = ended(crawl)
    lines = told(crawl, "WARNING", "ERROR", "CRITICAL")
    assert [line for line in lines if " does not answer: " not in line] == [LOST]
    assert "bloom/errors" not in stats
    assert not site.missing()
    assert site.repeats() > 0


def test_an_evicted_filter_is_begun_anew_and_the_policy_is_warned_of_at_the_start(
    site: GatedSite, server: servers.Server, tmp_path: Path
) -> None:
    client = admin(server)
    client.config_set("maxmemory-policy", "allkeys-lru")
    client.config_set("maxmemory", client.info("memory")["used_memory"] + 2_000_000)
    crawl = start_until_the_middle(site, url_of(server), tmp_path)
    ours = [KEY, *blocks(server)]
    assert client.exists(*ours) == 2
    # Somebody else fills the memory, until ours are the oldest: the server counts whole seconds,
    # and chooses at random among keys that were used in the same one.
    deadline = time.monotonic() + 60
    numbers = itertools.count()
    while client.exists(*ours):
        assert time.monotonic() < deadline
        for number in itertools.islice(numbers, 20):
            client.set(f"other:{number}", "x" * 1000)
    client.config_set("maxmemory", 0)  # or the next filter may be evicted, too
    site.open()
    stats = ended(crawl)
    assert told(crawl, "WARNING", "ERROR", "CRITICAL") == [EVICTS, LOST]
    assert "bloom/errors" not in stats
    assert not site.missing()

"""The lock of a filter in Redis: nobody's for ever, and no other crawler's is touched.

Here somebody else holds it: in place of a crawler that is making a generation of 10^11 requests,
or that was killed at it, or of one that never was.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import servers
from crawls import spider_with
from redis_faults import (
    KEY,
    GatedSite,
    admin,
    ended,
    patient_url_of,
    start,
    start_until_the_middle,
    told,
    url_of,
)
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.keys.lock import LEASE_SECS, RedisLock

LOCK = f"{KEY}:lock"
OTHER = "web-1:4711:0123456789abcdef"
LEASE_MS = (
    30_000  # more than a busy machine stands still, and less than the minute that is too long
)


@contextmanager
def held(server: servers.Server) -> Iterator[None]:
    """Another crawler holds the lock, and renews it."""
    client, is_over = admin(server), threading.Event()

    def renew() -> None:
        while not is_over.is_set():
            client.set(LOCK, OTHER, px=LEASE_MS)
            is_over.wait(0.5)

    servers.wait_for(lambda: client.set(LOCK, OTHER, px=LEASE_MS, nx=True), lambda: "it is held")
    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        client.delete(LOCK)


def test_a_lock_without_an_end_is_told_of_and_ends(
    site: GatedSite, server: servers.Server, tmp_path: Path
) -> None:
    site.open()
    client = admin(server)
    client.set(LOCK, OTHER)
    crawl = start(site, url_of(server), tmp_path)
    crawl.wait_until(lambda: bool(told(crawl, "WARNING")))
    assert 0 < client.pttl(LOCK) <= 1000 * LEASE_SECS
    assert not site.site.hits  # the crawl waits for it before it begins
    client.pexpire(LOCK, 1)  # as if so much time had passed
    ended(crawl)
    first, *others = told(crawl, "WARNING", "ERROR", "CRITICAL")
    assert first == (
        f"The lock '{LOCK}' in SERVER had no end within a minute, which no crawler gives it; it is "
        "held by process 4711 on web-1, and ends in 10 seconds unless that one renews it"
    )
    assert {each.partition(", since")[0] for each in others} <= {"Waiting"}
    assert not site.missing()
    assert site.repeats() == 0
    assert not admin(server).exists(LOCK)


def test_only_ones_own_lock_is_renewed_and_released(server: servers.Server) -> None:
    client = admin(server)
    mine, theirs = (RedisLock(RedisServer(url_of(server)), KEY) for _ in range(2))
    assert mine.take()
    assert mine.take()
    assert not theirs.take()
    client.delete(LOCK)  # it ended: we stood still for longer than that
    assert theirs.take()
    client.pexpire(LOCK, LEASE_MS)
    mine.renew()
    mine.release()
    mine.release(after=60)
    assert not mine.take()
    assert 1000 * LEASE_SECS < client.pttl(LOCK) <= LEASE_MS
    theirs.renew()
    assert 0 < client.pttl(LOCK) <= 1000 * LEASE_SECS
    theirs.release()
    assert mine.take()


def test_on_a_cluster_too() -> None:
    cluster = servers.shared_cluster()
    mine, theirs = (RedisLock(RedisServer(cluster.url, cluster=True), "shop") for _ in range(2))
    assert mine.take()
    theirs.release()
    assert not theirs.take()
    mine.renew()
    mine.release()
    assert theirs.take()
    theirs.release()


def test_a_crawl_records_in_the_old_generation_while_another_makes_the_next(
    site: GatedSite, server: servers.Server, tmp_path: Path
) -> None:
    """A quarter of the window is over and the filter is full: neither is waited for."""
    settings = {"BLOOM_WINDOW_SECS": 12, "BLOOM_EXPECTED_REQUESTS": 40}
    crawl = start_until_the_middle(site, url_of(server), tmp_path, **settings)
    with held(server):
        clock = admin(server)
        begun = clock.time()[0]
        crawl.wait_until(lambda: clock.time()[0] > begun + 3)  # more than a quarter
        before = clock.hgetall(KEY).keys()
        site.open()
        stats = ended(crawl)
        after = clock.hgetall(KEY).keys()
    assert "bloom/errors" not in stats
    assert not site.missing()
    assert {name for name in after if not name.endswith(b":count")} == {
        name for name in before if not name.endswith(b":count")
    }


# It waits for ten seconds of another crawler, and says so after five.
IMPATIENT = """
from scrapy_bloom.redis.keys import lock
lock.LEASE_SECS, lock._SILENT_SECS = 1, 0.5
"""


def test_a_crawl_that_cannot_go_on_says_who_keeps_it_from_that(
    site: GatedSite, server: servers.Server, tmp_path: Path
) -> None:
    """Sealed, and the next generation never comes: the spider is closed, and goes on later."""
    settings = {"JOBDIR": "job", "BLOOM_REDIS_DEADLINE_SECS": 1}
    spider = spider_with(tmp_path, IMPATIENT)
    crawl = start(site, patient_url_of(server), tmp_path, spider, **settings)
    crawl.wait_until(site.is_reached)
    client = admin(server)
    with held(server):
        for key in client.keys(f"{KEY}:*:*"):
            if client.type(key) == b"string":
                client.setbit(key, (client.strlen(key) - 1) * 8 + 1, 1)
        site.open()
        ended(crawl, "bloom_outage")
        waiting, error = told(crawl, "WARNING", "ERROR", "CRITICAL")
    assert waiting.startswith("Waiting, since another crawler is changing the filter")
    assert f"(the lock '{LOCK}' is held by process 4711 on web-1)" in error
    assert "seconds; look after that one, or end it. The spider is closed" in error
    assert "start the crawl again when it is done" in error
    crawl = start(site, url_of(server), tmp_path, JOBDIR="job")
    ended(crawl)
    assert not site.missing()

"""Refusals of Redis in the middle of a crawl, which would not pass by themselves.

| in the middle | what the user sees |
|---|---|
| another type at our keys; BITFIELD withdrawn | one ERROR that says what to do, and the spider is \
closed with `bloom_outage`; put right and started again, the job goes on |
| ... with "pass" | one ERROR; the crawl goes on |
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import servers
from tests.support.redis_faults import (
    CLOSED,
    KEY,
    PASSED,
    PASSWORD,
    GatedSite,
    admin,
    blocks,
    ended,
    gated_cascade,
    start,
    start_until_the_middle,
    told,
    url_of,
)


def put_a_list_in_place_of_our_blocks(server: servers.Server) -> Callable[[], object]:
    (key,) = blocks(server)
    client = admin(server)
    client.delete(key)
    client.lpush(key, "something else")
    return lambda: client.delete(key)


def put_a_text_in_place_of_our_hash(server: servers.Server) -> Callable[[], object]:
    client = admin(server)
    client.set(KEY, "something else")
    return lambda: client.delete(KEY)


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
REFUSALS = {
    "a list in place of our blocks": (put_a_list_in_place_of_our_blocks, WRONG_TYPE),
    "a text in place of our hash": (put_a_text_in_place_of_our_hash, WRONG_TYPE),
    "bitfield withdrawn": (withdraw_bitfield, NO_PERMISSION),
}


def let_in(server: servers.Server) -> str:
    rules = ("on", f">{PASSWORD}", "~*", "+@all")
    admin(server).execute_command("ACL", "SETUSER", "crawler", *rules)
    return url_of(server, "crawler")


@pytest.mark.parametrize("fault", REFUSALS)
def test_a_refusal_closes_the_spider_and_the_job_goes_on_when_it_is_put_right(
    fault: str, site: GatedSite, server: servers.Server, tmp_path: Path
) -> None:
    """No traceback, and no crawl that goes round in circles because nothing is filtered."""
    refuse, reason = REFUSALS[fault]
    # Room for 1,000: then the hash is told every 15 requests how many there are.
    settings = {"JOBDIR": "job", "BLOOM_EXPECTED_REQUESTS": 1000}
    url = let_in(server)
    # If it should go on all the same, it would never end.
    limited = {**settings, "CLOSESPIDER_PAGECOUNT": 500}
    crawl = start_until_the_middle(site, url, tmp_path, **limited)
    put_right = refuse(server)
    site.open()
    stats = ended(crawl, "bloom_outage")
    (refusal,) = told(crawl, "WARNING", "ERROR", "CRITICAL")
    assert refusal.startswith(reason)
    assert CLOSED in refusal
    assert stats["bloom/errors"] >= 1
    put_right()
    crawl = start(site, url, tmp_path, **settings)
    ended(crawl)
    assert not told(crawl, "ERROR", "CRITICAL")
    assert not site.missing()


def test_a_refusal_is_crawled_through_unfiltered_if_told_to_pass(
    server: servers.Server, tmp_path: Path
) -> None:
    site = gated_cascade()
    url = let_in(server)
    crawl = start_until_the_middle(site, url, tmp_path, BLOOM_REDIS_ON_OUTAGE="pass")
    withdraw_bitfield(server)
    site.open()
    stats = ended(crawl)
    (line,) = told(crawl, "WARNING", "ERROR", "CRITICAL")
    assert line.startswith(NO_PERMISSION)
    assert PASSED in line
    assert stats["bloom/errors"] > 1
    assert not site.missing()
    assert site.repeats() > 0
    site.end()

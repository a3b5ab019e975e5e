"""The documented ACL: enough for crawls and commands, and for nothing beyond the filter's keys."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.support import servers
from tests.support.cli import bloom
from tests.support.connections import PROGRAMS, SECRET, refusal
from tests.support.crawls import Crawl
from tests.support.documents import page
from tests.support.request_queues import fill
from tests.support.sites import Site
from tests.support.workspace import fingerprints, make_filter, urls, write_urls

KEY, FOREIGN = "shop:bloom", "foreign"
# The words of one server or another, in scripts, too.
DENIED = r"(?i)permission|NOPERM|ACL failure|can't run this"
_RULE = re.compile(r"[+~%-][@\w|{]\S*")

# What another user of the server would miss, or would not want to be read.
HARMFUL = [
    ["FLUSHALL"],
    ["FLUSHDB"],
    ["SWAPDB", 0, 1],
    ["KEYS", "*"],
    ["SCAN", 0],
    ["RANDOMKEY"],
    ["CLIENT", "KILL", "TYPE", "pubsub"],
    ["CLIENT", "LIST"],
    ["CONFIG", "GET", "*"],
    ["CONFIG", "SET", "requirepass", SECRET],
    ["ACL", "LIST"],
    ["FUNCTION", "FLUSH"],
    ["SCRIPT", "FLUSH"],
    ["GET", FOREIGN],
    ["SET", FOREIGN, "x"],
    ["UNLINK", FOREIGN],
    ["BITOP", "OR", KEY, FOREIGN],
    ["SORT", KEY, "BY", "nosort", "GET", FOREIGN],
    ["EVAL", "return redis.call('FLUSHALL')", 0],
    ["EVAL", "return redis.call('GET', KEYS[1])", 1, FOREIGN],
]


def documented() -> list[str]:
    """The rules in docs/redis.md, for the filter KEY, in order."""
    text = page("redis.md").partition("- **Rights.**")[2].partition("This user can")[0]
    return rules_in(" ".join(re.findall(r"`([^`]*)`", text)))


def rules_in(text: str) -> list[str]:
    found = [word.rstrip(",;.") for word in text.split() if _RULE.match(word)]
    return [word.replace("KEY", KEY) for word in found]


@pytest.fixture(params=[*PROGRAMS, "cluster"])
def place(request: pytest.FixtureRequest) -> Iterator[list[servers.Server]]:
    """The nodes of a server of this test alone, or of a Cluster that it may do harm to."""
    if request.param == "cluster":
        yield request.getfixturevalue("own_cluster").nodes
        return
    server = servers.Server(request.param)
    yield [server]
    server.end()


def let_in(nodes: list[servers.Server], rules: list[str]) -> str:
    """Give a user these rights; the URL to log in with."""
    is_cluster = len(nodes) > 1
    password = SECRET
    for node in nodes:
        known = [rule for rule in rules if is_cluster or "|" not in rule]
        node.client.execute_command("ACL SETUSER", "me", "reset", "on", f">{password}", *known)
        node.client.flushall()
        node.client.acl_log_reset()
    scheme = "redis+cluster" if is_cluster else "redis"
    return f"{scheme}://me:{password}@127.0.0.1:{nodes[0].port}/0"


@pytest.mark.parametrize(
    "scheduler", ["scrapy.core.scheduler.Scheduler", "scrapy_bloom.CrashSafeScheduler"]
)
def test_a_crawl_works(
    scheduler: str, place: list[servers.Server], tree: Site, tmp_path: Path
) -> None:
    """With growth."""
    url = let_in(place, documented())
    settings = {"BLOOM_REDIS_URL": url, "BLOOM_REDIS_KEY": KEY, "SCHEDULER": scheduler}
    settings |= {"BLOOM_EXPECTED_REQUESTS": 40, "LOG_LEVEL": "DEBUG"}
    crawl = Crawl.finished(tree.url, tmp_path, settings)
    assert not crawl.our_lines("WARNING") + crawl.our_lines("ERROR"), crawl.output
    assert "NoPermission" not in crawl.output
    assert "'finish_reason': 'finished'" in crawl.output
    assert len(tree.hits) == 150
    for node in place:
        denied = node.client.acl_log()
        assert not denied, denied


def test_each_command_works(place: list[servers.Server], tmp_path: Path) -> None:
    url = let_in(place, documented())
    at = (f"{url}#{KEY}",)
    write_urls(tmp_path / "urls.txt", urls(range(500)))
    make_filter(tmp_path / "job", fingerprints(urls(range(9))))
    fill(tmp_path / "job/bloom.sqlite", b"a request")
    commands: list[tuple[str | os.PathLike[str], ...]] = [
        ("import", "urls.txt", *at, "-s", "BLOOM_EXPECTED_REQUESTS=100"),
        ("info", *at),
        ("info", *at, "--scan"),
        ("check", at[0], "urls.txt", *at[1:]),
        ("report", *at, "-o", "page.html"),
        ("copy", at[0], "copy", *at[1:]),
        ("reset", *at, "--yes"),
        ("copy", "job", *at),
        ("queue", *at),
        ("copy", at[0], "back", *at[1:]),
        ("reset", *at, "--queue", "--yes"),
        ("reset", *at, "--yes"),
    ]
    for command in commands:
        ran = bloom(*command, cwd=tmp_path)
        assert ran.status == 0, (command, ran)
    for node in place:
        denied = node.client.acl_log()
        assert not denied, denied
        assert not node.client.keys("*")  # after the reset


def test_nothing_else_is_allowed(place: list[servers.Server]) -> None:
    let_in(place, documented())
    admins = [redis.Redis(port=node.port) for node in place]
    for node, admin in zip(place, admins, strict=True):
        client = redis.Redis(port=node.port, username="me", password=SECRET)
        with_scripts = admin.script_load("return 1")
        for command in HARMFUL:
            with pytest.raises(redis.ResponseError, match=DENIED):
                client.execute_command(*command)
        assert admin.script_exists(with_scripts) == [True]


def test_the_error_names_the_documented_rights(place: list[servers.Server]) -> None:
    url = let_in(place, ["~*", "-@all"])
    hint = refusal(url).partition("; ")[2]
    assert rules_in(hint) == documented()

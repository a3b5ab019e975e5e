"""`scrapy bloom ls`: what a server holds, and what it removes."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scrapy_bloom.queues.redis_store import member_start
from scrapy_bloom.queues.serialized import serialized
from scrapy_bloom.queues.store import Batch, Entered, Joining
from scrapy_bloom.redis.layout import keys_of
from tests.support import servers
from tests.support.cli import at_a_terminal, bloom
from tests.support.request_queues import (
    InRedis,
    enter,
    failed,
    leave_dead_letter,
    page,
    taken,
    unreadable,
)
from tests.support.shared_crawls import SharedCrawl
from tests.support.sites import Site
from tests.support.workspace import fingerprints, shared_filter, urls

ID, OTHER_ID = "0123456789abcdef", "fedcba9876543210"
BLOCK = bytes(8192)


@pytest.fixture
def own() -> Iterator[servers.Server]:
    """A server that no other test uses."""
    server = servers.Server("valkey")
    yield server
    server.end()


def foreign_keys(client: Any) -> dict[bytes, Any]:
    """Write keys that only look like ours; return them with their contents."""
    before = contents(client)
    client.set("{a}:blocks:x:0", BLOCK)
    client.set(f"{{a}}:blocks:{ID}:0", b"short")
    client.rpush(f"{{a}}:blocks:{OTHER_ID}:0", "list")
    client.zadd("{b}:pending", {"member": 0})
    client.sadd("{c}:dead", "member")
    client.zadd(b"{\xff}:dead", {"member": 0})
    client.hset("{d}:workers", "name", "value")
    client.zadd("{e}:downloading", {"member": 1})
    client.hset("f", mapping={"id": ID, "name": "value"})
    client.hset("{i}:workers", mapping={f"{ID}-and-more": "value", f"{ID}:lease": 5000})
    client.hset("{j}:workers", mapping={ID: 1_700_000_000_000, OTHER_ID: 1_700_000_000_000})
    client.zadd("{k}:pending", {b"job\0" + 18 * b"x": 0})
    ours = member_start(Entered(b"", slot="a")) + struct.pack(">QBB", 1, 0, 0)
    client.zadd("{l}:pending", {ours + b"no pickle": 0})
    client.zadd("{m}:pending", {ours + serialized({"url": "https://a.example"}): 5})
    client.zadd("{n}:pending", {ours + serialized({"url": "https://a.example"}): 0})
    client.hset("{n}:workers", "name", "value")
    client.zadd("{o}:leased", {b"somebody".ljust(24) + ours + serialized({}): 0})
    client.hset("{p}:targets", "page", "u")
    client.set(f"{{q}}:blocks:{ID}:01", BLOCK)
    client.set(f"{{q}}:blocks:{ID}:\u0661", BLOCK)
    client.set(f"{{g}}:blocks:{ID}:0", BLOCK, ex=3600)
    return {name: dump for name, dump in contents(client).items() if name not in before}


def contents(client: Any) -> dict[bytes, Any]:
    return {key: client.dump(key) for key in client.scan_iter()}


def leave_over(client: Any, queue: str) -> list[str]:
    """Write keys that nobody uses, and remove the hash of a filter that has a queue."""
    names = [f"{{h}}:blocks:{ID}:0", f"{{h}}:blocks:{ID}:1"]
    for name in names:
        client.set(name, BLOCK)
    blocks = client.scan_iter(f"{{{queue}}}:blocks:*")
    client.delete(queue)
    queues = [name for name in keys_of(queue)[1:] if client.exists(name)]
    return [*names, *queues, *(name.decode() for name in blocks)]


def test_what_is_used_and_what_is_left_over(
    own: servers.Server, wide: Site, tmp_path: Path
) -> None:
    for name in ("crawl", "lost"):
        (tmp_path / name).mkdir()
    crawl = SharedCrawl(wide, tmp_path / "crawl", server=own)
    crawl.hold(20)
    lost = SharedCrawl(wide, tmp_path / "lost", server=own)
    lost.start()
    lost.workers[0].kill()
    shared_filter(own, "plain", fingerprints(urls(range(10))))
    left = leave_over(own.client, lost.key)
    foreign = foreign_keys(own.client)
    figures = bloom("ls", own.url, "--json", cwd=tmp_path).json
    plain, busy = sorted(figures["filters"], key=lambda each: each["workers"] or 0)
    assert (plain["key"], plain["recorded"], plain["pending"]) == ("plain", 10, None)
    assert plain["bytes"] >= 8192
    state = crawl.state()
    assert busy["key"] == crawl.key
    assert (busy["workers"], busy["in_flight"]) == (2, state.in_flight)
    assert busy["pending"] == state.pending
    found = {(each["what"], each["key"]) for each in figures["left_over"]}
    assert found == {
        ("blocks of no generation", "h"),
        ("blocks of no generation", lost.key),
        ("queue without a filter", lost.key),
    }
    assert sum(each["keys"] for each in figures["left_over"]) == len(left)
    assert all(each["bytes"] > 0 for each in figures["left_over"])

    text = bloom("ls", own.url, cwd=tmp_path).out
    assert f"{own.url} has 2 filters" in text
    assert "No crawl uses the left-over keys: --gc removes them" in text
    assert bloom("ls", own.url, "--gc", cwd=tmp_path).error.endswith("add --yes to agree")
    no = at_a_terminal("ls", own.url, "--gc", cwd=tmp_path, answer=b"n\n")
    assert "nothing was changed" in no.out
    assert own.client.exists(*left) == len(left)
    ran = bloom("ls", own.url, "--gc", "--yes", cwd=tmp_path)
    assert f"Removed {len(left)} keys" in ran.out
    assert not own.client.exists(*left)
    now = contents(own.client)
    assert {name: now.get(name) for name in foreign} == foreign
    assert bloom("ls", own.url, "--json", cwd=tmp_path).json["left_over"] == []
    crawl.finish()


def test_a_queue_with_requests_of_all_states(own: servers.Server, tmp_path: Path) -> None:
    """It is left over if its filter is gone."""
    there = InRedis("valkey", "shop", url=own.url)
    leave_dead_letter(there, page("dead"))
    failing, late = page("failing", slot="a.example"), page("failed later")
    for run in range(6):
        worker = there.open(Joining("shop", str(run)))
        enter(worker, *{0: [failing], 5: [late]}.get(run, []))
        failed(worker, taken(worker), late if run == 5 else failing, via=[b"target"])
        there.leave(worker)
    worker = there.open(Joining("shop", "5"), by_slot=True)
    enter(worker, *(page(name, slot="b.example") for name in ("unreadable", "leased", "pending")))
    unreadable(worker, taken(worker))
    worker.apply(Batch(downloaded=[(taken(worker).id, "b.example", 5.0)]))
    kinds = {kind for kind, name in there.keys.items() if own.client.exists(name)}
    assert kinds == there.keys.keys() - {"suspects"}
    own.client.delete("shop")
    assert bloom("ls", own.url, "--gc", "--yes", cwd=tmp_path).status == 0
    assert not own.client.keys("*")
    there.end()


def test_a_damaged_filter_is_named(own: servers.Server, wide: Site, tmp_path: Path) -> None:
    crawl = SharedCrawl(wide, tmp_path, server=own)
    crawl.start()
    crawl.finish()
    (found,) = bloom("ls", own.url, "--json", cwd=tmp_path).json["filters"]
    assert (found["key"], found["workers"]) == (crawl.key, 0)
    assert found["recorded"] > 80
    own.client.hset(crawl.key, "version", "?")
    (found,) = bloom("ls", own.url, "--json", cwd=tmp_path).json["filters"]
    assert (found["key"], found["recorded"]) == (crawl.key, None)
    assert "damaged" in bloom("ls", own.url, cwd=tmp_path).out


def test_in_a_cluster(tmp_path: Path) -> None:
    cluster = servers.shared_cluster()
    keys = [f"{tmp_path.name}:{number}" for number in range(3)]  # of several masters
    names = [f"{{{key}}}:blocks:{ID}:0" for key in keys]
    for name in names:
        cluster.client.set(name, BLOCK)
    figures = bloom("ls", cluster.url, "--json", cwd=tmp_path).json
    left = {each["key"]: each["keys"] for each in figures["left_over"]}
    assert [left.get(key) for key in keys] == [1, 1, 1]  # --gc would remove those of other tests
    for name in names:
        cluster.client.delete(name)


def test_an_empty_server(own: servers.Server, tmp_path: Path) -> None:
    assert "has 0 filters" in bloom("ls", own.url, "--gc", cwd=tmp_path).out
    assert bloom("ls", "jobs/shop", cwd=tmp_path).status == 2
    wrong = bloom("ls", f"{own.url}#nope", cwd=tmp_path)
    assert wrong.status == 2
    assert "ls lists all filters of a server; leave #nope out" in wrong.err

"""`push`, `pull` and `merge` that are interrupted leave nothing, and can be repeated."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scrapy_bloom.copying.transfer import upload
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.scripts import maker_key
from tests.support import servers
from tests.support.cli import LIMIT, Ran, bloom
from tests.support.processes import Scrapy, start_scrapy
from tests.support.request_queues import fill
from tests.support.workspace import fingerprints, make_filter, make_queue, urls

# 70 MiB: the copy of a filter for so many takes a while.
MANY = 10_000_000


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A closed job in whose queue two requests wait."""
    make_filter(tmp_path / "job/bloom", fingerprints(urls(range(10))), capacity=MANY)
    fill(tmp_path / "job/requests.sqlite", b"one", b"two")
    return tmp_path / "job"


@contextmanager
def started(*arguments: str, cwd: Path) -> Iterator[Callable[[], Ran]]:
    """Start a command; the block gets its process, and a function that waits for its end."""
    out, err = cwd / "out", cwd / "err"
    with out.open("wb") as to_out, err.open("wb") as to_err:
        # As a command, because a fork of the tests would report its end in another way.
        command = ["bloom", *arguments]
        process = start_scrapy(command, cwd=cwd, out=to_out, err=to_err, prefix=["env"])

    def ended() -> Ran:
        status = process.wait(LIMIT)
        assert status is not None
        return Ran(status, out.read_text(), err.read_text())

    try:
        yield process, ended
    finally:
        process.kill()


@contextmanager
def push_under_way(
    server: servers.Server, key: str, cwd: Path
) -> Iterator[tuple[Scrapy, Callable[[], Ran]]]:
    """A push that has written some blocks, and waits for the server to take more."""
    url = f"{server.url}?socket_timeout=60"
    with started("push", "job", url, "--key", key, cwd=cwd) as (process, ended):
        try:
            servers.wait_for(lambda: blocks(server, key), (cwd / "err").read_text)
            server.client.client_pause(60_000, all=False)  # what writes
            assert not server.client.hexists(key, "id")
            yield process, ended
        finally:
            server.client.client_unpause()


def blocks(server: servers.Server, key: str) -> list[bytes]:
    return server.client.keys(f"{{{key}}}:blocks:*")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_push_that_is_ended_leaves_nothing(
    number: signal.Signals, key: str, server: servers.Server, job: Path, tmp_path: Path
) -> None:
    with push_under_way(server, key, tmp_path) as (process, ended):
        os.kill(process.pid, number)
        server.client.client_unpause()
        ran = ended()
    assert not server.client.keys(f"*{key}*"), ran
    assert ran.err.count("\n") == 1
    assert ran.err.startswith("scrapy bloom: error: ")
    if number == signal.SIGTERM:
        assert ran.status == 143
    assert bloom("push", "job", server.url, "--key", key, cwd=tmp_path).status == 0


def test_a_push_that_is_killed_leaves_nothing_for_good(
    key: str, server: servers.Server, job: Path, tmp_path: Path
) -> None:
    with push_under_way(server, key, tmp_path) as (process, ended):
        process.kill()
        ended()
    assert blocks(server, key)
    again = bloom("push", "job", server.url, "--key", key, cwd=tmp_path)
    assert "another crawl or copy is creating the filter" in again.error
    assert all(server.client.ttl(each) > 0 for each in server.client.keys(f"*{key}*"))
    server.client.delete(maker_key(key))  # as when it expires, after a minute
    before = blocks(server, key)
    assert bloom("push", "job", server.url, "--key", key, cwd=tmp_path).status == 0
    assert all(server.client.ttl(each) > 0 for each in before)
    figures = bloom("info", server.url, "--key", key, "--scan", "--json", cwd=tmp_path).json
    assert (figures["recorded"], figures["queue"]["pending"]) == (10, 2)


def test_the_loser_of_two_pushes_leaves_the_winners_filter_and_queue(
    key: str, server: servers.Server, job: Path, tmp_path: Path
) -> None:
    make_filter(tmp_path / "other/bloom", fingerprints(urls(range(20))))
    fill(tmp_path / "other/requests.sqlite", b"three", b"four", b"five")
    with push_under_way(server, key, tmp_path) as (process, ended):
        os.kill(process.pid, signal.SIGSTOP)
        server.client.client_unpause()
        server.client.delete(maker_key(key))  # as when it expires, after a minute
        won = bloom("push", "other", server.url, "--key", key, cwd=tmp_path)
        # What the loser has made expires, and it removes that itself.
        kept = [each for each in server.client.keys(f"*{key}*") if server.client.ttl(each) == -1]
        before = {each: server.client.dump(each) for each in kept}
        os.kill(process.pid, signal.SIGCONT)
        lost = ended()
    assert won.status == 0, won
    assert "meanwhile" in lost.error
    assert {each: server.client.dump(each) for each in server.client.keys(f"*{key}*")} == before
    assert not [each for each in server.client.keys(f"*{key}*") if server.client.ttl(each) != -1]
    figures = bloom("info", server.url, "--key", key, "--scan", "--json", cwd=tmp_path).json
    assert (figures["recorded"], figures["queue"]["pending"]) == (20, 3)
    copied = bloom("pull", server.url, "back/bloom", "--key", key, "--json", cwd=tmp_path).json
    assert copied["queue"]["requests"] == 3


@contextmanager
def pull_under_way(
    server: servers.Server, key: str, cwd: Path
) -> Iterator[tuple[Scrapy, Callable[[], Ran]]]:
    """A pull that has reserved the space of a file, and waits for the server."""
    make_filter(cwd / "big", fingerprints(urls(range(10))), capacity=MANY)
    upload(cwd / "big", RedisServer(server.url), key)
    make_queue(server.url, key)
    url, copy = f"{server.url}?socket_timeout=60", cwd / "copy"
    with started("pull", url, "copy/bloom", "--key", key, cwd=cwd) as (process, ended):
        try:
            servers.wait_for(
                lambda: any(each.stat().st_size > 1 << 20 for each in copy.rglob("*.bloom*")),
                (cwd / "err").read_text,
            )
            server.pause()
            assert process.status() is None
            yield process, ended
        finally:
            server.go_on()


@pytest.mark.parametrize("removed_first", [False, True], ids=["repeated", "removed"])
def test_a_pull_that_is_killed_can_be_repeated(
    removed_first: bool, key: str, server: servers.Server, tmp_path: Path
) -> None:
    with pull_under_way(server, key, tmp_path) as (process, ended):
        process.kill()
        ended()
    for place in ("copy", "copy/bloom"):
        assert "an incomplete copy that was interrupted" in bloom("info", place, cwd=tmp_path).error
    if removed_first:
        ran = bloom("reset", "copy", "--yes", cwd=tmp_path)
        assert ran.status == 0, ran
        assert not [each for each in (tmp_path / "copy").rglob("*") if each.suffix == ".bloom"]
        assert "holds no filter; give" in bloom("reset", "copy", "--yes", cwd=tmp_path).error
    ran = bloom("pull", server.url, "copy/bloom", "--key", key, "--json", cwd=tmp_path)
    assert ran.status == 0, ran
    assert ran.json["queue"]["requests"] == 1
    figures = bloom("info", "copy", "--scan", "--json", cwd=tmp_path).json
    assert (figures["recorded"], figures["closed"]) == (10, True)
    assert figures["queue"]["pending"] == 1
    left = {each.name for each in (tmp_path / "copy").rglob("*") if each.is_file()}
    assert left - {"lock"} == {"generation-0001.bloom", "requests.sqlite"}


def test_a_merge_that_fails_leaves_no_directory(tmp_path: Path) -> None:
    make_filter(tmp_path / "a", [b"x"], capacity=100_000)
    limit = ("prlimit", "--fsize=100000")  # of each file
    ran = bloom("merge", "a", "a", "-o", "new/both", cwd=tmp_path, under=limit)
    assert ran.status == 1
    assert not (tmp_path / "new").exists()

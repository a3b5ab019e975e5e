"""`scrapy bloom copy` that is interrupted leaves nothing, and can be repeated."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scrapy_bloom.commands.shared.places import RedisPlace
from scrapy_bloom.redis.server import RedisServer
from tests.support import servers
from tests.support.cli import LIMIT, Ran, bloom
from tests.support.copies import copy
from tests.support.processes import Scrapy, start_scrapy
from tests.support.request_queues import fill
from tests.support.workspace import contents, fingerprints, make_filter, make_queue, urls

# 70 MiB, in 600 keys: the copy of a filter for so many takes a while.
MANY, RECORDED = 10_000_000, 3000


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A closed job in whose queue two requests wait."""
    make_filter(tmp_path / "job", fingerprints(urls(range(RECORDED))), capacity=MANY)
    fill(tmp_path / "job/bloom.sqlite", b"one", b"two")
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
def copy_to_server_under_way(
    server: servers.Server, key: str, cwd: Path
) -> Iterator[tuple[Scrapy, Callable[[], Ran]]]:
    """A copy that has written some blocks, and waits for the server to take more."""
    url = f"{server.url}?socket_timeout=60"
    with started("copy", "job", f"{url}#{key}", cwd=cwd) as (process, ended):
        try:
            servers.wait_for(lambda: blocks(server, key), (cwd / "err").read_text)
            server.client.client_pause(60_000, all=False)  # what writes
            assert server.client.hexists(key, "copying")
            yield process, ended
        finally:
            server.client.client_unpause()


def blocks(server: servers.Server, key: str) -> list[bytes]:
    return server.client.keys(f"{{{key}}}:blocks:*")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_copy_to_a_server_that_is_ended_leaves_nothing(
    number: signal.Signals, key: str, server: servers.Server, job: Path, tmp_path: Path
) -> None:
    with copy_to_server_under_way(server, key, tmp_path) as (process, ended):
        os.kill(process.pid, number)
        server.client.client_unpause()
        ran = ended()
    assert not server.client.keys(f"*{key}*"), ran
    assert ran.err.count("\n") == 1
    assert ran.err.startswith("scrapy bloom: error: ")
    assert bloom("copy", "job", f"{server.url}#{key}", cwd=tmp_path).status == 0


def test_a_copy_to_a_server_that_is_killed_leaves_nothing_for_good(
    key: str, server: servers.Server, job: Path, tmp_path: Path
) -> None:
    with copy_to_server_under_way(server, key, tmp_path) as (process, ended):
        process.kill()
        ended()
    assert blocks(server, key)
    at_key = (f"{server.url}#{key}",)
    for command in (("copy", "job", *at_key), ("info", *at_key), ("check", *at_key, "http://a/")):
        again = bloom(*command, cwd=tmp_path)
        assert "remove the copy with `scrapy bloom reset`" in again.error, again
    assert bloom("reset", f"{server.url}#{key}", "--yes", cwd=tmp_path).status == 0
    assert not server.client.keys(f"*{key}*")
    assert bloom("copy", "job", f"{server.url}#{key}", cwd=tmp_path).status == 0
    figures = bloom("info", f"{server.url}#{key}", "--scan", "--json", cwd=tmp_path).json
    assert (figures["recorded"], figures["queue"]["pending"]) == (RECORDED, 2)


def test_a_copy_that_is_removed_while_it_is_made_leaves_what_replaces_it(
    key: str, server: servers.Server, job: Path, tmp_path: Path
) -> None:
    make_filter(tmp_path / "other", fingerprints(urls(range(20))))
    fill(tmp_path / "other/bloom.sqlite", b"three", b"four", b"five")
    with copy_to_server_under_way(server, key, tmp_path) as (process, ended):
        os.kill(process.pid, signal.SIGSTOP)
        server.client.client_unpause()
        assert bloom("reset", f"{server.url}#{key}", "--yes", cwd=tmp_path).status == 0
        won = bloom("copy", "other", f"{server.url}#{key}", cwd=tmp_path)
        os.kill(process.pid, signal.SIGCONT)
        lost = ended()
    assert won.status == 0, won
    assert "meanwhile" in lost.error
    assert len(server.client.keys(f"{{{key}}}:blocks:*:made")) == 1
    figures = bloom("info", f"{server.url}#{key}", "--scan", "--json", cwd=tmp_path).json
    assert (figures["recorded"], figures["queue"]["pending"]) == (20, 3)
    copied = bloom("copy", f"{server.url}#{key}", "back", "--json", cwd=tmp_path).json
    assert copied["queued"] == 3


@contextmanager
def copy_to_files_under_way(
    server: servers.Server, key: str, cwd: Path
) -> Iterator[tuple[Scrapy, Callable[[], Ran]]]:
    """A copy that has written some blocks, and waits for the server."""
    make_filter(cwd / "big", fingerprints(urls(range(RECORDED))), capacity=MANY)
    copy(cwd / "big", RedisPlace(RedisServer(server.url), key))
    make_queue(server.url, key)
    url, log = f"{server.url}?socket_timeout=60", cwd / "new/copy/bloom.sqlite.copy-wal"
    with started("copy", f"{url}#{key}", "new/copy", cwd=cwd) as (process, ended):
        try:
            servers.wait_for(
                lambda: log.exists() and log.stat().st_size > 1 << 20,
                (cwd / "err").read_text,
            )
            server.pause()
            assert process.status() is None
            yield process, ended
        finally:
            server.go_on()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_copy_to_files_that_is_ended_leaves_nothing(
    number: signal.Signals, key: str, server: servers.Server, tmp_path: Path
) -> None:
    with copy_to_files_under_way(server, key, tmp_path) as (process, ended):
        os.kill(process.pid, number)
        server.go_on()
        ran = ended()
    assert not (tmp_path / "new").exists(), ran
    assert ran.err.count("\n") == 1
    assert ran.err.startswith("scrapy bloom: error: ")


def test_a_copy_to_files_that_is_killed_can_be_repeated(
    key: str, server: servers.Server, tmp_path: Path
) -> None:
    with copy_to_files_under_way(server, key, tmp_path) as (process, ended):
        process.kill()
        ended()
    assert "new/copy holds no filter" in bloom("info", "new/copy", cwd=tmp_path).error
    ran = bloom("copy", f"{server.url}#{key}", "new/copy", "--json", cwd=tmp_path)
    assert ran.status == 0, ran
    assert ran.json["queued"] == 1
    figures = bloom("info", "new/copy", "--scan", "--json", cwd=tmp_path).json
    assert (figures["recorded"], figures["closed"]) == (RECORDED, True)
    assert figures["queue"]["pending"] == 1
    left = {file.name for file in (tmp_path / "new/copy").iterdir()} - {"bloom.lock"}
    assert left == {"bloom.sqlite"}


def test_two_copies_to_one_directory(key: str, server: servers.Server, tmp_path: Path) -> None:
    make_filter(tmp_path / "other", fingerprints(urls(range(20))))
    with copy_to_files_under_way(server, key, tmp_path) as (_, ended):
        refused = bloom("copy", "other", "new/copy", cwd=tmp_path)
        assert "new/copy is in use" in refused.error
        server.go_on()
        assert ended().status == 0
    assert "exists already" in bloom("copy", "other", "new/copy", cwd=tmp_path).error
    assert bloom("info", "new/copy", "--json", cwd=tmp_path).json["recorded"] == RECORDED


def test_a_copy_into_an_empty_directory(tmp_path: Path) -> None:
    make_filter(tmp_path / "filter", fingerprints(urls(range(20))))
    (tmp_path / "copy").mkdir()
    assert bloom("copy", "filter", "copy", cwd=tmp_path).status == 0
    assert {file.name for file in tmp_path.iterdir()} == {"filter", "copy"}
    assert bloom("info", "copy", "--json", cwd=tmp_path).json["recorded"] == 20
    (tmp_path / "file").touch()
    before = contents(tmp_path)
    for target, message in (
        ("file/copy", "file is a file, and"),
        ("file", "file exists already"),
    ):
        assert message in bloom("copy", "filter", target, cwd=tmp_path).error
    assert contents(tmp_path) == before

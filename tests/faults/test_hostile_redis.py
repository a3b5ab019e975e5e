"""Damaged or hostile filters in Redis: one line refuses them, and nothing changes them."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import hostile_values, servers
from tests.support.cli import bloom
from tests.support.crawls import ROOT, Crawl
from tests.support.hostile_values import KEY
from tests.support.sites import Site
from tests.support.workspace import fingerprints, make_filter, urls, write_urls


@pytest.fixture(scope="module")
def server() -> Iterator[servers.Server]:
    server = servers.Server()
    yield server
    server.end()


def test_no_value_hangs_or_breaks_a_crawl_or_a_reader(server: servers.Server) -> None:
    """A value is harmless, or one line refuses it and nothing is changed."""
    ran = subprocess.run(
        [sys.executable, "-m", hostile_values.__name__, server.url],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    outcomes = [json.loads(line) for line in ran.stdout.splitlines()]
    refused = [each for each in outcomes if each[1].startswith("refused: ")]
    wrong = [
        (name, became, is_as_it_was)
        for name, became, is_as_it_was in outcomes
        if not (became == "fine" or (became.startswith("refused: ") and is_as_it_was))
        or "\n" in became
        or len(became) > 500
    ]
    assert not wrong, f"{len(wrong)}: {wrong[:20]}"
    assert len(refused) > 500


# What was worst: no end, all memory, a traceback; and a filter that reports all as duplicates.
WORST = {
    "deep": {b"filter": b"[" * 50_000},
    "shape": {"num_blocks": 10**30},
    "rate": {"error_rate": float("nan")},
}


@pytest.fixture
def damaged(request: pytest.FixtureRequest, server: servers.Server) -> dict[bytes, bytes]:
    """The fields of a filter that a crawl has left, with one that cannot be."""
    fields = hostile_values.good_fields(server.url)
    newest = max(name for name in fields if name.startswith(b"gen:"))
    for name, value in WORST[request.param].items():
        if isinstance(name, str):
            fields[newest] = json.dumps({**json.loads(fields[newest]), name: value}).encode()
        else:
            fields[name] = value
    server.client.hset(KEY, mapping=fields)
    return fields


@pytest.mark.parametrize("damaged", ["deep", "shape"], indirect=True)
def test_a_crawl_is_refused_in_one_line(
    damaged: dict[bytes, bytes], server: servers.Server, tree: Site, tmp_path: Path
) -> None:
    settings = {"BLOOM_BACKEND": "redis", "BLOOM_REDIS_URL": server.url, "BLOOM_REDIS_KEY": KEY}
    assert "or a damaged one (its field " in Crawl(tree.url, tmp_path, settings).refusal()
    assert not tree.hits
    assert server.client.hgetall(KEY) == damaged


@pytest.mark.parametrize("damaged", ["rate"], indirect=True)
def test_each_subcommand_is_refused_in_one_line(
    damaged: dict[bytes, bytes], server: servers.Server, tmp_path: Path
) -> None:
    write_urls(tmp_path / "urls.txt", urls(range(10)))
    make_filter(tmp_path / "filter", fingerprints(urls(range(10))))
    for command in (
        ("info", server.url, "--scan", "--json"),
        ("check", server.url, "urls.txt"),
        ("import", "urls.txt", server.url),
        ("pull", server.url, "copy"),
        ("push", "filter", server.url),
        ("reset", server.url, "--yes"),
    ):
        ran = bloom(*command, "--key", KEY, cwd=tmp_path)
        assert "or a damaged one (its field " in ran.error, command
        assert server.client.hgetall(KEY) == damaged, command
    assert not list(tmp_path.glob("copy/*.bloom"))

"""The hash of a filter in Redis, damaged or hostile: one line, and it is left as it is."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import hostile_values, servers
from tests.support.cli import bloom
from tests.support.crawls import Crawl
from tests.support.hostile_values import HARMLESS, KEY
from tests.support.sites import Site
from tests.support.workspace import fingerprints, make_filter, urls, write_urls

NEXT_STEPS = ("set BLOOM_REDIS_KEY to another name", "upgrade scrapy_bloom to use it")


@pytest.fixture(scope="module")
def server() -> Iterator[servers.Server]:
    server = servers.Server()
    yield server
    server.end()


def test_every_value_that_cannot_be_is_refused_and_left_as_it_is(server: servers.Server) -> None:
    """By a crawl's backend and by who only looks: no traceback, no end of memory or time."""
    ran = subprocess.run(
        [sys.executable, "-m", hostile_values.__name__, server.url],
        cwd=Path(hostile_values.__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    told = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(told) > 500
    wrong = []
    for each in told:
        for how in ("crawl", "look"):
            became, is_as_it_was = each[how], each[f"{how} left it"]
            is_refused = became.startswith("refused: ") and is_as_it_was
            if each["name"] in HARMLESS:
                # Of another fingerprinter, a crawl refuses even what a look shows.
                is_right = is_refused or became == "fine"
            else:
                is_right = is_refused and became.endswith(NEXT_STEPS)
            if not is_right or "\n" in became or len(became) > 500:
                wrong.append((each["name"], how, became, is_as_it_was))
    assert not wrong, f"{len(wrong)}: {wrong}"
    names = Counter(each["name"] for each in told)
    assert names.keys() >= HARMLESS
    assert set(names.values()) == {1}


# What was worst: no end, all memory, a traceback; and a filter that would take all for seen.
WORST = {
    "deep": {b"filter": b"[" * 50_000},
    "keys": {b"unlink:0123456789abcdef": b"1000000000000"},
    "shape": {"num_blocks": 10**30},
    "rate": {"error_rate": float("nan")},
}


@pytest.fixture
def damaged(request: pytest.FixtureRequest, server: servers.Server) -> dict[bytes, bytes]:
    """The fields of a filter that a crawl has left, with one that cannot be."""
    client = server.client
    fields = hostile_values.good_fields(server.url)
    newest = max(name for name in fields if name.startswith(b"gen:"))
    for name, value in WORST[request.param].items():
        if isinstance(name, str):
            fields[newest] = json.dumps({**json.loads(fields[newest]), name: value}).encode()
        else:
            fields[name] = value
    client.hset(KEY, mapping=fields)
    return fields


@pytest.mark.parametrize("damaged", ["deep", "keys", "shape"], indirect=True)
def test_a_crawl_says_it_in_one_line(
    damaged: dict[bytes, bytes], server: servers.Server, tree: Site, tmp_path: Path
) -> None:
    settings = {
        "BLOOM_BACKEND": "redis",
        "BLOOM_REDIS_URL": server.url,
        "BLOOM_REDIS_KEY": KEY,
    }
    crawl = Crawl(tree.url, tmp_path, settings)
    assert crawl.finish() == 1
    (line,) = crawl.told("ERROR")
    assert "or a damaged one (its field " in line
    assert not tree.hits
    assert server.client.hgetall(KEY) == damaged


@pytest.mark.parametrize("damaged", ["rate"], indirect=True)
def test_so_does_each_subcommand(
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
    assert not (tmp_path / "copy").exists() or not list((tmp_path / "copy").glob("*.bloom"))

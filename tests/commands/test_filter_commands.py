"""`scrapy bloom info, check, copy`: on filters in files and in Redis."""

import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.support import servers
from tests.support.cli import bloom
from tests.support.crawls import Crawl, syncing_every
from tests.support.sites import Site
from tests.support.workspace import (
    FINGERPRINTER,
    SALT,
    contents,
    fingerprints,
    make_filter,
    shared_filter,
    urls,
    write_urls,
)

PAGES = 50  # of the tree
SAFE = "scrapy_bloom.CrashSafeScheduler"

# info


def test_info_of_a_filter_that_has_grown(tmp_path: Path) -> None:
    make_filter(tmp_path / "job", fingerprints(urls(range(500))), capacity=100, salt=SALT)
    before = contents(tmp_path)
    figures = bloom("info", "job", "--json", cwd=tmp_path).json
    assert figures["recorded"] == 500
    assert figures["capacity"] == 100 + 200 + 400
    assert (figures["spider"], figures["fingerprinter"]) == ("shop", FINGERPRINTER)
    assert figures["closed"] is True
    assert [figure["recorded"] for figure in figures["generations"]] == [100, 200, 200]
    assert all(abs(figure["first_run"] - time.time()) < 600 for figure in figures["generations"])
    text = bloom("info", "job", "--scan", cwd=tmp_path).out
    for part in ("500 of 700", FINGERPRINTER, "closed", "counted fill"):
        assert part in text
    assert contents(tmp_path) == before


def test_bits_that_somebody_has_set(tmp_path: Path) -> None:
    """So that nothing is crawled; the stats do not show it."""
    make_filter(tmp_path / "job", fingerprints(urls(range(500))), capacity=500)
    with closing(sqlite3.connect(tmp_path / "job/bloom.sqlite")) as db, db:
        db.execute("UPDATE blocks SET bits = ?", (b"\xff" * 8192,))
    write_urls(tmp_path / "urls.txt", urls(range(1000, 1050)))
    assert "0 new, 50 seen" in bloom("check", "job", "urls.txt", cwd=tmp_path).err
    (figures,) = bloom("info", "job", "--scan", "--json", cwd=tmp_path).json["generations"]
    assert figures["fill_ratio"] < 0.6
    assert figures["counted_fill_ratio"] == 1


def recorded(path: Path) -> int:
    return int(bloom("info", "job", "--json", cwd=path).json["recorded"])


def test_info_of_a_filter_in_redis(server: servers.Server, tmp_path: Path) -> None:
    key = f"{tmp_path.name}:bloom"
    recorded = fingerprints(urls(range(250)))
    shared_filter(server, key, recorded, capacity=100)
    before = {name: server.client.dump(name) for name in server.client.keys(f"*{key}*")}
    ran = bloom("info", f"{server.url}#{key}", "--scan", "--json", cwd=tmp_path)
    assert [entry["recorded"] for entry in ran.json["generations"]] == [100, 150]
    for row in ran.json["generations"]:
        assert row["counted_requests"] == pytest.approx(row["recorded"], rel=0.03)
        assert row["counted_fill_ratio"] == pytest.approx(row["fill_ratio"], rel=0.03)
    assert ran.json["closed"] is None
    assert {name: server.client.dump(name) for name in server.client.keys(f"*{key}*")} == before
    text = bloom("info", server.url, "--spider", tmp_path.name, cwd=tmp_path).out
    assert "250 of 300" in text


# check


def test_check(tmp_path: Path) -> None:
    make_filter(tmp_path / "filter", fingerprints(urls(range(500))), capacity=100)
    lines = ["", *urls(range(480, 490)), "no url", "  https://shop.example/700 ", *urls([800])]
    write_urls(tmp_path / "urls.txt", lines)
    before = contents(tmp_path)
    new = bloom("check", "filter", "urls.txt", cwd=tmp_path)
    assert new.out.split() == urls([700, 800])
    assert "12 URLs: 2 new, 10 seen" in new.err
    assert "1 line was not valid; the first: line 12: " in new.err
    assert bloom("check", "filter", "urls.txt", cwd=tmp_path).out == new.out
    seen = bloom("check", "filter", "-", "--seen", cwd=tmp_path, stdin="\n".join(lines))
    assert seen.out.split() == urls(range(480, 490))
    figures = bloom("check", "filter", "urls.txt", "--json", cwd=tmp_path).json
    assert figures == {"read": 12, "new": 2, "seen": 10, "skipped": 1}
    assert contents(tmp_path) == before


@pytest.mark.parametrize("scheduler", ["scrapy.core.scheduler.Scheduler", SAFE])
def test_check_a_running_crawls_filter(scheduler: str, tree: Site, tmp_path: Path) -> None:
    settings = {"JOBDIR": "job", "SCHEDULER": scheduler}
    crawl = Crawl.held(tree, 10, tmp_path, settings, spider=syncing_every(0.1, tmp_path))
    crawled = [path for path in tree.hits if path != "/p/0"]  # the start page is not recorded
    servers.wait_for(lambda: recorded(tmp_path) >= len(crawled), str)
    write_urls(tmp_path / "urls.txt", [f"{tree.url.rstrip('/')}{path}?a=2&b=1" for path in crawled])
    figures = bloom("check", "job", "urls.txt", "--json", cwd=tmp_path).json
    assert (figures["new"], figures["seen"]) == (0, len(crawled))
    assert crawl.running()
    tree.release()
    assert crawl.finish() == 0
    assert len(tree.hits) == PAGES


def test_check_in_redis(server: servers.Server, tmp_path: Path) -> None:
    key = f"{tmp_path.name}:bloom"
    shared_filter(server, key, fingerprints(urls(range(250))), capacity=100)
    write_urls(tmp_path / "urls.txt", urls(range(200, 2000)))
    before = {name: server.client.dump(name) for name in server.client.keys(f"*{key}*")}
    place = (f"{server.url}#{key}", "urls.txt")
    assert bloom("check", *place, cwd=tmp_path).out.split() == urls(range(250, 2000))
    assert bloom("check", *place, "--seen", cwd=tmp_path).out.split() == urls(range(200, 250))
    assert {name: server.client.dump(name) for name in server.client.keys(f"*{key}*")} == before
    lost = next(entry for entry in before if entry.decode().endswith(":0"))
    server.client.unlink(lost)
    assert "has lost keys of generation" in bloom("check", *place, cwd=tmp_path).error


# copy


def test_pending_requests_of_scrapys_scheduler_are_left_out(
    key: str, server: servers.Server, tree: Site, tmp_path: Path
) -> None:
    assert Crawl.held(tree, 15, tmp_path, {"JOBDIR": "job"}).interrupt() == 0
    for target in (f"{server.url}#{key}", "copy"):
        ran = bloom("copy", "job", target, cwd=tmp_path)
        assert ran.status == 0, ran
        assert "warning: Scrapy's own queue in job has pending requests, which are not" in ran.err


def test_the_key_of_a_copy(server: servers.Server, tmp_path: Path) -> None:
    spider = tmp_path.name
    make_filter(tmp_path / "job", fingerprints(urls(range(500))), capacity=200, spider=spider)
    there = bloom("copy", "job", server.url, "--json", cwd=tmp_path)
    assert there.json["recorded"] == 500
    back = bloom("copy", server.url, "copy", "--spider", spider, "--json", cwd=tmp_path)
    assert back.json == there.json
    places = (f"{server.url}#{spider}:bloom", f"{server.url}#{spider}:2")
    assert bloom("copy", *places, "--json", cwd=tmp_path).json == there.json
    same = bloom("copy", f"{server.url}#{spider}:bloom", server.url, cwd=tmp_path)
    assert f"has a filter '{spider}:bloom' already" in same.error


def test_lists_of_requests_that_are_no_plain_gets(tmp_path: Path) -> None:
    def line(**fields: object) -> str:
        return json.dumps({"url": "https://shop.example/search", **fields})

    (tmp_path / "done").write_text(line(method="post", body="q=1"))
    assert bloom("import", "done", "filter", cwd=tmp_path).status == 0
    (tmp_path / "asked").write_text(
        "\n".join(
            [
                line(),
                line(body="the text of an article"),
                line(method="POST", body="q=1", meta={"a": [1]}, headers={"X-A": "1"}),
                line(method="POST", body="q=2"),
                line(method="POST", body=["q=1"]),
                line(method="POST", headers={"X-A": [{}]}),
            ]
        )
    )
    ran = bloom("check", "filter", "asked", "--json", cwd=tmp_path)
    assert ran.json == {"read": 4, "new": 3, "seen": 1, "skipped": 2}
    assert "the first: line 5: its 'body' is not of the type str" in ran.error

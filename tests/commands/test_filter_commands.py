"""`scrapy bloom info, check, merge, push, pull`: on filters in files and in Redis."""

import time
from pathlib import Path

import pytest

from scrapy_bloom.files.directory import FilterReader
from tests.support import servers
from tests.support.backends import local_backend
from tests.support.cli import bloom
from tests.support.crawls import Crawl
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

# info


def test_info_of_a_filter_that_has_grown(tmp_path: Path) -> None:
    make_filter(tmp_path / "job/bloom", fingerprints(urls(range(500))), capacity=100, salt=SALT)
    before = contents(tmp_path)
    for path in ("job", "job/bloom"):
        figures = bloom("info", path, "--json", cwd=tmp_path).json
        assert figures["recorded"] == 500
        assert figures["capacity"] == 100 + 200 + 400
        assert figures["salt"] == "***"
        assert (figures["spider"], figures["fingerprinter"]) == ("shop", FINGERPRINTER)
        assert figures["closed"] is True
        assert [each["recorded"] for each in figures["generations"]] == [100, 200, 200]
        assert all(abs(each["created"] - time.time()) < 600 for each in figures["generations"])
    one = bloom("info", "job/bloom/generation-0002.bloom", "--json", cwd=tmp_path).json
    assert [each["number"] for each in one["generations"]] == [2]
    text = bloom("info", "job", "--scan", cwd=tmp_path).out
    for part in ("500 of 700", "***", FINGERPRINTER, "closed", "generation"):
        assert part in text
    assert not set(text) & set("│┃━─\x1b")  # plain text, since it is no terminal
    assert contents(tmp_path) == before


def test_info_counts_the_bits(tmp_path: Path) -> None:
    recorded = fingerprints(urls(range(900)))
    make_filter(tmp_path / "filter", recorded, error_rate=1e-3)
    (row,) = bloom("info", "filter", "--scan", "--json", cwd=tmp_path).json["generations"]
    with_bits = FilterReader(tmp_path / "filter").files[0].filter
    assert row["scan"]["fill_ratio"] == with_bits.fill_ratio
    assert row["scan"]["fill_ratio"] == pytest.approx(row["fill_ratio"], rel=0.02)
    assert row["scan"]["recorded"] == pytest.approx(900, rel=0.02)
    assert row["scan"]["error_rate_now"] == pytest.approx(row["error_rate_now"], rel=0.2)


def test_info_of_a_running_and_of_a_killed_crawl(tree: Site, tmp_path: Path) -> None:
    crawl = Crawl.held(tree, 10, tmp_path, {"JOBDIR": "job"})
    figures = bloom("info", "job", "--json", cwd=tmp_path).json
    shown = bloom("info", "job", cwd=tmp_path).out
    assert crawl.running()
    assert (figures["closed"], figures["in_use"]) == (False, True)
    assert "in use by a running crawl" in shown
    assert figures["recorded"] >= 10
    assert figures["spider"]
    crawl.kill()
    before = contents(tmp_path / "job")
    figures = bloom("info", "job", "--json", cwd=tmp_path).json
    assert (figures["closed"], figures["in_use"]) == (False, False)
    assert "not closed: its crawl was killed" in bloom("info", "job", cwd=tmp_path).out
    assert contents(tmp_path / "job") == before


def test_info_of_a_filter_in_redis(server: servers.Server, tmp_path: Path) -> None:
    key = f"{tmp_path.name}:bloom"
    recorded = fingerprints(urls(range(250)))
    shared_filter(server, key, recorded, capacity=100)
    before = {each: server.client.dump(each) for each in server.client.keys(f"*{key}*")}
    ran = bloom("info", server.url, "--key", key, "--scan", "--json", cwd=tmp_path)
    assert [each["recorded"] for each in ran.json["generations"]] == [100, 150]
    for row in ran.json["generations"]:
        assert row["scan"]["recorded"] == pytest.approx(row["recorded"], rel=0.03)
    assert ran.json["closed"] is None
    assert {each: server.client.dump(each) for each in server.client.keys(f"*{key}*")} == before
    text = bloom("info", server.url, "--spider", tmp_path.name, cwd=tmp_path).out
    assert "250 of 300" in text
    wrong = bloom("info", server.url, "--key", "nothing", cwd=tmp_path)
    assert "has no filter 'nothing'" in wrong.error


# check


def test_check(tmp_path: Path) -> None:
    make_filter(tmp_path / "filter", fingerprints(urls(range(500))), capacity=100)
    lines = ["", *urls(range(480, 490)), "no url", "  https://shop.example/700 ", *urls([800])]
    write_urls(tmp_path / "urls.txt", lines)
    before = contents(tmp_path)
    new = bloom("check", "filter", "urls.txt", cwd=tmp_path)
    assert new.out.split() == urls([700, 800])
    assert "12 URLs: 2 new, 10 seen" in new.err
    assert "1 line is not a URL and was left out; the first: line 12: " in new.err
    assert bloom("check", "filter", "urls.txt", "--new", cwd=tmp_path).out == new.out
    seen = bloom("check", "filter", "-", "--seen", cwd=tmp_path, stdin="\n".join(lines))
    assert seen.out.split() == urls(range(480, 490))
    figures = bloom("check", "filter", "urls.txt", "--json", cwd=tmp_path).json
    assert figures == {"read": 12, "new": 2, "seen": 10, "skipped": 1}
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    "scheduler", ["scrapy.core.scheduler.Scheduler", "scrapy_bloom.CrashSafeScheduler"]
)
def test_check_a_running_crawls_filter(scheduler: str, tree: Site, tmp_path: Path) -> None:
    crawl = Crawl.held(tree, 10, tmp_path, {"JOBDIR": "job", "SCHEDULER": scheduler})
    crawled = [path for path in tree.hits if path != "/p/0"]  # the start page is not recorded
    write_urls(tmp_path / "urls.txt", [f"{tree.url.rstrip('/')}{path}?a=2&b=1" for path in crawled])
    figures = bloom("check", "job", "urls.txt", "--json", cwd=tmp_path).json
    assert (figures["new"], figures["seen"]) == (0, len(crawled))
    assert crawl.running()
    tree.release()
    assert crawl.finish() == 0
    assert len(tree.hits) == 150


def test_check_in_redis(server: servers.Server, tmp_path: Path) -> None:
    key = f"{tmp_path.name}:bloom"
    shared_filter(server, key, fingerprints(urls(range(250))), capacity=100)
    write_urls(tmp_path / "urls.txt", urls(range(200, 2000)))
    before = {each: server.client.dump(each) for each in server.client.keys(f"*{key}*")}
    place = (server.url, "urls.txt", "--key", key)
    assert bloom("check", *place, cwd=tmp_path).out.split() == urls(range(250, 2000))
    assert bloom("check", *place, "--seen", cwd=tmp_path).out.split() == urls(range(200, 250))
    assert {each: server.client.dump(each) for each in server.client.keys(f"*{key}*")} == before
    lost = next(each for each in before if each.decode().endswith(":0"))
    server.client.unlink(lost)
    assert "has lost keys of generation" in bloom("check", *place, cwd=tmp_path).error


# merge


def test_merge(tmp_path: Path) -> None:
    for name, numbers in {"a": range(500), "b": range(400, 700)}.items():
        make_filter(tmp_path / name, fingerprints(urls(numbers)), capacity=200, salt=SALT)
    before = contents(tmp_path)
    ran = bloom("merge", "a", "b", "-o", "both", "--json", cwd=tmp_path)
    assert 700 <= ran.json["recorded"] <= 810  # what is in two generations counts in each
    assert "scrapy bloom: warning: " in ran.err  # the first is fuller than it was made for
    assert {name: each for name, each in contents(tmp_path).items() if "both" not in name} == before
    backend = local_backend(
        tmp_path / "both", capacity=1000, error_rate=1e-6, fingerprinter=FINGERPRINTER
    )
    backend.open()
    assert all(each in backend for each in fingerprints(urls(range(700))))
    assert not any(each in backend for each in fingerprints(urls(range(1000, 2000))))
    backend.close()
    again = bloom("merge", "a", "b", "-o", "both", cwd=tmp_path)
    assert "both holds a filter already" in again.error


def test_merge_what_is_not_alike(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_filter(tmp_path / name, fingerprints(urls(range(10))))
    error = bloom("merge", "a", "b", "-o", "both", cwd=tmp_path).error
    assert "the salts differ" in error
    assert "with the same BLOOM_EXPECTED_REQUESTS, BLOOM_ERROR_RATE" in error
    assert not list(tmp_path.glob("both/*.bloom"))


def test_two_filters_for_one_path(tmp_path: Path) -> None:
    """One of a BLOOM_DIR, one of a JOBDIR: nobody can know which one is meant."""
    for path in ("job", "job/bloom"):
        make_filter(tmp_path / path, fingerprints(urls(range(10))))
    assert "Give job/bloom" in bloom("reset", "job", "--yes", cwd=tmp_path).error
    assert "Give job/bloom" in bloom("info", "job", cwd=tmp_path).error
    assert bloom("info", "job/bloom", cwd=tmp_path).status == 0


def test_pending_requests_of_a_queue_are_reported(tree: Site, tmp_path: Path) -> None:
    crawl = Crawl.held(tree, 40, tmp_path, {"JOBDIR": "job"})
    crawl.interrupt()
    key = ("--key", f"{tmp_path.name}:bloom")
    for command in (
        ("push", "job", servers.shared("valkey").url, *key),
        ("import", "job", "copy"),
        ("merge", "job", "job", "-o", "merged"),
    ):
        ran = bloom(*command, cwd=tmp_path)
        assert ran.status == 0
        assert "the queue of job has pending requests" in ran.err


# push and pull


def test_push_and_pull(server: servers.Server, tmp_path: Path) -> None:
    spider = tmp_path.name
    make_filter(tmp_path / "job/bloom", fingerprints(urls(range(500))), capacity=200, spider=spider)
    pushed = bloom("push", "job", server.url, "--json", cwd=tmp_path)
    assert pushed.json["recorded"] == 500
    assert pushed.json["destination"].endswith(f"key {spider}:bloom")
    pulled = bloom("pull", server.url, "copy", "--spider", spider, "--json", cwd=tmp_path)
    for name in ("recorded", "generations", "bytes"):
        assert pulled.json[name] == pushed.json[name]

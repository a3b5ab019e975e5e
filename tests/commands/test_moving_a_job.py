"""`scrapy bloom copy` of a job with its queue: the crawl continues in the new place."""

import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support import servers
from tests.support.cli import bloom
from tests.support.crawls import RULES_SPIDER, SPIDER, Crawl
from tests.support.sites import Site
from tests.support.workspace import contents, in_redis

PAGES = 60  # of the tree
SAFE = {"SCHEDULER": "scrapy_bloom.CrashSafeScheduler"}
JOB = {**SAFE, "JOBDIR": "job"}


def shared(key: str) -> dict[str, object]:
    return {**SAFE, **in_redis(key)}


def paused(site: Site, path: Path, settings: dict[str, object], spider: Path = SPIDER) -> None:
    crawl = Crawl.held(site, 15, path, settings, spider=spider)
    assert crawl.interrupt() == 0, crawl.output
    assert 10 < len(site.hits) < PAGES


def crawled_once(site: Site) -> None:
    assert len(site.hits) == PAGES
    twice = {page for page, count in site.hits.items() if count > 1}
    assert twice <= {"/", "/p/0"}  # the start page has two addresses


def test_a_paused_job_is_finished_by_two_workers(
    key: str, server: servers.Server, tree: Site, tmp_path: Path
) -> None:
    paused(tree, tmp_path, JOB)
    before = contents(tmp_path / "job")
    ran = bloom("copy", "job", f"{server.url}#{key}", cwd=tmp_path)
    assert ran.status == 0, ran
    assert ran.out.startswith(f"Copied job to {key} in {server.url}: ")
    assert not ran.err
    locks = {"bloom.lock"}
    after = contents(tmp_path / "job")
    assert {name: after[name] for name in after.keys() - locks} == {
        name: before[name] for name in before.keys() - locks
    }
    again = bloom("copy", "job", f"{server.url}#{key}", cwd=tmp_path)
    assert f"has a filter {key!r} already; nothing was changed" in again.error
    tree.delay = 0.01
    for worker in [Crawl(tree.url, tmp_path / name, shared(key)) for name in ("one", "two")]:
        assert worker.finish() == 0, worker.output
        assert not worker.our_lines("WARNING") + worker.our_lines("ERROR")
        assert "'finish_reason': 'finished'" in worker.output
    assert len(tree.hits) == PAGES
    # Both workers may store a link that they find at the same instant.
    assert max(number for page, number in tree.hits.items() if page not in {"/", "/p/0"}) <= 2


def test_a_paused_crawl_of_workers_is_finished_by_one_alone(
    key: str, server: servers.Server, tree: Site, tmp_path: Path
) -> None:
    paused(tree, tmp_path, shared(key))
    keys = {name: server.client.dump(name) for name in server.client.keys(f"*{key}*")}
    ran = bloom("copy", f"{server.url}#{key}", "job", "--json", cwd=tmp_path)
    assert ran.status == 0, ran
    waiting = ran.json["queued"]
    assert waiting > 0
    queue = bloom("info", "job", "--json", cwd=tmp_path).json["queue"]
    assert (queue["pending"], queue["in_flight"]) == (waiting, 0)
    assert {name: server.client.dump(name) for name in server.client.keys(f"*{key}*")} == keys
    before = contents(tmp_path / "job")
    again = bloom("copy", f"{server.url}#{key}", "job", cwd=tmp_path)
    assert "job exists already; nothing was changed" in again.error
    assert contents(tmp_path / "job") == before
    crawl = Crawl.finished(tree.url, tmp_path, JOB)
    assert not crawl.our_lines("WARNING") + crawl.our_lines("ERROR")
    crawled_once(tree)


def test_requests_with_objects_are_copied(key: str, tree: Site, tmp_path: Path) -> None:
    """Of a CrawlSpider: commands show them, and the crawl of the last copy has their classes."""
    url = servers.shared("valkey").url
    places = ["job", f"{url}#{key}", "jobs/copy"]
    paused(tree, tmp_path, JOB, RULES_SPIDER)
    shown = []
    for number, place in enumerate(places):
        if number:
            assert bloom("copy", places[number - 1], place, cwd=tmp_path).status == 0
        shown.append(bloom("queue", place, "--next", "1000", "--json", cwd=tmp_path).json["next"])
        assert {entry["url"].startswith(tree.url) for entry in shown[-1]} == {True}
        assert {entry["method"] for entry in shown[-1]} == {"GET"}
    assert shown[0] == shown[1] == shown[2]
    settings = {**SAFE, "JOBDIR": "jobs/copy"}
    crawl = Crawl.finished(tree.url, tmp_path, settings, spider=RULES_SPIDER)
    assert not crawl.our_lines("WARNING") + crawl.our_lines("ERROR")
    assert "spider_exceptions" not in crawl.output
    crawled_once(tree)


@pytest.mark.parametrize("is_killed", [False, True], ids=["running", "killed"])
def test_a_backup_of_a_crawl(is_killed: bool, tree: Site, tmp_path: Path) -> None:
    """Each page is crawled before the copy was made, or by a crawl that continues with it."""
    crawl = Crawl.held(tree, 15, tmp_path, JOB)
    before = set(tree.hits)
    if is_killed:
        crawl.kill()
    state = "not closed: its crawl was killed" if is_killed else "in use by a running crawl"
    assert state in bloom("info", "job", cwd=tmp_path).out
    for target in ("backup", "second"):
        assert bloom("copy", "job", target, cwd=tmp_path).status == 0
    queue = bloom("info", "backup", "--json", cwd=tmp_path).json["queue"]
    assert queue["pending"] > 0 == queue["in_flight"]
    listed = bloom("queue", "second", "--next", "1000", "--json", cwd=tmp_path).json["next"]
    queued = {urlsplit(entry["url"]).path for entry in listed}
    if not is_killed:
        assert crawl.running()
        crawl.kill()
    tree.forget()
    tree.release()
    again = Crawl.finished(tree.url, tmp_path, {**SAFE, "JOBDIR": "backup"})
    assert not again.our_lines("WARNING") + again.our_lines("ERROR")
    assert len(before | set(tree.hits)) == PAGES
    pages = [f"{tree.url}p/{number}?a=2&b=1" for number in range(1, PAGES)]
    seen = bloom("check", "second", "--seen", *pages, cwd=tmp_path).out.split()
    assert {urlsplit(entry).path for entry in seen} <= before | queued


def test_a_backup_by_sqlite(tree: Site, tmp_path: Path) -> None:
    """A crawl with it starts over, with the requests of the queue."""
    crawl = Crawl.held(tree, 15, tmp_path, JOB)
    before = set(tree.hits)
    (tmp_path / "backup").mkdir()
    with (
        closing(sqlite3.connect(tmp_path / "job/bloom.sqlite")) as source,
        closing(sqlite3.connect(tmp_path / "backup/bloom.sqlite")) as target,
    ):
        source.backup(target)
    crawl.kill()
    tree.forget()
    tree.release()
    again = Crawl.finished(tree.url, tmp_path, {**SAFE, "JOBDIR": "backup"})
    (warning,) = again.our_lines("WARNING")
    assert "starts over with an empty filter and the requests of the queue" in warning
    assert len(before | set(tree.hits)) == PAGES


def test_no_backup_of_a_crawl_under_scrapys_scheduler(tree: Site, tmp_path: Path) -> None:
    """Its queue is in memory, and would be lost."""
    crawl = Crawl.held(tree, 10, tmp_path, {"JOBDIR": "job"})
    for is_killed in (False, True):
        if is_killed:
            crawl.kill()
        assert "is in use by a crawl, or" in bloom("copy", "job", "backup", cwd=tmp_path).error
        assert not (tmp_path / "backup").exists()

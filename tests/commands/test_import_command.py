"""`scrapy bloom import`: from all kinds of sources, into files and into Redis."""

import os
from pathlib import Path

import pytest
import redis
from scrapy import Request
from scrapy_redis.dupefilter import RFPDupeFilter

from scrapy_bloom import ScrapyRedisFingerprinter
from scrapy_bloom.job.reader import FilterReader
from tests.support import servers
from tests.support.cli import bloom
from tests.support.crawls import Crawl
from tests.support.shell import run_in_shell
from tests.support.sites import Site
from tests.support.workspace import (
    fingerprints,
    make_filter,
    start_project,
    urls,
    write_seen,
    write_urls,
)

PAGES = 40  # of the tree
SCRAPY_REDIS = ("-s", "REQUEST_FINGERPRINTER_CLASS=scrapy_bloom.ScrapyRedisFingerprinter")


# From where.


def test_requests_seen_of_a_real_crawl(tree: Site, tmp_path: Path) -> None:
    scrapys = {"JOBDIR": "old", "DUPEFILTER_CLASS": None}
    Crawl.finished(tree.url, tmp_path, scrapys)
    assert len(tree.hits) == PAGES
    ran = bloom("import", "old/requests.seen", "new", "--json", cwd=tmp_path)
    assert ran.json["read"] == ran.json["new"] >= PAGES - 1
    assert not ran.err
    tree.hits.clear()
    Crawl.finished(tree.url, tmp_path, {"JOBDIR": "new"})
    assert len(tree.hits) == 1  # the start page


def test_requests_seen_that_is_cut_off(tmp_path: Path) -> None:
    path = write_seen(tmp_path / "requests.seen", fingerprints(urls(range(300))))
    path.write_bytes(path.read_bytes()[:-3])
    ran = bloom("import", path, "filter", cwd=tmp_path)
    assert "299 of them new" in ran.out
    assert "ends with an incomplete request" in ran.err


def paused(path: Path, *, killed: bool = False) -> None:
    """What Scrapy's own scheduler leaves of a job that was paused, or then killed."""
    (path / "requests.queue/0").mkdir(parents=True)
    write_seen(path / "requests.seen", fingerprints(urls(range(10))))
    (path / "requests.queue/0/q00000").write_bytes(b"x")
    (path / "requests.queue/active.json").write_text("[0]")
    if killed:  # resumed, and then: the state is older than the queue
        for file in [path / "requests.queue/active.json"]:
            os.utime(file, (0, 0))


def test_requests_seen_next_to_a_queue(tmp_path: Path) -> None:
    """The requests in the queue are recorded, so the new filter would never let them be crawled."""
    paused(tmp_path / "old")
    refused = bloom("import", "old/requests.seen", "filter", cwd=tmp_path)
    assert "and would be skipped as duplicates" in refused.error
    assert "copy the file to another directory" in refused.error
    assert not (tmp_path / "filter").exists()
    write_urls(tmp_path / "urls.txt", urls(range(5)))
    assert bloom("import", "urls.txt", "old", "--json", cwd=tmp_path).json["new"] == 0
    assert bloom("info", "old", "--json", cwd=tmp_path).json["recorded"] == 10


def test_a_killed_job_stays_known_as_one(tmp_path: Path) -> None:
    """Nothing that is put into its directory may hide that its queue is broken."""
    paused(tmp_path / "job", killed=True)
    make_filter(tmp_path / "other", fingerprints(urls(range(5))))
    write_urls(tmp_path / "urls.txt", urls(range(5)))
    for source in ("job/requests.seen", "urls.txt"):
        assert "was killed" in bloom("import", source, "job", cwd=tmp_path).error
    assert "was killed" in bloom("import", "job/requests.seen", "elsewhere", cwd=tmp_path).error
    assert "job exists already" in bloom("copy", "other", "job", cwd=tmp_path).error
    assert not (tmp_path / "job/bloom.sqlite").exists()


def test_the_projects_fingerprinter_and_the_spiders_settings(tmp_path: Path) -> None:
    project = start_project(tmp_path / "work")
    (project / "shopping/spiders/shop.py").write_text(
        "import hashlib\nimport scrapy\n"
        "class Lower:\n"
        "    def fingerprint(self, request):\n"
        "        return hashlib.md5(request.url.lower().encode()).digest()\n"
        "class Shop(scrapy.Spider):\n"
        "    name = 'shop'\n"
        "    custom_settings = {'REQUEST_FINGERPRINTER_CLASS': Lower, 'BLOOM_ERROR_RATE': 0.01}\n"
    )
    (project / "urls.txt").write_text("https://shop.example/A\nhttps://shop.example/a\n")
    ran = bloom("import", "urls.txt", "filter", "--spider", "shop", "--json", cwd=project)
    assert (ran.json["read"], ran.json["new"]) == (2, 1)
    figures = bloom("info", "filter", "--json", cwd=project).json
    assert figures["fingerprinter"] == "shopping.spiders.shop.Lower"
    assert figures["spider"] == "shop"
    assert figures["error_rate_at_capacity"] == 0.005
    other = bloom("import", "urls.txt", "filter", cwd=project)
    assert "REQUEST_FINGERPRINTER_CLASS" in other.error
    unknown = bloom("import", "urls.txt", "filter", "--spider", "shoe", cwd=project)
    assert unknown.status == 2
    assert "this project has no such spider; it has: shop" in unknown.err


def test_a_set_of_scrapy_redis(server: servers.Server, tmp_path: Path) -> None:
    """With the fingerprints that scrapy-redis itself makes."""
    spider = tmp_path.name
    theirs = RFPDupeFilter(redis.Redis.from_url(server.url), f"{spider}:dupefilter")
    requests = [
        *[Request(url) for url in urls(range(249))],
        Request("https://shop.example/?b=2&a=%20ü#x"),
        Request("https://shop.example/", method="POST", body=b"a=1"),
    ]
    for request in requests:
        assert not theirs.request_seen(request)
    command = f"redis-cli -u {server.url} --raw SMEMBERS {spider}:dupefilter > seen.txt"
    assert run_in_shell(command, tmp_path).returncode == 0
    ran = bloom("import", "seen.txt", "filter", *SCRAPY_REDIS, "--json", cwd=tmp_path)
    assert ran.json["new"] == 251
    fingerprinter = ScrapyRedisFingerprinter()
    found = FilterReader(tmp_path / "filter/bloom.sqlite").are_seen(
        [fingerprinter.fingerprint(request) for request in requests]
    )
    assert all(found)


# Where to.


def test_a_new_filter_grows(tmp_path: Path) -> None:
    size = ("-s", "BLOOM_EXPECTED_REQUESTS=2k", "-s", "BLOOM_ERROR_RATE=1e-3")
    stdin = "\n".join(urls(range(5000)))
    assert bloom("import", "-", "other", *size, cwd=tmp_path, stdin=stdin).status == 0
    figures = bloom("info", "other", "--json", cwd=tmp_path).json
    assert (figures["capacity"], len(figures["generations"])) == (2000 + 4000, 2)
    assert figures["error_rate_now"] < 1e-3


SAFE = "scrapy_bloom.CrashSafeScheduler"
SCRAPYS = "scrapy.core.scheduler.Scheduler"


@pytest.mark.parametrize("scheduler", [SAFE, SCRAPYS])
def test_import_into_a_job_that_was_reset(scheduler: str, tree: Site, tmp_path: Path) -> None:
    settings = {"JOBDIR": "job", "SCHEDULER": scheduler}
    Crawl.finished(tree.url, tmp_path, settings)
    assert bloom("reset", "job", "--yes", cwd=tmp_path).status == 0
    crawled = [f"{tree.url}p/{page}?a=2&b=1" for page in range(PAGES)]
    write_urls(tmp_path / "urls.txt", crawled)
    ran = bloom("import", "urls.txt", "job", cwd=tmp_path)
    assert ran.status == 0, ran
    tree.hits.clear()
    Crawl.finished(tree.url, tmp_path, settings)
    assert set(tree.hits) == {"/p/0"}  # the start page, which is not filtered
    for command in (("info", "job"), ("check", "job", "urls.txt"), ("reset", "job", "--yes")):
        assert bloom(*command, cwd=tmp_path).status == 0, command

"""`scrapy bloom forget`: single requests are crawled again; and which statuses are no failures."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import servers
from tests.support.cli import bloom
from tests.support.crawls import FAILING_SPIDER, Crawl
from tests.support.sites import ScriptedSite

PAGES = [f"/{number}" for number in range(8)]
OPTIONS = {"ROBOTSTXT_OBEY": False, "RETRY_ENABLED": False}


@pytest.fixture
def site() -> Iterator[ScriptedSite]:
    site = ScriptedSite({"/": [tuple(PAGES)]})
    yield site
    site.end()


def crawled(site: ScriptedSite, directory: Path, settings: dict[str, object]) -> dict[str, int]:
    site.forget()
    run = Crawl.finished(site.url, directory, {**OPTIONS, **settings}, spider=FAILING_SPIDER)
    assert not run.our_lines("ERROR"), run.output
    return {path: count for path, count in site.hits.items() if path != "/"}


@pytest.mark.parametrize("where", ["files", "job", "redis"])
def test_single_requests_are_crawled_again(where: str, site: ScriptedSite, tmp_path: Path) -> None:
    key = f"{tmp_path.name}-{time.time_ns()}"
    url = servers.shared("valkey").url
    settings, place = {
        "files": ({"BLOOM_DIR": "filter"}, ("filter",)),
        "job": ({"JOBDIR": "job"}, ("job",)),
        "redis": (
            {"BLOOM_REDIS_URL": url, "BLOOM_REDIS_KEY": key},
            (url, "--key", key),
        ),
    }[where]
    assert set(crawled(site, tmp_path, settings)) == set(PAGES)
    urls = [f"{site.url}{number}" for number in range(3)]
    (tmp_path / "urls.txt").write_text(f"{urls[1]}\n{site.url}unknown\n")
    ran = bloom("forget", *place, urls[0], "--file", "urls.txt", "--json", cwd=tmp_path)
    assert ran.json == {"read": 3, "new": 1, "forgotten": 2, "skipped": 0}
    ran = bloom("forget", *place, "--file", "-", cwd=tmp_path, stdin=f"{urls[2]}\n")
    assert "1 request" in ran.out
    assert bloom("info", *place, "--json", cwd=tmp_path).json["forgotten"] == 3
    assert "3, crawled again" in bloom("info", *place, cwd=tmp_path).out
    seen = bloom("check", *place, "-", "--json", cwd=tmp_path, stdin="\n".join(urls))
    assert seen.json["new"] == 3
    assert crawled(site, tmp_path, settings) == {"/0": 1, "/1": 1, "/2": 1}
    assert crawled(site, tmp_path, settings) == {}
    assert bloom("info", *place, "--json", cwd=tmp_path).json["forgotten"] == 0


def test_a_crawl_that_runs_notices(site: ScriptedSite, tmp_path: Path) -> None:
    """Pages in a row, each of which links to the first ones."""
    site.answers = {f"/{n}": [(f"/{n + 1}", "/0", "/1")] for n in range(60)}
    site.answers["/"] = [("/0",)]
    site.delay = 0.1  # so that the crawl takes longer than the second within which it notices
    settings = {**OPTIONS, "JOBDIR": "job", "CONCURRENT_REQUESTS": 1}
    run = Crawl.held(site, 7, tmp_path, settings, spider=FAILING_SPIDER)
    ran = bloom("forget", "job", f"{site.url}0", f"{site.url}1", cwd=tmp_path)
    assert ran.status == 0, ran
    site.release()
    run.wait_until(lambda: site.hits["/0"] == site.hits["/1"] == 2)
    site.delay = 0.0
    assert run.finish() == 0, run.output
    assert max(site.hits.values()) == 2
    assert len(site.hits) == 62


def test_what_it_refuses(site: ScriptedSite, tmp_path: Path) -> None:
    assert "holds no filter" in bloom("forget", "nothing", site.url, cwd=tmp_path).error
    crawled(site, tmp_path, {"BLOOM_DIR": "filter"})
    for url in ("example.org", "https://[::1"):
        ran = bloom("forget", "filter", url, cwd=tmp_path)
        assert f"{url!r} is not a URL" in ran.error
    ran = bloom("forget", "filter", cwd=tmp_path)
    assert ran.status == 2
    assert "which requests?" in ran.err
    other = "REQUEST_FINGERPRINTER_CLASS=scrapy_bloom.ScrapyRedisFingerprinter"
    ran = bloom("forget", "filter", site.url, "-s", other, cwd=tmp_path)
    assert "would find nothing in it" in ran.error
    assert not (tmp_path / "filter/forgotten.sqlite").exists()


def test_reset_and_copy_take_it_along(site: ScriptedSite, tmp_path: Path) -> None:
    crawled(site, tmp_path, {"BLOOM_DIR": "filter"})
    bloom("forget", "filter", f"{site.url}0", f"{site.url}1", cwd=tmp_path)
    url, key = servers.shared("valkey").url, f"{tmp_path.name}-{time.time_ns()}"
    place = (url, "--key", key)
    assert bloom("copy", "filter", *place, cwd=tmp_path).status == 0
    assert bloom("info", *place, "--json", cwd=tmp_path).json["forgotten"] == 2
    assert bloom("copy", url, "copy", "--key", key, cwd=tmp_path).status == 0
    assert bloom("copy", "filter", "copy", "merged", cwd=tmp_path).status == 0
    for each in ("copy", "merged"):
        assert bloom("info", each, "--json", cwd=tmp_path).json["forgotten"] == 2
    assert crawled(site, tmp_path, {"BLOOM_DIR": "merged/bloom"}) == {"/0": 1, "/1": 1}
    assert bloom("reset", "merged", "--yes", cwd=tmp_path).status == 0
    assert [path.name for path in (tmp_path / "merged/bloom").iterdir()] == ["lock"]
    assert bloom("reset", *place, "--yes", cwd=tmp_path).status == 0
    client = servers.shared("valkey").client
    assert not client.keys(f"*{key}*:forgotten*")


@pytest.mark.parametrize("how", [{"BLOOM_FORGET_FAILED": True}, {"BLOOM_RECORD_ON": "crawled"}])
def test_a_page_that_is_gone_has_not_failed(
    how: dict[str, object], site: ScriptedSite, tmp_path: Path
) -> None:
    site.answers |= {"/0": [404], "/1": [410], "/2": [403], "/3": [500]}
    settings = {"BLOOM_DIR": "filter", **how}
    assert set(crawled(site, tmp_path, settings)) == set(PAGES)
    assert set(crawled(site, tmp_path, settings)) == {"/2", "/3"}
    site.answers |= {"/2": [404], "/3": [410]}
    assert set(crawled(site, tmp_path, settings)) == {"/2", "/3"}
    assert not crawled(site, tmp_path, settings)

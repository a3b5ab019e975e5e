"""Which requests count as failed or as crawled: real crawls of pages that fail in all ways."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from scrapy import Request
from scrapy.utils.request import fingerprint

from tests.support.backends import local_backend
from tests.support.crawls import FAILING_SPIDER, Crawl
from tests.support.sites import ScriptedSite

# How each path ends. What is neither failed nor crawled was left out on purpose, or is not done.
FAILED = [
    "status-500",
    "status-403",
    "dropped",
    "errback-500",
    "errback-dropped",
    "errback-raises-500",
    "bad-input",
    "raises-at-once",
    "raises-later",
    "async-raises",
    "retried-500",
    "copied-500",
    "swallowed-raises-at-once",
    "swallowed-raises-later",
    "swallowed-async-raises",
    "captcha-then-500",
    "captcha-then-dropped",
    "captcha-then-raises-at-once",
    "captcha-by-middleware-then-500",
    "captcha-async-then-moved",
    "errback-fresh-500",
]
CRAWLED = [
    "form",
    "errback-again",
    "fine",
    "async-fine",
    "flaky",
    "retried",
    "allowed-410",
    "answered-404",
    "item-dropped",
    "copied-fine",
    "captcha",
    "captcha-by-middleware",
    "errback-fresh",
]
NEITHER = ["ignored", "refused", "robots", "item-error", "rewrapped-item-error"]
ANSWERS = {
    "/robots.txt": [b"User-agent: *\nDisallow: /robots\n"],
    "/status-500": [500],
    "/status-403": [403],
    "/answered-404": [404],
    "/dropped": [None],
    "/errback-500": [500],
    "/errback-dropped": [None],
    "/errback-raises-500": [500],
    "/flaky": [503, ()],
    "/errback-again": [503, 503, ()],
    "/retried-500": [(), 500],
    "/copied-500": [500],
    "/allowed-410": [410],
    "/moved-to-fine": ["/moved-here"],
    "/moved-to-500": ["/moved-500"],
    "/moved-500": [500],
    "/moved-twice": ["/moved-on"],
    "/moved-on": ["/moved-flaky"],
    "/moved-flaky": [503, 503],
    "/moved-to-known": ["/fine"],
    "/unfiltered-500": [500],
    "/captcha": [b"captcha", ()],
    "/captcha-by-middleware": [b"captcha", ()],
    "/captcha-then-500": [b"captcha", 500],
    "/captcha-then-dropped": [b"captcha", None],
    "/captcha-then-raises-at-once": [b"captcha", ()],
    "/captcha-by-middleware-then-500": [b"captcha", 500],
    "/captcha-async-then-moved": [b"captcha", "/awaited-500"],
    "/awaited-500": [500],
    "/errback-fresh": [503, 503, ()],
    "/errback-fresh-500": [500],
    "/moved-to-captcha": ["/moved-captcha", ()],
    "/moved-to-captcha-then-500": ["/moved-captcha-then-500", 500],
    "/moved-captcha": [b"captcha"],
    "/moved-captcha-then-500": [b"captcha"],
    "/replaced-500-elsewhere": [500],
}
REPLACED_FAILED = ["replaced-500", "replaced-500-elsewhere"]
REPLACED_CRAWLED = ["replaced-fine", "replaced-fine-elsewhere"]
MOVED_FAILED = [
    *REPLACED_FAILED,
    "moved-to-500",
    "moved-500",
    "moved-twice",
    "moved-on",
    "moved-flaky",
    "moved-to-captcha-then-500",
    "moved-captcha-then-500",
]
MOVED_CRAWLED = [
    *REPLACED_CRAWLED,
    "moved-to-fine",
    "moved-here",
    "moved-to-captcha",
    "moved-captcha",
]


@pytest.fixture
def site() -> Iterator[ScriptedSite]:
    answers = {path: list(each) for path, each in ANSWERS.items()}
    paths = [*FAILED, *CRAWLED, *NEITHER, *(p.strip("/") for p in ANSWERS if "/moved-t" in p)]
    paths += ["replaced-500", "replaced-fine", "unfiltered-500"]
    # Some with a fragment, as links have: a response's URL is without.
    answers["/"] = [tuple(f"/{path}{'#top' * ('captcha' in path)}" for path in paths)]
    with ScriptedSite(answers) as site:
        yield site


def crawl(site: ScriptedSite, directory: Path, **settings: object) -> Crawl:
    return Crawl.finished(
        site.url, directory, {"BLOOM_DIR": directory / "filter", **settings}, spider=FAILING_SPIDER
    )


def recorded(site: ScriptedSite, directory: Path, paths: list[str]) -> dict[str, bool]:
    """Return which of the paths a later run would report as duplicates."""
    backend = local_backend(
        directory / "filter",
        capacity=1,
        error_rate=0.1,
        fingerprinter="scrapy.utils.request.RequestFingerprinter",
    )
    backend.open()
    found = {path: fingerprint(Request(site.url + path)) in backend for path in paths}
    backend.close()
    return found


ALL = [*FAILED, *CRAWLED, *NEITHER, *MOVED_FAILED, *MOVED_CRAWLED]


def test_what_failed_for_good_is_forgotten(site: ScriptedSite, tmp_path: Path) -> None:
    run = crawl(site, tmp_path, BLOOM_FORGET_FAILED=True)
    found = recorded(site, tmp_path, [*ALL, "moved-to-known"])
    assert [path for path in found if not found[path]] == [*FAILED, *MOVED_FAILED]
    assert f"'bloom/forgotten': {len(FAILED) + len(MOVED_FAILED)}," in run.output
    assert not run.our_lines("ERROR")


def test_only_what_was_crawled_is_recorded(site: ScriptedSite, tmp_path: Path) -> None:
    run = crawl(site, tmp_path, BLOOM_RECORD_ON="crawled")
    found = recorded(site, tmp_path, ALL)
    assert [path for path in found if found[path]] == [*CRAWLED, *MOVED_CRAWLED]
    assert not run.our_lines("ERROR")

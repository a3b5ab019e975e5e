"""A run that is longer than the time window: what it has recorded does not expire within it."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scrapy_bloom.generations.backend import Backend
from scrapy_bloom.redis.connection.server import RedisServer
from tests.support import servers
from tests.support.backends import local_backend, redis_backend
from tests.support.clock import Clock
from tests.support.crawls import Crawl, spider_with, with_modules
from tests.support.sites import Site, tree_site
from tests.support.workspace import outliving

WINDOW = 1000.0
NewBackend = Callable[..., Backend]


@pytest.fixture
def clock() -> Clock:
    return Clock()


def in_redis(path: Path, **options: object) -> Backend:
    server = RedisServer(servers.shared("valkey").url, deadline_secs=10)
    return redis_backend(server, os.fspath(path), **options)


def in_files(path: Path, **options: object) -> Backend:
    return local_backend(path / "kept", sync_secs=0, **options)


def in_memory(path: Path, **options: object) -> Backend:
    return local_backend(None, **options)


@pytest.fixture(params=[in_files, in_memory, in_redis], ids=["files", "memory", "redis"])
def new(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> NewBackend:
    def begun(**options: object) -> Backend:
        options = {"capacity": 400, "error_rate": 1e-2, "window_secs": WINDOW, **options}
        backend = request.param(tmp_path, clock=clock, **options)
        backend.open()
        backend.begin()
        return backend

    return begun


def pages(*numbers: int) -> list[bytes]:
    return [b"page %d" % number for number in range(*numbers)]


@pytest.mark.parametrize("on_full", ["grow", "warn"])
def test_it_is_kept_and_errs_no_more_than_asked_for(
    new: NewBackend, clock: Clock, on_full: str
) -> None:
    backend = new(on_full=on_full)
    recorded: list[bytes] = []
    for step in range(60):  # of a tenth of the window each: six windows in all
        if step < 10:
            recorded += [page for page in pages(100 * step, 100 * step + 100) if backend.add(page)]
        for page in pages(10**6 + 10 * step, 10**6 + 10 * step + 10):
            backend.add(page)
        status = backend.status()
        asked = [*status.generations, *status.volatile]
        assert sum(each.error_rate for each in asked) <= 1e-2
        clock.now += WINDOW / 10
    assert len(recorded) > 980
    assert not any(map(backend.add, recorded))
    assert all(page in backend for page in recorded)
    assert len(asked) <= 20
    wrong = sum(page in backend for page in pages(10**7, 10**7 + 20_000))
    assert wrong / 20_000 <= 1e-2
    backend.close()


def test_the_next_run_does_not_know_it(new: NewBackend, clock: Clock) -> None:
    options = {"error_rate": 1e-12}
    backend = new(**options)
    assert backend.add(b"old")
    clock.now += 1.5 * WINDOW
    assert backend.add(b"young")
    clock.now += 1
    assert b"old" in backend
    status = backend.status()
    assert (status.count, sum(each.count for each in status.volatile)) == (1, 1)
    location = status.location
    backend.close()
    if location == "memory":
        return
    backend = new(**options)
    assert b"old" not in backend
    assert not backend.add(b"young")
    backend.close()


def test_another_crawler_that_lets_it_expire(tmp_path: Path, clock: Clock) -> None:
    options = {"capacity": 400, "error_rate": 1e-12, "window_secs": WINDOW, "clock": clock}
    first = in_redis(tmp_path, **options)
    first.open()
    first.begin()
    assert first.add(b"old")
    clock.now += 1.3 * WINDOW
    second = in_redis(tmp_path, **options)  # it has not recorded that
    second.open()
    second.begin()
    assert second.add(b"old")
    assert not first.add(b"old")
    clock.now += 0.6 * WINDOW
    assert second.add(b"young")
    assert b"old" in first
    assert b"old" in second  # its own
    # A clear is another matter.
    first.clear()
    assert first.add(b"old")
    assert not second.add(b"old")
    for each in (first, second):
        each.close()


@pytest.fixture
def few_pages() -> Iterator[Site]:
    site = tree_site(pages=40)
    yield site
    site.end()


@pytest.mark.parametrize("kind", ["file", "redis", "no mirror", "crawled"])
def test_each_page_is_crawled_once(kind: str, few_pages: Site, tmp_path: Path) -> None:
    settings = outliving("redis" if kind == "no mirror" else kind, tmp_path)
    if kind == "no mirror":
        settings["BLOOM_REDIS_MIRROR"] = False
    few_pages.delay = 0.1
    crawl = Crawl(
        few_pages.url,
        tmp_path,
        {
            **settings,
            "BLOOM_WINDOW_SECS": 0.2,  # while it takes a second and more
            "CONCURRENT_REQUESTS": 4,
            "CLOSESPIDER_PAGECOUNT": 200,  # else it never ends
        },
    )
    assert crawl.finish() == 0, crawl.output
    assert "'finish_reason': 'finished'" in crawl.output
    assert len(few_pages.hits) == 40
    # The start URL is asked for without the filter.
    assert [page for page, number in few_pages.hits.items() if number > 1] in ([], ["/p/0"])
    (warning,) = crawl.told("WARNING")
    assert "This crawl has lasted for longer than BLOOM_WINDOW_SECS (0.2 seconds)" in warning


JUMPING = """
import time

now, time.ahead = time.time, 0
time.time = lambda: now() + time.ahead
"""
JUMPS = """
import time

parse, pages = LinkSpider.parse, 0

def jump(self, response):
    global pages
    pages += 1
    time.ahead += 5000 * (pages % 8 == 0)  # more than a window and a quarter
    yield from parse(self, response)

LinkSpider.parse = jump
"""


@pytest.mark.parametrize("kind", ["file", "crawled"])
def test_a_machine_that_sleeps_in_mid_run(kind: str, few_pages: Site, tmp_path: Path) -> None:
    """Its clock is far ahead then; so it is when it is put forward."""
    (tmp_path / "sitecustomize.py").write_text(JUMPING)
    crawl = Crawl(
        few_pages.url,
        tmp_path,
        {
            **outliving(kind, tmp_path),
            "BLOOM_WINDOW_SECS": 4000,
            "DOWNLOAD_TIMEOUT": 10**6,  # by the same clock
            "CONCURRENT_REQUESTS": 4,
            "CLOSESPIDER_PAGECOUNT": 200,  # else it may never end
        },
        spider=spider_with(tmp_path, JUMPS),
        prefix=("env", f"PYTHONPATH={with_modules(tmp_path)['PYTHONPATH']}"),
    )
    assert crawl.finish() == 0, crawl.output
    assert "'finish_reason': 'finished'" in crawl.output
    assert len(few_pages.hits) == 40
    assert [page for page, number in few_pages.hits.items() if number > 1] in ([], ["/p/0"])
    (warning,) = crawl.told("WARNING")
    assert "This crawl has lasted for longer than BLOOM_WINDOW_SECS (4000 seconds)" in warning

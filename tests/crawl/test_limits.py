"""Limits of downloads per host, of all workers of a queue together."""

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scrapy_bloom.queues.store import State
from tests.support import servers
from tests.support.crawls import Crawl
from tests.support.shared_crawls import SharedCrawl
from tests.support.sites import ScriptedSite

SAFE = {"SCHEDULER": "scrapy_bloom.CrashSafeScheduler"}
# Hosts differ by their ports here, and Scrapy's slots would not.
SPIDER = """
import scrapy

class HostsSpider(scrapy.Spider):
    name = "hosts"

    async def start(self):
        for site in self.url.split(","):
            base, pages = site.rsplit("*")
            for number in range(int(pages)):
                yield scrapy.Request(f"{base}{number}", meta={"download_slot": base})

    def parse(self, response):
        pass
"""


class Host(ScriptedSite):
    """A site that notes when it was asked, and by how many at a time at most."""

    def __init__(self, delay: float) -> None:
        super().__init__({})
        self.delay = delay
        self.most = 0
        self.asked: list[float] = []

    def hit(self, path: str) -> None:
        self.asked.append(time.monotonic())
        self.most = max(self.most, self.under_way + 1)
        super().hit(path)


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    hosts = [Host(0.05) for _ in range(3)]
    yield hosts
    for host in hosts:
        host.end()


def arguments(hosts: list[Host], pages: list[int], directory: Path) -> dict[str, Any]:
    spider = directory / "hosts.py"
    spider.write_text(SPIDER)
    urls = ",".join(f"{host.url}*{number}" for host, number in zip(hosts, pages, strict=True))
    return {"url": urls, "spider": spider}


def test_workers_keep_to_the_limits_together(hosts: list[Host], tmp_path: Path) -> None:
    delayed, narrow, usual = hosts
    pages = [12, 40, 160]
    slots = {
        delayed.url: {"concurrency": 2, "delay": 0.2, "randomize_delay": False},
        narrow.url: {"concurrency": 2},
    }
    settings = {
        **SAFE,
        "BLOOM_REDIS_URL": servers.shared("valkey").url,
        "BLOOM_REDIS_KEY": str(tmp_path),
        "CONCURRENT_REQUESTS_PER_DOMAIN": 6,
        "DOWNLOAD_SLOTS": repr(slots).replace("False", "false").replace("'", '"'),
    }
    given = arguments(hosts, pages, tmp_path)
    workers = [Crawl(work_dir=tmp_path / f"{n}", settings=settings, **given) for n in range(4)]
    for worker in workers:
        assert worker.finish() == 0, worker.output
        assert not worker.our_lines("WARNING"), worker.output
    assert [host.total() for host in hosts] == [len(host.hits) for host in hosts] == pages
    assert narrow.most <= 2
    assert usual.most <= 6
    assert delayed.most <= 2
    gaps = [after - before for before, after in zip(delayed.asked, delayed.asked[1:], strict=False)]
    # The queue hands these out 0.2 s apart; one that is slow to reach the site changes two gaps.
    assert statistics.median(gaps) > 0.18
    assert delayed.asked[-1] - delayed.asked[0] > 0.18 * len(gaps)
    assert usual.most > 2


def shared(hosts: list[Host], directory: Path, code: str = "", **settings: Any) -> SharedCrawl:
    """A crawl of hosts by workers that share the limits; 12 pages of each."""
    crawl = SharedCrawl(hosts[0], directory, BLOOM_SHARED_LIMITS=True, **settings)
    urls = ",".join(f"{host.url}*12" for host in hosts)
    crawl.spider.write_text(SPIDER.replace("self.url", repr(urls)) + code)
    return crawl


def test_a_host_without_its_worker_is_served_by_others(hosts: list[Host], tmp_path: Path) -> None:
    """As soon as it is known that the worker was killed."""
    crawl = shared(hosts, tmp_path, CONCURRENT_REQUESTS_PER_DOMAIN=1)
    (killed,) = crawl.hold(1, 1)
    other = crawl.start()
    killed.kill()
    crawl.end_leases(killed)
    crawl.finish(other)
    assert [len(host.hits) for host in hosts] == [12, 12, 12]
    assert [host.most for host in hosts[1:]] == [1, 1]


# A middleware that waits for a file. It holds back one page, or all of them.
SLEEPY = """
import asyncio
from pathlib import Path

class Sleepy:
    async def process_%s(self, request, %s):
        while request.url.endswith("%s") and not Path(__file__).with_name("go on").exists():
            await asyncio.sleep(0.01)
        %s

HostsSpider.custom_settings = {"DOWNLOADER_MIDDLEWARES": {Sleepy: 900}}
"""
IN_REQUEST = ("request", "response=None", "")
IN_RESPONSE = ("response", "response", "return response")


@pytest.mark.parametrize(("limit", "place"), [(1, IN_REQUEST), (8, IN_RESPONSE)])
def test_a_page_that_sleeps_in_a_middleware_holds_no_other_back(
    limit: int, place: tuple[str, str, str], hosts: list[Host], tmp_path: Path
) -> None:
    code = SLEEPY % (*place[:2], "/0", place[2])
    crawl = shared(hosts, tmp_path, code, CONCURRENT_REQUESTS_PER_DOMAIN=limit)
    crawl.start(2)
    servers.wait_for(lambda: crawl.state().done == 33, lambda: f"{crawl.state()}")
    assert [host.total() for host in hosts] == 3 * [11 if place == IN_REQUEST else 12]
    (tmp_path / "go on").touch()
    crawl.finish()
    assert [len(host.hits) for host in hosts] == [12, 12, 12]
    assert max(host.most for host in hosts) <= limit


def test_pages_that_wake_up_together_keep_to_the_limit(hosts: list[Host], tmp_path: Path) -> None:
    """As after robots.txt: Scrapy alone would begin all of these downloads at once."""
    code = SLEEPY % (*IN_REQUEST[:2], "", "")
    crawl = shared(hosts, tmp_path, code, CONCURRENT_REQUESTS_PER_DOMAIN=2)
    crawl.start(2)
    servers.wait_for(lambda: crawl.count(State.IN_FLIGHT) > 20, lambda: f"{crawl.state()}")
    (tmp_path / "go on").touch()
    crawl.finish()
    assert [len(host.hits) for host in hosts] == [12, 12, 12]
    assert max(host.most for host in hosts) <= 2


def test_a_worker_without_a_host_says_so_once(hosts: list[Host], tmp_path: Path) -> None:
    """The second worker, or the third: one of them may get the host from the first one."""
    crawl = shared(hosts[:1], tmp_path, CONCURRENT_REQUESTS_PER_DOMAIN=1)
    hosts[0].hold_after(1)
    crawl.start()
    servers.wait_for(hosts[0].is_holding, lambda: crawl.workers[0].output)
    crawl.start(2)
    text = "it has no share of a host with pending requests"
    servers.wait_for(lambda: bool(crawl.our_lines(text)), lambda: crawl.workers[1].output)
    crawl.finish()
    for worker in crawl.workers:
        assert len([line for line in worker.our_lines("INFO") if text in line]) <= 1
    assert len(hosts[0].hits) == 12

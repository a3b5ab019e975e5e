"""Requests in flight with CrashSafeScheduler: their number, and requests that kill the process."""

import re
from pathlib import Path

from scrapy_bloom.job.jobdir import FILE
from tests.support.cli import bloom
from tests.support.crawls import Crawl, spider_with
from tests.support.request_queues import counts_in
from tests.support.sites import Site

PAGES = 51  # of the tree
SAFE = {
    "SCHEDULER": "scrapy_bloom.CrashSafeScheduler",
    "JOBDIR": "job",
    "CONCURRENT_REQUESTS": 8,
}


def test_callbacks_that_wait_for_a_page_that_is_queued(tree: Site, tmp_path: Path) -> None:
    """As for a login: it comes last, and 40 callbacks wait for it. Any number may be in flight."""
    spider = tmp_path / "waiting.py"
    spider.write_text(
        "import scrapy\n"
        "from scrapy.utils.defer import maybe_deferred_to_future\n"
        "from twisted.internet.defer import Deferred\n"
        "class Waiting(scrapy.Spider):\n"
        "    name = 'waiting'\n"
        "    waiting, is_released = [], False\n"
        "    def __init__(self, url): self.url = url\n"
        "    async def start(self):\n"
        "        for n in range(40):\n"
        "            yield scrapy.Request(f'{self.url}/p/{n}', self.wait, priority=1)\n"
        "        yield scrapy.Request(f'{self.url}/p/50', self.login)\n"
        "    async def wait(self, response):\n"
        "        if self.is_released: return\n"  # the login overtook it
        "        self.waiting.append(Deferred())\n"
        "        await maybe_deferred_to_future(self.waiting[-1])\n"
        "    def login(self, response):\n"
        "        self.is_released = True\n"
        "        for each in self.waiting: each.callback(None)\n"
        "        self.logger.info('released %d', len(self.waiting))\n"
    )
    crawl = Crawl.finished(tree.url.rstrip("/").removesuffix("/p/0"), tmp_path, SAFE, spider=spider)
    released = re.search(r"released (\d+)", crawl.output)
    assert released is not None
    assert int(released[1]) > 2 * SAFE["CONCURRENT_REQUESTS"]
    assert counts_in(tmp_path / "job" / FILE) == (0, 0)


def test_a_page_that_kills_its_process(tree: Site, tmp_path: Path) -> None:
    spider = spider_with(
        tmp_path,
        "import os, signal\n"
        "parse = LinkSpider.parse\n"
        "def deadly(self, response):\n"
        "    if '/p/7?' in response.url: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return parse(self, response)\n"
        "LinkSpider.parse = deadly\n",
    )
    deaths = 0
    while (crawl := Crawl(tree.url, tmp_path, SAFE, spider=spider)).finish() != 0:
        deaths += 1
        assert deaths <= 5, crawl.output
    assert deaths == 4
    (line,) = crawl.our_lines("ERROR")
    assert re.search(r"/p/7\?\S* was in flight in 4 processes that died", line)  # as linked first
    beyond = {f"/p/{number}" for number in (15, 16, 31, 32, 33, 34)}  # reached by that page alone
    assert len(tree.hits) >= PAGES - len(beyond)
    assert "'finish_reason': 'finished'" in crawl.output
    (dead,) = bloom("queue", "job", "--dead", "--json", cwd=tmp_path).json["requests"]
    assert "/p/7?" in dead["url"]
    Crawl.finished(tree.url, tmp_path, SAFE, spider=spider)
    ran = bloom("queue", "job", "--dead", "--requeue", "--yes", cwd=tmp_path)
    assert ran.out == "1 dead request of job will be crawled again\n"
    assert counts_in(tmp_path / "job" / FILE) == (1, 0)
    Crawl.finished(tree.url, tmp_path, SAFE)
    assert len(tree.hits) == PAGES
    assert bloom("queue", "job", "--dead", "--json", cwd=tmp_path).json["requests"] == []

"""CrashSafeScheduler with a queue that cannot be written: the crawl ends, and can be resumed."""

from pathlib import Path

from scrapy_bloom.job.jobdir import FILE
from tests.support.crawls import Crawl, spider_with
from tests.support.request_queues import counts_in
from tests.support.sites import Site

PAGES = 60
SAFE = {"SCHEDULER": "scrapy_bloom.CrashSafeScheduler", "JOBDIR": "job"}


def test_pages_whose_links_were_refused_are_not_done(tree: Site, tmp_path: Path) -> None:
    """Not even if there is room again at the close."""
    spider = spider_with(
        tmp_path,
        "import os, resource\n"
        "infinity = resource.RLIM_INFINITY\n"
        "parse = LinkSpider.parse\n"
        "def filling(self, response):\n"
        "    if '/p/20?' in response.url:\n"
        "        size = os.path.getsize('job/bloom.sqlite-wal')\n"
        "        resource.setrlimit(resource.RLIMIT_FSIZE, (size, infinity))\n"
        "    yield from parse(self, response)\n"
        "class Room:\n"
        "    def close_spider(self):\n"  # before the scheduler is closed
        "        resource.setrlimit(resource.RLIMIT_FSIZE, (infinity, infinity))\n"
        "LinkSpider.parse = filling\n"
        "LinkSpider.custom_settings = {'ITEM_PIPELINES': {Room: 1}}\n",
    )
    tree.delay = 0.05
    crawl = Crawl(tree.url, tmp_path, SAFE, spider=spider)
    crawl.finish()
    (line,) = crawl.our_lines("ERROR")
    assert f"{tmp_path}/job/bloom.sqlite cannot be written or read" in line
    assert "'finish_reason': 'bloom_queue_failed'" in crawl.output
    assert len(tree.hits) < PAGES
    tree.delay = 0
    crawl = Crawl.finished(tree.url, tmp_path, SAFE)
    assert len(tree.hits) == PAGES
    assert counts_in(tmp_path / "job" / FILE) == (0, 0)


def test_a_crawl_that_can_take_nothing_has_not_finished(tree: Site, tmp_path: Path) -> None:
    """Nothing is under way then, but the spider must not look idle."""
    Crawl.held(tree, 20, tmp_path, SAFE).interrupt()
    spider = spider_with(
        tmp_path,
        "import sqlite3\n"
        "import scrapy_bloom.job.file\n"
        "scrapy_bloom.job.file._PATIENCE_MS = 200\n"
        "class Locking:\n"
        "    def open_spider(self):\n"  # after the scheduler, before the first request
        "        self.other = sqlite3.connect('job/bloom.sqlite', timeout=60)\n"
        "        self.other.execute('BEGIN IMMEDIATE')\n"
        "async def nothing(self):\n"
        "    return\n"
        "    yield\n"
        "LinkSpider.start = nothing\n"
        "LinkSpider.custom_settings = {'ITEM_PIPELINES': {Locking: 1}}\n",
    )
    before = dict(tree.hits)
    crawl = Crawl(tree.url, tmp_path, SAFE, spider=spider)
    crawl.finish()
    (line,) = crawl.our_lines("ERROR")
    assert "database is locked" in line
    assert "'finish_reason': 'bloom_queue_failed'" in crawl.output
    assert tree.hits == before
    crawl = Crawl.finished(tree.url, tmp_path, SAFE)
    assert len(tree.hits) == PAGES

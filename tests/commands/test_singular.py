"""One of something is told in the singular."""

from pathlib import Path

from tests.support import servers
from tests.support.cli import bloom, scrapy
from tests.support.workspace import fingerprints, make_filter, make_queue, urls

SPIDER = """
import scrapy

class Spider(scrapy.Spider):
    name = "one"
    custom_settings = {
        "DUPEFILTER_CLASS": "scrapy_bloom.BloomDupeFilter",
        "BLOOM_EXPECTED_REQUESTS": 1,
        "JOBDIR": "job",
    }

    async def start(self):
        yield scrapy.Request("data:,")

    def parse(self, response):
        pass
"""


def test_a_crawl(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(SPIDER)
    crawl = scrapy("runspider", "one.py", cwd=tmp_path)
    assert crawl.status == 0, crawl
    assert ": sized for 1 request at a false-positive rate of 1e-09, " in crawl.err
    assert "Bloom filter closed: 1 request recorded, 1 in all" in crawl.err
    assert "1 requests" not in crawl.err
    again = scrapy("runspider", "one.py", cwd=tmp_path)
    assert "Nothing new was crawled: 1 request was filtered, because" in again.err
    assert "1 requests" not in again.err


def test_the_commands(tmp_path: Path) -> None:
    make_filter(tmp_path / "one", fingerprints(urls(range(1))), capacity=1)
    url, key = servers.shared("valkey").url, ("--key", f"{tmp_path.name}:bloom")
    pushed = bloom("push", "one", url, *key, cwd=tmp_path)
    assert ": 1 request, 1 generation, " in pushed.out
    make_queue(url, key[1])
    pulled = bloom("pull", url, "two", *key, cwd=tmp_path)
    assert "skips its 1 request as duplicates" in pulled.err
    asked = bloom("reset", url, *key, cwd=tmp_path)
    assert ": 1 request, 8.0 KiB, and its queue with 1 request?" in asked.error
    assert "Deleted 1 file in two" in bloom("reset", "two", "--yes", cwd=tmp_path).out
    plan = bloom("plan", "1", "0.5", "--vs", cwd=tmp_path).out
    assert "\nInstead, for 1 request at 0.5\n" in plan
    page = bloom("report", "one", "-o", "-", cwd=tmp_path).out
    assert "With 1 of 1 request recorded, " in page
    assert "Now, with 1 request: " in page
    assert "1 requests" not in page

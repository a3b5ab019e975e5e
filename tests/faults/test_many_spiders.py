"""Many spiders in one process, each with its own filter: none knows what another one has seen."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scrapy_bloom.files.directory import FilterReader
from scrapy_bloom.files.file import FileGeneration
from tests.support.crawls import run_script
from tests.support.sites import ScriptedSite
from tests.support.workspace import fingerprints

SHARED = [f"/p/{number}" for number in range(6)]


# Prints what became of each, as JSON.
SPIDERS = """
import json
import logging
import sys

import scrapy
from scrapy.crawler import CrawlerProcess
from scrapy.linkextractors import LinkExtractor


class OneOfMany(scrapy.Spider):
    custom_settings = {
        "TELNETCONSOLE_ENABLED": False,
        "REMOTE_CONTROL_ENABLED": False,
        "DOWNLOAD_DELAY": 0,
        "CONCURRENT_REQUESTS_PER_DOMAIN": 16,
        "LOG_LEVEL": "INFO",
        "DUPEFILTER_CLASS": "scrapy_bloom.BloomDupeFilter",
        "BLOOM_EXPECTED_REQUESTS": 1000,
    }

    def __init__(self, url, **kwargs):
        super().__init__(**kwargs)
        self.start_urls = [url]
        self.pages = []

    def parse(self, response):
        self.pages.append(response.url)
        yield scrapy.Request(f"{self.start_urls[0]}only/for/{self.name}")
        for link in LinkExtractor().extract_links(response):
            yield scrapy.Request(link.url)


def main():
    number, url = int(sys.argv[1]), sys.argv[2]
    process = CrawlerProcess({"LOG_LEVEL": "WARNING"})
    crawlers = []
    for each in range(number):
        name = f"spider-{each}"
        settings = {**OneOfMany.custom_settings, "JOBDIR": f"jobs/{name}"}
        kind = type(name, (OneOfMany,), {"name": name, "custom_settings": settings})
        crawler = process.create_crawler(kind)
        crawlers.append(crawler)
        process.crawl(crawler, url=url)
    process.start()
    logging.disable()
    report = {
        crawler.spider.name: {
            "pages": crawler.spider.pages,
            "stats": {
                name: value
                for name, value in crawler.stats.get_stats().items()
                if name.startswith(("bloom/", "dupefilter/", "finish_reason"))
            },
        }
        for crawler in crawlers
    }
    print(json.dumps(report))


main()
"""


@pytest.fixture
def site() -> Iterator[ScriptedSite]:
    site = ScriptedSite({"/": [(*SHARED, *SHARED)]})
    yield site
    site.end()


def run(site: ScriptedSite, directory: Path, names: list[str]) -> dict[str, Any]:
    """What became of each spider; checks that nothing was told of, and that the process ended."""
    ran = run_script(SPIDERS, len(names), site.url, cwd=directory)
    assert ran.returncode == 0, ran.stderr[-3000:]
    told = [
        line for line in ran.stderr.splitlines() if "] ERROR: " in line or "[scrapy_bloom" in line
    ]
    assert not [line for line in told if "] INFO: " not in line]
    report: dict[str, Any] = json.loads(ran.stdout)
    assert sorted(report) == sorted(names)
    return report


def test_many_spiders_in_one_process_each_with_its_own_filter(
    site: ScriptedSite, tmp_path: Path
) -> None:
    """Each gets all pages of its own, once; and in the next run, none but the start page."""
    number = 12
    names = [f"spider-{each}" for each in range(number)]
    for is_first in (True, False):
        report = run(site, tmp_path, names)
        for name, spider in report.items():
            own = [site.url + "only/for/" + name, *(site.url + path[1:] for path in SHARED)]
            expected = [site.url, *own] if is_first else [site.url]
            assert sorted(spider["pages"]) == sorted(expected), name
            stats = spider["stats"]
            assert stats["finish_reason"] == "finished", name
            assert stats["bloom/added"] == (len(own) if is_first else 0), (name, stats)
            assert stats["bloom/count"] == len(own), name
    # The pages of all; the start page is asked for by each run.
    assert site.hits["/"] == 2 * number
    assert all(site.hits[path] == number for path in SHARED)
    assert all(site.hits[f"/only/for/{name}"] == 1 for name in names)
    private = dict(zip(names, fingerprints(f"{site.url}only/for/{n}" for n in names), strict=True))
    salts = set()
    for name in names:
        path = tmp_path / "jobs" / name / "bloom/generation-0001.bloom"
        found = FileGeneration.at(path)
        assert (found.origin.spider, found.in_use) == (name, False)
        salts.add(found.salt)
        reader = FilterReader(path)
        seen = [other for other in names if reader.are_seen([private[other]])[0]]
        reader.close()
        assert seen == [name]
    assert len(salts) == number

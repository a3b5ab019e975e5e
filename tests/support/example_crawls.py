"""The example project's site, and crawls of it by the project's spider, in their own processes."""

import importlib.util
import json
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from scrapy import signals
from scrapy.crawler import Crawler
from scrapy.http import Response

from tests.support.crawls import ROOT, Crawl, with_modules
from tests.support.sites import LIMIT, Site

EXAMPLE = ROOT / "example_project"
SPIDER = EXAMPLE / "example" / "spiders" / "docs.py"
CONCURRENT_REQUESTS = 16


@dataclass(frozen=True)
class Size:
    """How much of the example site there is."""

    sections: int
    articles: int  # in each section
    list_pages: int  # in each section
    tags: int


WHOLE = Size(12, 240, 12, 60)
PART = Size(1, 240, 12, 60)
TINY = Size(1, 24, 2, 12)


class ExampleSite(Site):
    """The example project's site, which counts requests, whatever the answer."""

    def __init__(self, size: Size, secs: float = 0.0) -> None:
        place = EXAMPLE / "example" / "site.py"
        spec = importlib.util.spec_from_file_location("example_site", place)
        assert spec is not None
        assert spec.loader is not None
        module: Any = importlib.util.module_from_spec(spec)  # anew: each site has its own size
        spec.loader.exec_module(module)
        module.SECTIONS, module.ARTICLES = size.sections, size.articles
        module.LIST_PAGES, module.TAGS = size.list_pages, size.tags
        self.pages: int = module.page_count()  # addresses that answer with a page
        handler, answer = module._Handler, module._Handler.do_GET

        def count_and_answer(request: Any) -> None:
            self.hit(address(request.path))
            answer(request)

        handler.do_GET = count_and_answer
        super().__init__(handler)
        self.delay = secs


def address(url: str) -> str:
    """Return path and sorted query, which make a page of such a site."""
    parts = urlsplit(url)
    query = urlencode(sorted(parse_qsl(parts.query)))
    return f"{parts.path}?{query}" if query else parts.path


class Journal:
    """Writes down responses, callbacks that ran to their end, and items, each in one write."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    @classmethod
    def from_crawler(cls, crawler: Crawler) -> "Journal":
        new = cls(crawler.settings["BENCHMARK_JOURNAL"])
        crawler.signals.connect(new.response_downloaded, signals.response_downloaded)
        return new

    def response_downloaded(self, response: Response) -> None:
        self.write("response", response.url)

    async def process_spider_output(
        self, response: Response, result: AsyncIterator[Any]
    ) -> AsyncIterator[Any]:
        async for entry in result:
            yield entry
        self.write("page", response.url)

    def process_item(self, item: Mapping[str, Any]) -> Any:
        self.write("item", item["url"])
        return item

    def write(self, what: str, url: str) -> None:
        os.write(self._file, f"{what} {address(url)}\n".encode())


def start(url: str, directory: Path, settings: dict[str, Any]) -> Crawl:
    """Start a crawl of a site by the example's spider, with the settings of its project."""
    prefix = [*with_modules(EXAMPLE, ROOT), "SCRAPY_SETTINGS_MODULE=example.settings"]
    return Crawl(url, directory, settings, spider=SPIDER, prefix=prefix)


class Job:
    """A crawl of a site which can be started again and again, and has a journal."""

    run: Crawl  # the last one

    def __init__(self, directory: Path, url: str, settings: Mapping[str, object]) -> None:
        directory.mkdir(parents=True)
        self.directory = directory
        self.job_dir = directory / "job"
        self._url = url
        self._journal = directory / "journal"
        self._journal.touch()
        journal = json.dumps({f"{__name__}.Journal": 1})
        self._settings = {
            "JOBDIR": self.job_dir,
            "CONCURRENT_REQUESTS": CONCURRENT_REQUESTS,
            "BENCHMARK_JOURNAL": self._journal,
            "SPIDER_MIDDLEWARES": journal,
            "ITEM_PIPELINES": journal,
            **settings,
        }
        self._journal_begins_at = 0

    def start(self) -> Crawl:
        """Begin, or resume."""
        self._journal_begins_at = self._journal.stat().st_size
        self.run = start(self._url, self.directory, self._settings)
        return self.run

    def lines(self) -> Sequence[str]:
        """Return the journal of all runs, in order."""
        return self._journal.read_text().splitlines()

    def responses(self) -> AbstractSet[str]:
        """Return the addresses whose responses the last run had."""
        lines = self._journal.read_text()[self._journal_begins_at :].splitlines()
        return {line.partition(" ")[2] for line in lines if line.startswith("response ")}


@dataclass(frozen=True)
class Usual:
    """An undisturbed crawl."""

    addresses: AbstractSet[str]  # all that it asks for, each once
    journal: AbstractSet[str]
    start_secs: float  # from its start to the first request
    close_secs: float  # from the last request to its end


def undisturbed(site: Site, directory: Path, settings: Mapping[str, object]) -> Usual:
    """Crawl a new site without a fault."""
    job = Job(directory, site.url, settings)
    begun = time.monotonic()
    run = job.start()
    run.wait_until(lambda: site.total() > 0)
    last_total, last = 0, (first := time.monotonic())
    while run.running() and time.monotonic() < begun + LIMIT:
        if (total := site.total()) != last_total:
            last_total, last = total, time.monotonic()
        time.sleep(0.002)
    ended = time.monotonic()
    assert run.finish() == 0, run.output
    assert set(site.hits.values()) == {1}, site.hits
    return Usual(frozenset(site.hits), frozenset(job.lines()), first - begun, ended - last)

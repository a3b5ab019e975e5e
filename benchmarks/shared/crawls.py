"""Crawls, each in a process of its own, of sites that a download handler answers there."""

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

import scrapy
from scrapy import signals
from scrapy.core.downloader.handlers.base import BaseDownloadHandler
from scrapy.crawler import CrawlerProcess
from scrapy.exceptions import CloseSpider
from scrapy.http import HtmlResponse, Response
from scrapy.linkextractors import LinkExtractor
from scrapy.responsetypes import responsetypes
from scrapy.spiders import CrawlSpider, Rule

from benchmarks.shared.machine import in_fresh_process, status_bytes

HOST = "www.site.example"
MENU = 100  # pages of a TreeSpider's site to which the first page links
TIMEOUT_SECS = 1800.0
_TICK_SECS = 0.001


@dataclass(frozen=True)
class Crawled:
    """What a crawl did, and what it took from the start of the crawler to its end."""

    pages: int
    duplicates: int
    cpu_secs: float  # user and system time of the process
    secs: float
    longest_gap_ms: float  # between two runs of the event loop; 0.0 unless it is watched
    peak_mb: float
    samples_mb: Sequence[float]  # what the spider has put into its attribute of this name


def crawl(
    spider: type[scrapy.Spider],
    arguments: Mapping[str, object],
    settings: Mapping[str, object],
    *,
    watches_loop: bool = False,
) -> Crawled:
    """Crawl in a fresh process, in an empty working directory.

    Args:
        spider: a class at the top level of a module.
        arguments: of the spider.
        settings: of the crawl.
        watches_loop: whether to look for gaps of the event loop, which takes time.
    """
    crawled = in_fresh_process(
        TIMEOUT_SECS, _crawl, spider, dict(arguments), dict(settings), watches_loop
    )
    return cast("Crawled", crawled)


def _crawl(
    spider: type[scrapy.Spider],
    arguments: dict[str, Any],
    settings: dict[str, Any],
    watches_loop: bool,  # noqa: FBT001 - passed on by position to another process
) -> Crawled:
    fixed = {
        "LOG_LEVEL": "WARNING",
        "TELNETCONSOLE_ENABLED": False,
        "REMOTE_CONTROL_ENABLED": False,
        "DOWNLOAD_HANDLERS": {"http": LocalSite},
    }
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        begun, cpu_begun = time.perf_counter(), time.process_time()
        process = CrawlerProcess({**fixed, **settings})
        crawler = process.create_crawler(spider)
        clock = _Clock()
        if watches_loop:
            crawler.signals.connect(clock.tick, signals.spider_opened)
        process.crawl(crawler, **arguments)
        process.start(install_signal_handlers=False)
        secs, cpu_secs = time.perf_counter() - begun, time.process_time() - cpu_begun
    assert crawler.stats is not None
    pages = crawler.stats.get_value("response_received_count")
    assert crawler.stats.get_value("finish_reason") in {"finished", TreeSpider.ENOUGH}
    return Crawled(
        pages=min(pages, arguments.get("most", pages)),
        duplicates=crawler.stats.get_value("dupefilter/filtered", 0),
        cpu_secs=cpu_secs,
        secs=secs,
        longest_gap_ms=1e3 * clock.longest_secs,
        peak_mb=status_bytes("VmHWM") / 1e6,
        samples_mb=getattr(crawler.spider, "samples_mb", ()),
    )


class _Clock:
    """A timer that finds the longest time for which the event loop did not run."""

    longest_secs = 0.0
    _last = 0.0

    def tick(self) -> None:
        now = time.perf_counter()
        if self._last:
            self.longest_secs = max(self.longest_secs, now - self._last - _TICK_SECS)
        self._last = now
        asyncio.get_running_loop().call_later(_TICK_SECS, self.tick)


class LocalSite(BaseDownloadHandler):
    """Answers with the files of the directory SITE_FILES; without it, with empty pages."""

    async def download_request(self, request: scrapy.Request) -> Response:
        """Answer at once; 404 for what is no file."""
        if (directory := self.crawler.settings["SITE_FILES"]) is None:
            return Response(request.url)
        path = unquote(urlsplit(request.url).path)
        if (body := _contents(directory + path)) is None:
            return Response(request.url, status=404)
        return responsetypes.from_args(filename=path)(request.url, body=body)


def _contents(path: str) -> bytes | None:
    try:
        return Path(path).read_bytes()
    except OSError:
        return None


class FollowSpider(scrapy.Spider):
    """Follows all links of one site by `response.follow_all`."""

    name = "follow"
    allowed_domains = (HOST,)
    links = 'a:not([href^="mailto:"])::attr(href)'  # a Request of what they hold is an error

    def parse(self, response: Response, **_: Any) -> Iterator[scrapy.Request]:
        """Request what the page links to."""
        if isinstance(response, HtmlResponse):
            yield from response.follow_all(css=self.links)


class RuleSpider(CrawlSpider):
    """Follows all links of one site by a rule with a LinkExtractor."""

    name = "rule"
    allowed_domains = (HOST,)
    rules = (Rule(LinkExtractor()),)


class TreeSpider(scrapy.Spider):
    """Makes up the links of a site, so that nothing is parsed.

    The first page links to the pages of the menu; every other page to new pages of its own, and to
    known pages, which are those of the menu.

    Args:
        new: links of a page to pages to which no other page links.
        known: links of a page to the pages of the menu.
        pages: of the site; without it, the site has no end.
        most: pages whose links are requested; the spider is closed after them.
        menu: pages of the menu.
    """

    name = "tree"
    ENOUGH = "enough"

    def __init__(
        self, new: int, known: int, pages: float = 1e18, most: float = 1e18, menu: int = MENU
    ) -> None:
        super().__init__()
        self.new, self.known, self.pages, self.most, self.menu = new, known, pages, most, menu
        self.crawled = 0
        self.number = 0  # number of the last page that was requested
        self.is_first = True

    async def start(self) -> Any:
        """Begin with the first page."""
        yield _request(0)

    def parse(self, response: Response, **_: Any) -> Iterator[scrapy.Request]:  # noqa: ARG002
        """Request what the page links to."""
        self.crawled += 1
        if self.crawled > self.most:
            raise CloseSpider(self.ENOUGH)
        new, known = (self.menu, 0) if self.is_first else (self.new, self.known)
        self.is_first = False
        for _number in range(new):
            if self.number + 1 < self.pages:
                self.number += 1
                yield _request(self.number)
        for link in range(known):
            yield _request(1 + link % self.menu)


def _request(page: int) -> scrapy.Request:
    return scrapy.Request(f"http://{HOST}/books-and-music/product-{page}")

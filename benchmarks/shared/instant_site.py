"""Crawls, in fresh processes, of a site that is no server: a download handler answers."""

import asyncio
import multiprocessing
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import scrapy
from scrapy import signals
from scrapy.core.downloader.handlers.base import BaseDownloadHandler
from scrapy.crawler import CrawlerProcess
from scrapy.http import HtmlResponse, Response

AT_ONCE, LINKS, HOSTS = 16, 20, 50
MENU = 200  # pages that the first one links to, and all others to some of them
TICK_SECS = 0.005
TIMEOUT_SECS = 900.0


@dataclass
class Course:
    """A worker's crawl. Times are those of `time.monotonic`."""

    pages: list[tuple[float, int]] = field(default_factory=list)  # the time, and the number
    ticks: list[float] = field(default_factory=list)  # times of a timer of TICK_SECS
    reason: str = ""  # why the spider was closed


class InstantSite(BaseDownloadHandler):
    """Answers each request in the crawl's process: at once, or after SITE_SECS."""

    async def download_request(self, request: scrapy.Request) -> Response:
        """Answer."""
        if secs := self.crawler.settings.getfloat("SITE_SECS"):
            await asyncio.sleep(secs)
        body = _page(_number(request.url), self.crawler.settings.getint("SITE_PAGES"))
        return HtmlResponse(request.url, body=body, encoding="utf-8", request=request)


class SiteSpider(scrapy.Spider):
    """Follows all links; sends None through the pipe at a third of the pages."""

    name = "instant"
    course: Course
    pipe: Connection

    async def start(self) -> Any:
        """Begin with the first page."""
        yield scrapy.Request(_url(0))

    def parse(self, response: Response, **_: Any) -> Iterator[scrapy.Request]:
        """Request what the page links to."""
        self.course.pages.append((time.monotonic(), _number(response.url)))
        if len(self.course.pages) == self.settings.getint("SITE_PAGES") // 3:
            self.pipe.send(None)
        for href in response.css("a::attr(href)").getall():
            yield response.follow(href)


def crawl(
    settings: Mapping[str, object],
    pages: int,
    workers: int = 1,
    secs: float = 0.0,
    at_a_third: Callable[[], None] = lambda: None,
) -> Sequence[Course]:
    """Crawl the site; each worker in a process of its own.

    Args:
        settings: of each worker.
        pages: of the site.
        workers: how many.
        secs: from a request to its response.
        at_a_third: called when a worker has a third of all pages.
    """
    context = multiprocessing.get_context("spawn")
    given = {**settings, "SITE_PAGES": pages, "SITE_SECS": secs}
    pipes = [context.Pipe() for _ in range(workers)]
    crawls = [context.Process(target=_crawl, args=(given, its)) for _, its in pipes]
    try:
        for process, (_, its) in zip(crawls, pipes, strict=True):
            process.start()
            its.close()  # if that process ends, so does the wait for it
        return [_course(ours, at_a_third) for ours, _ in pipes]
    finally:
        for process in crawls:
            process.kill()
            process.join()


def _course(pipe: Connection, at_a_third: Callable[[], None]) -> Course:
    while pipe.poll(TIMEOUT_SECS):
        if isinstance(told := pipe.recv(), Course):
            return told
        at_a_third()
    raise TimeoutError(f"a worker did not end within {TIMEOUT_SECS:,.0f} seconds")


def _crawl(settings: Mapping[str, Any], pipe: Connection) -> None:
    at_once = dict.fromkeys(("CONCURRENT_REQUESTS", "CONCURRENT_REQUESTS_PER_DOMAIN"), AT_ONCE)
    fixed = {"TELNETCONSOLE_ENABLED": False, "DOWNLOAD_HANDLERS": {"http": InstantSite}}
    process = CrawlerProcess({**settings, **at_once, **fixed, "LOG_LEVEL": "ERROR"})
    crawler = process.create_crawler(SiteSpider)
    crawler.signals.connect(_tick, signals.spider_opened)
    process.crawl(crawler, course=(course := Course()), pipe=pipe)
    process.start(install_signal_handlers=False)
    assert crawler.stats is not None
    course.reason = str(crawler.stats.get_value("finish_reason"))
    pipe.send(course)


def _tick(spider: SiteSpider) -> None:
    spider.course.ticks.append(time.monotonic())
    asyncio.get_running_loop().call_later(TICK_SECS, _tick, spider)


def _page(number: int, pages: int) -> bytes:
    """A page with LINKS links, one of them to a page that no other page but its followers links to.

    So each page adds one request, in whatever order the pages are crawled. The other links lead to
    pages that came before it: those that led here, and some of the menu.
    """
    way = list(range(number, 0, -MENU))[1 : LINKS // 2]
    menu = random.Random(number).sample(range(1, MENU + 1), LINKS - 1 - len(way))
    links = [number + MENU, *way, *menu] if number else range(1, MENU + 1)
    items = "".join(f'<li><a href="{_url(n)}">Page {n}</a></li>' for n in links if n < pages)
    return f"<html><head><title>{number}</title></head><body>{items}</body></html>".encode()


def _url(number: int) -> str:
    return f"http://www.shop-{number % HOSTS}.example/books/product-{number:08}.html"


def _number(url: str) -> int:
    return int(url.rpartition("-")[2].removesuffix(".html"))

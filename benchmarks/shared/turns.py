"""Crawls with one filter and another, by turns, each in a process of its own."""

import multiprocessing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from time import perf_counter, process_time
from typing import Any

import scrapy
from scrapy.crawler import CrawlerProcess
from scrapy.http import HtmlResponse, Response

from benchmarks.shared.machine import status_bytes

TIMEOUT_SECS = 1800.0


@dataclass
class Course:
    """A crawl, told by the rounds in which it had its turn."""

    secs: list[float] = field(default_factory=list)  # how long each took
    cpu_secs: list[float] = field(default_factory=list)  # likewise, of the processor
    rss_mb: list[float] = field(default_factory=list)  # the memory of the process after each
    # of it, what belongs to no file, and the system cannot take back
    own_mb: list[float] = field(default_factory=list)
    crawled: int = 0  # pages
    filtered: int = 0  # requests that were not new
    all_cpu_secs: float = 0.0  # of the processor, from the first request to the end
    peak_mb: float = 0.0  # the most memory of the process


class TurnSpider(scrapy.Spider):
    """Follows links; waits for its turn after so many pages."""

    name = "turns"
    url: str
    turns: Connection
    rounds: int
    per_turn: int
    crawled = 0

    async def start(self) -> Any:
        """Begin with the home page."""
        self.turns.send(None)
        self._wait()
        self.first_cpu = process_time()
        yield scrapy.Request(self.url)

    def parse(self, response: Response, **_: Any) -> Iterator[scrapy.Request]:
        """Request what the page links to."""
        yield from self.requests(response)
        self.crawled += 1
        turn, rest = divmod(self.crawled, self.per_turn)
        if rest == 0 and turn <= self.rounds:
            secs, cpu_secs = perf_counter() - self._begun, process_time() - self._cpu_begun
            self.turns.send((secs, cpu_secs, *_mb("VmRSS", "RssAnon")))
            self._wait()

    def requests(self, response: Response) -> Iterable[scrapy.Request]:
        """For all links of a page, but those that are mail."""
        if not isinstance(response, HtmlResponse):
            return ()
        return response.follow_all(css='a[href]:not([href^="mailto:"])')

    def _wait(self) -> None:
        """Stand still, all of the process, until it is this crawl's turn."""
        self.turns.recv()
        self._begun, self._cpu_begun = perf_counter(), process_time()


def crawl_by_turns(
    spider: type[TurnSpider],
    url: str,
    settings: Mapping[str, Mapping[str, Any]],
    pages: int,
    rounds: int,
) -> dict[str, Course]:
    """Crawl a site with each filter, a part in each round, by turns.

    Args:
        spider: a module's, so that other processes can import it.
        url: of the first page.
        settings: of the crawls, by name.
        pages: that each crawl has at least; all crawls must crawl as many.
        rounds: in which these pages are crawled.

    Returns:
        What each crawl took.
    """
    courses = {name: Course() for name in settings}
    context = multiprocessing.get_context("spawn")
    with ExitStack() as ends:
        crawls = {}
        for name in settings:
            crawls[name], its_end = context.Pipe()
            arguments = {"turns": its_end, "rounds": rounds, "per_turn": pages // rounds}
            process = context.Process(
                target=_crawl, args=(spider, settings[name], {"url": url, **arguments})
            )
            process.start()
            ends.callback(process.kill)
            its_end.close()  # if that process ends, so does the wait for it
            assert _next(crawls[name]) is None  # it is ready
        order = list(settings)
        for _ in range(rounds):
            for name in order:
                crawls[name].send(None)
                secs, cpu_secs, rss_mb, own_mb = _next(crawls[name])
                courses[name].secs.append(secs)
                courses[name].cpu_secs.append(cpu_secs)
                courses[name].rss_mb.append(rss_mb)
                courses[name].own_mb.append(own_mb)
            order.append(order.pop(0))
        for name, course in courses.items():
            crawls[name].send(None)
            course.crawled, course.filtered, course.all_cpu_secs, course.peak_mb = _next(
                crawls[name]
            )
    assert len({(course.crawled, course.filtered) for course in courses.values()}) == 1, courses
    return courses


def _next(crawl: Connection) -> Any:
    if not crawl.poll(TIMEOUT_SECS):
        raise TimeoutError(f"a crawl took longer than {TIMEOUT_SECS:,.0f} seconds")
    return crawl.recv()


def _crawl(
    spider: type[TurnSpider], settings: Mapping[str, Any], arguments: Mapping[str, Any]
) -> None:
    """Crawl the site in this process. Our package is only imported if the settings name it."""
    process = CrawlerProcess({"LOG_LEVEL": "WARNING", "TELNETCONSOLE_ENABLED": False, **settings})
    crawler = process.create_crawler(spider)
    process.crawl(crawler, **arguments)
    process.start(install_signal_handlers=False)
    assert crawler.stats is not None
    assert isinstance(crawler.spider, TurnSpider)
    filtered = crawler.stats.get_value("dupefilter/filtered")
    cpu_secs = process_time() - crawler.spider.first_cpu
    arguments["turns"].send((crawler.spider.crawled, filtered, cpu_secs, *_mb("VmHWM")))


def _mb(*names: str) -> list[float]:
    return [status_bytes(name) / 1e6 for name in names]

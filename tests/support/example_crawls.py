"""The example project's site, and crawls of it by the project's spider, in their own processes."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from scrapy import signals
from scrapy.crawler import Crawler
from scrapy.http import Response
from scrapy.utils.defer import maybe_deferred_to_future
from twisted.internet.task import deferLater

from tests.support.crawls import ROOT, with_modules
from tests.support.sites import LIMIT, Site

EXAMPLE = ROOT / "example_project"
CONCURRENT_REQUESTS = 16
PIPELINE_SECS = 0.1


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
    """The example project's site, which counts requests, whatever the answer.

    Args:
        size: how much of it.
        secs: before each answer.

    Attributes:
        pages: how many different addresses answer with a page.
    """

    def __init__(self, size: Size, secs: float = 0.0) -> None:
        place = EXAMPLE / "example" / "site.py"
        spec = importlib.util.spec_from_file_location("example_site", place)
        assert spec is not None
        assert spec.loader is not None
        module: Any = importlib.util.module_from_spec(spec)  # anew: each site has its own size
        spec.loader.exec_module(module)
        module.SECTIONS, module.ARTICLES = size.sections, size.articles
        module.LIST_PAGES, module.TAGS = size.list_pages, size.tags
        self.pages: int = module.page_count()
        handler, answer = module._Handler, module._Handler.do_GET

        def count_and_answer(request: Any) -> None:
            self.hit(address(request.path))
            answer(request)

        handler.do_GET = count_and_answer
        super().__init__(handler)
        self.delay = secs


@contextmanager
def served(size: Size, secs: float = 0.0) -> Iterator[ExampleSite]:
    """Serve a new example site; end it on leaving."""
    site = ExampleSite(size, secs)
    try:
        yield site
    finally:
        site.end()


def address(url: str) -> str:
    """Return path and sorted query, which make a page of such a site."""
    parts = urlsplit(url)
    query = urlencode(sorted(parse_qsl(parts.query)))
    return f"{parts.path}?{query}" if query else parts.path


class Journal:
    """Writes down, in the crawl, responses, callbacks that ran to their end, and items.

    It is a spider middleware and an item pipeline. Each line is one write, which no kill undoes.
    """

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
        async for each in result:
            yield each
        self.write("page", response.url)

    def process_item(self, item: Mapping[str, Any]) -> Any:
        self.write("item", item["url"])
        return item

    def write(self, what: str, url: str) -> None:
        os.write(self._file, f"{what} {address(url)}\n".encode())


class SlowJournal(Journal):
    """Keeps each item in the pipeline for a while."""

    async def process_item(self, item: Mapping[str, Any]) -> Any:
        from twisted.internet import reactor

        await maybe_deferred_to_future(deferLater(reactor, PIPELINE_SECS))
        return super().process_item(item)


class Job:
    """A crawl of a site, in processes of its own, which can be started again and again."""

    def __init__(
        self, directory: Path, url: str, settings: Mapping[str, object], *, slow: bool = False
    ) -> None:
        directory.mkdir(parents=True)
        self.job_dir = directory / "job"
        self._log = directory / "log"
        self._journal = directory / "journal"
        self._journal.touch()
        kind = f"{__name__}.{'SlowJournal' if slow else 'Journal'}"
        merged = {
            "JOBDIR": self.job_dir,
            "CONCURRENT_REQUESTS": CONCURRENT_REQUESTS,
            "BENCHMARK_JOURNAL": self._journal,
            "SPIDER_MIDDLEWARES": json.dumps({f"{__name__}.Journal": 1}),
            "ITEM_PIPELINES": json.dumps({kind: 1}),
            **settings,
        }
        self._command = crawl_command(url, merged)
        self._process: subprocess.Popen[bytes] | None = None
        self._run_begins_at = 0
        self._journal_begins_at = 0

    def start(self) -> None:
        """Begin, or resume."""
        with self._log.open("ab") as log:
            self._run_begins_at = log.tell()
            self._journal_begins_at = self._journal.stat().st_size
            self._process = subprocess.Popen(
                self._command,
                cwd=EXAMPLE,
                env=with_modules(ROOT),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        """The log of the last run."""
        with self._log.open("rb") as log:
            log.seek(self._run_begins_at)
            return log.read().decode(errors="replace")

    @property
    def all_output(self) -> str:
        """The log of all runs."""
        return self._log.read_text(errors="replace")

    def lines(self) -> Sequence[str]:
        """Return the journal of all runs, in order."""
        return self._journal.read_text().splitlines()

    def responses(self) -> AbstractSet[str]:
        """Return the addresses whose responses the last run had."""
        lines = self._journal.read_text()[self._journal_begins_at :].splitlines()
        return {each.partition(" ")[2] for each in lines if each.startswith("response ")}

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition; return False if the crawl ended before.

        Raises:
            TimeoutError: neither came about in time.
        """
        return wait_while(self.running, condition, lambda: self.output)

    def send(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def wait(self, progress: Callable[[], object] = lambda: None, secs: float = LIMIT) -> int:
        """Wait for the end; return its exit status.

        Args:
            progress: something that changes as the crawl proceeds.
            secs: without a change, after which the crawl is killed: its status is then -9.
        """
        assert self._process is not None
        last, end = progress(), time.monotonic() + secs
        while self.running():
            time.sleep(0.01)
            if (now := progress()) != last:
                last, end = now, time.monotonic() + secs
            if time.monotonic() > end:
                self.end()
        return self._process.wait()

    def end(self) -> None:
        """Kill it, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def wait_while(
    running: Callable[[], bool], condition: Callable[[], bool], output: Callable[[], str]
) -> bool:
    """Wait for a condition while something runs; return False if that ended before.

    Raises:
        TimeoutError: neither came about in time.
    """
    end = time.monotonic() + LIMIT
    while not condition():
        if not running():
            return False
        if time.monotonic() > end:
            raise TimeoutError(output())
        time.sleep(0.002)
    return True


def crawl_command(url: str, settings: Mapping[str, object]) -> Sequence[str]:
    """Return the command that crawls a site by the example's spider; None unsets a setting."""
    set_here = {name: value for name, value in settings.items() if value is not None}
    options = [part for name, value in set_here.items() for part in ("-s", f"{name}={value}")]
    return [sys.executable, "-m", "scrapy", "crawl", "docs", "-a", f"url={url}", *options]


@contextmanager
def job_that_ends(job: Job) -> Iterator[None]:
    """Kill the process of a job on leaving, whatever happens."""
    try:
        yield
    finally:
        job.end()

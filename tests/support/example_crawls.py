"""Crawls by the example project's spider, in processes of their own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scrapy import signals
from scrapy.crawler import Crawler
from scrapy.http import Response
from scrapy.utils.defer import maybe_deferred_to_future
from twisted.internet.task import deferLater

from tests.support.example_sites import EXAMPLE, ROOT, address

CONCURRENT_REQUESTS = 16
LIMIT_SECS = 120.0  # that any single wait may take
PIPELINE_SECS = 0.1


class Journal:
    """In the crawl: notes responses, callbacks that ran to their end, and items.

    It is a spider middleware and an item pipeline. Each line is one write, which no kill undoes.
    """

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    @classmethod
    def from_crawler(cls, crawler: Crawler) -> "Journal":
        """Build it, for the file of the setting."""
        new = cls(crawler.settings["BENCHMARK_JOURNAL"])
        crawler.signals.connect(new.response_downloaded, signals.response_downloaded)
        return new

    def response_downloaded(self, response: Response) -> None:
        """Note that a response is there: its callback comes later."""
        self.write("response", response.url)

    async def process_spider_output(
        self, response: Response, result: AsyncIterator[Any]
    ) -> AsyncIterator[Any]:
        """Note that a callback ran to its end."""
        async for each in result:
            yield each
        self.write("page", response.url)

    def process_item(self, item: Mapping[str, Any]) -> Any:
        """Note an item."""
        self.write("item", item["url"])
        return item

    def write(self, what: str, url: str) -> None:
        """Append a line."""
        os.write(self._file, f"{what} {address(url)}\n".encode())


class SlowJournal(Journal):
    """The same, but each item takes its time in the pipeline."""

    async def process_item(self, item: Mapping[str, Any]) -> Any:
        """Note an item, later."""
        from twisted.internet import reactor

        await maybe_deferred_to_future(deferLater(reactor, PIPELINE_SECS))
        return super().process_item(item)


class Job:
    """A crawl of a site, in processes of their own, which can be started again and again."""

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
        """Begin, or go on."""
        with self._log.open("ab") as log:
            self._run_begins_at = log.tell()
            self._journal_begins_at = self._journal.stat().st_size
            self._process = subprocess.Popen(
                self._command,
                cwd=EXAMPLE,
                env=crawl_environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        """What the last run wrote."""
        with self._log.open("rb") as log:
            log.seek(self._run_begins_at)
            return log.read().decode(errors="replace")

    @property
    def all_output(self) -> str:
        """What all runs wrote."""
        return self._log.read_text(errors="replace")

    def lines(self) -> Sequence[str]:
        """What was noted in all runs, in order."""
        return self._journal.read_text().splitlines()

    def journal(self) -> set[str]:
        """What was noted in all runs, each once."""
        return set(self.lines())

    def responses(self) -> AbstractSet[str]:
        """The addresses whose responses the last run had."""
        noted = self._journal.read_text()[self._journal_begins_at :].splitlines()
        return {each.partition(" ")[2] for each in noted if each.startswith("response ")}

    def running(self) -> bool:
        """Whether there is a process."""
        return self._process is not None and self._process.poll() is None

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition; False if the crawl ended before.

        Raises:
            TimeoutError: neither came about in time.
        """
        end = time.monotonic() + LIMIT_SECS
        while not condition():
            if not self.running():
                return False
            if time.monotonic() > end:
                raise TimeoutError(self.output)
            time.sleep(0.002)
        return True

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        if self._process is not None:
            self._process.send_signal(number)

    def wait(self, quiet: Callable[[], object] = lambda: None, secs: float = LIMIT_SECS) -> int:
        """Wait for the end; its exit status.

        Args:
            quiet: something that changes as the crawl goes on.
            secs: without a change, after which the crawl is killed: its status is then -9.
        """
        assert self._process is not None
        last, end = quiet(), time.monotonic() + secs
        while self.running():
            time.sleep(0.01)
            if (now := quiet()) != last:
                last, end = now, time.monotonic() + secs
            if time.monotonic() > end:
                self.end()
        return self._process.wait()

    def end(self) -> None:
        """Kill it, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def crawl_command(url: str, settings: Mapping[str, object]) -> Sequence[str]:
    """Crawl a site by the example's spider; settings that are None are left out."""
    set_here = {name: value for name, value in settings.items() if value is not None}
    options = [part for name, value in set_here.items() for part in ("-s", f"{name}={value}")]
    return [sys.executable, "-m", "scrapy", "crawl", "docs", "-a", f"url={url}", *options]


def crawl_environment() -> Mapping[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


@contextmanager
def job_that_ends(job: Job) -> Iterator[None]:
    """Whatever happens, its process does not stay."""
    try:
        yield
    finally:
        job.end()

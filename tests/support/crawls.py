"""Running real crawls in processes of their own."""

import atexit
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import scrapy

from tests.support.processes import Scrapy, start_scrapy
from tests.support.sites import LIMIT, Site

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]  # in the PYTHONPATH of processes that import tests.support, too
SPIDER = SUPPORT / "link_spider.py"
RULES_SPIDER = SUPPORT / "rules_spider.py"
SHARED_SPIDER = SUPPORT / "shared_spider.py"
FAILING_SPIDER = SUPPORT / "failing_spider.py"
BLOOM = "scrapy_bloom.BloomDupeFilter"

# Other event loops than asyncio's in a reactor.
SELECT = {"TWISTED_REACTOR": "twisted.internet.selectreactor.SelectReactor"}
NO_REACTOR = {"TWISTED_REACTOR_ENABLED": False}
may_have_no_reactor = pytest.mark.skipif(
    scrapy.version_info < (2, 15) or (scrapy.version_info < (2, 19) and not find_spec("httpx")),
    reason="this version of Scrapy always has a reactor, or downloads by httpx without one",
)
LOOPS = [
    pytest.param(SELECT, id="select"),
    pytest.param(NO_REACTOR, id="no reactor", marks=may_have_no_reactor),
]

BASE_SETTINGS: dict[str, Any] = {
    "TELNETCONSOLE_ENABLED": False,
    "REMOTE_CONTROL_ENABLED": False,
    "DOWNLOAD_DELAY": 0,
    "CONCURRENT_REQUESTS_PER_DOMAIN": 16,
    "LOG_LEVEL": "INFO",
}
# Of crawlers that share their queue, too: for SHARED_SPIDER.
SCRAPY_REDIS: dict[str, Any] = {
    "SCHEDULER": "scrapy_redis.scheduler.Scheduler",
    "SCHEDULER_PERSIST": True,
}


def spider_with(directory: Path, code: str, of: Path = SPIDER) -> Path:
    """Write a file with the spider of links, or another one, and more code behind it."""
    spider = directory / "spider.py"
    spider.write_text(f"{of.read_text()}\n{code}")
    return spider


def syncing_every(secs: float, directory: Path) -> Path:
    """Write a file with the spider of links, whose crawl syncs its filter so often."""
    return spider_with(directory, f"from scrapy_bloom.job import file\nfile.SYNC_SECS = {secs}\n")


def with_modules(*directories: Path) -> list[str]:
    """Return the prefix of a command that imports modules from directories first."""
    paths = [*map(os.fspath, directories), os.environ.get("PYTHONPATH")]
    return ["env", f"PYTHONPATH={os.pathsep.join(filter(None, paths))}"]


def unprivileged() -> list[str]:
    """Return the prefix of a command that takes the right away from root to write anywhere."""
    return ["setpriv", "--bounding-set", "-dac_override"] if os.geteuid() == 0 else []


def run_script(
    script: str, *arguments: object, cwd: Path, prefix: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a script that may import tests.support."""
    return subprocess.run(
        [
            *prefix,
            *with_modules(ROOT),
            sys.executable,
            "-c",
            textwrap.dedent(script),
            *map(str, arguments),
        ],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=2 * LIMIT,
        check=False,
    )


_started: list[Scrapy] = []


@atexit.register
def end_all() -> None:
    """End the crawls that a failed test has left."""
    while _started:
        _started.pop().kill()


class Crawl:
    """A crawl that runs in a process of its own; its output goes to a file."""

    def __init__(
        self,
        url: str,
        work_dir: Path,
        settings: dict[str, Any] | None = None,
        *,
        prefix: Sequence[str] = (),
        spider: Path = SPIDER,
        arguments: Mapping[str, str] | None = None,
    ) -> None:
        work_dir.mkdir(parents=True, exist_ok=True)
        number = len(list(work_dir.glob("crawl-*.log")))
        self._log = work_dir / f"crawl-{number}.log"
        merged = {**BASE_SETTINGS, "DUPEFILTER_CLASS": BLOOM, **(settings or {})}
        options = [
            arg
            for name, value in merged.items()
            if value is not None
            for arg in ("-s", f"{name}={value}")
        ]
        for name, value in {"url": url, **(arguments or {})}.items():
            options += ["-a", f"{name}={value}"]
        command = ["runspider", os.fspath(spider), *options]
        with self._log.open("wb") as log:
            self._process = start_scrapy(command, cwd=work_dir, out=log, err=log, prefix=prefix)
        _started.append(self._process)
        self.held_by: Site | None = None

    @classmethod
    def finished(
        cls, url: str, work_dir: Path, settings: dict[str, Any] | None = None, **options: Any
    ) -> "Crawl":
        """Run a crawl that ends with exit status 0."""
        crawl = cls(url, work_dir, settings, **options)
        assert crawl.finish() == 0, crawl.output
        return crawl

    def refusal(self) -> str:
        """Return the only error of a crawl that could not begin: the last line of its log."""
        assert self.finish() == 1, self.output
        assert "Traceback" not in self.output
        (error,) = self.our_lines("ERROR")
        assert error == self.output.splitlines()[-1]
        return error

    @classmethod
    def held(
        cls,
        site: Site,
        answers: int,
        work_dir: Path,
        settings: dict[str, Any] | None = None,
        **options: Any,
    ) -> "Crawl":
        """Start a crawl that waits for more answers, until it is interrupted or killed."""
        site.hold_after(answers)
        crawl = cls(site.url, work_dir, settings, **options)
        crawl.held_by = site
        crawl.wait_until(site.is_holding)
        return crawl

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def lines(self, level: str) -> list[str]:
        return [line for line in self.output.splitlines() if f"] {level}: " in line]

    def our_lines(self, level: str) -> list[str]:
        """Return scrapy_bloom's lines of a level: Scrapy itself warns of experimental features."""
        return [line for line in self.lines(level) if "[scrapy_bloom." in line]

    def running(self) -> bool:
        return self._process.status() is None

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition that the running crawl brings about."""
        assert is_reached(condition, [self]), f"the crawl ended too early:\n{self.output}"

    def finish(self) -> int:
        """Wait for the end; its exit status."""
        status = self._process.wait(LIMIT)
        if status is None:
            self._process.kill()
            raise AssertionError(f"the crawl did not end:\n{self.output}")
        return status

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def stop(self) -> None:
        """Stop it as a debugger does: SIGCONT lets it go on."""
        self.send(signal.SIGSTOP)
        status = Path(f"/proc/{self.pid}/stat")
        self.wait_until(lambda: status.read_text().rpartition(") ")[2].startswith("T"))

    def begin_pause(self) -> None:
        """Interrupt it, and wait until it knows: what is under way is finished."""
        self.send(signal.SIGINT)
        self.wait_until(lambda: "Received SIGINT" in self.output)

    def interrupt(self) -> int:
        """Pause it, and return its exit status."""
        self.begin_pause()
        if self.held_by:
            self.held_by.release()
        return self.finish()

    def kill(self) -> None:
        self._process.kill()
        if self.held_by:
            self.held_by.settle()


def is_reached(condition: Callable[[], bool], crawls: Sequence[Crawl]) -> bool:
    """Wait for a condition that running crawls bring about; return False if one ends before."""
    end = time.monotonic() + LIMIT
    while True:
        # Before a look at the condition: what they did last counts, too.
        are_running = all(crawl.running() for crawl in crawls)
        if condition():
            return True
        if not are_running:
            return False
        assert time.monotonic() < end, f"waited in vain:\n{crawls[0].output}"
        time.sleep(0.01)


def are_finished(
    crawls: Sequence[Crawl], progress: Callable[[], object], quiet_secs: float
) -> bool:
    """Wait for crawls to end, or kill them without progress; return whether all were finished."""
    last, end, are_open = progress(), time.monotonic() + quiet_secs, False
    while any(crawl.running() for crawl in crawls):
        time.sleep(0.01)
        are_open = are_open or all(
            "Spider opened" in crawl.output or not crawl.running() for crawl in crawls
        )
        if (now := progress()) != last or not are_open:
            last, end = now, time.monotonic() + quiet_secs
        if time.monotonic() > end:
            for crawl in crawls:
                crawl.kill()
    return all(
        crawl.finish() == 0 and "Spider closed (finished)" in crawl.output for crawl in crawls
    )


def stat(crawl: Crawl, name: str) -> int:
    """Return a figure that a crawl which has ended has logged; 0 without it."""
    found = [line for line in crawl.output.splitlines() if f"'{name}': " in line]
    return int(found[0].rpartition(": ")[2].strip(",}")) if found else 0

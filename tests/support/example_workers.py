"""Workers that share filter and queue on a server, each in a process of its own."""

import random
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry
from scrapy import signals
from scrapy.crawler import Crawler
from scrapy.exceptions import DontCloseSpider

from tests.support.example_crawls import LIMIT_SECS, Job

LEASE_SECS = 3
OURS, SCRAPY_REDIS = "CrashSafeScheduler", "scrapy-redis"


class PatientRedis(redis.Redis):
    """Scrapy-redis's connection, which waits for the server, as docs/scrapy-redis.md says."""

    @classmethod
    def from_url(cls, url: str, **kwargs: Any) -> redis.Redis:
        """Connect to a URL."""
        kwargs["retry"] = Retry(ExponentialBackoff(cap=1, base=0.05), 40)
        kwargs["retry_on_error"] = [redis.ConnectionError, redis.TimeoutError]
        return super().from_url(url, **kwargs)


class Waiting:
    """In the crawl: waits for what other workers find, for ever, as scrapy-redis's spiders do."""

    @classmethod
    def from_crawler(cls, crawler: Crawler) -> "Waiting":
        """Build it."""
        waiting = cls()
        crawler.signals.connect(waiting.wait, signals.spider_idle)
        return waiting

    def wait(self) -> None:
        """Keep the spider open."""
        raise DontCloseSpider


def settings_of(name: str, url: str, expected: int, **more: object) -> Mapping[str, object]:
    """Those of a worker.

    Args:
        name: OURS or SCRAPY_REDIS.
        url: of the server.
        expected: requests that our filter is made for.
        more: settings of ours.
    """
    common: Mapping[str, object] = {"JOBDIR": None, "LOG_LEVEL": "INFO"}
    if name == SCRAPY_REDIS:
        return {
            **common,
            "SCHEDULER": "scrapy_redis.scheduler.Scheduler",
            "SCHEDULER_PERSIST": True,
            "DUPEFILTER_CLASS": "scrapy_redis.dupefilter.RFPDupeFilter",
            "REDIS_URL": url,
            "REDIS_PARAMS": f'{{"redis_cls": "{__name__}.{PatientRedis.__name__}"}}',
            "EXTENSIONS": f'{{"{__name__}.{Waiting.__name__}": 1}}',
        }
    return {
        **common,
        "SCHEDULER": "scrapy_bloom.CrashSafeScheduler",
        "DUPEFILTER_CLASS": "scrapy_bloom.BloomDupeFilter",
        "BLOOM_BACKEND": "redis",
        "BLOOM_QUEUE_LEASE_SECS": LEASE_SECS,
        "BLOOM_REDIS_URL": url,
        "BLOOM_EXPECTED_REQUESTS": expected,
        **more,
    }


class Crowd:
    """Some workers.

    Args:
        directory: for their journals and logs.
        url: of the first page.
        settings: of each.
        number: how many.

    Attributes:
        workers: one crawl each, which can be killed and started again.
    """

    def __init__(
        self, directory: Path, url: str, settings: Mapping[str, object], number: int
    ) -> None:
        self.workers = [Job(directory / f"worker-{n}", url, settings) for n in range(number)]

    def start(self) -> None:
        """Start all."""
        for worker in self.workers:
            worker.start()

    def are_running(self) -> bool:
        """Whether all are."""
        return all(worker.running() for worker in self.workers)

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition; False if a worker ended before.

        Raises:
            TimeoutError: neither came about in time.
        """
        end = time.monotonic() + LIMIT_SECS
        while not condition():
            if not self.are_running():
                return False
            if time.monotonic() > end:
                raise TimeoutError(self.workers[0].output)
            time.sleep(0.002)
        return self.are_running()

    def some(self, rng: random.Random, number: int) -> Sequence[Job]:
        """So many of them, drawn."""
        return rng.sample(self.workers, number)

    def wait(self, living: Sequence[Job], quiet: Callable[[], object], secs: float) -> bool:
        """Wait until those end that were not killed; whether each ended by itself, and finished.

        Args:
            living: those to wait for.
            quiet: something that changes as the crawl goes on.
            secs: without a change, after which all are killed.
        """
        last, end, is_open = quiet(), time.monotonic() + secs, False
        while any(worker.running() for worker in living):
            time.sleep(0.01)
            is_open = is_open or all("Spider opened" in worker.output for worker in living)
            if (now := quiet()) != last or not is_open:
                last, end = now, time.monotonic() + secs
            if time.monotonic() > end:
                self.end()
        finished = ["Spider closed (finished)" in worker.output for worker in living]
        return all(finished) and not any(worker.wait() for worker in living)

    def end(self) -> None:
        """Kill those that run."""
        for worker in self.workers:
            worker.end()

    def journal(self) -> Counter[str]:
        """What all have noted, and how often."""
        return sum((Counter(worker.lines()) for worker in self.workers), Counter())

    def complaints(self) -> Sequence[str]:
        """The lines of the logs that tell of an error in the program."""
        logs = "".join(worker.all_output for worker in self.workers)
        return re.findall(r"^(?:Traceback|.*\] (?:ERROR|CRITICAL): ).*", logs, re.MULTILINE)

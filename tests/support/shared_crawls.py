"""Crawls whose workers share a queue, each in a process of its own."""

import os
from pathlib import Path
from typing import Any

from scrapy_bloom.queues.redis_queue import RedisQueue
from scrapy_bloom.queues.store import QueueStatus, State
from scrapy_bloom.redis.layout import named_keys
from scrapy_bloom.redis.server import RedisServer
from tests.support import servers
from tests.support.crawls import SPIDER, Crawl, spider_with
from tests.support.sites import Site, tree_site

# Its start() writes a line into a file each time it begins; what comes then is given.
_START = """
import asyncio
from pathlib import Path
LOG = Path(__file__).with_name("started")

async def start(self):
    with LOG.open("a") as log:
        log.write("x")
    for url in self.start_urls:
        yield scrapy.Request(url, dont_filter=True)
    if len(LOG.read_text()) == 1:
        {first_time}

LinkSpider.start = start
"""

PAGES = 90


def wide_site() -> Site:
    """A site whose first page leads to all others, so that each worker gets some at once."""
    return tree_site(PAGES, children=PAGES)


class SharedCrawl:
    """A crawl of a site by workers that share a queue, whose key is the name of the directory."""

    def __init__(
        self,
        site: Site,
        directory: Path,
        *,
        server: servers.Server | None = None,
        first_time: str = "pass",  # what the spider's start() does when it is run first
        code: str = "",  # more of the spider
        **settings: Any,
    ) -> None:
        self.site = site
        self.directory = directory
        self.key = os.fspath(directory)
        self.server = server or servers.shared("valkey")
        self.settings = {
            "SCHEDULER": "scrapy_bloom.CrashSafeScheduler",
            # A server that is only slow is not away.
            "BLOOM_REDIS_URL": f"{self.server.url}?socket_timeout=10",
            "BLOOM_REDIS_KEY": self.key,
            "BLOOM_SHARED_LIMITS": False,  # each worker gets as much as if it were alone
            **settings,
        }
        self.workers: list[Crawl] = []
        self.spider = SPIDER
        self.write_spider(_START.format(first_time=first_time) + code)

    def write_spider(self, code: str) -> None:
        self.spider = spider_with(self.directory, code)

    def start(self, number: int = 1, **settings: Any) -> Crawl:
        """Start so many workers, and wait until they share the queue; the last one of them."""
        for _ in range(number):
            place = self.directory / f"worker-{len(self.workers)}"
            settings = {**self.settings, **settings}
            self.workers.append(Crawl(self.site.url, place, settings, spider=self.spider))
        for worker in self.workers[-number:]:
            worker.wait_until(lambda worker=worker: "Bloom filter in " in worker.output)
        return self.workers[-1]

    def hold(self, answers: int, workers: int = 2) -> list[Crawl]:
        """Start workers of which each waits for answers: a wide site holds them back."""
        self.site.hold_after(answers)
        self.start(workers)
        each_has_some = 2  # requests
        servers.wait_for(
            lambda: (
                self.site.is_holding()
                and [worker.in_flight >= each_has_some for worker in self.state().workers]
                == [True] * workers
            ),
            lambda: f"they do not wait: {self.state()}",
        )
        return self.workers

    def interrupt(self, worker: Crawl) -> None:
        """Pause a worker: the site answers what it has in flight, and nothing before."""
        self.site.hold_after(0)
        worker.held_by = self.site
        assert worker.interrupt() == 0, worker.output

    def finish(self, *workers: Crawl, reason: str = "finished") -> None:
        """Have the site answer, and wait for workers, or else all, to end well."""
        self.site.release()
        for worker in workers or self.workers:
            assert worker.finish() == 0, worker.output
            assert f"'finish_reason': '{reason}'" in worker.output, worker.output
            assert "Traceback" not in worker.output, worker.output

    def state(self) -> QueueStatus:
        server = RedisServer(self.server.url)
        state = RedisQueue(server, self.key).find()
        server.close()
        assert state
        return state

    def count(self, state: State = State.PENDING) -> int:
        """Return how many requests of a state there are."""
        return self.state().counts[state]

    def end_leases(self, *workers: Crawl) -> None:
        """End the leases of workers that were killed or stand still, as if time had passed."""
        ends = tuple(f":{worker.pid}" for worker in workers)
        for each_worker in self.state().workers:
            if each_worker.name.endswith(ends):
                self.server.client.hset(self.keys["workers"], each_worker.id, 1)
        self.server.client.hdel(self.key, "look")  # it is time to look for dead ones

    @property
    def keys(self) -> dict[str, str]:
        """The keys of the filter and the queue, by their names in scripts."""
        return named_keys(self.key)

    def check_complete(self, *, starts: int = 1) -> None:
        """Check that each page was crawled, how often start() began, and that the crawl ended."""
        assert len(self.site.hits) == PAGES
        assert self.starts() == starts
        assert self.state().ended_at

    def starts(self) -> int:
        """How often start() has begun."""
        return len((self.directory / "started").read_text())

    @property
    def place(self) -> tuple[str, ...]:
        """The queue, as arguments of a command."""
        return (f"{self.server.url}#{self.key}",)

    def our_lines(self, text: str, level: str = "INFO") -> list[str]:
        """The lines of all workers with that text."""
        return [line for worker in self.workers for line in worker.our_lines(level) if text in line]

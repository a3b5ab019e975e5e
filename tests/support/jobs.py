"""Jobs that are crawled run after run: in a JOBDIR, or by workers that share a queue in Redis."""

import os
import random
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from scrapy_bloom.job.jobdir import FILE
from scrapy_bloom.queues.redis_queue import RedisQueue
from scrapy_bloom.queues.serialized import url_of
from scrapy_bloom.queues.sqlite_queue import SQLiteQueue
from scrapy_bloom.queues.store import MOST_DEATHS, Queue, Row, State
from scrapy_bloom.redis.server import RedisServer
from tests.support import servers
from tests.support.cli import Ran, bloom
from tests.support.crawls import Crawl
from tests.support.sites import Site

PLACES = ["JOBDIR", "Redis"]


class Job:
    """A job of one spider and one site in one of `PLACES`; in Redis, its directory is the key."""

    def __init__(
        self,
        place: str,
        directory: Path,
        site: Site,
        spider: Path | str,
        *,
        workers: int = 1,
        **settings: Any,
    ) -> None:
        self.is_shared = place == "Redis"
        self.directory = directory
        self.site = site
        self.workers = workers if self.is_shared else 1  # which a JOBDIR always has
        self.key = os.fspath(directory)
        self.server = servers.shared("valkey")
        where: dict[str, Any] = {"JOBDIR": "job"}
        if self.is_shared:
            where = {
                # A server that is only slow is not away.
                "BLOOM_REDIS_URL": f"{self.server.url}?socket_timeout=10",
                "BLOOM_REDIS_KEY": self.key,
                "BLOOM_SHARED_LIMITS": False,  # each worker gets as much as if it were alone
            }
        self.settings = {
            "SCHEDULER": "scrapy_bloom.CrashSafeScheduler",
            "RETRY_ENABLED": False,
            **where,
            **settings,
        }
        self.spider = spider if isinstance(spider, Path) else self.write_spider(spider)

    def write_spider(self, code: str) -> Path:
        self.spider = self.directory / "spider.py"
        self.spider.write_text(textwrap.dedent(code))
        return self.spider

    def start(
        self,
        run: str = "",
        *,
        workers: int = 0,
        arguments: dict[str, str] | None = None,
        **settings: Any,
    ) -> list[Crawl]:
        """Start the workers, or so many, and wait until they have joined the job."""
        crawls = [
            Crawl(
                self.site.url,
                self.directory,
                {**self.settings, "BLOOM_RUN": run or None, **settings},
                spider=self.spider,
                arguments=arguments,
            )
            for _ in range(workers or self.workers)
        ]
        for crawl in crawls:
            crawl.wait_until(lambda crawl=crawl: "Bloom filter in " in crawl.output)
        return crawls

    def crawl(self, run: str = "", **options: Any) -> list[Crawl]:
        """Crawl a run to its end; the hits of the site are of this call."""
        self.site.forget()
        crawls = self.start(run, **options)
        self.finish(crawls)
        return crawls

    def crawl_alone(self, run: str = "", **options: Any) -> Crawl:
        """Crawl a run with one worker."""
        (crawl,) = self.crawl(run, workers=1, **options)
        return crawl

    def finish(self, crawls: Sequence[Crawl], reason: str = "finished") -> None:
        """Have the site answer, and wait for crawls to end well."""
        self.site.release()
        for crawl in crawls:
            assert crawl.finish() == 0, crawl.output
            assert f"'finish_reason': '{reason}'" in crawl.output, crawl.output

    def hold(self, answers: int, run: str = "", **options: Any) -> list[Crawl]:
        """Start workers that wait for answers after so many of them."""
        self.site.hold_after(answers)
        crawls = self.start(run, **options)
        servers.wait_for(self.site.is_holding, lambda: crawls[0].output)
        return crawls

    def crawl_with_kills(self, run: str, kills: int, dice: random.Random) -> Counter[str]:
        """Crawl a run with kills at random; count, for each path, those that left it in flight."""
        self.site.forget()
        workers: list[Crawl] = []
        in_flight: Counter[str] = Counter()

        def is_held() -> bool:
            return self.site.is_holding() or not any(worker.running() for worker in workers)

        def output() -> str:
            return workers[0].output

        assert kills <= MOST_DEATHS
        for _ in range(kills):
            self.site.hold_after(dice.randrange(8))
            workers += self.start(run, workers=self.workers - len(workers))
            servers.wait_for(is_held, output)
            victim = workers.pop(dice.randrange(len(workers)))
            victim.kill()
            in_flight.update(self.paths(State.IN_FLIGHT))
            self.expire_lease(victim)
            if not workers:
                # Otherwise, the site may still hold requests of the killed worker, so that the
                # next one is killed before its own requests arrive.
                self.site.settle()
        workers += self.start(run, workers=self.workers - len(workers))
        self.finish(workers)
        self.site.settle()
        return in_flight

    def interrupt(self, crawl: Crawl) -> None:
        """Pause a crawl: the site answers what it has in flight, and nothing before."""
        crawl.held_by = self.site
        assert crawl.interrupt() == 0, crawl.output

    def kill(self, *crawls: Crawl) -> None:
        """Kill workers; others get their requests at once."""
        for crawl in crawls:
            crawl.kill()
            self.expire_lease(crawl)

    def expire_lease(self, killed: Crawl) -> None:
        """Let the other workers get the requests of a killed worker at once."""
        if self.is_shared:
            client = self.server.client
            workers = f"{{{self.key}}}:workers"
            for field, value in client.hgetall(workers).items():
                if field.endswith(b":name") and value.endswith(f":{killed.pid}".encode()):
                    client.hset(workers, field.removesuffix(b":name"), 1)
            client.hdel(self.key, "look")  # it is time to look for dead ones

    # What is in the store.

    def bloom(self, command: str, *options: str) -> Ran:
        """Run `scrapy bloom COMMAND` on the place of the job."""
        where = [f"{self.server.url}#{self.key}"] if self.is_shared else ["job"]
        return bloom(command, *where, *options, cwd=self.directory)

    @contextmanager
    def _queue(self) -> Iterator[Queue]:
        if self.is_shared:
            with closing(RedisServer(self.server.url)) as server:
                yield RedisQueue(server, self.key)
        else:
            yield SQLiteQueue(self.directory / "job" / FILE)

    def listed(self, state: State) -> dict[str, Row]:
        """Return the requests of a state by their paths, of which each has only one."""
        rows = self._rows(state)
        paths = list(map(self._path_of, rows))
        assert len(set(paths)) == len(paths), paths
        return dict(zip(paths, rows, strict=True))

    def paths(self, state: State) -> set[str]:
        """Return the paths of the requests of a state."""
        return set(map(self._path_of, self._rows(state)))

    def _rows(self, state: State) -> list[Row]:
        with self._queue() as queue:
            return list(queue.requests(state))

    def _path_of(self, row: Row) -> str:
        return url_of(row.first_data).replace(self.site.url, "/")

    @property
    def failed(self) -> set[str]:
        """The paths of the requests that failed, or wait for a page."""
        return self.paths(State.FAILED) | self.paths(State.WAITING)

    @property
    def counts(self) -> dict[str, int]:
        """How many requests are in each state, without states that have none."""
        with self._queue() as queue:
            counts = queue.status().counts
        return {state.label: number for state, number in counts.items() if number}

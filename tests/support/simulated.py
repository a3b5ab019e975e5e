"""A simulation of a crawl by several workers, on a real server, driven step by step by a schedule.

Each worker runs the shipped scheduler, with its queue, its requests in flight and its thread, and
the duplicate filter. Simulated are the rest of Scrapy (`Engine`), the site, the time and the
faults. All threads wait until they are chosen, so only one runs at a time: at each call of the
server, and between two functions of an event loop. So a seed has one schedule.

Pages link to pages, fail some times or always, redirect to pages, or kill their worker. Runs begin
in mid-crawl. When the crawl has ended, each page was crawled, or is kept. Then the site is
repaired: no page fails or redirects any more. A last run crawls what was not crawled before.
"""

import functools
import logging
import math
import random
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, cast

import pytest
import redis
from scrapy.crawler import Crawler
from scrapy.settings import Settings
from scrapy.statscollectors import StatsCollector
from scrapy.utils.request import RequestFingerprinter

from scrapy_bloom.crawl.dupefilter import BloomDupeFilter
from scrapy_bloom.crawl.scheduler import in_thread
from scrapy_bloom.crawl.scheduler import scheduler as scheduler_module
from scrapy_bloom.crawl.scheduler.scheduler import CrashSafeScheduler
from scrapy_bloom.exceptions import OutageError
from scrapy_bloom.generations.policy import Origin, Policy
from scrapy_bloom.queues.collected import Collected
from scrapy_bloom.queues.redis_queue import RedisQueue
from scrapy_bloom.queues.serialized import url_of
from scrapy_bloom.queues.store import MOST_DEATHS, MOST_TRIES, State
from scrapy_bloom.redis import backend as backend_module
from scrapy_bloom.redis.backend import RedisBackend
from scrapy_bloom.redis.server import RedisServer
from scrapy_bloom.settings import BloomSettings
from tests.support import servers, simulated_time
from tests.support.simulated_engine import Engine
from tests.support.simulated_site import SimSpider, Site, page_of
from tests.support.simulated_time import (
    EPOCH,
    Actor,
    KilledError,
    Loop,
    clock,
    current,
    now,
)

KEY = "sim"
LEASE_SECS = 1.0
DEADLINE_SECS = 3.0  # of an outage
MOST = 3  # changes of a batch
MOST_KILLS = 20  # of a page; more is for ever if start() yields it, and does not filter it
CALL_SECS, STEP_SECS = 0.02, 0.002  # what a call of the server takes, and any other step
CONTROL = "control"  # a key: the time of the scripts, and how many writes the next one may make
POLICY = Policy(expected=4, error_rate=1e-6)
SETTINGS = Settings({"LOGSTATS_INTERVAL": 0, "SCHEDULER": CrashSafeScheduler})

CALL_FAULTS = ("reply lost", "request lost", "half-way", "sent twice")
WORKER_FAULTS = ("killed", "stopped", "leaves", "outage")
SERVER_FAULTS = (
    *("emptied", "set back", "scripts flushed", "evicts", "an old copy"),
    *("clock forward", "clock back"),
)
KEEPS = (State.FAILED, State.WAITING, State.DEAD)
LOSSES = ("emptied", "set back", "evicts")
RUN_FAULTS = ("another run", "a late worker")

# In place of the server's clock and `redis.call`, which fails where the schedule says so.
_CONTROLLED = """
local seconds, microseconds, writes_left = string.match(
  redis.call('GET', 'control'), '^(%d+) (%d+) (%d+)$')
writes_left = tonumber(writes_left)
local writes = {ZADD = 1, ZREM = 1, ZREMRANGEBYLEX = 1, HSET = 1, HDEL = 1, HSETNX = 1,
                HINCRBY = 1, BITFIELD = 1, SETRANGE = 1, SETBIT = 1}
local function call_if_allowed(command, ...)
  if command == 'TIME' then return {seconds, microseconds} end
  if writes[command] then
    if writes_left == 0 then error('failed half-way') end
    writes_left = writes_left - 1
  end
  return redis.call(command, ...)
end
"""


@functools.cache
def controlled(script: str, moves: int) -> str:
    """Return a script that depends on the key, and moves so many requests at once."""
    assert "redis.call" in script
    replaced = script.replace("redis.call", "call_if_allowed")
    return _CONTROLLED + replaced.replace("local moves,", f"local moves = {moves}\nlocal _,")


class SimServer(RedisServer):
    """A worker's connection: each call waits for its turn, and may fail."""

    def __init__(self, world: "World") -> None:
        super().__init__(world.server.url, deadline_secs=DEADLINE_SECS)
        self._world = world

    def _connected(self) -> Any:
        # One for all, since only one of them calls; a connection for each would take minutes.
        return self._world.client

    def script(self, text: str, keys: Sequence[str], *args: Any) -> Any:
        return super().script(controlled(text, self._world.moves), keys, *args)

    def now(self) -> float:
        return float(self.call(lambda _: self._world.wall))

    def call(self, function: Callable[[Any], Any], **options: bool) -> Any:
        return super().call(functools.partial(self._world.call, function), **options)


class Worker:
    """A process of the crawl."""

    def __init__(self, world: "World", run: str) -> None:
        self.world = world
        self.actors: list[Actor] = []  # its threads
        self.is_killed = False
        self.reason = ""  # why it has closed the spider
        self.fault = ""  # of its next call
        self.stopped_until = self.outage_until = 0.0
        self.delays = 0  # stops and outages; after two, the server may seem too far away
        self.loop = Loop(world.dice)
        self.run_name = run
        self._engine: Engine | None = None
        Actor(self._crawl, worker=self).start()

    @property
    def is_over(self) -> bool:
        """Whether it has found that the crawl is over."""
        queue = self._engine.scheduler.dqs if self._engine is not None else None
        return self.reason == "finished" or (queue is not None and queue._driver.is_over)

    def stop(self) -> None:
        """Close the spider as soon as it is open."""

        def stop() -> None:
            assert self._engine is not None
            self._engine.stop()

        self.loop.calls.append(stop)

    def _crawl(self) -> None:
        try:
            self._open()
        except OutageError:
            self.reason = "bloom_outage"
        while not self.reason:
            self.loop.run_once()

    def _open(self) -> None:
        world = self.world
        crawler = Crawler(SimSpider, world.settings)
        crawler.crawling = True
        crawler.stats = StatsCollector(crawler)
        crawler.request_fingerprinter = RequestFingerprinter.from_crawler(crawler)
        crawler.spider = spider = SimSpider.from_crawler(crawler)
        spider.worker = self
        crawler.engine = engine = cast(Any, Engine(self, crawler))
        settings = BloomSettings(
            run=self.run_name,
            redis_url=world.server.url,
            is_crash_safe=True,
            queue_lease_secs=LEASE_SECS,
        )
        backend = RedisBackend(SimServer(world), KEY, POLICY, Origin(), mirror=world.mirror)
        df = BloomDupeFilter(
            crawler=crawler, backend=backend, settings=settings, queue_is_shared=True
        )
        backend.open()
        scheduler = CrashSafeScheduler(crawler, df, settings)
        engine.open(scheduler)
        self._engine = engine
        if scheduler.dqs._driver.is_late and self.run_name == world.run_name:
            # The server has lost the names of earlier runs. The user sets another name.
            world.runs += 1


@functools.cache
def a_server() -> servers.Server:
    return servers.Server("valkey", "--save", "", "--appendonly", "no")


ids = random.Random()


class World:
    """The site, the server, the clock and the workers, as a schedule drives them."""

    def __init__(
        self, server: servers.Server, site: Site, dice: random.Random, kinds: Sequence[str]
    ) -> None:
        self.server = server
        self.site = site
        self.dice = dice
        self.client = server.client
        self.client.flushall()
        self.server_connection = RedisServer(server.url)
        self.is_back = threading.Semaphore(0)
        self.mirror = dice.random() < 0.8
        self.moves = dice.choice([1, 2, 100])
        queue_class = dice.choice(["DownloaderAwarePriorityQueue", "ScrapyPriorityQueue"])
        self.settings = SETTINGS.copy()
        self.settings.update(
            {
                "SCHEDULER_PRIORITY_QUEUE": f"scrapy.pqueues.{queue_class}",
                "CONCURRENT_REQUESTS": dice.choice([1, 2, 3, 8]),
                "CONCURRENT_REQUESTS_PER_DOMAIN": dice.choice([1, 2, 8]),
                "RETRY_TIMES": dice.randint(0, 2),
                "REDIRECT_MAX_TIMES": 5,
            }
        )
        clock.now = 1000.0
        self.step = 0
        self.log: list[str] = []
        self.errors: list[BaseException] = []
        self.runs = 1
        self.visits: Counter[int] = Counter()
        self.done: set[int] = set()  # pages that were crawled, and have not failed
        self.rescued: set[int] = set()  # pages whose errbacks have yielded a request
        self.crawled_before: set[int] = set()  # pages that have redirected to others
        self.deadly = {page for page in range(len(site.links)) if site.is_deadly(page)}
        self.is_back_after_the_end = False  # after a worker saw that the crawl was over
        self._half_way = 0  # scripts that have failed half-way
        self._has_lost = False  # whether the server has
        # To which pages each page leads by redirects, before the site is repaired.
        self._led_to = [site.chain_of(page) for page in range(len(site.links))]
        self._is_over = False  # whether a worker has ended because the crawl was over
        self._kinds = kinds
        self._ahead = EPOCH  # the server's clock minus ours
        self._copies: list[Callable[[], Any]] = []
        self._saved: list[dict[bytes, bytes]] = [{}]
        self.workers = [Worker(self, self.run_name) for _ in range(dice.randint(1, 4))]

    @property
    def wall(self) -> float:
        """The server's time in seconds since 1970."""
        return now() + self._ahead

    @property
    def run_name(self) -> str:
        """The name of the run that the user wants."""
        return f"run {self.runs}"

    def _pass(self, secs: float) -> None:
        """Have time pass. Many workers run at the same time, and are not slower for that."""
        clock.now += secs * 4 / max(4, len(self.workers))

    # What the workers call.

    def visit(self, worker: Worker, page: int) -> int | str:
        """Return the page to which a page redirects, how it fails, or "done"."""
        self.visits[page] += 1
        if page in self.site.killers and self.visits[page] <= MOST_KILLS:
            self.log.append(f"{self.step}: page {page} kills worker {self.workers.index(worker)}")
            worker.is_killed = True
            raise KilledError
        if page in self.site.redirects:
            return self.site.redirects[page]
        times, how = self.site.failing.get(page, (0, ""))
        return how if self.visits[page] <= times else "done"

    def call(self, function: Callable[[Any], Any], client: Any) -> Any:
        """Call the server for the current worker."""
        current().wait()
        worker = current().worker
        fault, worker.fault = worker.fault, ""
        self._pass(CALL_SECS)
        if "set back" in self._kinds and self.dice.random() < 0.1:
            self._save()
        if now() < worker.outage_until or fault == "request lost":
            raise redis.ConnectionError("the request was lost")
        if fault == "sent twice":
            self._copies.append(functools.partial(function, client))
        self._control(self.dice.randint(0, 12) if fault == "half-way" else 10**9)
        try:
            answer = function(client)
        except redis.ResponseError as error:
            if "failed half-way" in str(error):
                raise redis.ConnectionError("it failed half-way") from None
            raise
        if fault == "reply lost":
            raise redis.ConnectionError("the reply was lost")
        return answer

    def _control(self, writes: int = 10**9) -> None:
        micros = round(1e6 * self.wall)
        self.client.set(CONTROL, f"{micros // 10**6} {micros % 10**6} {writes}")

    def _save(self) -> None:
        """Keep a snapshot of the server, to which it may be set back."""
        names = [entry for entry in self.client.scan_iter() if entry != CONTROL.encode()]
        self._saved.append({name: self.client.dump(name) for name in names})

    # What the schedule does.

    def run(self) -> None:
        """Let a thread run until it waits; if all wait for a time, it comes."""
        self.step += 1
        actors = [each_actor for worker in self.workers for each_actor in worker.actors]
        while not (ready := [each_actor for each_actor in actors if self._is_ready(each_actor)]):
            clock.now = min(
                max(
                    now() if each_actor.is_ready() else each_actor.until,
                    each_actor.worker.stopped_until,
                )
                for each_actor in actors
            )
            assert now() < math.inf, "all wait for ever"
        self._pass(STEP_SECS)
        actor = self.dice.choice(ready)
        actor.run_on()
        if self.errors:
            raise self.errors[0]
        if actor.worker.is_killed or actor.worker.reason:
            self._end(actor.worker)

    def _is_ready(self, actor: Actor) -> bool:
        if actor.worker.stopped_until > now():
            return False
        return actor.until <= now() or bool(actor.is_ready())

    def _end(self, worker: Worker) -> None:
        """End a worker, and start others, as the user does."""
        self.kill(worker)
        # A suspect dies with the worker that has it alone, whatever has killed that.
        for row in RedisQueue(self.server_connection, KEY).requests(State.IN_FLIGHT):
            if row.deaths >= MOST_DEATHS:
                self.deadly.add(page_of(url_of(row.first_data)))
        self.log.append(f"{self.step}: a worker has ended: {worker.reason or 'killed'}")
        assert worker.reason != "bloom_queue_failed" or worker.delays > 1
        self.workers.remove(worker)
        if worker.reason == "finished" and worker.run_name == self.run_name:
            self._is_over = True
            return
        if not self.workers or self.dice.randint(0, 1):
            self.start_worker()

    def kill(self, worker: Worker) -> None:
        """End all threads of a worker."""
        worker.is_killed = True
        for actor in [*worker.actors]:
            actor.run_on()

    def start_worker(self, *, is_late: bool = False) -> None:
        late = f"run {self.dice.randint(1, self.runs)}"
        self.workers.append(Worker(self, late if is_late else self.run_name))

    def begin_run(self) -> None:
        """Begin another run while workers of the last one crawl."""
        self.runs += 1
        self._is_over = False
        self.start_worker()

    def make(self, fault: str, worker: Worker) -> None:
        """Make a fault happen, now or in the next call of a worker."""
        self.log.append(f"{self.step}: {fault} {self.workers.index(worker)}")
        worker.delays += fault in ("stopped", "outage")
        if fault in CALL_FAULTS:
            worker.fault = fault
            self._half_way += fault == "half-way"
        elif fault == "killed":
            self._end(worker)
        elif fault == "stopped":
            worker.stopped_until = now() + self.dice.uniform(0, 4 * LEASE_SECS)
        elif fault == "leaves":
            worker.stop()
        elif fault == "outage":
            worker.outage_until = now() + self.dice.uniform(0, 2 * DEADLINE_SECS)
        elif fault == "another run":
            self.begin_run()
        elif fault == "a late worker":
            self.start_worker(is_late=True)
        else:
            self._of_server(fault)
        self._control()

    def _of_server(self, fault: str) -> None:
        if fault in LOSSES:
            self._has_lost = True
            self.is_back_after_the_end |= self._is_over or any(
                worker.is_over or worker.loop.calls for worker in self.workers
            )
        names = sorted(entry for entry in self.client.scan_iter() if entry != CONTROL.encode())
        if fault == "emptied":
            self.client.flushall()
        elif fault == "set back":
            self.client.flushall()
            saved = self._saved[-self.dice.randint(1, min(4, len(self._saved)))]
            for name, value in saved.items():
                self.client.restore(name, 0, value)
        elif fault == "scripts flushed":
            self.client.script_flush()
        elif fault == "evicts" and names:
            self.client.unlink(self.dice.choice(names))
        elif fault == "an old copy" and self._copies:
            self._old_copy()
        elif fault.startswith("clock"):
            secs = self.dice.uniform(0, 12 * LEASE_SECS)
            self._ahead += secs if fault == "clock forward" else -secs

    def _old_copy(self) -> None:
        copy = self.dice.choice(self._copies)
        self._control()
        try:
            copy()
        except redis.RedisError as error:
            self.log.append(f"{self.step}: the copy is refused: {error}")

    def check(self) -> None:
        """Check that the crawl is complete: each page was crawled, or is kept as failed."""
        stored = RedisQueue(self.server_connection, KEY)
        counts = stored.counts()
        rows = {state: [*stored.requests(state)] for state in KEEPS}
        pages = {state: {page_of(url_of(row.first_data)) for row in rows[state]} for state in KEEPS}
        first = {*chain(*pages.values())}
        # Pages whose requests cannot be serialized are kept with the page that has led to them.
        led_to = self.site.reached(first, self.done, self.rescued, only_in_memory=True)
        kept = first | (led_to & self.site.in_memory)
        self.log.append(f"done {sorted(self.done)}, rescued {sorted(self.rescued)}, kept {pages}")
        reached = self.site.reached(self.site.starts, self.done, self.rescued)
        missing = reached - set(self.visits)
        assert not missing, f"{missing} never crawled"
        for row in rows[State.DEAD]:
            page = page_of(url_of(row.first_data))
            assert row.tries >= MOST_TRIES or page in self.deadly, f"{page} is dead"
        self._check_kills()
        if self.is_back_after_the_end:
            return
        # Where a page redirects to one that is kept itself, that is enough.
        circles = {
            redirect
            for redirect in self.site.redirects
            if self.site.is_circle(redirect, self.visits)
        }
        ended = {*self.done, *self.rescued, *self.site.killers, *self.crawled_before, *kept}
        self.ended = ended | circles
        kept_with = {entry for page in kept for entry in self.site.chain_of(page)}
        for page in reached - kept_with:
            assert self.ended.intersection(self.site.chain_of(page)), f"{page} is lost"
        left = {state: number for state, number in counts.items() if number and state not in KEEPS}
        assert not left, f"{left}: something is left"

    def _check_kills(self) -> None:
        """Check that a page has killed four workers at most for each row that leads to it."""
        for page in self.site.killers if not self._has_lost else ():
            is_start = any(page in self._led_to[start] for start in self.site.starts)
            if is_start and not self.site.is_start_filtered:
                continue  # until start() ends, each worker that runs it adds a row
            rows = sum(page in led_to for led_to in self._led_to)
            # A start request that is new once in each run takes the place of a dead row.
            rows *= 1 + (self.runs if is_start else 0)
            kills = self.visits[page]
            # A script that fails half-way may lease a suspect without the note that it is alone.
            most = (MOST_DEATHS + 1) * rows + self._half_way
            assert kills <= most, f"{page} has killed {kills} workers"

    def repair(self) -> None:
        """Have no page fail or redirect any more, and begin a last run."""
        site, self.site = self.site, self.site.repaired()
        self.crawled_before = {
            page for page in site.redirects if self.ended.intersection(site.chain_of(page)[1:])
        }
        self.log.append(f"{self.step}: the site is repaired: {site}")
        self.begin_run()

    def check_repaired(self) -> None:
        """Check that a run of a repaired site has crawled all that was not crawled before."""
        self.check()
        counts = RedisQueue(self.server_connection, KEY).counts()
        assert self.is_back_after_the_end or not counts[State.FAILED] + counts[State.WAITING]

    def crawl_all(self, faults: int, rate: float, most: int) -> None:
        """Let all workers run to their end; so many faults happen, at this rate."""
        most += self.step
        while self.workers:
            if faults and self.dice.random() < rate:
                faults -= 1
                self.make(self.dice.choice(self._kinds), self.dice.choice(self.workers))
            self.run()
            assert self.step < most, "it does not end"

    def end(self) -> None:
        """End what still runs, after a failure."""
        for worker in self.workers:
            self.kill(worker)


def simulate(seed: int) -> World:
    """Run a random schedule, and check it; raises an AssertionError with its log."""
    dice = random.Random(seed)
    ids.seed(seed)
    faults = dice.choice([0, 1, 1, 2, 3, 5, 8, 13])
    kinds = [*CALL_FAULTS, *WORKER_FAULTS, *SERVER_FAULTS, *RUN_FAULTS]
    if dice.random() < 0.5:
        kinds = dice.sample(kinds, dice.randint(1, 4))
    world = World(a_server(), Site.random(dice), dice, kinds)
    rate = dice.choice([0.005, 0.02, 0.1])
    most = 20_000
    try:
        world.crawl_all(faults, rate, most)
        world.check()
        if dice.random() < 0.5 and not world.is_back_after_the_end:
            world.repair()
            world.crawl_all(0, rate, most)
            world.check_repaired()
    except BaseException as error:
        world.end()
        log = "\n".join(world.log)
        raise AssertionError(f"seed {seed}: {error!r}\n{world.site}\n{log}") from error
    finally:
        world.server_connection.close()
    return world


def _raise(_: Crawler, error: Exception) -> None:
    raise error


def patch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the package use simulated threads and time, and small batches."""
    for owner, name, value in (
        *simulated_time.replaced(),
        (in_thread, "Collected", lambda: Collected(MOST)),
        (backend_module, "_MOST_LOSSES", 1000),
        (secrets, "token_hex", lambda nbytes: ids.randbytes(nbytes).hex()),
        (secrets, "token_bytes", ids.randbytes),
        (scheduler_module, "log_and_raise", _raise),
        (logging.root.manager, "disable", logging.CRITICAL),
    ):
        monkeypatch.setattr(owner, name, value)

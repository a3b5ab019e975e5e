"""A model of a crawl by several workers, on a real server, driven step by step by a schedule.

Each worker has a real SharedStore and SharedFilter, in a thread of its own. Only one thread runs at
a time: before each call of the server, a worker waits until it is chosen. The time is the
schedule's, too. So a schedule is all the choices that were made, and a seed has one schedule.
"""

import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import redis

from scrapy_bloom.exceptions import OutageError, RefusedError
from scrapy_bloom.queues import collected
from scrapy_bloom.queues.shared_state import SETS
from scrapy_bloom.redis.scripts import shard_key
from tests.support import servers
from tests.support.simulated import (
    CALL_MS,
    CONTROL,
    KEY,
    LEASE_MS,
    KilledError,
    Site,
    Worker,
    a_server,
    ids,
)

CALL_FAULTS = ("reply lost", "request lost", "half-way", "sent twice")
WORKER_FAULTS = ("killed", "stopped", "leaves")
SERVER_FAULTS = (
    *("emptied", "set back", "scripts flushed", "evicts", "an old copy"),
    *("clock forward", "clock back"),
)


class Thread(Worker):
    """A worker in a thread."""

    def __init__(self, world: "World") -> None:
        super().__init__(world)
        self.chosen = threading.Semaphore(0)
        self.fault = ""  # of its next call
        self.is_killed = self.has_ended = False
        self.stopped_until = 0  # step
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.world.wait_to_be_chosen(self)
            self.crawl()
        except KilledError:
            pass
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test shall show it
            self.error = error
        self.has_ended = True
        self.world.is_back.release()

    def join(self) -> None:
        """Wait for the end of the thread."""
        self._thread.join(10)


class World:
    """The site, the server, the clock and the workers, as a schedule drives them.

    Args:
        server: of this world alone.
        site: what is crawled.
        dice: makes the choices of details, and those of `choose`.
        number: of workers.
        moves: how many requests a script may move.
        saves: make snapshots every few steps.
        shards: of the queue. A fault of the server is one of some of them.
    """

    def __init__(
        self,
        server: servers.Server,
        site: Site,
        dice: random.Random | None = None,
        *,
        number: int = 2,
        by_slot: bool = False,
        mirror: bool = True,
        moves: int = 100,
        saves: bool = False,
        shards: int = 1,
    ) -> None:
        self.shards = shards
        self.saves = saves
        self.server = server
        self.site = site
        self.by_slot = by_slot
        self.mirror = mirror
        self.moves = moves
        self.dice = dice
        self.now = 1_700_000_000_000  # ms
        self.step = 0
        self.visits: Counter[int] = Counter()
        self.dead: list[int] = []
        self.log: list[str] = []
        self.is_back = threading.Semaphore(0)
        self.client = server.client
        self._copies: list[Callable[[], Any]] = []
        self._is_back = False  # after a worker saw that the crawl was over
        self._saved: list[dict[bytes, bytes]] = [{}]
        self.client.flushall()
        self.workers = [Thread(self) for _ in range(number)]

    # What the workers call.

    def wait_to_be_chosen(self, worker: Thread) -> None:
        worker.chosen.acquire()
        if worker.is_killed:
            raise KilledError

    def turn(self, worker: Thread) -> None:
        self.is_back.release()
        self.wait_to_be_chosen(worker)

    def choose_detail(self, least: int, most: int) -> int:
        return self.dice.randint(least, most) if self.dice else most

    def crawl(self, page: int) -> None:
        self.visits[page] += 1
        if page in self.site.killers:
            self.log.append(f"page {page} kills its worker")
            raise KilledError

    def call(self, worker: Thread, call: Callable[[], Any]) -> Any:
        self.turn(worker)
        fault, worker.fault = worker.fault, ""
        self.now += CALL_MS
        if fault == "sent twice":
            self._copies.append(call)
        if fault == "request lost":
            raise OutageError("the request was lost")
        writes = self.choose_detail(0, 12) if fault == "half-way" else 10**9
        self._control(writes)
        try:
            answer = call()
        except RefusedError as error:
            if "failed half-way" in str(error):
                raise OutageError("it failed half-way") from None
            raise
        if fault == "reply lost":
            raise OutageError("the reply was lost")
        return answer

    def _control(self, writes: int = 10**9) -> None:
        self.client.set(CONTROL, f"{self.now // 1000} {self.now % 1000 * 1000} {writes}")

    # What the schedule does.

    def run(self, worker: Thread) -> None:
        """Let a worker run until it is interrupted."""
        self.step += 1
        if self.saves and self.choose_detail(0, 8 * self.shards - 1) == 0:
            self.save()
        worker.chosen.release()
        assert self.is_back.acquire(timeout=60), "\n".join(self.log)
        if worker.error is not None:
            raise worker.error
        if worker.has_ended:
            self.workers.remove(worker)
            self.log.append(f"{self.step}: a worker has ended")
            if not (worker.is_killed or worker.leaves) and worker.is_over:
                return
            if not self.workers or self.choose_detail(0, 1):
                self.workers.append(Thread(self))  # the user starts another one

    def save(self) -> None:
        """Keep a snapshot of the server, to which it may be set back."""
        # A lock would not expire, since a dump does not say when.
        left_out = (CONTROL.encode(), b":maker")
        names = [each for each in self.client.scan_iter() if not each.endswith(left_out)]
        self._saved.append({each: self.client.dump(each) for each in names})

    def runnable(self) -> list[Thread]:
        return [each for each in self.workers if each.stopped_until <= self.step] or self.workers

    def make(self, fault: str, worker: Thread) -> None:
        """Make a fault happen, now or in the next call of a worker."""
        self.log.append(f"{self.step}: {fault} {self.workers.index(worker)}")
        if fault in CALL_FAULTS:
            worker.fault = fault
        elif fault == "killed":
            worker.is_killed = True
        elif fault == "stopped":
            worker.stopped_until = self.step + self.choose_detail(10, 120)
        elif fault == "leaves":
            worker.leaves = True
        else:
            self._of_server(fault)
        self._control()

    def _of_server(self, fault: str) -> None:
        first, number = self.choose_detail(0, self.shards - 1), self.choose_detail(1, self.shards)
        self._hit = [(first + each) % self.shards for each in range(number)]
        names = sorted(each for each in self.client.scan_iter() if self._is_hit(each))
        if fault == "emptied" and names:
            self.client.unlink(*names)
        elif fault == "set back":
            self._is_back |= any(each.is_over for each in self.workers)
            if names:
                self.client.unlink(*names)
            saved = self._saved[-self.choose_detail(1, min(3 + self.shards, len(self._saved)))]
            for name, value in saved.items():
                if self._is_hit(name):
                    self.client.restore(name, 0, value)
        elif fault == "scripts flushed":
            self.client.script_flush()
        elif fault == "evicts" and names:
            self.client.unlink(names[self.choose_detail(0, len(names) - 1)])
        elif fault == "an old copy" and self._copies:
            self._old_copy()
        elif fault.startswith("clock"):
            by = self.choose_detail(1, 12 * LEASE_MS)
            self.now += by if fault == "clock forward" else -by

    def _is_hit(self, name: bytes) -> bool:
        """Whether a key is in a shard that has the fault."""
        tag = name.strip(b"{").partition(b"}")[0].decode()
        return any(tag == shard_key(KEY, each) for each in self._hit)

    def _old_copy(self) -> None:
        copy = self._copies[self.choose_detail(0, len(self._copies) - 1)]
        self._control()
        try:
            copy()
        except (RefusedError, redis.RedisError) as error:
            self.log.append(f"{self.step}: the copy is refused: {error}")

    def check(self) -> None:
        """Check that the crawl is complete: nothing is left of it."""
        missing = self.site.reachable() - set(self.visits)
        assert not missing, f"{missing} never crawled"
        assert set(self.dead) <= set(self.site.killers), f"{self.dead} are dead"
        keys = [shard_key(KEY, shard) for shard in range(self.shards)]
        left = [name for name in SETS for key in keys if self.client.zcard(f"{{{key}}}:{name}")]
        assert self._is_back or not set(left) - {"dead"}, f"{left}: something is left"

    def end(self) -> None:
        """End what still runs, after a failure."""
        for each in self.workers:
            each.is_killed = True
            each.chosen.release()
            each.join()


def simulate(
    seed: int, server: servers.Server | None = None, *, shards: int = 1, kind: str = ""
) -> World:
    """Run a random schedule, and check it; raises an AssertionError with its log.

    Shards are for one fault at a time.
    """
    dice = random.Random(seed)
    ids.seed(seed)
    faults = dice.choice([0, 1, 1, 2, 3, 5, 8, 13]) if shards == 1 else 1
    kinds = [*CALL_FAULTS, *WORKER_FAULTS, *SERVER_FAULTS]
    if shards > 1:
        kinds = [kind or dice.choice(kinds)]
        collected._MOST_KEPT_BYTES = dice.choice([4, 1 << 20])
    elif dice.random() < 0.5:
        kinds = dice.sample(kinds, dice.randint(1, 4))
    world = World(
        server or a_server(),
        Site.random(
            dice,
            has_killers=shards == 1 or kinds != ["set back"],
            most_pages=13 if shards == 1 else 60,
        ),
        dice,
        number=dice.randint(1, 4),
        by_slot=dice.random() < 0.5,
        mirror=dice.random() < 0.8,
        saves="set back" in kinds,
        moves=dice.choice([1, 2, 100]),
        shards=shards,
    )
    rate = dice.choice([0.02, 0.1, 0.3])
    first = dice.randrange(250) if shards > 1 else 0  # step; one of few has to hit
    # Whoever runs start() and dies of a request leaves another one of it, if it is not filtered.
    is_deadly = world.site.killers and not world.site.is_start_filtered
    most = 1500 * shards + 400 * faults + 8000 * bool(is_deadly)
    try:
        while world.workers:
            worker = dice.choice(world.runnable())
            if faults and world.step >= first and dice.random() < rate:
                faults -= 1
                world.make(dice.choice(kinds), worker)
            world.run(worker)
            assert world.step < most, "it does not end"
        world.check()
    except BaseException as error:
        world.end()
        log = "\n".join(world.log)
        raise AssertionError(f"seed {seed}: {error!r}\n{log}") from error
    return world

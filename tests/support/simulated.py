"""A model of a crawl by several workers, on a real server, driven step by step by a schedule.

Each worker has a real SharedStore and SharedFilter, in a thread of its own. Only one thread runs at
a time: before each call of the server, a worker waits until it is chosen. The time is the
schedule's, too. So a schedule is all the choices that were made, and a seed has one schedule.
"""

import functools
import random
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import redis

from scrapy_bloom.exceptions import OutageError, RefusedError
from scrapy_bloom.generations.lifecycle import NoRoomError
from scrapy_bloom.generations.policy import ANY_ORIGIN, Policy
from scrapy_bloom.queues import collected
from scrapy_bloom.queues.batch import Found
from scrapy_bloom.queues.collected import Collected, SharedBatch
from scrapy_bloom.queues.shared import RejoinedError, Reply, SharedStore
from scrapy_bloom.queues.shared_state import SETS
from scrapy_bloom.redis import filter as filter_module
from scrapy_bloom.redis import making
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.filter import LostKeysError, OtherFilterError, SharedFilter
from scrapy_bloom.redis.scripts import keys_of
from tests.support import servers

KEY = "sim"
LEASED = keys_of(KEY)[2]
LEASE_MS = 1000
LOCK_MS = 1  # of the clock on the wall: each crawl makes what it needs
MAX_BATCH = 3  # requests found and done
CALL_MS = 20  # what a call of the server takes
CONTROL = "control"  # a key: the time of the scripts, and how many writes the next one may make
POLICY = Policy(expected=4, error_rate=1e-6)

CALL_FAULTS = ("reply lost", "request lost", "half-way", "sent twice")
WORKER_FAULTS = ("killed", "stopped", "leaves")
SERVER_FAULTS = (
    *("emptied", "set back", "scripts flushed", "evicts", "an old copy"),
    *("clock forward", "clock back"),
)

# In place of the server's clock and `redis.call`, which fails where the schedule says so.
_CONTROLLED = """
local seconds, microseconds, writes_left = string.match(
  redis.call('GET', 'control'), '^(%d+) (%d+) (%d+)$')
writes_left = tonumber(writes_left)
local writes = {ZADD = 1, ZREM = 1, ZREMRANGEBYLEX = 1, HSET = 1, HDEL = 1, HSETNX = 1,
                HINCRBY = 1, BITFIELD = 1, UNLINK = 1}
local function call(command, ...)
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
    before, call, after = script.partition("local call = redis.call\n")
    assert call
    return (before + _CONTROLLED + after).replace(
        "local moves,", f"local moves = {moves}\nlocal _,"
    )


class KilledError(BaseException):
    """Ends the thread of a worker that was killed."""


@dataclass(frozen=True)
class Site:
    """Pages with links to others.

    Attributes:
        links: of each page.
        starts: pages that start() yields.
        raises: start() raises after these.
        killers: pages that kill their worker.
    """

    links: Sequence[Sequence[int]]
    starts: Sequence[int]
    is_start_filtered: bool
    raises: bool
    killers: Sequence[int]

    def start(self) -> Iterator[int]:
        yield from self.starts
        if self.raises:
            raise ZeroDivisionError

    @classmethod
    def random(cls, dice: random.Random) -> "Site":
        pages = dice.randint(1, 13)
        links: list[list[int]] = [
            dice.sample(range(pages), dice.randrange(min(pages, 5))) for _ in range(pages)
        ]
        return cls(
            links,
            starts=dice.sample(range(pages), dice.randrange(1, min(pages, 3) + 1)),
            is_start_filtered=dice.random() < 0.5,
            raises=dice.random() < 0.2,
            killers=[dice.randrange(pages)] if dice.random() < 0.15 else [],
        )

    def reachable(self) -> set[int]:
        found, to_do = set(), [*self.starts]
        while to_do:
            page = to_do.pop()
            if page not in found:
                found.add(page)
                to_do += [] if page in self.killers else self.links[page]
        return found


class SimServer(RedisServer):
    """A worker's connection: each call waits for its turn, and may fail."""

    def __init__(self, world: "World", worker: "Worker", url: str) -> None:
        super().__init__(url)
        # One for all, since only one of them calls; a connection for each would take minutes.
        self._client = world.client
        self._world = world
        self._worker = worker

    def script(self, text: str, keys: Sequence[str], *args: Any, **options: bool) -> Any:
        return super().script(controlled(text, self._world.moves), keys, *args, **options)

    def call(
        self,
        function: Callable[[Any], Any],
        *,
        patient: bool = True,
        fails_when_full: bool = False,
    ) -> Any:
        return self._world.call(self._worker, functools.partial(super().call, function))


class Worker:
    """What a crawl does with its store, in a thread."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.leaves = self.is_over = self.is_killed = self.has_ended = False
        self.chosen = threading.Semaphore(0)
        self.fault = ""  # of its next call
        self.stopped_until = 0  # step
        self.error: BaseException | None = None
        server = SimServer(world, self, world.server.url)
        self.filter = SharedFilter(server, KEY, POLICY, ANY_ORIGIN, mirror=world.mirror)
        self.filter._clock = lambda: world.now / 1000
        self.store = SharedStore(
            self.filter, "spider", by_slot=world.by_slot, lease_secs=LEASE_MS / 1000
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.world.wait_to_be_chosen(self)
            self._crawl()
        except KilledError:
            pass
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test shall show it
            self.error = error
        self.has_ended = True
        self.world.is_back.release()

    def join(self) -> None:
        """Wait for the end of the thread."""
        self._thread.join(10)

    def _crawl(self) -> None:
        self._join(OtherFilterError())
        while True:
            self.world.turn(self)
            try:
                if self.leaves or self.is_over:
                    self._ended()
                    return
                self._work()
                reply = self._exchange()
            except OutageError:
                continue
            except OtherFilterError as error:
                self._start_over(error)
            else:
                self._note(reply)

    def _start_over(self, error: OtherFilterError) -> None:
        if not isinstance(error, RejoinedError):
            self._join(error)
            return
        self._forget()
        for each in error.lost:
            self._collected.add_found(each)
            self._unsent.add(int(each.data))

    def _join(self, error: OtherFilterError) -> None:
        """As the scheduler does it after each error that voids what it knows, or at its start."""
        while True:
            self._forget()
            try:
                if isinstance(error, LostKeysError):
                    self.filter.clear()
                self.filter.join()
                self.store.join()
            except OutageError:
                continue
            except OtherFilterError as again:
                error = again
                continue
            return

    def _forget(self) -> None:
        self._in_flight: dict[bytes, int] = {}
        self._collected = Collected()
        self._unanswered: SharedBatch | None = None
        self._unsent: set[int] = set()  # pages in these
        self._start: Iterator[int] | None = None
        self._last_look: tuple[int, int] | None = None
        self.is_over = False

    def _work(self) -> None:
        """Crawl some of the pages in flight, and run a part of start()."""
        choose = self.world.choose_detail
        if self._start is not None:
            for _ in range(choose(1, 3)):
                try:
                    self._found(next(self._start), is_start=True)
                except (StopIteration, ZeroDivisionError):
                    self._start = None
                    self._collected.last().start_ended = True
                    break
        for token in list(self._in_flight)[: choose(0, len(self._in_flight))]:
            page = self._in_flight[token]
            self.world.crawl(page)
            for link in self.world.site.links[page]:
                self._found(link)
            if choose(0, 4) == 1:
                break  # the callback has not ended, and what it has found is sent meanwhile
            del self._in_flight[token]
            self._collected.last().done.append(token)

    def _found(self, page: int, *, is_start: bool = False) -> None:
        is_filtered = not is_start or self.world.site.is_start_filtered
        fingerprint = b"page %d" % page
        if is_filtered and (page in self._unsent or self.filter.knows(fingerprint)):
            return
        self._unsent.add(page)
        slot = "ab"[page % 2] if self.world.by_slot else ""
        found = Found(b"%d" % page, fingerprint if is_filtered else None, slot, priority=page % 3)
        self._collected.add_found(found)

    def _exchange(self) -> Reply:
        live = self.filter.live
        if live[-1].count >= live[-1].capacity:
            with suppress(NoRoomError):  # the server was set back while the keys were made
                self.filter.append(POLICY.next(live), self.filter.now(), 0.0)
        if self._unanswered is None:
            self._unanswered = self._collected.next_batch()
            self._unanswered.may_start = self._start is None
            self._unanswered.want = max(0, self.world.choose_detail(2, 3) - len(self._in_flight))
        return self.store.apply(self._unanswered)

    def _note(self, reply: Reply) -> None:
        assert self._unanswered
        self._unanswered = None
        self._unsent = {int(found.data) for found in self._collected.found()}
        self._in_flight |= {each.id: int(each.data) for each in reply.taken}
        self.world.dead += [int(each) for each in reply.died]
        rest = self._collected.batches
        done = sum(len(each.done) for each in rest)
        assert self.world.count_leased(self.store.worker) == len(self._in_flight) + done
        has_ended = any(each.start_ended for each in rest)
        if reply.runs_start and self._start is None and not has_ended:
            self._start = self.world.site.start()
        is_idle = not self._in_flight and not rest and self._start is None
        look = reply.counters if is_idle and reply.is_started and reply.left == 0 else None
        self.is_over = look is not None and look == self._last_look
        self._last_look = look

    def _ended(self) -> None:
        if self.is_over:
            self.store.apply(SharedBatch(is_over=True))
        self.store.leave()


@functools.cache
def a_server() -> servers.Server:
    return servers.Server("valkey", "--save", "", "--appendonly", "no")


ids = random.Random()


class World:
    """The site, the server, the clock and the workers, as a schedule drives them.

    Args:
        server: of this world alone.
        site: what is crawled.
        dice: makes the choices of details.
        number: of workers.
        moves: how many requests a script may move.
        saves: make snapshots every few steps.
    """

    def __init__(
        self,
        server: servers.Server,
        site: Site,
        dice: random.Random,
        *,
        number: int,
        by_slot: bool,
        mirror: bool,
        moves: int,
        saves: bool,
    ) -> None:
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
        self.workers = [Worker(self) for _ in range(number)]

    # What the workers call.

    def wait_to_be_chosen(self, worker: Worker) -> None:
        worker.chosen.acquire()
        if worker.is_killed:
            raise KilledError

    def turn(self, worker: Worker) -> None:
        self.is_back.release()
        self.wait_to_be_chosen(worker)

    def choose_detail(self, least: int, most: int) -> int:
        return self.dice.randint(least, most)

    def crawl(self, page: int) -> None:
        self.visits[page] += 1
        if page in self.site.killers:
            self.log.append(f"page {page} kills its worker")
            raise KilledError

    def call(self, worker: Worker, call: Callable[[], Any]) -> Any:
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

    def count_leased(self, worker: bytes) -> int:
        """Return how many requests the server has leased to a worker."""
        return self.client.zlexcount(LEASED, b"[" + worker, b"(" + worker + b"\xff")

    def _control(self, writes: int = 10**9) -> None:
        self.client.set(CONTROL, f"{self.now // 1000} {self.now % 1000 * 1000} {writes}")

    # What the schedule does.

    def run(self, worker: Worker) -> None:
        """Let a worker run until it is interrupted."""
        self.step += 1
        if self.saves and self.choose_detail(0, 7) == 0:
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
                self.workers.append(Worker(self))  # the user starts another one

    def save(self) -> None:
        """Keep a snapshot of the server, to which it may be set back."""
        # A lock would not expire, since a dump does not say when.
        left_out = (CONTROL.encode(), b":maker")
        names = [each for each in self.client.scan_iter() if not each.endswith(left_out)]
        self._saved.append({each: self.client.dump(each) for each in names})

    def runnable(self) -> list[Worker]:
        return [each for each in self.workers if each.stopped_until <= self.step] or self.workers

    def make(self, fault: str, worker: Worker) -> None:
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
        names = sorted(each for each in self.client.scan_iter() if each != CONTROL.encode())
        if fault == "emptied":
            self.client.flushall()
        elif fault == "set back":
            self._is_back |= any(each.is_over for each in self.workers)
            self.client.flushall()
            saved = self._saved[-self.choose_detail(1, min(4, len(self._saved)))]
            for name, value in saved.items():
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
        left = [name for name in SETS if self.client.zcard(f"{{{KEY}}}:{name}")]
        assert self._is_back or not set(left) - {"dead"}, f"{left}: something is left"

    def end(self) -> None:
        """End what still runs, after a failure."""
        for each in self.workers:
            each.is_killed = True
            each.chosen.release()
            each.join()


def simulate(seed: int) -> None:
    """Run a random schedule, and check it; raises an AssertionError with its log."""
    dice = random.Random(seed)
    ids.seed(seed)
    faults = dice.choice([0, 1, 1, 2, 3, 5, 8, 13])
    kinds = [*CALL_FAULTS, *WORKER_FAULTS, *SERVER_FAULTS]
    if dice.random() < 0.5:
        kinds = dice.sample(kinds, dice.randint(1, 4))
    world = World(
        a_server(),
        Site.random(dice),
        dice,
        number=dice.randint(1, 4),
        by_slot=dice.random() < 0.5,
        mirror=dice.random() < 0.8,
        saves="set back" in kinds,
        moves=dice.choice([1, 2, 100]),
    )
    rate = dice.choice([0.02, 0.1, 0.3])
    # Whoever runs start() and dies of a request leaves another one of it, if it is not filtered.
    is_deadly = world.site.killers and not world.site.is_start_filtered
    most = 1500 + 400 * faults + 8000 * bool(is_deadly)
    try:
        while world.workers:
            worker = dice.choice(world.runnable())
            if faults and dice.random() < rate:
                faults -= 1
                world.make(dice.choice(kinds), worker)
            world.run(worker)
            assert world.step < most, "it does not end"
        world.check()
    except BaseException as error:
        world.end()
        log = "\n".join(world.log)
        raise AssertionError(f"seed {seed}: {error!r}\n{log}") from error


def patch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let waits for other crawlers take simulated time, and batches be small."""
    monkeypatch.setattr(making, "_LOCK_MS", LOCK_MS)
    monkeypatch.setattr(filter_module, "_POLL_SECS", 0)
    monkeypatch.setattr(collected, "MAX_BATCH", MAX_BATCH)
    monkeypatch.setattr(secrets, "token_hex", lambda nbytes: ids.randbytes(nbytes).hex())

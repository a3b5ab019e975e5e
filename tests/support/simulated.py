"""A model of a crawl by several workers, on a real server, driven step by step by a schedule.

Each worker has a real RedisStore and RedisBackend, in a thread of its own. Only one thread runs at
a time: before each call of the server, a worker waits until it is chosen. The time is the
schedule's, too. So a schedule is all the choices that were made, and a seed has one schedule.

Pages link to pages, fail some times or always, redirect to pages, or kill their worker. Runs begin
in mid-crawl. When the crawl has ended, each page was crawled, or is kept as failed. Then the site
is repaired: no page fails or redirects any more. A last run crawls what was not crawled before.
"""

import functools
import random
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import redis

from scrapy_bloom.exceptions import OutageError, RefusedError
from scrapy_bloom.generations.policy import ANY_ORIGIN, Policy
from scrapy_bloom.queues.collected import Collected
from scrapy_bloom.queues.redis_queue import RedisQueue
from scrapy_bloom.queues.redis_store import RedisStore
from scrapy_bloom.queues.store import (
    Batch,
    End,
    Ended,
    Entered,
    Fate,
    Joining,
    RejoinedError,
    Reply,
    State,
    Taken,
)
from scrapy_bloom.redis import backend as backend_module
from scrapy_bloom.redis import filter as filter_module
from scrapy_bloom.redis import making
from scrapy_bloom.redis.backend import RedisBackend
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.layout import named_keys
from tests.support import servers

KEY = "sim"
LEASED = named_keys(KEY)["leased"]
LEASE_MS = 1000
LOCK_MS = 1  # of the clock on the wall: each crawl makes what it needs
MOST = 3  # changes of a batch
ALWAYS = 10**9  # times that a page fails
MOST_REPLIES = 100  # for which a page waits for that to which it redirects
CALL_MS = 20  # what a call of the server takes
CONTROL = "control"  # a key: the time of the scripts, and how many writes the next one may make
POLICY = Policy(expected=4, error_rate=1e-6)

CALL_FAULTS = ("reply lost", "request lost", "half-way", "sent twice")
WORKER_FAULTS = ("killed", "stopped", "leaves")
SERVER_FAULTS = (
    *("emptied", "set back", "scripts flushed", "evicts", "an old copy"),
    *("clock forward", "clock back"),
)
LOSSES = ("emptied", "set back", "evicts")
RUN_FAULTS = ("another run", "a late worker")

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
        is_start_filtered: whether these are new once in each run; else they are not filtered.
        raises: start() raises after these.
        killers: pages that kill their worker.
        failing: how often a page fails.
        redirects: pages that redirect to other pages.
    """

    links: Sequence[Sequence[int]]
    starts: Sequence[int]
    is_start_filtered: bool
    raises: bool
    killers: Sequence[int]
    failing: Mapping[int, int]
    redirects: Mapping[int, int]

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
        failing, redirects = {}, {}
        if dice.random() < 0.6:
            some = dice.sample(range(pages), dice.randint(0, pages // 2))
            failing = {page: dice.choice([1, 1, 2, 3, ALWAYS]) for page in some}
            others = dice.sample(range(pages), dice.randint(0, pages // 2))
            targets = dice.sample(range(pages), dice.randint(1, min(pages, 2)))
            redirects = {page: target for page in others if (target := dice.choice(targets)) > page}
        return cls(
            links,
            starts=dice.sample(range(pages), dice.randrange(1, min(pages, 3) + 1)),
            is_start_filtered=dice.random() < 0.5,
            raises=dice.random() < 0.2,
            killers=[dice.randrange(pages)] if dice.random() < 0.15 else [],
            failing=failing,
            redirects=redirects,
        )

    def repaired(self) -> "Site":
        return replace(self, failing={}, redirects={})

    def chain_of(self, page: int) -> list[int]:
        """Return a page, and the pages to which it redirects, one after another."""
        chain = [page]
        while chain[-1] not in self.killers and chain[-1] in self.redirects:
            chain.append(self.redirects[chain[-1]])
        return chain

    def reached(self, done: Collection[int]) -> set[int]:
        """Return the pages that a crawl finds that has crawled these pages without a failure."""
        found, to_do = set(), [*self.starts]
        while to_do:
            page = to_do.pop()
            if page in found:
                continue
            found.add(page)
            if page in self.killers:
                continue
            if page in self.redirects:
                to_do.append(self.redirects[page])
            elif page in done:
                to_do += self.links[page]
        return found


class Visit(NamedTuple):
    """A request of a page, as it is stored.

    Attributes:
        page: its page.
        via: the pages in whose place it entered, by redirects and retries.
        tries: in how many runs the first of these has failed.
        once: whether it is new once in each run.
    """

    page: int
    via: tuple[int, ...] = ()
    tries: int = 0
    once: bool = False

    @classmethod
    def parsed(cls, taken: Taken) -> "Visit":
        page, tries, once, *via = map(int, taken.data.split())
        return cls(page, tuple(via), max(tries, taken.tries), bool(once))

    @property
    def data(self) -> bytes:
        return " ".join(map(str, [self.page, self.tries, int(self.once), *self.via])).encode()

    @property
    def fingerprints(self) -> list[bytes]:
        return [fingerprint_of(page) for page in dict.fromkeys([*self.via, self.page])]

    @property
    def first(self) -> int:
        return self.via[0] if self.via else self.page

    @property
    def redirects(self) -> set[int]:
        return {*self.via, self.page} - {self.first}


def fingerprint_of(page: int) -> bytes:
    return b"page %d" % page


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

    def __init__(self, world: "World", run: str) -> None:
        self.world = world
        self.leaves = self.is_over = self.is_killed = self.has_ended = False
        self.chosen = threading.Semaphore(0)
        self.fault = ""  # of its next call
        self.stopped_until = 0  # step
        self.error: BaseException | None = None
        server = SimServer(world, self, world.server.url)
        self._backend = RedisBackend(server, KEY, POLICY, ANY_ORIGIN, mirror=world.mirror)
        self._backend.filter._clock = lambda: world.now / 1000
        self.store = RedisStore(self._backend, by_slot=world.by_slot, lease_secs=LEASE_MS / 1000)
        self._run_name = run
        self._forget()
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
        self._open()
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
            except RejoinedError as error:
                self._forget()
                for entered in error.lost:
                    self._enter(entered)
            else:
                self._note(reply)

    def _open(self) -> None:
        while True:
            try:
                self._backend.filter.join()
                opened = self.store.open(Joining("spider", self._run_name))
            except OutageError:
                continue
            self.leaves |= opened.is_late
            if opened.is_late and self._run_name == self.world.run_name:
                # The server has lost the names of earlier runs. The user sets another name.
                self.world.runs += 1
            return

    def _forget(self) -> None:
        self._in_flight: dict[bytes, Visit] = {}
        self._waiting: dict[bytes, bytes] = {}  # fingerprints of the pages that they redirect to
        self._waited: Counter[bytes] = Counter()  # for how many replies
        self._replaced: set[bytes] = set()  # a redirect or a retry was sent, and not answered
        self._collected = Collected(MOST)
        self._unanswered: Batch | None = None
        self._unsent: set[bytes] = set()  # fingerprints in these
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
        idle = [id_ for id_ in self._in_flight if id_ not in {*self._waiting, *self._replaced}]
        for id_ in idle[: choose(0, len(idle))]:
            visit = self._in_flight[id_]
            outcome = self.world.crawl(visit.page)
            if isinstance(outcome, int):
                self._redirect(id_, visit, outcome)
            elif outcome == "fails":
                self._fail(id_, visit)
            else:
                for link in self.world.site.links[visit.page]:
                    if link not in visit.redirects:  # which are not recorded yet
                        self._found(link)
                if choose(0, 4) == 1:
                    break  # the callback has not ended, and what it has found is sent meanwhile
                self._end(id_, End.DONE)

    def _redirect(self, id_: bytes, visit: Visit, target: int) -> None:
        new = visit._replace(page=target, via=(*visit.via, visit.page))
        fingerprint = fingerprint_of(target)
        if self.store.knows(fingerprint):
            self._waiting[id_] = fingerprint
            return
        self._replaced.add(id_)
        # It is recorded when it is done: if it fails, only the first page of the chain is kept.
        entered = self._entered(new, fingerprint)
        self._enter(entered._replace(is_recorded=False, via=new.fingerprints, context=id_))

    def _fail(self, id_: bytes, visit: Visit) -> None:
        if visit.page in visit.via or self.world.choose_detail(0, 1):
            self._end(id_, End.FAILED)
            return
        self._replaced.add(id_)
        new = visit._replace(via=(*visit.via, visit.page))
        self._enter(self._entered(new, None)._replace(via=visit.fingerprints, context=id_))

    def _end(self, id_: bytes, end: End) -> None:
        visit = self._in_flight.pop(id_)
        self._waiting.pop(id_, None)
        self._replaced.discard(id_)
        first = self._entered(Visit(visit.first, once=visit.once), fingerprint_of(visit.first))
        is_target = visit.via or visit.tries or visit.once or end is End.FAILED
        via = visit.fingerprints if is_target else ()
        kept = first if end is End.FAILED else None
        if end is End.DONE:
            self._collected.last().recorded += via
        self._collected.end(Ended(id_, end, via, kept, visit.tries, "503"))

    def _found(self, page: int, *, is_start: bool = False) -> None:
        fingerprint = fingerprint_of(page)
        if is_start and not self.world.site.is_start_filtered:
            self._enter(self._entered(Visit(page), None))
        elif not self._knows(fingerprint, once=is_start):
            entered = self._entered(Visit(page, once=is_start), fingerprint)
            via = [fingerprint] if is_start else []
            self._enter(entered._replace(once=is_start, via=via))

    def _knows(self, fingerprint: bytes, *, once: bool = False) -> bool:
        return (not once and fingerprint in self._unsent) or self.store.knows(
            fingerprint, once=once
        )

    def _entered(self, visit: Visit, fingerprint: bytes | None) -> Entered:
        page = visit.page
        slot = "ab"[page % 2] if self.world.by_slot else ""
        return Entered(visit.data, fingerprint, slot, priority=page % 3)

    def _enter(self, entered: Entered) -> None:
        if entered.fingerprint is not None and entered.is_recorded:
            self._unsent.add(entered.fingerprint)
        self._collected.enter(entered)

    def _exchange(self) -> Reply:
        if self._unanswered is None:
            self._unanswered = self._collected.next_batch()
            self._unanswered.may_start = self._start is None
            self._unanswered.want = max(0, self.world.choose_detail(2, 3) - len(self._in_flight))
            self._unanswered.asked = sorted(set(self._waiting.values()))
            self._unanswered.stands_still = len(self._waiting) == len(self._in_flight)
        return self.store.apply(self._unanswered)

    def _note(self, reply: Reply) -> None:
        batch = self._unanswered
        assert batch
        self._unanswered = None
        self._unsent = {
            each.fingerprint or b"" for each in self._collected.entered() if each.is_recorded
        }
        for entered, is_queued in zip(batch.entered, reply.queued, strict=True):
            if entered.context in self._in_flight:
                if is_queued:
                    self._end(entered.context, End.REPLACED)
                else:
                    assert entered.fingerprint
                    self._replaced.discard(entered.context)
                    self._waiting[entered.context] = entered.fingerprint
        for id_, fingerprint in [*self._waiting.items()]:
            fate = reply.fates.get(fingerprint, Fate.UNFINISHED)
            self._waited[id_] += 1
            # The page may be dead, for example, which no reply tells.
            if fate is not Fate.UNFINISHED or self._waited[id_] > MOST_REPLIES:
                self._end(id_, End.DONE if fate is Fate.OTHER else End.FAILED)
        self._in_flight |= {each.id: Visit.parsed(each) for each in reply.taken}
        self.world.dead += [int(each.split()[0]) for each in reply.died]
        ended = sum(len(each.ended) for _, each in self._collected._batches)
        assert self.world.count_leased(self.store.worker) == len(self._in_flight) + ended
        has_ended = any(each.start_ended for _, each in self._collected._batches)
        if reply.runs_start and self._start is None and not has_ended:
            self._start = self.world.site.start()
        is_idle = not self._in_flight and not self._collected and self._start is None
        look = reply.counters if is_idle and reply.is_started and reply.left == 0 else None
        self.is_over = look is not None and look == self._last_look
        self._last_look = look
        self.leaves |= reply.is_retired

    def _ended(self) -> None:
        if self.is_over:
            self.store.apply(Batch(is_over=True))
        self.store.close()


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
        self.server_connection = RedisServer(server.url)
        self._copies: list[Callable[[], Any]] = []
        self.is_back_after_the_end = False  # after a worker saw that the crawl was over
        self._saved: list[dict[bytes, bytes]] = [{}]
        self.client.flushall()
        self.runs = 1
        self.done: set[int] = set()  # pages that were crawled, and have not failed
        self.crawled_before: set[int] = set()  # pages that have redirected to others
        self.workers = [Worker(self, self.run_name) for _ in range(number)]

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

    def crawl(self, page: int) -> int | str:
        """Return the page to which a page redirects, "fails" or "done"."""
        self.visits[page] += 1
        if page in self.site.killers:
            self.log.append(f"page {page} kills its worker")
            raise KilledError
        if page in self.site.redirects:
            return self.site.redirects[page]
        if self.visits[page] <= self.site.failing.get(page, 0):
            return "fails"
        self.done.add(page)
        return "done"

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
                self.start_worker()

    @property
    def run_name(self) -> str:
        """The name of the run that the user wants."""
        return f"run {self.runs}"

    def start_worker(self, *, is_late: bool = False) -> None:
        """Start a worker, as the user does."""
        late = f"run {self.choose_detail(1, self.runs)}"
        self.workers.append(Worker(self, late if is_late else self.run_name))

    def begin_run(self) -> None:
        """Begin another run while workers of the last one crawl."""
        self.runs += 1
        self.start_worker()

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
        elif fault == "another run":
            self.begin_run()
        elif fault == "a late worker":
            self.start_worker(is_late=True)
        else:
            self._of_server(fault)
        self._control()

    def _of_server(self, fault: str) -> None:
        if fault in LOSSES:
            self.is_back_after_the_end |= any(each.is_over for each in self.workers)
        names = sorted(each for each in self.client.scan_iter() if each != CONTROL.encode())
        if fault == "emptied":
            self.client.flushall()
        elif fault == "set back":
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
        """Check that the crawl is complete: each page was crawled, or is kept as failed."""
        queue = RedisQueue(self.server_connection, KEY)
        counts = queue.counts()
        self.kept = kept = {
            int(each.data.split()[0])
            for state in (State.FAILED, State.DEAD)
            for each in queue.requests(state)
        }
        self.log.append(f"done {sorted(self.done)}, kept {sorted(kept)}, dead {self.dead}")
        missing = self.site.reached(self.done) - set(self.visits)
        assert not missing, f"{missing} never crawled"
        assert set(self.dead) <= set(self.site.killers), f"{self.dead} are dead"
        if self.is_back_after_the_end:
            return
        # Where a page redirects to one that is kept itself, that is enough.
        ended = {*self.done, *self.site.killers, *self.crawled_before, *kept}
        kept_with = {each for page in kept for each in self.site.chain_of(page)}
        for page in self.site.reached(self.done) - kept_with:
            assert ended.intersection(self.site.chain_of(page)), f"{page} is lost"
        keeps = (State.FAILED, State.DEAD)
        left = {state: number for state, number in counts.items() if number and state not in keeps}
        assert not left, f"{left}: something is left"

    def repair(self) -> None:
        """Have no page fail or redirect any more, and begin a last run."""
        site, self.site = self.site, self.site.repaired()
        ended = {*self.done, *self.kept}
        self.crawled_before = {
            page for page in site.redirects if ended.intersection(site.chain_of(page)[1:])
        }
        self.log.append(f"{self.step}: the site is repaired: {site}")
        self.begin_run()

    def check_repaired(self) -> None:
        """Check that a run of a repaired site has crawled all that was not crawled before."""
        self.check()
        assert (
            self.is_back_after_the_end
            or not RedisQueue(self.server_connection, KEY).counts()[State.FAILED]
        )

    def crawl_all(
        self, dice: random.Random, faults: int, kinds: Sequence[str], rate: float, most: int
    ) -> None:
        """Let all workers run to their end; so many faults happen, at this rate."""
        while self.workers:
            worker = dice.choice(self.runnable())
            if faults and dice.random() < rate:
                faults -= 1
                self.make(dice.choice(kinds), worker)
            self.run(worker)
            assert self.step < most, "it does not end"

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
    kinds = [*CALL_FAULTS, *WORKER_FAULTS, *SERVER_FAULTS, *RUN_FAULTS]
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
    most = 2000 + 600 * faults + 8000 * bool(is_deadly)
    try:
        world.crawl_all(dice, faults, kinds, rate, most)
        world.check()
        if dice.random() < 0.5 and not world.is_back_after_the_end:
            world.repair()
            world.crawl_all(dice, 0, kinds, rate, 2 * most)
            world.check_repaired()
    except BaseException as error:
        world.end()
        log = "\n".join(world.log)
        raise AssertionError(f"seed {seed}: {error!r}\n{world.site}\n{log}") from error
    finally:
        world.server_connection.close()


def patch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let waits for other crawlers take simulated time, and batches be small."""
    monkeypatch.setattr(making, "_LOCK_MS", LOCK_MS)
    monkeypatch.setattr(filter_module, "_POLL_SECS", 0)
    monkeypatch.setattr(backend_module, "_MOST_LOSSES", 1000)  # its time is that on the wall
    monkeypatch.setattr(secrets, "token_hex", lambda nbytes: ids.randbytes(nbytes).hex())
    monkeypatch.setattr(secrets, "token_bytes", ids.randbytes)

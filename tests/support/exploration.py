"""All schedules of a small crawl, with at most one fault: each state, and each step from it.

A worker depends on nothing but what the server has answered to it. So it has no thread here: to
make a step, it is run again from its beginning, with these answers, and goes on from there. A state
is what the server has, and what each worker was told. Those that differ only in names and numbers
are one.

A step is a worker's turn: all its calls up to the next batch, or until it waits for another worker.
The time stands still, but for the faults.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from scrapy_bloom.exceptions import OutageError, RefusedError
from scrapy_bloom.queues.shared import SharedBatch
from scrapy_bloom.queues.shared_state import SETS
from tests.support import servers, simulated
from tests.support.simulated import CONTROL, KEY, LEASE_MS, KilledError, Site, Worker
from tests.support.simulation import CALL_FAULTS, WORKER_FAULTS
from tests.support.states import WORKERS, Copy, Life, State, Stored, View, key_of

SITE = Site([[1, 2], [3], [3, 0], []], is_start_filtered=True)  # 4 pages
SERVER_KINDS = ("emptied", "set back", "evicts", "clock forward", "clock back")
KINDS = (*CALL_FAULTS, *WORKER_FAULTS, *SERVER_KINDS)
LONG_MS = 3 * LEASE_MS  # for leases to expire
_NUMBERS = itertools.count()

# What each key has: its name, its dump, and its content.
_READ = """
local all = {}
for _, key in ipairs(redis.call('KEYS', '*')) do
  if key ~= 'control' and not string.find(key, ':maker', 1, true) then
    local kind, dump = redis.call('TYPE', key).ok, redis.call('DUMP', key)
    local content = dump
    if kind == 'hash' then content = redis.call('HGETALL', key) end
    if kind == 'zset' then content = redis.call('ZRANGE', key, 0, -1) end
    all[#all + 1] = {key, dump, content}
  end
end
return all
"""


class PausedError(BaseException):
    """Ends the run of a worker that is to wait for its next turn."""


class Fault(NamedTuple):
    """What happens to one of the calls of a step; after so many writes, if it fails half-way."""

    kind: str
    call: int
    writes: int = 0


class Run:
    """The world of one worker, while it is run again, and makes a step."""

    by_slot, mirror, site, moves, shards = True, True, SITE, 100, 1

    def __init__(self, explorer: "Explorer", state: State, index: int, fault: Fault | None):
        self.server = explorer.server
        self.client = explorer.client
        self.now = state.now
        self.life = state.lives[index]
        self.told = [*self.life.told]
        self.visits: set[int] = set()
        self.dead: list[int] = []
        self.copy = state.copy
        self.was_hit = self.waits = False
        self._fault = fault
        self._position = 0
        self._is_live = not self.told
        self.calls = 0
        simulated.ids.seed(index)  # it makes the same names
        self.worker = Worker(self)

    def go_on(self) -> Life:
        is_killed = False
        try:
            self.worker.crawl()
        except PausedError:
            return replace(self.life, **self._known(), view=_view(self.worker))
        except KilledError:
            is_killed = True
        return replace(self.life, **self._known(), is_over=True, is_killed=is_killed, view=None)

    def _known(self) -> dict[str, Any]:
        return {"told": tuple(self.told), "visits": frozenset(self.visits)}

    def turn(self, worker: Worker) -> None:
        self._pause()
        leaves_at = self.life.leaves_at
        worker.leaves = leaves_at is not None and self._position >= leaves_at

    def sleep(self, _secs: float) -> None:
        """Wait for another worker."""
        self.waits = self._is_live
        self._pause()

    def _pause(self) -> None:
        if self._is_live:
            raise PausedError
        self._is_live = self._position == len(self.told)

    def choose_detail(self, _least: int, most: int) -> int:
        return most

    def crawl(self, page: int) -> None:
        self.visits.add(page)

    def call(self, worker: Worker, call: Callable[[], Any]) -> Any:
        if self._is_live:
            self.calls += 1
            self.told.append(self._outcome(worker, call))
        outcome = self.told[self._position]
        self._position += 1
        if isinstance(outcome, OutageError):
            raise OutageError(str(outcome))
        return outcome

    def _outcome(self, worker: Worker, call: Callable[[], Any]) -> Any:
        fault = self._fault if self._fault and self._fault.call == self.calls else Fault("", 0)
        self.was_hit |= bool(fault.kind) and fault.kind != "half-way"
        if fault.kind == "killed":
            raise KilledError
        if fault.kind == "sent twice":
            store = worker.store
            self.copy = Copy(call, next(_NUMBERS), store._worker, store._number)
        if fault.kind == "request lost":
            return OutageError("the request was lost")
        if fault.kind == "half-way":
            control(self.client, self.now, fault.writes)
        try:
            answer = call()
        except RefusedError as error:
            if "failed half-way" not in str(error):
                raise
            self.was_hit = True
            return OutageError("it failed half-way")
        finally:
            if fault.kind == "half-way":
                control(self.client, self.now)
        return OutageError("the reply was lost") if fault.kind == "reply lost" else answer


def control(client: Any, now: int, writes: int = 10**9) -> None:
    client.set(CONTROL, f"{now // 1000} {now % 1000 * 1000} {writes}")


def _view(worker: Worker) -> View:
    (filter_,) = worker.filters
    known = [filter_.knows(b"page %d" % each) for each in range(len(SITE.links))]
    generations = [(each.id, each.count) for each in filter_.live]
    return View(
        worker.store._worker,
        worker.store._number,
        dict(worker._in_flight),
        tuple(_parts(each) for each in worker._collected.batches),
        _parts(worker._unanswered),
        (
            *(filter_.id, filter_.version, known, generations, sorted(worker._unsent)),
            *(worker._start is None, worker._last_look, worker.is_over),
        ),
    )


def _parts(batch: SharedBatch | None) -> tuple[Any, ...]:
    if batch is None:
        return ()
    found = [each.data for each in batch.found]
    flags = (batch.may_start, batch.start_ended, batch.is_over)
    return found, batch.done, batch.want, flags


class Explorer:
    """Makes the steps of all schedules.

    Args:
        server: of this model alone.
        kinds: of the fault that there may be.
        number: of workers.
    """

    def __init__(self, server: servers.Server, kinds: Sequence[str] = (), number: int = 2) -> None:
        self.server = server
        self.kinds = kinds
        self.run: Run | None = None  # the latest
        self.calls = 0  # of its step
        self.client = server.client
        self._reader = self.client.register_script(_READ)
        self._here: Stored | None = None  # what the server has now
        self.first = State(Stored({}, {}), tuple(Life() for _ in range(number)))

    def sleep(self, secs: float) -> None:
        """Stand in for `time.sleep`."""
        assert self.run is not None
        self.run.sleep(secs)

    # Steps.

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        """Return the states that follow, each with the name of the step."""
        for index, life in enumerate(state.lives):
            if not life.is_over:
                yield f"worker {index}", self._turn(state, index)[0]
        if state.copy is not None:
            yield "a copy arrives", self._changed(state, self._send_copy, copy=None)
        if state.saved is not None:
            yield "set back", replace(state, stored=state.saved, saved=None)
        if state.waits:
            yield "leases are over", self._after_a_while(state, None, waits=False)
        for kind in () if state.had_fault else self.kinds:
            for name, after in self._faults(state, kind):
                yield f"{kind}: {name}", replace(after, had_fault=True)

    def _faults(self, state: State, kind: str) -> Iterator[tuple[str, State]]:
        if kind in SERVER_KINDS:
            yield from self._of_server(state, kind)
            return
        for index, life in enumerate(state.lives):
            if life.is_over:
                continue
            if kind == "leaves":
                leaving = replace(life, leaves_at=len(life.told))
                yield f"worker {index}", _with(state, index, leaving)
            elif kind == "stopped":
                yield f"worker {index}", self._after_a_while(state, index)
            else:
                yield from self._in_turn(state, index, kind)

    def _of_server(self, state: State, kind: str) -> Iterator[tuple[str, State]]:
        if kind == "set back":
            yield "saved", replace(state, saved=state.stored)
        elif kind == "emptied":
            yield "now", replace(state, stored=Stored({}, {}))
        elif kind == "evicts":
            for name in state.stored.dumps:
                evicted = self._changed(state, functools.partial(self.client.unlink, name))
                yield name.decode(), evicted
        else:
            by = 12 * LEASE_MS if kind == "clock forward" else -12 * LEASE_MS
            yield "now", replace(state, now=state.now + by)

    def _in_turn(self, state: State, index: int, kind: str) -> Iterator[tuple[str, State]]:
        for call in itertools.count(1):
            for writes in itertools.count() if kind == "half-way" else [0]:
                after, was_hit = self._turn(state, index, Fault(kind, call, writes))
                if was_hit:
                    yield f"worker {index}, call {call}, {writes} writes", after
                else:
                    break
            if call > self.calls:
                break

    def _turn(self, state: State, index: int, fault: Fault | None = None) -> tuple[State, bool]:
        self._go_to(state)
        self.run = run = Run(self, state, index, fault)
        life = run.go_on()
        self.calls = run.calls
        after = _with(state, index, life)
        waits = state.waits or run.waits or life.is_killed
        return replace(after, stored=self._read(), copy=run.copy, waits=waits), run.was_hit

    def _changed(self, state: State, change: Callable[[], Any], **more: Any) -> State:
        self._go_to(state)
        change()
        return replace(state, stored=self._read(), **more)

    def _send_copy(self) -> None:
        with suppress(RefusedError):
            self._copy()

    def _after_a_while(self, state: State, stopped: int | None, **more: Any) -> State:
        """The leases of all but those that live, and go on, are over."""
        now = state.now + LONG_MS

        def renew() -> None:
            for index, life in enumerate(state.lives):
                worker = life.view.worker if life.view else b""
                if index != stopped and self.client.hexists(WORKERS, worker):
                    self.client.hset(WORKERS, worker, now + LEASE_MS)

        return replace(self._changed(state, renew, **more), now=now)

    # The server.

    def _go_to(self, state: State) -> None:
        self._copy = state.copy.call if state.copy else lambda: None
        pipeline = self.client.pipeline(transaction=False)
        if self._here is not state.stored:
            pipeline.flushall()
            for name, dump in state.stored.dumps.items():
                pipeline.restore(name, 0, dump)
        control(pipeline, state.now)
        pipeline.execute()
        self._here = None

    def _read(self) -> Stored:
        rows = self._reader()
        self._here = Stored({row[0]: row[1] for row in rows}, {row[0]: row[2] for row in rows})
        return self._here


def _with(state: State, index: int, life: Life) -> State:
    lives = [*state.lives]
    lives[index] = life
    return replace(state, lives=tuple(lives))


def check(state: State) -> None:
    """Check a state in which all workers have ended."""
    visited = frozenset().union(*(each.visits for each in state.lives))
    missing = SITE.reachable() - visited
    assert not missing, f"{missing} never crawled"
    left = [name for name in SETS if f"{{{KEY}}}:{name}".encode() in state.stored.dumps]
    assert not left, f"{left}: something is left"


class Explored:
    """All states that schedules lead to: see `explore`."""

    def __init__(self, first: bytes) -> None:
        self.steps = 0
        self._came_from: dict[bytes, tuple[bytes, str]] = {first: (b"", "")}
        self._before: dict[bytes, list[bytes]] = {first: []}
        self._ended: list[bytes] = []

    def __len__(self) -> int:
        return len(self._before)

    def note(self, before: bytes, step: str, after: bytes) -> bool:
        """Note a step, and return whether it has led to a new state."""
        self.steps += 1
        is_new = after not in self._before
        if is_new:
            self._came_from[after], self._before[after] = (before, step), []
        self._before[after].append(before)
        return is_new

    def note_end(self, key: bytes) -> None:
        self._ended.append(key)

    def path(self, key: bytes) -> str:
        """Return the steps that have led to a state."""
        steps = []
        while key:
            key, step = self._came_from[key]
            steps.append(step)
        return "\n".join(reversed(steps))

    def check_ends(self) -> None:
        """Check that from each state, steps lead to an end."""
        reaching, to_do = set(self._ended), self._ended
        while to_do:
            new = [each for each in self._before[to_do.pop()] if each not in reaching]
            reaching.update(new)
            to_do += new
        stuck = [each for each in self._before if each not in reaching]
        assert not stuck, f"{len(stuck)} of {len(self)} do not end:\n{self.path(stuck[0])}"


def explore(explorer: Explorer) -> Explored:
    """Make all steps; raises an AssertionError with the schedule that has led to a failure."""
    key, state = key_of(explorer.first), explorer.first
    explored, to_do, step = Explored(key), [(key, state)], ""
    try:
        while to_do:
            key, state = to_do.pop()
            step = ""
            if all(each.is_over for each in state.lives):
                check(state)
                explored.note_end(key)
                continue
            for step, after in explorer.steps(state):
                after_key = key_of(after)
                if explored.note(key, step, after_key):
                    to_do.append((after_key, after))
    except Exception as error:
        raise AssertionError(f"{explored.path(key)}\n{step}\n{error!r}") from error
    explored.check_ends()
    return explored

"""The simplest store that follows the rules of `scrapy_bloom.queues.store`: all in memory.

The other stores are compared with it. It has one worker at a time, an exact filter, and no slices.
"""

import secrets
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.job.filter import pack_fingerprints
from scrapy_bloom.queues.store import (
    MOST_DEATHS,
    MOST_TRIES,
    TO_ITSELF,
    TO_OTHERS,
    TRIES_SECS,
    Batch,
    End,
    Ended,
    Entered,
    Joining,
    Opened,
    QueueStatus,
    Reply,
    Row,
    State,
    Taken,
    once_in,
    packed_first,
    parsed_order,
)

_KEPT = (State.FAILED, State.WAITING, State.DEAD)


class Visit(SimpleNamespace):
    """A row that changes; its hops are a tuple, and its position is never negative."""

    @property
    def pages(self) -> tuple[bytes, ...]:
        return self.hops if self.page is None else (self.page, *self.hops)

    def as_row(self) -> Row:
        columns = vars(self) | {"packed_hops": pack_fingerprints(self.hops)}
        columns["position"] *= -1 if self.newest_first else 1
        columns["takes"] = int(self.was_taken)
        return Row(**{name: columns[name] for name in Row._fields if name in columns})


@dataclass
class MemoryJob:
    """What outlives a process, and the commands that read and change it."""

    rows: dict[int, Visit] = field(default_factory=dict)
    takes: Counter[int] = field(default_factory=Counter)  # how often a row was taken
    recorded: set[bytes] = field(default_factory=set)
    alone: int = 0  # the id of the suspect that was taken alone
    spider: str = ""
    began: Joining | None = None  # of the worker that began the run
    run: bytes = b""
    runs: set[str] = field(default_factory=set)
    epoch: int = 0
    tried_at: float = 0.0  # when an opening without a run's name was last counted as a try
    adds_tries: bool = True  # whether the current epoch counts as a try
    starts_once: bool = False  # whether start() is executed once in a run, not by each process
    started_in: bytes = b""  # the run in which it has ended
    numbered: int = 0  # positions and ids that were given away
    entered: int = 0
    ended_at: float = 0.0
    is_open: bool = False
    name: str = "memory"

    def of(self, *states: State, slot: str | None = None) -> list[int]:
        """The ids of the rows of some states, in order."""
        found = {i: r for i, r in self.rows.items() if r.state in states and slot in (None, r.slot)}
        return sorted(found, key=lambda id_: _order(found[id_]))

    def late(self) -> list[int]:
        """The ids of what has failed or waits since an earlier epoch."""
        kept = (State.FAILED, State.WAITING)
        rows = sorted(self.rows.items(), key=lambda row: (row[1].is_start, row[0]))
        return [i for i, r in rows if r.state in kept and r.epoch < self.epoch]

    def number(self) -> int:
        self.numbered += 1
        return self.numbered

    def try_again(self, id_: int, tries: int) -> None:
        """Make a row pending as it first entered."""
        row = self.rows[id_]
        if row.first:
            row.slot, row.priority, row.rank, rest = parsed_order(row.first)
            row.newest_first, row.data, row.first = bool(rest[0]), rest[1:], b""
        row.state, row.position, row.tries, row.deaths = State.PENDING, self.number(), tries, 0
        row.hops, row.waits_for, row.reason = (), b"", ""

    # The methods of `Queue`.

    def counts(self) -> Mapping[State, int]:
        return {state: len(self.of(state)) for state in State}

    def slots(self) -> Mapping[str, int]:
        return Counter(self.rows[id_].slot for id_ in self.of(State.PENDING))

    def status(self) -> QueueStatus:
        run = self.began.run if self.began else ""
        done = self.entered - len(self.rows)
        return QueueStatus(self.counts(), self.spider, run, done, ended_at=self.ended_at)

    def requests(self, state: State, slot: str | None = None) -> Iterator[Row]:
        return (self.rows[id_].as_row() for id_ in self.of(state, slot=slot))

    def move(self, state: State, to: State | None, slot: str | None = None) -> int:
        ids = self.of(state, slot=slot)
        for id_ in sorted(ids):
            if to is None:
                del self.rows[id_]
            else:
                self.try_again(id_, 0)
        return len(ids)


class MemoryStore:
    """A process that has a `MemoryJob` open."""

    def __init__(self, job: MemoryJob) -> None:
        self.name = job.name
        self._job = job
        self._last_slot = ""
        self._is_late = self._runs_start = self._is_started = False
        self._keeps_failed = True
        self._first_id = 0  # of the rows that entered since it was opened
        self._reply = Reply()

    @property
    def run(self) -> bytes:
        return self._job.run

    @property
    def pending(self) -> int:
        return len(self._job.of(State.PENDING, State.SUSPECT)) + len(self._job.late())

    def open(self, joining: Joining) -> Opened:
        job, current = self._job, self._job.began
        if job.spider not in ("", joining.spider):
            raise StorageError(f"{self.name} is of {job.spider}, and not of {joining.spider}")
        died, killed = self._judge_deaths() if job.is_open else ([], 0)
        job.is_open, job.spider = True, joining.spider
        self._keeps_failed, self._first_id = joining.keeps_failed, job.numbered + 1
        is_other = current is None or joining.run not in ("", current.run)
        self._is_late = is_other and joining.run in job.runs
        begins = joining.is_crawl and is_other and not self._is_late
        for id_ in job.of(State.UNREADABLE) if not self._is_late else ():
            job.rows[id_].state = State.PENDING
        counts, ended_at = job.counts(), job.ended_at
        is_idle = not (job.of(State.PENDING, State.SUSPECT, State.IN_FLIGHT) or job.late())
        if begins:
            job.began, job.run, job.ended_at = joining, secrets.token_bytes(8), 0.0
            job.runs.add(joining.run)
        if begins or (joining.is_crawl and is_idle and not joining.run):
            job.epoch += 1
            job.adds_tries = bool(joining.run) or not (0 <= time.time() - job.tried_at < TRIES_SECS)
            if not joining.run and job.adds_tries:
                job.tried_at = time.time()
        self._is_started = job.starts_once and job.started_in == job.run
        return Opened(
            run=job.began.run if job.began else "",
            began=begins,
            counts=counts,
            is_first=len(job.runs) == 1,
            is_late=self._is_late,
            retried=len(job.late()),
            killed=killed,
            died=died,
            ended_at=ended_at if is_idle and not (begins or job.late()) else 0.0,
        )

    def _judge_deaths(self) -> tuple[list[bytes], int]:
        job, in_flight = self._job, self._job.of(State.IN_FLIGHT)
        for id_ in in_flight:
            row = job.rows[id_]
            row.deaths += job.alone in (0, id_)
            row.state = State.DEAD if job.alone == id_ else self._returned(row)
        died = [job.rows[job.alone].data] if job.alone else []
        job.alone = 0
        return died, len(in_flight)

    def _returned(self, row: Visit) -> State:
        return State.SUSPECT if row.deaths >= MOST_DEATHS else State.PENDING

    def knows(self, fingerprint: bytes, *, once: bool = False) -> bool:
        return (once_in(self.run, fingerprint) if once else fingerprint) in self._job.recorded

    def apply(self, batch: Batch) -> Reply:
        job = self._job
        self._reply = reply = Reply()
        reply.queued = [self._enter(request) for request in batch.entered]
        for fingerprint in batch.recorded:
            self._record(fingerprint)
        for ended in batch.ended:
            self._end(ended)
        if batch.start_ended:
            self._is_started, job.started_in = True, job.run
        late = [entry for entry in job.late() if self._is_started or not job.rows[entry].is_start]
        for id_ in late:
            row, reason = job.rows[id_], job.rows[id_].reason
            job.try_again(id_, row.tries + job.adds_tries)
            if row.tries >= MOST_TRIES:
                row.state, row.reason, reply.given_up = State.DEAD, reason, reply.given_up + 1
        reply.taken = [] if self._is_late else self._take(batch)
        self._runs_start = (self._runs_start or batch.may_start) and not self._is_started
        reply.unfinished = len(job.of(State.PENDING, State.SUSPECT, State.IN_FLIGHT)) + len(
            job.late()
        )
        if reply.unfinished:
            job.ended_at = 0.0
        elif batch.is_over:
            job.ended_at = job.ended_at or time.time()
        reply.pending = len(job.of(State.PENDING))
        reply.runs_start, reply.is_started = self._runs_start, self._is_started
        reply.ended_at, reply.is_retired = job.ended_at, self._is_late
        reply.counters = (job.entered, job.entered - len(job.rows))
        return reply

    # Pages.

    def _is_open(self, page: bytes, but: int = 0) -> bool:
        """Whether a row, other than one, may still crawl a page, so that nobody knows its end.

        Rows of an earlier epoch count as if their slice had come: pending, without hops.
        """
        late = self._job.late()
        for id_, row in self._job.rows.items():
            if id_ == but or row.state is State.DEAD:
                continue
            is_hop = page in row.hops and id_ not in late
            if is_hop or (page == row.page and (row.was_taken or row.once)):
                return True
        return False

    def _with_page(self, page: bytes, *states: State) -> list[int]:
        rows = sorted(self._job.rows.items())
        return [id_ for id_, row in rows if row.page == page and row.state in states]

    def _filtered(self, page: bytes, *states: State) -> list[int]:
        """The rows of a page that another row may replace: others are sessions of their own."""
        return [id_ for id_ in self._with_page(page, *states) if self._job.rows[id_].is_filtered]

    def _record(self, fingerprint: bytes, *, once: bool = False) -> None:
        self._reply.added += fingerprint not in self._job.recorded
        self._job.recorded.add(fingerprint)
        if once:
            self._job.recorded.add(once_in(self.run, fingerprint))

    # Requests that enter.

    def _enter(self, request: Entered) -> bool:
        if request.replaces is not None:
            return self._take_row(request)
        if (page := request.fingerprint) is None:
            self._new_row(request, has_page=False)
            return True
        if request.is_filtered:
            return self._enter_filtered(request, page)
        tries = self._replace_start(page) if request.is_start else 0
        if request.is_recorded:
            self._record(page)
        self._new_row(request, has_page=request.is_start, tries=tries)
        return True

    def _enter_filtered(self, request: Entered, page: bytes) -> bool:
        tries, is_known = 0, self.knows(page, once=request.once)
        has_page = not is_known and (request.is_start or request.is_recorded)
        if is_known and not request.passes:
            return False
        if has_page and request.once and request.is_recorded:
            tries = self._replace_kept(page)
            if self._has_row(page):
                self._record(page, once=True)
                return False
        elif request.is_recorded and not request.passes and self._is_only_a_hop(page):
            self._record(page)
            self._wait_for_hop(request, page)
            return False
        if request.is_recorded:
            self._record(page, once=request.once)
        self._new_row(request, has_page=has_page, tries=tries)
        return True

    def _wait_for_hop(self, request: Entered, page: bytes) -> None:
        if self._keeps_failed:
            row = self._new_row(request, has_page=True)
            row.state, row.was_taken = State.WAITING, True
            row.waits_for, row.epoch = page, self._job.epoch

    def _replace_kept(self, page: bytes) -> int:
        """Drop what earlier runs have kept of a page; return in how many runs it has failed."""
        job, kept = self._job, self._filtered(page, *_KEPT)
        kept = [i for i in kept if job.rows[i].epoch < job.epoch or i in job.of(State.DEAD)]
        return max((job.rows.pop(id_).tries + job.adds_tries for id_ in kept), default=0)

    def _has_row(self, page: bytes) -> bool:
        """Whether a row of the index has a page, and is not dead."""
        rows = [row for row in self._job.rows.values() if row.state is not State.DEAD]
        return any(row.page == page and (row.was_taken or row.once) for row in rows)

    def _is_only_a_hop(self, page: bytes) -> bool:
        return not self._has_row(page) and self._is_open(page)

    def _replace_start(self, page: bytes) -> int:
        """Drop one start row of a page from before the store was opened; return its tries.

        What start() has yielded since then may be several sessions of one page.
        """
        job = self._job
        for id_ in self._with_page(page, State.PENDING, *_KEPT):
            row = job.rows[id_]
            if row.is_start and not row.is_filtered and id_ < self._first_id:
                del job.rows[id_]
                is_kept = row.state is not State.PENDING and row.epoch < job.epoch
                return row.tries + (is_kept and job.adds_tries)
        return 0

    def _new_row(self, request: Entered, *, has_page: bool, tries: int = 0) -> Visit:
        job = self._job
        number = job.number()
        job.entered += 1
        job.rows[number] = row = Visit(
            data=request.data,
            state=State.PENDING,
            slot=request.slot,
            priority=request.clipped_priority,
            rank=request.rank,
            newest_first=request.newest_first,
            position=number,
            page=request.fingerprint if has_page else None,
            is_filtered=request.is_filtered,
            is_start=request.is_start,
            once=request.once,
            tries=min(tries, MOST_TRIES - 1),
            hops=(),
            was_taken=False,
            deaths=0,
            epoch=0,
            first=b"",
            waits_for=b"",
            reason="",
        )
        return row

    def _take_row(self, request: Entered) -> bool:
        """Have a request take the row that it replaces; return whether it is pending."""
        if (found := self._found(request.replaces)) is None:
            return False
        id_, row = found
        page = request.fingerprint
        if page is not None and request.is_filtered and not request.passes:
            if page in row.pages:
                self._keep(id_, State.FAILED, TO_ITSELF)
                return False
            dead = [self._job.rows[entry] for entry in self._with_page(page, State.DEAD)]
            if self._is_open(page, but=id_) or any(entry.tries < MOST_TRIES for entry in dead):
                self._wait(id_, page)
                return False
            if self.knows(page, once=request.once) and not dead:
                self._done(id_)
                return False
        is_hop = request.is_filtered and request.is_recorded and page not in row.pages
        if page is not None and is_hop and not (request.passes and self._is_taken(page)):
            row.hops = (*row.hops, page)
        if not row.first:
            row.first = packed_first(row.as_row().order, row.data, newest_first=row.newest_first)
        row.data, row.slot, row.priority = request.data, request.slot, request.clipped_priority
        row.rank, row.newest_first = request.rank, request.newest_first
        row.state, row.position, row.deaths = State.PENDING, self._job.number(), 0
        return True

    def _is_taken(self, page: bytes) -> bool:
        return self.knows(page) or self._is_open(page)

    # Requests that end.

    def _found(self, taken: tuple[int, int]) -> tuple[int, Visit] | None:
        """Return the row of a request that is in flight, as it was taken."""
        id_, number = taken
        row = self._job.rows.get(id_)
        if row is None or row.state is not State.IN_FLIGHT or self._job.takes[id_] != number:
            return None
        if self._job.alone == id_:
            self._job.alone = 0
        return id_, row

    def _end(self, ended: Ended) -> None:
        if (found := self._found(ended.id)) is None:
            return
        id_, row = found
        others = {*ended.awaits} - {*row.pages}
        opened = [page for page in others if self._is_open(page, but=id_)]
        if ended.end is End.UNREADABLE:
            row.state = State.UNREADABLE
        elif ended.end is End.RETURNED:
            row.state = self._returned(row)
        elif ended.end is End.FAILED:
            self._keep(id_, State.FAILED, ended.reason)
        elif ended.end is End.DONE and len(opened) > 1:
            self._keep(id_, State.FAILED, TO_OTHERS)
        elif ended.end is End.DONE and opened:
            self._wait(id_, opened[0])
        else:
            self._done(id_, with_hops=ended.end is End.DONE)

    def _keep(self, id_: int, state: State, reason: str = "") -> None:
        """Keep a row as failed or waiting, or end it, as the settings say."""
        job, row = self._job, self._job.rows[id_]
        if not self._keeps_failed:
            self._done(id_)
            return
        if state is State.FAILED and row.is_filtered and row.page is not None:
            for other in self._filtered(row.page, State.FAILED, State.DEAD):
                if job.rows[other].state is State.FAILED:
                    row.tries = max(row.tries, job.rows[other].tries)
                del job.rows[other]
        row.state, row.epoch, row.reason = state, job.epoch, reason

    def _wait(self, id_: int, page: bytes) -> None:
        row = self._job.rows[id_]
        self._keep(id_, State.WAITING)
        if row.state is State.WAITING:
            row.waits_for = page
            late, rows = self._job.late(), self._job.rows.items()
            others = [each_row for i, each_row in rows if page in each_row.pages and i not in late]
            if any(other.waits_for in row.pages for other in others if other.waits_for):
                self._reply.circles.append(row.data)

    def _done(self, id_: int, *, with_hops: bool = True) -> None:
        """End a row as done, and all that waits for its pages."""
        ended = [(id_, with_hops)]
        while ended:
            id_, with_hops = ended.pop(0)
            if (row := self._job.rows.pop(id_, None)) is None:
                continue
            pages = row.pages if with_hops else [row.page] if row.page is not None else []
            for page in pages:
                if row.is_filtered:
                    self._record(page, once=row.once)
                    for kept in self._filtered(page, State.FAILED, State.DEAD):
                        del self._job.rows[kept]
                rows, late = sorted(self._job.rows.items()), self._job.late()
                waiting = [each_row for each_row, row in rows if row.waits_for == page]
                ended += [(entry, True) for entry in waiting if entry not in late]

    # Requests that are taken.

    def _take(self, batch: Batch) -> list[Taken]:
        job, downloads = self._job, Counter(batch.downloads)
        taken: list[Taken] = []
        in_flight = job.of(State.IN_FLIGHT)
        if job.alone and not batch.stands_still:
            return []
        while len(taken) < batch.want and (pending := job.of(State.PENDING)):
            taken.append(self._taken(self._next(pending, downloads)))
            downloads[taken[-1].slot] += 1
        suspects = sorted(job.of(State.SUSPECT), key=lambda id_: job.rows[id_].slot)
        if batch.want and suspects and not taken and (batch.stands_still or not in_flight):
            job.alone = suspects[0]
            taken.append(self._taken(suspects[0]))
        return taken

    def _next(self, pending: Collection[int], downloads: Counter[str]) -> int:
        job = self._job
        firsts = {job.rows[id_].slot: id_ for id_ in reversed(list(pending))}
        slots = sorted(firsts, key=lambda slot: (downloads[slot], slot <= self._last_slot, slot))
        self._last_slot = slots[0]
        return firsts[slots[0]]

    def _taken(self, id_: int) -> Taken:
        row = self._job.rows[id_]
        row.state, row.was_taken = State.IN_FLIGHT, True
        self._job.takes[id_] += 1
        return Taken((id_, self._job.takes[id_]), row.data, row.slot, row.tries)

    def close(self) -> QueueStatus:
        for id_ in self._job.of(State.IN_FLIGHT):
            row = self._job.rows[id_]
            row.state = self._returned(row)
        self._job.alone, self._job.is_open = 0, False
        return self._job.status()


def _order(row: Visit) -> tuple[int, int, int]:
    """Its place in the queue."""
    return -row.priority, row.rank, -row.position if row.newest_first else row.position

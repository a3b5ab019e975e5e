"""The simplest store that follows the rules of `scrapy_bloom.queues.store`: all in memory.

The other stores are compared with it. It has one worker at a time, and an exact filter.
"""

import secrets
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.queues.store import (
    LINKED,
    MOST_DEATHS,
    MOST_TRIES,
    Batch,
    Closed,
    End,
    Ended,
    Entered,
    Fate,
    Joining,
    Opened,
    Progress,
    Reply,
    State,
    Stored,
    Taken,
    once_in,
)


@dataclass
class Row:
    """A request of a job; `epoch` is 0 if it is not kept because it has failed."""

    request: Entered
    position: int
    state: State = State.PENDING
    is_alone: bool = False
    deaths: int = 0
    tries: int = 0
    epoch: int = 0
    reason: str = ""

    @property
    def order(self) -> tuple[int, int, int]:
        """Its place in the queue."""
        position = -self.position if self.request.newest_first else self.position
        return -self.request.clipped_priority, self.request.rank, position


@dataclass
class MemoryJob:
    """What outlives a process, and the commands that read and change it."""

    rows: dict[int, Row] = field(default_factory=dict)
    recorded: set[bytes] = field(default_factory=set)
    targets: dict[bytes, Fate] = field(default_factory=dict)
    joining: Joining | None = None  # of the worker that began the run
    run: bytes = b""
    runs: set[str] = field(default_factory=set)
    epoch: int = 0
    pushed: int = 0  # how many positions were given away
    entered: int = 0
    ended_at: float = 0.0
    is_open: bool = False
    last_slot: str = ""
    name: str = "memory"

    def of(self, *states: State, slot: str | None = None) -> list[int]:
        """The ids of the requests of some states, in order."""
        rows = self.rows.items()
        ids = [id_ for id_, row in rows if row.state in states and slot in (None, row.request.slot)]
        return sorted(ids, key=lambda id_: self.rows[id_].order)

    def earlier(self) -> list[int]:
        return [id_ for id_ in self.of(State.FAILED) if self.rows[id_].epoch < self.epoch]

    def retry(self, id_: int, tries: int) -> None:
        """Make a request that was kept pending, as if it had just entered."""
        row = self.rows[id_]
        self.pushed += 1
        self.rows[id_] = Row(row.request, self.pushed, tries=tries)
        assert row.request.fingerprint is not None
        self.targets[row.request.fingerprint] = Fate.UNFINISHED

    # The methods of `Queue`.

    def counts(self) -> Mapping[State, int]:
        return {state: len(self.of(state)) for state in State}

    def slots(self) -> Mapping[str, int]:
        return Counter(self.rows[id_].request.slot for id_ in self.of(State.PENDING))

    def progress(self) -> Progress:
        joining = self.joining or Joining("")
        return Progress(
            joining.spider, joining.run, self.entered - len(self.rows), 0, self.ended_at
        )

    def requests(self, state: State, slot: str | None = None) -> Iterator[Stored]:
        for row in [self.rows[id_] for id_ in self.of(state, slot=slot)]:
            data, fingerprint, slot_, priority, rank, *_ = row.request
            kept_as = fingerprint if row.epoch else None
            figures = (row.position, row.deaths, row.tries, row.reason, kept_as)
            yield Stored(data, state, slot_, priority, rank, *figures)

    def move(self, state: State, to: State | None, slot: str | None = None) -> int:
        ids = self.of(state, slot=slot)
        for id_ in ids:
            row = self.rows[id_]
            if to is None:
                del self.rows[id_]
            elif row.epoch:
                self.retry(id_, 0)
            else:
                self.rows[id_] = Row(row.request, row.position)
        return len(ids)


class MemoryStore:
    """A process that has a `MemoryJob` open."""

    def __init__(self, job: MemoryJob, *, by_slot: bool) -> None:
        self.name = job.name
        self._job = job
        self._by_slot = by_slot
        self._is_late = self._runs_start = self._is_started = False

    @property
    def run(self) -> bytes:
        return self._job.run

    @property
    def pending(self) -> int:
        return len(self._job.of(State.PENDING))

    def open(self, joining: Joining) -> Opened:
        job, current = self._job, self._job.joining
        if current is not None and current.spider != joining.spider:
            raise StorageError(f"{self.name} is of {current.spider}, and not of {joining.spider}")
        died, killed = self._judge_deaths() if job.is_open else ([], 0)
        job.is_open = True
        begins = current is None or joining.run not in ("", current.run, *job.runs)
        self._is_late = not begins and joining.run not in ("", current.run if current else "")
        for id_ in job.of(State.UNREADABLE) if not self._is_late else ():
            job.rows[id_].state = State.PENDING
        counts, ended_at = job.counts(), job.ended_at
        is_idle = not job.of(State.PENDING, State.SUSPECT, State.IN_FLIGHT)
        if begins:
            job.joining, job.run, job.ended_at = joining, secrets.token_bytes(8), 0.0
            job.runs.add(joining.run)
        if begins or (is_idle and not joining.run):
            job.epoch += 1
            job.targets.clear()
        assert job.joining is not None
        one, other = job.joining.arguments, joining.arguments
        return Opened(
            run=job.joining.run,
            began=begins,
            counts=counts,
            is_first=len(job.runs) == 1,
            is_late=self._is_late,
            retried=sum(job.rows[id_].tries + 1 < MOST_TRIES for id_ in job.earlier()),
            killed=killed,
            died=died,
            differing=sorted(n for n in {*one, *other} if one.get(n) != other.get(n)),
            ended_at=ended_at if is_idle and not (begins or job.earlier()) else 0.0,
        )

    def _judge_deaths(self) -> tuple[list[bytes], int]:
        rows = [self._job.rows[id_] for id_ in self._job.of(State.IN_FLIGHT)]
        alone = [row for row in rows if row.is_alone]
        for row in rows:
            row.deaths += not alone or row.is_alone
            row.state = State.DEAD if row.is_alone else self._returned(row)
            row.is_alone = False
        return [row.request.data for row in alone], len(rows)

    def _returned(self, row: Row) -> State:
        return State.SUSPECT if row.deaths >= MOST_DEATHS else State.PENDING

    def knows(self, fingerprint: bytes, *, once: bool = False) -> bool:
        return (once_in(self.run, fingerprint) if once else fingerprint) in self._job.recorded

    def apply(self, batch: Batch) -> Reply:
        job, given_up = self._job, 0
        queued = [self._enter(request) for request in batch.entered]
        job.recorded.update(batch.recorded)
        for ended in batch.ended:
            self._end(ended)
        for id_ in job.earlier():
            row = job.rows[id_]
            if row.tries + 1 < MOST_TRIES:
                job.retry(id_, row.tries + 1)
            else:
                row.state, row.tries, given_up = State.DEAD, row.tries + 1, given_up + 1
        taken = [] if self._is_late else self._take(batch)
        self._is_started |= batch.start_ended
        self._runs_start = (self._runs_start or batch.may_start) and not self._is_started
        left = len(job.of(State.PENDING, State.SUSPECT, State.IN_FLIGHT))
        if left:
            job.ended_at = 0.0
        elif batch.is_over:
            job.ended_at = job.ended_at or time.time()
        return Reply(
            queued=queued,
            taken=taken,
            fates={each: job.targets.get(each, Fate.OTHER) for each in batch.asked},
            pending=self.pending,
            left=left,
            runs_start=self._runs_start,
            is_started=self._is_started,
            ended_at=job.ended_at,
            counters=(job.entered, job.entered - len(job.rows)),
            is_retired=self._is_late,
            given_up=given_up,
        )

    def _enter(self, request: Entered) -> bool:
        job, fingerprint, tries = self._job, request.fingerprint, 0
        if fingerprint is not None:
            key = once_in(self.run, fingerprint) if request.once else fingerprint
            is_new = key not in job.recorded
            is_target = is_new and fingerprint in job.targets
            is_new = is_new and not is_target
            if request.is_filtered and not is_new:
                if is_target and not request.via and fingerprint not in job.recorded:
                    self._keep_link(request)
                return False
            if is_new and request.is_recorded:
                job.recorded |= {fingerprint, key}
            kept = self._kept(fingerprint)
            if is_new and request.once and kept:
                row = job.rows.pop(kept)
                tries = min(row.tries + 1, MOST_TRIES)
        job.pushed += 1
        job.entered += 1
        job.rows[job.pushed] = Row(request, job.pushed, tries=tries)
        job.targets.update(dict.fromkeys(request.via, Fate.UNFINISHED))
        return True

    def _keep_link(self, request: Entered) -> None:
        """Keep a link to a page that is a target as failed until the page is done."""
        job = self._job
        assert request.fingerprint is not None
        if not self._kept(request.fingerprint):
            job.pushed += 1
            job.entered += 1
            row = Row(request, job.pushed, state=State.FAILED, epoch=job.epoch, reason=LINKED)
            job.rows[job.pushed] = row
            if request.is_recorded:
                job.recorded.add(request.fingerprint)

    def _kept(self, fingerprint: bytes) -> int:
        rows = self._job.rows.items()
        found = [i for i, row in rows if row.epoch and row.request.fingerprint == fingerprint]
        return found[0] if found else 0

    def _end(self, ended: Ended) -> None:
        job, row = self._job, self._job.rows.get(ended.id)
        if row is None or row.state is not State.IN_FLIGHT:
            return
        row.is_alone = False
        if ended.end is End.UNREADABLE:
            row.state = State.UNREADABLE
            return
        del job.rows[ended.id]
        if ended.end is End.DONE:
            for fingerprint in ended.via:
                job.targets.pop(fingerprint, None)
                kept = job.rows.get(self._kept(fingerprint))
                if kept and kept.state is State.FAILED and kept.epoch == job.epoch:
                    del job.rows[self._kept(fingerprint)]
        if ended.end is End.FAILED:
            assert ended.first is not None
            assert ended.first.fingerprint is not None
            kept = job.rows.pop(self._kept(ended.first.fingerprint), None)
            tries = max(ended.tries, kept.tries if kept else 0)
            job.rows[ended.id] = Row(
                ended.first,
                row.position,
                state=State.FAILED if tries < MOST_TRIES else State.DEAD,
                tries=tries,
                epoch=job.epoch,
                reason=ended.reason,
            )
            job.targets.update(dict.fromkeys(ended.via, Fate.FAILED))

    def _take(self, batch: Batch) -> list[Taken]:
        job, downloads = self._job, Counter(batch.downloads)
        taken: list[Taken] = []
        in_flight = [job.rows[id_] for id_ in job.of(State.IN_FLIGHT)]
        if any(row.is_alone for row in in_flight) and not batch.stands_still:
            return []
        while len(taken) < batch.want and (pending := job.of(State.PENDING)):
            taken.append(self._taken(self._next(pending, downloads)))
            downloads[taken[-1].slot] += 1
        suspects = sorted(job.of(State.SUSPECT), key=lambda id_: job.rows[id_].request.slot)
        if batch.want and suspects and not taken and (batch.stands_still or not in_flight):
            for row in in_flight:
                row.is_alone = False
            job.rows[suspects[0]].is_alone = True
            taken.append(self._taken(suspects[0]))
        return taken

    def _next(self, pending: Collection[int], downloads: Counter[str]) -> int:
        job = self._job
        if not self._by_slot:
            return next(iter(pending))
        firsts = {job.rows[id_].request.slot: id_ for id_ in reversed(list(pending))}
        slots = sorted(firsts, key=lambda slot: (downloads[slot], slot <= job.last_slot, slot))
        job.last_slot = slots[0]
        return firsts[slots[0]]

    def _taken(self, id_: int) -> Taken:
        row = self._job.rows[id_]
        row.state = State.IN_FLIGHT
        return Taken(id_, row.request.data, row.request.slot, row.tries)

    def counts(self) -> Mapping[State, int]:
        return self._job.counts()

    def close(self) -> Closed:
        for id_ in self._job.of(State.IN_FLIGHT):
            row = self._job.rows[id_]
            row.is_alone, row.state = False, self._returned(row)
        self._job.is_open = False
        return Closed(self.counts(), ended_at=self._job.ended_at)

"""Read the figures of a filter and its queue, for tables, JSON and metrics."""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from operator import attrgetter

from scrapy_bloom.commands.shared.place import Place, Reader, found
from scrapy_bloom.filters.sizing import Contents, block_fills
from scrapy_bloom.generations.policy import FilterStatus
from scrapy_bloom.queues.store import Row, RunBegin, State, Worker
from scrapy_bloom.text import counted, time_text

ANY_HOST = "(any)"  # stands for requests without a host
_MOST_RUNS = 50
_OF_GENERATION = attrgetter(
    *("number", "count", "capacity", "geometry.nbytes", "geometry.num_hashes", "fill_ratio"),
    *("error_rate_now", "error_rate", "first_run", "last_run"),
)
DIED = "was in flight in four processes that died, the last time alone"  # a dead request


@dataclass(frozen=True)
class GenerationFigures:
    """A generation of a filter; what was counted is None unless its bits were read."""

    number: int
    recorded: int
    capacity: int
    bytes: int
    hashes: int
    fill_ratio: float
    error_rate_now: float
    error_rate_at_capacity: float
    first_run: float
    last_run: float
    counted_fill_ratio: float | None = None
    counted_error_rate: float | None = None
    counted_requests: int | None = None


@dataclass(frozen=True)
class FilterFigures:
    """A filter."""

    location: str
    recorded: int
    capacity: int
    bytes: int
    fill_ratio: float
    error_rate_now: float
    error_rate_at_capacity: float
    error_rate_asked: float
    expected_false_positives: float
    generations: Sequence[GenerationFigures]
    spider: str
    fingerprinter: str
    closed: bool | None
    in_use: bool | None

    @property
    def state(self) -> str:
        """Say whether a crawl uses the filter; a filter in Redis has no such state."""
        if self.in_use:
            return "in use by a running crawl"
        if self.closed is not False:
            return "closed" if self.closed else "shared"
        return (
            "not closed: its crawl was killed, or runs on another machine or in another container"
        )


@dataclass(frozen=True)
class HostFigures:
    """A host in a queue."""

    host: str
    pending: int


@dataclass(frozen=True)
class RunFigures:
    """A run of a queue; its end is None if it was paused or is not over."""

    name: str
    began: float
    ended: float | None
    crawled: int
    new: int
    failed: int
    dead: int


@dataclass(frozen=True)
class QueueFigures:
    """A queue of CrashSafeScheduler; the rate is None unless the queue was read twice."""

    pending: int
    in_flight: int
    suspect: int
    waiting: int
    failed: int
    dead: int
    unreadable: int
    handed_over: int
    done: int
    spider: str
    run: str
    ended_at: float | None
    workers: Sequence[Worker] | None
    runs: Sequence[RunFigures]
    read_at: float
    done_per_second: float | None = None

    @property
    def left(self) -> int:
        """How many requests the crawl has yet to finish."""
        return self.pending + self.in_flight + self.suspect

    @property
    def counts(self) -> Mapping[State, int]:
        """How many requests are pending, and in each other state that has any."""
        numbers = {state: getattr(self, state.value) for state in State}
        return {
            state: number for state, number in numbers.items() if number or state is State.PENDING
        }

    def counts_text(self) -> str:
        """Return the counts in words."""
        return ", ".join(
            f"{n:,} {state.value.replace('_', ' ')}" for state, n in self.counts.items()
        )

    def text(self) -> str:
        """Return the figures in a line."""
        texts = [self.counts_text(), f"{self.done:,} done"]
        if self.done_per_second is not None:
            texts.append(f"{self.done_per_second:,.1f} pages/s")
        if self.handed_over:
            texts.append(f"{self.handed_over:,} handed over by scrapy bloom add")
        if self.ended_at:
            texts.append(f"ended at {time_text(self.ended_at)}")
        return "; ".join(texts)

    def since(self, before: "QueueFigures | None") -> "QueueFigures":
        """Return the figures with the rate since an earlier look at the queue."""
        if before is None or (secs := self.read_at - before.read_at) <= 0:
            return self
        return replace(self, done_per_second=max(0, self.done - before.done) / secs)


def read_filter(reader: Reader, *, scans: bool = False) -> FilterFigures:
    """Return the figures of a filter, with its bits counted if it `scans`; close the reader."""
    with closing(reader):
        live = reader.generations
        generations = [GenerationFigures(*_OF_GENERATION(generation)) for generation in live]
        for index in range(len(generations) if scans else 0):
            fills = block_fills(reader.blocks(index))
            bits = Contents.of(fills, generations[index].hashes)
            generations[index] = replace(
                generations[index],
                counted_fill_ratio=bits.fill_ratio,
                counted_error_rate=bits.error_rate,
                counted_requests=bits.requests,
            )
        status = FilterStatus(
            location=reader.location, generations=live, configured_rate=reader.origin.error_rate
        )
        return FilterFigures(
            location=status.location,
            recorded=status.count,
            capacity=status.capacity,
            bytes=status.nbytes,
            fill_ratio=status.fill_ratio,
            error_rate_now=status.error_rate_now,
            error_rate_at_capacity=math.fsum(generation.error_rate for generation in live),
            error_rate_asked=status.error_rate,
            expected_false_positives=status.expected_false_positives,
            generations=generations,
            spider=reader.origin.spider,
            fingerprinter=reader.origin.fingerprinter,
            closed=reader.is_closed,
            in_use=reader.is_in_use,
        )


def read_queue(place: Place) -> QueueFigures | None:
    """Return the figures of a queue, or None if there is none."""
    if (queue := found(place.queue)) is None:
        return None
    status = queue.status()
    figures = QueueFigures(
        **{state.value: number for state, number in status.counts.items()},
        handed_over=status.handed_over,
        done=status.done,
        spider=status.spider,
        run=status.run,
        ended_at=status.ended_at,
        workers=place.workers(),
        runs=(),
        read_at=time.time(),
    )
    ended_at = None if figures.left else figures.ended_at or None
    return replace(figures, ended_at=ended_at, runs=_runs(figures, queue.runs()))


def _runs(queue: QueueFigures, begins: Sequence[RunBegin]) -> list[RunFigures]:
    """Return the last runs, oldest first: what changed from one begin to the next, or to now."""
    entered = queue.done + sum(getattr(queue, state.value) for state in State)
    figures = (entered, queue.done, queue.failed, queue.dead, queue.ended_at or 0)
    now = RunBegin("", queue.read_at, *figures)
    last = sorted(begins, key=lambda begin: begin.began)[-_MOST_RUNS:]
    return [
        RunFigures(
            name=begin.name,
            began=begin.began,
            ended=end.ended_before or None,
            crawled=end.done - begin.done,
            new=end.entered - begin.entered,
            failed=end.failed,
            dead=end.dead,
        )
        for begin, end in zip(last, [*last[1:], now], strict=False)  # there may be no run
    ]


def most_pending(hosts: Mapping[str, int]) -> list[HostFigures]:
    """Return the ten hosts with the most pending requests, the largest number first."""
    most = sorted(hosts, key=lambda host: -hosts[host])[:10]
    return [HostFigures(host or ANY_HOST, hosts[host]) for host in most]


def failure_text(row: Row) -> str:
    """Return why a request was not crawled, and in how many runs."""
    return f"{reason_of(row)} (in {counted(tries(row), 'run')})" if reason_of(row) else DIED


def reason_of(row: Row) -> str:
    """Return why a request was not crawled; empty if it is dead because processes died with it."""
    return "it was redirected to a page that is not done" if row.waits_for else row.reason


def tries(row: Row) -> int:
    """Return in how many runs a request has failed: the store adds the last one later."""
    return row.tries + (row.state in (State.FAILED, State.WAITING))

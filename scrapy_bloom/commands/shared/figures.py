"""Read the figures of a filter and its queue, as JSON has them, for tables and metrics, too."""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import closing

from scrapy_bloom.commands.shared.cli import Figures
from scrapy_bloom.commands.shared.places import Place, Reader, existing
from scrapy_bloom.filters.sizing import Contents, block_fills
from scrapy_bloom.generations.policy import FilterStatus
from scrapy_bloom.queues.serialized import line_of, url_of
from scrapy_bloom.queues.store import QueueStatus, Row, RunBegin, State
from scrapy_bloom.text import time_text

ANY_HOST = "(any)"  # stands for requests without a host
_MOST_RUNS = 50


def read_filter(reader: Reader, *, scans: bool = False) -> Figures:
    """Return the figures of a filter, with its bits counted if it `scans`; close the reader."""
    with closing(reader):
        live, origin = reader.generations, reader.origin
        status = FilterStatus(
            location=reader.location, generations=live, configured_rate=origin.error_rate
        )
        return {
            "location": status.location,
            "recorded": status.count,
            "capacity": status.capacity,
            "bytes": status.nbytes,
            "fill_ratio": status.fill_ratio,
            "error_rate_now": status.error_rate_now,
            "error_rate_at_capacity": math.fsum(generation.error_rate for generation in live),
            "error_rate_asked": status.error_rate,
            "expected_false_positives": status.expected_false_positives,
            "generations": [_generation(reader, index, scans=scans) for index in range(len(live))],
            "spider": origin.spider,
            "fingerprinter": origin.fingerprinter,
            "closed": reader.is_closed,
            "in_use": reader.is_in_use,
        }


def _generation(reader: Reader, index: int, *, scans: bool) -> Figures:
    generation = reader.generations[index]
    hashes = generation.geometry.num_hashes
    bits = Contents.of(block_fills(reader.blocks(index)), hashes) if scans else None
    return {
        "number": generation.number,
        "recorded": generation.count,
        "capacity": generation.capacity,
        "bytes": generation.geometry.nbytes,
        "hashes": hashes,
        "fill_ratio": generation.fill_ratio,
        "error_rate_now": generation.error_rate_now,
        "error_rate_at_capacity": generation.error_rate,
        "first_run": generation.first_run,
        "last_run": generation.last_run,
        "counted_fill_ratio": bits and bits.fill_ratio,
        "counted_error_rate": bits and bits.error_rate,
        "counted_requests": bits and bits.requests,
    }


def state_text(figures: Figures) -> str:
    """Say whether a crawl uses a filter; one in Redis has no such state."""
    if figures["in_use"]:
        return "in use by a running crawl"
    if figures["closed"] is not False:
        return "closed" if figures["closed"] else "shared"
    return "not closed: its crawl was killed, or runs on another machine or in another container"


def read_queue(place: Place) -> Figures | None:
    """Return the figures of a queue of CrashSafeScheduler, or None if there is none."""
    if (queue := existing(place.queue)) is None:
        return None
    status, workers = queue.status(), place.workers()
    counts = status.counts
    unfinished = counts[State.PENDING] + counts[State.IN_FLIGHT] + counts[State.SUSPECT]
    ended_at = 0.0 if unfinished else status.ended_at
    return {
        **{state.label: number for state, number in counts.items()},
        "handed_over": status.handed_over,
        "done": status.done,
        "spider": status.spider,
        "run": status.run,
        "ended_at": ended_at or None,
        "workers": None if workers is None else [vars(worker) for worker in workers],
        "runs": _runs(queue.runs(), status, ended_at),
        "read_at": time.time(),
        "done_per_second": None,  # known if the queue is read twice
    }


def _runs(begins: Sequence[RunBegin], status: QueueStatus, ended_at: float) -> list[Figures]:
    """Return the last runs, oldest first: what changed from one begin to the next, or to now."""
    failed, dead = status.counts[State.FAILED], status.counts[State.DEAD]
    now = RunBegin("", 0, status.done + status.total, status.done, failed, dead, ended_at)
    last = sorted(begins, key=lambda begin: begin.began)[-_MOST_RUNS:]
    return [
        {
            "name": begin.name,
            "began": begin.began,
            "ended": end.ended_before or None,  # None: it was paused, or is not over
            "crawled": end.done - begin.done,
            "new": end.entered - begin.entered,
            "failed": end.failed,
            "dead": end.dead,
        }
        for begin, end in zip(last, [*last[1:], now], strict=False)  # there may be no run
    ]


def counts_by_state(queue: Figures) -> dict[str, int]:
    """Return how many requests are pending, and in each other state that has any."""
    counts = {state.label: queue[state.label] for state in State}
    return {name: number for name, number in counts.items() if number or name == "pending"}


def counts_text(queue: Figures) -> str:
    """Return the counts of a queue in words."""
    counts = counts_by_state(queue).items()
    return ", ".join(f"{number:,} {name.replace('_', ' ')}" for name, number in counts)


def queue_text(queue: Figures) -> str:
    """Return the figures of a queue in a line."""
    texts = [counts_text(queue), f"{queue['done']:,} done"]
    if queue["done_per_second"] is not None:
        texts.append(f"{queue['done_per_second']:,.1f} pages/s")
    if queue["handed_over"]:
        texts.append(f"{queue['handed_over']:,} handed over by scrapy bloom add")
    if queue["ended_at"]:
        texts.append(f"ended at {time_text(queue['ended_at'])}")
    return "; ".join(texts)


def most_pending(hosts: Mapping[str, int]) -> list[Figures]:
    """Return the ten hosts with the most pending requests, the largest number first."""
    most = sorted(hosts, key=lambda host: -hosts[host])[:10]
    return [{"host": host or ANY_HOST, "pending": hosts[host]} for host in most]


def request_figures(data: bytes, priority: int) -> Figures:
    """Return the figures of a serialized request."""
    return {"url": url_of(data), "method": line_of(data)[0], "priority": priority}


def failure(row: Row) -> Figures:
    """Return the figures of a request that was not crawled."""
    reason = "it was redirected to a page that is not done" if row.waits_for else row.reason
    return {
        "state": row.state.label,
        **request_figures(row.first_data, row.priority),
        "reason": reason or "was in flight in four processes that died, the last time alone",
        # In how many runs it has failed: the store adds the last one later.
        "tries": row.tries + (row.state in (State.FAILED, State.WAITING)),
        "deaths": row.deaths,
    }

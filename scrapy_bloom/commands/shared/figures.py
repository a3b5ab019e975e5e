"""Read the figures of a filter and its queue, with the same keys in files and in Redis."""

import argparse
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

from scrapy_bloom.commands.shared.output import print_json, say
from scrapy_bloom.commands.shared.places import Figures, Place, Reader
from scrapy_bloom.filters.sizing import Contents
from scrapy_bloom.generations.policy import FilterStatus
from scrapy_bloom.queues.store import Row, State
from scrapy_bloom.text import (
    counted,
    escaped,
    number_text,
    rough_duration_text,
    size_text,
    time_text,
)

_RATE_SECS = 1.0
_GROWTH_SECS = 60.0  # the time over which the growth of the queue is measured
_FILTER_KEYS = (
    *("location", "recorded", "capacity", "bytes", "fill_ratio", "error_rate_now"),
    *("error_rate_at_capacity", "error_rate_asked", "expected_false_positives"),
    *("generations", "spider", "fingerprinter", "closed", "in_use"),
)


def no_filter_figures(location: str) -> Figures:
    """Return the figures of a job whose filter is elsewhere: the same keys without values."""
    return {**dict.fromkeys(_FILTER_KEYS), "location": location, "generations": []}


def filter_figures(reader: Reader, *, scans: bool = False) -> Figures:
    """Return the figures of a filter; if it `scans`, with its bits counted."""
    live = reader.generations
    status = FilterStatus.of(reader.location, live, reader.error_rate)
    generations: list[Figures] = [
        {
            "number": each.number,
            "recorded": each.count,
            "capacity": each.capacity,
            "bytes": each.geometry.nbytes,
            "blocks": each.geometry.num_blocks,
            "hashes": each.geometry.num_hashes,
            "fill_ratio": each.fill_ratio,
            "error_rate_now": each.error_rate_now,
            "error_rate_at_capacity": each.error_rate,
            "first_run": each.first_run,
            "last_run": each.last_run,
        }
        for each in live
    ]
    for each, figures, fills in zip(live, generations, reader.block_fills() if scans else ()):  # noqa: B905 - all or none
        contents = Contents.of(fills, each.geometry.num_hashes)
        figures["scan"] = {
            "fill_ratio": contents.fill_ratio,
            "error_rate_now": contents.error_rate,
            "recorded": contents.requests,
        }
    return {
        "location": status.location,
        "recorded": status.count,
        "capacity": status.capacity,
        "bytes": status.nbytes,
        "fill_ratio": status.fill_ratio,
        "error_rate_now": status.error_rate_now,
        "error_rate_at_capacity": math.fsum(each.error_rate for each in live),
        "error_rate_asked": status.error_rate,
        "expected_false_positives": status.expected_false_positives,
        "generations": generations,
        "spider": reader.spider,
        "fingerprinter": reader.fingerprinter,
        "closed": reader.is_closed,
        "in_use": reader.is_in_use,
    }


def print_written(place: Place, options: argparse.Namespace, **more: Any) -> None:
    """Print the figures of a filter that was written, with --json after `more` of them."""
    with closing(place.filter()) as reader:
        figures = filter_figures(reader)
    if options.json:
        names = ("recorded", "capacity", "bytes", "error_rate_now")
        print_json(
            {
                **more,
                "destination": figures["location"],
                **{name: figures[name] for name in names},
                "generations": len(figures["generations"]),
            }
        )
        return
    say(
        f"The filter in {figures['location']} has {figures['recorded']:,} of "
        f"{counted(figures['capacity'], 'request')} in {size_text(figures['bytes'])}, "
        f"error rate now {number_text(figures['error_rate_now'], 2)}"
    )
    if queue := more.get("queue"):
        say(f"And its queue: {counted(queue['requests'], 'request')}")


def queue_figures(place: Place, *, measures: bool = False) -> Figures | None:
    """Return the figures of a queue; `measures` takes a second, if a worker is alive."""
    if (figures := _queue_figures(place)) and measures and _is_used(figures):
        rates = Rates()
        rates.add(figures)
        time.sleep(_RATE_SECS)
        if figures := _queue_figures(place):
            rates.add(figures)
    return figures


def _queue_figures(place: Place) -> Figures | None:
    if (queue := place.find_queue()) is None:
        return None
    counts, progress, workers = queue.counts(), queue.progress(), place.workers()
    return {
        **{state.value: counts[state] for state in State},
        **progress._asdict(),
        "ended_at": None if left_in(counts) else progress.ended_at or None,
        "done_per_second": None,
        "workers": None if workers is None else [worker._asdict() for worker in workers],
    }


def _is_used(queue: Figures) -> bool:
    return any(each["is_alive"] for each in queue["workers"] or ())


def has_ended(queue: Figures | None) -> bool:
    """Return whether the crawl of a queue has ended, and no worker waits for requests."""
    return queue is not None and bool(queue["ended_at"]) and not _is_used(queue)


class Rates:
    """Computes the rates of a queue from its figures at several moments."""

    def __init__(self) -> None:
        self._left: deque[_Sample] = deque()
        # By worker ("": all workers): when it was first and last seen, and its requests done then.
        self._done: dict[str, list[_Sample]] = {}

    def add(self, queue: Figures) -> None:
        """Add the rates to the figures of a queue: None where there was no earlier look at it."""
        now, workers = time.monotonic(), queue["workers"] or []
        for name, figures in (("", queue), *((each["id"], each) for each in workers)):
            if (done := figures["done"]) is None:
                continue
            seen = self._done.get(name, [])
            if seen and done < seen[-1][1]:  # the server lost something
                seen = []
            figures["done_per_second"] = _slope(seen[-1:], now, done)
            figures["done_per_second_average"] = _slope(seen[:1], now, done)
            self._done[name] = [*seen[:1], (now, done)]
        if len(workers) == 1 and workers[0]["done"] is None:
            workers[0] |= {name: queue[name] for name in queue if name.startswith("done_per")}
        while len(self._left) > 1 and now - self._left[0][0] > _GROWTH_SECS:
            self._left.popleft()
        left = left_in(queue)
        growth = queue["growth_per_second"] = _slope([*self._left][:1], now, left)
        queue["seconds_left"] = left / -growth if growth and growth < 0 else None
        self._left.append((now, left))


_Sample = tuple[float, int]  # when, and a number of requests


def _slope(since: Sequence[_Sample], now: float, number: int) -> float | None:
    rates = [(number - before) / (now - begun) for begun, before in since if now > begun]
    return rates[0] if rates else None


def left_in(queue: Mapping[Any, int]) -> int:
    """Return how many requests a crawl has yet to finish, by the counts of its queue."""
    return int(sum(queue[state] for state in (State.PENDING, State.IN_FLIGHT, State.SUSPECT)))


def most_pending(hosts: Mapping[str, int]) -> list[Figures]:
    """Return the ten hosts with the most pending requests, the largest number first."""
    most = sorted(hosts, key=lambda host: -hosts[host])[:10]
    return [{"host": host, "pending": hosts[host]} for host in most]


# States of requests that are mentioned only if there are any.
_UNUSUAL = {
    State.SUSPECT: "suspect",
    State.WAITING: "waiting for pages to which they were redirected",
    State.FAILED: "failed",
    State.DEAD: "dead",
    State.UNREADABLE: "unreadable: this project cannot deserialize them",
}


def counts_text(queue: Figures) -> str:
    """Return how many requests a queue has in each state that has any, and how many are pending."""
    states = [state.value for state in State if queue[state.value] or state is State.PENDING]
    return ", ".join(f"{queue[state]:,} {state.replace('_', ' ')}" for state in states)


def queue_texts(queue: Figures) -> Iterator[str]:
    """Yield the figures of a queue for a line of text."""
    if queue["workers"] is not None:
        yield counted(sum(each["is_alive"] for each in queue["workers"]), "worker")
    if queue["done_per_second"] is not None:
        rate, average = queue["done_per_second"], queue["done_per_second_average"]
        yield f"{rate:,.1f} pages/s ({average:,.1f} on average)"
    yield f"{queue['in_flight']:,} in flight"
    growth = queue.get("growth_per_second")
    yield f"{queue['pending']:,} pending" + (f" ({growth:+,.1f}/s)" if growth is not None else "")
    yield f"{queue['done']:,} done"
    for state, meaning in _UNUSUAL.items():
        if queue[state]:
            yield f"{queue[state]:,} {meaning}"
    if queue["handed_over"]:
        yield f"{queue['handed_over']:,} handed over by scrapy bloom add"
    if queue["ended_at"]:
        yield f"ended at {time_text(queue['ended_at'])}"
    elif queue.get("seconds_left") is not None:
        yield f"about {rough_duration_text(queue['seconds_left'])} left"
    elif growth is not None and growth > 0:
        yield "time left unknown: the queue grows"


DIED = "was in flight in four processes that died, the last time alone"  # a dead request


def failure_text(row: Row) -> str:
    """Return why a request was not crawled, and in how many runs."""
    return f"{reason_of(row)} (in {counted(tries(row), 'run')})" if reason_of(row) else DIED


def reason_of(row: Row) -> str:
    """Return why a request was not crawled; empty if it is dead because processes died with it."""
    return "it was redirected to a page that is not done" if row.waits_for else row.reason


def tries(row: Row) -> int:
    """Return in how many runs a request has failed: the store adds the last one later."""
    return row.tries + (row.state in (State.FAILED, State.WAITING))


def speed_text(value: float | None) -> str:
    """Return a number of pages per second."""
    return "-" if value is None else f"{value:,.1f}"


def _heartbeat(worker: Figures) -> str:
    if not worker["is_alive"]:
        return "expired"
    seconds = worker["heartbeat_secs"]
    return "-" if seconds is None else f"{seconds:.0f} s ago"


WORKER_COLUMNS = (
    ("worker:", "name", str),
    ("pages/s", "done_per_second", speed_text),
    ("average", "done_per_second_average", speed_text),
    ("in flight", "in_flight", "{:,}".format),
    ("heartbeat", "", _heartbeat),
)
ANY_HOST = "(any)"  # stands for requests without a host
HOST_COLUMNS = (
    ("host:", "host", lambda host: host or ANY_HOST),
    ("pending", "pending", "{:,}".format),
)


# Metrics of Prometheus by figures: of a filter, a queue and a worker.
_METRICS: Sequence[Mapping[str, str]] = (
    {
        "recorded": "recorded_requests",
        "capacity": "capacity_requests",
        "bytes": "size_bytes",
        "fill_ratio": "fill_ratio",
        "error_rate_now": "false_positive_rate",
    },
    {
        **{state.value: f"{state.value}_requests" for state in State},
        "handed_over": "handed_over_requests",
        "done": "done_requests_total",
    },
    {
        "is_alive": "worker_up",
        "in_flight": "worker_in_flight_requests",
        "done": "worker_done_requests_total",
        "heartbeat_secs": "worker_heartbeat_age_seconds",
    },
)
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\""})


def prometheus_text(figures: Figures) -> str:
    """Return the known figures as metrics in the text format of Prometheus."""
    place = {"filter": figures["location"]}
    queue = figures["queue"] or {}
    workers = [  # names may be equal, for example in containers
        ({**place, "worker": each["name"], "id": each["id"]}, each)
        for each in queue.get("workers") or ()
    ]
    lines: list[str] = []
    for metrics, samples in zip(_METRICS, ([(place, figures)], [(place, queue)], workers)):  # noqa: B905 - three
        for figure, name in metrics.items():
            known = [sample for sample in samples if sample[1].get(figure) is not None]
            if known:
                kind = "counter" if name.endswith("_total") else "gauge"
                lines.append(f"# TYPE scrapy_bloom_{name} {kind}")
            for labels, each in known:
                text = ",".join(
                    f'{key}="{escaped(label).translate(_ESCAPES)}"' for key, label in labels.items()
                )
                lines.append(f"scrapy_bloom_{name}{{{text}}} {float(each[figure]):.16g}")
    return "".join(f"{line}\n" for line in lines)

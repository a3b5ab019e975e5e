"""Read the figures of a filter and its queue, with the same keys in files and in Redis."""

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import Any

from scrapy_bloom.commands.shared.output import progress
from scrapy_bloom.commands.shared.places import Figures, Place, Reader
from scrapy_bloom.filters.sizing import Contents
from scrapy_bloom.generations.policy import FilterStatus, window_of
from scrapy_bloom.queues.store import Row, State
from scrapy_bloom.text import counted, escaped, rough_duration_text, time_text

_RATE_SECS = 1.0
_GROWTH_SECS = 60.0  # the time over which the growth of the queue is measured
_FILTER_KEYS = (
    *("location", "recorded", "capacity", "bytes", "fill_ratio", "error_rate_now"),
    *("error_rate_at_capacity", "error_rate_asked", "window_secs", "expected_false_positives"),
    *("generations", "spider", "fingerprinter", "salt", "closed", "in_use"),
)


def no_filter_figures(location: str) -> Figures:
    """Return the figures of a job whose filter is elsewhere: the same keys without values."""
    return {**dict.fromkeys(_FILTER_KEYS), "location": location, "generations": []}


def filter_figures(reader: Reader, *, scans: bool = False) -> Figures:
    """Return the figures of a filter that a reader has opened.

    Args:
        reader: of a filter in files or in Redis.
        scans: count the bits of each generation, too, which reads the whole filter.
    """
    live = reader.generations
    status = FilterStatus.of(reader.location, live, reader.error_rate)
    generations: list[Figures] = [
        {
            "number": generation.number,
            "recorded": generation.count,
            "capacity": generation.capacity,
            "bytes": generation.geometry.nbytes,
            "blocks": generation.geometry.num_blocks,
            "hashes": generation.geometry.num_hashes,
            "fill_ratio": generation.fill_ratio,
            "error_rate_now": generation.error_rate_now,
            "error_rate_at_capacity": generation.error_rate,
            "file": name,
            "created": generation.created_at,
            "open_until": generation.open_until or None,
        }
        for generation, name in zip(live, reader.names, strict=True)
    ]
    if scans:
        for figures, contents in zip(generations, _counted(reader), strict=True):
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
        "error_rate_at_capacity": math.fsum(generation.error_rate for generation in live),
        "error_rate_asked": status.error_rate,
        "window_secs": window_of(live) or None,
        "expected_false_positives": status.expected_false_positives,
        "generations": generations,
        "spider": reader.spider,
        "fingerprinter": reader.fingerprinter,
        "salt": reader.salt,
        "closed": reader.is_closed,
        "in_use": reader.is_in_use,
    }


def _counted(reader: Reader) -> Iterator[Contents]:
    """Count the bits of each generation, block by block: they may be larger than the memory."""
    total = sum(each.geometry.num_blocks for each in reader.generations)
    done = count(1)
    with progress("Counting bits", total, "blocks") as advance:

        def shown(fills: Iterable[float]) -> Iterator[float]:
            for fill in fills:
                yield fill
                advance(next(done))

        for each, fills in zip(reader.generations, reader.block_fills(), strict=True):
            yield Contents.of(shown(fills), each.geometry.num_hashes)


def queue_figures(place: Place, *, measures: bool = False) -> Figures | None:
    """Return the figures of the queue at a place; None if there is none.

    To measure how many pages are crawled per second takes a second, if a worker is alive.
    """
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
        self._times: deque[tuple[float, int]] = deque()  # when, and how many requests were left
        # By worker ("": all workers): when it was first and last seen, and its requests done then.
        self._seen: dict[str, tuple[_Sample, _Sample]] = {}

    def add(self, queue: Figures) -> None:
        """Add the rates to the figures of a queue: None where there was no earlier look at it."""
        now = time.monotonic()
        seen = {}
        for name, figures in (
            ("", queue),
            *((each["id"], each) for each in queue["workers"] or ()),
        ):
            if (done := figures["done"]) is None:
                continue
            first, last = self._seen.get(name, ((now, done), (now, done)))
            if done < last[1]:  # the server lost something
                first = last = now, done
            figures["done_per_second"] = _slope(last, now, done)
            figures["done_per_second_average"] = _slope(first, now, done)
            seen[name] = first, (now, done)
        workers = queue["workers"] or []
        if len(workers) == 1 and workers[0]["done"] is None:
            for name in ("done_per_second", "done_per_second_average"):
                workers[0][name] = queue[name]
        self._seen = seen  # without the workers that are gone
        left = left_in(queue)
        self._times.append((now, left))
        while now - self._times[0][0] > _GROWTH_SECS and len(self._times) > 2:
            self._times.popleft()
        growth = queue["growth_per_second"] = _slope(self._times[0], now, left)
        queue["seconds_left"] = left / -growth if growth and growth < 0 else None


_Sample = tuple[float, int]  # when, and a number of requests


def _slope(since: _Sample, now: float, number: int) -> float | None:
    begun, before = since
    return (number - before) / (now - begun) if now > begun else None


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


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


WORKER_COLUMNS = (
    ("worker:", "name", str),
    ("pages/s", "done_per_second", _rate),
    ("average", "done_per_second_average", _rate),
    ("in flight", "in_flight", "{:,}".format),
    ("heartbeat", "heartbeat", str),
)
ANY_HOST = "(any)"  # stands for requests without a host
HOST_COLUMNS = (
    ("host:", "host", lambda host: host or ANY_HOST),
    ("pending", "pending", "{:,}".format),
)


def worker_rows(workers: Iterable[Figures]) -> list[Figures]:
    """Return the rows of a table of workers, whose columns are `WORKER_COLUMNS`."""
    return [{**each, "heartbeat": _heartbeat(each)} for each in workers]


def _heartbeat(worker: Figures) -> str:
    if not worker["is_alive"]:
        return "expired"
    seconds = worker["heartbeat_secs"]
    return "-" if seconds is None else f"{seconds:.0f} s ago"


_FILTER_METRICS = {
    "recorded": ("recorded_requests", "Requests recorded in the filter."),
    "capacity": ("capacity_requests", "Requests that the filter has room for."),
    "bytes": ("size_bytes", "Size of the filter."),
    "fill_ratio": ("fill_ratio", "Share of the bits that are set, 0 to 1."),
    "error_rate_now": ("false_positive_rate", "False-positive rate of the next lookup, 0 to 1."),
}
_QUEUE_METRICS = {
    "pending": ("pending_requests", "Requests in the queue that can be taken."),
    "in_flight": ("in_flight_requests", "Requests that workers have taken and not finished."),
    "suspect": ("suspect_requests", "Requests in flight when three processes died."),
    "waiting": ("waiting_requests", "Requests redirected to pages that are not done."),
    "failed": ("failed_requests", "Requests that failed, and that the next run tries again."),
    "dead": ("dead_requests", "Requests that are not tried again."),
    "unreadable": ("unreadable_requests", "Requests that cannot be deserialized."),
    "handed_over": ("handed_over_requests", "Requests added that the crawl has not queued yet."),
    "done": ("done_requests_total", "Requests finished since the queue began."),
}
_WORKER_METRICS = {
    "is_alive": ("worker_up", "Whether the lease of the worker is valid."),
    "in_flight": (
        "worker_in_flight_requests",
        "Requests that the worker has taken and not finished.",
    ),
    "done": ("worker_done_requests_total", "Requests that the worker has finished."),
    "heartbeat_secs": ("worker_heartbeat_age_seconds", "Time since the worker's last heartbeat."),
}
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
    for metrics, samples in (
        (_FILTER_METRICS, [(place, figures)]),
        (_QUEUE_METRICS, [(place, queue)]),
        (_WORKER_METRICS, workers),
    ):
        for figure, (name, meaning) in metrics.items():
            known = [
                (labels, each[figure]) for labels, each in samples if each.get(figure) is not None
            ]
            if known:
                kind = "counter" if name.endswith("_total") else "gauge"
                lines += [
                    f"# HELP scrapy_bloom_{name} {meaning}",
                    f"# TYPE scrapy_bloom_{name} {kind}",
                ]
            for labels, value in known:
                text = ",".join(
                    f'{key}="{escaped(each).translate(_ESCAPES)}"' for key, each in labels.items()
                )
                number = value if isinstance(value, float) else int(value)
                lines.append(f"scrapy_bloom_{name}{{{text}}} {number}")
    return "".join(f"{line}\n" for line in lines)

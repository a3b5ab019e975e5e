"""Read the figures of a filter and its queue, with the same keys in files and in Redis."""

import math
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from scrapy_bloom.commands.shared.output import progress
from scrapy_bloom.commands.shared.project import Place, Reader, job_database
from scrapy_bloom.files.directory import FilterReader
from scrapy_bloom.filters.sizing import Contents
from scrapy_bloom.generations.policy import FilterStatus, window_of
from scrapy_bloom.queues.batch import url_of
from scrapy_bloom.queues.job_state import count_added, read_counts, read_dead, read_done, read_slots
from scrapy_bloom.queues.shared_state import read_hosts, read_requests, read_state
from scrapy_bloom.text import counted, rough_duration_text, time_text

Figures = dict[str, Any]

_FILTER_KEYS = (
    *("location", "recorded", "capacity", "bytes", "fill_ratio", "error_rate_now"),
    *("error_rate_at_capacity", "error_rate_asked", "window_secs", "expected_false_positives"),
    *("generations", "spider", "fingerprinter", "salt", "closed", "in_use", "forgotten"),
)
_QUEUE_KEYS = (
    *("pending", "in_flight", "dead", "set_aside", "handed_over", "done", "done_per_second"),
    *("spider", "started", "ended_at", "workers"),
)
_MOST_DEAD = 10  # dead letters whose URLs are shown to people


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
    names = reader.names if isinstance(reader, FilterReader) else [None] * len(live)
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
        for generation, name in zip(live, names, strict=True)
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
        "forgotten": reader.count_forgotten(),
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


def queue_figures(place: Place) -> Figures | None:
    """Return the figures of the queue at a place; None if there is none.

    Both kinds have the same keys, with None for what a kind does not count.
    """
    figures: Figures = dict.fromkeys(_QUEUE_KEYS)
    if isinstance(place, Path):
        if (database := job_database(place)) is None:
            return None
        figures["pending"], figures["in_flight"] = read_counts(database)
        figures["done"] = read_done(database)
        figures["handed_over"] = count_added(database.parent)
        figures["dead"] = [url_of(data) for data in dead_letters(place)]
        return figures
    if (state := read_state(place.server, place.key)) is None:
        return None
    names = ("id", "name", "is_alive", "in_flight", "done", "heartbeat_secs")
    workers = [{name: getattr(each, name) for name in names} for each in state.workers]
    return figures | {
        "pending": state.pending + state.suspects,
        "in_flight": state.leased,
        "dead": [url_of(data) for data in dead_letters(place)],
        "set_aside": state.aside,
        "done": state.done,
        "spider": state.crawl or None,
        "started": state.is_started,
        "ended_at": state.ended_at or None,
        "workers": workers,
    }


def dead_letters(place: Place) -> list[bytes]:
    """Return the dead letters of the queue at a place, serialized."""
    if isinstance(place, Path):
        database = job_database(place)
        return read_dead(database) if database else []
    return [each.data for each in read_requests(place.server, place.key, "dead")]


def pending_by_host(place: Place) -> dict[str, int]:
    """Return the number of pending requests of each host; empty if there is no queue."""
    if isinstance(place, Path):
        database = job_database(place)
        return read_slots(database) if database else {}
    return read_hosts(place.server, place.key)


def most_pending(hosts: dict[str, int]) -> list[Figures]:
    """Return the ten hosts with the most pending requests, the largest number first."""
    most = sorted(hosts, key=lambda host: -hosts[host])[:10]
    return [{"host": host, "pending": hosts[host]} for host in most]


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
    shown = ", ".join(queue["dead"][:_MOST_DEAD])
    yield counted(len(queue["dead"]), "dead letter") + (f" ({shown})" if shown else "")
    if queue["set_aside"]:
        yield f"{queue['set_aside']:,} set aside: no worker can deserialize them"
    if queue["handed_over"]:
        yield f"{queue['handed_over']:,} handed over by scrapy bloom add"
    if queue["ended_at"]:
        yield f"the crawl has ended at {time_text(queue['ended_at'])}"
    elif queue.get("seconds_left") is not None:
        yield f"about {rough_duration_text(queue['seconds_left'])} left"
    elif growth is not None and growth > 0:
        yield "time left unknown: the queue grows"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


WORKER_COLUMNS = (
    ("worker:", "name", str),
    ("pages/s", "done_per_second", _rate),
    ("average", "done_per_second_average", _rate),
    ("in flight", "in_flight", "{:,}".format),
    ("heartbeat", "heartbeat", str),
)
HOST_COLUMNS = (
    ("host:", "host", lambda host: host or "(any)"),
    ("pending", "pending", "{:,}".format),
)


def worker_rows(workers: Iterable[Figures]) -> list[Figures]:
    """Return the rows of a table of workers, whose columns are `WORKER_COLUMNS`."""
    return [{**each, "heartbeat": _heartbeat(each)} for each in workers]


def _heartbeat(worker: Figures) -> str:
    if not worker["is_alive"]:
        return "expired"
    seconds = worker["heartbeat_secs"]
    return "" if seconds is None else f"{seconds:.0f} s ago"


_FILTER_METRICS = {
    "recorded": ("recorded_requests", "Requests recorded in the filter."),
    "capacity": ("capacity_requests", "Requests that the filter has room for."),
    "bytes": ("size_bytes", "Size of the filter."),
    "fill_ratio": ("fill_ratio", "Share of the bits that are set, 0 to 1."),
    "error_rate_now": ("false_positive_rate", "False-positive rate of the next lookup, 0 to 1."),
    "forgotten": ("forgotten_requests", "Recorded requests that are to be crawled again."),
}
_QUEUE_METRICS = {
    "pending": ("pending_requests", "Requests in the queue that are not in flight."),
    "in_flight": ("in_flight_requests", "Requests that workers have taken and not finished."),
    "dead": ("dead_letters", "Requests that are not crawled because their workers died."),
    "set_aside": ("set_aside_requests", "Requests that no worker can deserialize."),
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
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def prometheus_text(figures: Figures) -> str:
    """Return the known figures as metrics in the text format of Prometheus."""
    place = {"filter": figures["location"]}
    queue = figures["queue"] or {}
    if queue:
        queue = {**queue, "dead": len(queue["dead"])}
    workers = [({**place, "worker": each["name"]}, each) for each in queue.get("workers") or ()]
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
                    f'{key}="{each.translate(_ESCAPES)}"' for key, each in labels.items()
                )
                number = value if isinstance(value, float) else int(value)
                lines.append(f"scrapy_bloom_{name}{{{text}}} {number}")
    return "".join(f"{line}\n" for line in lines)

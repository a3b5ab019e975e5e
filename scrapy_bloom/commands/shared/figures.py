"""Figures of a filter and of its queue, with the same keys in files and in Redis."""

import math
import time
from pathlib import Path
from typing import Any

from scrapy_bloom.analysis.report import Measured, count_bits
from scrapy_bloom.commands.shared.output import progress
from scrapy_bloom.commands.shared.project import Reader, SharedPlace, job_database
from scrapy_bloom.files.directory import FilterReader
from scrapy_bloom.generations.backend import FilterStatus
from scrapy_bloom.generations.policy import window_of
from scrapy_bloom.queues.batch import url_of
from scrapy_bloom.queues.job_directory import count_added
from scrapy_bloom.queues.job_state import read_counts, read_dead, read_done, read_slots
from scrapy_bloom.queues.shared_state import read_hosts, read_requests, read_state

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
            "file": name if isinstance(reader, FilterReader) else None,
            "created": generation.created_at,
            "open_until": generation.open_until or None,
        }
        for generation, name in zip(live, reader.names, strict=True)
    ]
    if scans:
        for figures, (_, contents) in zip(generations, measured(reader), strict=True):
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
        "closed": reader.is_closed(),
        "in_use": reader.is_in_use(),
        "forgotten": reader.count_forgotten(),
    }


def measured(reader: Reader) -> list[Measured]:
    """Count the bits of a filter, generation by generation, with a progress bar."""
    blocks = sum(each.geometry.num_blocks for each in reader.generations)
    with progress("Counting bits", blocks, "blocks") as advance:
        return count_bits(reader.generations, reader.block_fills(), advance)


def queue_figures(place: Path | SharedPlace) -> Figures | None:
    """Return the figures of the queue at a place; None if there is none.

    Both kinds have the same keys, with None for what a kind does not count.
    """
    figures: Figures = dict.fromkeys(_QUEUE_KEYS)
    if isinstance(place, Path):
        if (database := job_database(place)) is None:
            return None
        figures["pending"], figures["in_flight"] = read_counts(database)
        figures["dead"] = [url_of(data) for data in read_dead(database)]
        figures["done"] = read_done(database)
        figures["handed_over"] = count_added(database.parent)
        return figures
    if (state := read_state(place.server, place.key)) is None:
        return None
    workers = [
        {
            "id": each.id,
            "name": each.name,
            "is_alive": each.is_alive,
            "in_flight": each.in_flight,
            "done": each.done,
            "heartbeat_secs": each.heartbeat_secs,
        }
        for each in state.workers
    ]
    return figures | {
        "pending": state.pending + state.suspects,
        "in_flight": state.leased,
        "dead": [url_of(each.data) for each in read_requests(place.server, place.key, "dead")],
        "set_aside": state.aside,
        "done": state.done,
        "spider": state.crawl or None,
        "started": state.is_started,
        "ended_at": state.ended_at or None,
        "workers": workers,
    }


def pending_by_host(place: Path | SharedPlace) -> dict[str, int]:
    """Return the number of pending requests of each host; empty if there is no queue."""
    if isinstance(place, Path):
        database = job_database(place)
        return read_slots(database) if database else {}
    return read_hosts(place.server, place.key)


def most_pending(hosts: dict[str, int], number: int) -> list[Figures]:
    """Return the hosts with the most pending requests, the largest number first."""
    most = sorted(hosts, key=lambda host: -hosts[host])[:number]
    return [{"host": host, "pending": hosts[host]} for host in most]


def queue_text(queue: Figures) -> str:
    """Return the figures of a queue in one line."""
    texts = [f"{queue['pending']:,} pending", f"{queue['in_flight']:,} in flight"]
    if queue["dead"]:
        texts.append(f"{len(queue['dead']):,} dead: {', '.join(queue['dead'][:_MOST_DEAD])}")
    if queue["set_aside"]:
        texts.append(f"{queue['set_aside']:,} set aside: no worker can deserialize them")
    if queue["handed_over"]:
        texts.append(f"{queue['handed_over']:,} handed over by scrapy bloom add")
    if queue["done"] is not None:
        texts.append(f"{queue['done']:,} done")
    if queue["done_per_second"] is not None:
        texts.append(f"{queue['done_per_second']:,.1f} per second")
    if queue["ended_at"]:
        ended = time.strftime("%Y-%m-%d %H:%M", time.localtime(queue["ended_at"]))
        texts.append(f"the crawl ended at {ended}")
    return ", ".join(texts)

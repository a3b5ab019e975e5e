"""Figures of a queue, for subcommands: that of a job, or one in Redis that workers share."""

import time
from pathlib import Path
from typing import Any

from scrapy_bloom.commands.shared.output import print_table, say
from scrapy_bloom.job import paths as jobdir
from scrapy_bloom.queues.batch import url_of
from scrapy_bloom.queues.shared_state import read_members, read_state
from scrapy_bloom.queues.sqlite import read_counts, read_dead, read_recent
from scrapy_bloom.redis.filter import SharedFilter

_RATE_SECS = 1.0
_MOST_DEAD = 10  # whose URLs are shown

_Figures = dict[str, Any]

# Of both kinds of queue; each has None for what nobody counts there.
_KEYS = (
    *("pending", "in_flight", "dead", "set_aside", "done", "done_per_second"),
    *("spider", "started", "ended_at", "workers"),
)

_COLUMNS = (
    ("worker:", "name", str),
    ("lease:", "is_alive", lambda is_alive: "alive" if is_alive else "over: it is dead"),
    ("in flight", "in_flight", "{:,}".format),
)


def job_database(path: Path) -> Path | None:
    """Return CrashSafeScheduler's database of a job, or of the job of a filter; None if none."""
    # A filter's directory may be in its job's. Any other path below a job says nothing about it.
    for job_dir in (path, path.parent) if jobdir.filter_files(path) else (path,):
        if jobdir.is_database(database := job_dir / jobdir.DATABASE):
            return database
    return None


def job_queue(path: Path) -> _Figures | None:
    """Count the requests in CrashSafeScheduler's database; None if there is none."""
    if (database := job_database(path)) is None:
        return None
    pending, in_flight = read_counts(database)
    dead = [url_of(data) for data in read_dead(database)]
    known = {"pending": pending, "in_flight": in_flight, "dead": dead}
    return {**dict.fromkeys(_KEYS), **known}


def recent_changes(path: Path) -> dict[bytes, bool | None]:
    """Return what a job's log has and its filter lacks; see `FilterReader`."""
    database = None if path.is_file() else job_database(path)
    if database is None:
        return {}
    return {fingerprint: forgets for forgets, fingerprint in read_recent(database)}


def shared_queue(filter_: SharedFilter) -> _Figures | None:
    """Return the figures of a shared queue, None if there is none.

    If a worker is alive, that takes a second: how many requests are done in it.
    """
    server, key = filter_.server, filter_.key
    begun, before = time.monotonic(), read_state(server, key)
    if before is None:
        return None
    state, rate = before, None
    if before.live:
        time.sleep(_RATE_SECS)
        state = read_state(server, key) or before
        rate = max(0, state.done - before.done) / (time.monotonic() - begun)
    return {
        "spider": state.crawl or None,
        "dead": [url_of(each.data) for each in read_members(server, key, "dead")],
        "pending": state.pending + state.suspects,
        "in_flight": state.leased,
        "set_aside": state.aside,
        "done": state.done,
        "done_per_second": rate,
        "started": state.is_started,
        "ended_at": state.ended_at or None,
        "workers": [
            {
                "id": each.id,
                "name": each.name,
                "is_alive": each.is_alive,
                "in_flight": each.in_flight,
            }
            for each in state.workers
        ],
    }


def queue_text(queue: _Figures) -> str:
    """Return the figures of a queue in one line."""
    texts = [f"{queue['pending']:,} pending", f"{queue['in_flight']:,} in flight"]
    if queue["dead"]:
        texts.append(f"{len(queue['dead']):,} dead: {', '.join(queue['dead'][:_MOST_DEAD])}")
    if queue["set_aside"]:
        texts.append(f"{queue['set_aside']:,} set aside, which no worker can make again")
    if queue["done"] is not None:
        texts.append(f"{queue['done']:,} done")
    if queue["done_per_second"] is not None:
        texts.append(f"{queue['done_per_second']:,.1f} a second")
    if queue["ended_at"]:
        ended = time.strftime("%Y-%m-%d %H:%M", time.localtime(queue["ended_at"]))
        texts.append(f"the crawl ended at {ended}")
    return ", ".join(texts)


def print_workers(queue: _Figures | None) -> None:
    """Print who shares a queue, if anybody does."""
    if queue and queue["workers"]:
        say("")
        print_table(_COLUMNS, queue["workers"])

"""Print what a filter is, and how full each of its generations is.

PATH is a JOBDIR, a BLOOM_DIR, or one generation-*.bloom file. The filter may be in use: nothing is
locked and nothing is changed. "Not closed" means that its crawl was killed; Linux tells it from one
that runs on this machine now.

"Asked for" is the error rate that the filter was made to keep, however far it grows. Somebody
who knows the salt can craft URLs that the filter reports as duplicates: --show-salt prints it.

For a queue that workers share in Redis, it prints the pending requests, the workers and how many
requests each of them holds, which leases have expired (those workers are dead, and the others get
their requests), and how many requests are done in a second.

--watch shows how the crawl progresses, until Ctrl-C: the rate of each worker, the queue, and the
hosts with the most pending requests. Without a terminal it prints a line per interval, and with
--json a line of JSON. --format prometheus prints the figures for a Prometheus text-file collector.

What is recorded is counted by the crawl, and fill and error rate follow from it. --scan counts the
bits themselves: it reads all of the filter, and tells what is really there.

Examples:
  scrapy bloom info jobs/shop
  scrapy bloom info jobs/shop --scan --json
  scrapy bloom info redis://localhost:6379/0 --key shop:bloom
  scrapy bloom info redis://localhost:6379/0 --key shop:bloom --watch
  scrapy bloom info jobs/shop --format prometheus
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from scrapy.exceptions import UsageError
from scrapy.settings import Settings

from scrapy_bloom.commands.shared.arguments import add_json, add_place, check_filter_name, is_redis
from scrapy_bloom.commands.shared.output import print_json, print_table, say
from scrapy_bloom.commands.shared.project import (
    Reader,
    connect,
    job_database,
    load_project,
    measured,
    opened_filter,
    state_text,
)
from scrapy_bloom.commands.shared.prometheus import prometheus_text
from scrapy_bloom.commands.shared.watch import Rates, watch
from scrapy_bloom.files.directory import FilterReader, filter_directory
from scrapy_bloom.generations.backend import FilterStatus
from scrapy_bloom.generations.policy import window_of
from scrapy_bloom.job import paths as jobdir
from scrapy_bloom.queues.batch import url_of
from scrapy_bloom.queues.shared_state import read_hosts, read_requests, read_state
from scrapy_bloom.queues.sqlite import read_counts, read_dead, read_done, read_slots
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.reader import opened_reader
from scrapy_bloom.text import (
    duration_text,
    number_text,
    parsed_seconds,
    rate_text,
    share_text,
    size_text,
)

SYNTAX = (
    "PATH|REDIS-URL [--key NAME] [--spider NAME] [--scan] [--show-salt] [--json] "
    "[--watch [SECONDS]] [--format prometheus]"
)
HELP = "what a filter is, and how full"

_Figures = dict[str, Any]
_MASKED = "***"
_RATE_SECS = 1.0
_WATCH_SECS = 2.0
_WATCH_DEADLINE_SECS = 1.0  # then the watch says that the server does not answer
_MOST_DEAD = 10  # whose URLs are shown

# What is printed with --json, also if there is a queue alone.
_KEYS = (
    *("location", "recorded", "capacity", "bytes", "fill_ratio", "error_rate_now"),
    *("error_rate_at_capacity", "error_rate_asked", "window_secs", "expected_false_positives"),
    *("generations", "spider", "fingerprinter", "salt", "closed", "in_use", "queue", "forgotten"),
)

# Of both kinds of queue; each has None for what nobody counts there.
_QUEUE_KEYS = (
    *("pending", "in_flight", "dead", "set_aside", "done", "done_per_second"),
    *("spider", "started", "ended_at", "workers"),
)

_COLUMNS = (
    ("generation", "number", str),
    ("created:", "created", lambda secs: time.strftime("%Y-%m-%d %H:%M", time.localtime(secs))),
    ("recorded", "recorded", number_text),
    ("capacity", "capacity", number_text),
    ("size", "bytes", size_text),
    ("hashes", "hashes", str),
    ("fill", "fill_ratio", share_text),
    ("error rate", "error_rate_now", rate_text),
)
_SCANNED = (
    ("counted fill", "scan", lambda scan: share_text(scan["fill_ratio"])),
    ("counted rate", "scan", lambda scan: rate_text(scan["error_rate_now"])),
    ("about recorded", "scan", lambda scan: number_text(scan["recorded"])),
)

_WORKER_COLUMNS = (
    ("worker:", "name", str),
    ("lease:", "is_alive", lambda is_alive: "alive" if is_alive else "expired: the worker is dead"),
    ("in flight", "in_flight", "{:,}".format),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's own."""
    add_place(parser)
    parser.add_argument("--scan", action="store_true", help="count the bits: reads all of it")
    parser.add_argument("--show-salt", action="store_true", help="print the salt, which is secret")
    add_json(parser)
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_interval,
        const=_WATCH_SECS,
        metavar="SECONDS",
        help="show the progress of the crawl again and again, every 2 seconds by default",
    )
    parser.add_argument("--format", choices=["prometheus"], help="print the figures for Prometheus")


def _interval(text: str) -> float:
    value = parsed_seconds(text)
    if not 0.1 <= value <= 86_400:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an interval; allowed is a time from 0.1 seconds to 1 day, for "
            "example 2 or 1m"
        )
    return value


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Print the figures of a filter."""
    if options.format and (options.json or options.watch or options.scan):
        raise UsageError("--format prometheus cannot be combined with --json, --watch or --scan")
    if options.watch and options.scan:
        raise UsageError("--scan reads the whole filter, and cannot be combined with --watch")
    with _opened(options, settings) as (read, read_pending_hosts):
        if options.watch:
            watch(read, read_pending_hosts, options.watch, as_json=options.json)
            return
        figures = read()
        if options.format:
            sys.stdout.write(prometheus_text(figures))
            return
        queue = figures["queue"]
        if queue and any(each["is_alive"] for each in queue["workers"] or ()):
            rates = Rates()
            rates.add(queue)
            time.sleep(_RATE_SECS)
            figures = read()
            rates.add(figures["queue"])
    _print_all(figures, options)


def _print_all(figures: _Figures, options: argparse.Namespace) -> None:
    if not options.show_salt and figures["salt"]:
        figures["salt"] = _MASKED
    if options.json:
        print_json(figures)
    elif figures["generations"]:
        _print(figures)
    else:
        say(f"Job in {figures['location']}, without a filter")
        say(f"  queue: {_queue_text(figures['queue'])}")
    if not options.json:
        _print_workers(figures["queue"])


@contextmanager
def _opened(
    options: argparse.Namespace, settings: Settings
) -> Iterator[tuple[Callable[[], _Figures], Callable[[], dict[str, int]]]]:
    """Open a place; return what reads its figures, and its numbers of pending requests by host."""
    if not is_redis(options.place):
        check_filter_name(options, options.place)
        database = job_database(Path(options.place))
        yield (
            lambda: _in_files(options, settings),
            lambda: read_slots(database) if database else {},
        )
        return
    project = load_project(settings, options.spider, options.place)
    filter_ = connect(options, project)
    server, key = filter_.server, filter_.key
    if options.watch:
        server.deadline_secs = min(server.deadline_secs, _WATCH_DEADLINE_SECS)

    def read() -> _Figures:
        reader = opened_reader(server, key)
        return _figures(reader, options, _shared_queue(server, key))

    with closing(server):
        yield read, lambda: read_hosts(server, key)


def _in_files(options: argparse.Namespace, settings: Settings) -> _Figures:
    path = Path(options.place)
    queue = _job_queue(path)
    if queue and not jobdir.filter_files(filter_directory(path)):
        return _without_filter(str(path), queue)  # it is elsewhere
    with opened_filter(options, settings) as reader:
        return _figures(reader, options, queue)


def _without_filter(location: str, queue: _Figures) -> _Figures:
    return {**dict.fromkeys(_KEYS), "location": location, "generations": [], "queue": queue}


def _figures(reader: Reader, options: argparse.Namespace, queue: _Figures | None) -> _Figures:
    live, is_local = reader.generations, isinstance(reader, FilterReader)
    status = FilterStatus.of(reader.location, live, reader.error_rate)
    figures: _Figures = {
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
        "generations": [
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
                "file": name if is_local else None,
                "created": generation.created_at,
                "open_until": generation.open_until or None,
            }
            for generation, name in zip(live, reader.names, strict=True)
        ],
        "spider": reader.spider,
        "fingerprinter": reader.fingerprinter,
        "salt": reader.salt,
        "closed": reader.is_closed(),
        "in_use": reader.is_in_use(),
        "queue": queue,
        "forgotten": reader.count_forgotten(),
    }
    if options.scan:
        _scan(figures["generations"], reader)
    return figures


def _scan(generations: list[_Figures], reader: Reader) -> None:
    for generation, (_, contents) in zip(generations, measured(reader), strict=True):
        generation["scan"] = {
            "fill_ratio": contents.fill_ratio,
            "error_rate_now": contents.error_rate,
            "recorded": contents.requests,
        }


def _print(figures: _Figures) -> None:
    rates = (
        rate_text(figures["error_rate_now"]),
        f"when full {rate_text(figures['error_rate_at_capacity'])}",
        f"asked for {figures['error_rate_asked']:g}",
    )
    lines = {
        "spider": figures["spider"],
        "fingerprinter": figures["fingerprinter"],
        "salt": figures["salt"] + (" (--show-salt)" if figures["salt"] == _MASKED else ""),
        "state": state_text(figures["closed"], figures["in_use"]),
        "window": duration_text(figures["window_secs"]) if figures["window_secs"] else "none",
        "recorded": f"{figures['recorded']:,} of {figures['capacity']:,}",
        "size": size_text(figures["bytes"]),
        "fill": f"{share_text(figures['fill_ratio'])} of the bits",
        "error rate": "; ".join(rates),
        "false positives": f"{number_text(figures['expected_false_positives'], 2)} expected so far",
    }
    if queue := figures["queue"]:
        lines["queue"] = _queue_text(queue)
    if figures["forgotten"]:
        lines["forgotten"] = f"{figures['forgotten']:,}, crawled again when met"
    say(f"Filter in {figures['location']}")
    for name, value in lines.items():
        say(f"  {name + ':':<17}{value}")
    say("")
    is_scanned = "scan" in figures["generations"][0]
    print_table(_COLUMNS + _SCANNED if is_scanned else _COLUMNS, figures["generations"])


def _job_queue(path: Path) -> _Figures | None:
    """Count the requests in CrashSafeScheduler's database; None if there is none."""
    if (database := job_database(path)) is None:
        return None
    pending, in_flight = read_counts(database)
    dead = [url_of(data) for data in read_dead(database)]
    known = {"pending": pending, "in_flight": in_flight, "dead": dead, "done": read_done(database)}
    return {**dict.fromkeys(_QUEUE_KEYS), **known}


def _shared_queue(server: RedisServer, key: str) -> _Figures | None:
    """Return the figures of a shared queue, None if there is none."""
    state = read_state(server, key)
    if state is None:
        return None
    return {
        "spider": state.crawl or None,
        "dead": [url_of(each.data) for each in read_requests(server, key, "dead")],
        "pending": state.pending + state.suspects,
        "in_flight": state.leased,
        "set_aside": state.aside,
        "done": state.done,
        "done_per_second": None,
        "started": state.is_started,
        "ended_at": state.ended_at or None,
        "workers": [
            {
                "id": each.id,
                "name": each.name,
                "is_alive": each.is_alive,
                "in_flight": each.in_flight,
                "done": each.done,
                "heartbeat_secs": each.heartbeat_secs,
            }
            for each in state.workers
        ],
    }


def _queue_text(queue: _Figures) -> str:
    """Return the figures of a queue in one line."""
    texts = [f"{queue['pending']:,} pending", f"{queue['in_flight']:,} in flight"]
    if queue["dead"]:
        texts.append(f"{len(queue['dead']):,} dead: {', '.join(queue['dead'][:_MOST_DEAD])}")
    if queue["set_aside"]:
        texts.append(f"{queue['set_aside']:,} set aside: no worker can deserialize them")
    if queue["done"] is not None:
        texts.append(f"{queue['done']:,} done")
    if queue["done_per_second"] is not None:
        texts.append(f"{queue['done_per_second']:,.1f} a second")
    if queue["ended_at"]:
        ended = time.strftime("%Y-%m-%d %H:%M", time.localtime(queue["ended_at"]))
        texts.append(f"the crawl ended at {ended}")
    return ", ".join(texts)


def _print_workers(queue: _Figures | None) -> None:
    """Print who shares a queue, if anybody does."""
    if queue and queue["workers"]:
        say("")
        print_table(_WORKER_COLUMNS, queue["workers"])

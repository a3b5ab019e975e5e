"""Print the figures of a filter: its size, its fill and its false-positive rate.

PATH is a JOBDIR, a BLOOM_DIR, or one generation-*.bloom file. A crawl may use the filter
meanwhile: the command locks nothing and changes nothing. "Not closed" means that the last crawl
was killed, or that it runs on another machine.

"Asked for" is the false-positive rate that the filter keeps, however far it grows. Anybody who
knows the salt can craft URLs that the filter reports as duplicates, so only --show-salt prints it.

For a queue that workers share in Redis, the command also prints the pending requests, the workers
with the requests that each has in flight, the workers whose lease has expired (they are dead, and
the others get their requests), and the number of requests that are done per second.

--watch shows the progress of the crawl until Ctrl-C: the rate of each worker, the queue, and the
hosts with the most pending requests. Without a terminal it prints a line per interval, and with
--json a line of JSON. --format prometheus prints the figures for a Prometheus text-file collector.

The crawl counts the requests that it records; fill and rate are computed from these counts. --scan
reads the whole filter and counts the bits that are set.

Examples:
  scrapy bloom info jobs/shop
  scrapy bloom info jobs/shop --scan --json
  scrapy bloom info redis://localhost:6379/0 --key shop:bloom
  scrapy bloom info jobs/shop --format prometheus
"""

import argparse
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path

from scrapy.exceptions import UsageError
from scrapy.settings import Settings

from scrapy_bloom.commands.shared.arguments import add_json, add_place
from scrapy_bloom.commands.shared.figures import (
    Figures,
    filter_figures,
    no_filter_figures,
    pending_by_host,
    queue_figures,
    queue_text,
)
from scrapy_bloom.commands.shared.output import print_json, print_table, say
from scrapy_bloom.commands.shared.project import (
    SharedPlace,
    files_reader,
    opened_place,
    state_text,
)
from scrapy_bloom.commands.shared.prometheus import prometheus_text
from scrapy_bloom.commands.shared.watch import Rates, watch
from scrapy_bloom.files.directory import filter_directory
from scrapy_bloom.job import paths as jobdir
from scrapy_bloom.redis.reader import RedisReader
from scrapy_bloom.text import (
    duration_text,
    number_text,
    parsed_seconds,
    rate_text,
    share_text,
    size_text,
)

SYNTAX = (
    "[PATH|REDIS-URL] [--key NAME] [--spider NAME] [--scan] [--show-salt] [--json] "
    "[--watch [SECONDS]] [--format prometheus]"
)
HELP = "the size, fill and false-positive rate of a filter; the progress of a crawl"

_MASKED = "***"
_RATE_SECS = 1.0
_WATCH_SECS = 2.0
_WATCH_DEADLINE_SECS = 1.0  # until the watch reports that the server does not answer

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
    """Add the arguments of the subcommand."""
    add_place(parser, is_optional=True)
    parser.add_argument(
        "--scan", action="store_true", help="read the whole filter and count its bits"
    )
    parser.add_argument("--show-salt", action="store_true", help="print the salt, which is secret")
    add_json(parser)
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_interval,
        const=_WATCH_SECS,
        metavar="SECONDS",
        help="show the progress of the crawl, every 2 seconds by default",
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
    with opened_place(options, settings) as place:
        if options.watch and isinstance(place, SharedPlace):
            place.server.deadline_secs = min(place.server.deadline_secs, _WATCH_DEADLINE_SECS)
        read = partial(_read, place, scans=options.scan)
        if options.watch:
            read_hosts = partial(pending_by_host, place)
            watch(read, read_hosts, options.watch, as_json=options.json)
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


def _read(place: Path | SharedPlace, *, scans: bool) -> Figures:
    """Read the figures of a filter and its queue."""
    if isinstance(place, SharedPlace):
        with_filter = filter_figures(RedisReader(place.server, place.key), scans=scans)
        return {**with_filter, "queue": queue_figures(place)}
    queue = queue_figures(place)
    if queue and not jobdir.filter_files(filter_directory(place)):
        return {**no_filter_figures(str(place)), "queue": queue}
    with closing(files_reader(place)) as reader:
        return {**filter_figures(reader, scans=scans), "queue": queue}


def _print_all(figures: Figures, options: argparse.Namespace) -> None:
    if not options.show_salt and figures["salt"]:
        figures["salt"] = _MASKED
    if options.json:
        print_json(figures)
    elif figures["generations"]:
        _print(figures)
    else:
        say(f"Job in {figures['location']}, without a filter")
        say(f"  queue: {queue_text(figures['queue'])}")
    if not options.json:
        _print_workers(figures["queue"])


def _print(figures: Figures) -> None:
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
        lines["queue"] = queue_text(queue)
    if figures["forgotten"]:
        lines["forgotten"] = f"{figures['forgotten']:,}, crawled again when a crawl finds them"
    say(f"Filter in {figures['location']}")
    for name, value in lines.items():
        say(f"  {name + ':':<17}{value}")
    say("")
    is_scanned = "scan" in figures["generations"][0]
    print_table(_COLUMNS + _SCANNED if is_scanned else _COLUMNS, figures["generations"])


def _print_workers(queue: Figures | None) -> None:
    """Print the workers of a shared queue."""
    if queue and queue["workers"]:
        say("")
        print_table(_WORKER_COLUMNS, queue["workers"])

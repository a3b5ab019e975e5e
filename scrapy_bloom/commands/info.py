"""Print the figures of a filter: its size, its fill and its false-positive rate.

The URL of a server without the name of a filter lists all filters of the server.

A crawl may use the JOBDIR meanwhile: the command locks nothing and changes nothing. Under Scrapy's
scheduler, a crawl writes its figures twice a minute. Fill and rate are computed from the number of
requests that the crawl has recorded; --scan reads the whole filter and counts its bits.

The target is the false-positive rate that the filter keeps, however far it grows.

Examples:
  scrapy bloom info jobs/shop
  scrapy bloom info jobs/shop --scan --json
  scrapy bloom info redis://localhost:6379/0#shop:bloom
  scrapy bloom info redis://localhost:6379/0
  scrapy bloom info jobs/shop --format prometheus
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, nullcontext
from typing import Any

from scrapy.exceptions import UsageError
from scrapy.settings import Settings

from scrapy_bloom.commands.shared.arguments import add_json, add_place
from scrapy_bloom.commands.shared.figures import (
    HOST_COLUMNS,
    WORKER_COLUMNS,
    Rates,
    filter_figures,
    has_ended,
    most_pending,
    no_filter_figures,
    prometheus_text,
    queue_figures,
    queue_texts,
)
from scrapy_bloom.commands.shared.output import (
    console_of,
    note,
    print_json,
    print_table,
    say,
    table,
)
from scrapy_bloom.commands.shared.places import Figures, Place, opened_place
from scrapy_bloom.commands.shared.project import answering_server, load_project, state_text
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.redis.connection.server import RedisServer, next_attempt
from scrapy_bloom.redis.stored import RedisReader, filters_on
from scrapy_bloom.text import (
    escaped,
    masked,
    number_text,
    parsed_seconds,
    rate_text,
    share_text,
    size_text,
    time_text,
)

_WATCH_SECS = 2.0
_WATCH_DEADLINE_SECS = 1.0  # until the watch reports that the server does not answer

_NUMBER = ("no.", "number", str)  # of a generation
_COLUMNS = (
    _NUMBER,
    ("last run:", "last_run", lambda at: time_text(at).partition(" ")[0]),
    ("recorded", "recorded", number_text),
    ("capacity", "capacity", number_text),
    ("size", "bytes", size_text),
    ("fill", "fill_ratio", share_text),
    ("error rate", "error_rate_now", rate_text),
)
_SCANNED = (
    _NUMBER,
    ("counted fill", "scan", lambda scan: share_text(scan["fill_ratio"])),
    ("counted rate", "scan", lambda scan: rate_text(scan["error_rate_now"])),
    ("about recorded", "scan", lambda scan: number_text(scan["recorded"])),
)
_LISTED = (
    ("location:", "location", str),
    ("spider:", "spider", str),
    *_COLUMNS[2:5],
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    add_place(parser, is_optional=True)
    parser.add_argument(
        "--scan", action="store_true", help="read the whole filter and count its bits"
    )
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
            f"{text!r} is not an interval; use a time from 0.1 seconds to 1 day, for "
            "example 2 or 1m, and give the path before --watch"
        )
    return value


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Print the figures of a filter."""
    if options.format and (options.json or options.watch or options.scan):
        raise UsageError("--format prometheus cannot be combined with --json, --watch or --scan")
    if options.watch and options.scan:
        raise UsageError("--scan reads the whole filter, and cannot be combined with --watch")
    if (
        options.place.url
        and not options.place.key
        and not (options.watch or options.scan or options.format)
    ):
        project = load_project(settings, options.spider, options.place.url)
        if not options.spider and "%(spider)s" in project.bloom.redis_key:
            with closing(answering_server(project)) as server:
                _list(server, as_json=options.json)
            return
    if options.watch:
        settings.set("BLOOM_REDIS_DEADLINE_SECS", _WATCH_DEADLINE_SECS, "cmdline")
    with opened_place(options.place, settings) as place:
        if options.watch:
            _watch(place, options.watch, as_json=options.json)
            return
        queue = queue_figures(place, measures=not options.format)
        figures = _read(place, queue, scans=options.scan)
    if options.format:
        sys.stdout.write(prometheus_text(figures))
        return
    print_json(figures) if options.json else _print(figures)


def _list(server: RedisServer, *, as_json: bool) -> None:
    """Print the main figures of each filter of a server."""
    filters = []
    for key in filters_on(server):
        try:
            figures = filter_figures(RedisReader(server, key))
            filters.append({name: figures[name] for _, name, _ in _LISTED})
        except StorageError as error:  # it is damaged, or was removed meanwhile
            note(f"scrapy bloom: warning: {error}")
    if as_json:
        print_json({"server": server.address, "filters": filters})
    elif filters:
        print_table(_LISTED, filters)
    else:
        say(f"{server.address} has no filter")


def _read(place: Place, queue: Figures | None, *, scans: bool = False) -> Figures:
    """Read the figures of a filter, and add those of its queue."""
    if queue and not place.has_filter():
        return {**no_filter_figures(place.name), "queue": queue}
    with closing(place.filter()) as reader:
        return {**filter_figures(reader, scans=scans), "queue": queue}


def _print(figures: Figures) -> None:
    lines, queue, live = {}, figures["queue"], figures["generations"]
    if live:
        rates = (
            rate_text(figures["error_rate_now"]),
            f"{rate_text(figures['error_rate_at_capacity'])} when full",
            f"target {rate_text(figures['error_rate_asked'])}",
        )
        drops = number_text(figures["expected_false_positives"], 2)
        lines = {
            "spider": figures["spider"],
            "fingerprinter": figures["fingerprinter"],
            "state": state_text(figures["closed"], figures["in_use"]),
            "recorded": f"{figures['recorded']:,} of {figures['capacity']:,}",
            "size": size_text(figures["bytes"]),
            "fill": f"{share_text(figures['fill_ratio'])} of the bits",
            "error rate": "; ".join(rates),
            "false positives": f"{drops} expected so far",
        }
    if queue:
        lines["queue"] = "; ".join(queue_texts(queue))
    place = figures["location"]
    say(f"Filter in {place}" if live else f"Job in {place}, without a filter")
    for name, value in lines.items():
        say(f"  {name + ':':<17}{value}")
    scanned = [each for each in live if "scan" in each]
    workers = queue and queue["workers"]
    for columns, rows in ((_COLUMNS, live), (_SCANNED, scanned), (WORKER_COLUMNS, workers)):
        if rows:
            say("")
            print_table(columns, rows)


# The watch.


def _watch(place: Place, interval: float, *, as_json: bool) -> None:
    """Print the progress of a crawl until it has ended: a table, or, without a terminal, lines.

    If the server does not answer, an error is shown and the next interval tries again.

    Raises:
        StorageError: the first attempt failed.
    """
    from rich.live import Live  # noqa: PLC0415 - only if it is used

    rates, figures = Rates(), Figures()
    hosts: Mapping[str, int] = {}
    hosts_due = 0.0
    console = console_of(sys.stdout)
    is_line = as_json or not console.is_interactive
    with nullcontext() if is_line else Live(console=console, auto_refresh=False) as live:
        while True:
            begun = time.monotonic()
            try:
                new = _read(place, queue := queue_figures(place))
                if queue:
                    rates.add(queue)
                    if begun >= hosts_due:  # a broad crawl has very many hosts
                        hosts = place.queue().slots()
                        hosts_due = next_attempt(begun)
                    queue["hosts"] = most_pending(hosts)
                figures = {key: new[key] for key in new if key != "generations"}
            except StorageError as error:
                if not figures:
                    raise
                figures = {"error": masked(str(error))}
            figures = {"time": time.time(), **figures}
            if live:
                live.update(progress_table(figures), refresh=True)
            elif as_json:
                sys.stdout.write(json.dumps(figures) + "\n")
            else:
                say(f"{time.strftime('%H:%M:%S')} {_line(figures)}")
            sys.stdout.flush()
            if has_ended(figures.get("queue")):
                return
            time.sleep(max(0.0, begun + interval - time.monotonic()))


def _line(figures: Figures) -> str:
    if "error" in figures:
        return f"no figures: {figures['error']}; trying again"
    queue = figures["queue"]
    return "; ".join([*(queue_texts(queue) if queue else ()), *_filter_texts(figures)])


def _filter_texts(figures: Figures) -> Iterator[str]:
    if figures["recorded"] is not None:
        yield f"{figures['recorded']:,} recorded"
        yield f"fill {share_text(figures['fill_ratio'])}"
        yield f"false-positive rate {rate_text(figures['error_rate_now'])}"


def progress_table(figures: Figures) -> Any:
    """Return the progress of a crawl as a rich renderable."""
    from rich.console import Group  # noqa: PLC0415 - only for people
    from rich.text import Text  # noqa: PLC0415

    clock = time.strftime("%H:%M:%S", time.localtime(figures["time"]))
    if "error" in figures:
        return Text(f"{clock} {escaped(_line(figures))}", style="bold red")
    queue = figures["queue"]
    parts: list[Any] = [
        Text(f"{escaped(figures['location'])} at {clock}", style="bold"),
        Text("; ".join(_filter_texts(figures))),
    ]
    if queue:
        parts += [Text(escaped("; ".join(queue_texts(queue)))), Text("")]
        workers = queue["workers"] or []
        name = "all workers" if workers else "the crawl"
        total = {**queue, "name": name, "heartbeat_secs": None, "is_alive": True}
        parts.append(table(WORKER_COLUMNS, [*workers, total]))
        if queue["hosts"]:
            parts += [Text(""), table(HOST_COLUMNS, queue["hosts"])]
    return Group(*parts)

"""Print the figures of a filter: its size, its fill and its false-positive rate.

The URL of a server without a #KEY lists the filters of the server. A crawl may
use the JOBDIR meanwhile: the command locks nothing and changes nothing. Fill
and rate are computed from the number of requests that the crawl has recorded;
--scan reads the whole filter and counts its bits.

Examples:
  scrapy bloom info jobs/shop
  scrapy bloom info redis://localhost:6379/0
  scrapy bloom info jobs/shop --format prometheus
"""

import argparse
import sys
import time
from functools import partial

from scrapy.settings import Settings

from scrapy_bloom import text
from scrapy_bloom.commands.shared.cli import (
    Columns,
    Figures,
    add_shared,
    note,
    print_json,
    print_table,
    say,
)
from scrapy_bloom.commands.shared.figures import queue_text, read_filter, read_queue, state_text
from scrapy_bloom.commands.shared.places import (
    Place,
    RedisPlace,
    answering_server,
    existing,
    opened_place,
    split_url,
)
from scrapy_bloom.commands.shared.project import Project
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.redis.stored import filters_on

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\""})  # of a label in Prometheus
_rate_text = partial(text.number_text, digits=2)
_SIZES: Columns = (
    ("recorded", "recorded", text.number_text),
    ("capacity", "capacity", text.number_text),
    ("size", "bytes", text.size_text),
)
_FILTERS: Columns = (("location:", "location", str), ("spider:", "spider", str), *_SIZES)
_GENERATIONS: Columns = (
    ("no.", "number", str),
    ("last run:", "last_run", lambda seconds: text.time_text(seconds).partition(" ")[0]),
    *_SIZES,
    ("fill", "fill_ratio", text.share_text),
    ("error rate", "error_rate_now", _rate_text),
    ("counted fill", "counted_fill_ratio", text.share_text),
    ("counted rate", "counted_error_rate", _rate_text),
    ("about recorded", "counted_requests", text.number_text),
)
_RUNS: Columns = (
    ("run:", "name", lambda name: name or "(no name)"),
    ("began:", "began", text.time_text),
    ("ended:", "ended", text.time_text),
    ("crawled", "crawled", text.number_text),
    ("new", "new", text.number_text),
    ("failed", "failed", text.number_text),
    ("dead", "dead", text.number_text),
)
_WORKERS: Columns = (
    ("worker:", "name", str),
    ("in flight", "in_flight", text.number_text),
    ("done", "done", text.number_text),
    ("heartbeat", "heartbeat_secs", "{:.0f} s ago".format),
    ("lease:", "is_alive", lambda is_alive: "valid" if is_alive else "expired"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "[place]", "--spider", "--json")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--watch",
        nargs="?",
        type=_interval,
        const=2.0,
        metavar="SECONDS",
        help="print the figures again until the crawl has ended, every 2 seconds by default",
    )
    form.add_argument(
        "--scan", action="store_true", help="read the whole filter and count its bits"
    )
    form.add_argument("--format", choices=["prometheus"], help="print the figures for Prometheus")


def _interval(argument: str) -> float:
    value = text.parsed_number(argument, text.SECONDS)
    if not 0.1 <= value <= 86_400:
        raise argparse.ArgumentTypeError(
            f"{argument!r} is not an interval; use a time from 0.1 seconds to 1 day, such as 1m"
        )
    return value


def run(options: argparse.Namespace, settings: Settings) -> None:
    url, key = split_url(options.place or "")
    if url and not (key or options.spider or options.watch or options.scan or options.format):
        project = Project(settings, None, url)
        if "%(spider)s" in project.bloom.redis_key:
            _list(project, as_json=options.json)
            return
    if options.watch:
        # Until the watch reports that the server does not answer.
        settings.set("BLOOM_REDIS_DEADLINE_SECS", 1.0, "cmdline")
    with opened_place(options, settings) as (place, _):
        if options.watch:
            _watch(place, options)
            return
        figures = _read(place, scans=options.scan)
    if options.format:
        _print_metrics(figures)
    elif options.json:
        print_json(figures)
    else:
        _print(figures)


def _list(project: Project, *, as_json: bool) -> None:
    """Print the main figures of each filter of a server."""
    filters = []
    with answering_server(project) as server:
        for key in filters_on(server):
            try:
                filters.append(read_filter(RedisPlace(server, key).reader()))
            except StorageError as error:  # it is damaged, or was removed meanwhile
                note(f"scrapy bloom: warning: {error}")
        if as_json:
            print_json({"server": server.address, "filters": filters})
        elif filters:
            print_table(_FILTERS, filters)
        else:
            say(f"{server.address} has no filter")


def _read(place: Place, *, scans: bool) -> Figures:
    """Return the figures of a place; if it has a queue, the filter may be missing."""
    queue = read_queue(place)
    reader = existing(place.reader) if queue else place.reader()
    figures = read_filter(reader, scans=scans) if reader else {"location": place.name}
    return {**figures, "queue": queue}


def _print(figures: Figures) -> None:
    queue, lines = figures["queue"] or {}, {}
    if has_filter := "recorded" in figures:
        rates = (
            _rate_text(figures["error_rate_now"]),
            f"{_rate_text(figures['error_rate_at_capacity'])} when full",
            f"target {_rate_text(figures['error_rate_asked'])}",
        )
        lines = {
            "spider": figures["spider"],
            "fingerprinter": figures["fingerprinter"],
            "state": state_text(figures),
            "recorded": f"{figures['recorded']:,} of {figures['capacity']:,}",
            "size": text.size_text(figures["bytes"]),
            "fill": f"{text.share_text(figures['fill_ratio'])} of the bits",
            "error rate": "; ".join(rates),
            "false positives": f"{_rate_text(figures['expected_false_positives'])} expected so far",
        }
    if queue:
        lines["queue"] = queue_text(queue)
    say(f"{'Filter' if has_filter else 'Job'} in {figures['location']}")
    for name, value in lines.items():
        say(f"  {name + ':':<17}{value}")
    for columns, rows in (
        (_GENERATIONS, figures.get("generations")),
        (_WORKERS, queue.get("workers")),
        (_RUNS, queue.get("runs")),
    ):
        if rows:
            say("")
            print_table(columns, rows)


def _print_metrics(figures: Figures) -> None:
    """Print the known figures in the text format of Prometheus, all of a metric together."""
    place, queue, metrics = figures["location"], figures["queue"] or {}, dict[str, list[str]]()
    samples: list[tuple[str, Figures, Figures]] = [("", {}, figures), ("", {}, queue)]
    samples += [
        # The names of workers may be equal, for example in containers.
        ("worker_", {"worker": worker["name"], "id": worker["id"]}, worker)
        for worker in queue.get("workers") or ()
    ]
    for prefix, names, values in samples:
        labels = ",".join(
            f'{name}="{text.escaped(value).translate(_ESCAPES)}"'
            for name, value in {"filter": place, **names}.items()
        )
        for name, value in values.items():
            if isinstance(value, int | float):
                line = f"scrapy_bloom_{prefix}{name}{{{labels}}} {float(value):.16g}\n"
                metrics.setdefault(prefix + name, []).append(line)
    for lines in metrics.values():
        sys.stdout.writelines(lines)


def _watch(place: Place, options: argparse.Namespace) -> None:
    """Print the figures repeatedly until the crawl has ended, even if the server goes away."""
    figures: Figures = {}
    while True:
        begun, before = time.monotonic(), figures.get("queue")
        try:
            figures, error = _read(place, scans=options.scan), ""
        except StorageError as why:
            if not figures:
                raise
            error = text.masked(str(why))
        queue = figures["queue"]
        if queue and before and (secs := queue["read_at"] - before["read_at"]) > 0:
            queue["done_per_second"] = max(0, queue["done"] - before["done"]) / secs
        if options.json:
            print_json({"error": error} if error else figures, indent=None)
        elif error:
            say(f"{time.strftime('%H:%M:%S')} no figures: {error}; trying again")
        else:
            if sys.stdout.isatty():
                sys.stdout.write("\x1b[H\x1b[2J")  # clears the terminal
            say(time.strftime("%H:%M:%S"))
            _print(figures)
        sys.stdout.flush()
        workers = (queue and queue["workers"]) or ()
        if queue and queue["ended_at"] and not any(worker["is_alive"] for worker in workers):
            return
        time.sleep(max(0.0, begun + options.watch - time.monotonic()))

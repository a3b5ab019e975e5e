"""Print the figures of a filter: its size, its fill and its false-positive rate.

The URL of a server without a #KEY lists the filters of the server. A crawl may
use the JOBDIR meanwhile: the command locks nothing and changes nothing. Fill
and rate are computed from the number of requests that the crawl has recorded;
--scan reads the whole filter and counts its bits.

Examples:
  scrapy bloom info jobs/shop
  scrapy bloom info jobs/shop --scan --json
  scrapy bloom info redis://localhost:6379/0#shop:bloom
  scrapy bloom info redis://localhost:6379/0
  scrapy bloom info jobs/shop --format prometheus
"""

import argparse
import sys
import time
from dataclasses import dataclass
from typing import Any

from scrapy.exceptions import UsageError
from scrapy.settings import Settings

from scrapy_bloom.commands.shared.arguments import add_json, add_place
from scrapy_bloom.commands.shared.figures import (
    FilterFigures,
    GenerationFigures,
    QueueFigures,
    RunFigures,
    read_filter,
    read_queue,
)
from scrapy_bloom.commands.shared.opening import opened_place, split_url
from scrapy_bloom.commands.shared.output import (
    Columns,
    note,
    print_json,
    print_table,
    say,
)
from scrapy_bloom.commands.shared.place import Place, found
from scrapy_bloom.commands.shared.project import Project, load_project
from scrapy_bloom.commands.shared.redis_place import RedisPlace, answering_server
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.queues.store import Worker
from scrapy_bloom.redis.stored import filters_on
from scrapy_bloom.text import (
    escaped,
    masked,
    number_text,
    parsed_seconds,
    share_text,
    size_text,
    time_text,
)

_WATCH_SECS = 2.0
_WATCH_DEADLINE_SECS = 1.0  # until the watch reports that the server does not answer
_CLEAR = "\x1b[H\x1b[2J"  # a terminal
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\""})  # of a label in Prometheus

_GENERATIONS: Columns[GenerationFigures] = (
    ("no.", lambda generation: str(generation.number)),
    ("last run:", lambda generation: time_text(generation.last_run).partition(" ")[0]),
    ("recorded", lambda generation: number_text(generation.recorded)),
    ("capacity", lambda generation: number_text(generation.capacity)),
    ("size", lambda generation: size_text(generation.bytes)),
    ("fill", lambda generation: share_text(generation.fill_ratio)),
    ("error rate", lambda generation: number_text(generation.error_rate_now, 2)),
)
_SCANNED: Columns[GenerationFigures] = (
    *_GENERATIONS,
    ("counted fill", lambda generation: share_text(generation.counted_fill_ratio or 0)),
    ("counted rate", lambda generation: number_text(generation.counted_error_rate or 0, 2)),
    ("about recorded", lambda generation: number_text(generation.counted_requests or 0)),
)
_FILTERS: Columns[FilterFigures] = (
    ("location:", lambda listed: listed.location),
    ("spider:", lambda listed: listed.spider),
    ("recorded", lambda listed: number_text(listed.recorded)),
    ("capacity", lambda listed: number_text(listed.capacity)),
    ("size", lambda listed: size_text(listed.bytes)),
)

_RUNS: Columns[RunFigures] = (
    ("run:", lambda run: run.name or "(no name)"),
    ("began:", lambda run: time_text(run.began)),
    ("ended:", lambda run: time_text(run.ended) if run.ended else "-"),
    ("crawled", lambda run: f"{run.crawled:,}"),
    ("new", lambda run: f"{run.new:,}"),
    ("failed", lambda run: f"{run.failed:,}"),
    ("dead", lambda run: f"{run.dead:,}"),
)


def _heartbeat(worker: Worker) -> str:
    if not worker.is_alive:
        return "expired"
    return "-" if worker.heartbeat_secs is None else f"{worker.heartbeat_secs:.0f} s ago"


_WORKERS: Columns[Worker] = (
    ("worker:", lambda worker: worker.name),
    ("in flight", lambda worker: f"{worker.in_flight:,}"),
    ("done", lambda worker: "-" if worker.done is None else f"{worker.done:,}"),
    ("heartbeat:", _heartbeat),
)


@dataclass(frozen=True)
class _Info:
    """The figures of a place."""

    location: str
    filter: FilterFigures | None
    queue: QueueFigures | None

    @classmethod
    def read(cls, place: Place, *, scans: bool, before: "_Info | None" = None) -> "_Info":
        """Read the figures of a place; with a queue, there need not be a filter."""
        queue = read_queue(place)
        if queue and before:
            queue = queue.since(before.queue)
        reader = found(place.reader) if queue else place.reader()
        figures = read_filter(reader, scans=scans) if reader else None
        return cls(figures.location if figures else place.name, figures, queue)

    def as_json(self) -> dict[str, Any]:
        """Return the figures of the filter, and in `queue` those of its queue."""
        figures = vars(self.filter) if self.filter else {"location": self.location}
        return {**figures, "queue": self.queue}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_place(parser, is_optional=True)
    add_json(parser)
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_interval,
        const=_WATCH_SECS,
        metavar="SECONDS",
        help="print the figures again until the crawl has ended, every 2 seconds by default",
    )
    parser.add_argument(
        "--scan", action="store_true", help="read the whole filter and count its bits"
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
    if options.format and (options.json or options.watch or options.scan):
        raise UsageError("--format prometheus cannot be combined with --json, --watch or --scan")
    url, key = split_url(options.place or "")
    if url and not (key or options.spider or options.watch or options.scan or options.format):
        project = load_project(settings, None, url)
        if "%(spider)s" in project.bloom.redis_key:
            _list(project, as_json=options.json)
            return
    if options.watch:
        settings.set("BLOOM_REDIS_DEADLINE_SECS", _WATCH_DEADLINE_SECS, "cmdline")
    with opened_place(options, settings) as (place, _):
        if options.watch:
            _watch(place, options)
            return
        info = _Info.read(place, scans=options.scan)
    if options.format:
        _print_metrics(info)
    elif options.json:
        print_json(info.as_json())
    else:
        _print(info)


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


def _print(info: _Info) -> None:
    figures, lines = info.filter, {}
    say(f"Filter in {info.location}" if figures else f"Job in {info.location}, without a filter")
    if figures:
        rates = (
            number_text(figures.error_rate_now, 2),
            f"{number_text(figures.error_rate_at_capacity, 2)} when full",
            f"target {number_text(figures.error_rate_asked, 2)}",
        )
        drops = number_text(figures.expected_false_positives, 2)
        lines = {
            "spider": figures.spider,
            "fingerprinter": figures.fingerprinter,
            "state": figures.state,
            "recorded": f"{figures.recorded:,} of {figures.capacity:,}",
            "size": size_text(figures.bytes),
            "fill": f"{share_text(figures.fill_ratio)} of the bits",
            "error rate": "; ".join(rates),
            "false positives": f"{drops} expected so far",
        }
    if info.queue:
        lines["queue"] = info.queue.text()
    for name, value in lines.items():
        say(f"  {name + ':':<17}{value}")
    if figures:
        say("")
        is_scanned = figures.generations[0].counted_requests is not None
        print_table(_SCANNED if is_scanned else _GENERATIONS, figures.generations)
    if info.queue and info.queue.workers:
        say("")
        print_table(_WORKERS, info.queue.workers)
    if info.queue and info.queue.runs:
        say("")
        print_table(_RUNS, info.queue.runs)


def _print_metrics(info: _Info) -> None:
    """Print the known figures in the text format of Prometheus, all of a metric together."""
    place, metrics = {"filter": info.location}, dict[str, list[str]]()
    workers = (info.queue and info.queue.workers) or ()
    samples: list[tuple[str, dict[str, str], object]] = [
        ("", place, info.filter),
        ("", place, info.queue),
        *(("worker_", {**place, "worker": each.name, "id": each.id}, each) for each in workers),
    ]  # the names of workers may be equal, for example in containers
    for prefix, labels, figures in samples:
        pairs = (f'{name}="{escaped(text).translate(_ESCAPES)}"' for name, text in labels.items())
        label = ",".join(pairs)
        for name, value in vars(figures).items() if figures else ():
            if isinstance(value, int | float):
                line = f"scrapy_bloom_{prefix}{name}{{{label}}} {float(value):.16g}\n"
                metrics.setdefault(prefix + name, []).append(line)
    for lines in metrics.values():
        sys.stdout.writelines(lines)


def _watch(place: Place, options: argparse.Namespace) -> None:
    """Print the figures again and again until the crawl has ended, also if the server goes away."""
    info = None
    while True:
        begun = time.monotonic()
        try:
            info, error = _Info.read(place, scans=options.scan, before=info), ""
        except StorageError as why:
            if info is None:
                raise
            error = masked(str(why))
        if options.json:
            print_json({"error": error} if error else info.as_json(), indent=None)
        elif error:
            say(f"{time.strftime('%H:%M:%S')} no figures: {error}; trying again")
        else:
            if sys.stdout.isatty():
                sys.stdout.write(_CLEAR)
            say(time.strftime("%H:%M:%S"))
            _print(info)
        sys.stdout.flush()
        queue = info.queue
        if queue and queue.ended_at and not any(worker.is_alive for worker in queue.workers or ()):
            return
        time.sleep(max(0.0, begun + options.watch - time.monotonic()))

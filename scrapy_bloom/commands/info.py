"""Print what a filter is, and how full each of its generations is.

PATH is a JOBDIR, a BLOOM_DIR, or one generation-*.bloom file. The filter may be in use: nothing is
locked and nothing is changed. "Not closed" means that its crawl was killed; Linux tells it from one
that runs on this machine now.

"Asked for" is the error rate that the filter was made to keep, however far it grows. Who knows the
salt can make URLs that look seen: --show-salt prints it.

What is recorded is counted by the crawl, and fill and error rate follow from it. --scan counts the
bits themselves: it reads all of the filter, and tells what is really there.

Examples:
  scrapy bloom info jobs/shop
  scrapy bloom info jobs/shop --scan --json
  scrapy bloom info redis://localhost:6379/0 --key shop:bloom
"""

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from scrapy.settings import Settings

from scrapy_bloom.commands.report import measured
from scrapy_bloom.commands.shared.arguments import add_json, add_place
from scrapy_bloom.commands.shared.output import number, print_json, print_table, say
from scrapy_bloom.commands.shared.places import connect, is_redis, state_text, use_of
from scrapy_bloom.files.reader import (
    FilterReader,
    filter_directory,
    forgotten_beside,
    found_files,
)
from scrapy_bloom.filters.sizing import MIN_ERROR_RATE
from scrapy_bloom.generations.policy import Generation, window_of
from scrapy_bloom.generations.status import FilterStatus, GenerationStatus, duration_text, size_text
from scrapy_bloom.job import paths as jobdir
from scrapy_bloom.job.paths import filter_files
from scrapy_bloom.queues.sqlite import read_counts
from scrapy_bloom.redis.reader import RedisReader

SYNTAX = "PATH|REDIS-URL [--key NAME] [--spider NAME] [--scan] [--show-salt] [--json]"
HELP = "what a filter is, and how full"

_Figures = dict[str, Any]
_MASKED = "***"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's own."""
    add_place(parser)
    parser.add_argument("--scan", action="store_true", help="count the bits: reads all of it")
    parser.add_argument("--show-salt", action="store_true", help="print the salt, which is secret")
    add_json(parser)


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Print the figures of a filter."""
    if is_redis(options.place):
        figures = _in_redis(options, settings)
    else:
        figures = _in_files(Path(options.place), settings, scan=options.scan)
    if "salt" in figures and not options.show_salt:
        figures["salt"] = _MASKED
    if options.json:
        print_json(figures)
    else:
        _print(figures)


def _in_files(path: Path, settings: Settings, *, scan: bool) -> _Figures:
    queue = _queue(path)
    if queue and not filter_files(filter_directory(path)):
        return {"location": str(path), "queue": queue}  # its filter is elsewhere
    found = found_files(path)
    newest = found[-1]
    where = newest.path.parent if len(found) > 1 else newest.path
    live = [each.figures for each in found]
    figures = _figures(str(where), live, settings)
    figures |= {
        "spider": newest.header.spider,
        "fingerprinter": newest.header.fingerprinter,
        "salt": newest.header.salt.hex(),
        **use_of(found),
        "queue": queue,
        "forgotten": len(forgotten_beside(path)),
    }
    for each, row in zip(found, figures["generations"], strict=True):
        row |= {
            "file": each.path.name,
            "created": each.header.created_at,
            "open_until": each.state.open_until or None,
        }
    if scan:
        with closing(FilterReader(path)) as reader:
            _scan(figures, live, [file.filter.block_fills() for file in reader.files])
    return figures


def _queue(path: Path) -> _Figures | None:
    """Count the requests that wait in CrashSafeScheduler's database; None if there is none."""
    # A filter's directory may be in its job's. Any other path below a job says nothing about it.
    for job_dir in (path, path.parent) if filter_files(path) else (path,):
        if (database := jobdir.database_path(job_dir)).exists():
            pending, in_flight = read_counts(database)
            return {"pending": pending, "in_flight": in_flight}
    return None


def _in_redis(options: argparse.Namespace, settings: Settings) -> _Figures:
    server, key, _ = connect(options, settings, options.place)
    with closing(server):
        reader = RedisReader(server, key)
        info, stored = reader.info, reader.generations
        figures = _figures(f"{server.address}, key {key}", stored, settings)
        figures |= {
            "spider": info.spider,
            "fingerprinter": info.fingerprinter,
            "salt": info.salt,
            "closed": None,
            "in_use": None,
            "forgotten": len(reader.forgotten.everything()),
        }
        for each, row in zip(stored, figures["generations"], strict=True):
            row |= {"created": each.created_at, "open_until": each.open_until or None}
        if options.scan:
            _scan(figures, stored, reader.block_fills())
    return figures


def _figures(location: str, live: Sequence[Generation], settings: Settings) -> _Figures:
    status = FilterStatus.of(location, live, settings.get("BLOOM_ON_FULL", "grow"))
    return {
        "location": status.location,
        "recorded": status.count,
        "capacity": status.capacity,
        "bytes": status.nbytes,
        "fill_ratio": status.fill_ratio,
        "error_rate_now": status.error_rate_now,
        "error_rate_at_capacity": math.fsum(each.error_rate for each in live),
        "error_rate_asked": status.error_rate,
        "window_secs": window_of(live) or None,
        "expected_false_drops": status.expected_false_drops,
        "generations": [_generation(each) for each in status.generations],
    }


def _generation(each: GenerationStatus) -> _Figures:
    num_blocks, num_hashes, _ = each.geometry
    return {
        "number": each.number,
        "recorded": each.count,
        "capacity": each.capacity,
        "bytes": each.geometry.nbytes,
        "blocks": num_blocks,
        "hashes": num_hashes,
        "fill_ratio": each.fill_ratio,
        "error_rate_now": each.error_rate_now,
        "error_rate_at_capacity": each.error_rate,
    }


def _scan(figures: _Figures, live: Sequence[Generation], fills: Sequence[Iterator[float]]) -> None:
    for row, each in zip(figures["generations"], measured(live, fills), strict=True):
        row["scan"] = {
            "fill_ratio": each.contents.fill_ratio,
            "error_rate_now": each.contents.error_rate,
            "recorded": each.contents.requests,
        }


def _print(figures: _Figures) -> None:
    queue = figures.get("queue")
    if queue and "generations" not in figures:
        say(f"Job in {figures['location']}, without a filter")
        say(f"  queue: {queue['pending']:,} pending, {queue['in_flight']:,} in flight")
        return
    say(f"Filter in {figures['location']}")
    for name, value in (
        ("spider", figures["spider"]),
        ("fingerprinter", figures["fingerprinter"]),
        ("salt", figures["salt"] + (" (--show-salt)" if figures["salt"] == _MASKED else "")),
        ("state", state_text(closed=figures["closed"], in_use=figures["in_use"])),
        ("window", duration_text(figures["window_secs"]) if figures["window_secs"] else "none"),
        ("recorded", f"{figures['recorded']:,} of {figures['capacity']:,}"),
        ("size", size_text(figures["bytes"])),
        ("fill", f"{100 * figures['fill_ratio']:.3g} % of the bits"),
        (
            "error rate",
            "; ".join(
                [
                    _rate(figures["error_rate_now"]),
                    f"when full {_rate(figures['error_rate_at_capacity'])}",
                    f"asked for {figures['error_rate_asked']:g}",
                ]
            ),
        ),
        ("false drops", f"{number(figures['expected_false_drops'], 2)} expected so far"),
    ):
        say(f"  {name + ':':<15}{value}")
    if queue:
        say(f"  queue:         {queue['pending']:,} pending, {queue['in_flight']:,} in flight")
    if figures["forgotten"]:
        say(f"  forgotten:     {figures['forgotten']:,}, crawled again when met")
    say("")
    is_scanned = "scan" in figures["generations"][0]
    print_table(
        ["generation", "created:", "recorded", "capacity", "size", "hashes", "fill", "error rate"]
        + (["counted fill", "counted rate", "about recorded"] if is_scanned else []),
        [_row(each) for each in figures["generations"]],
    )


def _row(each: _Figures) -> list[str]:
    row = [
        str(each["number"]),
        time.strftime("%Y-%m-%d %H:%M", time.localtime(each["created"])),
        number(each["recorded"]),
        number(each["capacity"]),
        size_text(each["bytes"]),
        str(each["hashes"]),
        f"{100 * each['fill_ratio']:.3g} %",
        _rate(each["error_rate_now"]),
    ]
    if scan := each.get("scan"):
        row += [
            f"{100 * scan['fill_ratio']:.3g} %",
            _rate(scan["error_rate_now"]),
            number(scan["recorded"]),
        ]
    return row


def _rate(value: float) -> str:
    return "practically 0" if 0 < value < MIN_ERROR_RATE else f"{value:.2g}"

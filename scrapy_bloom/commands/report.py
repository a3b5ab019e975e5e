"""A page about a filter, for people: how full it is, how often it errs, and what is to come.

PATH is a JOBDIR, a BLOOM_DIR, or one generation-*.bloom file; or it is the URL of a Redis server,
and --key says which filter there. The filter may be in use: nothing is
locked and nothing is changed. All of it is read, so a large one takes a few seconds.

The page is one file that needs no other, and no network: it can be mailed, printed, kept. How the
filter will grow depends on BLOOM_ON_FULL, BLOOM_EXPECTED_REQUESTS and BLOOM_ERROR_RATE, so run
this in the directory of the project, or give them with -s.

Examples:
  scrapy bloom report jobs/shop -o shop.html
  scrapy bloom report jobs/shop -o shop.html --overwrite -s BLOOM_ON_FULL=warn
  scrapy bloom report redis://localhost:6379/0 --key shop:bloom -o shared.html
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import accumulate
from pathlib import Path

from scrapy.settings import Settings

from scrapy_bloom.analysis.pictures import import_pyplot
from scrapy_bloom.analysis.report import Measured, Report, measure
from scrapy_bloom.analysis.report_page import report_page
from scrapy_bloom.commands.shared.arguments import add_output, add_place
from scrapy_bloom.commands.shared.output import check_output, progress, say
from scrapy_bloom.commands.shared.places import connect, is_redis, state_text, use_of
from scrapy_bloom.commands.shared.project import load_project
from scrapy_bloom.files.reader import FilterReader
from scrapy_bloom.generations.policy import Generation, Policy, window_of
from scrapy_bloom.generations.status import size_text
from scrapy_bloom.redis.reader import RedisReader
from scrapy_bloom.settings.settings import BloomSettings

SYNTAX = "PATH|REDIS-URL [--key NAME] [--spider NAME] -o FILE [--overwrite]"
HELP = "a page about a filter: fill, error rate, memory, forecast"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's own."""
    add_place(parser)
    add_output(parser, "-o", "--output", what="the page", required=True)


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Write the page."""
    check_output(options.output, overwrite=options.overwrite)
    import_pyplot()  # if it is missing, that is better told before the work
    report = _in_redis if is_redis(options.place) else _in_files
    page = report_page(report(options, settings))
    _write(options.output, page)
    say(f"{options.output}: {size_text(len(page.encode()))}")


def _in_files(options: argparse.Namespace, settings: Settings) -> Report:
    bloom = load_project(settings, options.spider).bloom
    path = Path(options.place)
    with closing(FilterReader(path)) as reader:
        header = reader.files[-1].header
        live = [file.figures for file in reader.files]
        return Report(
            location=str(path.absolute()),
            spider=header.spider,
            fingerprinter=header.fingerprinter,
            state=state_text(**use_of(reader.files)),
            names=[file.path.name for file in reader.files],
            generations=measured(live, [file.filter.block_fills() for file in reader.files]),
            policy=_policy(bloom, live),
        )


def _in_redis(options: argparse.Namespace, settings: Settings) -> Report:
    server, key, bloom = connect(options, settings, options.place)
    with closing(server):
        reader = RedisReader(server, key)
        live = reader.generations
        return Report(
            location=f"{server.address}, key {key}",
            spider=reader.info.spider,
            fingerprinter=reader.info.fingerprinter,
            state=state_text(closed=None, in_use=None),
            names=[f"{each.num_chunks:,} keys" for each in live],
            generations=measured(live, reader.block_fills()),
            policy=_policy(bloom, live),
        )


def measured(live: Sequence[Generation], fills: Sequence[Iterator[float]]) -> list[Measured]:
    """Count the bits of some generations, with a bar: of each, the share set in its blocks."""
    blocks = [each.geometry.num_blocks for each in live]
    with progress("Counting bits", sum(blocks), "blocks") as advance:
        done = accumulate(blocks[:-1], initial=0)
        return [
            measure(figures, each, advance, before)
            for figures, each, before in zip(live, fills, done, strict=True)
        ]


def _policy(bloom: BloomSettings, live: Sequence[Generation]) -> Policy:
    """Return how the filter will grow."""
    return Policy(
        expected=bloom.expected_requests,
        error_rate=bloom.error_rate,
        on_full=bloom.on_full,
        window=window_of(live),
    )


def _write(path: Path, text: str) -> None:
    """Write a file that appears whole or not at all."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")  # a pipe, or a device: it must stay what it is
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)

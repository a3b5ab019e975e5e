"""A page about a filter, for people: how full it is, how often it errs, and what is to come.

PATH is a JOBDIR, a BLOOM_DIR, or one generation-*.bloom file. The filter may be in use: nothing is
locked and nothing is changed. All of it is read, so a large one takes a few seconds.

The page is one file that needs no other, and no network: it can be mailed, printed, kept. How the
filter will grow depends on BLOOM_ON_FULL, BLOOM_EXPECTED_REQUESTS and BLOOM_ERROR_RATE, so run
this in the directory of the project, or give them with -s.

Examples:
  scrapy bloom report jobs/shop -o shop.html
  scrapy bloom report jobs/shop -o shop.html --overwrite -s BLOOM_ON_FULL=warn
"""

import argparse
import os
from collections.abc import Sequence
from contextlib import closing
from itertools import accumulate
from pathlib import Path

from scrapy.settings import Settings

from scrapy_bloom.commands.output import add_output, check_output, progress, say
from scrapy_bloom.commands.project import add_spider, load_project, path_argument
from scrapy_bloom.filterfile import FilterFile
from scrapy_bloom.generations import Policy
from scrapy_bloom.pictures import import_pyplot
from scrapy_bloom.reading import FilterReader
from scrapy_bloom.report import Measured, Report, measure
from scrapy_bloom.report_page import report_page
from scrapy_bloom.settings import BloomSettings
from scrapy_bloom.status import size_text

SYNTAX = "PATH -o FILE [--overwrite] [--spider NAME]"
HELP = "a page about a filter: fill, error rate, memory, forecast"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's own."""
    parser.add_argument("path", type=path_argument, metavar="PATH", help="where the filter is")
    add_output(parser, "-o", "--output", what="the page", required=True)
    add_spider(parser)


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Write the page."""
    bloom = load_project(settings, options.spider).bloom
    check_output(options.output, overwrite=options.overwrite)
    import_pyplot()  # if it is missing, that is better told before the work
    with closing(FilterReader(options.path)) as reader:
        report = Report(
            location=str(options.path.absolute()),
            generations=_measured(reader.files),
            policy=_policy(bloom, reader.files[-1]),
        )
        page = report_page(report, reader.files)
    _write(options.output, page)
    say(f"{options.output}: {size_text(len(page.encode()))}")


def _measured(files: Sequence[FilterFile]) -> list[Measured]:
    blocks = [file.filter.num_blocks for file in files]
    with progress("Counting bits", sum(blocks), "blocks") as advance:
        done = accumulate(blocks[:-1], initial=0)
        return [measure(file, advance, each) for file, each in zip(files, done, strict=True)]


def _policy(bloom: BloomSettings, newest: FilterFile) -> Policy:
    """How the filter will grow."""
    return Policy(
        expected=bloom.expected_requests,
        error_rate=bloom.error_rate,
        on_full=bloom.on_full,
        window=max(newest.state.open_until - newest.header.created_at, 0.0),
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

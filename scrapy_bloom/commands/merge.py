"""Make a filter that holds what any of several filters holds; those are left as they are.

They must have been made alike: the same BLOOM_EXPECTED_REQUESTS, BLOOM_ERROR_RATE, BLOOM_ON_FULL,
BLOOM_COUNTING and BLOOM_SALT (set it to the same 32 hexadecimal digits for all of them, before
their crawls begin). Each is a JOBDIR, a BLOOM_DIR, or one generation-*.bloom file, not in use.

Examples:
  scrapy bloom merge filters/a filters/b -o filters/both
"""

import argparse
from pathlib import Path

from scrapy.settings import Settings

from scrapy_bloom.commands.output import (
    add_json,
    note,
    print_json,
    say,
    status_figures,
    status_line,
)
from scrapy_bloom.merging import merge

SYNTAX = "A B [...] -o DIRECTORY [--json]"
HELP = "make one filter of several that were made alike"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's own."""
    parser.add_argument("first", type=Path, metavar="A", help="a filter")
    parser.add_argument("others", type=Path, nargs="+", metavar="B", help="more of them")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="DIRECTORY",
        help="where the new filter goes: a directory without one",
    )
    add_json(parser)


def run(options: argparse.Namespace, settings: Settings) -> None:  # noqa: ARG001 - needs none
    """Merge filters."""
    status = merge([options.first, *options.others], options.output)
    if options.json:
        print_json(status_figures(status))
    else:
        say(status_line(status))
    if overfull := [each for each in status.generations if each.count > each.capacity]:
        note(
            f"scrapy bloom: warning: {overfull[0].count:,} requests are in a generation that was "
            f"made for {overfull[0].capacity:,}: the error rate is {status.error_rate_now:.2g} "
            f"now, and {status.error_rate:.2g} was asked for; make filters that will be merged "
            "for the requests of all of them together"
        )

"""Merge filters into a new one, which reports a duplicate if any of them does.

The filters must have the same BLOOM_EXPECTED_REQUESTS, BLOOM_ERROR_RATE and BLOOM_SALT. Each is a
JOBDIR, a BLOOM_DIR, or one generation-*.bloom file, and not in use. The sources stay unchanged.

Examples:
  scrapy bloom merge filters/a filters/b -o filters/both
"""

import argparse

from scrapy.settings import Settings

from scrapy_bloom.commands.shared import arguments
from scrapy_bloom.commands.shared.output import print_written, warn_of_overfull, warn_of_queue
from scrapy_bloom.copying.merging import merge
from scrapy_bloom.files.directory import filter_directory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    parser.add_argument("first", type=arguments.path, metavar="A", help="a filter")
    parser.add_argument("others", type=arguments.path, nargs="+", metavar="B", help="more filters")
    parser.add_argument(
        "-o",
        "--output",
        type=arguments.path,
        required=True,
        metavar="DIRECTORY",
        help="directory of the new filter: a JOBDIR or a BLOOM_DIR without a filter",
    )
    arguments.add_json(parser)


def run(options: argparse.Namespace, settings: Settings) -> None:  # noqa: ARG001 - needs none
    """Merge filters."""
    sources = [options.first, *options.others]
    target = filter_directory(options.output)
    status = merge(sources, target)
    for source in sources:
        warn_of_queue(source)
    print_written(options, status, target)
    warn_of_overfull(status)

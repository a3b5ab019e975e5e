"""Copy a filter and its queue to a place that is not there yet, or merge several filters.

A place is a directory, or REDIS-URL#KEY: a server and the name of a filter there. DST becomes a
JOBDIR, or a filter that workers share. No crawl may use SRC, which stays unchanged. The command
compares the copy with what it has read.

Several SRC are merged: the copy reports a duplicate if any of them does. They must have the same
BLOOM_EXPECTED_REQUESTS, BLOOM_ERROR_RATE and BLOOM_SALT. Their queues are left out.

Examples:
  scrapy bloom copy jobs/shop redis://localhost:6379/0#archive:bloom
  scrapy bloom copy redis://localhost:6379/0#shop:bloom jobs/alone
  scrapy bloom copy jobs/shop jobs/backup --json
  scrapy bloom copy filters/a filters/b filters/both
"""

import argparse
from contextlib import ExitStack
from pathlib import Path

from scrapy.exceptions import UsageError
from scrapy.settings import Settings

from scrapy_bloom.commands.shared.arguments import (
    add_filter_name,
    add_json,
    is_redis,
    split_place,
)
from scrapy_bloom.commands.shared.output import note, print_written, warn_of_overfull, working
from scrapy_bloom.commands.shared.project import Place, opened_place, place_name
from scrapy_bloom.copying.transfer import copy
from scrapy_bloom.files.directory import found_files
from scrapy_bloom.redis.stored import read_existing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    parser.add_argument(
        "sources", metavar="SRC", nargs="+", help="a JOBDIR, a BLOOM_DIR, or REDIS-URL#KEY"
    )
    parser.add_argument("target", metavar="DST", help="a new JOBDIR, or REDIS-URL#KEY")
    add_filter_name(parser)
    add_json(parser)


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Copy a filter and its queue, or merge filters."""
    *sources, target = _places(options)
    with ExitStack() as stack:
        opened = [stack.enter_context(opened_place(each, settings)) for each in sources]
        if is_redis(target.place) and target.key is None:
            target.spider = target.spider or _spider_of(opened[0])
        destination = stack.enter_context(opened_place(target, settings))
        with working(f"Copying to {place_name(destination)}"):
            copied = copy(opened, destination)
    queue = {"requests": copied.queued} if copied.queued else None
    print_written(options, copied.status, copied.status.location, queue=queue)
    for name in copied.left_out:
        note(
            f"scrapy bloom: warning: the queue of {name} has pending requests, and was left out. A "
            "crawl with the copy skips them as duplicates: let that crawl finish first, and make "
            "the copy again"
        )
    if len(opened) > 1:
        warn_of_overfull(copied.status)


def _places(options: argparse.Namespace) -> list[argparse.Namespace]:
    """Return all places, each with the key and the spider for `opened_place`."""
    places = []
    for text in (*options.sources, options.target):
        place, key = split_place(text)
        places.append(argparse.Namespace(place=place, key=key, spider=options.spider))
    named = [(each.place, each.key) for each in places[:-1]]
    if len(set(named)) < len(named):
        raise UsageError("a filter is given twice; name each SRC once")
    if options.key is not None:
        nameless = [each for each in places if is_redis(each.place) and each.key is None]
        if len(nameless) != 1:
            raise UsageError(
                "--key is for a command with one place on a server; write each place on a server "
                "as REDIS-URL#KEY"
            )
        nameless[0].key = options.key
    return places


def _spider_of(place: Place) -> str:
    """Return the spider of a filter, whose name the default of the copy's key contains."""
    if isinstance(place, Path):
        return found_files(place)[-1].origin.spider
    return read_existing(*place).origin.spider

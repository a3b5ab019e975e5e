"""Copy a filter and its queue to a new location, or merge several filters.

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
from contextlib import ExitStack, closing

from scrapy.exceptions import UsageError
from scrapy.settings import Settings

from scrapy_bloom.commands.shared.arguments import add_filter_name, add_json
from scrapy_bloom.commands.shared.output import note, print_written, warn_of_overfull, working
from scrapy_bloom.commands.shared.places import Place, opened_place, place_of
from scrapy_bloom.copying.transfer import copy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    parser.add_argument(
        "sources",
        metavar="SRC",
        nargs="+",
        help="a JOBDIR, a directory with the files of a filter, or REDIS-URL#KEY",
    )
    parser.add_argument("target", metavar="DST", help="a new JOBDIR, or REDIS-URL#KEY")
    add_filter_name(parser)
    add_json(parser)


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Copy a filter and its queue, or merge filters."""
    *places, target = _places(options)
    with ExitStack() as stack:
        for place in places:
            stack.enter_context(opened_place(place, settings))
        if target.needs_key:
            with closing(places[0].filter()) as reader:
                target.spider = target.spider or reader.spider
        stack.enter_context(opened_place(target, settings, is_new=True))
        destination = target.target()
        with working(f"Copying to {target.name}"):
            sources = [stack.enter_context(closing(place.source())) for place in places]
            copied = copy(sources, destination)
    queue = {"requests": copied.queued} if copied.queued else None
    print_written(options, copied.status, copied.status.location, queue=queue)
    for name in copied.left_out:
        note(
            f"scrapy bloom: warning: the queue of {name} has pending requests, and was left out. A "
            "crawl with the copy skips them as duplicates: let that crawl finish first, and make "
            "the copy again"
        )
    if len(places) > 1:
        warn_of_overfull(copied.status)


def _places(options: argparse.Namespace) -> list[Place]:
    """Return all places, the target last."""
    if len(set(options.sources)) < len(options.sources):
        raise UsageError("a filter is given twice; name each SRC once")
    texts = [*options.sources, options.target]
    places = [place_of(text, None, options.spider) for text in texts]
    if options.key is not None:
        nameless = [index for index, place in enumerate(places) if place.needs_key]
        if len(nameless) != 1:
            raise UsageError(
                "--key is for a command with one place on a server; write each place on a server "
                "as REDIS-URL#KEY"
            )
        places[nameless[0]] = place_of(texts[nameless[0]], options.key, options.spider)
    return places

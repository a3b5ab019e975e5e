"""Copy a filter and its queue to a new location.

A place is a directory, or REDIS-URL#KEY: a server and the name of a filter there. DST becomes a
JOBDIR, or a filter that workers share. No crawl may use SRC, which stays unchanged. The command
compares the copy with what it has read.

Examples:
  scrapy bloom copy jobs/shop redis://localhost:6379/0#archive:bloom
  scrapy bloom copy redis://localhost:6379/0#shop:bloom jobs/alone
  scrapy bloom copy jobs/shop jobs/backup --json
"""

import argparse
from contextlib import closing

from scrapy.exceptions import UsageError
from scrapy.settings import Settings

from scrapy_bloom.commands.shared.arguments import add_filter_name, add_json
from scrapy_bloom.commands.shared.output import note, print_written, working
from scrapy_bloom.commands.shared.places import Place, opened_place, place_of
from scrapy_bloom.copying.transfer import copy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    parser.add_argument(
        "source",
        metavar="SRC",
        help="a JOBDIR, a directory with the files of a filter, or REDIS-URL#KEY",
    )
    parser.add_argument("target", metavar="DST", help="a new JOBDIR, or REDIS-URL#KEY")
    add_filter_name(parser)
    add_json(parser)


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Copy a filter and its queue."""
    place, target = _places(options)
    with opened_place(place, settings):
        if target.needs_key:
            with closing(place.filter()) as reader:
                target.spider = target.spider or reader.spider
        with opened_place(target, settings, is_new=True):
            destination = target.target()
            with working(f"Copying to {target.name}"), closing(place.source()) as source:
                copied = copy(source, destination)
    queue = {"requests": copied.queued} if copied.queued else None
    print_written(options, copied.status, copied.status.location, queue=queue)
    if source.has_scrapys_queue:
        note(
            f"scrapy bloom: warning: the queue of {source.name} has pending requests, and was left "
            "out. A crawl with the copy skips them as duplicates: let that crawl finish first, and "
            "make the copy again"
        )


def _places(options: argparse.Namespace) -> list[Place]:
    """Return the place of the source and that of the copy."""
    texts = [options.source, options.target]
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

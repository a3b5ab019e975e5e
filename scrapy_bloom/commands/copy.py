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
from dataclasses import replace

from scrapy.exceptions import UsageError
from scrapy.settings import Settings

from scrapy_bloom.commands.shared.arguments import add_filter_name, add_json
from scrapy_bloom.commands.shared.figures import print_written
from scrapy_bloom.commands.shared.output import note, working
from scrapy_bloom.commands.shared.places import Address, opened_place


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
    origin, target = _addresses(options)
    with opened_place(origin, settings) as place:
        if target.spider is None and target.url and target.key is None:
            with closing(place.filter()) as reader:
                target = replace(target, spider=reader.spider)
        with opened_place(target, settings, is_new=True) as new, place.source() as source:
            with working(f"Copying to {new.name}"):
                queued = new.copy_from(source)
            print_written(new, options, queue={"requests": queued} if queued else None)
    if source.has_scrapys_queue:
        note(
            f"scrapy bloom: warning: the queue of {source.name} has pending requests, and was left "
            "out. A crawl with the copy skips them as duplicates: let that crawl finish first, and "
            "make the copy again"
        )


def _addresses(options: argparse.Namespace) -> list[Address]:
    """Return the address of the source and that of the copy."""
    texts = [options.source, options.target]
    places = [Address.of(text, None, options.spider) for text in texts]
    if options.key is not None:
        nameless = [index for index, place in enumerate(places) if place.url and not place.key]
        if len(nameless) != 1:
            raise UsageError(
                "--key is for a command with one place on a server; write each place on a server "
                "as REDIS-URL#KEY"
            )
        places[nameless[0]] = replace(places[nameless[0]], key=options.key)
    return places

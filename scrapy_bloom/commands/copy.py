"""Copy a filter and its queue to a new location.

A place is a JOBDIR, or REDIS-URL#KEY: a server and the name of a filter there. DST is a new JOBDIR,
or a new filter that workers share. SRC stays unchanged. A crawl with CrashSafeScheduler may use the
JOBDIR meanwhile, or may have been killed; in Redis, no worker may use SRC.

Examples:
  scrapy bloom copy jobs/shop redis://localhost:6379/0#archive:bloom
  scrapy bloom copy redis://localhost:6379/0#shop:bloom jobs/alone
  scrapy bloom copy jobs/shop jobs/backup --json
"""

import argparse
from contextlib import closing
from dataclasses import replace

from scrapy.settings import Settings

from scrapy_bloom.commands.shared.arguments import add_filter_name, add_json, split_url
from scrapy_bloom.commands.shared.figures import print_written
from scrapy_bloom.commands.shared.output import note
from scrapy_bloom.commands.shared.places import Address, opened_place


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    parser.add_argument("source", metavar="SRC", help="a JOBDIR, or REDIS-URL#KEY")
    parser.add_argument("target", metavar="DST", help="a new JOBDIR, or REDIS-URL#KEY")
    add_filter_name(parser)
    add_json(parser)


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Copy a filter and its queue."""
    origin, target = (_address(text, options) for text in (options.source, options.target))
    with opened_place(origin, settings) as place:
        if target.spider is None and target.url and target.key is None:
            with closing(place.filter()) as reader:
                target = replace(target, spider=reader.spider)
        with opened_place(target, settings, is_new=True) as new, place.source() as source:
            queued = new.copy_from(source)
            print_written(new, options, queue={"requests": queued} if queued else None)
    if source.has_scrapys_queue:
        note(
            f"scrapy bloom: warning: the queue of {source.name} has pending requests, and was left "
            "out. A crawl with the copy skips them as duplicates: let that crawl finish first, and "
            "make the copy again"
        )


def _address(text: str, options: argparse.Namespace) -> Address:
    url, key = split_url(text)
    return Address.of(text, options.key if url and not key else None, options.spider)

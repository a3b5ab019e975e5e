"""Copy a filter and its queue to a new location.

DST is a new JOBDIR, or a new filter that workers share. SRC stays unchanged.
A crawl with CrashSafeScheduler may use the JOBDIR meanwhile, or may have been
killed; in Redis, no worker may use SRC.

Examples:
  scrapy bloom copy jobs/shop redis://localhost:6379/0#archive:bloom
  scrapy bloom copy redis://localhost:6379/0#shop:bloom jobs/alone
  scrapy bloom copy jobs/shop jobs/backup --json
"""

import argparse

from scrapy.settings import Settings

from scrapy_bloom.commands.shared.arguments import PLACE, add_json, add_spider
from scrapy_bloom.commands.shared.figures import read_filter
from scrapy_bloom.commands.shared.opening import opened_place
from scrapy_bloom.commands.shared.output import note, print_json, say
from scrapy_bloom.text import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help=PLACE)
    parser.add_argument("target", metavar="DST", help=f"a new {PLACE}")
    add_spider(parser)
    add_json(parser)


def run(options: argparse.Namespace, settings: Settings) -> None:
    with opened_place(options, settings, options.source) as (place, _):
        spider = read_filter(place.reader()).spider
        target = opened_place(options, settings, options.target, is_new=True, spider=spider)
        with target as (new, _), place.source() as source:
            queued = new.copy_from(source)
    recorded = sum(generation.count for generation in source.generations)
    if options.json:
        print_json({"recorded": recorded, "queued": queued})
    else:
        records, requests = counted(recorded, "recorded request"), counted(queued, "queued request")
        say(f"Copied {source.name} to {new.name}: {records}, {requests}")
    if source.has_scrapys_queue:
        note(
            f"scrapy bloom: warning: the queue of {source.name} has pending requests, and was left "
            "out. A crawl with the copy skips them as duplicates: let that crawl finish first, and "
            "make the copy again"
        )

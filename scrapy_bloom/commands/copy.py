"""Copy a filter and its queue to a new location.

DST is a new JOBDIR, or a new filter that workers share. SRC stays unchanged.
A crawl with CrashSafeScheduler may use the JOBDIR meanwhile, or may have been
killed; in Redis, no worker may use SRC.

Examples:
  scrapy bloom copy jobs/shop redis://localhost:6379/0#archive:bloom
  scrapy bloom copy redis://localhost:6379/0#shop:bloom jobs/alone
"""

import argparse
from contextlib import closing

from scrapy.settings import Settings

from scrapy_bloom.commands.shared.cli import PLACE, add_shared, print_json, say
from scrapy_bloom.commands.shared.places import opened_place
from scrapy_bloom.text import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help=PLACE)
    parser.add_argument("target", metavar="DST", help=f"a new {PLACE}")
    add_shared(parser, "--spider", "--json")


def run(options: argparse.Namespace, settings: Settings) -> None:
    with (
        opened_place(options, settings, options.source) as (place, _),
        closing(place.source()) as source,
        opened_place(options, settings, options.target, source.origin.spider) as (new, _),
    ):
        queued = new.copy_from(source)
    recorded = sum(generation.count for generation in source.generations)
    if options.json:
        print_json({"recorded": recorded, "queued": queued})
    else:
        records, requests = counted(recorded, "recorded request"), counted(queued, "queued request")
        say(f"Copied {place.name} to {new.name}: {records}, {requests}")

"""Delete a filter, so that the next crawl starts over.

The command asks before it deletes anything. PATH is a JOBDIR, or a directory with the files of a
filter: only the filter's own files are deleted, not Scrapy's queue of a paused job, and nothing
while a crawl runs. In Redis, the queue that workers share is deleted with the filter. Crawlers with
another scheduler that use the filter continue with an empty one.

With --queue, only the queue in Redis is deleted: its pending requests are not crawled, and the
next crawl uses the filter as it is.

Nothing is deleted while workers use the queue, unless --force is given. The workers then start
their crawl over: with an empty filter, or, with --queue, with the filter as it is.

Examples:
  scrapy bloom reset jobs/shop --yes
  scrapy bloom reset redis://localhost:6379/0 --key shop:bloom --queue --yes
  scrapy bloom reset redis://localhost:6379/0 --key shop:bloom --yes
"""

import argparse

from scrapy.settings import Settings

from scrapy_bloom.commands.shared.arguments import add_place, add_yes
from scrapy_bloom.commands.shared.output import confirm, say
from scrapy_bloom.commands.shared.places import opened_place


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    add_place(parser, is_optional=True)
    parser.add_argument(
        "--queue", action="store_true", help="in Redis: delete the shared queue, not the filter"
    )
    parser.add_argument(
        "--force", action="store_true", help="in Redis: also while workers use the queue"
    )
    add_yes(parser)


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Delete a filter."""
    which = {"only_queue": options.queue, "force": options.force}
    with opened_place(options.place, settings) as place:
        with place.removing(**which) as (what, consequence):
            confirm(f"Delete {what}?{consequence}", options)
        say(f"Deleted {what}")

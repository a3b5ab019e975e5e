"""Copy a filter from Redis or Valkey into files, where a single crawl can go on with it.

DIRECTORY becomes the BLOOM_DIR of that crawl, or is the "bloom" in its JOBDIR; it must not hold a
filter yet. The copy is read back and compared. Crawlers may use the filter in Redis meanwhile; what
they record then may be missing in the copy.

Examples:
  scrapy bloom pull redis://localhost:6379/0 filters/shop --key shop:bloom
  scrapy bloom pull redis://localhost:6379/0 filters/backup --key shop:bloom --json
"""

import argparse
from contextlib import closing

from scrapy.settings import Settings

from scrapy_bloom.commands.shared import arguments
from scrapy_bloom.commands.shared.changed import say_where, tell_copied
from scrapy_bloom.commands.shared.output import working
from scrapy_bloom.commands.shared.project import connect, load_project
from scrapy_bloom.copying.transfer import download

SYNTAX = "REDIS-URL DIRECTORY [--key NAME] [--spider NAME] [--json]"
HELP = "copy a filter from Redis into files"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's own."""
    arguments.add_server(parser)
    parser.add_argument("path", type=arguments.path, metavar="DIRECTORY", help="where the files go")
    arguments.add_filter_name(parser)
    arguments.add_json(parser)


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Copy a filter out of Redis."""
    store = connect(options, load_project(settings, options.spider, options.url))
    with closing(store.server), working(f"Copying from {store.server.address}"):
        copied = download(store.server, store.key, options.path)
    tell_copied(options, copied, str(options.path))
    if not options.json:
        say_where(options.path)

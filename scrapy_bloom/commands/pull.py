"""Copy a filter and its queue from Redis or Valkey into files, for a single crawl.

DIRECTORY becomes the BLOOM_DIR of that crawl, or it is the "bloom" in its JOBDIR, or a JOBDIR that
a crawl has used. It must not contain a filter yet. The command reads the copy back and compares
it. The queue is copied only into a JOBDIR, and only if no worker uses it.

Examples:
  scrapy bloom pull redis://localhost:6379/0 filters/shop --key shop:bloom
  scrapy bloom pull redis://localhost:6379/0 jobs/alone/bloom --key shop:bloom --json
"""

import argparse
from contextlib import closing

from scrapy.settings import Settings

from scrapy_bloom.commands.shared import arguments
from scrapy_bloom.commands.shared.output import note, print_written, working
from scrapy_bloom.commands.shared.project import connect, load_project
from scrapy_bloom.copying.transfer import download
from scrapy_bloom.files.directory import filter_directory
from scrapy_bloom.queues.shared_state import read_state
from scrapy_bloom.text import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    arguments.add_server(parser)
    parser.add_argument(
        "path", type=arguments.path, metavar="DIRECTORY", help="directory of the copy"
    )
    arguments.add_filter_name(parser)
    arguments.add_json(parser)


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Copy a filter out of Redis."""
    directory = filter_directory(options.path)
    server, key = connect(options, load_project(settings, options.spider, options.place))
    with closing(server), working(f"Copying from {server.address}"):
        state = read_state(server, key)
        status, queued = download(server, key, directory)
    queue = None if queued is None else {"requests": queued}
    print_written(options, status, directory, queue=queue)
    if state and state.total and queued is None:
        note(
            f"scrapy bloom: warning: the queue of {key!r} was not copied: a crawl with the copy "
            f"skips its {counted(state.total, 'request')} as duplicates. A BLOOM_DIR has no "
            'queue: give the "bloom" in a JOBDIR to copy both'
        )

"""Copy a filter and its queue from files into Redis or Valkey, where many crawlers share them.

PATH is a JOBDIR or a BLOOM_DIR that its crawl has closed; it stays unchanged. A filter or a queue
of that name must not exist in Redis. The command reads the copy back and compares it.

Examples:
  scrapy bloom push jobs/shop redis://localhost:6379/0
  scrapy bloom push jobs/shop redis://localhost:6379/0 --key archive:bloom --json
"""

import argparse
from contextlib import closing

from scrapy.settings import Settings

from scrapy_bloom.commands.shared import arguments
from scrapy_bloom.commands.shared.output import print_written, warn_of_queue, working
from scrapy_bloom.commands.shared.project import connect, load_project
from scrapy_bloom.copying.transfer import upload
from scrapy_bloom.files.directory import filter_directory, found_files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    parser.add_argument("path", type=arguments.path, metavar="PATH", help="the filter's directory")
    arguments.add_server(parser)
    arguments.add_filter_name(parser)
    arguments.add_json(parser)


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Copy a filter into Redis; the default key has the name of the filter's spider."""
    made_for = found_files(options.path)[-1].origin.spider
    project = load_project(settings, options.spider, options.place)
    options.spider = options.spider or made_for
    server, key = connect(options, project)
    with closing(server), working(f"Copying to {server.address}"):
        status, queued = upload(filter_directory(options.path), server, key)
    if queued is None:
        warn_of_queue(options.path)
    queue = None if queued is None else {"requests": queued}
    print_written(options, status, status.location, queue=queue)

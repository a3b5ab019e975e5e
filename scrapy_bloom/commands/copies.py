"""Copy filters: from files into Redis, from Redis into files, and several into one."""

import argparse
from contextlib import closing

from scrapy.settings import Settings

from scrapy_bloom.commands.shared import arguments
from scrapy_bloom.commands.shared.output import (
    note,
    print_written,
    warn_of_overfull,
    warn_of_queue,
    working,
)
from scrapy_bloom.commands.shared.project import connect, load_project
from scrapy_bloom.copying.merging import merge
from scrapy_bloom.copying.transfer import download, upload
from scrapy_bloom.files.directory import filter_directory, found_files
from scrapy_bloom.queues.shared_state import read_state
from scrapy_bloom.text import counted


class Push:
    """Copy a filter and its queue from files into Redis or Valkey, where many crawlers share them.

    PATH is a JOBDIR or a BLOOM_DIR that its crawl has closed; it stays unchanged. A filter or a
    queue of that name must not exist in Redis. The command reads the copy back and compares it.

    Examples:
      scrapy bloom push jobs/shop redis://localhost:6379/0
      scrapy bloom push jobs/shop redis://localhost:6379/0 --key archive:bloom --json
    """

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Add the arguments of the subcommand."""
        parser.add_argument(
            "path", type=arguments.path, metavar="PATH", help="the filter's directory"
        )
        arguments.add_server(parser)
        arguments.add_filter_name(parser)
        arguments.add_json(parser)

    @staticmethod
    def run(options: argparse.Namespace, settings: Settings) -> None:
        """Copy a filter into Redis; the default key has the name of the filter's spider."""
        made_for = found_files(options.path)[-1].origin.spider
        project = load_project(settings, options.spider, options.place)
        options.spider = options.spider or made_for
        filter_ = connect(options, project)
        server, key = filter_.server, filter_.key
        with closing(server), working(f"Copying to {server.address}"):
            status, queued = upload(filter_directory(options.path), server, key)
        if queued is None:
            warn_of_queue(options.path)
        queue = None if queued is None else {"requests": queued}
        print_written(options, status, status.location, queue=queue)


class Pull:
    """Copy a filter and its queue from Redis or Valkey into files, for a single crawl.

    DIRECTORY becomes the BLOOM_DIR of that crawl, or it is the "bloom" in its JOBDIR, or a JOBDIR
    that a crawl has used. It must not contain a filter yet. The command reads the copy back and
    compares it. The queue is copied only into a JOBDIR, and only if no worker uses it.

    Examples:
      scrapy bloom pull redis://localhost:6379/0 filters/shop --key shop:bloom
      scrapy bloom pull redis://localhost:6379/0 jobs/alone/bloom --key shop:bloom --json
    """

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Add the arguments of the subcommand."""
        arguments.add_server(parser)
        parser.add_argument(
            "path", type=arguments.path, metavar="DIRECTORY", help="directory of the copy"
        )
        arguments.add_filter_name(parser)
        arguments.add_json(parser)

    @staticmethod
    def run(options: argparse.Namespace, settings: Settings) -> None:
        """Copy a filter out of Redis."""
        directory = filter_directory(options.path)
        filter_ = connect(options, load_project(settings, options.spider, options.place))
        server, key = filter_.server, filter_.key
        with closing(server), working(f"Copying from {server.address}"):
            state = read_state(server, key)
            status, queued = download(server, key, directory)
        queue = None if queued is None else {"requests": queued}
        print_written(options, status, directory, queue=queue)
        if state and state.total and queued is None:
            note(
                f"scrapy bloom: warning: the queue of {key!r} was not copied: a crawl with the "
                f"copy skips its {counted(state.total, 'request')} as duplicates. A BLOOM_DIR has "
                'no queue: give the "bloom" in a JOBDIR to copy both'
            )


class Merge:
    """Merge filters into a new one, which reports a duplicate if any of them does.

    The filters must have the same BLOOM_EXPECTED_REQUESTS, BLOOM_ERROR_RATE, BLOOM_ON_FULL and
    BLOOM_SALT. Each is a JOBDIR, a BLOOM_DIR, or one generation-*.bloom file, and not in use. The
    sources stay unchanged.

    Examples:
      scrapy bloom merge filters/a filters/b -o filters/both
    """

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Add the arguments of the subcommand."""
        parser.add_argument("first", type=arguments.path, metavar="A", help="a filter")
        parser.add_argument(
            "others", type=arguments.path, nargs="+", metavar="B", help="more filters"
        )
        parser.add_argument(
            "-o",
            "--output",
            type=arguments.path,
            required=True,
            metavar="DIRECTORY",
            help="directory of the new filter: a JOBDIR or a BLOOM_DIR without a filter",
        )
        arguments.add_json(parser)

    @staticmethod
    def run(options: argparse.Namespace, settings: Settings) -> None:  # noqa: ARG004 - needs none
        """Merge filters."""
        sources = [options.first, *options.others]
        target = filter_directory(options.output)
        status = merge(sources, target)
        for source in sources:
            warn_of_queue(source)
        print_written(options, status, target)
        warn_of_overfull(status)

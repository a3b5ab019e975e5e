"""Print the URLs of a list that a filter has not seen, or those that it has.

URLFILE has a URL on each line ("-": the standard input), or is JSON lines (.jl) or a table (.csv)
with one in the field that --field names; each may be packed (.gz). A URL gets the fingerprint that
the project's REQUEST_FINGERPRINTER_CLASS makes for a plain GET request. It is only asked for, not
recorded, and the filter may be in use. Lists of any length are read in constant memory, so two of
100 million URLs can be intersected: import one into a filter, and check the other against it.

What is no URL is left out, and told of at the end, with exit status 1.

"Seen" may err, at the filter's error rate; "new" never does.

Examples:
  scrapy bloom check jobs/shop urls.txt
  scrapy bloom check jobs/shop urls.txt --seen
  scrapy bloom check jobs/shop items.jl.gz --field link
  scrapy bloom check redis://localhost:6379/0 urls.txt --key shop:bloom --json
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path

from scrapy.settings import Settings

from scrapy_bloom.commands.output import add_json, note, print_json, progress
from scrapy_bloom.commands.project import (
    Project,
    add_key,
    add_list,
    add_spider,
    check_skipped,
    connect,
    is_redis,
    load_project,
    url_list,
)
from scrapy_bloom.exceptions import FingerprinterMismatchError
from scrapy_bloom.reading import FilterReader
from scrapy_bloom.redis_reading import RedisReader

SYNTAX = "PATH|REDIS-URL URLFILE [--new|--seen] [--field NAME] [--key NAME] ..."
HELP = "print the URLs of a list that a filter has not seen, or has"

_BATCH = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's own."""
    parser.add_argument("place", metavar="PATH|REDIS-URL", help="where the filter is")
    parser.add_argument("urls", metavar="URLFILE", help='a list; "-": the standard input')
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--new", action="store_true", help="those it has not seen (default)")
    either.add_argument("--seen", action="store_true", help="those it has (probably) seen")
    add_list(parser)
    add_key(parser)
    add_spider(parser)
    add_json(parser)
    parser.epilog = "With --json, the figures alone are printed: how many URLs are new, and seen."


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Print the URLs that are asked for."""
    project = load_project(settings, options.spider)
    urls = url_list(options.urls, project, options)
    write = None if options.json else sys.stdout.buffer.write
    read = seen = 0
    with (
        _opened(options, settings, project) as are_seen,
        # A bar between the URLs would be in their way.
        progress("Checking", urls, "lines", shown=not sys.stdout.isatty()) as advance,
    ):
        pairs = urls.pairs()
        while batch := list(islice(pairs, _BATCH)):
            answers = are_seen([fingerprint for _, fingerprint in batch])
            if write is not None:
                for (url, _), is_seen in zip(batch, answers, strict=True):
                    if is_seen is options.seen:
                        write(url + b"\n")
            read += len(batch)
            seen += sum(answers)
            advance(read)
    if options.json:
        print_json({"urls": read, "new": read - seen, "seen": seen, "skipped": urls.skipped})
    else:
        note(f"{read:,} URLs: {read - seen:,} new, {seen:,} seen")
    check_skipped(urls)


@contextmanager
def _opened(
    options: argparse.Namespace, settings: Settings, project: Project
) -> Iterator[Callable[[Sequence[bytes]], list[bool]]]:
    """A function that says which of some fingerprints are seen."""
    if is_redis(options.place):
        server, key, _ = connect(settings, options.place, key=options.key, spider=options.spider)
        with closing(server):
            shared = RedisReader(server, key, window=project.bloom.window_secs)
            check_fingerprinter(shared.info.fingerprinter, project.fingerprinter)
            yield shared.are_seen
    else:
        window = project.bloom.window_secs
        with closing(FilterReader(Path(options.place), window=window)) as reader:
            check_fingerprinter(reader.files[-1].header.fingerprinter, project.fingerprinter)
            yield reader.are_seen


def check_fingerprinter(there: str, here: str) -> None:
    """Check that a filter was recorded with this project's fingerprints.

    Raises:
        FingerprinterMismatchError: it was not.
    """
    if there != here:
        raise FingerprinterMismatchError(
            f"the filter was recorded with REQUEST_FINGERPRINTER_CLASS = {there!r}, and this "
            f"project has {here!r}, which would find nothing in it; run the command in the "
            f"filter's project, or with -s REQUEST_FINGERPRINTER_CLASS={there}"
        )

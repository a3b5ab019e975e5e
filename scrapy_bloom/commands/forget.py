"""Have recorded requests crawled again.

The next crawl that finds such a request crawls it again, once. A crawl that uses the filter now
learns of it within a second. Requests that the filter has not recorded are left out.

Examples:
  scrapy bloom forget jobs/shop https://shop.example/a https://shop.example/b
  scrapy bloom forget jobs/shop --file urls.txt
  scrapy bloom forget redis://localhost:6379/0 --key shop:bloom --file -
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import chain, compress, islice
from pathlib import Path

from scrapy.exceptions import UsageError
from scrapy.settings import Settings

from scrapy_bloom.commands.shared.arguments import add_field, add_json, add_place
from scrapy_bloom.commands.shared.lists import checked_urls
from scrapy_bloom.commands.shared.output import print_json, say
from scrapy_bloom.commands.shared.project import Reader, load_project, opened_for_crawl, url_list
from scrapy_bloom.exceptions import BloomError, LockedError
from scrapy_bloom.files import forgotten as forgotten_file
from scrapy_bloom.files.directory import FilterReader, filter_directory
from scrapy_bloom.files.forgotten import ForgottenFile
from scrapy_bloom.job.jobdir import lock_directory
from scrapy_bloom.text import counted

_AT_ONCE = 1000  # fingerprints


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    add_place(parser)
    parser.add_argument("rest", metavar="URL", nargs="*", help="a page to crawl again")
    parser.add_argument("--file", metavar="URLFILE", help='a list of URLs; "-": the standard input')
    add_field(parser)
    add_json(parser)


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Forget requests."""
    if not options.rest and options.file is None:
        raise UsageError("which requests? Give their URLs, or a list of them with --file")
    project = load_project(settings, options.spider, options.place)
    forgotten = unrecorded = 0
    urls = url_list(options.file, project, options) if options.file is not None else None
    fingerprints = chain(
        (each for _, each in checked_urls(options.rest, project.url_fingerprint)), urls or ()
    )
    with (
        opened_for_crawl(options, project) as reader,
        _forgetting(options.place, reader) as forget,
    ):
        while batch := list(islice(fingerprints, _AT_ONCE)):
            if chosen := list(compress(batch, reader.are_recorded(batch))):
                forget(chosen)
            forgotten += len(chosen)
            unrecorded += len(batch) - len(chosen)
    if options.json:
        print_json(
            {
                "read": forgotten + unrecorded,
                "new": unrecorded,
                "forgotten": forgotten,
                "skipped": urls.skipped if urls else 0,
            }
        )
    else:
        what = counted(forgotten, "request is", "requests are")
        say(f"{what} crawled again when a crawl next finds them")
        if unrecorded:
            say(f"Not recorded, and left out: {unrecorded:,}")
    if urls:
        urls.check_skipped()


@contextmanager
def _forgetting(place: str, reader: Reader) -> Iterator[Callable[[Sequence[bytes]], object]]:
    """Return the function that forgets requests of a filter."""
    if not isinstance(reader, FilterReader):
        yield reader.forgotten.add
        return
    directory = filter_directory(Path(place))
    if directory.is_file():
        raise BloomError(f"{directory} is one file of a filter; give its directory")
    with ExitStack() as stack:
        with suppress(LockedError):  # a crawl runs; otherwise, none may start meanwhile
            stack.callback(lock_directory(directory).release)
        yield stack.enter_context(closing(ForgottenFile(directory / forgotten_file.NAME))).add

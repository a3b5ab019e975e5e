"""Look up URLs in a filter: list those that are new, or have recorded ones crawled again."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import chain, compress, islice
from pathlib import Path

from scrapy.exceptions import UsageError
from scrapy.settings import Settings

from scrapy_bloom.commands.shared.arguments import add_json, add_list, add_place
from scrapy_bloom.commands.shared.lists import checked_urls
from scrapy_bloom.commands.shared.output import note, print_json, progress, say
from scrapy_bloom.commands.shared.project import Reader, load_project, opened_for_crawl, url_list
from scrapy_bloom.exceptions import BloomError, LockedError
from scrapy_bloom.files import forgotten as forgotten_file
from scrapy_bloom.files.directory import FilterReader, filter_directory
from scrapy_bloom.files.forgotten import ForgottenFile
from scrapy_bloom.job.locks import lock_directory
from scrapy_bloom.text import counted, escaped

_AT_ONCE = 1000  # fingerprints


class Check:
    """Print the URLs of a list that a filter has not seen, or those that it has seen.

    URLFILE has a URL per line ("-": the standard input), or is JSON lines (.jl), a JSON array
    (.json) or a table (.csv) with the URL in the field that --field names; each may be compressed
    (.gz). The command records nothing, and a crawl may use the filter meanwhile. It answers each
    line as soon as it has read it, so the list may be a pipe. "Seen" may be a false positive; "new"
    is always right.

    Examples:
      scrapy bloom check jobs/shop urls.txt
      scrapy bloom check jobs/shop urls.txt --seen
      scrapy bloom check jobs/shop items.jl.gz --field link
      scrapy bloom check redis://localhost:6379/0 urls.txt --key shop:bloom --json
    """

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Add the arguments of the subcommand."""
        add_place(parser)
        parser.add_argument("urls", metavar="URLFILE", help='a list; "-": the standard input')
        either = parser.add_mutually_exclusive_group()
        either.add_argument(
            "--new", action="store_true", help="print the URLs that it has not seen (default)"
        )
        either.add_argument(
            "--seen", action="store_true", help="print the URLs that it has (probably) seen"
        )
        add_list(parser)
        add_json(parser)
        parser.epilog = "With --json, only the numbers of new and seen URLs are printed."

    @staticmethod
    def run(options: argparse.Namespace, settings: Settings) -> None:
        """Print the new or the seen URLs of a list."""
        project = load_project(settings, options.spider, options.place)
        urls = url_list(options.urls, project, options)
        is_terminal = sys.stdout.isatty()
        read = seen = 0
        with (
            opened_for_crawl(options, project) as reader,
            # A progress bar would break up the list of URLs.
            progress("Checking", urls.count, "lines", shown=not is_terminal) as advance,
        ):
            for batch in urls.batches():
                answers = reader.are_seen([fingerprint for _, fingerprint in batch])
                if not options.json:
                    asked = zip(batch, answers, strict=True)
                    chosen = [url for (url, _), is_seen in asked if is_seen is options.seen]
                    if (
                        is_terminal
                    ):  # no URL may control the terminal; a program gets them unchanged
                        chosen = [escaped(url.decode()).encode() for url in chosen]
                    sys.stdout.buffer.write(b"".join(url + b"\n" for url in chosen))
                    sys.stdout.flush()  # a program may write the next line after this answer
                read += len(answers)
                seen += sum(answers)
                advance(read)
        if options.json:
            print_json({"read": read, "new": read - seen, "seen": seen, "skipped": urls.skipped})
        else:
            note(f"{counted(read, 'URL')}: {read - seen:,} new, {seen:,} seen")
        urls.check_skipped()


class Forget:
    """Have recorded requests crawled again.

    The next crawl that finds such a request crawls it again, once. A crawl that uses the filter now
    learns of it within a second. Requests that the filter has not recorded are left out.

    Examples:
      scrapy bloom forget jobs/shop https://shop.example/a https://shop.example/b
      scrapy bloom forget jobs/shop --file urls.txt
      scrapy bloom forget redis://localhost:6379/0 --key shop:bloom --file -
    """

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Add the arguments of the subcommand."""
        add_place(parser)
        parser.add_argument("rest", metavar="URL", nargs="*", help="a page to crawl again")
        parser.add_argument(
            "--file", metavar="URLFILE", help='a list of URLs; "-": the standard input'
        )
        add_list(parser)
        add_json(parser)

    @staticmethod
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

"""Print the URLs of a list that a filter has not seen, or those that it has seen.

URLFILE has on each line a URL, or a JSON object with one in the field that --field names; it may
be compressed with gzip, or "-" for the standard input. The command records nothing, and a crawl may
use the filter meanwhile. It answers each line as soon as it has read it, so the list may be a pipe.
"Seen" may be a false positive; "new" is always right. With --json, only the numbers of new and
seen URLs are printed.

Examples:
  scrapy bloom check jobs/shop urls.txt
  scrapy bloom check jobs/shop urls.txt --seen
  scrapy bloom check jobs/shop items.jl.gz --field link
  scrapy bloom check redis://localhost:6379/0#shop:bloom urls.txt --json
"""

import argparse
import sys

from scrapy.settings import Settings

from scrapy_bloom.commands.shared.arguments import add_field, add_json, add_place
from scrapy_bloom.commands.shared.output import note, print_json, progress
from scrapy_bloom.commands.shared.places import opened_place, reading
from scrapy_bloom.commands.shared.project import load_project, url_list
from scrapy_bloom.text import counted, escaped


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
    add_field(parser)
    add_json(parser)


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Print the new or the seen URLs of a list."""
    project = load_project(settings, options.spider, options.place.url)
    urls = url_list(options.urls, project, options)
    is_terminal = sys.stdout.isatty()
    read = seen = 0
    with (
        opened_place(options.place, project),
        reading(options.place, project) as reader,
        # A progress bar would break up the list of URLs.
        progress("Checking", urls.count, "lines", shown=not is_terminal) as advance,
    ):
        for batch in urls.batches():
            answers = reader.are_seen([fingerprint for _, fingerprint in batch])
            if not options.json:
                asked = zip(batch, answers, strict=True)
                chosen = [url for (url, _), is_seen in asked if is_seen is options.seen]
                if is_terminal:  # no URL may control the terminal; a program gets them unchanged
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

"""Print the URLs of a list that a filter has not seen, or those that it has.

URLFILE has a URL on each line ("-": the standard input), or is JSON lines (.jl), a JSON array
(.json) or a table (.csv) with one in the field that --field names; each may be packed (.gz). A URL
gets the fingerprint that the project's REQUEST_FINGERPRINTER_CLASS makes for a plain GET request.
It is only asked for, not recorded, and the filter may be in use. Each line is answered as soon as
it is read, so the list may be a pipe that another program writes to. Lists of any length are read
in constant memory, so two of 100 million URLs can be intersected: import one into a filter, and
check the other against it.

What is not a URL is left out, and reported at the end, with exit status 1.

"Seen" may be a false positive, at the filter's error rate; "new" is always right.

Examples:
  scrapy bloom check jobs/shop urls.txt
  scrapy bloom check jobs/shop urls.txt --seen
  scrapy bloom check jobs/shop items.jl.gz --field link
  scrapy bloom check redis://localhost:6379/0 urls.txt --key shop:bloom --json
"""

import argparse
import sys

from scrapy.settings import Settings

from scrapy_bloom.commands.shared.arguments import add_json, add_list, add_place
from scrapy_bloom.commands.shared.output import note, print_json, progress
from scrapy_bloom.commands.shared.project import load_project, opened_for_crawl, url_list
from scrapy_bloom.text import counted, escaped

SYNTAX = "PATH|REDIS-URL URLFILE [--new|--seen] [--field NAME] [--key NAME] ..."
HELP = "print the URLs of a list that a filter has not seen, or has"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    add_place(parser)
    parser.add_argument("urls", metavar="URLFILE", help='a list; "-": the standard input')
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--new", action="store_true", help="those it has not seen (default)")
    either.add_argument("--seen", action="store_true", help="those it has (probably) seen")
    add_list(parser)
    add_json(parser)
    parser.epilog = "With --json, the figures alone are printed: how many URLs are new, and seen."


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Print the URLs that are asked for."""
    project = load_project(settings, options.spider, options.place)
    urls = url_list(options.urls, project, options)
    is_terminal = sys.stdout.isatty()
    read = seen = 0
    with (
        opened_for_crawl(options, project) as reader,
        # A bar between the URLs would be in their way.
        progress("Checking", urls.count, "lines", shown=not is_terminal) as advance,
    ):
        for batch in urls.batches():
            answers = reader.are_seen([fingerprint for _, fingerprint in batch])
            if not options.json:
                asked = zip(batch, answers, strict=True)
                chosen = [url for (url, _), is_seen in asked if is_seen is options.seen]
                if is_terminal:  # no URL may steer it; a program gets them as they are
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

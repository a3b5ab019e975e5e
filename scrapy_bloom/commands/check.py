"""Print the URLs that a filter has not seen, or those that it has seen.

Give URLs, or lists of them ("-": the standard input). The command records
nothing. It answers each line as soon as it has read it, so the list may be a
pipe. "Seen" may be a false positive; "new" is always right.

Examples:
  scrapy bloom check jobs/shop https://shop.example/today
  scrapy bloom check redis://localhost:6379/0#shop:bloom urls.txt --json
"""

import argparse
import sys
from contextlib import closing

from scrapy.settings import Settings

from scrapy_bloom.commands.shared.cli import add_shared, note, print_json
from scrapy_bloom.commands.shared.lists import Fields, RequestList
from scrapy_bloom.commands.shared.places import opened_place
from scrapy_bloom.text import counted, escaped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "place", "--spider", "requests", "--field")
    parser.add_argument(
        "--seen", action="store_true", help="print the URLs that it has (probably) seen instead"
    )
    add_shared(parser, "--json")


def run(options: argparse.Namespace, settings: Settings) -> None:
    is_terminal, seen = sys.stdout.isatty(), 0
    with opened_place(options, settings) as (place, project), closing(place.reader()) as reader:
        project.check_fingerprinter(reader.origin)

        def made(url: str, fields: Fields) -> tuple[bytes, bytes]:
            return url.encode(), project.fingerprint_of(url, fields)

        urls = RequestList(options.requests, made, options.field)
        for batch in urls.batches():
            answers = reader.are_seen([fingerprint for _, fingerprint in batch])
            seen += sum(answers)
            if options.json:
                continue
            asked = zip(batch, answers, strict=True)
            chosen = [url for (url, _), is_seen in asked if is_seen is options.seen]
            if is_terminal:  # no URL may control the terminal; a program gets them unchanged
                chosen = [escaped(url.decode()).encode() for url in chosen]
            sys.stdout.buffer.write(b"".join(url + b"\n" for url in chosen))
            sys.stdout.flush()  # a program may write the next line after this answer
    new = urls.read - seen
    if options.json:
        print_json({"read": urls.read, "new": new, "seen": seen, "skipped": urls.skipped})
    else:
        note(f"{counted(urls.read, 'URL')}: {new:,} new, {seen:,} seen")
    urls.check_skipped()

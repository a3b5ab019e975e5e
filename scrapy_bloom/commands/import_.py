"""Record requests that were crawled before, so that they are not crawled again.

SOURCE is Scrapy's requests.seen; a list of URLs ("-": the standard input); or
the lines of a set of scrapy-redis (redis-cli --raw SMEMBERS shop:dupefilter).
No crawl may use a JOBDIR meanwhile. A new filter is made with the project's
BLOOM_* settings. An import that was interrupted can be repeated.

Examples:
  scrapy bloom import jobs/old/requests.seen jobs/moved
  scrapy bloom import urls.txt redis://localhost:6379/0#shop:bloom
"""

import argparse
import re
from itertools import islice
from pathlib import Path
from typing import TypeAlias

from scrapy.settings import Settings

from scrapy_bloom.commands.shared.cli import PLACE, add_shared, note, print_json, say
from scrapy_bloom.commands.shared.lists import RequestList
from scrapy_bloom.commands.shared.places import Place, opened_place
from scrapy_bloom.commands.shared.project import Project
from scrapy_bloom.exceptions import BloomError, StorageError
from scrapy_bloom.generations.policy import Origin
from scrapy_bloom.job.reader import check_free
from scrapy_bloom.job.requests_seen import SeenFile
from scrapy_bloom.queues.sqlite_queue import has_pending
from scrapy_bloom.text import counted

_FINGERPRINT = re.compile(rb"[0-9a-fA-F]+\s*")  # a line of an older Scrapy's requests.seen

_Source: TypeAlias = SeenFile | RequestList[bytes]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="requests that were crawled before")
    parser.add_argument("place", metavar="DEST", help=f"the filter: {PLACE}")
    add_shared(parser, "--field", "--spider", "--json")


def run(options: argparse.Namespace, settings: Settings) -> None:
    with opened_place(options, settings) as (place, project):
        source = _opened_source(options, project)
        read, new = _imported(source, place, project)
    skipped = source.skipped if isinstance(source, RequestList) else 0
    if options.json:
        print_json({"read": read, "new": new, "skipped": skipped})
    else:
        say(f"Recorded {counted(read, 'request')} in {place.name}, {new:,} of them new")
    if isinstance(source, RequestList):
        source.check_skipped()
    elif source.is_truncated:
        note(
            f"scrapy bloom: warning: {source.path} ends with an incomplete request: its crawl was "
            "killed, and the requests that were queued will be skipped as duplicates"
        )


def _imported(source: _Source, place: Place, project: Project) -> tuple[int, int]:
    """Return how many requests were read, and how many of them are new."""
    fingerprints = iter(source)
    # Reading fails before a filter is created if the source is of another kind.
    if not (batch := list(islice(fingerprints, 1))):
        raise BloomError("the source holds nothing to import; nothing was changed")
    origin = Origin(fingerprinter=project.fingerprinter, spider=project.spider)
    read = new = 0
    try:
        with place.recording(project.bloom, origin) as backend:
            backend.begin()
            while batch:
                new += backend.add_many(batch)
                read += len(batch)
                if failure := backend.status().failure:
                    raise StorageError(failure)  # noqa: TRY301 - as one that it raises
                batch = list(islice(fingerprints, 1000))
            return read, new
    except StorageError as error:
        raise BloomError(
            f"{error} ({counted(read, 'request was', 'requests were')} read; fix that, and repeat "
            "the command)"
        ) from error


def _opened_source(options: argparse.Namespace, project: Project) -> _Source:
    """Open the source that SOURCE names."""
    path = Path(options.source)
    # A pipe can be read once only.
    if options.source == "-" or not path.is_file() or not _is_seen(path):
        return RequestList([options.source], project.fingerprint_of, options.field)
    check_free(path.parent)
    if has_pending(path.parent):
        raise BloomError(
            f"the queue in {path.parent} holds requests that are recorded in requests.seen, too, "
            "and would be skipped as duplicates. Let that job finish first, or continue it; to "
            "import it anyway, copy the file to another directory"
        )
    return SeenFile(path.resolve())  # the user may give a link


def _is_seen(path: Path) -> bool:
    """Return whether a file is a requests.seen, by its beginning, and not a list."""
    with path.open("rb") as file:
        beginning = file.peek()
    first, _, _ = beginning.strip().partition(b"\n")
    return beginning[:1] == b"\0" or _FINGERPRINT.fullmatch(first) is not None

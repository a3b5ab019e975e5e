"""Record requests that were crawled before, so that they are not crawled again.

SOURCE is Scrapy's requests.seen, or a JOBDIR with one; a list of URLs ("-":
the standard input); or the lines of a set of scrapy-redis (redis-cli --raw
SMEMBERS shop:dupefilter). No crawl may use a JOBDIR meanwhile. A new filter is
made with the project's BLOOM_* settings, and has room for more requests than
the source has. An import that was interrupted can be repeated.

Examples:
  scrapy bloom import jobs/old/requests.seen jobs/moved
  scrapy bloom import urls.txt jobs/listed -s BLOOM_EXPECTED_REQUESTS=10M
  scrapy bloom import urls.txt redis://localhost:6379/0#shop:bloom
"""

import argparse
import re
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import TypeAlias

from scrapy.exceptions import UsageError
from scrapy.settings import Settings

from scrapy_bloom.commands.shared.arguments import PLACE, add_field, add_json, add_spider
from scrapy_bloom.commands.shared.lists import RequestList
from scrapy_bloom.commands.shared.opening import opened_place
from scrapy_bloom.commands.shared.output import note, print_json, say
from scrapy_bloom.commands.shared.place import Place, found
from scrapy_bloom.commands.shared.project import Project
from scrapy_bloom.exceptions import BloomError, StorageError
from scrapy_bloom.generations.policy import Origin, with_headroom
from scrapy_bloom.job import jobdir
from scrapy_bloom.job.disk import check_file
from scrapy_bloom.job.reader import check_free, has_filter
from scrapy_bloom.job.requests_seen import SeenFile
from scrapy_bloom.queues.sqlite_queue import has_pending
from scrapy_bloom.text import counted

_AT_ONCE = 1000  # fingerprints
_FINGERPRINT = re.compile(rb"[0-9a-fA-F]+\s*")  # a line of an older Scrapy's requests.seen

_Source: TypeAlias = SeenFile | RequestList[bytes]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="requests that were crawled before")
    parser.add_argument("place", metavar="DEST", help=f"the filter: {PLACE}")
    add_field(parser)
    add_spider(parser)
    add_json(parser)


def run(options: argparse.Namespace, settings: Settings) -> None:
    with opened_place(options, settings, is_new=True) as (place, project):
        source = _opened_source(options, project)
        read, new = _imported(options.source, source, place, project)
    skipped = source.skipped if isinstance(source, RequestList) else 0
    if options.json:
        print_json({"read": read, "new": new, "skipped": skipped})
    else:
        say(f"Recorded {counted(read, 'request')} in {place.name}, {new:,} of them new")
    if isinstance(source, RequestList):
        source.check_skipped()
    elif source.is_truncated:
        note(
            f"scrapy bloom: warning: the last request in {source.path} is incomplete and was left "
            "out: its crawl was killed, and the requests that were queued will be skipped as "
            "duplicates"
        )


def _imported(name: str, source: _Source, place: Place, project: Project) -> tuple[int, int]:
    """Return how many requests were read, and how many of them are new."""
    bloom, total, fingerprints = project.bloom, source.count(), iter(source)
    # Reading fails before a filter is created if the source is of another kind.
    first = list(islice(fingerprints, 1))
    if reader := found(place.reader):
        reader.close()
    else:
        room = with_headroom(total or 0)
        bloom = replace(bloom, expected_requests=max(bloom.expected_requests, room))
    if not first:
        what = "the standard input" if name == "-" else name
        raise BloomError(f"{what} holds nothing to import; nothing was changed")
    origin = Origin(fingerprinter=project.fingerprinter, spider=project.spider)
    read = new = 0
    try:
        with place.recording(bloom, origin) as backend:
            backend.begin()
            at_once = max(1, min(_AT_ONCE, backend.status().capacity // 20))
            rest = chain(first, fingerprints)
            while batch := list(islice(rest, at_once)):
                new += backend.add_many(batch)
                read += len(batch)
                if failure := backend.status().failure:
                    raise StorageError(failure)  # noqa: TRY301 - as one that it raises
            return read, new
    except StorageError as error:
        raise BloomError(
            f"{error} ({counted(read, 'request was', 'requests were')} read; fix that, and repeat "
            "the command)"
        ) from error


def _opened_source(options: argparse.Namespace, project: Project) -> _Source:
    """Open the source that SOURCE names."""
    path = Path(options.source)
    if path.is_dir():
        if has_filter(path / jobdir.FILE):
            raise UsageError(f"{path} is a filter; copy it with scrapy bloom copy")
        path = path / jobdir.SEEN
        if not path.exists():
            raise BloomError(f"{options.source} holds neither a filter nor a requests.seen")
        check_file(path)
    # A pipe can be read once only.
    if options.source == "-" or not path.is_file() or not _is_seen(path):
        return RequestList([options.source], project.fingerprint_of, options.field)
    check_free(path.parent)
    if has_pending(path.parent):
        raise BloomError(
            f"the queue in {path.parent} holds requests that are recorded in requests.seen, too, "
            "and would be skipped as duplicates. Let that job finish first, or continue it (a "
            "crawl with BloomDupeFilter imports requests.seen by itself); to import it anyway, "
            "copy the file to another directory"
        )
    return SeenFile(path.resolve())  # the user may give a link


def _is_seen(path: Path) -> bool:
    """Return whether a file is a requests.seen, by its name or its beginning, and not a list."""
    with path.open("rb") as file:
        beginning = file.peek()
    first, _, _ = beginning.strip().partition(b"\n")
    is_named = path.name == jobdir.SEEN
    return bool(is_named or beginning[:1] == b"\0" or _FINGERPRINT.fullmatch(first))

"""Record requests that were crawled before, so that they are not crawled again.

SOURCE is Scrapy's requests.seen, or a JOBDIR with one; a list of URLs ("-": the standard input); or
the lines of a set of scrapy-redis (redis-cli --raw SMEMBERS shop:dupefilter). DEST is a JOBDIR that
no crawl uses now, or the URL of a server with a key, which crawls may use meanwhile. A new filter
is made with the project's BLOOM_* settings, and has room for more requests than the source has. An
import that was interrupted can be repeated.

Examples:
  scrapy bloom import jobs/old/requests.seen jobs/moved
  scrapy bloom import urls.txt jobs/listed -s BLOOM_EXPECTED_REQUESTS=10M
  scrapy bloom import urls.txt redis://localhost:6379/0#shop:bloom
"""

import argparse
import re
import time
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

from scrapy.exceptions import UsageError
from scrapy.settings import Settings

from scrapy_bloom.commands.shared import arguments
from scrapy_bloom.commands.shared.figures import print_written
from scrapy_bloom.commands.shared.lists import RequestList
from scrapy_bloom.commands.shared.output import note, progress, say
from scrapy_bloom.commands.shared.places import PathPlace, Place, opened_place
from scrapy_bloom.commands.shared.project import Project, load_project
from scrapy_bloom.exceptions import BloomError, StorageError
from scrapy_bloom.generations.policy import Origin, with_headroom
from scrapy_bloom.job import jobdir
from scrapy_bloom.job.disk import check_file
from scrapy_bloom.job.reader import check_free
from scrapy_bloom.job.requests_seen import SeenFile
from scrapy_bloom.queues.sqlite_queue import has_pending
from scrapy_bloom.text import counted, masked

_AT_ONCE = 1000  # fingerprints
_FINGERPRINT = re.compile(rb"[0-9a-fA-F]+\s*")  # a line of an older Scrapy's requests.seen

Source = SeenFile | RequestList[bytes]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    parser.add_argument("source", metavar="SOURCE", help="requests that were crawled before")
    parser.add_argument("place", metavar="DEST", help="the filter")
    arguments.add_field(parser)
    arguments.add_filter_name(parser)
    arguments.add_json(parser)


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Record the requests of a source."""
    project = load_project(settings, options.spider, options.place.url)
    with opened_place(options.place, project, is_new=True) as place:
        source = _opened_source(options, project)
        begun = time.monotonic()
        read, added = _imported(options, project, place, source)
        seconds = time.monotonic() - begun
        if not options.json:
            say(
                f"Read {counted(read, 'request')} in {seconds:.1f} seconds "
                f"({read / max(seconds, 1e-3):,.0f} a second), {added:,} of them new"
            )
        print_written(
            place,
            options,
            source=masked(options.source),
            read=read,
            new=added,
            skipped=source.skipped if isinstance(source, RequestList) else 0,
            seconds=seconds,
        )
    if isinstance(source, RequestList):
        source.check_skipped()
    elif source.is_truncated:
        note(
            f"scrapy bloom: warning: the last request in {source.path} is incomplete and was left "
            "out: its crawl was killed, and the requests that were queued will be skipped as "
            "duplicates"
        )


def _imported(
    options: argparse.Namespace, project: Project, place: Place, source: Source
) -> tuple[int, int]:
    """Return how many requests were read, and how many of them are new."""
    bloom = project.bloom
    total = source.count()
    fingerprints = iter(source)
    # Reading fails before a filter is created if the source is of another kind.
    first = list(islice(fingerprints, 1))
    if not place.has_filter():
        room = with_headroom(total or 0)
        bloom = replace(bloom, expected_requests=max(bloom.expected_requests, room))
    if not first:
        what = "the standard input" if options.source == "-" else options.source
        raise BloomError(f"{what} holds nothing to import; nothing was changed")
    origin = Origin(fingerprinter=project.fingerprinter, spider=project.spider)
    read = added = 0
    try:
        with (
            place.recording(bloom, origin) as backend,
            progress("Importing", total) as advance,
        ):
            backend.begin()
            at_once = max(1, min(_AT_ONCE, backend.status().capacity // 20))
            rest = chain(first, fingerprints)
            while batch := list(islice(rest, at_once)):
                added += backend.add_many(batch)
                read += len(batch)
                advance(read)
                if failure := backend.status().failure:
                    raise StorageError(failure)  # noqa: TRY301 - as one that it raises
            return read, added
    except KeyboardInterrupt:
        recorded = counted(read, "request is", "requests are")
        note(f"scrapy bloom: {recorded} recorded; repeat the command to continue")
        raise
    except StorageError as error:
        raise BloomError(
            f"{error} ({counted(read, 'request was', 'requests were')} read; fix that, and repeat "
            "the command)"
        ) from error


def _opened_source(options: argparse.Namespace, project: Project) -> Source:
    """Open the source that SOURCE names."""
    path = Path(options.source)
    if path.is_dir():
        if PathPlace(path).has_filter():
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

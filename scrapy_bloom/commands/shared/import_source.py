"""Open the sources of `scrapy bloom import`: a requests.seen, URLs, or a set of scrapy-redis."""

import argparse
import codecs
import io
from collections.abc import Generator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scrapy.exceptions import UsageError

from scrapy_bloom.commands.shared.arguments import is_redis
from scrapy_bloom.commands.shared.lists import (
    FORMATS,
    UNREADABLE,
    UrlList,
    begins_with_scheme,
    format_of,
    opened,
    reason_of,
)
from scrapy_bloom.commands.shared.output import note
from scrapy_bloom.commands.shared.project import Project, answering_server, load_project, url_list
from scrapy_bloom.exceptions import BloomError, StorageError
from scrapy_bloom.files.directory import filter_directory
from scrapy_bloom.files.file import MAGIC
from scrapy_bloom.job import paths as jobdir
from scrapy_bloom.job.requests_seen import SeenFile
from scrapy_bloom.queues.job_directory import has_pending
from scrapy_bloom.redis.connection.server import RedisServer

_HEX_DIGITS = b"0123456789abcdefABCDEF"
_SCAN_COUNT = 1000  # members per request
_SCRAPY_REDIS = "scrapy_bloom.ScrapyRedisFingerprinter"


@dataclass(frozen=True)
class RedisSet:
    """The fingerprints in a set of scrapy-redis, in hexadecimal digits."""

    server: RedisServer
    key: str

    def count(self) -> int:
        """Count its members."""
        kind = self.server.call(lambda client: client.type(self.key))
        if kind == b"none":
            raise StorageError(
                f"{self.server.address} has no key {self.key!r}; give the name of scrapy-redis's "
                "set with --source-key (its SCHEDULER_DUPEFILTER_KEY, by default "
                "<spider>:dupefilter)"
            )
        if kind != b"set":
            raise StorageError(
                f"the key {self.key!r} of {self.server.address} is a {kind.decode()}, not a set "
                "of fingerprints"
            )
        return int(self.server.call(lambda client: client.scard(self.key)))

    def __iter__(self) -> Generator[bytes, None, None]:
        """Yield each fingerprint at least once, also while crawlers add fingerprints."""
        cursor = None
        while cursor != 0:
            cursor, members = self._scan(cursor or 0)
            for member in members:
                try:
                    yield bytes.fromhex(member.decode())
                except ValueError:
                    raise StorageError(
                        f"the set {self.key!r} of {self.server.address} holds {member[:60]!r}, "
                        "which is no fingerprint in hexadecimal digits; it was left as it is"
                    ) from None

    def _scan(self, cursor: int) -> Any:
        return self.server.call(lambda client: client.sscan(self.key, cursor, count=_SCAN_COUNT))


Source = SeenFile | UrlList | RedisSet


def is_filter(path: Path) -> bool:
    """Return whether a path is a filter: one of its files, or a directory with some."""
    if path.is_file():
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    return bool(jobdir.filter_files(filter_directory(path)))


def open_source(options: argparse.Namespace, project: Project, stack: ExitStack) -> Source:
    """Open the source that SOURCE names; the stack closes it."""
    if is_redis(options.source):
        return _set_in_redis(options, project, stack)
    if options.source_key:
        raise UsageError("--source-key names a set in Redis, and SOURCE is not the URL of a server")
    if options.source == "-":
        if options.format == "seen":
            raise UsageError("the standard input is read as URLs; give a requests.seen as a file")
        return url_list("-", project, options)
    path = Path(options.source)
    if path.is_dir():
        path = path / jobdir.SEEN
        if not path.exists():
            raise BloomError(f"{options.source} holds neither a filter nor a requests.seen")
        jobdir.check_file(path)
    is_pipe = path.exists() and not path.is_file()  # it can be read once only
    if options.format in FORMATS or (options.format is None and (is_pipe or _is_list(path))):
        return url_list(str(path), project, options)
    if is_pipe:
        raise UsageError(f"{path} is a pipe; give a requests.seen as a file")
    _check_queue(path.parent, options.dest)
    return SeenFile(path)


def _is_list(path: Path) -> bool:
    """Return whether a file is a list of URLs, by its name or first line; not a requests.seen."""
    try:
        with opened(path) as file:
            is_table = format_of(path, file) != "urls"
            beginning = file.peek()
            is_packed = not isinstance(file.raw, io.FileIO)
    except UNREADABLE as error:
        raise BloomError(f"{path} cannot be read: {reason_of(error)}") from error
    first = beginning.removeprefix(codecs.BOM_UTF8).lstrip().split(b"\n")[0].strip()
    if is_table or first[:1] in {b"", b"#"} or begins_with_scheme(first.decode(errors="replace")):
        return True
    if beginning[:1] == b"\0" or (first and not first.strip(_HEX_DIGITS)):
        if is_packed:
            raise BloomError(f"{path} is a requests.seen that gzip has packed: unpack it first")
        return False
    shown = repr(first[:60].decode(errors="replace"))
    raise BloomError(
        f"{path} begins with {shown if shown.isprintable() else 'binary data'}, which is neither a "
        "URL nor a fingerprint; say what it is with --format urls or --format seen"
    )


def _check_queue(job_dir: Path, dest: str) -> None:
    """Check that no request in a job's requests.seen is still pending."""
    if not is_redis(dest):
        place = Path(dest).resolve()
        if job_dir.resolve() in {place, place.parent} and jobdir.was_closed_by_scrapy(job_dir):
            return  # the crawl continues with both
    way_out = "to import it all the same, copy the file to another directory"
    if not jobdir.was_closed_by_scrapy(job_dir):
        raise BloomError(
            f"the crawl with the job directory {job_dir} was killed: the requests it had queued "
            "are recorded in requests.seen too, and would be skipped as duplicates. Start it once "
            f"more, with BloomDupeFilter, which logs how it handles them; {way_out}"
        )
    if has_pending(job_dir):
        raise BloomError(
            f"the queue in {job_dir} holds requests that are recorded in requests.seen, too, "
            "and would be skipped as duplicates. Let that job finish first, or go on with it (a "
            f"crawl with BloomDupeFilter imports requests.seen by itself); {way_out}"
        )


def _set_in_redis(options: argparse.Namespace, project: Project, stack: ExitStack) -> RedisSet:
    key = options.source_key
    if key is None:
        if not options.spider:
            raise UsageError("which set? Give --source-key, for example shop:dupefilter")
        key = f"{options.spider}:dupefilter"
    if not project.is_chosen:
        raise BloomError(
            "scrapy-redis makes fingerprints of its own, and a crawl with this project's "
            f"{project.fingerprinter} would find none of them: set REQUEST_FINGERPRINTER_CLASS = "
            f'"{_SCRAPY_REDIS}" in the project (or here, with -s) and keep it; or, if '
            "the set was filled with Scrapy's own, say so: "
            f"-s REQUEST_FINGERPRINTER_CLASS={project.fingerprinter}"
        )
    server = answering_server(load_project(project.settings, place=options.source))
    stack.enter_context(closing(server))
    return RedisSet(server, key)


def report_left_out(source: Source) -> None:
    """Report lines or requests of a source that could not be read; lines raise a BloomError."""
    if isinstance(source, UrlList):
        source.check_skipped()
    if isinstance(source, SeenFile) and source.is_truncated:
        note(
            f"scrapy bloom: warning: the last request in {source.path} is incomplete and was left "
            "out: its crawl was killed, and the requests that were queued will be skipped as "
            "duplicates"
        )

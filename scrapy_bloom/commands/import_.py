"""Record requests that were crawled before, so that they are not crawled again.

SOURCE is one of
  - Scrapy's requests.seen, in either of its formats, or a JOBDIR with one;
  - a list of URLs: a file with a URL per line ("-": the standard input), JSON lines (.jl), a JSON
    array (.json) or a table (.csv) with the URL in the field that --field names; each may be
    compressed (.gz). The project's REQUEST_FINGERPRINTER_CLASS makes the fingerprints, for plain
    GET requests. Lines that are not URLs are left out and reported at the end, with exit status 1;
  - a redis:// URL: the set of scrapy-redis that --source-key names;
  - another filter: a JOBDIR, a BLOOM_DIR, or one generation-*.bloom file.
The source is only read. DEST is the filter: the BLOOM_DIR or JOBDIR of a crawl that does not run
now, or a redis:// URL with --key; crawls may use a filter in Redis meanwhile. A new filter is made
with the project's BLOOM_* settings, and has room for all requests of the source. An existing filter
grows.

An import that was interrupted can be repeated.

Examples:
  scrapy bloom import jobs/old/requests.seen filters/shop
  scrapy bloom import urls.txt filters/listed --expected-requests 10M --error-rate 1e-7
  scrapy bloom import urls.txt redis://localhost:6379/0 --key shop:bloom
  scrapy bloom import jobs/shop filters/copy
"""

import argparse
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path

from scrapy.exceptions import UsageError
from scrapy.settings import Settings

from scrapy_bloom.commands.shared import arguments
from scrapy_bloom.commands.shared.arguments import is_redis
from scrapy_bloom.commands.shared.import_source import (
    Source,
    is_filter,
    open_source,
    report_left_out,
)
from scrapy_bloom.commands.shared.lists import UrlList
from scrapy_bloom.commands.shared.output import (
    note,
    print_changed,
    progress,
    say,
    warn_of_overfull,
    warn_of_queue,
)
from scrapy_bloom.commands.shared.project import Project, connect, load_project
from scrapy_bloom.copying.merging import merge, merge_into
from scrapy_bloom.exceptions import BloomError, LockedError, StorageError
from scrapy_bloom.files.backend import LocalBackend
from scrapy_bloom.files.directory import check_free, filter_directory, found_files
from scrapy_bloom.generations.backend import FilterStatus
from scrapy_bloom.generations.policy import Generation, Origin, rate_asked
from scrapy_bloom.job import paths as jobdir
from scrapy_bloom.job.locks import LOCK_NAME
from scrapy_bloom.job.recovery import Job
from scrapy_bloom.redis.backend import RedisBackend
from scrapy_bloom.settings.settings import BloomSettings
from scrapy_bloom.text import counted, masked

SYNTAX = "SOURCE DEST [--expected-requests N] [--error-rate P] [--key NAME] ..."
HELP = "record requests that were crawled before"

_BATCH = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    parser.add_argument("source", metavar="SOURCE", help="requests that were crawled before")
    parser.add_argument("dest", metavar="DEST", help="the filter")
    parser.add_argument(
        "-n",
        "--expected-requests",
        type=arguments.requests,
        metavar="N",
        help="of a new filter (default: BLOOM_EXPECTED_REQUESTS)",
    )
    parser.add_argument(
        "-p",
        "--error-rate",
        type=arguments.error_rate,
        metavar="P",
        help="of a new filter (default: BLOOM_ERROR_RATE)",
    )
    arguments.add_list(parser, "seen")
    parser.add_argument(
        "--source-key",
        metavar="NAME",
        help="the name of scrapy-redis's set (default: with --spider, NAME:dupefilter)",
    )
    arguments.add_filter_name(parser)
    arguments.add_json(parser)


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Record the requests of a source."""
    arguments.check_filter_name(options, options.dest, spider_counts=True)
    given = {
        "BLOOM_EXPECTED_REQUESTS": options.expected_requests,
        "BLOOM_ERROR_RATE": options.error_rate,
    }
    given = {name: value for name, value in given.items() if value is not None}
    project = load_project(settings, options.spider, options.dest, **given)
    if not is_redis(options.source) and is_filter(Path(options.source)):
        _copy(options, Path(options.source))
        return
    with ExitStack() as stack:
        source = open_source(options, project, stack)
        begun = time.monotonic()
        read, added, status = _imported(options, project, source)
    seconds = time.monotonic() - begun
    if not options.json:
        say(
            f"Read {counted(read, 'request')} in {seconds:.1f} seconds "
            f"({read / max(seconds, 1e-3):,.0f} a second), {added:,} of them new"
        )
    print_changed(
        options,
        status,
        None if is_redis(options.dest) else _directory(options),
        source=masked(options.source),
        read=read,
        new=added,
        skipped=source.skipped if isinstance(source, UrlList) else 0,
        seconds=seconds,
    )
    report_left_out(source)


def _imported(
    options: argparse.Namespace, project: Project, source: Source
) -> tuple[int, int, FilterStatus]:
    total = source.count()
    fingerprints = iter(source)
    # Reading fails before a filter is created if the source is of another kind.
    first = list(islice(fingerprints, 1))
    backend = _destination(options, project, total)
    if not first:
        what = "the standard input" if options.source == "-" else options.source
        raise BloomError(f"{what} holds nothing to import; nothing was changed")
    for handler in logging.getLogger("scrapy_bloom").handlers:
        handler.addFilter(_is_no_failure)
    read = added = 0
    try:
        with (
            ExitStack() as undoing,
            _opened(backend, options, undoing),
            progress("Importing", total, "requests") as advance,
        ):
            backend.begin()
            at_once = max(1, min(_BATCH, backend.status().capacity // 20))
            rest = chain(first, fingerprints)
            while batch := list(islice(rest, at_once)):
                added += backend.add_many(batch)
                undoing.pop_all()
                read += len(batch)
                advance(read)
                _check_storage(backend)
            return read, added, backend.status()
    except KeyboardInterrupt:
        recorded = counted(read, "request is", "requests are")
        note(f"scrapy bloom: {recorded} recorded; repeat the command to continue")
        raise
    except StorageError as error:
        recorded = counted(read, "request is", "requests are")
        raise BloomError(
            f"{error} ({recorded} recorded; fix that, and repeat the command to continue)"
        ) from error


def _is_no_failure(record: logging.LogRecord) -> bool:
    """Return whether to log a record; the import itself reports errors of the storage."""
    packages = ("scrapy_bloom.files", "scrapy_bloom.generations")
    return record.levelno < logging.ERROR or not record.name.startswith(packages)


def _check_storage(backend: LocalBackend | RedisBackend) -> None:
    if failure := backend.status().failure:
        raise StorageError(failure)


@contextmanager
def _opened(
    backend: LocalBackend | RedisBackend, options: argparse.Namespace, undoing: ExitStack
) -> Iterator[None]:
    """Open the filter, and close it; after an error, ignore a second one from closing.

    The stack removes the files and directories of a new filter, unless the caller empties it.
    """
    if isinstance(backend, LocalBackend):
        undoing.push(partial(_remove_after_error, _missing_paths(_directory(options))))
    backend.open()
    try:
        yield
    except BaseException:
        with suppress(BloomError):
            backend.close()
        raise
    backend.close()


def _destination(
    options: argparse.Namespace, project: Project, total: int | None
) -> LocalBackend | RedisBackend:
    bloom = replace(
        project.bloom, on_full="grow"
    )  # an import cannot wait for a larger BLOOM_EXPECTED_REQUESTS
    enough = replace(bloom, expected_requests=max(bloom.expected_requests, total or 0))
    origin = Origin(salt=bloom.salt, fingerprinter=project.fingerprinter, spider=project.spider)
    if is_redis(options.dest):
        filter_ = connect(options, project)
        if stored := filter_.read():
            live = stored.generations
            _check_window(live[-1].open_until, bloom)
            _check_size(options, project.bloom, live, stored.origin.error_rate)
        return RedisBackend(
            filter_.server, filter_.key, enough.policy, origin, mirror=bloom.redis_mirror
        )
    directory = _directory(options)
    check_free(directory)
    is_there = bool(jobdir.filter_files(directory))
    if is_there:
        found = found_files(directory)
        _check_window(found[-1].open_until, bloom)
        _check_size(options, project.bloom, found, found[-1].origin.error_rate)
    elif directory.name == "bloom":
        _check_seen(directory.parent, options.source)
    return LocalBackend(
        directory,
        (bloom if is_there else enough).policy,  # an existing filter grows only when it is full
        origin,
        job=Job(None, "stop"),
        sync_secs=bloom.sync_secs,
        is_crawl=False,
    )


def _check_window(open_until: float, bloom: BloomSettings) -> None:
    """Check that an import does not end the window of a filter."""
    if open_until and not bloom.window_secs:
        raise BloomError(
            "the filter has a time window, and these settings have none: recorded requests would "
            "expire too late. Run this in the project (with --spider, if the spider sets "
            "it), or with -s BLOOM_WINDOW_SECS=..."
        )


def _check_seen(job_dir: Path, source: str) -> None:
    """Check that the job's own requests.seen is imported first: a crawl does so only once."""
    seen = job_dir / jobdir.SEEN
    own = {seen.resolve(), job_dir.resolve()}
    if seen.exists() and seen.stat().st_size and Path(source).resolve() not in own:
        raise BloomError(
            f"{seen} holds what this job has recorded so far, and a crawl imports it only into a "
            f"filter that is new: first run scrapy bloom import {job_dir} {job_dir}"
        )


def _directory(options: argparse.Namespace) -> Path:
    """Return the directory of the destination's files."""
    dest = Path(options.dest)
    if dest.exists() and not dest.is_dir():
        raise BloomError(f"{dest} is a file; give the directory of the filter")
    return filter_directory(dest)


def _copy(options: argparse.Namespace, source: Path) -> None:
    if options.expected_requests or options.error_rate:
        raise UsageError(
            "SOURCE is a filter, and the copy is like it: leave out --expected-requests and "
            "--error-rate"
        )
    if is_redis(options.dest):
        raise UsageError("SOURCE is a filter: copy it into Redis with scrapy bloom push")
    target = _directory(options)
    status = merge_into(source, target) if jobdir.filter_files(target) else merge([source], target)
    warn_of_overfull(status)
    warn_of_queue(source)
    print_changed(options, status, target, source=options.source)


def _check_size(
    options: argparse.Namespace, bloom: BloomSettings, live: Sequence[Generation], made_for: float
) -> None:
    """Check that an existing filter has the size and the error rate of the options."""
    room = live[-1].capacity if bloom.window_secs else sum(each.capacity for each in live)
    asked = replace(bloom, on_full="grow").policy.first()
    if options.expected_requests and room < asked.capacity:
        raise UsageError(
            "--expected-requests is for a new filter: DEST has one already, for fewer requests. "
            "Leave the option out (the filter grows when it is full), or give another DEST"
        )
    rate = rate_asked(live, made_for)
    if options.error_rate and rate > float(f"{bloom.error_rate:.9g}"):
        raise UsageError(
            f"--error-rate is for a new filter: DEST has one already, for {rate:g}. Leave the "
            "option out, or give another DEST"
        )


def _missing_paths(directory: Path) -> list[Path]:
    """Return the files and directories that a new filter would create, files first."""
    files = (directory / jobdir.file_name(1), directory / LOCK_NAME)
    return [path for path in (*files, directory, *directory.parents) if not path.exists()]


def _remove_after_error(new: list[Path], kind: type[BaseException] | None, *_: object) -> None:
    """Remove the files and directories that a failed import has created."""
    if kind is None or issubclass(kind, LockedError):  # another process has created them
        return
    for path in new:
        with suppress(OSError):  # the directory has other files
            path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)

"""Open the files of a filter for a crawl, or read them without changing anything."""

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from scrapy_bloom.exceptions import (
    FilterFileError,
    FingerprinterMismatchError,
    StorageError,
    UncleanShutdownError,
)
from scrapy_bloom.files import forgotten as forgotten_file
from scrapy_bloom.files.file import FileGeneration, FilterFile, clip
from scrapy_bloom.files.forgotten import ForgottenFile
from scrapy_bloom.files.log import LOGS_NAME, FilterLog, LogRecords
from scrapy_bloom.generations.memory import Lookup
from scrapy_bloom.generations.policy import unexpired
from scrapy_bloom.job import jobdir
from scrapy_bloom.job.disk import drop_cached_pages
from scrapy_bloom.job.recovery import Job
from scrapy_bloom.text import counted

logger = logging.getLogger(__name__)

_FILES = "generation-*.bloom"


def other_files(directory: Path) -> list[Path]:
    """Return the files of a filter that are not generations."""
    records = directory / LOGS_NAME
    found = [each for each in (records, records.with_name(f"{records.name}.tmp")) if each.exists()]
    return [*forgotten_file.files(directory), *found]


def check_free(directory: Path) -> None:
    """Raise a StorageError if a crawl uses a filter or its job, or was killed with it.

    The directory of the filter need not exist.
    """
    if (directory / jobdir.LOCK_NAME).exists():
        jobdir.lock_directory(
            directory
        ).release()  # first, for the clearest message if a crawl runs
    if files := jobdir.filter_files(directory):
        check_closed(directory, [FileGeneration.at(path) for path in files])
    job_dir = directory.parent
    if directory.name == "bloom" and Job(job_dir).was_killed(has_own_filter=bool(files)):
        raise UncleanShutdownError(
            f"the crawl with the job directory {job_dir} was killed: the filter would report the "
            "requests of its queue as duplicates, and they would never be crawled. Start that "
            "crawl again, and it will recover; or use another directory"
        )


def check_closed(path: Path, files: Sequence[FileGeneration]) -> None:
    """Raise an UncleanShutdownError if a crawl uses a filter, or was killed with it.

    Raises a StorageError if the records of the filter cannot be read.
    """
    if not _is_closed(files):
        raise UncleanShutdownError(
            f"{path} is in use by a crawl, or its last crawl did not close it: it may report "
            "requests as duplicates that were queued and never crawled. Wait for the crawl to end; "
            "or start it again, and it will recover"
        )


def _is_closed(files: Sequence[FileGeneration]) -> bool:
    """Return whether the last crawl with a filter closed it; raises StorageError."""
    return not (any(file.in_use for file in files) or LogRecords.read(files[-1].path.parent).open)


def live_among(path: Path, files: Sequence[FileGeneration]) -> list[FileGeneration]:
    """Return the live files of a directory, at least one; the newest header says which they are.

    Raises a FilterFileError if the files belong to several filters, or if some are missing.
    """
    newest = files[-1]
    for file in files:
        if file.salt != newest.salt:
            raise FilterFileError(
                f"{file.path} and {newest.path} belong to different filters (their salts "
                "differ); nothing was changed: move away the files that do not belong here"
            )
    expected = range(newest.oldest, newest.number + 1)
    live = [file for file in files if file.number in expected]
    named = [(file.number, file.path.name) for file in live]
    if named != [(number, jobdir.file_name(number)) for number in expected]:
        raise FilterFileError(
            f"{path} does not hold all generations of the filter, numbers {expected[0]} "
            f"to {expected[-1]}; nothing was changed: restore the missing files, or move the "
            "others away to start with an empty filter"
        )
    return live


class _Stored(NamedTuple):
    """The headers and records of a filter, read and checked."""

    directory: Path
    files: Sequence[FileGeneration]
    records: LogRecords

    @classmethod
    def read(cls, directory: Path, fingerprinter: str) -> "_Stored":
        """Read the headers and the records; raises StorageError."""
        paths = jobdir.filter_files(directory)
        records = LogRecords.read(directory) if paths else LogRecords()
        if records.open:
            drop_cached_pages(*paths, *forgotten_file.files(directory))
        files = [FileGeneration.at(each) for each in paths]
        for file in files:
            if file.origin.fingerprinter != clip(fingerprinter):
                raise FingerprinterMismatchError.of(
                    file.path,
                    file.origin.fingerprinter,
                    fingerprinter,
                    "another JOBDIR or BLOOM_DIR",
                )
        return cls(directory, files, records)

    @property
    def name(self) -> Path | None:
        """The path of the newest file; None if there is no filter."""
        return self.files[-1].path if self.files else None

    @property
    def is_in_use(self) -> bool:
        """Whether a crawl under Scrapy's scheduler did not close it: its newest file says so."""
        return any(file.in_use for file in self.files)

    def set_aside(self) -> list[str]:
        """Rename the files; return their new paths."""
        # If the process dies in between, the next run continues, because the newest file and the
        # records move last.
        parts = [
            self.directory / forgotten_file.NAME,
            *(file.path for file in self.files),
            self.directory / LOGS_NAME,
        ]
        return [str(jobdir.set_aside(part)) for part in parts if part.exists()]

    def open(self) -> list[FilterFile]:
        """Open the live files, oldest first, and remove the others."""
        if not self.files:
            return []
        live = live_among(self.directory, self.files)
        with contextlib.ExitStack() as stack:
            opened = [
                stack.enter_context(contextlib.closing(FilterFile.open(file.path))) for file in live
            ]
            for expired in (each for each in self.files if each not in live):
                with contextlib.suppress(OSError):  # the next run tries again
                    expired.path.unlink()
            if self.is_in_use or self.records.open:
                # Each kill makes the stored count a little too low, which would add up.
                for file in opened:
                    file.count = max(file.count, file.filter.approximate_count)
            stack.pop_all()  # the files stay open
        return opened


class Opened(NamedTuple):
    """The open files of a filter."""

    files: list[FilterFile]  # live generations, oldest first; none if there is no filter
    importable: Path | None  # the job's requests.seen, if a new filter imports it
    records: LogRecords  # of the logs that used the filter
    fits_log: bool  # whether the filter and the log belong together


def open_files(path: Path, fingerprinter: str, job: Job, log: FilterLog | None = None) -> Opened:
    """Recover from an unclean end if there was one, and open the files of the live generations.

    Args:
        path: the directory, locked by the caller.
        fingerprinter: import path of the class that computes the fingerprints.
        job: the crawl's job directory.
        log: the log of the filter in that job, if it has one, opened and not begun.

    Raises:
        StorageError: a file is missing, unusable or of another fingerprinter. Nothing was changed.
    """
    try:
        stored = _Stored.read(path, fingerprinter)
        for draft in path.glob(f"{_FILES}.tmp"):  # left by a crash during the creation
            draft.unlink()
        importable = None
        if not stored.files and not jobdir.was_set_aside(path, _FILES):
            importable = job.importable()
        why, queue_lacks = _damage(stored, job, log)
        if _starts_over(stored, job, log, queue_lacks=queue_lacks):
            # If the process dies in between, the next run continues. Scrapy's queue is moved before
            # the filter, whose newest file has the in-use flag.
            moved = job.set_queue_aside() + stored.set_aside()
            stored, importable = _Stored(path, (), LogRecords()), None
            text = _STARTS_OVER if log is None else _STARTS_OVER_WITH_QUEUE
            logger.warning(text, why, ", ".join(moved))
        elif why and log is None:
            count = counted(sum(file.count for file in stored.files), "request")
            logger.warning(_KEPT_CRAWLED if job.only_crawled else _KEPT, why, count)
        elif why:
            logger.warning(_QUEUE_LACKS if queue_lacks else _FILTER_LACKS, why)
        elif log is not None and log.was_killed:
            logger.info(
                "The last run did not close %s: it was killed, or the machine went down. Queue and "
                "filter are complete: nothing is lost, and the requests that were in flight are "
                "crawled again",
                log.name,
            )
        return Opened(stored.open(), importable, stored.records, fits_log=not why)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be prepared for the crawl: {error}; fix the cause, or give the crawl "
            "another JOBDIR or BLOOM_DIR"
        ) from error


def _damage(stored: _Stored, job: Job, log: FilterLog | None) -> tuple[str, bool]:
    """Return what is wrong with a filter and its queue, as the beginning of a sentence.

    Returns:
        the text, empty if nothing is wrong; and whether the queue may lack requests that the filter
        has recorded.
    """
    has_filter, is_own = bool(stored.files), job.owns(stored.directory)
    is_in_use = stored.is_in_use  # by a run under Scrapy's scheduler
    if is_in_use or job.was_killed(has_own_filter=has_filter and is_own):
        cause = "it was killed, or ran out of memory, or the machine went down"
        if not is_in_use:
            cause += "; or the files were copied without their times (cp -a keeps them)"
        return f"The last run did not close {stored.name or job.path} ({cause})", True
    if log is None:
        return "", False
    return stored.records.misfit(log, has_filter=has_filter, is_own=is_own)


def _starts_over(stored: _Stored, job: Job, log: FilterLog | None, *, queue_lacks: bool) -> bool:
    """Decide whether a filter is set aside, so that requests that its queue lacks are crawled.

    Without a job, the queue was in memory, and the user wants to keep the filter. With a log, the
    filter may be that of other jobs, too.
    """
    is_of_job = job.path is not None if log is None else job.owns(stored.directory)
    return queue_lacks and is_of_job


_STARTS_OVER = (
    "%s, so the queued requests are lost, and the filter would report them as duplicates. The "
    "crawl starts over with an empty filter, so that pages are crawled again rather than lost. "
    "Set aside, not deleted: %s. With SCHEDULER = 'scrapy_bloom.CrashSafeScheduler', a job "
    "survives a kill"
)
_STARTS_OVER_WITH_QUEUE = (
    "%s: requests that the queue lacks would never be crawled, because the filter reports "
    "them as duplicates. The crawl starts over with an empty filter and the requests of the "
    "queue, so that pages are crawled again rather than lost. Set aside, not deleted: %s"
)
_KEPT = (
    "%s. The filter keeps the recorded requests (at least %s), so it reports the requests that "
    "were queued as duplicates, and they are never crawled. To crawl everything again, start over "
    "after `scrapy bloom reset`"
)
_KEPT_CRAWLED = (
    "%s. The filter keeps the requests that were crawled (at least %s). The requests that were "
    "queued are crawled where this run finds a link to them, so request list pages with "
    'meta={"bloom_filter": "run"}. (If the last run had BLOOM_RECORD_ON = "scheduled", the filter '
    "reports its queued requests as duplicates, and they are never crawled)"
)
_QUEUE_LACKS = (
    "%s: requests that the queue lacks are not crawled, because the filter reports them as "
    "duplicates. To crawl everything again, start over with another JOBDIR and another BLOOM_DIR"
)
_FILTER_LACKS = (
    "%s. No page is lost: requests that the filter lacks are crawled again where the crawl finds a "
    "link to them"
)


def filter_directory(path: Path) -> Path:
    """Return the directory of a filter's files: `bloom` in a job directory, or the path itself."""
    inner = path / "bloom"
    if not jobdir.filter_files(inner):
        return inner if jobdir.is_job(path) and not jobdir.filter_files(path) else path
    if jobdir.filter_files(path):
        raise StorageError(
            f"there is a filter in {path} and another in {inner}: a crawl uses the first if "
            f"{path} is its BLOOM_DIR, and the second if {path} is its JOBDIR. Give {inner} as the "
            "path, or move the unused filter away"
        )
    return inner


def found_files(path: Path) -> list[FileGeneration]:
    """Read the headers of a filter's live generations, oldest first, at least one.

    Args:
        path: a BLOOM_DIR, a JOBDIR with a filter, or one file of a filter.

    Raises:
        StorageError: there is no filter, or one of its files is unusable or missing.
    """
    if path.is_file():
        return [FileGeneration.at(path)]
    directory = filter_directory(path)
    # A crawl may remove expired files meanwhile; the second attempt finds the live ones.
    for is_last in (False, True):
        found = jobdir.filter_files(directory)
        if not found:
            break
        try:
            return live_among(directory, [FileGeneration.at(each) for each in found])
        except StorageError:
            if is_last:
                raise
    raise StorageError(
        f"{path} holds no filter; give a JOBDIR, a BLOOM_DIR, or one generation-*.bloom file of it"
        + ("" if path.exists() else " (there is no such file or directory)")
    )


class FilterReader:
    """A filter in files, mapped read-only: the reader locks and changes nothing.

    While a crawl runs, the reader sees the requests that are recorded later, but not those in later
    generations. `RedisReader` has the same methods.

    Args:
        path: a BLOOM_DIR, a JOBDIR with a filter, or one file of a filter.
        window: BLOOM_WINDOW_SECS of its crawls; 0: the files say when a generation expires.
        recent: changes that the log of a crawl has and the filter lacks: for each fingerprint,
            `forgets` of the latest change.

    Raises:
        StorageError: there is no filter, or one of its files is unusable or missing.
    """

    def __init__(
        self,
        path: Path,
        *,
        window: float = 0.0,
        recent: Mapping[bytes, bool | None] = MappingProxyType({}),
    ) -> None:
        with contextlib.ExitStack() as stack:
            self.files: Sequence[FilterFile] = [
                stack.enter_context(contextlib.closing(FilterFile.open(each.path, readonly=True)))
                for each in found_files(path)
            ]
            stack.pop_all()  # the files stay open
        self._recent = recent
        newest = self.files[-1]
        self.location = str(newest.path.parent)
        self.spider, self.fingerprinter = newest.origin.spider, newest.origin.fingerprinter
        self.error_rate = newest.origin.error_rate  # BLOOM_ERROR_RATE of the crawl that made it
        self.salt = newest.salt.hex()
        self.names = [file.path.name for file in self.files]
        self.generations = [file.figures for file in self.files]
        bits = [file.filter for file in unexpired(self.files, time.time(), window)]
        self._lookup = lookup = Lookup(bits) if bits else None
        self.generations[-1].count += sum(lookup is None or each not in lookup for each in recent)
        self.forgotten = ForgottenFile(newest.path.parent / forgotten_file.NAME, readonly=True)

    def are_seen(self, fingerprints: Sequence[bytes]) -> list[bool]:
        """Return which fingerprints a crawl would filter: recorded, and not forgotten."""
        recorded = self.are_recorded(fingerprints)
        if not (self.count_forgotten() or any(self._recent.values())):
            return recorded
        asked = zip(fingerprints, recorded, strict=True)
        return [is_recorded and not self._is_forgotten(each) for each, is_recorded in asked]

    def _is_forgotten(self, fingerprint: bytes) -> bool:
        is_forgotten = self._recent.get(fingerprint)
        return self.forgotten.has(fingerprint) if is_forgotten is None else is_forgotten

    def are_recorded(self, fingerprints: Sequence[bytes]) -> list[bool]:
        """Return which fingerprints are recorded, up to false positives."""
        lookup, recent = self._lookup, self._recent
        return [each in recent or (lookup is not None and each in lookup) for each in fingerprints]

    def block_fills(self) -> list[Iterator[float]]:
        """Return for each generation the share of set bits of each of its blocks, 0 to 1."""
        return [file.filter.block_fills() for file in self.files]

    def count_forgotten(self) -> int:
        """Return the number of forgotten requests."""
        changed = ((each, now) for each, now in self._recent.items() if now is not None)
        return len(self.forgotten) + sum(now - self.forgotten.has(each) for each, now in changed)

    @property
    def is_closed(self) -> bool | None:
        """Return whether the last crawl with the filter closed it."""
        return _is_closed(self.files)

    @property
    def is_in_use(self) -> bool | None:
        """Return whether a crawl uses the filter now; None if unknown."""
        found = jobdir.holders(self.files[-1].path.with_name(jobdir.LOCK_NAME))
        return None if found is None else bool(found)

    def close(self) -> None:
        """Unmap the files."""
        self.forgotten.close()
        for file in self.files:
            file.close()

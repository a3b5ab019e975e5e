"""Open the files of a filter for a crawl, or read them without changing anything."""

import contextlib
import logging
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from scrapy_bloom.exceptions import (
    FilterFileError,
    FingerprinterMismatchError,
    StorageError,
    UncleanShutdownError,
)
from scrapy_bloom.files.file import FileGeneration, FilterFile, clip
from scrapy_bloom.files.log import RECORD_NAME, FilterLog, LogRecord, contents, misfit
from scrapy_bloom.generations.memory import Lookup
from scrapy_bloom.job import jobdir
from scrapy_bloom.job.disk import drop_cached_pages
from scrapy_bloom.job.recovery import Job

logger = logging.getLogger(__name__)

_FILES = "generation-*.bloom"
SAMPLE_NAME = "sample.json"  # fingerprints of some requests


def other_files(directory: Path) -> list[Path]:
    """Return the files of a filter that are not generations."""
    names = [name + end for name in (SAMPLE_NAME, RECORD_NAME) for end in ("", ".tmp")]
    return [directory / name for name in names if (directory / name).exists()]


def read_sample(directory: Path) -> str:
    """Return the sample of a filter's fingerprints; an empty text if it cannot be read."""
    try:
        return contents(directory / SAMPLE_NAME).decode()
    except (OSError, StorageError, ValueError):
        return ""


def check_free(directory: Path) -> None:
    """Raise a StorageError if a crawl uses a filter or its job, or was killed with it.

    The directory of the filter need not exist.
    """
    if (directory / jobdir.LOCK_NAME).exists():
        # First, for the clearest message if a crawl runs.
        jobdir.lock_directory(directory).release()
    if files := jobdir.filter_files(directory):
        check_closed(directory, [FileGeneration.at(path) for path in files])
    job_dir = directory.parent
    if directory.name == "bloom" and Job(job_dir).was_killed(has_filter=bool(files)):
        raise UncleanShutdownError(
            f"the crawl with the job directory {job_dir} was killed: the filter would report the "
            "requests of its queue as duplicates, and they would never be crawled. Start that "
            "crawl again, and it will recover; or use another directory"
        )


def check_closed(path: Path, files: Sequence[FileGeneration]) -> None:
    """Raise an UncleanShutdownError if a crawl uses a filter, or was killed with it.

    Raises a StorageError if the record of the filter's log cannot be read.
    """
    if not _is_closed(files):
        raise UncleanShutdownError(
            f"{path} is in use by a crawl, or its last crawl did not close it: it may report "
            "requests as duplicates that were queued and never crawled. Wait for the crawl to end; "
            "or start it again, and it will recover"
        )


def _is_closed(files: Sequence[FileGeneration]) -> bool:
    """Return whether the last crawl with a filter closed it; raises StorageError."""
    record = LogRecord.read(files[-1].path.parent)
    return not any(file.in_use for file in files) and (record is None or not record.is_open)


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
    """The headers of a filter, and the record of its log, read and checked."""

    directory: Path
    files: Sequence[FileGeneration] = ()
    record: LogRecord | None = None

    @classmethod
    def read(cls, directory: Path, fingerprinter: str) -> "_Stored":
        """Read the headers and the record; raises StorageError."""
        paths = jobdir.filter_files(directory)
        record = LogRecord.read(directory) if paths else None
        if record is not None and record.is_open:
            drop_cached_pages(*paths)
        files = [FileGeneration.at(each) for each in paths]
        for file in files:
            if file.origin.fingerprinter != clip(fingerprinter):
                raise FingerprinterMismatchError.of(
                    file.path,
                    file.origin.fingerprinter,
                    fingerprinter,
                    "another JOBDIR",
                )
        return cls(directory, files, record)

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
        # If the process dies in between, the next one continues, because the newest file and the
        # record move last.
        parts = [*(file.path for file in self.files), self.directory / RECORD_NAME]
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
            if self.record is not None and self.record.is_open:
                # Each kill makes the stored count a little too low, which would add up.
                for file in opened:
                    file.count = max(file.count, file.filter.approximate_count)
            stack.pop_all()  # the files stay open
        return opened


class Opened(NamedTuple):
    """The open files of a filter."""

    files: list[FilterFile]  # live generations, oldest first; none if there is no filter
    importable: Path | None  # the job's requests.seen, if a new filter imports it
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
        if queue_lacks:
            # If the process dies in between, the next one continues. Scrapy's queue is moved before
            # the filter, whose newest file has the in-use flag.
            moved = job.set_queue_aside() + stored.set_aside()
            stored, importable = _Stored(path), None
            text = _STARTS_OVER if log is None else _STARTS_OVER_WITH_QUEUE
            logger.warning(text, why, ", ".join(moved))
        elif why:
            logger.warning(_FILTER_LACKS, why)
        elif log is not None and log.was_killed:
            logger.info(
                "The last process did not close %s: it was killed, or the machine went down. Queue "
                "and filter are complete: nothing is lost, and the requests that were in flight "
                "are crawled again",
                log.name,
            )
        return Opened(stored.open(), importable, fits_log=not why)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be prepared for the crawl: {error}; fix the cause, or give the crawl "
            "another JOBDIR"
        ) from error


def _damage(stored: _Stored, job: Job, log: FilterLog | None) -> tuple[str, bool]:
    """Return what is wrong with a filter and its queue, as the beginning of a sentence.

    Returns:
        the text, empty if nothing is wrong; and whether the queue may lack requests that the filter
        has recorded.
    """
    is_in_use = stored.is_in_use  # by a run under Scrapy's scheduler
    if is_in_use or job.was_killed(has_filter=bool(stored.files)):
        cause = "it was killed, or ran out of memory, or the machine went down"
        if not is_in_use:
            cause += "; or the files were copied without their times (cp -a keeps them)"
        return f"The last process did not close {stored.name or job.path} ({cause})", True
    return ("", False) if log is None else misfit(stored.record, log)


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
            f"there is a filter in {path} and another in {inner}: a crawl with JOBDIR = {path} "
            f"uses the second. Give {inner} as the path, or move the unused filter away"
        )
    return inner


def found_files(path: Path) -> list[FileGeneration]:
    """Read the headers of a filter's live generations, oldest first, at least one.

    Args:
        path: a JOBDIR with a filter, or a directory with the files of a filter.

    Raises:
        StorageError: there is no filter, or one of its files is unusable or missing.
    """
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
        f"{path} holds no filter; give a JOBDIR, or a directory with the files of a filter"
        + ("" if path.exists() else " (there is no such file or directory)")
    )


class FilterReader:
    """A filter in files, mapped read-only: the reader locks and changes nothing.

    While a crawl runs, the reader sees the requests that are recorded later, but not those in later
    generations. `RedisReader` has the same methods.

    Args:
        path: a JOBDIR with a filter, or a directory with the files of a filter.
        recent: fingerprints that the log of a crawl has, and that the filter may lack.

    Raises:
        StorageError: there is no filter, or one of its files is unusable or missing.
    """

    def __init__(self, path: Path, *, recent: Collection[bytes] = frozenset()) -> None:
        with contextlib.ExitStack() as stack:
            self.files: Sequence[FilterFile] = [
                stack.enter_context(contextlib.closing(FilterFile.open(each.path, readonly=True)))
                for each in found_files(path)
            ]
            stack.pop_all()  # the files stay open
        self._recent = recent
        newest = self.files[-1]
        self.location = str(newest.path.parent.absolute())
        self.spider, self.fingerprinter = newest.origin.spider, newest.origin.fingerprinter
        self.error_rate = newest.origin.error_rate  # BLOOM_ERROR_RATE of the crawl that made it
        self.salt = newest.salt.hex()
        self.names = [file.path.name for file in self.files]
        self.generations = [file.figures for file in self.files]
        self._lookup = lookup = Lookup([file.filter for file in self.files])
        self.generations[-1].count += sum(each not in lookup for each in recent)

    def are_seen(self, fingerprints: Sequence[bytes]) -> list[bool]:
        """Return which fingerprints are recorded, with false positives."""
        lookup, recent = self._lookup, self._recent
        return [each in recent or each in lookup for each in fingerprints]

    def block_fills(self) -> list[Iterator[float]]:
        """Return for each generation the share of set bits of each of its blocks, 0 to 1."""
        return [file.filter.block_fills() for file in self.files]

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
        for file in self.files:
            file.close()

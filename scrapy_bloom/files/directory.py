"""The directory with the files of one filter: opened for a crawl, or read without any change."""

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
from scrapy_bloom.job import paths as jobdir
from scrapy_bloom.job.disk import read_anew
from scrapy_bloom.job.locks import LOCK_NAME, holders, lock_directory
from scrapy_bloom.job.paths import file_name, filter_files, is_job
from scrapy_bloom.job.recovery import Damage, Job, UncleanEnd

logger = logging.getLogger(__name__)

_FILES = "generation-*.bloom"


def parts_beside(directory: Path) -> list[Path]:
    """Return the files that a filter's directory has beside those of its generations."""
    records = directory / LOGS_NAME
    notes = [each for each in (records, records.with_name(f"{records.name}.tmp")) if each.exists()]
    return [*forgotten_file.files(directory), *notes]


def check_free(directory: Path, *, is_locked: bool = False) -> None:
    """Check that no crawl uses a filter or its job, and none was killed; or raise a StorageError.

    The directory of the filter need not exist. With `is_locked`, the caller has its lock.
    """
    if not is_locked and (directory / LOCK_NAME).exists():
        lock_directory(directory).release()  # first: it says best that a crawl is running
    if files := filter_files(directory):
        check_closed(directory, [FileGeneration.at(path) for path in files])
    job_dir = directory.parent
    if directory.name == "bloom" and Job(job_dir).was_killed(has_filter=bool(files)):
        raise UncleanShutdownError(
            f"the crawl with the job directory {job_dir} was killed: the filter would report the "
            "requests of its queue as duplicates, and they would never be crawled. Start that "
            "crawl once more, and it will recover; or use another directory"
        )


def check_closed(path: Path, files: Sequence[FileGeneration]) -> None:
    """Raise an UncleanShutdownError if a crawl uses a filter, or was killed with it.

    Raises a StorageError if that cannot be known.
    """
    if any(file.in_use for file in files) or LogRecords.read(files[-1].path.parent).open:
        raise UncleanShutdownError(
            f"{path} is in use by a crawl, or was not closed by its last one: it reports requests "
            "as duplicates that were queued then, and never crawled. Wait for the crawl to end; or "
            "start it once more, and it will recover"
        )


def live_among(path: Path, files: Sequence[FileGeneration]) -> list[FileGeneration]:
    """Return the live files of a directory, as the newest header says; there is at least one.

    Raises a FilterFileError if they are of several filters, or some are missing.
    """
    newest = files[-1]
    for file in files:
        if file.salt != newest.salt:
            raise FilterFileError(
                f"{file.path} and {newest.path} belong to different filters (their salts "
                "differ); nothing was changed: move away those that do not belong here"
            )
    expected = range(newest.oldest, newest.number + 1)
    live = [file for file in files if file.number in expected]
    named = [(file.number, file.path.name) for file in live]
    if named != [(number, file_name(number)) for number in expected]:
        raise FilterFileError(
            f"{path} does not hold all generations of the filter, numbers {expected[0]} "
            f"to {expected[-1]}; nothing was changed: restore the files that are missing, or "
            "move the others away to start with an empty filter"
        )
    return live


class _Stored(NamedTuple):
    """The files of a filter, read and checked, and not opened."""

    directory: Path
    files: Sequence[FileGeneration]
    records: LogRecords

    @classmethod
    def read(cls, directory: Path, fingerprinter: str) -> "_Stored":
        """Read the headers and the records; raises StorageError, or one of its children."""
        paths = filter_files(directory)
        records = LogRecords.read(directory) if paths else LogRecords()
        if records.open:
            read_anew(*paths, *forgotten_file.files(directory))
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
        """Whether a crawl under Scrapy's scheduler has not closed it."""
        return any(file.in_use for file in self.files)

    def set_aside(self) -> list[str]:
        """Rename the files; return their new paths."""
        # If the process dies in between, the next run continues: what shows that is moved last.
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
                # Each kill costs a little of the counts: left alone, that adds up over many.
                for file in opened:
                    file.count = max(file.count, file.filter.approximate_count)
            stack.pop_all()  # they stay open
        return opened


class Opened(NamedTuple):
    """The open files of a filter."""

    files: list[FilterFile]  # live ones, oldest first; none if there is no filter (any more)
    importable: Path | None  # the job's requests.seen, if a new filter shall begin with it
    records: LogRecords
    fits_log: bool  # the filter and the log belong together


def open_files(path: Path, fingerprinter: str, job: Job, log: FilterLog | None = None) -> Opened:
    """Open the files of the live generations, after recovery from an unclean end.

    Args:
        path: the directory; it is locked.
        fingerprinter: import path of what makes the fingerprints.
        job: the crawl's job directory. It says what to do with a filter that its last run did not
            close.
        log: of the filter in that job, if it has one, opened and not begun.

    Raises:
        StorageError: or one of its children: a file is missing, unusable or of another
            fingerprinter, or was not closed and shall be looked at. All is then as it was.
    """
    try:
        stored = _Stored.read(path, fingerprinter)
        for draft in path.glob(f"{_FILES}.tmp"):  # of a crash while it was made
            draft.unlink()
        is_new = not stored.files and not jobdir.was_set_aside(path, _FILES)
        importable = job.importable() if is_new else None
        if end := _unclean_end(stored, job, log):
            starts_over = job.starts_over(end)
            # If the process dies in between, the next run continues: Scrapy's queue is moved before
            # the filter, which has the in-use flag. A log is moved after the filter is empty.
            moved = job.set_queue_aside() if log is None else []
            if starts_over:
                moved += stored.set_aside()
                stored, importable = _Stored(path, (), LogRecords()), None
                if log is not None and job.on_unclean_shutdown == "reset":
                    moved.append(log.start_over())
            job.log_recovery(end, moved, starts_over=starts_over)
            if starts_over and log is None:
                job.end()
        fits_log = end is None or end.damage is Damage.NONE
        return Opened(stored.open(), importable, stored.records, fits_log)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be prepared for the crawl: {error}; make that possible, or "
            "give the crawl another JOBDIR or BLOOM_DIR"
        ) from error


def _unclean_end(stored: _Stored, job: Job, log: FilterLog | None) -> UncleanEnd | None:
    """Return how the last run with a filter ended, unless that was a clean close."""
    has_filter, is_own = bool(stored.files), log is not None and job.owns(stored.directory)
    if stored.is_in_use or job.was_killed(has_filter=has_filter):  # with Scrapy's scheduler
        if log is not None:
            return job.unclean_end(stored.name, None, Damage.QUEUE, may_reset=is_own)
        count = sum(file.count for file in stored.files) if has_filter else None
        return job.unclean_end(stored.name, count)
    if log is None:
        return None
    misfit = stored.records.misfit(log, has_filter=has_filter, is_own=is_own)
    if misfit is None and log.was_killed:
        what = f"The last run did not close {log.name}: it was killed, or the machine went down"
        return UncleanEnd(what, Damage.NONE, may_reset=is_own)
    return misfit


def filter_directory(path: Path) -> Path:
    """Return where a filter's files are, or go: the `bloom` of a job directory, or the path."""
    inner = path / "bloom"
    if not filter_files(inner):
        has_inner = is_job(path) or draft_directory(inner).exists()
        return inner if has_inner and not filter_files(path) else path
    if filter_files(path):
        raise StorageError(
            f"there is a filter in {path} and another in {inner}: a crawl uses the first one if "
            f"{path} is its BLOOM_DIR, the second one if that is its JOBDIR. Say {inner}, or move "
            "the one away that is not used"
        )
    return inner


def draft_directory(directory: Path) -> Path:
    """Return where the files of a copy are before all of them are there."""
    return directory / "unfinished-copy"


def found_files(path: Path) -> list[FileGeneration]:
    """Read the headers of a filter's live generations, oldest first, at least one.

    Args:
        path: a filter directory (a BLOOM_DIR), a job directory with one, or one file.

    Raises:
        StorageError: there is no filter, or one of its files is unusable or missing.
    """
    if path.is_file():
        return [FileGeneration.at(path)]
    directory = filter_directory(path)
    # A crawl may just remove files that are over; those that count are found the next time.
    for is_last in (False, True):
        found = filter_files(directory)
        if not found:
            break
        try:
            return live_among(directory, [FileGeneration.at(each) for each in found])
        except StorageError:
            if is_last:
                raise
    if draft_directory(directory).exists():
        raise StorageError(
            f"{path} holds no filter, but the beginning of a copy that was interrupted: repeat the "
            "scrapy bloom pull, merge or import; or remove it with scrapy bloom reset"
        )
    raise StorageError(
        f"{path} holds no filter; give a JOBDIR, a BLOOM_DIR, or one generation-*.bloom file of it"
        + ("" if path.exists() else " (there is no such file or directory)")
    )


def forgotten_beside(path: Path) -> ForgottenFile:
    """Return the forgotten requests of a filter, read only; for the path, see `found_files`."""
    directory = path.parent if path.is_file() else filter_directory(path)
    return ForgottenFile(directory / forgotten_file.NAME, readonly=True)


class FilterReader:
    """A filter in files, mapped for reading only: nothing is locked, nothing changes.

    While a crawl runs, it sees what is recorded later, too, but not in later generations.
    `RedisReader` has the same methods.

    Args:
        path: see `found_files`, which may raise.
        window: BLOOM_WINDOW_SECS of its crawls; 0: as the files tell.
        recent: changes that the log of a crawl has and the filter lacks: of each fingerprint the
            latest `Change.forgets`.
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
            stack.pop_all()  # they stay open
        self._recent = recent
        newest = self.files[-1]
        self.location = str(newest.path.parent)
        self.spider, self.fingerprinter = newest.origin.spider, newest.origin.fingerprinter
        self.error_rate = newest.origin.error_rate  # as asked for
        self.salt = newest.salt.hex()
        self.names = [file.path.name for file in self.files]
        self.generations = [file.figures for file in self.files]
        bits = [file.filter for file in unexpired(self.files, time.time(), window)]
        self._lookup = lookup = Lookup(bits) if bits else None
        self.generations[-1].count += sum(lookup is None or each not in lookup for each in recent)
        self.forgotten = forgotten_beside(path)

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
        """Return which fingerprints are recorded, or seem to be, at the error rate."""
        lookup, recent = self._lookup, self._recent
        return [each in recent or (lookup is not None and each in lookup) for each in fingerprints]

    def block_fills(self) -> list[Iterator[float]]:
        """Return for each generation the share of set bits of each of its blocks, 0 to 1."""
        return [file.filter.block_fills() for file in self.files]

    def count_forgotten(self) -> int:
        """Count the requests that are to be crawled again."""
        changed = ((each, now) for each, now in self._recent.items() if now is not None)
        return len(self.forgotten) + sum(now - self.forgotten.has(each) for each, now in changed)

    def is_closed(self) -> bool | None:
        """Check that the last crawl with the filter has closed it."""
        directory = self.files[-1].path.parent
        return not (any(file.in_use for file in self.files) or LogRecords.read(directory).open)

    def is_in_use(self) -> bool | None:
        """Check whether a crawl has the filter now; None where that cannot be told."""
        found = holders(self.files[-1].path.with_name(LOCK_NAME))
        return None if found is None else bool(found)

    def close(self) -> None:
        """Unmap the files."""
        self.forgotten.close()
        for file in self.files:
            file.close()

"""A directory with the files of one filter: which of them count, and what a crash left."""

import contextlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from scrapy_bloom.exceptions import (
    FilterFileError,
    FingerprinterMismatchError,
    StorageError,
    UncleanShutdownError,
)
from scrapy_bloom.files import forgotten as forgotten_file
from scrapy_bloom.files.header import FileGeneration, clip
from scrapy_bloom.files.journal import Journal, read_journal, remove_journal
from scrapy_bloom.files.mapping import FilterFile
from scrapy_bloom.job import paths as jobdir
from scrapy_bloom.job.locks import LOCK_NAME, lock_directory
from scrapy_bloom.job.recovery import Job
from scrapy_bloom.job.sqlite_files import sync_log

_FILES = "generation-*.bloom"


def check_free(directory: Path, *, is_locked: bool = False) -> None:
    """Check that no crawl uses a filter or its job, and none was killed; or raise a StorageError.

    The directory of the filter need not exist. With `is_locked`, the caller has its lock.
    """
    if not is_locked and (directory / LOCK_NAME).exists():
        lock_directory(directory).release()  # first: it says best that a crawl is running
    if files := jobdir.filter_files(directory):
        check_closed(directory, [FileGeneration.at(path) for path in files])
    job_dir = directory.parent
    if directory.name == "bloom" and Job(job_dir, "stop").was_killed(has_filter=bool(files)):
        raise UncleanShutdownError(
            f"the crawl with the job directory {job_dir} was killed: what its queue held would "
            "look crawled. Start it once more, and it will say what becomes of it; or take "
            "another directory"
        )


def check_closed(path: Path, files: Sequence[FileGeneration]) -> None:
    """Raise an UncleanShutdownError if a crawl uses a filter, or was killed with it."""
    if any(file.in_use for file in files):
        raise UncleanShutdownError(
            f"{path} is in use by a crawl, or was not closed by its last one: requests that were "
            "queued then would look crawled. Wait for the crawl to end; or start it once more, "
            "and it will say what becomes of the filter"
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
    if named != [(number, jobdir.file_name(number)) for number in expected]:
        raise FilterFileError(
            f"{path} does not hold all generations of the filter, numbers {expected[0]} "
            f"to {expected[-1]}; nothing was changed: restore the files that are missing, or "
            "move the others away to start with an empty filter"
        )
    return live


class Opened(NamedTuple):
    """The open files of a filter."""

    files: list[FilterFile]  # live ones, oldest first; none if there is no filter (any more)
    journal: Journal | None  # records first, if the job has a queue that survives
    importable: Path | None  # the job's requests.seen, if a new filter shall begin with it


def open_files(path: Path, fingerprinter: str, job: Job) -> Opened:
    """Open the files of the live generations, once a kill is dealt with.

    Args:
        path: the directory; it is locked.
        fingerprinter: import path of what makes the fingerprints.
        job: the crawl's job directory. It says what to do with a filter that its last run did not
            close.

    Raises:
        StorageError: or one of its children: a file is missing, unusable or of another
            fingerprinter, or was not closed and shall be looked at. All is then as it was.
    """
    try:
        found = [FileGeneration.at(each) for each in jobdir.filter_files(path)]
        for file in found:
            _check_fingerprinter(file, fingerprinter)
        for draft in path.glob(f"{_FILES}.tmp"):  # of a crash while it was made
            draft.unlink()
        is_new = not found and not jobdir.was_set_aside(path, _FILES)
        importable = job.importable() if is_new else None
        is_unclean = _is_unclean(found, job)
        if is_unclean and _set_aside_unclean(path, found, job):
            found, importable = [], None
        live = live_among(path, found) if found else []
        with contextlib.ExitStack() as stack:
            opened = [
                stack.enter_context(contextlib.closing(FilterFile.open(file.path))) for file in live
            ]
            for file in (each for each in found if each not in live):
                with contextlib.suppress(OSError):  # the next run tries again
                    file.path.unlink()
            if is_unclean and opened:
                _restore(path, opened[-1], job)
            remove_journal(path)
            journal = Journal(path, partial(sync_queue, path, job)) if job.database else None
            stack.pop_all()  # they stay open
    except OSError as error:
        raise StorageError(
            f"{path} cannot be prepared for the crawl: {error}; make that possible, or "
            "give the crawl another JOBDIR or BLOOM_DIR"
        ) from error
    return Opened(opened, journal, importable)


def sync_queue(path: Path, job: Job) -> None:
    """Write what is forgotten to the disk, and the job's queue after it; see `Job`.

    A failed request is removed from the queue once it is forgotten.
    """
    sync_log(path / forgotten_file.NAME)
    job.sync_queue()


def _restore(path: Path, newest: FilterFile, job: Job) -> None:
    """Record what a killed run kept in its journal, and count what it had not."""
    # Otherwise the queue on the disk may be older: then rather crawled twice than never.
    if job.was_machine_restarted is False:
        recent = read_journal(path) or ()
        sync_queue(path, job)
        for fingerprint in recent:
            newest.filter.add(fingerprint)
    # Each kill costs a little of the count: left alone, that adds up over many.
    newest.count = max(newest.count, newest.filter.approximate_count)


def _is_unclean(files: Sequence[FileGeneration], job: Job) -> bool:
    return (
        any(file.in_use for file in files)
        or (job.is_queue_lost and any(file.count for file in files))  # its requests look seen
        or job.was_killed(has_filter=bool(files))
    )


def _check_fingerprinter(file: FileGeneration, fingerprinter: str) -> None:
    if file.origin.fingerprinter != clip(fingerprinter):
        raise FingerprinterMismatchError.of(
            file.path, file.origin.fingerprinter, fingerprinter, "another JOBDIR or BLOOM_DIR"
        )


def _set_aside_unclean(path: Path, files: Sequence[FileGeneration], job: Job) -> bool:
    """Deal with a filter or job that was not closed; return whether it was set aside."""
    # The newest file, which says that it is in use, last.
    parts = [path / forgotten_file.NAME, *(file.path for file in files)]
    return job.recover(
        parts[-1] if files else None,
        sum(file.count for file in files) if files else None,
        lambda: [str(jobdir.set_aside(part)) for part in parts if part.exists()],
        is_behind_queue=read_journal(path) is not None,
    )

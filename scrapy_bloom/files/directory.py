"""A directory with the files of one filter: which of them count, and what a crash left."""

import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from scrapy_bloom.exceptions import (
    FilterFileError,
    FingerprinterMismatchError,
    StorageError,
    UncleanShutdownError,
)
from scrapy_bloom.files import forgotten as forgotten_file
from scrapy_bloom.files import log_records
from scrapy_bloom.files.header import FileGeneration, clip
from scrapy_bloom.files.log import FilterLog
from scrapy_bloom.files.log_records import LogRecords, Misfit
from scrapy_bloom.files.mapping import FilterFile
from scrapy_bloom.job import paths as jobdir
from scrapy_bloom.job.locks import LOCK_NAME, lock_directory
from scrapy_bloom.job.recovery import Job

logger = logging.getLogger(__name__)

_FILES = "generation-*.bloom"


def parts_beside(directory: Path) -> list[Path]:
    """Return the files that a filter's directory has beside those of its generations."""
    records = directory / log_records.NAME
    notes = [each for each in (records, records.with_name(f"{records.name}.tmp")) if each.exists()]
    return [*forgotten_file.files(directory), *notes]


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
    """Raise an UncleanShutdownError if a crawl uses a filter, or was killed with it.

    Raises a StorageError if that cannot be known.
    """
    # With a log, the header may not be on the disk when the power fails.
    if any(file.in_use for file in files) or LogRecords.read(files[-1].path.parent).open:
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
    importable: Path | None  # the job's requests.seen, if a new filter shall begin with it
    records: LogRecords
    misfit: Misfit | None  # of the filter and the log, which are used all the same


def open_files(path: Path, fingerprinter: str, job: Job, log: FilterLog | None = None) -> Opened:
    """Open the files of the live generations, once a kill is dealt with.

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
        found = [FileGeneration.at(each) for each in jobdir.filter_files(path)]
        for file in found:
            _check_fingerprinter(file, fingerprinter)
        records = LogRecords.read(path) if found else LogRecords()
        is_own = job.path is not None and path.parent == job.path
        misfit = records.misfit(log, has_filter=bool(found), is_own=is_own) if log else None
        for draft in path.glob(f"{_FILES}.tmp"):  # of a crash while it was made
            draft.unlink()
        is_new = not found and not jobdir.was_set_aside(path, _FILES)
        importable = job.importable() if is_new else None
        is_unclean = any(file.in_use for file in found)
        # With an open log, that is no loss.
        was_killed = (is_unclean and not records.open) or job.was_killed(has_filter=bool(found))
        if log is not None and not is_own:  # no BLOOM_DIR is set aside by itself: others use it
            job = Job(None, job.on_unclean_shutdown)
        if was_killed and _set_aside_unclean(path, found, job):
            found, importable, records = [], None, LogRecords()
            misfit = records.misfit(log, has_filter=False, is_own=is_own) if log else None
        elif (
            log is not None
            and (misfit or log.was_killed)
            and _recover_log(log, misfit, job, _aside(path, found), is_own=is_own)
        ):
            found, importable, records = [], None, LogRecords()
        live = live_among(path, found) if found else []
        with contextlib.ExitStack() as stack:
            opened = [
                stack.enter_context(contextlib.closing(FilterFile.open(file.path))) for file in live
            ]
            for over in (each for each in found if each not in live):
                with contextlib.suppress(OSError):  # the next run tries again
                    over.path.unlink()
            if is_unclean or records.open:
                # Each kill costs a little of the counts: left alone, that adds up over many.
                for file in opened:
                    file.count = max(file.count, file.filter.approximate_count)
            stack.pop_all()  # they stay open
    except OSError as error:
        raise StorageError(
            f"{path} cannot be prepared for the crawl: {error}; make that possible, or "
            "give the crawl another JOBDIR or BLOOM_DIR"
        ) from error
    return Opened(opened, importable, records, misfit)


def _recover_log(
    log: FilterLog,
    misfit: Misfit | None,
    job: Job,
    set_aside: Callable[[], list[str]],
    *,
    is_own: bool,
) -> bool:
    """Say what becomes of a job that was killed, or whose log and filter do not belong together.

    Returns:
        Whether the filter is out of the way now.

    Raises:
        UncleanShutdownError: the settings say "stop"; all is as it was.
    """
    what = (
        misfit.why
        if misfit
        else f"The last run did not close {log.name}: it was killed, or the machine went down"
    )
    if job.on_unclean_shutdown == "stop":
        raise UncleanShutdownError(
            f'{what}; BLOOM_ON_UNCLEAN_SHUTDOWN is "stop", so nothing was changed: set it to '
            '"auto" to resume the crawl, or to "reset" to set queue and filter aside and to crawl '
            "everything again"
        )
    if job.on_unclean_shutdown == "reset":
        # The queue last: if we die in between, the filter is empty, and nothing is lost.
        moved = ", ".join([*set_aside(), log.start_over()])
        logger.warning(
            "%s. The crawl starts over with an empty queue and an empty filter. Set aside, not "
            "deleted: %s",
            what,
            moved,
        )
        return True
    if misfit is None:
        logger.info(
            "%s. Queue and filter are complete: nothing is lost, and the requests that were in "
            "flight are crawled again",
            what,
        )
        return False
    if not misfit.log_is_older:
        logger.warning(
            "%s. No page is lost: pages that the filter does not know are crawled again where a "
            "link to them is found",
            what,
        )
        return False
    if is_own and job.on_unclean_shutdown == "auto":
        logger.warning(
            "%s: requests that are missing in the queue would never be crawled, since the filter "
            "reports them as duplicates. The crawl starts over with an empty filter and the "
            "requests of the queue, so pages are crawled again rather than lost. Set aside, not "
            "deleted: %s",
            what,
            ", ".join(set_aside()),
        )
        return True
    logger.warning(
        "%s: requests that are missing in the queue are not crawled, since the filter reports "
        'them as duplicates. To crawl everything again, set BLOOM_ON_UNCLEAN_SHUTDOWN = "reset", '
        "or start over with another JOBDIR and another BLOOM_DIR",
        what,
    )
    return False


def _check_fingerprinter(file: FileGeneration, fingerprinter: str) -> None:
    if file.origin.fingerprinter != clip(fingerprinter):
        raise FingerprinterMismatchError.of(
            file.path, file.origin.fingerprinter, fingerprinter, "another JOBDIR or BLOOM_DIR"
        )


def _set_aside_unclean(path: Path, files: Sequence[FileGeneration], job: Job) -> bool:
    """Deal with a filter or job that was not closed; return whether it was set aside."""
    return job.recover(
        files[-1].path if files else None,
        sum(file.count for file in files) if files else None,
        _aside(path, files),
    )


def _aside(path: Path, files: Sequence[FileGeneration]) -> Callable[[], list[str]]:
    """Return what sets the files of a filter aside, and returns where they are then."""
    # If we die in between, the next run goes on with this: what shows that it has to is moved last.
    parts = [path / forgotten_file.NAME, *(file.path for file in files), path / log_records.NAME]
    return lambda: [str(jobdir.set_aside(part)) for part in parts if part.exists()]

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
from scrapy_bloom.job.disk import read_anew
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
    if directory.name == "bloom" and Job(job_dir).was_killed(has_filter=bool(files)):
        raise UncleanShutdownError(
            f"the crawl with the job directory {job_dir} was killed: what its queue held would "
            "look crawled. Start it once more, and it will say what becomes of it; or take "
            "another directory"
        )


def check_closed(path: Path, files: Sequence[FileGeneration]) -> None:
    """Raise an UncleanShutdownError if a crawl uses a filter, or was killed with it.

    Raises a StorageError if that cannot be known.
    """
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
        files = jobdir.filter_files(path)
        records = LogRecords.read(path) if files else LogRecords()
        if records.open:
            read_anew(*files, *forgotten_file.files(path))
        found = [FileGeneration.at(each) for each in files]
        for file in found:
            _check_fingerprinter(file, fingerprinter)
        for draft in path.glob(f"{_FILES}.tmp"):  # of a crash while it was made
            draft.unlink()
        is_new = not found and not jobdir.was_set_aside(path, _FILES)
        importable = job.importable() if is_new else None
        is_unclean = any(file.in_use for file in found)
        was_killed = is_unclean or job.was_killed(has_filter=bool(found))
        set_aside = _aside(path, found)
        name, misfit = found[-1].path if found else None, None
        if log is not None:
            is_own = job.owns(path)
            misfit = records.misfit(log, has_filter=bool(found), is_own=is_own)
            if was_killed:  # with Scrapy's queue
                misfit = Misfit(job.not_closed(name))
            is_away = _recover_log(log, misfit, job, set_aside, is_own=is_own)
        else:
            count = sum(file.count for file in found) if found else None
            is_away = was_killed and job.recover(name, count, set_aside)
        if is_away:
            found, importable, records = [], None, LogRecords()
        opened = _opened(path, found, is_unclean=is_unclean or bool(records.open)) if found else []
    except OSError as error:
        raise StorageError(
            f"{path} cannot be prepared for the crawl: {error}; make that possible, or "
            "give the crawl another JOBDIR or BLOOM_DIR"
        ) from error
    return Opened(opened, importable, records, misfit)


def _opened(path: Path, found: Sequence[FileGeneration], *, is_unclean: bool) -> list[FilterFile]:
    """Open the files that are live, and remove the others."""
    live = live_among(path, found)
    with contextlib.ExitStack() as stack:
        opened = [
            stack.enter_context(contextlib.closing(FilterFile.open(file.path))) for file in live
        ]
        for over in (each for each in found if each not in live):
            with contextlib.suppress(OSError):  # the next run tries again
                over.path.unlink()
        if is_unclean:
            # Each kill costs a little of the counts: left alone, that adds up over many.
            for file in opened:
                file.count = max(file.count, file.filter.approximate_count)
        stack.pop_all()  # they stay open
    return opened


def _recover_log(
    log: FilterLog,
    misfit: Misfit | None,
    job: Job,
    set_aside: Callable[[], list[str]],
    *,
    is_own: bool,
) -> bool:
    """Deal with a job that was killed, or whose log and filter do not belong together, if any.

    Returns:
        Whether the filter is out of the way now.

    Raises:
        UncleanShutdownError: the settings say "stop"; all is as it was.
    """
    if misfit is None and not log.was_killed:
        return False
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


def _aside(path: Path, files: Sequence[FileGeneration]) -> Callable[[], list[str]]:
    """Return what sets the files of a filter aside, and returns where they are then."""
    # If we die in between, the next run goes on with this: what shows that it has to is moved last.
    parts = [path / forgotten_file.NAME, *(file.path for file in files), path / log_records.NAME]
    return lambda: [str(jobdir.set_aside(part)) for part in parts if part.exists()]

"""A directory with the files of one filter: its lock, its generations, and what a crash left."""

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from scrapy_bloom.exceptions import (
    FilterFileError,
    FingerprinterMismatchError,
    StorageError,
    UncleanShutdownError,
)
from scrapy_bloom.files import forgotten as forgotten_file
from scrapy_bloom.files.header import Header, State, clip
from scrapy_bloom.files.journal import Journal, read_journal, remove_journal
from scrapy_bloom.files.mapping import FilterFile, FoundFile
from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.job import paths as jobdir
from scrapy_bloom.job.locks import Lock, lock_directory
from scrapy_bloom.job.paths import file_name, filter_files
from scrapy_bloom.job.recovery import Job
from scrapy_bloom.job.sqlite_files import sync_log

_FILES = "generation-*.bloom"


def check_free(directory: Path) -> None:
    """Check that no crawl uses a filter or its job, and none was killed.

    Args:
        directory: of the filter; it need not exist.

    Raises:
        LockedError: a crawl runs.
        UncleanShutdownError: one was killed: what its queue held would look crawled.
        StorageError: a file is unusable.
    """
    newest = None
    if files := filter_files(directory):
        lock_directory(directory).release()  # first: it says best that a crawl is running
        check_closed(directory, [FoundFile.at(path).state for path in files])
        newest = files[-1].stat().st_mtime
    job_dir = directory.parent
    if directory.name == "bloom" and Job(job_dir, "stop").was_killed(newest):
        raise UncleanShutdownError(
            f"the crawl with the job directory {job_dir} was killed: what its queue held would "
            "look crawled. Start it once more, and it will say what becomes of it; or take "
            "another directory"
        )


def check_closed(path: Path, states: Sequence[State]) -> None:
    """Check that no crawl uses a filter, and none was killed.

    Raises:
        UncleanShutdownError: not so.
    """
    if any(state.in_use for state in states):
        raise UncleanShutdownError(
            f"{path} is in use by a crawl, or was not closed by its last one: requests that were "
            "queued then would look crawled. Wait for the crawl to end; or start it once more, "
            "and it will say what becomes of the filter"
        )


def set_changed_at(path: Path, when: float = 0.0) -> None:
    """Set the time at which a crawl has last written to a filter's file; 0: none has yet.

    A job's last run is known by it: see `Job.was_killed`.
    """
    with contextlib.suppress(OSError):
        os.utime(path, (when, when))


def divide(path: Path, files: Sequence[FoundFile]) -> tuple[list[FoundFile], list[FoundFile]]:
    """Divide files into those that count and those that the newest one's header says are over.

    Args:
        path: the directory.
        files: all of it, oldest first, at least one.

    Raises:
        FilterFileError: they are not all of one filter, or some are missing.
    """
    newest = files[-1]
    for file in files:
        if file.header.salt != newest.header.salt:
            raise FilterFileError(
                f"{file.path} and {newest.path} belong to different filters (their salts "
                "differ); nothing was changed: move away those that do not belong here"
            )
    expected = range(newest.state.oldest, newest.header.generation + 1)
    live = [file for file in files if file.header.generation in expected]
    named = [(file.header.generation, file.path.name) for file in live]
    if named != [(number, file_name(number)) for number in expected]:
        raise FilterFileError(
            f"{path} does not hold all generations of the filter, numbers {expected[0]} "
            f"to {expected[-1]}; nothing was changed: restore the files that are missing, or "
            "move the others away to start with an empty filter"
        )
    return live, [file for file in files if file not in live]


class FilterDirectory:
    """The files of one filter, held by one crawl at a time.

    Args:
        path: the directory; made if missing.
        fingerprinter: import path of what makes the fingerprints. A filter recorded under
            another one is refused.
        job: the crawl's job directory, and what to do with a filter that its last run did not
            close.

    Attributes:
        was_kept_unclean: what `load` returned had not been closed: its counts may be low.
        journal: after `load`, what is recorded first, if the job has a queue that survives.
        importable: after `load`, the job's requests.seen if a new filter shall begin with it.
    """

    def __init__(self, path: Path, *, fingerprinter: str, job: Job) -> None:
        self.path = path
        self._fingerprinter = fingerprinter
        self.job = job
        self._lock: Lock | None = None
        self.was_kept_unclean = False
        self.importable: Path | None = None
        self.journal: Journal | None = None

    def lock(self) -> None:
        """Take the directory for this crawl; see `lock_directory`."""
        self._lock = lock_directory(self.path)

    def unlock(self) -> None:
        """Let the directory go."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def load(self) -> list[FilterFile]:
        """Open the live generations, oldest first; none if there is no filter (any more).

        Raises:
            StorageError: or one of its children: a file is missing, unusable or of another
                fingerprinter, or was not closed and shall be looked at. All is then as it was.
        """
        try:
            with contextlib.ExitStack() as stack:
                live, over = self._found()
                opened = [
                    stack.enter_context(contextlib.closing(FilterFile.open(file.path)))
                    for file in live
                ]
                for file in over:
                    with contextlib.suppress(OSError):  # the next run tries again
                        file.path.unlink()
                self._settle_journal(opened)
                stack.pop_all()  # they stay open
        except OSError as error:
            raise StorageError(
                f"{self.path} cannot be prepared for the crawl: {error}; make that possible, or "
                "give the crawl another JOBDIR or BLOOM_DIR"
            ) from error
        return opened

    def sync_queue(self) -> None:
        """Write what is forgotten to the disk, and the job's queue after it; see `Job`.

        What has failed is removed from the queue once it is forgotten.
        """
        sync_log(self.path / forgotten_file.NAME)
        self.job.sync_queue()

    def _found(self) -> tuple[list[FoundFile], list[FoundFile]]:
        """Return the files that count, and those that are over, once a kill is dealt with."""
        files = [FoundFile.at(path) for path in filter_files(self.path)]
        for file in files:
            self._check_fingerprinter(file)
        for draft in self.path.glob(f"{_FILES}.tmp"):  # of a crash while it was made
            draft.unlink()
        self.importable = None if files else self._seen_of_the_queue()
        if self._is_unclean(files) and self._set_aside_unclean(files):
            self.importable = None
            return [], []
        return divide(self.path, files) if files else ([], [])

    def create(
        self, header: Header, state: State, fill: Callable[[BloomFilter], int] | None = None
    ) -> FilterFile:
        """Make the file of a new generation: see `FilterFile.create`."""
        return FilterFile.create(self.path / file_name(header.generation), header, state, fill)

    def _settle_journal(self, opened: Sequence[FilterFile]) -> None:
        """Record what was kept in the journal of a run that was killed, and begin a new one."""
        if self.was_kept_unclean and opened and not self.job.was_machine_restarted:
            recent = read_journal(self.path) or ()
            self.sync_queue()
            for fingerprint in recent:
                opened[-1].filter.add(fingerprint)
        remove_journal(self.path)
        if self.job.has_own_queue:
            self.journal = Journal(self.path, self.sync_queue)

    def _seen_of_the_queue(self) -> Path | None:
        """Return the job's requests.seen, if its queue and our filter were not set aside."""
        return None if jobdir.was_set_aside(self.path, _FILES) else self.job.importable()

    def _is_unclean(self, files: Sequence[FoundFile]) -> bool:
        if any(file.state.in_use for file in files):
            return True
        if self.job.is_queue_lost and any(file.state.count for file in files):
            return True  # what was queued would look crawled
        return self.job.was_killed(files[-1].path.stat().st_mtime if files else None)

    def _check_fingerprinter(self, file: FoundFile) -> None:
        if file.header.fingerprinter != clip(self._fingerprinter):
            raise FingerprinterMismatchError(
                f"{file.path} was recorded with REQUEST_FINGERPRINTER_CLASS = "
                f"{file.header.fingerprinter!r}, and this crawl has {self._fingerprinter!r}: no "
                "request would be found in it; set REQUEST_FINGERPRINTER_CLASS back, or use "
                "another JOBDIR or BLOOM_DIR"
            )

    def _set_aside_unclean(self, files: Sequence[FoundFile]) -> bool:
        """Deal with a filter or job that was not closed; True if it is out of the way now."""
        paths = [file.path for file in files]
        forgotten = [path for path in [self.path / forgotten_file.NAME] if path.exists()]
        is_away = self.job.recover(
            files[-1].path if files else None,
            sum(file.state.count for file in files) if files else None,
            # The newest file, which says that it is in use, last.
            lambda: [str(jobdir.set_aside(path)) for path in [*forgotten, *paths]],
            is_behind_queue=read_journal(self.path) is not None,
        )
        self.was_kept_unclean = not is_away
        return is_away

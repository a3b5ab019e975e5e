"""The generations of a filter in files: made, written down, synced, removed."""

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.files import forgotten as forgotten_file
from scrapy_bloom.files.directory import open_files
from scrapy_bloom.files.forgotten import ForgottenFile
from scrapy_bloom.files.header import FileGeneration
from scrapy_bloom.files.local import LocalGeneration, MemoryGenerations
from scrapy_bloom.files.log import FilterLog
from scrapy_bloom.files.log_records import LogRecords, Misfit
from scrapy_bloom.files.mapping import FilterFile
from scrapy_bloom.files.overlay import Overlay
from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.filters.hashing import checked_salt
from scrapy_bloom.generations.policy import Origin, Policy, Size
from scrapy_bloom.job.locks import lock_directory
from scrapy_bloom.job.paths import file_name
from scrapy_bloom.job.recovery import Job
from scrapy_bloom.job.requests_seen import import_seen, open_seen
from scrapy_bloom.job.sqlite_files import sync_log

logger = logging.getLogger(__name__)


class FileGenerations(MemoryGenerations):
    """The generations of a filter in the files of a directory.

    Args:
        directory: where they are; made if missing.
        policy, origin, clock, changed: see `MemoryGenerations`.
        job, sync_secs, is_crawl: see `LocalBackend`.

    Attributes:
        overlay: changes that its log has and the files have not, if it has a log.
        misfit: why that log and the filter did not belong together, if they did not.
    """

    live: list[FilterFile]  # type: ignore[assignment]  # it makes no others
    kept: list[FilterFile]  # type: ignore[assignment]

    def __init__(
        self,
        directory: Path,
        policy: Policy,
        origin: Origin,
        *,
        job: Job,
        sync_secs: float,
        is_crawl: bool,
        clock: Callable[[], float],
        changed: Callable[[], None],
    ) -> None:
        super().__init__(policy, origin, clock=clock, changed=changed)
        self._directory = directory
        self._job = job
        self._sync_secs = sync_secs
        self._marks_use = is_crawl  # until it is opened with a log, which tells more
        self._held = contextlib.ExitStack()  # the lock
        self._importable: Path | None = None
        self._discarded: list[FilterFile] = []
        self.overlay: Overlay | None = None
        self.misfit: Misfit | None = None
        self._records = LogRecords()
        self._wake = threading.Event()
        self._is_closing = False
        self._syncer: threading.Thread | None = None

    def open(self, log: FilterLog | None = None) -> None:
        """Lock the directory and open what is in it; see `open_files`."""
        if not self._job.owns(self._directory):
            self._held.callback(lock_directory(self._directory).release)
        self._marks_use = self._marks_use and log is None
        files, self._importable, self._records, self.misfit = open_files(
            self._directory, self._origin.fingerprinter, self._job, log
        )
        self.live += files

    def unlock(self) -> None:
        """Let the directory go."""
        self._held.close()

    def make_first(self) -> None:
        """Make the first generation; it begins with the job's requests.seen, if there is one."""
        if self._importable is None:
            super().make_first()
            return
        seen = open_seen(self._importable)
        size, now = self._policy.first(at_least=seen.count()), self.now()
        end = self._policy.open_until(now)
        self.live.append(self._make(size, 1, now, end, lambda bits: import_seen(seen, bits.add)))

    def begin(self) -> None:
        """Write to the disk that the filter is in use, and begin to sync."""
        if self.overlay is None:
            super().begin()
            self._try_to_sync(self._job.begin)
            self._try_to_sync(self.live[-1].sync_header)
        else:
            super().begin()
        if self._sync_secs or self.overlay is not None:
            self._syncer = threading.Thread(
                target=self._sync_regularly, name="scrapy_bloom sync", daemon=True
            )
            self._syncer.start()

    # The log.

    def note_open(self, log: FilterLog) -> None:
        """Note, before the first change, with which log a crawl uses the filter.

        Raises a StorageError if that cannot be written to the disk.
        """
        self._records.open = log.id
        try:
            self._note(log, log.seq)
        except OSError as error:
            raise self._not_written(self._directory, error) from error

    def lay_over(self, log: FilterLog) -> Overlay:
        """Have all changes go to the log first; the filter has all that are in it until now.

        Raises a StorageError if that cannot be written to the disk.
        """
        self.save()
        try:
            self._sync_forgotten()
            for file in self.live:
                file.sync()
            log.checkpointed(log.seq)
        except OSError as error:
            raise self._not_written(self._directory, error) from error
        self._try_to_sync(self._job.end)  # of a run without a log
        self.overlay = Overlay(log)
        return self.overlay

    def checkpoint_soon(self) -> None:
        """Have the thread take the changes over from the overlay now."""
        self._wake.set()

    def _checkpoint(self, overlay: Overlay) -> None:
        """Write the log to the disk, then take the changes over from it into the filter.

        Raises OSError or StorageError. What the disk has then is not known, so nothing more is
        taken over in this run.
        """
        if overlay.failure is not None:
            raise overlay.failure
        try:
            seq, changes = overlay.take()
            overlay.log.sync()
            if not changes:
                return
            self._note(overlay.log, seq)
            latest: dict[bytes, bool] = {}
            changed: dict[int, LocalGeneration] = {}
            for forgets, fingerprint, newest, _ in changes:
                if forgets is not None:
                    latest[fingerprint] = forgets
                if not (forgets or newest.is_closed):
                    newest.filter.add(fingerprint)
                    changed[newest.number] = newest
            forgotten = self._directory / forgotten_file.NAME
            with contextlib.closing(ForgottenFile(forgotten)) as file:
                file.change(latest)
                self._sync_forgotten()
            for generation in changed.values():
                generation.sync()
            overlay.log.checkpointed(seq)
        except Exception as error:
            overlay.failure = error
            raise
        overlay.applied(changes)

    def _note(self, log: FilterLog, seq: int) -> None:
        """Note, before they are made, that the filter has the log's changes up to that batch.

        So a log that was set back since is never taken for one that has all that the filter has.
        """
        self._records.note(log, seq)
        self._records.write(self._directory)

    def save(self) -> None:
        """Write down the count and the end of the newest generation, and which one is oldest."""
        newest = self.live[-1]
        newest.in_use = self._marks_use
        newest.oldest = self.live[0].number
        newest.save()
        # Often enough that a kill costs less than 1 % of the count.
        self.next_save = newest.count + 1 + min(newest.count // 256, 4095)

    def _make(
        self,
        size: Size,
        number: int,
        created_at: float,
        open_until: float,
        fill: Callable[[BloomFilter], int] | None = None,
    ) -> FilterFile:
        salt = self.live[0].salt if self.live else checked_salt(self._origin.salt)
        new = FileGeneration.of(
            size,
            number,
            created_at,
            open_until=open_until,
            path=self._directory / file_name(number),
            origin=replace(self._origin, salt=salt),
            in_use=self.begun and self._marks_use,
            oldest=self.live[0].number if self.live else number,
        )
        return FilterFile.create(new, fill)

    def expire(self, number: int) -> None:
        """See `Generations`."""
        gone = self.live[:number]
        super().expire(number)
        self.save()
        # On the disk, too, the header of the rest says that they are over, before they go.
        self._try_to_sync(self.live[-1].sync_header)
        for file in gone:
            _remove(file)
            if file not in self.kept:
                self._discarded.append(file)
        if self._syncer is None:  # else it may just be syncing one of them
            self._close_discarded()

    def close(self) -> None:
        """Write all to the disk, note that it is closed, and unlock it; raises StorageError."""
        overlay = self.overlay
        was_told = overlay is not None and overlay.failure is not None
        self._is_closing = True
        self._wake.set()
        if self._syncer is not None:
            self._syncer.join()
            self._syncer = None
        gone: list[Path] = []
        is_written = False
        try:
            if self.begun or overlay is not None:
                gone = self._finish_all(was_told=was_told)
            is_written = True
        finally:
            self._discarded += self.kept
            self._close_discarded()
            for file in self.live:
                file.close()
            if self.begun and is_written:
                self._try_to_sync(self._job.end)
            self.unlock()
        if gone:
            raise StorageError(
                f"{gone[0]} was removed, or replaced by another file, while the crawl used it: "
                "what it recorded is lost to the next run, which crawls it again, or tells which "
                "files are missing"
            )

    @property
    def location(self) -> str:
        """See `MemoryGenerations`."""
        if len(self.live) == 1:
            return str(self._directory / file_name(self.live[-1].number))
        return f"{self._directory} ({len(self.live)} generations)"

    def _finish_all(self, *, was_told: bool) -> list[Path]:
        """Write everything to the disk, and return the files that are not there any more.

        With `was_told`, a checkpoint has failed, and the crawl has ended for it.
        """
        overlay = self.overlay
        if was_told:
            return []  # nobody knows what is on the disk
        try:
            if overlay is None:
                self._sync_forgotten()
            else:
                self._checkpoint(overlay)
                overlay.prune()
            for generation in self.live:  # the newest one last: its word stands for all
                self._finish(generation)
            if overlay is not None:
                self._records.open = ""
                self._note(overlay.log, self._records.logs[overlay.log.id].seq)
        except OSError as error:
            raise self._not_written(self._directory, error) from error
        return [file.path for file in self.live if not file.is_in_place()]

    def _finish(self, file: FilterFile) -> None:
        try:
            # Synced twice: the disk must never say that it was closed without the bits.
            file.sync()
            file.in_use = False
            file.save()
            file.sync()
        except OSError as error:
            file.in_use = self._marks_use
            file.save()
            raise self._not_written(file.path, error) from error

    def _not_written(self, path: Path, error: OSError) -> StorageError:
        text = f"{path} could not be written to the disk: {error.strerror or error}"
        if self._marks_use:
            text += "; the next run will take it for not closed"
        return StorageError(text)

    def _try_to_sync(self, sync: Callable[[], None]) -> None:
        try:
            sync()
        except OSError as error:
            self._log_failure(
                error, "a power loss now would lose what was recorded; check the disk"
            )

    def _log_failure(self, error: OSError, consequence: str) -> None:
        self.errors += 1
        why = error.strerror or error
        self.failure = f"{self._directory} could not be written to the disk: {why}"
        if self.errors == 1:
            logger.error(
                "The filter could not be written to the disk: %s. The crawl goes on, but %s",
                why,
                consequence,
            )

    def _sync_forgotten(self) -> None:
        sync_log(self._directory / forgotten_file.NAME)

    def _sync_regularly(self) -> None:
        synced = {file.number: file.count for file in self.live}
        while True:
            self._wake.wait(self._sync_secs or None)
            self._wake.clear()  # before the question: else it may clear the call to end
            if self._is_closing:
                return
            if self.overlay is not None:
                with contextlib.suppress(Exception):  # the overlay tells of it
                    self._checkpoint(self.overlay)
            else:
                self._try_to_sync(self._sync_forgotten)
                for file in list(self.live):  # those before may have been completed since
                    if synced.get(file.number) != file.count:
                        synced[file.number] = file.count
                        self._try_to_sync(file.sync)
            self._close_discarded()

    def _close_discarded(self) -> None:
        while self._discarded:
            file = self._discarded.pop()
            is_left = file.is_in_place()  # Windows removes no file that is mapped
            file.close()
            if is_left:
                _remove(file)


def _remove(file: FilterFile) -> None:
    with contextlib.suppress(OSError):  # the next run tries again
        file.path.unlink()

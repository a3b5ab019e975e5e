"""The generations of a filter in files: created, written down, synced, removed."""

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.files.directory import FilterDirectory, set_changed_at
from scrapy_bloom.files.header import Header, State
from scrapy_bloom.files.journal import Journal
from scrapy_bloom.files.mapping import FilterFile
from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.generations.policy import LocalGeneration
from scrapy_bloom.job.paths import file_name

logger = logging.getLogger(__name__)


class FileStore:
    """The open files of one filter, each with one of its generations.

    Args:
        directory: where they are.
        sync_secs: seconds between writes of what changed to the disk, against a power loss;
            0: at close only.
        is_crawl: note in the files that they are in use: a killed crawl leaves a broken queue.

    Attributes:
        live: the generations that count, oldest first. A new one is put there by its maker.
        errors: how often the disk failed.
        failure: how, the last time; empty if it did not.
    """

    def __init__(self, directory: FilterDirectory, sync_secs: float, *, is_crawl: bool) -> None:
        self.live: list[LocalGeneration] = []
        self.errors = 0
        self.failure = ""
        self._is_crawl = is_crawl
        self._changed_at = 0.0  # by a crawl
        self._directory = directory
        self._sync_secs = sync_secs
        self._files: dict[int, FilterFile] = {}
        self._begun = False
        self._discarded: list[FilterFile] = []
        self._unlinked: list[FilterFile] = []  # and still asked
        self._wake = threading.Event()
        self._is_closing = False
        self._syncer: threading.Thread | None = None

    def load(self) -> None:
        """Take the directory and open its generations; see `FilterDirectory`."""
        self._directory.lock()
        try:
            self.live += [self._added(file) for file in self._directory.load()]
            if self.live and not self._is_crawl:
                self._changed_at = self._newest_file.path.stat().st_mtime
        except BaseException:
            self._directory.unlock()
            raise
        if self.live and self._directory.was_kept_unclean:
            # Each kill costs a little of the count: left alone, that adds up over many.
            newest = self.live[-1]
            newest.count = max(newest.count, newest.filter.approximate_count)

    def unlock(self) -> None:
        """Let the directory go, when opening failed after `load`."""
        self._directory.unlock()

    @property
    def journal(self) -> Journal | None:
        """Return where fingerprints are recorded first, if the job's queue survives."""
        return self._directory.journal

    def importable(self) -> Path | None:
        """Return the job's requests.seen, if a new filter shall begin with it."""
        return self._directory.importable

    def create(
        self, header: Header, state: State, fill: Callable[[BloomFilter], int] | None
    ) -> LocalGeneration:
        """Make a new generation in a file of its own; see `FilterFile.create`."""
        return self._added(self._directory.create(header, state, fill))

    def begin(self) -> None:
        """Write to the disk that the filter is in use, and begin to sync."""
        self._begun = True
        self._try_to_sync(self._directory.job.begin)
        self._try_to_sync(self._newest_file.sync_header)
        if self.journal is not None:
            self.journal.when_long = self._wake.set
            self.journal.when_full = self._journal_failed
        if self._sync_secs or self.journal is not None:
            self._syncer = threading.Thread(
                target=self._sync_regularly, name="scrapy_bloom sync", daemon=True
            )
            self._syncer.start()

    def settle(self) -> None:
        """Move what is in the journal into the newest generation, before there is another one."""
        if self.journal is not None:
            self._try_to_sync(self.journal.settle)

    def save(self) -> int:
        """Write down the count and the end of the newest generation, and which one is oldest.

        Returns:
            The count at which to save again: often enough that a kill costs less than 1 %.
        """
        newest = self.live[-1]
        self._newest_file.save_state(
            count=newest.count,
            in_use=self._is_crawl,
            open_until=newest.open_until,
            oldest=self.live[0].number,
        )
        return newest.count + 1 + min(newest.count // 256, 4095)

    def save_count(self, generation: LocalGeneration) -> None:
        """Write down the count of a generation that is complete."""
        self._files[generation.number].save_state(count=generation.count)

    def expire(
        self, gone: Sequence[LocalGeneration], still_asked: Sequence[LocalGeneration]
    ) -> None:
        """Remove generations that do not count any more.

        Args:
            gone: those generations, live before.
            still_asked: of which the bits are needed until the close.
        """
        self.save()
        # On the disk, too, the header of the rest says that they are over, before they go.
        self._try_to_sync(self._newest_file.sync_header)
        for generation in gone:
            file = self._files.pop(generation.number)
            with contextlib.suppress(OSError):  # the next run tries again
                file.path.unlink()
            (self._unlinked if generation in still_asked else self._discarded).append(file)
        if self._syncer is None:  # else it may just be syncing one of them
            self._close_discarded()

    def close(self) -> None:
        """Write everything to the disk, note that they are closed, and let the directory go.

        Raises:
            StorageError: the disk failed, and the filter stays in use; or somebody has
                removed or replaced a file meanwhile.
        """
        self._is_closing = True
        self._wake.set()
        if self._syncer is not None:
            self._syncer.join()
            self._syncer = None
        failure: StorageError | None = None
        gone: list[Path] = []
        try:
            if self._begun:
                gone = self._finish_all()
        except StorageError as error:
            failure = error
        for file in self._files.values():
            file.close()
            if not self._is_crawl:
                set_changed_at(file.path, self._changed_at)
        self._files.clear()
        self._discarded += self._unlinked
        self._close_discarded()
        if self.journal is not None:
            self.journal.close(settled=failure is None)
        if self._begun and failure is None:
            self._try_to_sync(self._directory.job.end)
        self._directory.unlock()
        if failure is not None:
            raise failure
        if gone:
            raise StorageError(
                f"{gone[0]} was removed, or replaced by another file, while the crawl used it: "
                "what it recorded is lost to the next run, which crawls it again, or tells which "
                "files are missing"
            )

    @property
    def location(self) -> str:
        """Return where the filter is, for people; also after the close."""
        if len(self.live) == 1:
            return str(self._directory.path / file_name(self.live[-1].number))
        return f"{self._directory.path} ({len(self.live)} generations)"

    def _added(self, file: FilterFile) -> LocalGeneration:
        self._files[file.header.generation] = file
        return LocalGeneration(filter=file.filter, **vars(file.figures))

    @property
    def _newest_file(self) -> FilterFile:
        return self._files[self.live[-1].number]

    def _finish_all(self) -> list[Path]:
        """Write everything to the disk, and return the files that are not there any more."""
        try:
            self._sync_queue()
        except OSError as error:
            raise self._not_written(self._directory.path, error) from error
        for generation in self.live:  # the newest one last: its word stands for all
            self._finish(self._files[generation.number], generation.count)
        return [file.path for file in self._files.values() if not file.is_in_place()]

    def _finish(self, file: FilterFile, count: int) -> None:
        if self._is_crawl and not file.state.in_use:
            return
        try:
            # Twice: the disk must never say that it was closed without the bits.
            file.sync()
            file.save_state(count=count, in_use=False)
            file.sync()
        except OSError as error:
            file.save_state(in_use=self._is_crawl)
            raise self._not_written(file.path, error) from error

    def _not_written(self, path: Path, error: OSError) -> StorageError:
        text = f"{path} could not be written to the disk: {error.strerror or error}"
        if self._is_crawl:
            text += "; the next run will take it for not closed"
        return StorageError(text)

    def _try_to_sync(self, sync: Callable[[], None]) -> None:
        try:
            sync()
        except OSError as error:
            self._log_failure(
                error, "a power loss now would lose what was recorded; check the disk"
            )

    def _journal_failed(self, error: OSError) -> None:
        self._log_failure(
            error, "what is recorded meanwhile is crawled again if the crawl is killed; make room"
        )

    def _log_failure(self, error: OSError, consequence: str) -> None:
        self.errors += 1
        why = error.strerror or error
        self.failure = f"{self._directory.path} could not be written to the disk: {why}"
        if self.errors == 1:
            logger.error(
                "The filter could not be written to the disk: %s. The crawl goes on, but %s",
                why,
                consequence,
            )

    def _sync_queue(self) -> None:
        # Before the filter: what that has on the disk, the queue on the disk must have had.
        if self.journal is not None:
            self.journal.settle()
        else:
            self._directory.sync_queue()

    def _sync_regularly(self) -> None:
        synced = {generation.number: generation.count for generation in self.live}
        while True:
            self._wake.wait(self._sync_secs or None)
            if self._is_closing:
                return
            self._wake.clear()
            self._try_to_sync(self._sync_queue)
            for generation in list(self.live):  # those before may have been completed since
                number, file = generation.number, self._files.get(generation.number)
                is_changed = synced.get(number) != generation.count
                if file is not None and is_changed and self._sync_secs:
                    synced[number] = generation.count
                    self._try_to_sync(file.sync)
            self._close_discarded()

    def _close_discarded(self) -> None:
        while self._discarded:
            self._discarded.pop().close()

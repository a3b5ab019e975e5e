"""Use a filter in the files of a directory during a crawl: open, record, sync, close."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.files.directory import SAMPLE_NAME, open_files, read_sample
from scrapy_bloom.files.file import FileGeneration, FilterFile
from scrapy_bloom.files.log import FilterLog, LogRecord, Missing, Overlay
from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.filters.hashing import checked_salt
from scrapy_bloom.filters.sizing import BLOCK_BYTES
from scrapy_bloom.generations.memory import MemoryBackend
from scrapy_bloom.generations.policy import (
    ANY_ORIGIN,
    Origin,
    Policy,
    Size,
    kept_settings,
    with_headroom,
)
from scrapy_bloom.job.copy_on_write import check_room
from scrapy_bloom.job.disk import replace_file
from scrapy_bloom.job.jobdir import file_name, lock_directory
from scrapy_bloom.job.recovery import Job
from scrapy_bloom.job.requests_seen import SeenFile, import_seen

logger = logging.getLogger(__name__)

SYNC_SECS = 30.0  # between two syncs: what a power cut may lose
_MOST_UNAPPLIED = 50_000  # fingerprints in memory (about 10 MB) that start a checkpoint early


class LocalBackend(MemoryBackend):
    """A Bloom filter in the files of a directory.

    Args:
        directory: where the files are; `open` creates it if it is missing.
        policy: how large the filter is, and when it grows and expires.
        origin: which spider and fingerprinter the filter is for, and its salt.
        job: the crawl's job directory, locked by the caller, whose queue must fit the filter. A new
            filter imports its requests.seen. None: a filter without a job, which `open` locks.
        is_crawl: False if a command uses the filter. A kill then leaves no request that is recorded
            but not crawled, so the files are not marked as in use.

    Attributes:
        overlay: fingerprints that the log has and the files lack; None without a log.
    """

    live: list[FilterFile]  # type: ignore[assignment]  # all generations are in files

    def __init__(
        self,
        directory: Path,
        policy: Policy,
        origin: Origin = ANY_ORIGIN,
        *,
        job: Job | None = None,
        is_crawl: bool = True,
    ) -> None:
        super().__init__(policy, origin)
        self.overlay: Overlay | None = None
        self._directory = directory
        self._job = job or Job()
        self._marks_use = is_crawl  # False with a log, whose record says that it is in use
        self._lock = contextlib.ExitStack()
        self._expired: list[FilterFile] = []  # their files are still open
        self._continues_run = False  # whether Scrapy's queue has requests of the last process
        self._record: LogRecord | None = None
        self._stored_sample = ""
        self._wake = threading.Event()
        self._is_closing = False
        self._syncer: threading.Thread | None = None

    def open(self, log: FilterLog | None = None) -> None:
        """Lock the directory, and open or create the filter in it; if that fails, change nothing.

        The filter is not marked as in use yet: until `begin`, a crash leaves a closed filter
        closed.

        Args:
            log: the open log of the filter. All fingerprints go there first, and those that the
                filter lacks are added now.

        Raises:
            StorageError: the filter cannot be used; a subclass says more precisely why.
            SeenFileError: the job's requests.seen cannot be imported.
        """
        try:
            if self._job.path is None:
                self._lock.callback(lock_directory(self._directory).release)
            self._marks_use = self._marks_use and log is None
            files, importable, fits_log = open_files(
                self._directory, self._origin.fingerprinter, self._job, log
            )
            self.live += files
            self._continues_run = log is None and self._job.has_queued()
            if self.live:
                self._check_room()
                self.sample = self._stored_sample = read_sample(self._directory)
                self._log_kept_settings()
            elif importable is None:
                self._make_first()
            else:
                self._import(importable)
            self._use_live()
            if log is not None:
                self._recover(log, fits_log=fits_log)
        except BaseException:
            for file in self.live:
                file.close()
            self._lock.close()
            raise

    def _recover(self, log: FilterLog, *, fits_log: bool) -> None:
        """Add the fingerprints that the filter lacks, and record in the log from then on."""
        log.begin()
        with self._explaining_errors():
            self._apply(log, log.seq, self._missing(log, fits_log=fits_log))
        self.overlay = Overlay(log)
        self._use_live()

    def _missing(self, log: FilterLog, *, fits_log: bool) -> Iterator[Missing]:
        """Yield the fingerprints that the filter lacks, and count and grow as `add` does."""
        unfinished = () if fits_log else log.unfinished()
        for fingerprint in chain(log.recorded(), unfinished):
            # With a window, a fingerprint may be recorded that an older generation has, too.
            recorded = self._newest.filter if self._policy.window else self._recorded
            if fingerprint in recorded:
                continue
            if self._newest.count >= self._life.grow_at:
                self._life.grow()
            self._newest.count += 1
            yield fingerprint, self._newest

    def _log_kept_settings(self) -> None:
        if kept := kept_settings(self._policy, self.live):
            logger.info(
                "%s was created with other settings and keeps them: %s. The settings of this crawl "
                "apply to new generations only",
                self._directory,
                ", ".join(kept),
            )

    def _import(self, path: Path) -> None:
        """Create a first generation that contains a requests.seen file."""
        seen = SeenFile(path)
        size = self._policy.first(with_headroom(seen.count()))
        new = self._make(size, 1, self._clock(), 1, lambda bits: import_seen(seen, bits.add))
        self.live.append(new)

    def begin(self, run_at: float | None = None) -> None:
        """Begin the crawl, in a run that began at `run_at`; None: now, or with the queue."""
        super().begin(self._newest.last_run if run_at is None and self._continues_run else run_at)

    def renew(self, fingerprints: Iterable[bytes]) -> None:
        """Record fingerprints with a log in the newest generation, so that they expire with it."""
        assert self.overlay is not None
        for fingerprint in fingerprints if self._policy.window else ():
            if self._newest.count >= self._life.grow_at:
                self._life.grow()
            self._newest.count += self.overlay.add(fingerprint, renews=True)

    def _mark_as_used(self) -> None:
        self._save()
        if self.overlay is None:
            self._try_to_sync(self.live[-1].sync)
        syncer = threading.Thread(
            target=self._sync_regularly, name="scrapy_bloom sync", daemon=True
        )
        syncer.start()
        self._syncer = syncer  # only after start(): Ctrl-C may interrupt it, and join() raises

    @property
    def location(self) -> str:
        """The path of the filter's file, or of its directory if it has several generations."""
        if len(self.live) == 1:
            return str(self._directory / file_name(self.live[-1].number))
        return f"{self._directory} ({len(self.live)} generations)"

    def _use_live(self) -> None:
        super()._use_live()
        if (overlay := self.overlay) is not None:
            overlay.use(self._recorded, self._newest)
            self._recorded = overlay

    def _save(self) -> None:
        """Write the state of the newest generation into its header."""
        try:
            self._check_room()
        except StorageError as error:
            if self.overlay is None:
                raise
            self.overlay.failure = self.overlay.failure or error
            return
        newest = self.live[-1]
        newest.in_use = self._marks_use
        newest.oldest = self.live[0].number
        newest.save()
        # Often enough that a kill costs less than 1 % of the count.
        self._next_save = newest.count + 1 + min(newest.count // 256, 4095)
        if self.overlay is not None and len(self.overlay) >= _MOST_UNAPPLIED:
            self._wake.set()  # starts a checkpoint

    def _check_room(self, requests: int = _MOST_UNAPPLIED) -> None:
        """Raise a StorageError if the disk has no room for the bits of so many requests."""
        check_room(self._directory, min(self.live[-1].geometry.nbytes, requests * BLOCK_BYTES))

    def _save_all(self, *, in_use: bool) -> None:
        for file in self.live:
            file.in_use = in_use
            file.save()

    def _make(
        self,
        size: Size,
        number: int,
        run_at: float,
        oldest: int,
        fill: Callable[[BloomFilter], int] | None = None,
    ) -> FilterFile:
        salt = self.live[0].salt if self.live else checked_salt(self._origin.salt)
        new = FileGeneration.of(
            size,
            number,
            run_at,
            path=self._directory / file_name(number),
            origin=replace(self._origin, salt=salt),
            in_use=self._has_begun and self._marks_use,
            oldest=oldest,
        )
        return FilterFile.create(new, fill)

    def update(self, run_at: float, size: Size | None = None, expired: int = 0) -> bool:
        """Change the generations; the thread that syncs the filter removes the expired files."""
        gone = self.live[:expired]
        super().update(run_at, size, expired)
        if gone:
            self._expired += gone
            self._wake.set()
        return True

    def _sync_regularly(self) -> None:
        while True:
            self._wake.wait(SYNC_SECS)
            self._wake.clear()  # before the test, so that it cannot clear the request to end
            if self._is_closing:
                return
            if self.overlay is None:
                self._try_to_sync(self._sync_files)
            else:
                with contextlib.suppress(Exception):  # the overlay keeps the error
                    self._checkpoint(self.overlay)

    def _checkpoint(self, overlay: Overlay) -> None:
        """Add the stored fingerprints to the filter; raises OSError or StorageError.

        After an error, the contents of the disk are unknown, so this process adds nothing more.
        """
        if overlay.failure is not None:
            raise overlay.failure
        try:
            seq, missing = overlay.take()
            if missing or self._expired or self._is_closing:
                self._apply(overlay.log, seq, missing)
            else:
                overlay.log.sync()
        except Exception as error:
            overlay.failure = error
            raise
        overlay.applied(missing)

    def _apply(self, log: FilterLog, seq: int, missing: Iterable[Missing]) -> None:
        """Sync the log, add its fingerprints up to a batch to the filter, and sync the filter."""
        self._check_room()
        log.sync()
        # Before the first fingerprint, so that an older copy of the log is recognized as older.
        self._record = LogRecord(log.id, log.run, seq, log.left, is_open=True)
        self._record.write(self._directory)
        for fingerprint, generation in missing:
            if not generation.is_closed:
                generation.filter.add(fingerprint)
        self._sync_files()
        log.checkpointed(seq)

    def _sync_files(self) -> None:
        """Sync the filter, and remove the files that have expired by the header on the disk."""
        expired = list(self._expired)
        if (sample := self.sample) != self._stored_sample:
            with contextlib.suppress(OSError):  # the next sync tries again
                replace_file(self._directory / SAMPLE_NAME, sample)
                self._stored_sample = sample
        for file in list(self.live):
            file.sync()
        for file in expired:
            self._expired.remove(file)
            is_ours = file.is_in_place()
            file.close()  # Windows removes no file that is mapped
            if is_ours:
                with contextlib.suppress(OSError):  # the next run tries again
                    file.path.unlink()

    def close(self) -> None:
        """Sync everything, mark the filter as closed, and unlock it; raises StorageError.

        The second time, nothing happens.
        """
        if self._last_status is not None:
            return
        self._last_status = self.status()
        overlay = self.overlay
        # After a failed checkpoint, the contents of the disk are unknown.
        has_failed = overlay is not None and overlay.failure is not None
        self._is_closing = True
        self._wake.set()
        if self._syncer is not None:
            self._syncer.join()
            self._syncer = None
        replaced: list[Path] = []
        try:
            if (self._has_begun or overlay is not None) and not has_failed:
                with self._explaining_errors():
                    self._mark_as_closed()
                replaced = [file.path for file in self.live if not file.is_in_place()]
        finally:
            for file in [*self._expired, *self.live]:
                file.close()
            self._lock.close()
        if replaced:
            raise StorageError(
                f"{replaced[0]} was removed, or replaced by another file, while the crawl used it: "
                "the next crawl lacks the requests that this process recorded, and crawls them "
                "again, or reports which files are missing"
            )

    def _mark_as_closed(self) -> None:
        # Synced twice: before a header says "closed", the disk must have the bits and the queue.
        if self.overlay is None:
            self._check_room(0)
            self._sync_files()
            self._job.sync_queue()
        else:
            self._checkpoint(self.overlay)
            self.overlay.prune()
        self._save_all(in_use=False)
        try:
            self._sync_files()
        except OSError:
            self._save_all(in_use=self._marks_use)
            raise
        if self._record is not None:
            replace(self._record, is_open=False).write(self._directory)

    @contextlib.contextmanager
    def _explaining_errors(self) -> Iterator[None]:
        """Turn an OSError into a StorageError that names the directory."""
        try:
            yield
        except OSError as error:
            text = f"{self._directory} could not be written to the disk: {error.strerror or error}"
            if self._marks_use:
                text += "; the next run will treat it as not closed"
            raise StorageError(text) from error

    def _try_to_sync(self, sync: Callable[[], None]) -> None:
        try:
            sync()
        except OSError as error:
            self.errors += 1
            why = error.strerror or error
            self.failure = f"{self._directory} could not be written to the disk: {why}"
            if self.errors == 1:
                logger.error(  # noqa: TRY400 - a traceback adds nothing
                    "The filter could not be written to the disk: %s. The crawl continues, but a "
                    "power loss would lose the requests recorded since; check the disk",
                    why,
                )

"""The filter of one machine: a file in the job directory, or memory alone."""

import contextlib
import errno
import logging
import os
import secrets
import threading
import time
from pathlib import Path

from filelock import FileLock, Timeout

from scrapy_bloom import jobdir
from scrapy_bloom.exceptions import (
    FingerprinterMismatchError,
    LockedError,
    StorageError,
    UncleanShutdownError,
)
from scrapy_bloom.filterfile import FilterFile
from scrapy_bloom.filters import BloomFilter
from scrapy_bloom.hashing import SALT_BYTES
from scrapy_bloom.header import Header, State, clip, read_header
from scrapy_bloom.importing import SeenFile
from scrapy_bloom.sizing import choose_geometry
from scrapy_bloom.status import FilterStatus

logger = logging.getLogger(__name__)

FILTER_NAME = "generation-0001.bloom"
LOCK_NAME = "lock"
_PROGRESS_SECS = 5


class LocalBackend:
    """A Bloom filter in a directory, or in memory if there is none.

    Args:
        directory: where the filter's file is, or None for memory only.
        capacity: requests a new filter is sized for.
        error_rate: p a new filter is sized for.
        salt: 16 bytes for a new filter; None: random.
        fingerprinter: import path of what makes the fingerprints. A filter recorded under
            another one is refused.
        spider: the spider's name, kept with the filter for information.
        job_dir: Scrapy's job directory if the crawl has one. Its requests.seen is imported into
            a new filter.
        on_unclean_shutdown: what to do with a filter that its last run did not close: "keep"
            it, "reset" (set it aside together with Scrapy's queue, and start empty), "stop"
            with an error, or "auto": reset if there is a job_dir, else keep.
        sync_secs: seconds between writes of what changed to the disk, against a power loss;
            0: at close only.
    """

    def __init__(
        self,
        directory: Path | None,
        *,
        capacity: int,
        error_rate: float,
        salt: bytes | None = None,
        fingerprinter: str = "",
        spider: str = "",
        job_dir: Path | None = None,
        on_unclean_shutdown: str = "auto",
        sync_secs: float = 30.0,
    ) -> None:
        self._directory = directory
        self._capacity = capacity
        self._error_rate = error_rate
        self._salt = salt
        self._fingerprinter = fingerprinter
        self._spider = spider
        self._job_dir = job_dir
        if on_unclean_shutdown == "auto":
            on_unclean_shutdown = "reset" if job_dir else "keep"
        self._on_unclean_shutdown = on_unclean_shutdown
        self._sync_secs = sync_secs
        self._lock: FileLock | None = None
        self._file: FilterFile | None = None
        self._filter: BloomFilter | None = None
        self._count = 0
        self._next_save = 0
        self._errors = 0
        self._stop = threading.Event()
        self._syncer: threading.Thread | None = None

    def open(self) -> None:
        """Lock the directory and open or create the filter in it.

        Nothing is recorded as in use yet: until `begin`, a crash leaves a closed filter closed.

        Raises:
            StorageError: or one of its children: see `scrapy_bloom.exceptions`. Every file is
                then as it was before.
            SeenFileError: the job's requests.seen cannot be imported.
        """
        if self._directory is None:
            self._filter = BloomFilter(self._capacity, self._error_rate, salt=self._salt)
            self._next_save = -1
            return
        self._lock = _locked(self._directory)
        try:
            self._file = self._opened_file(self._directory / FILTER_NAME)
        except BaseException:
            self._lock.release()
            raise
        self._filter = self._file.filter
        self._count = self._file.state.count

    def begin(self) -> None:
        """Mark the filter as in use, and write that to the disk, before the first request.

        From here to `close`, whoever finds the filter knows that its crawl did not end well.
        """
        if self._file is None or self._next_save:
            return
        self._save()
        self._sync()
        if self._sync_secs and self._syncer is None:
            self._syncer = threading.Thread(
                target=self._sync_regularly, name="scrapy_bloom sync", daemon=True
            )
            self._syncer.start()

    def add(self, fingerprint: bytes) -> bool:
        """Record a fingerprint; True if it was new. See `BloomFilter.add`."""
        assert self._filter is not None, "open() comes first"
        if not self._next_save:
            self.begin()
        if not self._filter.add(fingerprint):
            return False
        self._count += 1
        if self._count == self._next_save:
            self._save()
        return True

    def __contains__(self, fingerprint: bytes) -> bool:
        assert self._filter is not None, "open() comes first"
        return fingerprint in self._filter

    def close(self) -> None:
        """Write everything to the disk, mark the filter as closed, and release the directory.

        Raises:
            StorageError: the disk failed; the filter stays marked as in use.
        """
        self._stop.set()
        if self._syncer is not None:
            self._syncer.join()
            self._syncer = None
        file, self._file, self._filter = self._file, None, None
        try:
            if file is not None:
                try:
                    _finish(file, self._count)
                finally:
                    file.close()
        finally:
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def status(self) -> FilterStatus:
        """The filter's figures now."""
        assert self._filter is not None, "open() comes first"
        return FilterStatus(
            location=str(self._file.path) if self._file else "memory",
            geometry=self._filter.geometry,
            capacity=self._filter.capacity,
            error_rate=self._filter.error_rate,
            count=self._count,
            errors=self._errors,
        )

    def _opened_file(self, path: Path) -> FilterFile:
        if not path.exists():
            return self._created(path, self._seen_file(path))
        header, state = read_header(path)
        self._check_fingerprinter(path, header)
        if state.in_use and self._set_aside_unclean(path, state):
            return self._created(path, None)
        if (header.capacity, header.error_rate) != (self._capacity, self._error_rate):
            logger.info(
                "%s keeps the size it was made with (%s requests at error rate %g); "
                "BLOOM_EXPECTED_REQUESTS = %s and BLOOM_ERROR_RATE = %g apply to a new filter",
                path,
                f"{header.capacity:,}",
                header.error_rate,
                f"{self._capacity:,}",
                self._error_rate,
            )
        return FilterFile.open(path)

    def _check_fingerprinter(self, path: Path, header: Header) -> None:
        if header.fingerprinter != clip(self._fingerprinter):
            raise FingerprinterMismatchError(
                f"{path} was recorded with REQUEST_FINGERPRINTER_CLASS = "
                f"{header.fingerprinter!r}, and this crawl has {self._fingerprinter!r}: no request "
                "would be found in it; set REQUEST_FINGERPRINTER_CLASS back, or use another "
                "JOBDIR or BLOOM_DIR"
            )

    def _set_aside_unclean(self, path: Path, state: State) -> bool:
        """Deal with a filter that was not closed; True if it is out of the way now."""
        what = f"The last run did not close {path} (it was killed, or ran out of memory)"
        if self._on_unclean_shutdown == "stop":
            raise UncleanShutdownError(
                f'{what}, and BLOOM_ON_UNCLEAN_SHUTDOWN is "stop"; set it to "reset" to set the '
                'filter aside and crawl everything again, or to "keep" to go on without the '
                "requests that were queued at that time. Nothing was changed"
            )
        if self._on_unclean_shutdown == "keep":
            logger.warning(
                "%s. It is kept, with %s requests; those that were queued but not yet crawled at "
                'that time look seen and are not crawled (BLOOM_ON_UNCLEAN_SHUTDOWN = "reset" '
                "sets the filter aside and crawls them again)",
                what,
                f"{state.count:,}",
            )
            return False
        moved = []
        # The queue first: if we die in between, the filter still says that it was not closed.
        if self._job_dir is not None and (queue := jobdir.queue_path(self._job_dir)).exists():
            moved.append(jobdir.set_aside(queue))
        moved.append(jobdir.set_aside(path))
        logger.warning(
            "%s, so the requests that were queued then are lost but would look seen. The crawl "
            "starts over with an empty filter, and pages are crawled again rather than lost. Set "
            "aside, not deleted: %s",
            what,
            ", ".join(str(name) for name in moved),
        )
        return True

    def _seen_file(self, path: Path) -> SeenFile | None:
        """The job's requests.seen, if it is what its queue goes with."""
        # After a reset the queue is gone, and the requests of requests.seen must not look seen.
        if self._job_dir is None or jobdir.was_set_aside(path):
            return None
        seen = jobdir.seen_path(self._job_dir)
        try:
            return SeenFile(seen) if seen.exists() else None
        except OSError as error:
            raise StorageError(f"{seen} cannot be read: {error.strerror or error}") from error

    def _created(self, path: Path, seen: SeenFile | None) -> FilterFile:
        capacity = max(self._capacity, seen.estimated_records() if seen else 0)
        header = Header(
            geometry=choose_geometry(capacity, self._error_rate),
            capacity=capacity,
            error_rate=self._error_rate,
            salt=self._salt or secrets.token_bytes(SALT_BYTES),
            created_at=time.time(),
            fingerprinter=self._fingerprinter,
            spider=self._spider,
        )
        fill = (lambda new: _import_seen(seen, new)) if seen else None
        return FilterFile.create(path, header, fill)

    def _save(self) -> None:
        """Write the count down: often enough that a kill costs less than 1 % of it."""
        assert self._file is not None
        self._file.save_state(self._count, in_use=True)
        self._next_save = self._count + 1 + min(self._count // 256, 4095)

    def _sync(self) -> None:
        assert self._file is not None
        try:
            self._file.sync()
        except OSError as error:
            self._errors += 1
            if self._errors == 1:
                logger.error(  # noqa: TRY400 - one clear line, no traceback
                    "%s could not be written to the disk: %s. The crawl goes on, but a power loss "
                    "now would lose what was recorded; check the disk",
                    self._file.path,
                    error.strerror or error,
                )

    def _sync_regularly(self) -> None:
        assert self._file is not None
        synced = self._file.state.count
        while not self._stop.wait(self._sync_secs):
            if self._count != synced:
                synced = self._count
                self._sync()


def _locked(directory: Path) -> FileLock:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK):
            # Its files might still be writable, but then setting one aside would fail later.
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        # The lock belongs to the filter, not to a thread: Scrapy's shell closes elsewhere.
        lock = FileLock(directory / LOCK_NAME, timeout=0, thread_local=False)
        lock.acquire()
    except Timeout:
        raise LockedError(
            f"{directory} is in use by another running crawl; wait for it to end, or give this "
            "one another JOBDIR or BLOOM_DIR"
        ) from None
    except OSError as error:
        raise StorageError(
            f"{directory} cannot be written to: {error.strerror or error}; give the crawl the "
            "right to write there, or another JOBDIR or BLOOM_DIR"
        ) from error
    return lock


def _finish(file: FilterFile, count: int) -> None:
    if not file.state.in_use:
        return
    try:
        # Twice: the disk must never hold the mark of a clean close without the bits.
        file.sync()
        file.save_state(count, in_use=False)
        file.sync()
    except OSError as error:
        with contextlib.suppress(OSError):
            file.save_state(count, in_use=True)
        raise StorageError(
            f"{file.path} could not be written to the disk: {error.strerror or error}; the next "
            "run will take it for not closed"
        ) from error


def _import_seen(seen: SeenFile, new: BloomFilter) -> int:
    """Add a requests.seen file to a new filter; returns how many fingerprints were new."""
    logger.info("Importing the requests that Scrapy recorded in %s", seen.path)
    added = read = 0
    begun = last = time.monotonic()
    for fingerprint in seen:
        added += new.add(fingerprint)
        read += 1
        if read % 10_000 == 0 and (now := time.monotonic()) - last >= _PROGRESS_SECS:
            last = now
            logger.info(
                "Importing %s: %.0f %%, %s requests, %s a second",
                seen.path,
                100 * seen.position / seen.size,
                f"{read:,}",
                f"{read / (now - begun):,.0f}",
            )
    logger.info(
        "Imported %s requests from %s%s; the file was left as it is",
        f"{read:,}",
        seen.path,
        ", and ignored an incomplete one at its end (the job was not closed cleanly)"
        if seen.truncated
        else "",
    )
    return added

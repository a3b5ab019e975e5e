"""The file of a job, `bloom.sqlite`: its filter and, with CrashSafeScheduler, its queue.

It is a SQLite database with a write-ahead log. A killed process leaves no partial transaction.
After a power loss, the last transactions may be missing: the file is then in an earlier state.
"""

import contextlib
import logging
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, BinaryIO

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.job import disk
from scrapy_bloom.job.jobdir import DATABASE_ID

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
SYNC_SECS = 30.0  # between two syncs: what a power cut may lose
_PATIENCE_MS = 60_000  # how long to wait for a lock: a thread may sync a slow disk meanwhile
_LOG_BYTES = 64 << 20  # a longer write-ahead log is truncated
_MOST_ATTEMPTS, _PAUSE_SECS = 100, 0.01  # to truncate it between two transactions
_SCHEMA = files("scrapy_bloom.job").joinpath("schema.sql").read_text("utf-8")


# Writes changes in transactions of a connection, and yields after each of them.
_Write = Callable[[sqlite3.Connection], Iterator[None]]


class JobFile:
    """The file of a job, opened for writing, and created if missing.

    The caller has locked the job directory. Raises a StorageError if the file is damaged, foreign,
    of a newer format, or cannot be read or written; it is not changed then.
    """

    was_killed: bool  # whether the last process that had it open did not close it
    in_use: bool  # whether that process had its queue elsewhere
    # Whether it is a copy that was made while it was open, or was moved, or has lost its log. It
    # may lack rows of which it has the fingerprints.
    is_copy: bool

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self.path = Path(os.path.realpath(path))  # without links: SQLite keeps its log there
        self.failure: Exception | None = None  # of a sync; nothing is synced after it
        self._opened_as = ""
        self._wal_path, _ = disk.log_and_index(self.path)
        self._wal: BinaryIO | None = None
        self._syncing = threading.Lock()
        self._tolerated = 0  # bytes of the write-ahead log that could not be truncated
        self._write: _Write | None = None
        self._logs_failure = False
        self._wake = threading.Event()
        self._is_closing = False
        self._syncer: threading.Thread | None = None
        disk.check_database_files(path)
        if self._wal_path.exists() and not path.exists():  # SQLite would apply it to a new file
            raise unusable(path, f"the file is missing, and its log {self._wal_path} is not")
        try:
            if not path.exists():
                _create(path)
            missing = [part for part in disk.log_and_index(path) if not part.exists()]
            self._had_log = self._wal_path not in missing
            has_log = self._wal_path.exists() and self._wal_path.stat().st_size > 0
            if has_log:
                disk.drop_cached_pages(path, self._wal_path)
            self._db = sqlite3.connect(
                path, timeout=_PATIENCE_MS / 1000, isolation_level=None, check_same_thread=False
            )
            self.execute, self.executemany = self._db.execute, self._db.executemany
            try:
                disk.limit_steps(self._db, path)
                self._open(has_log=has_log)
            except BaseException:
                disk.close_unchanged(self._db, path)
                for part in missing:
                    part.unlink(missing_ok=True)
                raise
        except (sqlite3.Error, OSError, ValueError, TypeError) as error:
            raise unusable(path, error) from error

    def _open(self, *, has_log: bool) -> None:
        run = self._db.execute
        check_database(self._db, self.path)
        disk.use_log(self._db)
        run("PRAGMA synchronous = NORMAL")
        run("PRAGMA wal_autocheckpoint = 0")  # automatic checkpoints would sync in the event loop
        row = run("SELECT opened_as, opened_before, in_use FROM job").fetchone()
        last, before, in_use = typed(row, str, str, int)
        self.in_use = bool(in_use)
        self.was_killed = bool(last)
        self.is_copy = self.was_killed and (
            not self._had_log or not last.startswith(identity(self.path))
        )
        without_log = self._opened_as_without_log() if has_log else last
        is_suspicious = self.is_copy or without_log is None
        # Without its log, it may have a half of a checkpoint. A quick check would not read indexes.
        if is_suspicious and (found := run("PRAGMA integrity_check(1)").fetchone()[0]) != "ok":
            raise ValueError(found.splitlines()[-1])
        # Each opening begins with an empty log. So if they differ, file or log is older, unless the
        # process died before it had moved its mark from the log into the file.
        if without_log not in (None, last, before):
            raise ValueError("a part of it is older than the rest")

    def _opened_as_without_log(self) -> str | None:
        """Return `opened_as` as the file has it without its log; None: after half a checkpoint."""
        uri = f"{self.path.as_uri()}?immutable=1"
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as db:
            try:
                (found,) = typed(db.execute("SELECT opened_as FROM job").fetchone(), str)
            except (sqlite3.DatabaseError, TypeError, ValueError):
                return None
        return str(found)

    def begin(
        self, write: _Write | None, *, in_use: bool = False, logs_failure: bool = False
    ) -> None:
        """Mark the file as open, and sync it regularly in a thread; raises StorageError.

        The file is `in_use` if this process has its queue elsewhere. Before each of these syncs,
        `write` is called in the thread, with a connection of its own. If nothing else reports the
        failure of a sync, it is logged.
        """
        self._db.set_progress_handler(None, 0)  # it may be open for days
        self._opened_as = identity(self.path) + secrets.token_hex(8)
        with explaining(self.path):
            self._mark(self._opened_as, in_use=in_use)
            # The mark must not be in the log alone, because a user may delete it.
            if not self.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
                self.execute("UPDATE job SET opened_before = opened_as")
            disk.sync_directory(self.path.parent)
            # The log stays open: the kernel reports a failed sync to each descriptor once.
            self._wal = disk.opened(self._wal_path, "r+b", buffering=0)
        self._write, self._logs_failure = write, logs_failure
        syncer = threading.Thread(
            target=self._sync_regularly, name="scrapy_bloom sync", daemon=True
        )
        syncer.start()
        self._syncer = syncer  # only after start(): Ctrl-C may interrupt it, and join() raises

    def _mark(self, opened_as: str, *, in_use: bool) -> None:
        query = "UPDATE job SET opened_before = ifnull(?, opened_as), opened_as = ?, in_use = ?"
        self.execute(query, (self._opened_as_without_log(), opened_as, in_use))

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Store the changes of a `with` block in one transaction, or in the one that is open.

        Raises sqlite3.Error: nothing has changed.
        """
        if self._db.in_transaction:
            yield
            return
        with transaction(self._db):
            yield
        if self._wal is not None and self._is_long:
            self._wake.set()

    @property
    def is_in_step(self) -> bool:
        """Whether a transaction is open."""
        return self._db.in_transaction

    # Syncs.

    def sync(self) -> None:
        """Write all transactions so far to the disk; may be called in any thread.

        Raises the error of the first sync that failed: the contents of the disk are then unknown.
        """
        assert self._wal is not None
        with self._syncing:  # an error is reported once
            if self.failure is None:
                try:
                    os.fsync(self._wal.fileno())
                except OSError as error:
                    self.failure = error
        if self.failure is not None:
            raise self.failure

    def _sync_regularly(self) -> None:
        while True:
            self._wake.wait(SYNC_SECS)
            self._wake.clear()  # before the test, so that it cannot clear the request to end
            if self._is_closing:
                return
            try:
                self._sync_all()
            except (sqlite3.Error, OSError, StorageError) as error:
                self.failure = self.failure or self.cause(error)
                if self._logs_failure:
                    logger.error(  # noqa: TRY400 - a traceback adds nothing
                        "The filter could not be written to the disk: %s. The crawl continues, but "
                        "the next one with this JOBDIR starts over; check the disk",
                        self.failure,
                    )
                return

    def _sync_all(self) -> None:
        """Write, sync, and move the write-ahead log into the file."""
        self._check_in_place()
        uri = f"{self.path.as_uri()}?mode=rw"  # a missing file is not created
        with contextlib.closing(
            sqlite3.connect(uri, uri=True, timeout=_PATIENCE_MS / 1000, isolation_level=None)
        ) as db:
            for _ in self._write(db) if self._write is not None else ():
                if self._is_closing:  # the close writes the rest
                    return
                if self._is_long:
                    self._move_log(db)
            self._move_log(db)

    @property
    def _is_long(self) -> bool:
        """Whether the write-ahead log is to be truncated."""
        assert self._wal is not None
        return os.fstat(self._wal.fileno()).st_size > self._tolerated + _LOG_BYTES

    def _move_log(self, db: sqlite3.Connection) -> None:
        """Sync the write-ahead log, and move it into the file."""
        assert self._wal is not None
        self.sync()
        db.execute("PRAGMA busy_timeout = 0")
        # While transactions are stored: each moves what was written during the one before.
        is_long = self._is_long
        for _ in range(3 if is_long else 1):
            db.execute("PRAGMA wal_checkpoint(PASSIVE)")
        if is_long:
            for _ in range(_MOST_ATTEMPTS):  # a transaction that is being stored is in the way
                if not db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
                    break
                time.sleep(_PAUSE_SECS)
            # If a process that reads is in the way, try again much later.
            self._tolerated = os.fstat(self._wal.fileno()).st_size
        db.execute(f"PRAGMA busy_timeout = {_PATIENCE_MS}")

    # The end.

    def close(self, last: Callable[[], None] | None = None) -> None:
        """Mark the file as closed, and close it; without `begin`, only close it.

        `last` makes the last changes, in a transaction. If the file cannot be written, a
        StorageError is raised, and the next process treats this one as killed.
        """
        self._is_closing = True
        self._wake.set()
        if self._syncer is not None:
            self._syncer.join()
        # Without it, a file that is marked as open would count as a copy.
        needs_log = (self.was_killed and self._had_log) or bool(self._opened_as)
        try:
            if self._wal is not None and self.failure is None:
                with explaining(self.path):
                    self._check_in_place()
                    with self.step():
                        if last is not None:
                            last()
                    # SQLite forgets that a sync has failed, and would copy pages into the file that
                    # the log on the disk lacks.
                    self.sync()
                    self.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                    # The file is marked as closed only when all other changes are in it.
                    self._mark("", in_use=False)
                    needs_log = False
        finally:
            if self._wal is not None:
                self._wal.close()
                self._wal = None
            with contextlib.suppress(sqlite3.Error):
                disk.close_unchanged(self._db, self.path) if needs_log else self._db.close()

    def cause(self, error: Exception) -> Exception:
        """Return why an access failed: an error, or that the file is not in place."""
        try:
            self._check_in_place()
        except StorageError as not_in_place:
            return not_in_place
        return error

    def _check_in_place(self) -> None:
        """Raise a StorageError if the file was removed or replaced while it is open."""
        with contextlib.suppress(OSError):
            if self._opened_as.startswith(identity(self.path)):
                return
        raise StorageError(
            f"{self.path} was removed, or replaced by another file, while the crawl used it: what "
            "this process recorded and queued is lost, and the next crawl crawls it again if it "
            "finds links to it"
        )

    def close_whole(self) -> None:
        """Close it without changes, and without a log; raises StorageError."""
        with explaining(self.path):
            if self.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
                raise ValueError("another process is reading it")
            self._db.close()
            # If another process has it open, SQLite has left them, for the next file of the name.
            for part in disk.log_and_index(self.path):
                part.unlink(missing_ok=True)


def _create(path: Path) -> None:
    """Create the file without a queue and without a filter; raises sqlite3.Error or OSError."""
    draft = path.with_name(f"{path.name}.tmp")
    draft.unlink(missing_ok=True)  # of a process that was killed
    try:
        with contextlib.closing(sqlite3.connect(draft, isolation_level=None)) as db:
            db.execute("PRAGMA journal_mode = MEMORY")  # a journal on the disk would be refused
            db.execute(f"PRAGMA application_id = {DATABASE_ID}")
            db.execute(f"PRAGMA user_version = {FORMAT_VERSION}")
            db.executescript(f"BEGIN; {_SCHEMA} COMMIT;")
        draft.rename(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    disk.sync_directory(path.parent)


def identity(path: Path) -> str:
    """Return the path and the inode number of a file, which differ in a copy; raises OSError."""
    return f"{os.path.realpath(path)!a} {path.stat().st_ino} "


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Store the changes of a `with` block in one transaction; raises sqlite3.Error."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # if the disk is full, SQLite has rolled it back already
            db.execute("ROLLBACK")
        raise


def check_database(db: sqlite3.Connection, path: Path) -> None:
    """Raise a StorageError if an open database is foreign or of a newer format.

    Raises ValueError if it is cut off: SQLite would read a page with a missing end as an empty one.
    """
    log, _ = disk.log_and_index(path)
    page_size = db.execute("PRAGMA page_size").fetchone()[0]
    if not (log.exists() and log.stat().st_size) and path.stat().st_size % page_size:
        raise ValueError("it is cut off")
    is_ours = db.execute("PRAGMA application_id").fetchone()[0] == DATABASE_ID
    if (version := db.execute("PRAGMA user_version").fetchone()[0]) > FORMAT_VERSION and is_ours:
        raise StorageError(
            f"{path} has format version {version}, and this scrapy_bloom supports versions up to "
            f"{FORMAT_VERSION}. Upgrade scrapy_bloom to resume this job"
        )
    if not is_ours or not disk.has_schema(db, _SCHEMA):
        raise StorageError(
            f"{path} is a database of another program; it was left as it is. Move it away, or set "
            "another JOBDIR"
        )


@contextlib.contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Open the file of a job for reading in a `with` block; raises StorageError."""
    with explaining(path), contextlib.closing(disk.connect_readonly(path)) as db:
        check_database(db, path)
        yield db


@contextlib.contextmanager
def explaining(path: Path) -> Iterator[None]:
    """Turn the errors that a damaged file causes in a `with` block into StorageErrors."""
    try:
        yield
    except (sqlite3.Error, OSError, ValueError, TypeError, LookupError) as error:
        raise unusable(path, error) from error


def typed(row: Sequence[Any], *kinds: type) -> Any:
    """Return a row of a file, which may have values of any type; raises ValueError."""
    for value, kind in zip(row, kinds, strict=True):
        if not isinstance(value, kind):
            raise ValueError(f"it has the value {value!r:.60}")  # noqa: TRY004 - of the file
    return row


def stored_text(text: str) -> str:
    """Return a text without surrogates, which SQLite cannot store."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def unusable(path: Path, why: Exception | str) -> StorageError:
    """Return the error for a file that cannot be read or written."""
    disk.raise_interrupt()
    is_full = isinstance(why, OSError) and why.errno in disk.FULL
    if is_full or any(text in str(why) for text in ("disk is full", "disk I/O error")):
        return StorageError(
            f"{path} cannot be used: {why}; nothing is lost: free some space or repair the disk, "
            "and try again"
        )
    return StorageError(
        f"{path} cannot be used: {why}; it was left as it is. If it is damaged, restore it from "
        "a backup, or move it away to start the job over"
    )

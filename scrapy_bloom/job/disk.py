"""Open the files of jobs and filters, and write them so that they survive a power cut.

Whatever opens such a file calls `opened`, or `check_file` if a library opens it: SQLite, filelock.
"""

import contextlib
import errno
import os
import sqlite3
import stat
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

from scrapy_bloom.exceptions import StorageError

_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # for the writer of a pipe
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LONGEST_PATH = 500  # bytes: SQLite has 512, for the suffixes of a draft and its journal, too
# Of SQLite's virtual machine. To copy a queue takes a quarter of a step per byte.
_STEPS, _STEPS_PER_BYTE, _STEPS_PER_LOOK = 2_000_000, 2, 100_000
_interrupts: list[KeyboardInterrupt] = []  # during queries, which Python's sqlite3 drops


def opened(path: Path, mode: str = "rb", *, buffering: int = -1) -> BinaryIO:
    """Open a file of a job or a filter; raises StorageError as `check_file` does, or OSError."""
    writes = "+" in mode
    check_file(path, writes=writes)

    def opener(name: str, flags: int) -> int:
        fd = os.open(name, flags | _NO_LINK | _NO_WAIT)
        try:
            _check(path, os.fstat(fd), writes=writes)  # it may have been replaced since
        except BaseException:
            os.close(fd)
            raise
        return fd

    return cast("BinaryIO", open(path, mode, buffering=buffering, opener=opener))


def check_file(path: Path, *, writes: bool = False) -> None:
    """Raise a StorageError if a file of a job is a link, a pipe or a device; it need not exist.

    Another user may have put it there: a link that leads to a file of another job or program, or a
    pipe that never ends. A file that is to be written must have no second name (hard link). Raises
    OSError.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        _check(path, path.lstat(), writes=writes)


def _check(path: Path, status: os.stat_result, *, writes: bool) -> None:
    if stat.S_ISLNK(status.st_mode) or (
        writes and stat.S_ISREG(status.st_mode) and status.st_nlink > 1
    ):
        kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "a hard link"
        raise StorageError(
            f"{path} is {kind}, and may be a file of another job or program; nothing was changed: "
            "put a copy of the file there, or remove the link"
        )
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise StorageError(
            f"{path} is a pipe, a socket or a device, and not a regular file; it was left as it "
            "is: remove it, or restore the file from a backup"
        )


def advice(error: OSError) -> str:
    """Return what a user can do about an error, for the end of a message."""
    if error.errno in FULL:
        return "free some space"
    if error.errno == errno.ENAMETOOLONG:
        return "use a shorter path"
    if error.errno == errno.EROFS:
        return "mount it for writing"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "allow this user to write there"
    return "fix the cause"


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn an OSError of a `with` block into a StorageError that names the file to be written."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror or error}; {advice(error)}"
        ) from error


def create(path: Path) -> BinaryIO:
    """Open a new file for writing, in place of a file or a symbolic link; raises OSError."""
    path.unlink(missing_ok=True)
    return path.open("xb")


def check_same(directory: Path, status: os.stat_result) -> None:
    """Raise a StorageError if a directory, or what a link leads to, is not that of a status."""
    with contextlib.suppress(OSError):
        if os.path.samestat(directory.stat(), status):
            return
    raise StorageError(
        f"{directory} was removed, or replaced by another directory, while this command ran; "
        "nothing was deleted: look what is there, and run the command again"
    )


def drop_cached_pages(*paths: Path) -> None:
    """Make the next read of files come from the disk, where the system can; raises OSError.

    After a failed sync, the kernel marks the pages that it could not write as clean: its page cache
    then shows data that the disk lacks. The kernel drops only pages of files that nobody has open.
    """
    for path in paths:
        with contextlib.suppress(FileNotFoundError), opened(path, "r+b", buffering=0) as file:
            os.fsync(file.fileno())
            if sys.platform == "linux":
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def sync_tree(path: Path) -> None:
    """Sync a directory, everything in it, and its entry in its parent; raises OSError."""
    if not path.is_dir():
        return
    with ThreadPoolExecutor(16) as pool:  # 15 times as fast as one sync at a time
        list(pool.map(_sync, path.rglob("*")))
    sync_directory(path)
    sync_directory(path.parent)


def _sync(path: Path) -> None:
    if path.is_dir():
        sync_directory(path)
    elif path.is_file():
        with path.open("r+b", buffering=0) as file:  # Windows syncs only a file open for writing
            os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Sync the entries of a directory, if the file system can."""
    with contextlib.suppress(OSError):  # some file systems cannot, and Windows never can
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def log_and_index(database: Path) -> tuple[Path, Path]:
    """Return the paths of the write-ahead log of a SQLite database, and of the log's index."""
    return database.with_name(f"{database.name}-wal"), database.with_name(f"{database.name}-shm")


def check_database_files(database: Path, *, writes: bool = True) -> None:
    """Raise a StorageError if SQLite must not, or cannot, open a database; raises OSError.

    SQLite makes files even if it cannot write to the database, and so leaves files behind that
    nobody can write to.
    """
    length = len(os.fsencode(os.path.realpath(database)))
    if length > _LONGEST_PATH:
        raise StorageError(
            f"{database}: its path has {length} bytes, and SQLite can open a path of up to "
            f"{_LONGEST_PATH}; set JOBDIR to a directory with a shorter path"
        )
    journal = database.with_name(f"{database.name}-journal")
    if os.path.lexists(journal):  # which may name any file of the user for SQLite to delete
        raise StorageError(
            f"{journal} would make SQLite change {database.name}, and perhaps other files, and "
            "scrapy_bloom never makes such a file; nothing was changed: move it away, or restore "
            f"{database.name} from a backup"
        )
    files = (database, *log_and_index(database))
    for file in files:
        check_file(file, writes=writes)
    for part in (database.parent, *files) if writes else ():
        if part.exists() and not os.access(part, os.W_OK):
            raise StorageError(
                f"{part} is not writable; nothing was changed: allow this user to write it (chmod "
                "u+w, or chown if it is a file of another user)"
            )


def limit_steps(db: sqlite3.Connection, database: Path) -> None:
    """Let Ctrl-C end the queries of a connection, and end those that would practically never end.

    The limit counts all queries together; a further call begins at 0. In a hostile file of 24
    pages, each may name the next one as all its children. `unusable` raises the KeyboardInterrupt.
    Raises OSError.
    """
    files = (file for file in (database, *log_and_index(database)) if file.exists())
    steps = _STEPS + _STEPS_PER_BYTE * sum(file.stat().st_size for file in files)

    def looks() -> Iterator[bool]:
        try:
            for _ in range(steps // _STEPS_PER_LOOK):
                yield bool(_interrupts)
        except KeyboardInterrupt as error:
            _interrupts.append(error)

    # Python handles signals when it runs code: from now on, in the `try` of the generator.
    next(looking := looks())
    db.set_progress_handler(partial(next, looking, True), _STEPS_PER_LOOK)


def raise_interrupt() -> None:
    """Raise the KeyboardInterrupt that has ended a query."""
    if _interrupts:
        raise _interrupts.pop()


def use_log(db: sqlite3.Connection) -> None:
    """Have a new database use a write-ahead log from now on."""
    if db.execute("PRAGMA journal_mode").fetchone()[0] != "wal":  # or it is a backup of SQLite's
        db.execute("PRAGMA journal_mode = MEMORY")  # a journal that a kill leaves would be refused
        db.execute("PRAGMA journal_mode = WAL")


def connect_readonly(database: Path) -> sqlite3.Connection:
    """Connect to a database for reading, even while a crawl uses it or in a read-only directory.

    The connection changes no file and leaves none behind, except for the index of a log that has
    none, and an empty log if a crawl closes the database at that moment. Raises StorageError,
    sqlite3.Error or OSError.
    """
    for _ in range(2):  # the log and its index may appear and disappear while this function looks
        with contextlib.suppress(sqlite3.OperationalError, FileNotFoundError):
            return _opened_as_it_is(database)
    return _opened_as_it_is(database)


def _opened_as_it_is(database: Path) -> sqlite3.Connection:
    check_database_files(database, writes=False)
    log, index = log_and_index(database)
    if not log.exists():  # no process has it open; without this option, SQLite would create a log
        return _connected(database, "immutable=1")
    if index.exists():  # without readonly_shm, SQLite may write to the index
        with contextlib.suppress(sqlite3.OperationalError):
            return _connected(database, "mode=ro&readonly_shm=1")
    try:
        return _connected(database, "mode=ro")
    except sqlite3.OperationalError as error:
        if os.access(database.parent, os.W_OK):
            raise
        raise StorageError(
            f"{log} cannot be read without {index.name}, which cannot be created there: allow this "
            "user to write there, or copy the files to another directory"
        ) from error


def close_unchanged(db: sqlite3.Connection, database: Path) -> None:
    """Close a connection without letting SQLite empty or remove the write-ahead log."""
    with contextlib.ExitStack() as stack, contextlib.suppress(sqlite3.Error, OSError):
        log, _ = log_and_index(database)
        if log.exists():  # SQLite keeps a log that another connection reads
            stack.enter_context(contextlib.closing(connect_readonly(database)))
        db.close()
    db.close()


def _connected(database: Path, options: str) -> sqlite3.Connection:
    db = sqlite3.connect(f"{database.resolve().as_uri()}?{options}", uri=True)
    try:
        limit_steps(db, database)
        db.execute("BEGIN")  # all queries see the same state, also if a crawl closes the file
        # BEGIN reads nothing. Nothing ends a count(*) of all rows early.
        db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
    except BaseException:
        db.close()
        raise
    return db


def has_schema(db: sqlite3.Connection, script: str) -> bool:
    """Return whether a database has the tables that an SQL script makes, and nothing else.

    A hostile file may have a view in place of a table, or a trigger, whose query never ends. Raises
    sqlite3.Error.
    """
    query = "SELECT type, name, sql FROM sqlite_master LIMIT 100"
    with contextlib.closing(sqlite3.connect(":memory:")) as new:
        new.executescript(script)
        expected = set(new.execute(query))
    found = set(db.execute(query))
    return {entry for entry in expected if entry[0] == "table"} <= found <= expected

"""Write files so that they survive a power cut, and handle the files of a SQLite database."""

import contextlib
import os
import shutil
import sqlite3
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from scrapy_bloom.exceptions import StorageError


def create(path: Path, *, buffering: int = -1) -> IO[bytes]:
    """Open a new file for appending; replace a file that a killed process left at the path.

    The function never follows a symbolic link that somebody else placed there. Raises OSError.
    """
    path.unlink(missing_ok=True)
    return open(path, "ab", buffering=buffering, opener=_opened_exclusively)


def _opened_exclusively(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o666)


def replace_file(path: Path, contents: str | bytes) -> None:
    """Write a small file atomically and sync it to the disk; raises OSError."""
    draft = path.with_name(f"{path.name}.tmp")
    with create(draft) as file:
        file.write(contents.encode() if isinstance(contents, str) else contents)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    sync_directory(path.parent)


def check_file(path: Path) -> None:
    """Raise a StorageError for a pipe, socket or device, because reading it might never end.

    The file need not exist. Raises OSError if its directory is not readable.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise StorageError(
            f"{path} is a pipe, a socket or a device, and not a regular file; it was left as it "
            "is: remove it, or restore the file from a backup"
        )


def drop_cached_pages(*paths: Path) -> None:
    """Make the next read of files come from the disk, where the system can; raises OSError.

    After a failed sync, the kernel marks the pages that it could not write as clean: its page cache
    then shows data that the disk lacks. The kernel drops only pages of files that nobody has open.
    """
    for path in paths:
        with contextlib.suppress(FileNotFoundError), path.open("r+b", buffering=0) as file:
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


def check_no_links(database: Path) -> None:
    """Raise a StorageError if a file of a SQLite database is a symbolic link."""
    for part in (database, *log_and_index(database)):
        if part.is_symlink():
            raise StorageError(
                f"{part} is a symbolic link, and the crawl would overwrite the file that it leads "
                "to; nothing was changed: put the file itself there, or remove the link"
            )


def connect_readonly(database: Path) -> sqlite3.Connection:
    """Connect to a database for reading, even while a crawl uses it or in a read-only directory.

    The connection changes no file and leaves none behind, except for an empty log if a crawl closes
    the database at that moment. Raises sqlite3.Error or OSError.
    """
    for _ in range(2):  # the log and its index may appear and disappear while this function looks
        with contextlib.suppress(sqlite3.OperationalError, FileNotFoundError):
            return _opened_as_it_is(database)
    return _opened_as_it_is(database)


def _opened_as_it_is(database: Path) -> sqlite3.Connection:
    log, index = log_and_index(database)
    if not log.exists():  # no process has it open; without this option, SQLite would create a log
        return _connected(database, "immutable=1")
    if index.exists():  # without readonly_shm, SQLite may write to the index
        with contextlib.suppress(sqlite3.OperationalError):
            return _connected(database, "mode=ro&readonly_shm=1")
        return _connected(database, "mode=ro")
    directory = tempfile.mkdtemp()
    try:
        for part in (database, log):
            shutil.copy(part, directory)
        return _connected(Path(directory, database.name), "mode=ro")
    finally:  # the connection stays usable; Windows does not delete the files that it has open
        shutil.rmtree(directory, ignore_errors=True)


def close_unchanged(db: sqlite3.Connection, database: Path) -> None:
    """Close a connection without letting SQLite empty the write-ahead log."""
    with contextlib.ExitStack() as stack, contextlib.suppress(sqlite3.Error, OSError):
        log, _ = log_and_index(database)
        if log.exists() and log.stat().st_size:  # SQLite keeps a log that another connection reads
            stack.enter_context(contextlib.closing(connect_readonly(database)))
        db.close()
    db.close()


def _connected(database: Path, options: str) -> sqlite3.Connection:
    db = sqlite3.connect(f"{database.resolve().as_uri()}?{options}", uri=True)
    try:
        db.execute("BEGIN")  # all queries see the same state, also if a crawl closes the file
        db.execute("SELECT count(*) FROM sqlite_master").fetchone()  # BEGIN reads nothing
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
    return {each for each in expected if each[0] == "table"} <= found <= expected

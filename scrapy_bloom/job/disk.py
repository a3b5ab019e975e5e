"""Files that survive a power cut, and the files of a SQLite database."""

import contextlib
import os
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING

from scrapy_bloom.exceptions import StorageError

if TYPE_CHECKING:
    import sqlite3


def create(path: Path, *, buffering: int = -1) -> IO[bytes]:
    """Open a new file to append to, in place of what a killed process has left there.

    A symbolic link that somebody else has put there is not followed. Raises OSError.
    """
    path.unlink(missing_ok=True)
    return open(path, "ab", buffering=buffering, opener=_opened_exclusively)


def _opened_exclusively(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o666)


def replace_file(path: Path, contents: str | bytes) -> None:
    """Write a small file to the disk, whole or not at all; raises OSError."""
    draft = path.with_name(f"{path.name}.tmp")
    with create(draft) as file:
        file.write(contents.encode() if isinstance(contents, str) else contents)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    sync_directory(path.parent)


def read_anew(*paths: Path) -> None:
    """Have files that a crash left read from the disk, where the system can; raises OSError.

    Once a sync has failed, the kernel takes what it could not write for written, and memory shows
    what the disk lacks. So nobody may have them open.
    """
    for path in paths:
        with contextlib.suppress(FileNotFoundError), path.open("r+b", buffering=0) as file:
            os.fsync(file.fileno())
            if sys.platform == "linux":
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def sync_tree(path: Path) -> None:
    """Write a directory to the disk, with all that is in it, and its entry; raises OSError."""
    if not path.is_dir():
        return
    with ThreadPoolExecutor(16) as pool:  # the disk takes many at once: it is 15 times as fast
        list(pool.map(_sync, path.rglob("*")))
    sync_directory(path)
    sync_directory(path.parent)


def _sync(path: Path) -> None:
    if path.is_dir():
        sync_directory(path)
    elif path.is_file():
        with path.open("r+b", buffering=0) as file:  # for writing: Windows syncs no other file
            os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Write the entries of a directory to the disk, where the file system can."""
    with contextlib.suppress(OSError):  # not every one can, and Windows never
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def beside(database: Path) -> tuple[Path, Path]:
    """Return the paths of the write-ahead log and its index, which are a part of a database."""
    return database.with_name(f"{database.name}-wal"), database.with_name(f"{database.name}-shm")


def check_no_links(database: Path) -> None:
    """Raise a StorageError if SQLite would follow a symbolic link that somebody has put there."""
    for part in (database, *beside(database)):
        if part.is_symlink():
            raise StorageError(
                f"{part} is a symbolic link, and what it leads to would be overwritten; nothing "
                "was changed: put the file itself there, or remove the link"
            )


def sync_log(database: Path) -> None:
    """Write a database to the disk by its write-ahead log; in any thread; raises OSError.

    What is not in that log any more, SQLite has written to the disk. (The other files must not be
    opened here: closing them would end the locks that SQLite has on them in this process.)
    """
    log, _ = beside(database)
    # For writing: Windows syncs no other file.
    with contextlib.suppress(FileNotFoundError), log.open("r+b", buffering=0) as file:
        os.fsync(file.fileno())


def connect_readonly(database: Path) -> "sqlite3.Connection":
    """Connect to a database, also while a crawl uses it, and where nothing may be written.

    No file is changed or left behind. Raises sqlite3.Error or OSError.
    """
    import sqlite3  # noqa: PLC0415 - it takes a MB

    log, index = beside(database)
    if not log.exists():  # nobody has it open, and SQLite would make one
        return _connected(database, "immutable=1")
    if index.exists():  # SQLite may write to it, unless it is told not to
        with contextlib.suppress(sqlite3.OperationalError):
            return _connected(database, "mode=ro&readonly_shm=1")
        return _connected(database, "mode=ro")
    directory = tempfile.mkdtemp()
    try:
        for part in (database, log):
            shutil.copy(part, directory)
        return _connected(Path(directory, database.name), "mode=ro")
    finally:  # it is open by then, and Windows leaves it where it is
        shutil.rmtree(directory, ignore_errors=True)


def close_unchanged(db: "sqlite3.Connection", database: Path) -> None:
    """Close a connection, and leave the write-ahead log as it is, where SQLite would empty it."""
    import sqlite3  # noqa: PLC0415 - as above

    with contextlib.ExitStack() as held, contextlib.suppress(sqlite3.Error, OSError):
        log, _ = beside(database)
        if log.exists() and log.stat().st_size:  # as long as somebody reads it, SQLite leaves it
            held.enter_context(contextlib.closing(connect_readonly(database)))
        db.close()
    db.close()


def _connected(database: Path, options: str) -> "sqlite3.Connection":
    import sqlite3  # noqa: PLC0415 - as above

    db = sqlite3.connect(
        f"{database.resolve().as_uri()}?{options}",
        uri=True,
        check_same_thread=False,  # a shell opens it in one thread and uses it in another
    )
    try:
        db.execute("SELECT count(*) FROM sqlite_master").fetchone()  # it is read only now
    except BaseException:
        db.close()
        raise
    return db


def has_schema(db: "sqlite3.Connection", script: str) -> bool:
    """Return whether a database has the tables of an SQL script, and nothing that it has not.

    A file of somebody else may have a view in place of a table, or a trigger, that never ends.
    Raises sqlite3.Error.
    """
    import sqlite3  # noqa: PLC0415 - as above

    query = "SELECT type, name, sql FROM sqlite_master LIMIT 100"
    with contextlib.closing(sqlite3.connect(":memory:")) as new:
        new.executescript(script)
        expected = set(new.execute(query))
    found = set(db.execute(query))
    return {each for each in expected if each[0] == "table"} <= found <= expected

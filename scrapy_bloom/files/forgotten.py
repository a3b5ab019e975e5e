"""The forgotten requests of a filter in files: a SQLite database beside its generations."""

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.job.disk import check_no_links, connect_readonly, has_schema, log_and_index

if TYPE_CHECKING:
    import sqlite3

NAME = "forgotten.sqlite"
_APPLICATION_ID = 0x626C6F66  # "blof"
_FORMAT_VERSION = 1
_BUSY_SECS = 5.0  # while another process writes: that takes milliseconds
_TABLE = """forgotten (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- grows with each addition, also after a removal
    fingerprint BLOB NOT NULL UNIQUE,
    forgotten_at REAL NOT NULL
)"""
_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS {_TABLE};
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {_FORMAT_VERSION};
COMMIT;
"""
_ADD = "INSERT OR REPLACE INTO forgotten (fingerprint, forgotten_at) VALUES (?, ?)"
_REMOVE = "DELETE FROM forgotten WHERE fingerprint = ?"


def files(directory: Path) -> list[Path]:
    """Return the database of a filter's directory, and what SQLite keeps beside it."""
    database = directory / NAME
    return [path for path in (database, *log_and_index(database)) if path.exists()]


class ForgottenFile:
    """A set of forgotten fingerprints in a SQLite database. Each change is a transaction.

    A `scrapy bloom forget` may add to the file while a crawl uses it.

    Args:
        path: the file, made when something is first forgotten.
        readonly: nothing changes, and no file appears beside it.
    """

    def __init__(self, path: Path, *, readonly: bool = False) -> None:
        self._path = path
        self._readonly = readonly
        self._opened: sqlite3.Connection | None = None
        self._version: object = None  # of the file, as others have changed it
        self._last_id = 0

    def news(self) -> Iterable[bytes]:
        """Return what others have added since the last call."""
        version = self._rows("PRAGMA data_version")
        if version in ([], self._version):
            return []
        query = "SELECT id, fingerprint FROM forgotten WHERE id > ? ORDER BY id"
        rows = self._rows(query, self._last_id)
        self._version = version
        if rows:
            self._last_id = rows[-1][0]
        return [fingerprint for _, fingerprint in rows]

    def all(self) -> Iterable[bytes]:
        """Return the whole set."""
        rows = self._rows("SELECT fingerprint FROM forgotten")
        return [fingerprint for (fingerprint,) in rows]

    def add(self, fingerprints: Sequence[bytes]) -> None:
        """Add fingerprints; those that are there count as added now."""
        now = time.time()
        with self._used() as db, db:
            db.execute("BEGIN IMMEDIATE")
            db.executemany(_ADD, [(fingerprint, now) for fingerprint in fingerprints])

    def change(self, changes: Mapping[bytes, bool]) -> None:
        """Add and remove fingerprints in one transaction: those with True are added.

        It is on the disk then; raises StorageError.
        """
        now = time.time()
        added = [(fingerprint, now) for fingerprint, forgets in changes.items() if forgets]
        if not added and not self._path.exists():
            return
        removed = [(fingerprint,) for fingerprint, forgets in changes.items() if not forgets]
        with self._used() as db:
            # Else SQLite may sync its log in a checkpoint of its own, and hide that this failed.
            db.execute("PRAGMA synchronous = FULL")
            with db:
                db.execute("BEGIN IMMEDIATE")
                db.executemany(_REMOVE, removed)
                db.executemany(_ADD, added)
            db.execute("PRAGMA synchronous = NORMAL")

    def take(self, fingerprint: bytes) -> bool:
        """Take a fingerprint out; return whether it was there."""
        is_there = self.has(fingerprint)
        if is_there:
            self._rows(_REMOVE, fingerprint)
        return is_there

    def has(self, fingerprint: bytes) -> bool:
        """Return whether a fingerprint is in the set."""
        return bool(self._rows("SELECT 1 FROM forgotten WHERE fingerprint = ?", fingerprint))

    def expire(self, secs: float) -> None:
        """Remove what was added longer ago than that."""
        self._rows("DELETE FROM forgotten WHERE forgotten_at < ?", time.time() - secs)

    def __len__(self) -> int:
        return sum(number for (number,) in self._rows("SELECT count(*) FROM forgotten"))

    def close(self) -> None:
        """Close the file."""
        if self._opened is not None:
            with self._used() as db:
                db.close()
            self._opened = None

    def _rows(self, query: str, *values: object) -> list[Any]:
        """Run a query, and return its rows; none if there is no file yet."""
        if self._opened is None and not self._path.exists():
            return []
        with self._used() as db:
            return db.execute(query, values).fetchall()

    @contextlib.contextmanager
    def _used(self) -> "Iterator[sqlite3.Connection]":
        """Connect, if that was not done yet, and say what fails in one line."""
        import sqlite3  # noqa: PLC0415 - for those who forget something

        try:
            if self._opened is None:
                self._opened = self._connected()
            yield self._opened
        except (sqlite3.Error, OSError) as error:
            raise self._unusable(str(error)) from error

    def _connected(self) -> "sqlite3.Connection":
        import sqlite3  # noqa: PLC0415 - as above

        check_no_links(self._path)
        if self._readonly:
            db = connect_readonly(self._path)
        else:
            db = sqlite3.connect(
                self._path,
                timeout=_BUSY_SECS,
                isolation_level=None,
                check_same_thread=False,  # a shell opens it in one thread and uses it in another
            )
        try:
            is_new = not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            self._check(db, is_new=is_new)
            if not self._readonly:
                db.execute("PRAGMA journal_mode = WAL")
                db.execute("PRAGMA synchronous = NORMAL")
            # The disk was full when the file was made, or its process was killed.
            if is_new:
                db.executescript(f"CREATE TEMP TABLE {_TABLE}" if self._readonly else _SCHEMA)
        except BaseException:
            db.close()
            raise
        return db

    def _check(self, db: "sqlite3.Connection", *, is_new: bool) -> None:
        (application_id,) = db.execute("PRAGMA application_id").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
        # 0 while another process makes it, too.
        if application_id != _APPLICATION_ID and (application_id or not is_new):
            raise self._unusable("it is a database of something else")
        if version > _FORMAT_VERSION:
            raise self._unusable(
                f"it has format version {version}, and this scrapy_bloom knows versions up to "
                f"{_FORMAT_VERSION}"
            )
        if not is_new and not has_schema(db, _SCHEMA):
            raise self._unusable("it is a database of something else")

    def _unusable(self, why: str) -> StorageError:
        return StorageError(
            f"{self._path} of the forgotten requests cannot be used: "
            f"{why}; it was left as it is: restore it from a backup, or move it away to go on "
            "without it (forgotten requests are then reported as duplicates, and not crawled again)"
        )

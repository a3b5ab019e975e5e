"""Keep the forgotten requests of a filter in files in a SQLite database in the same directory."""

import contextlib
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.files.log import Overlay
from scrapy_bloom.job.disk import check_no_links, connect_readonly, has_schema, log_and_index

NAME = "forgotten.sqlite"
_APPLICATION_ID = 0x626C6F66  # "blof"
_FORMAT_VERSION = 1
_BUSY_SECS = 5.0  # longest wait for another process that writes, which takes milliseconds
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
    """Return the existing files of the database in a filter's directory."""
    database = directory / NAME
    return [path for path in (database, *log_and_index(database)) if path.exists()]


class ForgottenFile:
    """A set of forgotten fingerprints in a SQLite database. Each change is a transaction.

    The command `scrapy bloom forget` may add to the file while a crawl uses it.

    Args:
        path: the file, which the first addition creates.
        readonly: change nothing, and create no file.

    Attributes:
        overlay: additions and removals go there first; None if the filter has no log.
    """

    def __init__(self, path: Path, *, readonly: bool = False) -> None:
        self.overlay: Overlay | None = None
        self._path = path
        self._readonly = readonly
        self._opened: sqlite3.Connection | None = None
        self._version: object = None  # SQLite's data_version, which other connections change
        self._last_id = 0

    def news(self) -> Iterable[bytes]:
        """Return the fingerprints that were added since the last call."""
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
        """Return the whole set in the file."""
        return [each for (each,) in self._rows("SELECT fingerprint FROM forgotten")]

    def add(self, fingerprints: Sequence[bytes]) -> None:
        """Add fingerprints; one that is in the set already gets the current time."""
        if self.overlay is not None:
            self.overlay.forget(fingerprints)
            return
        now = time.time()
        with self._used() as db, db:
            db.execute("BEGIN IMMEDIATE")
            db.executemany(_ADD, [(fingerprint, now) for fingerprint in fingerprints])

    def change(self, changes: Mapping[bytes, bool]) -> None:
        """Add and remove fingerprints in one transaction, and sync it; raises StorageError.

        Args:
            changes: for each fingerprint, whether it is added (True) or removed (False).
        """
        now = time.time()
        added = [(fingerprint, now) for fingerprint, forgets in changes.items() if forgets]
        removed = [(fingerprint,) for fingerprint, forgets in changes.items() if not forgets]
        if not added and not (removed and self._path.exists()):
            return
        with self._used() as db:
            # Otherwise a checkpoint of SQLite may sync the log, and hide that the sync failed.
            db.execute("PRAGMA synchronous = FULL")
            with db:
                db.execute("BEGIN IMMEDIATE")
                db.executemany(_REMOVE, removed)
                db.executemany(_ADD, added)
            db.execute("PRAGMA synchronous = NORMAL")

    def remove(self, fingerprint: bytes) -> None:
        """Remove a fingerprint, if it is in the set."""
        if self.overlay is not None:
            self.overlay.record_again(fingerprint)
        else:
            self._rows(_REMOVE, fingerprint)

    def has(self, fingerprint: bytes) -> bool:
        """Return whether a fingerprint is in the file."""
        return bool(self._rows("SELECT 1 FROM forgotten WHERE fingerprint = ?", fingerprint))

    def expire(self, secs: float) -> None:
        """Remove the fingerprints that were added more than `secs` seconds ago."""
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
        """Run a query, and return its rows; no rows if the file does not exist yet."""
        if self._opened is None and not self._path.exists():
            return []
        with self._used() as db:
            return db.execute(query, values).fetchall()

    @contextlib.contextmanager
    def _used(self) -> Iterator[sqlite3.Connection]:
        """Return the connection, and turn errors into a StorageError."""
        try:
            if self._opened is None:
                self._opened = self._connected()
            yield self._opened
        except (sqlite3.Error, OSError) as error:
            raise self._unusable(str(error)) from error

    def _connected(self) -> sqlite3.Connection:
        check_no_links(self._path)
        if self._readonly:
            db = connect_readonly(self._path)
        else:
            db = sqlite3.connect(
                self._path,
                timeout=_BUSY_SECS,
                isolation_level=None,
                check_same_thread=False,  # `scrapy shell` opens and uses it in different threads
            )
        try:
            is_new = not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            self._check(db, is_new=is_new)
            if not self._readonly:
                db.execute("PRAGMA journal_mode = WAL")
                db.execute("PRAGMA synchronous = NORMAL")
            # An existing file is empty if the disk was full, or if its process was killed.
            if is_new:
                db.executescript(f"CREATE TEMP TABLE {_TABLE}" if self._readonly else _SCHEMA)
        except BaseException:
            db.close()
            raise
        return db

    def _check(self, db: sqlite3.Connection, *, is_new: bool) -> None:
        (application_id,) = db.execute("PRAGMA application_id").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
        # The application id is 0 while another process creates the tables, too.
        if application_id != _APPLICATION_ID and (application_id or not is_new):
            raise self._unusable("it is the database of another program")
        if version > _FORMAT_VERSION:
            raise self._unusable(
                f"it has format version {version}, and this scrapy_bloom supports versions up to "
                f"{_FORMAT_VERSION}"
            )
        if not is_new and not has_schema(db, _SCHEMA):
            raise self._unusable("it is the database of another program")

    def _unusable(self, why: str) -> StorageError:
        return StorageError(
            f"{self._path} of the forgotten requests cannot be used: {why}; it was left as it is: "
            "restore it from a backup, or move it away to continue without it (forgotten requests "
            "are then reported as duplicates, and not crawled again)"
        )

"""The requests of a job that are not done yet, in a SQLite database: pending, in flight, or gone.

Each change is a transaction of its own, and survives the death of the process at any instant.
Against a power loss, SQLite's write-ahead log keeps the database whole; the last seconds may be
missing.
"""

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.job.paths import DATABASE_ID
from scrapy_bloom.job.sqlite_files import beside, check_no_links, connect_readonly, has_schema
from scrapy_bloom.queues.queue import Taken

FORMAT_VERSION = 1
_LARGEST = 2**63 - 1  # an integer of SQLite

# A slot is what the downloader counts for itself, mostly a host. Within a priority, requests go by
# `position`. Those in flight are in no index of what is next.
_TABLES = """
    CREATE TABLE requests (
        id INTEGER PRIMARY KEY,
        slot TEXT NOT NULL,
        priority INTEGER NOT NULL,
        is_start INTEGER NOT NULL,
        position INTEGER NOT NULL,
        in_flight INTEGER NOT NULL,
        request BLOB NOT NULL
    )
"""
_INDEXES = {
    True: "CREATE INDEX next_of_slot ON requests (slot, priority DESC, is_start, position) "
    "WHERE in_flight = 0",
    False: "CREATE INDEX next_of_all ON requests (priority DESC, is_start, position) "
    "WHERE in_flight = 0",
}
_NEXT = """
    SELECT id, request FROM requests WHERE in_flight = 0
    ORDER BY priority DESC, is_start, position LIMIT 1
"""
_NEXT_OF_SLOT = _NEXT.replace("ORDER", "AND slot = ? ORDER")


class RequestDatabase:
    """Keeps the requests of a job that are not done yet; see `RequestQueue`.

    Args:
        path: the file; made if missing.
        by_slot: requests are taken slot by slot, see `take`; else by priority alone.

    Raises:
        StorageError: it is damaged, foreign, of a newer format, or cannot be read or written. It is
            then as it was.
    """

    def __init__(self, path: Path, *, by_slot: bool) -> None:
        self.path = path
        self.name = str(path)
        self._by_slot = by_slot
        self._last_slot = ""
        check_no_links(path)
        was_there = path.exists()
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            try:
                self._open()
            except BaseException:
                self._db.close()
                if not was_there:  # an empty one would look like a queue that was cut to nothing
                    for part in (path, *beside(path)):
                        with contextlib.suppress(OSError):
                            part.unlink()
                raise
        except sqlite3.Error as error:
            raise unusable(path, error) from error

    def _open(self) -> None:
        run = self._db.execute
        is_new = not run("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if is_new:
            run("PRAGMA journal_mode = WAL")
        else:
            _check(self._db, self.path)
        run("PRAGMA synchronous = NORMAL")
        run("BEGIN IMMEDIATE")
        if is_new:
            run(f"PRAGMA application_id = {DATABASE_ID}")
            run(f"PRAGMA user_version = {FORMAT_VERSION}")
            run(_TABLES)
        indexes = {name for (name,) in run("SELECT name FROM sqlite_master WHERE type = 'index'")}
        for by_slot, index in _INDEXES.items():
            name = index.split()[2]
            if (by_slot == self._by_slot) != (name in indexes):
                run(index if by_slot == self._by_slot else f"DROP INDEX {name}")
        # When the last process died, if it did.
        self.were_in_flight = run("UPDATE requests SET in_flight = 0 WHERE in_flight").rowcount
        run("COMMIT")
        if is_new:  # not only in the log, which somebody may take for rubbish
            run("PRAGMA wal_checkpoint(TRUNCATE)")
        self.pending, last = run("SELECT count(*), max(id) FROM requests").fetchone()
        self.resumed = self.pending  # how many were there, in flight or not
        self._last_id = last or 0

    def push(self, data: bytes, *, slot: str, priority: int, rank: int, newest_first: bool) -> int:
        """Add a pending request, and return its row; raises sqlite3.Error."""
        priority = max(-_LARGEST, min(priority, _LARGEST))
        row = self._last_id + 1
        slot = slot.encode(errors="backslashreplace").decode()  # SQLite knows no surrogates
        self._db.execute(
            "INSERT INTO requests VALUES (?, ?, ?, ?, ?, 0, ?)",
            (row, slot, priority, rank, -row if newest_first else row, data),
        )
        self._last_id = row
        self.pending += 1
        return row

    def take_back(self) -> None:
        """Remove the request that was pushed last; raises sqlite3.Error."""
        self.done(self._last_id)
        self.pending -= 1

    def take(self, active: Callable[[str], int] = lambda _: 0) -> Taken | None:
        """Take the next request, if any; raises sqlite3.Error."""
        if not self.pending:
            return None
        if self._by_slot:
            self._last_slot = self._next_slot(active)
            row = self._db.execute(_NEXT_OF_SLOT, (self._last_slot,)).fetchone()
        else:
            row = self._db.execute(_NEXT).fetchone()
        self._db.execute("UPDATE requests SET in_flight = 1 WHERE id = ?", row[:1])
        self.pending -= 1
        return Taken(*row)

    def _next_slot(self, active: Callable[[str], int]) -> str:
        """Choose as `take` says. Mostly, the very next slot has no downloads."""
        best = slot = first = self._slot_after(self._last_slot)
        fewest = active(first)
        while fewest > 0 and (slot := self._slot_after(slot)) != first:
            if (number := active(slot)) < fewest:
                best, fewest = slot, number
        return best

    def _slot_after(self, slot: str) -> str:
        """Return the next slot with a pending request, in the order of names, and round again."""
        query = "SELECT slot FROM requests WHERE in_flight = 0 {} ORDER BY slot LIMIT 1"
        row = self._db.execute(query.format("AND slot > ?"), (slot,)).fetchone()
        found: str = (row or self._db.execute(query.format("")).fetchone())[0]
        return found

    def done(self, row: int) -> None:
        """Remove a request that is done; raises sqlite3.Error."""
        self._db.execute("DELETE FROM requests WHERE id = ?", (row,))

    def set_aside(self, row: int) -> None:
        """Do nothing: what is in flight is pending in the next run."""

    def newest(self) -> bytes | None:
        """Return the request that was added last, serialized, if it is not gone."""
        row = self._db.execute("SELECT request FROM requests ORDER BY id DESC LIMIT 1").fetchone()
        data: bytes | None = row[0] if row else None
        return data

    def close(self) -> None:
        """Close the file; what is pending stays. It may fail without harm."""
        with contextlib.suppress(sqlite3.Error):
            self._db.close()


def read_counts(path: Path) -> tuple[int, int]:
    """Count the requests that are pending, and in flight, also of a running crawl.

    Raises a StorageError if the file cannot be read, or is damaged.
    """
    try:
        with contextlib.closing(connect_readonly(path)) as db:
            _check(db, path)
            counts = dict(db.execute("SELECT in_flight, count(*) FROM requests GROUP BY in_flight"))
    except (sqlite3.Error, OSError) as error:
        raise unusable(path, error) from error
    return counts.get(0, 0), counts.get(1, 0)


def _check(db: sqlite3.Connection, path: Path) -> None:
    is_ours = db.execute("PRAGMA application_id").fetchone()[0] == DATABASE_ID
    if (version := db.execute("PRAGMA user_version").fetchone()[0]) > FORMAT_VERSION and is_ours:
        raise StorageError(
            f"{path} has format version {version}, and this scrapy_bloom knows versions up to "
            f"{FORMAT_VERSION}; upgrade scrapy_bloom to go on with this job"
        )
    if not is_ours or not has_schema(db, ";".join([_TABLES, *_INDEXES.values()])):
        raise StorageError(
            f"{path} is a database of something else; it was left as it is: move it away, or give "
            "the crawl another JOBDIR"
        )


def unusable(path: Path, why: sqlite3.Error | OSError | str) -> StorageError:
    """Return what to raise of a database that cannot be read, and why."""
    return StorageError(
        f"{path} cannot be used: {why}; it was left as it is. If it is damaged, restore it from "
        "a backup, or move it away, with the filter beside it, to start the job over"
    )

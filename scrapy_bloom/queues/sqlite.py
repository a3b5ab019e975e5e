"""The SQLite database of a job: its unfinished requests, and the log of its filter.

Each batch is one transaction, so a killed process leaves no partial batch. After a power loss, the
last batches may be missing: the database is then in the state of an earlier moment.
"""

import contextlib
import os
import secrets
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.files.log import Change, pack_changes, unpack_changes
from scrapy_bloom.job.disk import (
    check_no_links,
    close_unchanged,
    drop_cached_pages,
    has_schema,
    log_and_index,
)
from scrapy_bloom.job.jobdir import DATABASE_ID
from scrapy_bloom.queues.batch import Batch, Found, Taken

FORMAT_VERSION = 1
MOST_DEATHS = 3  # a request becomes a suspect when so many processes died with it in flight
_PATIENCE_MS = 5000  # how long to wait for a lock of another process
_LOG_BYTES = 64 << 20  # a longer write-ahead log is truncated between two batches

# The states of a request. It is set aside if this run cannot deserialize it. The suspect that was
# handed out last is alone in flight.
PENDING, IN_FLIGHT, SUSPECT, DEAD, SET_ASIDE, ALONE = range(6)

# requests: a slot is a slot of the downloader, usually a host. Within a priority, they are taken by
#     `rank`, then by `position`. The fingerprint is NULL if the request is not filtered.
# ops: the changes of the filter that its files may lack, by the number of their batch.
# runs: a random id for each opening of the log.
# filter_log: one row: `id` is the random id of the log, `seq` is the number of the last batch,
#     `applied` is the number of the last batch that was deleted from `ops`, `left` is the number of
#     requests, `checksum` is the result of `checksum_of`, `opened_as` identifies the file while a
#     crawl uses it (empty after a clean close), and `done` is the number of finished requests, for
#     `scrapy bloom info`.
_TABLES = (
    """
    CREATE TABLE requests (
        id INTEGER PRIMARY KEY,
        state INTEGER NOT NULL,
        slot TEXT NOT NULL,
        priority INTEGER NOT NULL,
        rank INTEGER NOT NULL,
        position INTEGER NOT NULL,
        deaths INTEGER NOT NULL,
        fingerprint BLOB,
        request BLOB NOT NULL
    )
    """,
    "CREATE TABLE ops (seq INTEGER PRIMARY KEY, changes BLOB NOT NULL)",
    "CREATE TABLE runs (id TEXT PRIMARY KEY)",
    """
    CREATE TABLE filter_log (
        id TEXT, seq INTEGER, applied INTEGER, left INTEGER, checksum INTEGER,
        opened_as TEXT, done INTEGER
    )
    """,
)
_INDEXES = {
    True: "CREATE INDEX next_of_slot ON requests (slot, priority DESC, rank, position) "
    "WHERE state = 0",
    False: "CREATE INDEX next_of_all ON requests (priority DESC, rank, position) WHERE state = 0",
}
_NEXT = """
    SELECT id, request, slot FROM requests WHERE state = 0
    ORDER BY priority DESC, rank, position LIMIT 1
"""
# Without the serialized request, because only that of the chosen slot is needed.
_FIRST_OF_SLOTS = """
    SELECT slot, id FROM requests WHERE state = 0
    ORDER BY slot, priority DESC, rank, position LIMIT 1
"""
_NEXT_OF_SLOTS = _FIRST_OF_SLOTS.replace("ORDER", "AND slot > ? ORDER")
_REQUEST = "SELECT id, request, slot FROM requests WHERE id = ?"
_RELEASE = f"""
    UPDATE requests SET state = CASE WHEN deaths >= ? THEN {SUSPECT} ELSE {PENDING} END
    WHERE state IN ({IN_FLIGHT}, {SET_ASIDE}, {ALONE})
"""  # noqa: S608 - constants
_TAKE = "UPDATE requests SET state = ? WHERE id = ?"
INSERT = "INSERT INTO requests VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
_UPDATE_LOG = """
    UPDATE filter_log SET seq = ?, applied = ?, left = ?, checksum = ?, done = ?
"""
_NEXT_SUSPECT = _NEXT.replace("= 0", f"= {SUSPECT}")


class RequestDatabase:
    """Stores a job's requests, and is the `FilterLog` of its filter.

    Args:
        path: the file; created if missing. No other process may have it open.
        by_slot: take requests round-robin by slot, from slots with the fewest downloads first;
            otherwise by priority alone.

    Raises:
        StorageError: the file is damaged, foreign, of a newer format, or cannot be read or written.
            The file is not changed then.

    Attributes:
        left: how many requests are not done, dead requests included.
        resumed: how many requests the file had when the run began, without dead requests.
        were_in_flight: how many requests were in flight when the last process died.
        died: the serialized requests that became dead at this opening.
        suspects: how many suspects can be taken.
    """

    def __init__(self, path: Path, *, by_slot: bool) -> None:
        self.name = str(path)
        self.path = os.path.realpath(path)  # SQLite keeps its log there
        self._wal_path, _ = log_and_index(Path(self.path))
        self.run = secrets.token_hex(8)
        self._by_slot = by_slot
        self._last_slot = ""
        self._checkpointed = self.were_in_flight = 0
        self.died: list[bytes] = []
        self._wal: BinaryIO | None = None
        self._failure: OSError | None = None  # of a sync; nothing is synced after it
        check_no_links(path)
        was_there = path.exists()
        has_log = self._wal_path.exists() and self._wal_path.stat().st_size > 0
        try:
            if has_log:
                drop_cached_pages(path, self._wal_path)
            self._db = sqlite3.connect(
                path, timeout=_PATIENCE_MS / 1000, isolation_level=None, check_same_thread=False
            )
            try:
                self._open(path, has_log=has_log)
            except BaseException:
                close_unchanged(self._db, path)
                if not was_there:  # an empty file would look like a queue that was emptied
                    for part in (path, *log_and_index(path)):
                        with contextlib.suppress(OSError):
                            part.unlink()
                raise
        except (sqlite3.Error, OSError, ValueError) as error:
            raise unusable(path, error) from error

    def _open(self, path: Path, *, has_log: bool) -> None:
        run = self._db.execute
        is_new = not run("SELECT count(*) FROM sqlite_master").fetchone()[0]
        # SQLite would read a page with a missing end as an empty page.
        size, page = path.stat().st_size, run("PRAGMA page_size").fetchone()[0]
        if size % page and not (is_new or has_log):
            raise ValueError("it is cut off")
        if not is_new:
            check_database(self._db, path)
        run("PRAGMA journal_mode = WAL")  # a backup made by SQLite is not in this mode
        run("PRAGMA synchronous = NORMAL")
        run("PRAGMA wal_autocheckpoint = 0")  # automatic checkpoints would sync in the event loop
        if is_new:
            run("BEGIN IMMEDIATE")
            run(f"PRAGMA application_id = {DATABASE_ID}")
            run(f"PRAGMA user_version = {FORMAT_VERSION}")
            for table in _TABLES:
                run(table)
            run("INSERT INTO filter_log VALUES (?, 0, 0, 0, 0, '', 0)", (secrets.token_hex(8),))
            run("COMMIT")
            run("PRAGMA wal_checkpoint(TRUNCATE)")  # so that the file itself has the application id
        row = run("SELECT * FROM filter_log").fetchone()
        self.id, self.seq, self.applied, self.left, self._checksum, last, self._done = row
        self.was_killed = bool(last)
        self.is_copy = self.was_killed and last != self._name_of_file()
        if self.was_killed:
            self._check_contents(is_suspicious=self.is_copy or not has_log)
        self._last_id = run("SELECT max(id) FROM requests").fetchone()[0] or 0
        self.pending = self.suspects = 0

    def _name_of_file(self) -> str:
        """Return the path and the inode number of the file, which differ in a copy."""
        return f"{self.path!a} {os.stat(self.path).st_ino}"  # noqa: PTH116 - of the file, not of the name

    def begin(self) -> None:
        """Begin a run: requests that were in flight become pending, suspect or dead.

        Raises StorageError.
        """
        run = self._db.execute
        try:
            run("BEGIN IMMEDIATE")
            for by_slot, index in _INDEXES.items():
                if by_slot == self._by_slot:
                    run(index.replace("INDEX", "INDEX IF NOT EXISTS"))
                else:
                    run(f"DROP INDEX IF EXISTS {index.split()[2]}")
            if self.was_killed:
                self.died = self._judge_deaths()
            run(_RELEASE, (MOST_DEATHS,))
            run("UPDATE filter_log SET opened_as = ?", (self._name_of_file(),))
            run("INSERT INTO runs VALUES (?)", (self.run,))
            run("COMMIT")
            # The changes must not be in the log alone, because a user may delete it.
            run("PRAGMA wal_checkpoint(TRUNCATE)")
            counts = dict(run("SELECT state, count(*) FROM requests GROUP BY state"))
            # The log stays open: the kernel reports a failed sync to each descriptor once.
            self._wal = self._wal_path.open("r+b", buffering=0)
        except (sqlite3.Error, OSError) as error:
            raise unusable(Path(self.name), error) from error
        self.pending, self.suspects = counts.get(PENDING, 0), counts.get(SUSPECT, 0)
        self.resumed = self.pending + self.suspects

    def _check_contents(self, *, is_suspicious: bool) -> None:
        """Raise a ValueError if a part of the file is missing or outdated."""
        run = self._db.execute
        if is_suspicious and (found := run("PRAGMA integrity_check(1)").fetchone()[0]) != "ok":
            raise ValueError(found.splitlines()[-1])
        number, ids = run("SELECT count(*), ifnull(sum(id), 0) FROM requests").fetchone()
        if number != self.left:
            raise ValueError(f"it holds {number:,} requests where there should be {self.left:,}")
        (numbers,) = run("SELECT ifnull(sum(seq), 0) FROM ops").fetchone()
        if checksum_of(ids, numbers) != self._checksum:
            raise ValueError("a part of it is older than the rest")

    def _judge_deaths(self) -> list[bytes]:
        """Count the death of the last process for the requests that were in flight.

        Returns:
            the requests that became dead.
        """
        run = self._db.execute
        count = run("SELECT count(*) FROM requests WHERE state IN (?, ?)", (IN_FLIGHT, ALONE))
        (self.were_in_flight,) = count.fetchone()
        died = [data for (data,) in run("SELECT request FROM requests WHERE state = ?", (ALONE,))]
        run("UPDATE requests SET state = ? WHERE state = ?", (DEAD, ALONE))
        if not died:  # otherwise the other requests are not to blame
            run("UPDATE requests SET deaths = deaths + 1 WHERE state = ?", (IN_FLIGHT,))
        return died

    # The requests.

    def apply(self, batch: Batch) -> None:
        """Store a batch in one transaction; after an sqlite3.Error, nothing has changed."""
        with self._stored(batch):
            pass

    def take(self, batch: Batch, active: Callable[[str], int] = lambda _: 0) -> Taken | None:
        """Store a batch, and take the next request, if any.

        Args:
            batch: may be empty.
            active: returns how many downloads a slot has.

        Raises:
            sqlite3.Error: nothing has changed.
        """
        if not self.pending and not batch.found:
            if batch or self._checkpointed > self.applied:
                self.apply(batch)
            return None
        with self._stored(batch):
            row = self._next(active)
            self._db.execute(_TAKE, (IN_FLIGHT, row[0]))
        self.pending -= 1
        return Taken(*row)

    def take_suspect(self) -> Taken:
        """Take one of the suspects, and store that it is handed out; raises sqlite3.Error."""
        with self._stored(Batch()):
            row = self._db.execute(_NEXT_SUSPECT).fetchone()
            self._db.execute("UPDATE requests SET state = ? WHERE state = ?", (IN_FLIGHT, ALONE))
            self._db.execute(_TAKE, (ALONE, row[0]))
        self.suspects -= 1
        return Taken(*row)

    @contextlib.contextmanager
    def _stored(self, batch: Batch) -> Iterator[None]:
        """Store a batch, and the changes of the `with` block, in one transaction."""
        run = self._db.execute
        applied = max(self.applied, self._checkpointed)
        run("BEGIN IMMEDIATE")
        try:
            if batch.found:
                rows = enumerate(batch.found, self._last_id + 1)
                self._db.executemany(INSERT, [row_of(number, each) for number, each in rows])
            number, numbers, done = len(batch.found), 0, self._done
            left = self.left + number
            ids = number * self._last_id + number * (number + 1) // 2
            for row in batch.done:
                if run("DELETE FROM requests WHERE id = ?", (row,)).rowcount:
                    left, ids = left - 1, ids - row
                    done += 1
            seq = self.seq + bool(batch)
            if batch.changes:
                run("INSERT INTO ops VALUES (?, ?)", (seq, pack_changes(batch.changes)))
                numbers = seq
            if applied > self.applied:
                gone = run("SELECT ifnull(sum(seq), 0) FROM ops WHERE seq <= ?", (applied,))
                numbers -= gone.fetchone()[0]
                run("DELETE FROM ops WHERE seq <= ?", (applied,))
            checksum = checksum_of(self._checksum + ids, numbers)
            if batch or applied > self.applied:
                run(_UPDATE_LOG, (seq, applied, left, checksum, done))
            yield
            run("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # if the disk is full, SQLite has rolled it back already
                run("ROLLBACK")
            raise
        self.seq, self.applied, self.left = seq, applied, left
        self._checksum, self._done = checksum, done
        self._last_id += number
        self.pending += number
        self._bound_wal()

    def _bound_wal(self) -> None:
        """Truncate the write-ahead log if it is long, unless another process reads it."""
        if self._wal is None or os.fstat(self._wal.fileno()).st_size <= _LOG_BYTES:
            return
        if self._failure is not None:
            return
        try:
            self._db.execute("PRAGMA busy_timeout = 0")  # do not block the event loop
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error:  # the batch is stored; a failed sync ends all further syncs
            with contextlib.suppress(OSError):
                self.sync()
        self._db.execute(f"PRAGMA busy_timeout = {_PATIENCE_MS}")

    def _next(self, active: Callable[[str], int]) -> Any:
        if not self._by_slot:
            return self._db.execute(_NEXT).fetchone()
        best = row = first = self._first_after(self._last_slot)
        # Usually, the next slot has no downloads. If it is the last slot again, there is only one.
        fewest = 0 if first[0] == self._last_slot else active(first[0])
        while fewest > 0 and (row := self._first_after(row[0])) != first:
            if (number := active(row[0])) < fewest:
                best, fewest = row, number
        self._last_slot, chosen = best
        return self._db.execute(_REQUEST, (chosen,)).fetchone()

    def _first_after(self, slot: str) -> Any:
        """Return the next slot by name, starting again after the last, and its first request."""
        row = self._db.execute(_NEXT_OF_SLOTS, (slot,)).fetchone()
        return row or self._db.execute(_FIRST_OF_SLOTS).fetchone()

    def set_aside(self, row: int) -> None:
        """Keep a request that is in flight for a later run; raises sqlite3.Error."""
        self._db.execute("UPDATE requests SET state = ? WHERE id = ?", (SET_ASIDE, row))

    # The log of the filter.

    def has_run(self, run: str) -> bool:
        """Return whether this database has been opened under that run id."""
        return bool(self._db.execute("SELECT 1 FROM runs WHERE id = ?", (run,)).fetchone())

    def changes(self) -> Iterator[tuple[int, Sequence[Change]]]:
        """Return the batches that the filter may lack, in order.

        Raises StorageError if the database is damaged.
        """
        try:
            for seq, data in self._db.execute("SELECT seq, changes FROM ops ORDER BY seq"):
                yield seq, unpack_changes(data)
        except (sqlite3.Error, ValueError) as error:
            raise unusable(Path(self.name), error) from error

    def unfinished(self) -> Iterator[bytes]:
        """Return the fingerprints of all requests that are not done."""
        query = "SELECT fingerprint FROM requests WHERE fingerprint IS NOT NULL"
        return (fingerprint for (fingerprint,) in self._db.execute(query))

    def sync(self) -> None:
        """Write all batches so far to the disk; may be called in any thread; raises OSError."""
        assert self._wal is not None
        if self._failure is None:
            try:
                os.fsync(self._wal.fileno())
            except OSError as error:
                self._failure = error
        if self._failure is not None:
            raise self._failure

    def checkpointed(self, seq: int) -> None:
        """Mark the changes up to a batch as applied to the filter; may be called in any thread.

        The next batch deletes these changes.
        """
        self._checkpointed = seq
        # Another thread needs its own connection. With mode=rw, a missing file is not created.
        uri = f"{Path(self.path).as_uri()}?mode=rw"
        try:
            with contextlib.closing(sqlite3.connect(uri, uri=True)) as db:
                db.execute("PRAGMA wal_checkpoint(PASSIVE)")
        except sqlite3.Error as error:  # perhaps of a sync, which must not be repeated
            self._failure = self._failure or OSError(f"its checkpoint failed: {error}")

    def close(self) -> None:
        """Close the file, and make requests in flight pending again for the next run.

        If that fails, the next run treats this run as killed, and no request is lost.
        """
        is_closed = False
        if self._wal is not None:
            with contextlib.suppress(sqlite3.Error, OSError):
                with self._stored(Batch()):
                    self._db.execute(_RELEASE, (MOST_DEATHS,))
                # SQLite forgets that a sync has failed, and would copy pages into the file that the
                # log on the disk lacks.
                self.sync()
                # The file is marked as closed only when all other changes are in it.
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                self._db.execute("UPDATE filter_log SET opened_as = ''")
                is_closed = True
            self._wal.close()
            self._wal = None
        with contextlib.suppress(sqlite3.Error):
            self._db.close() if is_closed else close_unchanged(self._db, Path(self.name))


def checksum_of(ids: int, numbers: int) -> int:
    """Return a checksum from the sum of the requests' ids and the sum of the numbers in `ops`.

    Ids only grow during a run, so an outdated part of the file changes the checksum.
    """
    return (ids + 1_000_003 * numbers) % 2**62


def _text(slot: str) -> str:
    """Return the name of a slot without surrogates, which SQLite cannot store."""
    return slot if slot.isascii() else slot.encode(errors="backslashreplace").decode()


def row_of(number: int, found: Found) -> tuple[Any, ...]:
    """Return the row of a pending request, for `INSERT`."""
    return (
        number,
        PENDING,
        _text(found.slot),
        found.clipped_priority,
        found.rank,
        -number if found.newest_first else number,
        0,
        found.fingerprint,
        found.data,
    )


def check_database(db: sqlite3.Connection, path: Path) -> None:
    """Raise a StorageError if an open database is foreign or of a newer format."""
    is_ours = db.execute("PRAGMA application_id").fetchone()[0] == DATABASE_ID
    if (version := db.execute("PRAGMA user_version").fetchone()[0]) > FORMAT_VERSION and is_ours:
        raise StorageError(
            f"{path} has format version {version}, and this scrapy_bloom supports versions up to "
            f"{FORMAT_VERSION}. Upgrade scrapy_bloom to resume this job"
        )
    if not is_ours or not has_schema(db, ";".join([*_TABLES, *_INDEXES.values()])):
        raise StorageError(
            f"{path} is a database of another program; it was left as it is. Move it away, or set "
            "another JOBDIR"
        )


def unusable(path: Path, why: sqlite3.Error | OSError | ValueError | str) -> StorageError:
    """Return the error for a database that cannot be read."""
    return StorageError(
        f"{path} cannot be used: {why}; it was left as it is. If it is damaged, restore it from "
        "a backup, or move it and the filter next to it away to start the job over"
    )

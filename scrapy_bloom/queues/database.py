"""The SQLite file of a job: its unfinished requests, and the log of its filter.

Each batch is one transaction, so a killed process leaves no partial batch. After a power loss, the
last batches may be missing: the database is then in the state of an earlier moment.
"""

import contextlib
import errno
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.files.log import pack_fingerprints, unpack_fingerprints
from scrapy_bloom.job.copy_on_write import check_room, make_index
from scrapy_bloom.job.disk import (
    check_database_files,
    close_unchanged,
    drop_cached_pages,
    has_schema,
    log_and_index,
    opened,
)
from scrapy_bloom.job.jobdir import DATABASE_ID
from scrapy_bloom.queues.store import MOST_DEATHS, Entered, State, Stored

FORMAT_VERSION = 1
_PATIENCE_MS = 5000  # how long to wait for a lock of another process
_LOG_BYTES = 64 << 20  # a longer write-ahead log is truncated
_MOST_ATTEMPTS, _PAUSE_SECS = 100, 0.01  # to truncate it between two batches
_LEAST_FREED, _MOST_REWRITTEN = 16 << 20, 64 << 20  # bytes for which a close shrinks the file
_MOST_MOVED = 1000  # requests that a command moves in one transaction

# The states of a request in the file. The suspect that was taken last is alone in flight.
PENDING, IN_FLIGHT, ALONE, SUSPECT, UNREADABLE, FAILED, DEAD = range(7)

STATES = {
    PENDING: State.PENDING,
    IN_FLIGHT: State.IN_FLIGHT,
    ALONE: State.IN_FLIGHT,
    SUSPECT: State.SUSPECT,
    UNREADABLE: State.UNREADABLE,
    FAILED: State.FAILED,
    DEAD: State.DEAD,
}
_NUMBERS = {state: number for number, state in STATES.items() if number != ALONE}
# The states from which a command can move requests.
MOVABLE = {State.PENDING: PENDING, State.FAILED: FAILED, State.DEAD: DEAD}

# requests: a slot is a slot of the downloader, usually a host. Within a priority, they are taken by
#     `rank`, then by `position`, which is the id, or the negated id if the newest comes first.
#     `fingerprint` is that of a request that is recorded or has failed. `epoch` is not 0 if the
#     request is failed, or dead because it has failed in too many runs: the epoch of its failure.
# targets: the fate of fingerprints, for redirects: whether they have failed in this run (1), or
#     retries or redirects of them are unfinished (0).
# ops: the fingerprints that the filter's files may lack, by the number of their batch.
# openings: a random id for each opening of the log.
# runs: the names of all runs.
# job: one row. `id` is the random id of the log, `seq` is the number of the last batch, `applied`
#     is the number of the last batch that was deleted from `ops`, `left` is the number of requests,
#     `checksum` is the result of `checksum_of`, `done` is how many requests have left the queue,
#     `ended_at` is when the queue became empty, or 0, and `opened_as` identifies the file while a
#     crawl uses it (empty after a clean close). `run` is the random id of the current run (NULL:
#     none has begun), and `run_name`, `arguments` (JSON; empty: unknown) and `kept_from` (number of
#     the newest generation when it began; 0: unknown) belong to it, too. `epoch` is raised when
#     failed requests are to be tried again.
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
        tries INTEGER NOT NULL,
        epoch INTEGER NOT NULL,
        reason TEXT NOT NULL,
        fingerprint BLOB,
        request BLOB NOT NULL
    )
    """,
    "CREATE TABLE targets (fingerprint BLOB PRIMARY KEY, failed INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE ops (seq INTEGER PRIMARY KEY, recorded BLOB NOT NULL)",
    "CREATE TABLE openings (id TEXT PRIMARY KEY)",
    "CREATE TABLE runs (name TEXT PRIMARY KEY)",
    """
    CREATE TABLE job (
        id TEXT, seq INTEGER, applied INTEGER, left INTEGER, checksum INTEGER, done INTEGER,
        ended_at REAL, opened_as TEXT, spider TEXT, run BLOB, run_name TEXT, arguments TEXT,
        kept_from INTEGER, epoch INTEGER
    )
    """,
    # Nearly all requests are pending, and few have failed, so these indexes are small.
    "CREATE INDEX not_pending ON requests (state, epoch) WHERE state != 0",
    "CREATE INDEX kept ON requests (fingerprint) WHERE epoch != 0",
)
_INDEXES = {
    # With the state, so that queries about slots need not read the requests.
    True: "CREATE INDEX next_of_slot ON requests (slot, priority DESC, rank, position, state) "
    "WHERE state = 0",
    False: "CREATE INDEX next_of_all ON requests (priority DESC, rank, position) WHERE state = 0",
}
_INSERT = "INSERT INTO requests VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_RELEASE = f"""
    UPDATE requests SET state = CASE WHEN deaths >= {MOST_DEATHS} THEN {SUSPECT} ELSE {PENDING} END
    WHERE state != 0 AND state IN ({IN_FLIGHT}, {ALONE})
"""  # noqa: S608 - constants
_COUNTS = "SELECT state, count(*) FROM requests WHERE state != 0 GROUP BY state"
SET_TARGET = "INSERT OR REPLACE INTO targets VALUES (?, ?)"
_TOTALS = "SELECT seq, applied, left, checksum, done, ended_at FROM job"
_UPDATE = """
    UPDATE job SET seq = ?, applied = ?, left = ?, checksum = ?, done = ?, ended_at = ?
"""


@dataclass
class Totals:
    """The figures of a job that each transaction may change; its docstring is above `_TABLES`."""

    seq: int
    applied: int
    left: int
    checksum: int
    done: int
    ended_at: float

    def add_ids(self, delta: int) -> None:
        """Update the checksum after the sum of the requests' ids has changed."""
        self.checksum = checksum_of(self.checksum + delta, 0)

    def add_numbers(self, delta: int) -> None:
        """Update the checksum after the sum of the numbers in `ops` has changed."""
        self.checksum = checksum_of(self.checksum, delta)


class Moved(NamedTuple):
    """A request that a command has moved, with its columns before that."""

    id: int
    epoch: int
    fingerprint: bytes


class Transaction:
    """The changes of a database in one transaction."""

    def __init__(self, db: sqlite3.Connection, totals: Totals, last_id: int) -> None:
        self.execute = db.execute
        self.totals = totals
        self.last_id = last_id  # of the request that entered last
        self._db = db

    def begin_run(self, run: bytes, name: str, spider: str) -> None:
        """Begin a run, whose arguments are not known yet."""
        self.execute(
            "UPDATE job SET run = ?, run_name = ?, spider = ?, arguments = ''", (run, name, spider)
        )
        self.execute("INSERT INTO runs VALUES (?)", (name,))
        self.totals.ended_at = 0.0
        self.begin_epoch()

    def requeue_unreadable(self) -> None:
        """Make unreadable requests pending, because this process may be able to read them."""
        query = "UPDATE requests SET state = 0 WHERE state != 0 AND state = ?"
        self.execute(query, (UNREADABLE,))

    def begin_epoch(self) -> None:
        """From now on, requests that have failed so far are of an earlier epoch."""
        self.execute("UPDATE job SET epoch = epoch + 1")
        self.execute("DELETE FROM targets")

    def insert(self, requests: Iterable[tuple[Entered, int]]) -> None:
        """Add pending requests, each with the number of runs in which it has failed."""
        first = self.last_id
        rows = []
        for request, tries in requests:
            self.last_id += 1
            rows.append(_row(self.last_id, request, tries))
        self._db.executemany(_INSERT, rows)
        number = len(rows)
        self.totals.left += number
        self.totals.add_ids(number * first + number * (number + 1) // 2)

    def delete(self, row: int, state: int) -> bool:
        """Delete a request, which is done, unless it has another state; return whether it had."""
        query = "DELETE FROM requests WHERE id = ? AND state = ?"
        if not self.execute(query, (row, state)).rowcount:
            return False
        self.count_deleted(1, row)
        return True

    def count_deleted(self, number: int, ids: int) -> None:
        """Count requests that were deleted, with the sum of their ids."""
        self.totals.left -= number
        self.totals.done += number
        self.totals.add_ids(-ids)

    def to_pending(self, row: int, tries: int, fingerprint: bytes) -> None:
        """Make a failed request pending, as if it had just entered."""
        self.last_id += 1
        query = (
            "UPDATE requests SET id = ?, state = 0, tries = ?, deaths = 0, epoch = 0, "
            "reason = '', position = CASE WHEN position < 0 THEN -? ELSE ? END WHERE id = ?"
        )
        self.execute(query, (self.last_id, tries, self.last_id, self.last_id, row))
        self.totals.add_ids(self.last_id - row)
        self.execute(SET_TARGET, (fingerprint, 0))

    def move_some(self, state: State, to: State | None, slot: str | None) -> list[Moved]:
        """Make up to 1,000 requests pending, or drop them (None); return which.

        Args:
            state: their state: FAILED, DEAD, or, to be dropped, PENDING.
            to: PENDING or None.
            slot: their slot; None: any.
        """
        number = MOVABLE[state]
        where, values = "state = 0" if number == PENDING else f"state != 0 AND state = {number}", []
        if slot is not None:
            where, values = f"{where} AND slot = ?", [stored_text(slot)]
        query = f"SELECT id, epoch, fingerprint FROM requests WHERE {where} LIMIT {_MOST_MOVED}"  # noqa: S608 - constants
        moved = [Moved(*row) for row in self.execute(query, values)]
        if to is None:
            self._db.executemany(
                "DELETE FROM requests WHERE id = ?", [(each.id,) for each in moved]
            )
            self.count_deleted(len(moved), sum(each.id for each in moved))
            return moved
        for request in sorted(moved):
            if request.epoch:
                self.to_pending(request.id, 0, request.fingerprint)
            else:
                query = "UPDATE requests SET state = 0, deaths = 0, tries = 0 WHERE id = ?"
                self.execute(query, (request.id,))
        return moved

    def copy(self, requests: Iterable[Stored]) -> int:
        """Add requests of another queue, in any order; return their number.

        Requests in flight become pending. Failed ones are tried again in the next run.
        """
        number = 0
        for number, request in enumerate(requests, 1):
            is_kept = request.fingerprint is not None
            state = PENDING if request.state is State.IN_FLIGHT else _NUMBERS[request.state]
            row = (
                -number,  # until the number of requests is known
                state,
                stored_text(request.slot),
                request.priority,
                request.rank,
                request.position,
                request.deaths,
                request.tries,
                int(is_kept),
                request.reason,
                request.fingerprint,
                request.data,
            )
            self.execute(_INSERT, row)
        # Ids are higher than any position, so that the position of a later request is higher, too.
        (latest,) = self.execute("SELECT ifnull(max(abs(position)), 0) FROM requests").fetchone()
        self.execute("UPDATE requests SET id = ? - id", (latest,))
        self.execute("UPDATE job SET epoch = 1")
        (ids,) = self.execute("SELECT ifnull(sum(id), 0) FROM requests").fetchone()
        self.totals.left = number
        self.totals.add_ids(ids)
        return number

    def record(self, fingerprints: Iterable[bytes]) -> None:
        """Add the fingerprints of this batch, which the filter lacks."""
        data = pack_fingerprints(fingerprints)
        self.execute("INSERT INTO ops VALUES (?, ?)", (self.totals.seq, data))
        self.totals.add_numbers(self.totals.seq)

    def drop_applied(self, applied: int) -> None:
        """Delete the fingerprints up to a batch, because the filter has them."""
        (numbers,) = self.execute(
            "SELECT ifnull(sum(seq), 0) FROM ops WHERE seq <= ?", (applied,)
        ).fetchone()
        self.execute("DELETE FROM ops WHERE seq <= ?", (applied,))
        self.totals.add_numbers(-numbers)
        self.totals.applied = applied


class JobDatabase:
    """The file of a job, which is the `FilterLog` of its filter.

    Args:
        path: the file; created if missing. No other process may have it open.
        by_slot: whether requests are taken by slot.

    Raises:
        StorageError: the file is damaged, foreign, of a newer format, or cannot be read or written.
            The file is not changed then.

    Attributes:
        totals: as of the last transaction.
        counts: how many requests had each state after `begin`.
        killed: how many requests were in flight when the last process died.
        died: the serialized requests that became dead at this opening.
    """

    def __init__(self, path: Path, *, by_slot: bool) -> None:
        self.name = str(path)
        self.path = os.path.realpath(path)  # SQLite keeps its log there
        self._wal_path, _ = log_and_index(Path(self.path))
        self.run = secrets.token_hex(8)
        self._by_slot = by_slot
        self.counts: dict[int, int] = {}
        self.killed = self._checkpointed = 0
        self.died: list[bytes] = []
        self._wal: BinaryIO | None = None
        self._failure: OSError | None = None  # of a sync; nothing is synced after it
        self._syncing = threading.Lock()
        self._truncating: threading.Thread | None = None
        self._tolerated = 0  # bytes of the write-ahead log that could not be truncated
        check_database_files(path)
        check_room(path.parent)
        missing = [part for part in (path, *log_and_index(path)) if not part.exists()]
        has_log = self._wal_path.exists() and self._wal_path.stat().st_size > 0
        try:
            if has_log:
                drop_cached_pages(path, self._wal_path)
            make_index(path)
            self._db = sqlite3.connect(
                path, timeout=_PATIENCE_MS / 1000, isolation_level=None, check_same_thread=False
            )
            self.query = self._db.execute
            try:
                self._open(path, has_log=has_log)
            except BaseException:
                close_unchanged(self._db, path)
                # An empty database would look like a queue that was emptied.
                for part in missing:
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
            for statement in _TABLES:
                run(statement)
            values = (secrets.token_hex(8),)
            run("INSERT INTO job VALUES (?, 0, 0, 0, 0, 0, 0, '', '', NULL, '', '', 0, 0)", values)
            run("COMMIT")
            run("PRAGMA wal_checkpoint(TRUNCATE)")  # so that the file itself has the application id
        self.id, last = run("SELECT id, opened_as FROM job").fetchone()
        self.totals = Totals(*run(_TOTALS).fetchone())
        self.was_killed = bool(last)
        self.is_copy = self.was_killed and last != self._name_of_file()
        if self.was_killed:
            self._check_contents(is_suspicious=self.is_copy or not has_log)
        self._last_id = run("SELECT max(id) FROM requests").fetchone()[0] or 0

    def _name_of_file(self) -> str:
        """Return the path and the inode number of the file, which differ in a copy."""
        return f"{self.path!a} {os.stat(self.path).st_ino}"  # noqa: PTH116 - of the file, not of the name

    def _check_contents(self, *, is_suspicious: bool) -> None:
        """Raise a ValueError if a part of the file is missing or outdated."""
        run = self._db.execute
        if is_suspicious and (found := run("PRAGMA integrity_check(1)").fetchone()[0]) != "ok":
            raise ValueError(found.splitlines()[-1])
        number, ids = run("SELECT count(*), ifnull(sum(id), 0) FROM requests").fetchone()
        if number != self.left:
            raise ValueError(f"it holds {number:,} requests where there should be {self.left:,}")
        (numbers,) = run("SELECT ifnull(sum(seq), 0) FROM ops").fetchone()
        if checksum_of(ids, numbers) != self.totals.checksum:
            raise ValueError("a part of it is older than the rest")

    def begin(self) -> None:
        """Mark the file as open; requests in flight become pending, suspect or dead.

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
            run(_RELEASE)
            run("UPDATE job SET opened_as = ?", (self._name_of_file(),))
            run("INSERT INTO openings VALUES (?)", (self.run,))
            run("COMMIT")
            # The changes must not be in the log alone, because a user may delete it.
            run("PRAGMA wal_checkpoint(TRUNCATE)")
            self.counts = counts_of(self._db, self.left)
            # The log stays open: the kernel reports a failed sync to each descriptor once.
            self._wal = opened(self._wal_path, "r+b", buffering=0)
        except (sqlite3.Error, OSError) as error:
            raise unusable(Path(self.name), error) from error

    def _judge_deaths(self) -> list[bytes]:
        """Count the death of the last process for the requests that were in flight.

        Returns:
            the requests that became dead.
        """
        run = self._db.execute
        counts = dict(run(_COUNTS))
        self.killed = counts.get(IN_FLIGHT, 0) + counts.get(ALONE, 0)
        query = "SELECT request FROM requests WHERE state != 0 AND state = ?"
        died = [data for (data,) in run(query, (ALONE,))]
        # If one was alone, the others are not to blame.
        blamed = ALONE if died else IN_FLIGHT
        run(
            "UPDATE requests SET deaths = deaths + 1, state = CASE WHEN state = ? THEN ? "
            "ELSE state END WHERE state != 0 AND state = ?",
            (ALONE, DEAD, blamed),
        )
        return died

    @contextlib.contextmanager
    def transaction(self, *, is_batch: bool = False) -> Iterator[Transaction]:
        """Store the changes of a `with` block in one step.

        Args:
            is_batch: whether the changes are a batch, which gets the next number.

        Raises:
            sqlite3.Error: nothing has changed.
        """
        run = self._db.execute
        changes = Transaction(self._db, replace(self.totals), self._last_id)
        changes.totals.seq += is_batch
        run("BEGIN IMMEDIATE")
        try:
            yield changes
            if (applied := self._checkpointed) > changes.totals.applied:
                changes.drop_applied(applied)
            if changes.totals != self.totals:
                run(_UPDATE, tuple(vars(changes.totals).values()))
            run("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # if the disk is full, SQLite has rolled it back already
                run("ROLLBACK")
            raise
        self.totals, self._last_id = changes.totals, changes.last_id
        self._bound_wal()

    @property
    def has_applied(self) -> bool:
        """Return whether the next transaction has to delete fingerprints from the log."""
        return self._checkpointed > self.applied

    def _bound_wal(self) -> None:
        """Let a thread truncate the write-ahead log if it is long."""
        if self._wal is None or self._failure is not None:
            return
        is_busy = self._truncating is not None and self._truncating.is_alive()
        if is_busy or os.fstat(self._wal.fileno()).st_size <= self._tolerated + _LOG_BYTES:
            return
        self._truncating = threading.Thread(
            target=self._truncate, name="scrapy_bloom log", daemon=True
        )
        self._truncating.start()

    def _truncate(self) -> None:
        """Move the write-ahead log into the file; most of it while batches are stored."""
        assert self._wal is not None
        try:
            self.sync()
            with self._other_connection() as db:
                for _ in range(3):  # each moves what was written during the one before
                    db.execute("PRAGMA wal_checkpoint(PASSIVE)")
                for _ in range(_MOST_ATTEMPTS):  # a batch that is being stored is in the way
                    if not db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
                        break
                    time.sleep(_PAUSE_SECS)
        except (sqlite3.Error, OSError):  # of a sync, which must not be repeated; or no room
            with contextlib.suppress(OSError):
                self.sync()
        # If a process that reads is in the way, try again much later.
        self._tolerated = os.fstat(self._wal.fileno()).st_size

    @contextlib.contextmanager
    def _other_connection(self) -> Iterator[sqlite3.Connection]:
        """Open the file in another thread, without waiting for locks."""
        uri = f"{Path(self.path).as_uri()}?mode=rw"  # a missing file is not created
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=0)) as db:
            yield db

    # The log of the filter.

    @property
    def seq(self) -> int:
        """The number of the last batch."""
        return self.totals.seq

    @property
    def applied(self) -> int:
        """The number of the last batch whose fingerprints were deleted; the filter has them."""
        return self.totals.applied

    @property
    def left(self) -> int:
        """The number of requests."""
        return self.totals.left

    def has_run(self, run: str) -> bool:
        """Return whether this database has been opened under that id."""
        return bool(self._db.execute("SELECT 1 FROM openings WHERE id = ?", (run,)).fetchone())

    def recorded(self) -> Iterator[bytes]:
        """Return the fingerprints of the batches that the filter may lack, in order.

        Raises StorageError if the database is damaged.
        """
        try:
            for (data,) in self._db.execute("SELECT recorded FROM ops ORDER BY seq"):
                yield from unpack_fingerprints(data)
        except (sqlite3.Error, ValueError) as error:
            raise unusable(Path(self.name), error) from error

    def unfinished(self) -> Iterator[bytes]:
        """Return the fingerprints of all requests that are not done."""
        query = "SELECT fingerprint FROM requests WHERE fingerprint IS NOT NULL"
        return (fingerprint for (fingerprint,) in self._db.execute(query))

    def sync(self) -> None:
        """Write all batches so far to the disk; may be called in any thread; raises OSError."""
        assert self._wal is not None
        with self._syncing:  # an error is reported once
            if self._failure is None:
                try:
                    os.fsync(self._wal.fileno())
                except OSError as error:
                    self._failure = error
        if self._failure is not None:
            raise self._failure

    def checkpointed(self, seq: int) -> None:
        """Mark the batches up to a number as added to the filter; may be called in any thread.

        The next transaction deletes their fingerprints.
        """
        self._checkpointed = seq
        try:
            with self._other_connection() as db:
                db.execute("PRAGMA wal_checkpoint(PASSIVE)")
        except sqlite3.Error as error:  # perhaps of a sync, which must not be repeated
            self._failure = self._failure or OSError(f"its checkpoint failed: {error}")

    def _shrink(self) -> None:
        """Return the space of requests that are done to the disk, if nearly all of them are."""
        free, total, size = (
            self._db.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("freelist_count", "page_count", "page_size")
        )
        left = (total - free) * size
        if free * size > _LEAST_FREED and free > total // 2 and left < _MOST_REWRITTEN:
            with contextlib.suppress(sqlite3.Error):  # there may be no room for the copy
                self._db.execute("VACUUM")
            self.sync()
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Close the file, and make requests in flight pending again for the next process.

        If that fails, the next process treats this one as killed, and no request is lost.
        """
        is_closed = False
        if self._truncating is not None:
            self._truncating.join()
        if self._wal is not None:
            with contextlib.suppress(sqlite3.Error, OSError):
                with self.transaction() as changes:
                    changes.execute(_RELEASE)
                # SQLite forgets that a sync has failed, and would copy pages into the file that the
                # log on the disk lacks.
                self.sync()
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                self._shrink()
                # The file is marked as closed only when all other changes are in it.
                self._db.execute("UPDATE job SET opened_as = ''")
                is_closed = True
            self._wal.close()
            self._wal = None
        with contextlib.suppress(sqlite3.Error):
            self._db.close() if is_closed else close_unchanged(self._db, Path(self.name))


@contextlib.contextmanager
def changed(path: Path) -> Iterator[Transaction]:
    """Change the database of a job that no crawl uses, in one transaction; raises StorageError."""
    try:
        check_database_files(path)
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
            check_database(db, path)
            db.execute("BEGIN IMMEDIATE")
            last_id = db.execute("SELECT max(id) FROM requests").fetchone()[0] or 0
            changes = Transaction(db, Totals(*db.execute(_TOTALS).fetchone()), last_id)
            yield changes
            db.execute(_UPDATE, tuple(vars(changes.totals).values()))
            db.execute("COMMIT")
    except (sqlite3.Error, OSError) as error:
        raise unusable(path, error) from error


def checksum_of(ids: int, numbers: int) -> int:
    """Return a checksum from the sum of the requests' ids and the sum of the numbers in `ops`.

    The id of a request only grows, so an outdated part of the file changes the checksum.
    """
    return (ids + 1_000_003 * numbers) % 2**62


def counts_of(db: sqlite3.Connection, left: int) -> dict[int, int]:
    """Return how many of all requests have each state, without reading those that are pending."""
    counts = dict.fromkeys(range(DEAD + 1), 0) | dict(db.execute(_COUNTS))
    counts[PENDING] = left - sum(counts.values())
    return counts


def by_state(counts: Mapping[int, int]) -> Mapping[State, int]:
    """Return the numbers of requests for each state as the file has it by the states of stores."""
    found = dict.fromkeys(State, 0)
    for state, number in counts.items():
        found[STATES[state]] += number
    return found


def stored_text(text: str) -> str:
    """Return a text without surrogates, which SQLite cannot store."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def _row(number: int, request: Entered, tries: int) -> tuple[Any, ...]:
    return (
        number,
        PENDING,
        stored_text(request.slot),
        request.clipped_priority,
        request.rank,
        -number if request.newest_first else number,
        0,
        tries,
        0,
        "",
        request.fingerprint if request.is_recorded else None,
        request.data,
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


def unusable(path: Path, why: Exception | str) -> StorageError:
    """Return the error for a database that cannot be read or written."""
    if "disk is full" in str(why) or (isinstance(why, OSError) and why.errno == errno.ENOSPC):
        return StorageError(
            f"{path} cannot be used: {why}; nothing is lost: free some space, and try again"
        )
    return StorageError(
        f"{path} cannot be used: {why}; it was left as it is. If it is damaged, restore it from "
        "a backup, or move it and the filter next to it away to start the job over"
    )

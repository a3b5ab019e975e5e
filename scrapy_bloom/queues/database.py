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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
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
from scrapy_bloom.queues.store import (
    MOST_DEATHS,
    MOST_TRIES,
    TRIES_SECS,
    Entered,
    Row,
    State,
    parsed_order,
)

FORMAT_VERSION = 1
_PATIENCE_MS = 5000  # how long to wait for a lock of another process
_LOG_BYTES = 64 << 20  # a longer write-ahead log is truncated
_MOST_ATTEMPTS, _PAUSE_SECS = 100, 0.01  # to truncate it between two batches
_LEAST_FREED, _MOST_REWRITTEN = 16 << 20, 64 << 20  # bytes for which a close shrinks the file
_MOST_MOVED = 1000  # rows that a command moves in one transaction

# The states of a row in the file. A pending row is REPEATED if it was taken before, or is `once`.
# The suspect that was taken last is ALONE. Rows before WAITING are open in any epoch. 0 and 1 take
# no space in a record, so that SQLite does not write a large request again when it is taken.
REPEATED, PENDING, IN_FLIGHT, ALONE, SUSPECT, UNREADABLE, WAITING, FAILED, DEAD = range(-1, 8)

_P, _I = State.PENDING, State.IN_FLIGHT
_OTHERS = (State.SUSPECT, State.UNREADABLE, State.WAITING, State.FAILED, State.DEAD)
STATES = dict(enumerate((_P, _P, _I, _I, *_OTHERS), REPEATED))
NUMBERS = {state: number for number, state in STATES.items()}
# The states from which a command can move rows, and the condition of the index that has them.
MOVABLE = {State.PENDING: "state < 1"}
MOVABLE |= {state: f"state > 2 AND state = {NUMBERS[state]}" for state in _OTHERS[2:]}

# requests: the columns are those of `StoredRow`.
# hops: pages to which rows were redirected, as the index `pages` has the rows' own pages.
# done_pages: pages that are done, and in which epoch: the rows that have begun to wait for them in
#     that epoch are about to end.
# ops: the fingerprints that the filter's files may lack, by the number of their batch.
# openings: a random id for each opening of the log.
# runs: the names of all runs.
# job: one row. `id` is the random id of the log, and `opened_as` identifies the file while a crawl
#     uses it (empty after a clean close). `run` is the random id of the current run (NULL: none has
#     begun), and `run_name` its name. The others are in `Totals`.
_TABLES = (
    """
    CREATE TABLE requests (
        id INTEGER PRIMARY KEY, state INTEGER NOT NULL, slot TEXT NOT NULL,
        priority INTEGER NOT NULL, rank INTEGER NOT NULL, position INTEGER NOT NULL,
        takes INTEGER NOT NULL, deaths INTEGER NOT NULL, tries INTEGER NOT NULL,
        epoch INTEGER NOT NULL, is_filtered INTEGER NOT NULL, is_start INTEGER NOT NULL,
        once INTEGER NOT NULL, reason TEXT NOT NULL, page BLOB, hops BLOB NOT NULL,
        waits_for BLOB NOT NULL, first BLOB NOT NULL, data BLOB NOT NULL
    )
    """,
    "CREATE TABLE hops (page BLOB, id INTEGER, PRIMARY KEY (page, id)) WITHOUT ROWID",
    "CREATE TABLE done_pages (page BLOB, epoch INTEGER, PRIMARY KEY (page, epoch)) WITHOUT ROWID",
    "CREATE TABLE ops (seq INTEGER PRIMARY KEY, recorded BLOB NOT NULL)",
    "CREATE TABLE openings (id TEXT PRIMARY KEY)",
    "CREATE TABLE runs (name TEXT PRIMARY KEY)",
    """
    CREATE TABLE job (
        id TEXT, opened_as TEXT, spider TEXT, run BLOB, run_name TEXT,
        seq INTEGER, applied INTEGER, left INTEGER, checksum INTEGER,
        done INTEGER, position INTEGER, epoch INTEGER, adds_tries INTEGER, tried_at REAL,
        began REAL, ended_at REAL
    )
    """,
    # Nearly all rows are pending and were never taken, so these are small. SQLite uses them only
    # for queries that repeat their conditions. A request that is taken enters one of them.
    "CREATE INDEX pages ON requests (page, state) WHERE state != 0",
    "CREATE INDEX kept ON requests (state, is_start, id, epoch) WHERE state > 2",
    f"CREATE INDEX waiting ON requests (waits_for, epoch) WHERE state = {WAITING}",
)
_INDEXES = {
    # With the state, so that queries about slots need not read the rows.
    True: "CREATE INDEX next_of_slot ON requests (slot, priority DESC, rank, position, state) "
    "WHERE state < 1",
    False: "CREATE INDEX next_of_all ON requests (priority DESC, rank, position) WHERE state < 1",
}
_IN_FLIGHT = f"FROM requests INDEXED BY pages WHERE state != 0 AND state IN ({IN_FLIGHT}, {ALONE})"
_BLAME = f"""
    UPDATE requests
    SET deaths = deaths + 1, state = CASE WHEN state = {ALONE} THEN {DEAD} ELSE state END
    WHERE id IN (SELECT id {_IN_FLIGHT} AND state = ?)
"""  # noqa: S608 - constants
_RELEASE = f"""
    UPDATE requests SET state = CASE WHEN deaths >= {MOST_DEATHS} THEN {SUSPECT} ELSE {REPEATED} END
    WHERE id IN (SELECT id {_IN_FLIGHT})
"""  # noqa: S608 - constants
_COUNTS = """
    SELECT state, count(*) FROM requests INDEXED BY pages WHERE state != 0 AND state > 0
    GROUP BY state
"""
LATE = f"state > 2 AND state IN ({WAITING}, {FAILED}) AND epoch < ?"
_FIGURES = f"""
    SELECT (SELECT count(*) FROM requests WHERE {LATE}), (SELECT count(*) FROM hops),
        (SELECT count(*) FROM done_pages)
"""  # noqa: S608 - constants
_NEW_JOB = "?, '', '', NULL, '', 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0"


class StoredRow(NamedTuple):
    """A row of the table `requests`, as `store.Row` describes it.

    Attributes:
        id: the same for the whole visit.
        state: one of the numbers above.
        position: negative if the newest comes first. It is a new number of the job each time the
            row becomes pending, except after a death or a close.
        takes: how often it was taken.
        hops: as `pack_fingerprints` returns them.
    """

    id: int
    state: int
    slot: str
    priority: int
    rank: int
    position: int
    takes: int
    deaths: int
    tries: int
    epoch: int
    is_filtered: int
    is_start: int
    once: int
    reason: str
    page: bytes | None
    hops: bytes
    waits_for: bytes
    first: bytes
    data: bytes

    @property
    def pages(self) -> list[bytes]:
        """Its page, and those to which it was redirected."""
        hops = unpack_fingerprints(self.hops)
        return hops if self.page is None else [self.page, *hops]

    def as_row(self) -> Row:
        """Return the row as commands and copies have it; raises ValueError if it is damaged."""
        columns = self._asdict()
        position, takes = columns.pop("position"), columns.pop("takes")
        columns["state"], columns["hops"] = STATES[self.state], (*unpack_fingerprints(self.hops),)
        columns |= {name: bool(columns[name]) for name in ("is_filtered", "is_start", "once")}
        del columns["id"]
        order = {"position": abs(position), "newest_first": position < 0}
        return Row(**columns, **order, was_taken=takes > 0)

    @classmethod
    def of(cls, row: Row) -> "StoredRow":
        """Return a row of another queue, which is not in flight, and of an earlier epoch."""
        state = row.state
        number = REPEATED if row.was_taken or row.once else PENDING
        columns = vars(row) | {
            "id": row.position,
            "state": number if state in (_P, _I) else NUMBERS[state],
            "slot": stored_text(row.slot),
            "position": -row.position if row.newest_first else row.position,
            "takes": row.was_taken,
            "epoch": 0,
            "reason": stored_text(row.reason),
            "hops": pack_fingerprints(row.hops),
        }
        return cls(**{name: columns[name] for name in cls._fields})


_ADD = f"INSERT INTO requests VALUES ({', '.join('?' * len(StoredRow._fields))})"  # noqa: S608 - constants
_INSERT = """
    INSERT INTO requests
    VALUES (?, ?, ?, ?, ?, ?, 0, 0, ?, 0, ?, ?, ?, '', ?, x'', x'', x'', ?)
"""
# Where nothing is to be done but to remove it.
_REMOVE_TAKEN = f"""
    DELETE FROM requests WHERE id = ? AND takes = ? AND state = {IN_FLIGHT}
        AND abs(position) = id AND NOT once AND hops = x''
"""  # noqa: S608 - constants
_IF_UNRELATED = f"""
    AND NOT EXISTS (SELECT 1 FROM requests AS other WHERE other.state != 0
        AND other.page = requests.page AND other.id != requests.id)
    AND NOT EXISTS (SELECT 1 FROM requests AS other WHERE other.state = {WAITING}
        AND other.waits_for = requests.page)
"""  # noqa: S608 - constants


@dataclass
class Totals:
    """The figures of a job that each transaction may change.

    Attributes:
        seq: the number of the last batch.
        applied: the number of the last batch that was deleted from `ops`.
        left: the number of rows.
        checksum: the result of `checksum_of`.
        done: how many rows have left the queue.
        position: the last number that was given to a row.
        epoch: raised when failed and waiting rows are to be tried again.
        adds_tries: whether that counts as a try.
        tried_at: when an opening without a run's name counted as a try last.
        began: when the current run began, or 0; without names, a process begins one whenever
            nothing is left.
        ended_at: when the queue became empty, or 0.
    """

    seq: int
    applied: int
    left: int
    checksum: int
    done: int
    position: int
    epoch: int
    adds_tries: int
    tried_at: float
    began: float
    ended_at: float

    def add_positions(self, delta: int) -> None:
        """Update the checksum after the sum of the rows' positions has changed."""
        self.checksum = checksum_of(self.checksum + delta, 0)

    def add_numbers(self, delta: int) -> None:
        """Update the checksum after the sum of the numbers in `ops` has changed."""
        self.checksum = checksum_of(self.checksum, delta)


_NAMES = [each.name for each in fields(Totals)]
_TOTALS = f"SELECT {', '.join(_NAMES)} FROM job"  # noqa: S608 - constants
_UPDATE = f"UPDATE job SET {' = ?, '.join(_NAMES)} = ?"  # noqa: S608 - constants


@dataclass
class Counts:
    """Figures of the rows, kept in memory so that the file need not be read.

    Attributes:
        of: how many rows have each state; PENDING has those that are REPEATED, too.
        late: how many failed and waiting rows are of an earlier epoch.
        hops: how many rows the table has.
        done_pages: how many pages the table has.
        alone: the id of the suspect that was taken last and is in flight; 0 if there is none.
        last_slot: the slot from which a request was taken last.
    """

    of: list[int] = field(default_factory=lambda: [0] * (DEAD + 1))
    late: int = 0
    hops: int = 0
    done_pages: int = 0
    alone: int = 0
    last_slot: str = ""

    @classmethod
    def read(cls, db: sqlite3.Connection, totals: Totals) -> "Counts":
        """Count the rows, without reading those that are pending; raises sqlite3.Error."""
        return cls(counts_of(db, totals.left), *db.execute(_FIGURES, (totals.epoch,)).fetchone())

    def copy(self) -> "Counts":
        """Return a copy for a transaction."""
        return Counts(**{**vars(self), "of": self.of.copy()})

    def add(self, state: int, number: int) -> None:
        """Count rows that have a state from now on, or, if the number is negative, had it."""
        self.of[max(PENDING, state)] += number

    @property
    def in_flight(self) -> int:
        """How many requests are in flight."""
        return self.of[IN_FLIGHT] + self.of[ALONE]

    @property
    def left(self) -> int:
        """The value of `Reply.left`, in which pages count whose waiting rows are about to end."""
        return self.of[PENDING] + self.of[SUSPECT] + self.in_flight + self.late + self.done_pages


class Transaction:
    """The changes of a database in one transaction."""

    def __init__(self, db: sqlite3.Connection, totals: Totals, counts: Counts) -> None:
        self.execute = db.execute
        self.totals = totals
        self.counts = counts
        self._db = db

    # Runs.

    def begin_run(self, run: bytes, name: str, spider: str) -> None:
        """Begin a run."""
        self.execute("UPDATE job SET run = ?, run_name = ?, spider = ?", (run, name, spider))
        self.execute("INSERT INTO runs VALUES (?)", (name,))
        self.totals.ended_at = 0.0
        self.begin_epoch(is_named=bool(name))

    def begin_epoch(self, *, is_named: bool) -> None:
        """From now on, rows that have failed or wait are of an earlier epoch."""
        totals, counts, now = self.totals, self.counts, time.time()
        totals.began = now
        totals.epoch += 1
        counts.late = counts.of[FAILED] + counts.of[WAITING]
        totals.adds_tries = is_named or not 0 <= now - totals.tried_at < TRIES_SECS
        if totals.adds_tries and not is_named:
            totals.tried_at = now

    def requeue_unreadable(self) -> None:
        """Make unreadable requests pending, because this process may be able to read them."""
        query = "UPDATE requests SET state = ? WHERE state > 2 AND state = ?"
        number = self.execute(query, (REPEATED, UNREADABLE)).rowcount
        self.counts.add(UNREADABLE, -number)
        self.counts.add(REPEATED, number)

    # Rows.

    def next_position(self, *, newest_first: bool) -> int:
        """Return the position of a row that becomes pending now."""
        self.totals.position += 1
        return -self.totals.position if newest_first else self.totals.position

    def new_row(
        self, request: Entered, *, has_page: bool = True, tries: int = 0
    ) -> tuple[Any, ...]:
        """Return the row of a request that enters the queue, for `insert`."""
        position = self.next_position(newest_first=request.newest_first)
        return (
            self.totals.position,
            REPEATED if request.once else PENDING,
            stored_text(request.slot),
            request.clipped_priority,
            request.rank,
            position,
            tries,
            +request.is_filtered,  # as integers, which sqlite3 need not convert
            +request.is_start,
            +request.once,
            request.fingerprint if has_page else None,
            request.data,
        )

    def insert(self, rows: Sequence[tuple[Any, ...]]) -> None:
        """Add pending rows."""
        self._db.executemany(_INSERT, rows)
        self.totals.left += len(rows)
        self.totals.add_positions(sum(row[0] for row in rows))
        self.counts.of[PENDING] += len(rows)

    def get(self, id_: int) -> StoredRow | None:
        """Return the row of an id, if there is one."""
        values = self.execute("SELECT * FROM requests WHERE id = ?", (id_,)).fetchone()
        return None if values is None else StoredRow._make(values)

    def change(self, row: StoredRow, **columns: Any) -> None:
        """Change columns of a row."""
        names = " = ?, ".join(columns)
        query = f"UPDATE requests SET {names} = ? WHERE id = ?"  # noqa: S608 - names of columns
        self.execute(query, (*columns.values(), row.id))
        self._count(row, -1)
        self._count(row._replace(**columns), 1)

    def remove_taken(self, id_: int, takes: int) -> bool:
        """Remove a row that is done in one step, if that is enough; return whether it was."""
        counts, totals, query = self.counts, self.totals, _REMOVE_TAKEN
        if counts.of[WAITING] or counts.of[FAILED] or counts.of[DEAD]:
            query += _IF_UNRELATED
        if not self.execute(query, (id_, takes)).rowcount:
            return False
        counts.of[IN_FLIGHT] -= 1
        totals.left -= 1
        totals.done += 1
        totals.add_positions(-id_)
        return True

    def remove(self, row: StoredRow) -> None:
        """Remove a row, which has left the queue."""
        self.execute("DELETE FROM requests WHERE id = ?", (row.id,))
        self.totals.done += 1
        self._count(row, -1)

    def _count(self, row: StoredRow, number: int) -> None:
        """Count a row in all figures, and put its hops into their table, or, with -1, undo that."""
        self.totals.left += number
        self.totals.add_positions(number * abs(row.position))
        self.counts.add(row.state, number)
        self.counts.late += number * (
            row.state in (WAITING, FAILED) and row.epoch < self.totals.epoch
        )
        if row.hops:
            hops = [(page, row.id) for page in unpack_fingerprints(row.hops)]
            add, remove = (
                "INSERT INTO hops VALUES (?, ?)",
                "DELETE FROM hops WHERE (page, id) = (?, ?)",
            )
            self._db.executemany(add if number > 0 else remove, hops)
            self.counts.hops += number * len(hops)

    def try_again(self, row: StoredRow, tries: int) -> None:
        """Make a row pending as it first entered, or dead after too many tries."""
        is_dead, first = tries >= MOST_TRIES, {}
        newest_first = row.position < 0
        if row.first:
            slot, priority, rank, rest = parsed_order(row.first)
            newest_first = rest[:1] == b"\1"
            first = {"slot": slot, "priority": priority, "rank": rank, "data": rest[1:]}
        self.change(
            row,
            state=DEAD if is_dead else REPEATED,
            position=self.next_position(newest_first=newest_first),
            deaths=0,
            tries=tries,
            reason=row.reason if is_dead else "",
            hops=b"",
            waits_for=b"",
            first=b"",
            **first,
        )

    def move_some(self, state: State, to: State | None, slot: str | None) -> int:
        """Make up to 1,000 rows pending as they first entered, or drop them (None).

        Args:
            state: their state: WAITING, FAILED, DEAD, or, to be dropped, PENDING.
            to: PENDING or None.
            slot: their slot; None: any.

        Returns:
            how many.
        """
        where, values = MOVABLE[state], []
        if slot is not None:
            where, values = f"{where} AND slot = ?", [stored_text(slot)]
        query = f"SELECT * FROM requests WHERE {where} LIMIT {_MOST_MOVED}"  # noqa: S608 - constants
        rows = sorted(map(StoredRow._make, self.execute(query, values).fetchall()))
        for row in rows:
            if to is None:
                self.remove(row)
            else:
                self.try_again(row, 0)
        return len(rows)

    def copy(self, rows: Iterable[Row]) -> int:
        """Add rows of another queue to an empty one, in any order; return their number."""
        for row in map(StoredRow.of, rows):
            self.execute(_ADD, row)
            self._count(row, 1)
            self.totals.position = max(self.totals.position, row.id)
        return self.totals.left

    # Fingerprints.

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
        counts: as of the last transaction; after `begin`.
        killed: how many requests were in flight when the last process died.
        died: the serialized requests that became dead at this opening.
    """

    def __init__(self, path: Path, *, by_slot: bool) -> None:
        self.name = str(path)
        self.path = os.path.realpath(path)  # SQLite keeps its log there
        self._wal_path, _ = log_and_index(Path(self.path))
        self.run = secrets.token_hex(8)
        self._by_slot = by_slot
        self.counts = Counts()
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
            run(f"INSERT INTO job VALUES ({_NEW_JOB})", values)  # noqa: S608 - constants
            run("COMMIT")
            run("PRAGMA wal_checkpoint(TRUNCATE)")  # so that the file itself has the application id
        self.id, last = run("SELECT id, opened_as FROM job").fetchone()
        self.totals = Totals(*run(_TOTALS).fetchone())
        self.was_killed = bool(last)
        self.is_copy = self.was_killed and last != self._name_of_file()
        # Also after a clean close, so that no id is given twice.
        if (run("SELECT max(id) FROM requests").fetchone()[0] or 0) > self.totals.position:
            raise ValueError("a part of it is newer than the rest")
        if self.was_killed:
            self._check_contents(is_suspicious=self.is_copy or not has_log)

    def _name_of_file(self) -> str:
        """Return the path and the inode number of the file, which differ in a copy."""
        return f"{self.path!a} {os.stat(self.path).st_ino}"  # noqa: PTH116 - of the file, not of the name

    def _check_contents(self, *, is_suspicious: bool) -> None:
        """Raise a ValueError if a part of the file is missing or outdated."""
        run = self._db.execute
        if is_suspicious and (found := run("PRAGMA integrity_check(1)").fetchone()[0]) != "ok":
            raise ValueError(found.splitlines()[-1])
        query = "SELECT count(*), ifnull(sum(abs(position)), 0) FROM requests"
        number, positions = run(query).fetchone()
        if number != self.left:
            raise ValueError(f"it holds {number:,} requests where there should be {self.left:,}")
        (numbers,) = run("SELECT ifnull(sum(seq), 0) FROM ops").fetchone()
        if checksum_of(positions, numbers) != self.totals.checksum:
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
            self.counts = Counts.read(self._db, self.totals)
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
        (self.killed,) = run(f"SELECT count(*) {_IN_FLIGHT}").fetchone()
        query = f"SELECT data {_IN_FLIGHT} AND state = ?"
        died = [data for (data,) in run(query, (ALONE,))]
        # If one was alone, the others are not to blame.
        run(_BLAME, (ALONE if died else IN_FLIGHT,))
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
        changes = Transaction(self._db, Totals(**vars(self.totals)), self.counts.copy())
        changes.totals.seq += is_batch
        run("BEGIN IMMEDIATE")
        try:
            yield changes
            if (applied := self._checkpointed) > changes.totals.applied:
                changes.drop_applied(applied)
            if vars(changes.totals) != vars(self.totals):
                run(_UPDATE, tuple(vars(changes.totals).values()))
            run("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # if the disk is full, SQLite has rolled it back already
                run("ROLLBACK")
            raise
        self.totals, self.counts = changes.totals, changes.counts
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
        """Return the fingerprints of all rows that are filtered."""
        query = "SELECT page FROM requests WHERE page IS NOT NULL AND is_filtered"
        return (page for (page,) in self._db.execute(query))

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
            # Nobody reads the counts, which would take long for many slices.
            changes = Transaction(db, Totals(*db.execute(_TOTALS).fetchone()), Counts())
            yield changes
            db.execute(_UPDATE, tuple(vars(changes.totals).values()))
            db.execute("COMMIT")
    except (sqlite3.Error, OSError) as error:
        raise unusable(path, error) from error


def checksum_of(positions: int, numbers: int) -> int:
    """Return a checksum from the sum of the rows' positions and the sum of the numbers in `ops`.

    The position of a row only grows, so an outdated part of the file changes the checksum.
    """
    return (positions + 1_000_003 * numbers) % 2**62


def counts_of(db: sqlite3.Connection, left: int) -> list[int]:
    """Return how many of all rows have each state, without reading those that are pending."""
    counts = [0] * (DEAD + 1)
    for state, number in db.execute(_COUNTS):
        counts[state] = number
    counts[PENDING] = left - sum(counts)
    return counts


def by_state(counts: Sequence[int]) -> Mapping[State, int]:
    """Return the numbers of rows for each state as the file has it by the states of stores."""
    found = dict.fromkeys(State, 0)
    for state, number in enumerate(counts):
        found[STATES[state]] += number
    return found


def stored_text(text: str) -> str:
    """Return a text without surrogates, which SQLite cannot store."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


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

"""The rows of a queue in the file of a job, and the rules by which they and their counts change."""

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from scrapy_bloom.job.file import INDEXES, JobFile, explaining, stored_text, unusable
from scrapy_bloom.job.filter import pack_fingerprints, unpack_fingerprints
from scrapy_bloom.queues.store import (
    MOST_DEATHS,
    MOST_TRIES,
    TRIES_SECS,
    Entered,
    Row,
    State,
    parsed_order,
)

Query = Callable[..., sqlite3.Cursor]  # of a connection, or of the file of a job
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
        left: the number of rows.
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
    left: int
    done: int
    position: int
    epoch: int
    adds_tries: int
    tried_at: float
    began: float
    ended_at: float


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
    def read(cls, query: Query, totals: Totals) -> "Counts":
        """Count the rows, without reading those that are pending; raises sqlite3.Error."""
        return cls(counts_of(query, totals.left), *query(_FIGURES, (totals.epoch,)).fetchone())

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

    def __init__(self, db: JobFile, totals: Totals, counts: Counts) -> None:
        self.execute, self._execute_many = db.execute, db.executemany
        self.totals = totals
        self.counts = counts

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
        self._execute_many(_INSERT, rows)
        self.totals.left += len(rows)
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
        return True

    def remove(self, row: StoredRow) -> None:
        """Remove a row, which has left the queue."""
        self.execute("DELETE FROM requests WHERE id = ?", (row.id,))
        self.totals.done += 1
        self._count(row, -1)

    def _count(self, row: StoredRow, number: int) -> None:
        """Count a row in all figures, and put its hops into their table, or, with -1, undo that."""
        self.totals.left += number
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
            self._execute_many(add if number > 0 else remove, hops)
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


class JobDatabase:
    """The queue in the file of a job.

    Args:
        file: the file, opened.
        by_slot: whether requests are taken by slot.

    Raises:
        StorageError: the queue is damaged. The file is not changed then.

    Attributes:
        totals: as of the last transaction.
        counts: as of the last transaction; after `begin`.
        killed: how many requests were in flight when the last process died.
        died: the serialized requests that became dead at this opening.
    """

    def __init__(self, file: JobFile, *, by_slot: bool) -> None:
        self.file = file
        self.query = file.execute
        self.counts = Counts()
        self.killed = 0
        self.died: list[bytes] = []
        self._by_slot = by_slot
        try:
            self.totals = Totals(*self.query(_TOTALS).fetchone())
            last = self.query("SELECT max(id) FROM requests").fetchone()[0] or 0
        except sqlite3.Error as error:
            raise unusable(file.path, error) from error
        if last > self.totals.position:  # an id would be given twice
            raise unusable(file.path, "a part of it is newer than the rest")

    def begin(self, *, in_use: bool = False) -> None:
        """Mark the file as open; requests in flight become pending, suspect or dead.

        Args:
            in_use: whether another queue still has requests.

        Raises:
            StorageError: the file cannot be written.
        """
        try:
            with self.file.step():
                for by_slot, index in INDEXES.items():
                    if by_slot == self._by_slot:
                        self.query(index.replace("INDEX", "INDEX IF NOT EXISTS"))
                    else:
                        self.query(f"DROP INDEX IF EXISTS {index.split()[2]}")
                if self.file.was_killed:
                    self.died = self._judge_deaths()
                self.query(_RELEASE)
            self.counts = Counts.read(self.query, self.totals)
        except sqlite3.Error as error:
            raise unusable(self.file.path, error) from error
        self.file.begin(in_use=in_use)

    def _judge_deaths(self) -> list[bytes]:
        """Count the death of the last process for the requests that were in flight.

        Returns:
            the requests that became dead.
        """
        (self.killed,) = self.query(f"SELECT count(*) {_IN_FLIGHT}").fetchone()
        query = f"SELECT data {_IN_FLIGHT} AND state = ?"
        died = [data for (data,) in self.query(query, (ALONE,))]
        # If one was alone, the others are not to blame.
        self.query(_BLAME, (ALONE if died else IN_FLIGHT,))
        return died

    @contextlib.contextmanager
    def transaction(self, *, is_batch: bool = False) -> Iterator[Transaction]:
        """Store the changes of a `with` block in one step.

        Args:
            is_batch: whether the changes are a batch, which gets the next number.

        Raises:
            sqlite3.Error: nothing has changed.
        """
        changes = Transaction(self.file, Totals(**vars(self.totals)), self.counts.copy())
        changes.totals.seq += is_batch
        with self.file.step():
            yield changes
            if vars(changes.totals) != vars(self.totals):
                self.query(_UPDATE, tuple(vars(changes.totals).values()))
        self.totals, self.counts = changes.totals, changes.counts

    def close(self, last: Callable[[], None] | None = None) -> None:
        """Close the file, and make requests in flight pending again for the next process.

        Args:
            last: makes the last changes of the filter.

        Raises:
            StorageError: the next process treats this one as killed, and no request is lost.
        """

        def release() -> None:
            if last is not None:
                last()
            self.query(_RELEASE)

        self.file.close(release)


@contextlib.contextmanager
def changed(path: Path) -> Iterator[Transaction]:
    """Change the queue of a job that no crawl uses, in one transaction; raises StorageError."""
    file = JobFile(path)
    try:
        with explaining(path), JobDatabase(file, by_slot=True).transaction() as changes:
            # Nobody reads the counts, which would take long for many slices.
            yield changes
    finally:
        file.close()


def counts_of(query: Query, left: int) -> list[int]:
    """Return how many of all rows have each state, without reading those that are pending."""
    counts = [0] * (DEAD + 1)
    for state, number in query(_COUNTS):
        counts[state] = number
    counts[PENDING] = left - sum(counts)
    return counts


def by_state(counts: Sequence[int]) -> Mapping[State, int]:
    """Return the numbers of rows for each state as the file has it by the states of stores."""
    found = dict.fromkeys(State, 0)
    for state, number in enumerate(counts):
        found[STATES[state]] += number
    return found

"""The rows of a queue in the file of a job, and the figures that change with them."""

import contextlib
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from scrapy_bloom.job.file import JobFile, explaining, stored_text, unusable
from scrapy_bloom.job.filter import Execute, LocalBackend
from scrapy_bloom.queues.store import (
    MOST_DEATHS,
    MOST_TRIES,
    TRIES_SECS,
    Entered,
    Row,
    State,
    parsed_order,
)

_MOST_MOVED = 100  # rows at once, so that the event loop waits for some milliseconds

# As numbers, which are faster than the members of the enumeration.
PENDING, IN_FLIGHT, SUSPECT, WAITING, *_, UNREADABLE = map(int, State)
MOVABLE = (State.PENDING, State.WAITING, State.FAILED, State.DEAD)  # by a command

# The rows of each state, by the condition of an index. States 0 and 1 take no space in a record, so
# that SQLite does not write a large request again when it is taken.
IN_INDEX = "(takes OR once)"  # the rows that have their pages in it
CONDITIONS = {state: f"state > 1 AND state = {state:d}" for state in State}
CONDITIONS[State.PENDING] = "state < 1"
CONDITIONS[State.IN_FLIGHT] = f"{IN_INDEX} AND state = {State.IN_FLIGHT:d}"

_IN_FLIGHT = f"FROM requests INDEXED BY pages WHERE {CONDITIONS[State.IN_FLIGHT]}"
_BLAME = f"""
    UPDATE requests
    SET deaths = deaths + 1, state = CASE WHEN id = ? THEN {State.DEAD:d} ELSE state END
    WHERE id IN (SELECT id {_IN_FLIGHT}) AND ? IN (id, 0)
"""  # noqa: S608 - constants
_RELEASE = f"""
    UPDATE requests SET state = CASE WHEN deaths >= {MOST_DEATHS} THEN {State.SUSPECT:d} ELSE 0 END
    WHERE id IN (SELECT id {_IN_FLIGHT})
"""  # noqa: S608 - constants
_COUNTS = f"""
    SELECT state, count(*) FROM requests INDEXED BY pages WHERE {IN_INDEX} AND state > 0
    GROUP BY state
"""  # noqa: S608 - constants
_KEPT = f"state IN ({State.WAITING:d}, {State.FAILED:d})"
LATE = f"FROM requests WHERE {_KEPT} AND is_start <= ? AND epoch < ?"

_ADD = f"INSERT INTO requests VALUES ({', '.join('?' * len(Row._fields))})"  # noqa: S608 - constants
# Where nothing is to be done but to remove it.
_REMOVE_TAKEN = f"""
    DELETE FROM requests WHERE id = ? AND takes = ? AND state = {State.IN_FLIGHT:d}
        AND abs(position) = id AND NOT once AND packed_hops = x''
"""  # noqa: S608 - constants


@dataclass
class Figures:
    """The figures of a job.

    The table `job` has the first ones. The others are kept in memory so that the file need not be
    read, and are complete only after `JobDatabase.begin`.
    """

    seq: int  # the number of the last batch
    num_rows: int  # how many rows there are
    done: int  # how many rows have left the queue
    position: int  # the last number that was given to a row
    epoch: int  # raised when failed and waiting rows are to be tried again
    adds_tries: int  # whether that counts as a try
    tried_at: float  # when an opening without a run's name counted as a try last
    began: float  # the current run, or 0; without names, one begins whenever nothing is left
    ended_at: float  # when the queue became empty, or 0
    alone: int  # the id of the suspect that was taken last, while it is in flight, or 0
    # Not in the table:
    of: list[int] = field(default_factory=lambda: [0] * len(State))  # rows by state
    late: int = 0  # how many failed and waiting rows are of an earlier epoch
    hops: int = 0  # how many rows the table has
    done_pages: int = 0  # how many pages the table has
    last_slot: str = ""  # the slot from which a request was taken last

    @property
    def counts(self) -> Mapping[State, int]:
        """How many rows of each state there are."""
        return dict(zip(State, self.of, strict=True))

    @property
    def unfinished(self) -> int:
        """The value of `Reply.unfinished`, with the pages whose waiting rows are about to end."""
        return sum(self.of[:WAITING]) + self.late + self.done_pages


# Those without a default.
_NAMES = [column.name for column in fields(Figures) if column.default is column.default_factory]
_totals_of = attrgetter(*_NAMES)
_TOTALS = f"SELECT {', '.join(_NAMES)} FROM job"  # noqa: S608 - constants
_UPDATE = f"UPDATE job SET {' = ?, '.join(_NAMES)} = ?"  # noqa: S608 - constants


class JobDatabase:
    """The queue in the file of a job; raises a StorageError, and changes nothing, if damaged."""

    def __init__(self, file: JobFile) -> None:
        self.file = file
        self.execute, self._execute_many = file.execute, file.executemany
        self._backend: LocalBackend | None = None
        self.killed = 0  # how many requests were in flight when the last process died
        self.died: list[bytes] = []  # requests that have become dead at this opening
        try:
            self.figures = Figures(*self.execute(_TOTALS).fetchone())
            last = self.execute("SELECT max(id) FROM requests").fetchone()[0] or 0
        except sqlite3.Error as error:
            raise unusable(file.path, error) from error
        if last > self.figures.position:  # an id would be given twice
            raise unusable(file.path, "a part of it is newer than the rest")

    def begin(self, backend: LocalBackend | None, *, in_use: bool = False) -> None:
        """Mark the file as open; requests in flight become pending, suspect or dead.

        Another queue still has requests if the file is `in_use`. Raises StorageError.
        """
        figures = self.figures
        try:
            with self.file.step():
                if self.file.was_killed:
                    self._judge_deaths()
                self._release()
            figures.of = counts_of(self.execute, figures.num_rows)
            late = self.execute(f"SELECT count(*) {LATE}", (True, figures.epoch))
            (figures.late,), figures.alone = late.fetchone(), 0
            for table in ("hops", "done_pages"):
                (number,) = self.execute(f"SELECT count(*) FROM {table}").fetchone()  # noqa: S608 - constants
                setattr(figures, table, number)
        except sqlite3.Error as error:
            raise unusable(self.file.path, error) from error
        self._backend = backend
        self.file.begin(None if backend is None else backend.write_changed, in_use=in_use)

    def _judge_deaths(self) -> None:
        """Count the death of the last process for the requests that were in flight."""
        (self.killed,) = self.execute(f"SELECT count(*) {_IN_FLIGHT}").fetchone()
        alone = self.figures.alone  # if one was alone, the others are not to blame
        query = f"SELECT data {_IN_FLIGHT} AND id = ?"
        self.died = [data for (data,) in self.execute(query, (alone,))]
        self.execute(_BLAME, (alone, alone))

    def _release(self) -> None:
        self.execute(_RELEASE)
        self.execute("UPDATE job SET alone = 0")

    @contextlib.contextmanager
    def transaction(self, *, is_batch: bool = False) -> "Iterator[JobDatabase]":
        """Store the changes of a `with` block in one step; a batch gets the next number.

        Raises sqlite3.Error: nothing has changed.
        """
        before = self.figures
        self.figures = replace(before, of=before.of.copy(), seq=before.seq + is_batch)
        try:
            with self.file.step():
                yield self
                if (totals := _totals_of(self.figures)) != _totals_of(before):
                    self.execute(_UPDATE, totals)
        except BaseException:
            self.figures = before
            raise

    def close(self) -> None:
        """Close the file, and make requests in flight pending again for the next process.

        Raises StorageError: the next process treats this one as killed, and no request is lost.
        """

        def write_last() -> None:
            if self._backend is not None:
                self._backend.write_last()
            self._release()

        self.file.close(write_last)

    # Changes in a transaction: of runs.

    def begin_run(self, run: bytes, name: str, spider: str) -> None:
        """Begin a run."""
        self.execute("UPDATE job SET run = ?, run_name = ?, spider = ?", (run, name, spider))
        figures, of = self.figures, self.figures.of
        entered, kept = figures.num_rows + figures.done, (of[State.FAILED], of[State.DEAD])
        before = entered, figures.done, *kept, figures.ended_at
        figures.ended_at = 0.0
        self.begin_epoch(is_named=bool(name))
        values = (name, figures.began, *before)
        self.execute("INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?, ?)", values)

    def begin_epoch(self, *, is_named: bool) -> None:
        """From now on, rows that have failed or wait are of an earlier epoch."""
        figures, now = self.figures, time.time()
        figures.began = now
        figures.epoch += 1
        figures.late = figures.of[State.FAILED] + figures.of[State.WAITING]
        figures.adds_tries = is_named or not 0 <= now - figures.tried_at < TRIES_SECS
        if figures.adds_tries and not is_named:
            figures.tried_at = now

    def requeue_unreadable(self) -> None:
        """Make unreadable requests pending, because this process may be able to read them."""
        query = f"UPDATE requests SET state = 0 WHERE {CONDITIONS[State.UNREADABLE]}"  # noqa: S608 - constants
        number = self.execute(query).rowcount
        self.figures.of[State.UNREADABLE] -= number
        self.figures.of[State.PENDING] += number

    # Of rows.

    def next_position(self, *, newest_first: bool) -> int:
        """Return the position of a row that becomes pending now."""
        self.figures.position += 1
        return -self.figures.position if newest_first else self.figures.position

    def new_row(
        self, request: Entered, page: bytes | None, *, tries: int = 0, waits_for: bytes = b""
    ) -> Row:
        """Return the row of a request that enters the queue, for `add`."""
        position = self.next_position(newest_first=request.newest_first)
        # With integers for flags and state, which sqlite3 need not convert.
        row = (
            *(self.figures.position, State.WAITING if waits_for else 0),
            *(stored_text(request.slot), request.clipped_priority, request.rank, position),
            *(+bool(waits_for), 0, tries, self.figures.epoch if waits_for else 0),
            *(+request.is_filtered, +request.is_start, +request.once),
            *("", page, b"", waits_for, b"", request.data),
        )
        return Row._make(row)

    def add(self, rows: Sequence[Row]) -> None:
        """Add rows."""
        self._execute_many(_ADD, map(tuple, rows))  # a subclass takes more time
        others = [row for row in rows if row.state or row.packed_hops]
        number = len(rows) - len(others)  # of nearly all rows, which are not counted one by one
        self.figures.num_rows += number
        self.figures.of[State.PENDING] += number
        for row in others:
            self._count(row, 1)

    def change(self, row: Row, **columns: Any) -> None:
        """Change columns of a row."""
        names = " = ?, ".join(columns)
        query = f"UPDATE requests SET {names} = ? WHERE id = ?"  # noqa: S608 - names of columns
        self.execute(query, (*columns.values(), row.id))
        self._count(row, -1)
        self._count(row._replace(**columns), 1)

    def remove_taken(self, id_: int, takes: int) -> bool:
        """Remove a row that is done in one step, if that is enough; return whether it was."""
        figures = self.figures
        if any(figures.of[WAITING:UNREADABLE]) or figures.alone:  # waiting, failed and dead ones
            return False
        if not self.execute(_REMOVE_TAKEN, (id_, takes)).rowcount:
            return False
        figures.of[IN_FLIGHT] -= 1
        figures.num_rows -= 1
        figures.done += 1
        return True

    def remove(self, row: Row) -> None:
        """Remove a row, which has left the queue."""
        self.execute("DELETE FROM requests WHERE id = ?", (row.id,))
        self.figures.done += 1
        self._count(row, -1)

    def is_late(self, row: Row) -> bool:
        """Return whether a row is about to become pending, without its hops."""
        return row.state in (State.WAITING, State.FAILED) and row.epoch < self.figures.epoch

    def _count(self, row: Row, number: int) -> None:
        """Count a row in all figures, and put its hops into their table, or, with -1, undo that."""
        figures = self.figures
        figures.num_rows += number
        figures.of[row.state] += number
        figures.late += number * self.is_late(row)
        if row.packed_hops:
            hops = [(page, row.id) for page in row.hops]
            add, remove = (
                "INSERT INTO hops VALUES (?, ?)",
                "DELETE FROM hops WHERE (page, id) = (?, ?)",
            )
            self._execute_many(add if number > 0 else remove, hops)
            figures.hops += number * len(hops)

    def try_again(self, row: Row, tries: int) -> None:
        """Make a row pending as it first entered, or dead after too many tries."""
        is_dead, first = tries >= MOST_TRIES, {}
        newest_first = row.newest_first
        if row.first:
            slot, priority, rank, rest = parsed_order(row.first)
            newest_first = rest[:1] == b"\1"
            first = {"slot": slot, "priority": priority, "rank": rank, "data": rest[1:]}
        self.change(
            row,
            state=State.DEAD if is_dead else State.PENDING,
            position=self.next_position(newest_first=newest_first),
            deaths=0,
            tries=tries,
            reason=row.reason if is_dead else "",
            packed_hops=b"",
            waits_for=b"",
            first=b"",
            **first,
        )

    def move_some(self, state: State, to: State | None, slot: str | None) -> int:
        """Make up to 100 rows pending as they first entered, or drop them; return how many.

        They are of one state (waiting, failed, dead, or, to be dropped, pending), and of one slot.
        """
        where, values = CONDITIONS[state], []
        if slot is not None:
            where, values = f"{where} AND slot = ?", [stored_text(slot)]
        query = f"SELECT * FROM requests WHERE {where} LIMIT {_MOST_MOVED}"  # noqa: S608 - constants
        rows = sorted(map(Row._make, self.execute(query, values).fetchall()))
        for row in rows:
            if to is None:
                self.remove(row)
            else:
                self.try_again(row, 0)
        return len(rows)

    def copy(self, rows: Iterable[Row]) -> int:
        """Add rows of another queue to an empty one, in any order; return their number."""
        for row in rows:
            number = abs(row.position)
            stored = row._replace(
                id=number,
                state=State.PENDING if row.state is State.IN_FLIGHT else row.state,
                slot=stored_text(row.slot),
                takes=row.takes or row.state > 0,  # so that it is in the index
                epoch=0,
                reason=stored_text(row.reason),
            )
            self.add([stored])
            self.figures.position = max(self.figures.position, number)
        return self.figures.num_rows


@contextlib.contextmanager
def changed(path: Path) -> Iterator[JobDatabase]:
    """Change the queue of a job that no crawl uses, in one transaction; raises StorageError."""
    file = JobFile(path)
    try:
        file.execute("PRAGMA synchronous = FULL")  # the transaction is synced
        # Without `begin`, whose counts nobody reads: for many slices, they would take long.
        with explaining(path), JobDatabase(file).transaction() as changes:
            yield changes
    finally:
        file.close()


def counts_of(execute: Execute, num_rows: int) -> list[int]:
    """Return how many of all rows have each state, without reading most that are pending."""
    counts = [0] * len(State)
    for state, number in execute(_COUNTS):
        counts[state] = number
    counts[State.PENDING] = num_rows - sum(counts)
    return counts

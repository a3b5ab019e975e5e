"""The rows of a queue in the file of a job, and the figures that change with them."""

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from scrapy_bloom.job.file import JobFile, explaining, stored_text, unusable
from scrapy_bloom.job.filter import Execute, LocalBackend, pack_fingerprints, unpack_fingerprints
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

# The states of a row in the file. A pending row is REPEATED if it was taken before, or is `once`.
# The suspect that was taken last is ALONE. Rows before WAITING are open in any epoch. 0 and 1 take
# no space in a record, so that SQLite does not write a large request again when it is taken.
REPEATED, PENDING, IN_FLIGHT, ALONE, SUSPECT, UNREADABLE, WAITING, FAILED, DEAD = range(-1, 8)

_P, _I = State.PENDING, State.IN_FLIGHT
_OTHERS = (State.SUSPECT, State.UNREADABLE, State.WAITING, State.FAILED, State.DEAD)
STATES = dict(enumerate((_P, _P, _I, _I, *_OTHERS), REPEATED))
NUMBERS = {state: number for number, state in STATES.items()}
MOVABLE = (_P, *_OTHERS[2:])  # the states from which a command can move rows
# The rows of each state, by the condition of an index.
CONDITIONS = {state: f"state > 2 AND state = {NUMBERS[state]}" for state in _OTHERS}
CONDITIONS |= {_P: "state < 1", _I: f"state != 0 AND state IN ({IN_FLIGHT}, {ALONE})"}

_IN_FLIGHT = f"FROM requests INDEXED BY pages WHERE {CONDITIONS[_I]}"
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
_LATE = f"FROM requests WHERE state IN ({WAITING}, {FAILED}) AND epoch < ?"


class StoredRow(NamedTuple):
    """A row of the table `requests`, as `store.Row` describes it, with numbers of states.

    `position` is negative if the newest comes first. It is a new number of the job each time the
    row becomes pending, except after a death or a close. `takes` counts how often it was taken.
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
# Where nothing is to be done but to remove it.
_REMOVE_TAKEN = f"""
    DELETE FROM requests WHERE id = ? AND takes = ? AND state = {IN_FLIGHT}
        AND abs(position) = id AND NOT once AND hops = x''
"""  # noqa: S608 - constants


@dataclass
class Totals:
    """The figures of a job that are stored in the table `job`."""

    seq: int  # the number of the last batch
    left: int  # how many rows there are
    done: int  # how many rows have left the queue
    position: int  # the last number that was given to a row
    epoch: int  # raised when failed and waiting rows are to be tried again
    adds_tries: int  # whether that counts as a try
    tried_at: float  # when an opening without a run's name counted as a try last
    began: float  # the current run, or 0; without names, one begins whenever nothing is left
    ended_at: float  # when the queue became empty, or 0


@dataclass
class Figures(Totals):
    """The figures of a job, also those that are kept in memory so that the file need not be read.

    They are complete only after `JobDatabase.begin`.
    """

    of: list[int] = field(default_factory=lambda: [0] * (DEAD + 1))  # rows by state
    late: int = 0  # how many failed and waiting rows are of an earlier epoch
    hops: int = 0  # how many rows the table has
    done_pages: int = 0  # how many pages the table has
    alone: int = 0  # the id of the suspect that was taken last and is in flight, or 0
    last_slot: str = ""  # the slot from which a request was taken last

    def add(self, state: int, number: int) -> None:
        """Count rows that have a state from now on, or, if the number is negative, had it."""
        self.of[max(PENDING, state)] += number

    @property
    def in_flight(self) -> int:
        """How many requests are in flight."""
        return self.of[IN_FLIGHT] + self.of[ALONE]

    @property
    def unfinished(self) -> int:
        """The value of `Reply.left`, in which pages count whose waiting rows are about to end."""
        return self.of[PENDING] + self.of[SUSPECT] + self.in_flight + self.late + self.done_pages


_NAMES = [column.name for column in fields(Totals)]
_totals_of = attrgetter(*_NAMES)
_TOTALS = f"SELECT {', '.join(_NAMES)} FROM job"  # noqa: S608 - constants
_UPDATE = f"UPDATE job SET {' = ?, '.join(_NAMES)} = ?"  # noqa: S608 - constants


class JobDatabase:
    """The queue in the file of a job; raises a StorageError, and changes nothing, if damaged."""

    def __init__(self, file: JobFile) -> None:
        self.file = file
        self.execute, self._execute_many = file.execute, file.executemany
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
                self.execute(_RELEASE)
            figures.of = counts_of(self.execute, figures.left)
            (figures.late,) = self.execute(f"SELECT count(*) {_LATE}", (figures.epoch,)).fetchone()
            for table in ("hops", "done_pages"):
                (number,) = self.execute(f"SELECT count(*) FROM {table}").fetchone()  # noqa: S608 - constants
                setattr(figures, table, number)
        except sqlite3.Error as error:
            raise unusable(self.file.path, error) from error
        self.file.begin(None if backend is None else backend.write_changed, in_use=in_use)

    def _judge_deaths(self) -> None:
        """Count the death of the last process for the requests that were in flight."""
        (self.killed,) = self.execute(f"SELECT count(*) {_IN_FLIGHT}").fetchone()
        query = f"SELECT data {_IN_FLIGHT} AND state = ?"
        self.died = [data for (data,) in self.execute(query, (ALONE,))]
        # If one was alone, the others are not to blame.
        self.execute(_BLAME, (ALONE if self.died else IN_FLIGHT,))

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

    def close(self, last: Callable[[], None] | None = None) -> None:
        """Close the file, and make requests in flight pending again for the next process.

        `last` makes the last changes of the filter. Raises StorageError: the next process treats
        this one as killed, and no request is lost.
        """

        def release() -> None:
            if last is not None:
                last()
            self.execute(_RELEASE)

        self.file.close(release)

    # Changes in a transaction: of runs.

    def begin_run(self, run: bytes, name: str, spider: str) -> None:
        """Begin a run."""
        self.execute("UPDATE job SET run = ?, run_name = ?, spider = ?", (run, name, spider))
        figures, of = self.figures, self.figures.of
        before = figures.left + figures.done, figures.done, of[FAILED], of[DEAD], figures.ended_at
        figures.ended_at = 0.0
        self.begin_epoch(is_named=bool(name))
        values = (name, figures.began, *before)
        self.execute("INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?, ?)", values)

    def begin_epoch(self, *, is_named: bool) -> None:
        """From now on, rows that have failed or wait are of an earlier epoch."""
        figures, now = self.figures, time.time()
        figures.began = now
        figures.epoch += 1
        figures.late = figures.of[FAILED] + figures.of[WAITING]
        figures.adds_tries = is_named or not 0 <= now - figures.tried_at < TRIES_SECS
        if figures.adds_tries and not is_named:
            figures.tried_at = now

    def requeue_unreadable(self) -> None:
        """Make unreadable requests pending, because this process may be able to read them."""
        query = "UPDATE requests SET state = ? WHERE state > 2 AND state = ?"
        number = self.execute(query, (REPEATED, UNREADABLE)).rowcount
        self.figures.add(UNREADABLE, -number)
        self.figures.add(REPEATED, number)

    # Of rows.

    def next_position(self, *, newest_first: bool) -> int:
        """Return the position of a row that becomes pending now."""
        self.figures.position += 1
        return -self.figures.position if newest_first else self.figures.position

    def new_row(
        self, request: Entered, page: bytes | None, *, tries: int = 0, waits_for: bytes = b""
    ) -> StoredRow:
        """Return the row of a request that enters the queue, for `add`."""
        position = self.next_position(newest_first=request.newest_first)
        return StoredRow(
            self.figures.position,
            WAITING if waits_for else REPEATED if request.once else PENDING,
            stored_text(request.slot),
            request.clipped_priority,
            request.rank,
            position,
            +bool(waits_for),  # takes; as integers, which sqlite3 need not convert
            0,
            tries,
            self.figures.epoch if waits_for else 0,
            +request.is_filtered,
            +request.is_start,
            +request.once,
            "",
            page,
            b"",
            waits_for,
            b"",
            request.data,
        )

    def add(self, rows: Sequence[StoredRow]) -> None:
        """Add rows."""
        self._execute_many(_ADD, map(tuple, rows))  # a subclass takes more time
        others = [row for row in rows if row.state > PENDING or row.hops]
        number = len(rows) - len(others)  # of nearly all rows, which are not counted one by one
        self.figures.left += number
        self.figures.of[PENDING] += number
        for row in others:
            self._count(row, 1)

    def change(self, row: StoredRow, **columns: Any) -> None:
        """Change columns of a row."""
        names = " = ?, ".join(columns)
        query = f"UPDATE requests SET {names} = ? WHERE id = ?"  # noqa: S608 - names of columns
        self.execute(query, (*columns.values(), row.id))
        self._count(row, -1)
        self._count(row._replace(**columns), 1)

    def remove_taken(self, id_: int, takes: int) -> bool:
        """Remove a row that is done in one step, if that is enough; return whether it was."""
        figures = self.figures
        if figures.of[WAITING] or figures.of[FAILED] or figures.of[DEAD]:
            return False
        if not self.execute(_REMOVE_TAKEN, (id_, takes)).rowcount:
            return False
        figures.of[IN_FLIGHT] -= 1
        figures.left -= 1
        figures.done += 1
        return True

    def remove(self, row: StoredRow) -> None:
        """Remove a row, which has left the queue."""
        self.execute("DELETE FROM requests WHERE id = ?", (row.id,))
        self.figures.done += 1
        self._count(row, -1)

    def is_late(self, row: StoredRow) -> bool:
        """Return whether a row is about to become pending, without its hops."""
        return row.state in (WAITING, FAILED) and row.epoch < self.figures.epoch

    def _count(self, row: StoredRow, number: int) -> None:
        """Count a row in all figures, and put its hops into their table, or, with -1, undo that."""
        figures = self.figures
        figures.left += number
        figures.add(row.state, number)
        figures.late += number * self.is_late(row)
        if row.hops:
            hops = [(page, row.id) for page in unpack_fingerprints(row.hops)]
            add, remove = (
                "INSERT INTO hops VALUES (?, ?)",
                "DELETE FROM hops WHERE (page, id) = (?, ?)",
            )
            self._execute_many(add if number > 0 else remove, hops)
            figures.hops += number * len(hops)

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
        """Make up to 100 rows pending as they first entered, or drop them; return how many.

        They are of one state (waiting, failed, dead, or, to be dropped, pending), and of one slot.
        """
        where, values = CONDITIONS[state], []
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
            self.add([row])
            self.figures.position = max(self.figures.position, row.id)
        return self.figures.left


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


def counts_of(execute: Execute, left: int) -> list[int]:
    """Return how many of all rows have each state, without reading those that are pending."""
    counts = [0] * (DEAD + 1)
    for state, number in execute(_COUNTS):
        counts[state] = number
    counts[PENDING] = left - sum(counts)  # and those that are REPEATED
    return counts


def by_state(counts: Sequence[int]) -> Mapping[State, int]:
    """Return the numbers of rows for each state as the file has it by the states of stores."""
    numbers = dict.fromkeys(State, 0)
    for state, number in enumerate(counts):
        numbers[STATES[state]] += number
    return numbers

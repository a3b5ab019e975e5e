"""The store of a job directory: its requests and its filter in one SQLite file.

A batch is one transaction, which has the requests and the fingerprints that are new. Only after it
are their bits set in memory. So whatever is written of the bits, the file has their requests.
"""

import contextlib
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.job.file import JobFile, stored_text
from scrapy_bloom.job.filter import LocalBackend, pack_fingerprints
from scrapy_bloom.queues.rows import (
    CONDITIONS,
    IN_FLIGHT,
    IN_INDEX,
    LATE,
    PENDING,
    SUSPECT,
    WAITING,
    JobDatabase,
)
from scrapy_bloom.queues.store import (
    MOST_DEATHS,
    MOST_TRIES,
    TO_ITSELF,
    TO_OTHERS,
    Batch,
    End,
    Ended,
    Entered,
    Joining,
    Opened,
    QueueStatus,
    Reply,
    Row,
    State,
    Taken,
    once_in,
    packed_first,
)

_RUN_BYTES = 8
_FILLED_AT_ONCE = 1000  # requests, for which memory is needed
_MOST_AT_ONCE = 500  # rows that a batch ends or tries again, so that it takes some 10 ms

_TAKE = "SELECT id, takes + 1, data, slot, tries FROM requests "
_NEXT_SUSPECT = f"""
    {_TAKE} WHERE {CONDITIONS[State.SUSPECT]}
    ORDER BY slot, priority DESC, rank, position LIMIT 1
"""
# Without the serialized request, because only that of the chosen slot is needed.
_FIRST_OF_SLOTS = """
    SELECT slot, id FROM requests WHERE state < 1
    ORDER BY slot, priority DESC, rank, position LIMIT 1
"""
_NEXT_OF_SLOTS = _FIRST_OF_SLOTS.replace("ORDER", "AND slot > ? ORDER")
_AS_TAKEN = f"""
    SELECT * FROM requests WHERE (id, takes) = (?, ?) AND {CONDITIONS[State.IN_FLIGHT]}
"""  # noqa: S608 - constants
_WITH_PAGE = f"SELECT * FROM requests WHERE {IN_INDEX} AND page = ? ORDER BY id"  # noqa: S608 - constants
_WITH_HOP = "SELECT * FROM requests WHERE id IN (SELECT id FROM hops WHERE page = ?)"
_WAITING_FOR = f"""
    SELECT * FROM requests WHERE state = {State.WAITING:d} AND waits_for = ? AND epoch = ? LIMIT ?
"""  # noqa: S608 - constants
# Before start() has ended, without start requests: it may yield them again, in place of rows.
_LATE = f"SELECT * {LATE} ORDER BY is_start, id LIMIT ?"


class SQLiteStore:
    """The store of a job directory; implements `Store` as described there.

    Requests are taken round-robin by slot, from slots with the fewest downloads first.

    Args:
        path: the file; created if missing. The caller has locked the job directory.
        backend: the filter, opened and closed with the store; None: nothing is filtered.
    """

    def __init__(self, path: Path, backend: LocalBackend | None) -> None:
        self.name = str(path)
        self.run = b""
        self._path = path
        self._backend = backend
        self._keeps_failed = True
        self._first_id = 0  # of the rows that have entered since it was opened
        self._is_late = self._has_failed = False
        self._runs_start = self._is_started = False
        self._database: JobDatabase

    @property
    def pending(self) -> int:
        return self._database.figures.unfinished - self._database.figures.of[State.IN_FLIGHT]

    def open(self, joining: Joining, other: str = "", entered: Iterable[Entered] = ()) -> Opened:
        """Open the file with its filter, and begin a run or join the current one.

        Before that, take over the requests of another queue with some digest, if there is one.
        Raises BloomError: the file is as it was, or as the last process should have closed it.
        """
        file = JobFile(self._path)
        try:
            self._database = database = JobDatabase(file)
            self._check_spider(joining)
            if self._backend is not None:
                self._backend.open(file)
            # Until all is taken over: if this process is killed, too, the next one must know it.
            database.begin(self._backend, in_use=bool(other) and file.in_use)
            try:
                if other:
                    self._take_over(other, iter(entered), joining.spider)
                return self._join(joining)
            except sqlite3.Error as error:
                raise self._failed(error) from error
        except BaseException:
            with contextlib.suppress(StorageError):  # the first error says what is wrong
                file.close()
            raise

    def _take_over(self, queue: str, entered: Iterator[Entered], spider: str) -> None:
        """Add the requests of another queue, with their fingerprints, in one transaction.

        If a queue with this digest was added already, nothing is done. The requests may begin a
        run. Its id is empty, so what is new once in each run is recorded under its fingerprint
        alone: start requests that the other queue has recorded are duplicates in this run.
        """
        database, backend = self._database, self._backend
        run, last = database.execute("SELECT run, taken_over FROM job").fetchone()
        with database.transaction():
            if last != queue and run is None:
                database.begin_run(b"", "", stored_text(spider))
            while last != queue and (some := list(islice(entered, _FILLED_AT_ONCE))):
                database.add([database.new_row(request, request.fingerprint) for request in some])
                if backend is None:
                    continue
                database.figures.seq += 1
                pages = {request.fingerprint for request in some if request.fingerprint}
                new = [page for page in pages if page not in backend]
                backend.grow_if_full()
                backend.write(database.figures.seq, new)
                backend.record(database.figures.seq, new)  # if this fails, so does the opening
            database.execute("UPDATE job SET taken_over = ?, in_use = 0", (queue,))

    def _check_spider(self, joining: Joining) -> None:
        (spider,) = self._database.execute("SELECT spider FROM job").fetchone()
        if spider not in ("", stored_text(joining.spider)):
            raise StorageError(
                f"{self.name} belongs to spider {spider!r}, but this crawl runs "
                f"{joining.spider!r}; set another JOBDIR for each spider"
            )

    def _join(self, joining: Joining) -> Opened:
        database, asked = self._database, stored_text(joining.run)
        run, name = database.execute("SELECT run, run_name FROM job").fetchone()
        names = {known for (known,) in database.execute("SELECT name FROM runs")}
        is_other = run is None or asked not in ("", name)
        self._is_late = is_other and asked in names
        self._keeps_failed = joining.keeps_failed
        begins = joining.is_crawl and is_other and not self._is_late
        with database.transaction():
            figures = database.figures
            if not self._is_late:
                database.requeue_unreadable()
            counts, unfinished = figures.counts, figures.unfinished
            ended_at = 0.0 if unfinished else figures.ended_at
            if begins:
                run, name = secrets.token_bytes(_RUN_BYTES), asked
                database.begin_run(run, name, stored_text(joining.spider))
            elif joining.is_crawl and not (asked or unfinished):
                database.begin_epoch(is_named=False)
            if self._backend is not None:
                # Before the commit, so that no run is stored for which nothing has expired.
                self._backend.begin(figures.began)
        self.run = run or b""
        self._first_id = figures.position + 1
        return Opened(
            run=name,
            began=begins,
            counts=counts,
            is_first=len(names) + begins == 1,
            is_late=self._is_late,
            retried=figures.late,
            killed=database.killed,
            died=database.died,
            ended_at=0.0 if begins or figures.unfinished else ended_at,
        )

    def knows(self, fingerprint: bytes, *, once: bool = False) -> bool:
        key = once_in(self.run, fingerprint) if once else fingerprint
        try:
            return self._backend is not None and self._backend.is_duplicate(key)
        except StorageError:  # `apply` has the same failure, and raises it
            return False

    def apply(self, batch: Batch) -> Reply:
        database, backend = self._database, self._backend
        if (failure := database.file.failure) is not None and not self._has_failed:
            raise self._failed(failure)
        is_started = self._is_started or batch.start_ended
        try:
            if backend is not None:
                backend.grow_if_full()
            is_batch = batch.changes > 0 or database.figures.done_pages > 0
            with database.transaction(is_batch=is_batch):
                figures = database.figures
                step = _Step(database, backend, self.run, self._first_id, self._keeps_failed)
                step.enter(batch)
                for ended in batch.ended:
                    step.end(ended)
                step.go_on(is_started=is_started)
                if not self._is_late:
                    step.take(batch)
                if backend is not None and step.recorded:
                    backend.write(figures.seq, step.recorded)
                if figures.unfinished:
                    figures.ended_at = 0.0
                elif batch.is_over and not figures.ended_at:
                    figures.ended_at = time.time()
        except sqlite3.Error as error:
            raise self._failed(error) from error
        if backend is not None and step.recorded:
            backend.record(figures.seq, step.recorded)
        self._runs_start = (self._runs_start or batch.may_start) and not is_started
        self._is_started = is_started
        reply = step.reply
        reply.pending, reply.unfinished = figures.of[PENDING], figures.unfinished
        reply.runs_start, reply.is_started = self._runs_start, is_started
        reply.ended_at = figures.ended_at
        reply.counters = (figures.num_rows + figures.done, figures.done)
        reply.is_retired = self._is_late
        return reply

    def move_some(self, state: State, to: State | None, slot: str | None = None) -> int:
        """Make some rows pending, or drop them, as `Queue.move` does; return how many.

        The caller repeats the call until it returns 0. Raises StorageError: nothing has changed.
        """
        try:
            with self._database.transaction(is_batch=True):
                return self._database.move_some(state, to, slot)
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def sync(self) -> None:
        """Write all batches so far to the disk; raises StorageError."""
        try:
            self._database.file.sync()
        except (OSError, sqlite3.Error) as error:
            raise self._failed(error) from error

    def close(self) -> QueueStatus:
        if self._backend is not None:
            self._backend.close()
        try:
            self._database.close()
        except StorageError:
            if not self._has_failed:
                raise
        counts = dict(self._database.figures.counts)
        counts[State.PENDING] += counts[State.IN_FLIGHT]
        counts[State.IN_FLIGHT] = 0
        return QueueStatus(counts, ended_at=self._database.figures.ended_at)

    def _failed(self, error: Exception) -> StorageError:
        """Return the error of the crawl after an error of the disk."""
        self._has_failed = True
        error = self._database.file.cause(error)
        if isinstance(error, StorageError):
            return error
        return StorageError(
            f"{self.name} cannot be written or read: {error}; nothing is lost: free some space or "
            "repair the disk, and start the crawl again"
        )


@dataclass
class _Step:
    """The changes of one batch, in a transaction that may still fail."""

    _database: JobDatabase
    _backend: LocalBackend | None
    _run: bytes
    _first_id: int
    _keeps_failed: bool
    recorded: dict[bytes, None] = field(default_factory=dict)  # the new fingerprints, in order
    reply: Reply = field(default_factory=Reply)  # the part of it that does not depend on the commit
    _room: int = _MOST_AT_ONCE

    def __post_init__(self) -> None:
        self._query, self._figures = self._database.execute, self._database.figures

    # Pages.

    def _with_page(self, page: bytes) -> list[Row]:
        """Return the rows of the index that have a page as their own, by id."""
        return list(map(Row._make, self._query(_WITH_PAGE, (page,))))

    def _crawling(self, page: bytes) -> list[Row]:
        """Return the rows of the index that have a page, also as a hop."""
        rows = self._with_page(page)
        if self._figures.hops:
            hops = map(Row._make, self._query(_WITH_HOP, (page,)))
            rows += [row for row in hops if not self._database.is_late(row)]
        return rows

    def _is_open(self, page: bytes, but: int = 0) -> bool:
        """Return whether a row, other than one, may still crawl a page."""
        return any(row.id != but and row.state != State.DEAD for row in self._crawling(page))

    def _has_row(self, page: bytes) -> bool:
        """Return whether a row of the index has a page as its own, and is not dead."""
        return any(row.state != State.DEAD for row in self._with_page(page))

    def _is_recorded(self, key: bytes) -> bool:
        return key in self.recorded or (self._backend is not None and key in self._backend)

    def _knows(self, page: bytes, *, once: bool) -> bool:
        return self._is_recorded(once_in(self._run, page) if once else page)

    def _record(self, page: bytes, *, once: bool = False, renews: bool = False) -> None:
        if self._backend is None:
            return
        is_new = not self._is_recorded(page)
        self.reply.added += is_new
        if is_new or (renews and self._backend.lacks_in_newest(page)):
            self.recorded[page] = None
        if once and not self._is_recorded(key := once_in(self._run, page)):
            self.recorded[key] = None

    # Requests that enter.

    def enter(self, batch: Batch) -> None:
        """Queue requests unless they are duplicates, and record."""
        rows: list[Row] = []
        for request in batch.entered:
            if request.replaces is not None:
                self.reply.queued.append(self._take_row(request))
                continue
            row = self._row_of(request)
            self.reply.queued.append(row is not None and row.state != WAITING)
            if row is not None and (request.once or row.state == WAITING):
                self._database.add([row])  # the next requests may have to find it
            elif row is not None:
                rows.append(row)
        self._database.add(rows)
        for fingerprint in batch.recorded:
            self._record(fingerprint)

    def _row_of(self, request: Entered) -> Row | None:
        """Return the row of a request that is to be queued, or waits; None: it is a duplicate."""
        page, once, tries, waits_for = request.fingerprint, request.once, 0, b""
        has_page = request.is_start or (request.is_filtered and request.is_recorded)
        if page is not None and request.is_filtered:
            if self._knows(page, once=once):
                if not request.passes:
                    return None
                has_page = False
            elif once and request.is_recorded:
                is_queued, tries = self._replace_kept(page)
                if is_queued:
                    self._record(page, once=True)
                    return None
            elif request.is_recorded and not request.passes and self._figures.hops:
                # Open as a hop, and no row has it as its own page.
                is_only_a_hop = not self._has_row(page) and self._is_open(page)
                waits_for = page if is_only_a_hop else b""
        elif page is not None and request.is_start:
            tries = self._replace_start(page)
        if page is not None and request.is_recorded:
            self._record(page, once=once and request.is_filtered)
        if waits_for and not self._keeps_failed:
            return None
        tries = min(tries, MOST_TRIES - 1)
        own = page if has_page else None
        return self._database.new_row(request, own, tries=tries, waits_for=waits_for)

    def _replace_kept(self, page: bytes) -> tuple[bool, int]:
        """Drop what earlier runs have kept of a page; return whether others have it, and tries."""
        tries = 0
        for row in self._with_page(page):
            if row.is_filtered and (row.state == State.DEAD or self._database.is_late(row)):
                tries = max(tries, row.tries + self._figures.adds_tries)
                self._database.remove(row)
        return self._has_row(page), tries

    def _replace_start(self, page: bytes) -> int:
        """Drop one start row of a page from before the store was opened; return its tries."""
        # What start() has yielded since then may be several sessions of one page.
        for row in self._with_page(page):
            is_session = row.is_start and not row.is_filtered and row.id < self._first_id
            if is_session and row.state in (State.PENDING, State.WAITING, State.FAILED, State.DEAD):
                self._database.remove(row)
                is_kept = row.state != State.PENDING and row.epoch < self._figures.epoch
                return row.tries + (is_kept and self._figures.adds_tries)
        return 0

    def _take_row(self, request: Entered) -> bool:
        """Have a request take the row that it replaces; return whether it is pending."""
        if (row := self._in_flight(request.replaces)) is None:
            return False
        page, pages, hops = request.fingerprint, row.pages, row.packed_hops
        if page is not None and request.is_filtered:
            if not request.passes and self._ends_by_redirect(row, request, page):
                return False
            is_known = request.passes and (self._is_recorded(page) or self._is_open(page))
            if request.is_recorded and page not in pages and not is_known:
                hops += pack_fingerprints([page])
        self._database.change(
            row,
            state=State.PENDING,
            slot=stored_text(request.slot),
            priority=request.clipped_priority,
            rank=request.rank,
            position=self._database.next_position(newest_first=request.newest_first),
            deaths=0,
            packed_hops=hops,
            first=row.first or packed_first(row.order, row.data, newest_first=row.newest_first),
            data=request.data,
        )
        return True

    def _ends_by_redirect(self, row: Row, request: Entered, page: bytes) -> bool:
        """Keep or end a row that is redirected to a page; return False if it goes on there."""
        dead = [other for other in self._with_page(page) if other.state == State.DEAD]
        if page in row.pages:
            self._keep(row, State.FAILED, reason=TO_ITSELF)
        elif self._is_open(page, but=row.id) or any(other.tries < MOST_TRIES for other in dead):
            self._wait(row, page)
        elif self._knows(page, once=request.once) and not dead:
            self._done(row)
        else:
            return False
        return True

    # Requests that end.

    def _in_flight(self, taken: tuple[int, int]) -> Row | None:
        """Return the row of a request that is in flight, as it was taken; its state will change."""
        if (values := self._query(_AS_TAKEN, taken).fetchone()) is None:
            return None
        row = Row._make(values)
        if row.id == self._figures.alone:
            self._figures.alone = 0
        return row

    def end(self, ended: Ended) -> None:
        """End a request, if it is in flight."""
        is_done = ended.end is End.DONE
        if is_done and not ended.awaits and self._database.remove_taken(*ended.id):
            return
        if (row := self._in_flight(ended.id)) is None:
            return
        awaited = {*ended.awaits} - {*row.pages} if ended.awaits else set()
        opened = [page for page in awaited if self._is_open(page, but=row.id)]
        if ended.end is End.UNREADABLE:
            self._database.change(row, state=State.UNREADABLE)
        elif ended.end is End.RETURNED:
            state = State.PENDING if row.deaths < MOST_DEATHS else State.SUSPECT
            self._database.change(row, state=state)
        elif ended.end is End.FAILED:
            self._keep(row, State.FAILED, reason=ended.reason)
        elif is_done and len(opened) > 1:
            self._keep(row, State.FAILED, reason=TO_OTHERS)
        elif is_done and opened:
            self._wait(row, opened[0])
        else:
            self._done(row, with_hops=is_done)

    def _keep(self, row: Row, state: State, *, reason: str = "", waits_for: bytes = b"") -> None:
        """Keep a row as failed or waiting, or end it, as the settings say."""
        if not self._keeps_failed:
            self._done(row)
            return
        tries = row.tries
        if state == State.FAILED and row.is_filtered and row.page is not None:
            for other in self._failed(row.page):
                tries = max(tries, other.tries if other.state == State.FAILED else 0)
                self._database.remove(other)
        self._database.change(
            row,
            state=state,
            tries=tries,
            epoch=self._figures.epoch,
            reason=stored_text(reason),
            waits_for=waits_for,
        )

    def _failed(self, page: bytes) -> list[Row]:
        """Return the failed and the dead rows of a page that another row may replace."""
        if not (self._figures.of[State.FAILED] or self._figures.of[State.DEAD]):
            return []
        rows = self._with_page(page)  # those that are not filtered are sessions of their own
        return [row for row in rows if row.is_filtered and row.state in (State.FAILED, State.DEAD)]

    def _wait(self, row: Row, page: bytes) -> None:
        self._keep(row, State.WAITING, waits_for=page)
        others = (other for other in self._crawling(page) if not self._database.is_late(other))
        waiting = (other.waits_for for other in others if other.state == State.WAITING)
        if self._keeps_failed and any(page in row.pages for page in waiting):
            self.reply.circles.append(row.data)

    def _done(self, row: Row, *, with_hops: bool = True) -> None:
        """End a row as done, and some of those that wait for its pages."""
        self._remove_done(row, with_hops=with_hops)
        self._end_waiting()

    def _remove_done(self, row: Row, *, with_hops: bool = True) -> None:
        self._database.remove(row)
        own = [] if row.page is None else [row.page]
        for page in row.pages if with_hops else own:
            # Otherwise, it was recorded when it entered.
            if row.is_filtered and (row.once or row.packed_hops):
                self._record(page, once=row.once, renews=with_hops and bool(row.packed_hops))
            for kept in self._failed(page) if row.is_filtered else ():
                self._database.remove(kept)
            done, waiting = (page, self._figures.epoch), self._figures.of[State.WAITING]
            if waiting and self._query(_WAITING_FOR, (*done, 1)).fetchone():
                query = "INSERT OR IGNORE INTO done_pages VALUES (?, ?)"
                self._figures.done_pages += self._query(query, done).rowcount

    def _end_waiting(self) -> None:
        """End some rows that wait for pages that are done."""
        while self._figures.done_pages and self._room:
            done = self._query("SELECT page, epoch FROM done_pages LIMIT 1").fetchone()
            rows = self._query(_WAITING_FOR, (*done, self._room)).fetchall()
            if len(rows) < self._room:
                self._query("DELETE FROM done_pages WHERE (page, epoch) = (?, ?)", done)
                self._figures.done_pages -= 1
            self._room -= len(rows)
            for row in rows:
                self._remove_done(Row._make(row))

    def go_on(self, *, is_started: bool) -> None:
        """End and try again some rows that earlier batches have left."""
        self._end_waiting()
        if not (self._figures.late and self._room):
            return
        figures = self._figures
        for values in self._query(_LATE, (is_started, figures.epoch, self._room)).fetchall():
            row = Row._make(values)
            tries = row.tries + figures.adds_tries
            self._database.try_again(row, tries)
            self.reply.given_up += tries >= MOST_TRIES

    # Requests that are taken.

    def take(self, batch: Batch) -> None:
        """Take pending requests, or else a suspect."""
        figures, taken = self._figures, self.reply.taken
        if figures.alone and not batch.stands_still:
            return

        def active(slot: str) -> int:
            # Not a copy of all figures: usually, one is asked for.
            return batch.downloads[slot] + sum(request.slot == slot for request in taken)

        while len(taken) < batch.want and figures.of[PENDING]:
            taken.append(self._take(self._next(active), PENDING))
        is_free = batch.stands_still or not figures.of[IN_FLIGHT]
        if batch.want and is_free and not taken and figures.of[SUSPECT]:
            # So that the next death is blamed on it alone.
            taken.append(self._take(self._query(_NEXT_SUSPECT).fetchone(), SUSPECT))
            figures.alone = taken[0].id[0]

    def _take(self, row: Any, before: int) -> Taken:
        id_, takes, data, slot, tries = row
        self._query("UPDATE requests SET state = 1, takes = ? WHERE id = ?", (takes, id_))
        self._figures.of[before] -= 1
        self._figures.of[IN_FLIGHT] += 1
        return Taken((id_, takes), data, slot, tries)

    def _next(self, active: Callable[[str], int]) -> Any:
        last = self._figures.last_slot
        best = row = first = self._first_after(last)
        # Usually, the next slot has no downloads. If it is the last slot again, there is only one.
        fewest = 0 if first[0] == last else active(first[0])
        while fewest > 0 and (row := self._first_after(row[0])) != first:
            if (number := active(row[0])) < fewest:
                best, fewest = row, number
        self._figures.last_slot, chosen = best
        return self._query(f"{_TAKE} WHERE id = ?", (chosen,)).fetchone()

    def _first_after(self, slot: str) -> Any:
        """Return the next slot by name, starting again after the last, and its first request."""
        row = self._query(_NEXT_OF_SLOTS, (slot,)).fetchone()
        return row or self._query(_FIRST_OF_SLOTS).fetchone()

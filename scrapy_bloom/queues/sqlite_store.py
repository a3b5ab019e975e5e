"""The store of a job directory: its requests and its filter in one SQLite file.

A batch is one transaction, which has the requests and the fingerprints that are new. Only after it
are their bits set in memory. So whatever is written of the bits, the file has their requests.
"""

import contextlib
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.job.file import JobFile, stored_text
from scrapy_bloom.job.filter import LocalBackend, pack_fingerprints
from scrapy_bloom.queues.rows import (
    ALONE,
    DEAD,
    FAILED,
    IN_FLIGHT,
    LATE,
    PENDING,
    REPEATED,
    SUSPECT,
    UNREADABLE,
    WAITING,
    JobDatabase,
    StoredRow,
    Transaction,
    by_state,
)
from scrapy_bloom.queues.store import (
    MOST_DEATHS,
    MOST_TRIES,
    TO_ITSELF,
    TO_OTHERS,
    Batch,
    Closed,
    End,
    Ended,
    Entered,
    Joining,
    Opened,
    Reply,
    State,
    Taken,
    once_in,
    packed_first,
    packed_order,
)

_RUN_BYTES = 8
_FILLED_AT_ONCE = 1000  # requests, for which memory is needed
_MOST_AT_ONCE = 500  # rows that a batch ends or tries again, so that it takes some 10 ms

_TAKE = "SELECT id, takes + 1, data, slot, tries FROM requests "
_IN_ORDER = "ORDER BY priority DESC, rank, position LIMIT 1"
_NEXT = f"{_TAKE} WHERE state < 1 {_IN_ORDER}"
_NEXT_SUSPECT = f"""
    {_TAKE} WHERE state > 2 AND state = {SUSPECT}
    ORDER BY slot, priority DESC, rank, position LIMIT 1
"""
# Without the serialized request, because only that of the chosen slot is needed.
_FIRST_OF_SLOTS = """
    SELECT slot, id FROM requests WHERE state < 1
    ORDER BY slot, priority DESC, rank, position LIMIT 1
"""
_NEXT_OF_SLOTS = _FIRST_OF_SLOTS.replace("ORDER", "AND slot > ? ORDER")
_WITH_PAGE = "SELECT * FROM requests WHERE state != 0 AND page = ? ORDER BY id"
_WITH_HOP = "SELECT * FROM requests WHERE id IN (SELECT id FROM hops WHERE page = ?)"
_WAITING_FOR = f"""
    SELECT * FROM requests WHERE state = {WAITING} AND waits_for = ? AND epoch = ? LIMIT ?
"""  # noqa: S608 - constants
# Of each state and kind, SQLite reads the first ones by id alone.
_LATE_IDS = (
    "SELECT is_start, id FROM requests "
    "WHERE state > 2 AND state = %d AND is_start = %d AND epoch < ?1"
)
# By whether start() has ended: it may yield start requests again, which take the place of rows.
_LATE = {
    is_started: "SELECT * FROM requests WHERE id IN (SELECT id FROM ("  # noqa: S608 - constants
    + " UNION ALL ".join(
        _LATE_IDS % (state, is_start)
        for state in (WAITING, FAILED)
        for is_start in range(1 + is_started)
    )
    + " ORDER BY is_start, id LIMIT ?2)) ORDER BY is_start, id"
    for is_started in (False, True)
}
_COUNT_RETRIED = f"SELECT count(*) FROM requests WHERE {LATE}"  # noqa: S608 - constants


class SQLiteStore:
    """The store of a job directory, as `store.Store` describes it.

    Its filter is opened and closed with it.

    Args:
        path: the file; created if missing. The caller has locked the job directory.
        backend: the filter, not opened yet; None: nothing is filtered.
        by_slot: take requests round-robin by slot, from slots with the fewest downloads first;
            otherwise by priority alone.
    """

    def __init__(self, path: Path, backend: LocalBackend | None, *, by_slot: bool) -> None:
        self.name = str(path)
        self.run = b""
        self._path = path
        self._backend = backend
        self._by_slot = by_slot
        self._keeps_failed = True
        self._first_id = 0  # of the rows that have entered since it was opened
        self._is_late = self._has_failed = False
        self._runs_start = self._is_started = False
        self._database: JobDatabase

    @property
    def pending(self) -> int:
        """How many requests can be taken, or are about to become pending or to end."""
        counts = self._database.counts
        return counts.left - counts.in_flight

    def open(self, joining: Joining, fill: "Callable[[SQLiteStore], None] | None" = None) -> Opened:
        """Open the file with its filter, and begin a run or join the current one.

        Args:
            joining: what is to be known about the crawl.
            fill: called before that, to add requests with `fill`.

        Raises:
            BloomError: the queue or the filter cannot be used, or belongs to another spider. The
                file is as it was, or as the last process should have closed it.
        """
        file = JobFile(self._path)
        try:
            self._database = database = JobDatabase(file, by_slot=self._by_slot)
            self._check_spider(joining)
            if self._backend is not None:
                self._backend.open(file)
            # Until `fill` has ended: if this process is killed, too, the next one must know it.
            database.begin(in_use=fill is not None and file.in_use)
            try:
                if fill is not None:
                    fill(self)
                return self._join(joining)
            except sqlite3.Error as error:
                raise self._failed(error) from error
        except BaseException:
            with contextlib.suppress(StorageError):  # the first error says what is wrong
                file.close()
            raise

    def fill(self, queue: str, spider: str, entered: Iterator[Entered]) -> None:
        """Add the requests of another queue, with their fingerprints, in one transaction.

        Args:
            queue: a digest of that queue; if it was added already, nothing is done.
            spider: the name of the spider, for a run that begins with them. Its id is empty, so
                what is new once in each run is recorded under its fingerprint alone: start requests
                that the other queue has recorded are duplicates in this run.
            entered: the requests.

        Raises sqlite3.Error.
        """
        database, backend = self._database, self._backend
        run, last = database.query("SELECT run, taken_over FROM job").fetchone()
        with database.transaction() as changes:
            if last != queue and run is None:
                changes.begin_run(b"", "", stored_text(spider))
            while last != queue and (some := list(islice(entered, _FILLED_AT_ONCE))):
                changes.insert([changes.new_row(request) for request in some])
                if backend is None:
                    continue
                changes.totals.seq += 1
                pages = {each.fingerprint for each in some if each.fingerprint is not None}
                new = [page for page in pages if page not in backend]
                backend.grow_if_full()
                backend.write(changes.totals.seq, new)
                backend.record(new)  # if this fails, so does the opening
            changes.execute("UPDATE job SET taken_over = ?, in_use = 0", (queue,))

    def _check_spider(self, joining: Joining) -> None:
        (spider,) = self._database.query("SELECT spider FROM job").fetchone()
        if spider not in ("", stored_text(joining.spider)):
            raise StorageError(
                f"{self.name} belongs to spider {spider!r}, but this crawl runs "
                f"{joining.spider!r}; set another JOBDIR for each spider"
            )

    def _join(self, joining: Joining) -> Opened:
        database, asked = self._database, stored_text(joining.run)
        run, name = database.query("SELECT run, run_name FROM job").fetchone()
        names = {known for (known,) in database.query("SELECT name FROM runs")}
        is_other = run is None or asked not in ("", name)
        self._is_late = is_other and asked in names
        self._keeps_failed = joining.keeps_failed
        begins = joining.is_crawl and is_other and not self._is_late
        with database.transaction() as changes:
            if not self._is_late:
                changes.requeue_unreadable()
            counts, left = by_state(changes.counts.of), changes.counts.left
            ended_at = 0.0 if left else changes.totals.ended_at
            if begins:
                run, name = secrets.token_bytes(_RUN_BYTES), asked
                changes.begin_run(run, name, stored_text(joining.spider))
            elif joining.is_crawl and not (asked or left):
                changes.begin_epoch(is_named=False)
            if self._backend is not None:
                # Before the commit, so that no run is stored for which nothing has expired.
                self._backend.begin(changes.totals.began)
        self.run, totals = run or b"", database.totals
        self._first_id = totals.position + 1
        (retried,) = database.query(_COUNT_RETRIED, (totals.epoch,)).fetchone()
        return Opened(
            run=name,
            began=begins,
            counts=counts,
            is_first=len(names) + begins == 1,
            is_late=self._is_late,
            retried=retried,
            killed=database.killed,
            died=database.died,
            ended_at=0.0 if begins or database.counts.left else ended_at,
        )

    def knows(self, fingerprint: bytes, *, once: bool = False) -> bool:
        """Return whether a fingerprint is certainly recorded, without asking a disk.

        With `once`, whether it is recorded for this run.
        """
        key = once_in(self.run, fingerprint) if once else fingerprint
        try:
            return self._backend is not None and self._backend.is_duplicate(key)
        except StorageError:  # `apply` has the same failure, and raises it
            return False

    def apply(self, batch: Batch) -> Reply:
        """Apply a batch in one transaction, and record its new fingerprints after that.

        Raises:
            StorageError: the database cannot be written or read, and nothing has changed; or,
                once, the last sync has failed.
        """
        if (failure := self._database.file.failure) is not None and not self._has_failed:
            raise self._failed(failure)
        start_runs = self._runs_start or batch.may_start
        is_started = self._is_started or batch.start_ended
        try:
            reply = self._applied(batch) if self._changes_the_file(batch) else Reply()
        except sqlite3.Error as error:
            raise self._failed(error) from error
        self._runs_start, self._is_started = start_runs and not is_started, is_started
        counts, totals = self._database.counts, self._database.totals
        reply.pending, reply.left = counts.of[PENDING], counts.left
        reply.runs_start, reply.is_started = self._runs_start, is_started
        reply.ended_at = totals.ended_at
        reply.counters = (totals.left + totals.done, totals.done)
        reply.is_retired = self._is_late
        return reply

    def _changes_the_file(self, batch: Batch) -> bool:
        counts = self._database.counts
        if batch.changes or counts.late or counts.done_pages:
            return True
        may_take = not counts.alone or batch.stands_still
        if batch.want and may_take and (counts.of[PENDING] or counts.of[SUSPECT]):
            return True
        return batch.is_over and not (counts.left or self._database.totals.ended_at)

    def _applied(self, batch: Batch) -> Reply:
        backend = self._backend
        if backend is not None:
            backend.grow_if_full()
        is_batch = batch.changes > 0 or self._database.counts.done_pages > 0
        with self._database.transaction(is_batch=is_batch) as changes:
            step = _Step(
                changes, backend, self.run, self._first_id, keeps_failed=self._keeps_failed
            )
            step.enter(batch)
            for ended in batch.ended:
                step.end(ended)
            step.go_on(is_started=self._is_started or batch.start_ended)
            if not self._is_late:
                step.take(batch, by_slot=self._by_slot)
            if backend is not None and step.recorded:
                backend.write(changes.totals.seq, step.recorded)
            if changes.counts.left:
                changes.totals.ended_at = 0.0
            elif batch.is_over and not changes.totals.ended_at:
                changes.totals.ended_at = time.time()
        if backend is not None and step.recorded:
            backend.record(step.recorded)
        return step.reply

    def move_some(self, state: State, to: State | None, slot: str | None = None) -> int:
        """Make up to 1,000 rows pending, or drop them, as `Queue.move` does.

        Returns how many; the caller repeats the call until it is 0.

        Raises:
            StorageError: the database cannot be written, and nothing has changed.
        """
        try:
            with self._database.transaction(is_batch=True) as changes:
                return changes.move_some(state, to, slot)
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def sync(self) -> None:
        """Write all batches so far to the disk; raises StorageError."""
        try:
            self._database.file.sync()
        except (OSError, sqlite3.Error) as error:
            raise self._failed(error) from error

    def counts(self) -> Mapping[State, int]:
        """Return how many requests of each state there are."""
        return by_state(self._database.counts.of)

    def close(self) -> Closed:
        """Close the file; the next opening makes requests in flight pending.

        Raises:
            StorageError: the file could not be written, for the first time; the next run completes
                it.
        """
        last = None
        if self._backend is not None:
            self._backend.close()
            last = self._backend.write_last
        try:
            self._database.close(last)
        except StorageError:
            if not self._has_failed:
                raise
        counts = dict(self.counts())
        counts[State.PENDING] += counts[State.IN_FLIGHT]
        counts[State.IN_FLIGHT] = 0
        return Closed(counts, ended_at=self._database.totals.ended_at)

    def _failed(self, error: Exception) -> StorageError:
        """Return the error of the crawl after an error of the disk."""
        self._has_failed = True
        if isinstance(error, StorageError):
            return error
        return StorageError(
            f"{self.name} cannot be written or read: {error}; nothing is lost: free some space or "
            "repair the disk, and start the crawl again"
        )


class _Step:
    """The changes of one batch, in a transaction that may still fail.

    Attributes:
        recorded: the fingerprints that are recorded, in order.
        reply: the part of the reply that does not depend on the outcome of the transaction.
    """

    def __init__(
        self,
        changes: Transaction,
        backend: LocalBackend | None,
        run: bytes,
        first_id: int,
        *,
        keeps_failed: bool,
    ) -> None:
        self.recorded: dict[bytes, None] = {}
        self.reply = Reply()
        self._changes = changes
        self._query = changes.execute
        self._counts = changes.counts
        self._totals = changes.totals
        self._backend = backend
        self._run = run
        self._first_id = first_id
        self._keeps_failed = keeps_failed
        self._room = _MOST_AT_ONCE  # how many more rows the batch may end or try again

    # Pages.

    def _with_page(self, page: bytes) -> list[StoredRow]:
        """Return the rows of the index that have a page as their own, by id."""
        return list(map(StoredRow._make, self._query(_WITH_PAGE, (page,))))

    def _with_hop(self, page: bytes) -> Iterator[StoredRow]:
        if not self._counts.hops:
            return iter(())
        return map(StoredRow._make, self._query(_WITH_HOP, (page,)))

    def _crawling(self, page: bytes) -> Iterator[StoredRow]:
        """Return the rows of the index that have a page, also as a hop."""
        hops = (row for row in self._with_hop(page) if not self._is_late(row))
        return chain(self._with_page(page), hops)

    def _is_open(self, page: bytes, but: int = 0) -> bool:
        """Return whether a row, other than one, may still crawl a page."""
        return any(row.id != but and row.state != DEAD for row in self._crawling(page))

    def _is_late(self, row: StoredRow) -> bool:
        """Return whether a row is about to become pending, without its hops."""
        return row.state in (WAITING, FAILED) and row.epoch < self._totals.epoch

    def _has_row(self, page: bytes) -> bool:
        """Return whether a row of the index has a page as its own, and is not dead."""
        return any(row.state != DEAD for row in self._with_page(page))

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
        rows: list[tuple[Any, ...]] = []
        for request in batch.entered:
            if request.replaces is not None:
                self.reply.queued.append(self._take_row(request))
                continue
            row = self._row_of(request)
            self.reply.queued.append(row is not None)
            if row is None:
                continue
            if request.once:  # the next requests may have to find it
                self._changes.insert([row])
            else:
                rows.append(row)
        if rows:
            self._changes.insert(rows)
        for fingerprint in batch.recorded:
            self._record(fingerprint)

    def _row_of(self, request: Entered) -> tuple[Any, ...] | None:
        """Return the row of a request that is to be queued; None: it is a duplicate, or waits."""
        page, once, tries = request.fingerprint, request.once, 0
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
            elif request.is_recorded and not request.passes and self._is_only_a_hop(page):
                self._record(page)
                self._wait_for_hop(request, page)
                return None
        elif page is not None and request.is_start:
            tries = self._replace_start(page)
        if page is not None and request.is_recorded:
            self._record(page, once=once and request.is_filtered)
        return self._changes.new_row(request, has_page=has_page, tries=min(tries, MOST_TRIES - 1))

    def _replace_kept(self, page: bytes) -> tuple[bool, int]:
        """Drop what earlier runs have kept of a page that enters again.

        Returns:
            whether another row of the index has the page, and in how many runs it has failed.
        """
        tries = 0
        for row in self._with_page(page):
            if row.is_filtered and (row.state == DEAD or self._is_late(row)):
                tries = max(tries, row.tries + self._totals.adds_tries)
                self._changes.remove(row)
        return self._has_row(page), tries

    def _replace_start(self, page: bytes) -> int:
        """Drop one start row of a page from before the store was opened; return its tries.

        What start() has yielded since then may be several sessions of one page.
        """
        for row in self._with_page(page):
            is_session = row.is_start and not row.is_filtered and row.id < self._first_id
            if is_session and row.state in (REPEATED, WAITING, FAILED, DEAD):
                self._changes.remove(row)
                is_kept = row.state != REPEATED and row.epoch < self._totals.epoch
                return row.tries + (is_kept and self._totals.adds_tries)
        return 0

    def _is_only_a_hop(self, page: bytes) -> bool:
        """Return whether a page is open as a hop, and no row has it as its own page."""
        return self._counts.hops > 0 and not self._has_row(page) and self._is_open(page)

    def _wait_for_hop(self, request: Entered, page: bytes) -> None:
        if self._keeps_failed:
            self._changes.insert([self._changes.new_row(request)])
            row = self._changes.get(self._totals.position)
            assert row is not None
            epoch = self._totals.epoch
            self._changes.change(row, state=WAITING, takes=1, waits_for=page, epoch=epoch)

    def _take_row(self, request: Entered) -> bool:
        """Have a request take the row that it replaces; return whether it is pending."""
        if (row := self._in_flight(request.replaces)) is None:
            return False
        page, pages, hops = request.fingerprint, row.pages, row.hops
        if page is not None and request.is_filtered:
            if not request.passes and self._ends_by_redirect(row, request, page):
                return False
            is_known = request.passes and (self._is_recorded(page) or self._is_open(page))
            if request.is_recorded and page not in pages and not is_known:
                hops += pack_fingerprints([page])
        order = packed_order(row.slot, row.priority, row.rank)
        self._changes.change(
            row,
            state=REPEATED,
            slot=stored_text(request.slot),
            priority=request.clipped_priority,
            rank=request.rank,
            position=self._changes.next_position(newest_first=request.newest_first),
            deaths=0,
            hops=hops,
            first=row.first or packed_first(order, row.data, newest_first=row.position < 0),
            data=request.data,
        )
        return True

    def _ends_by_redirect(self, row: StoredRow, request: Entered, page: bytes) -> bool:
        """Keep or end a row that is redirected to a page; return False if it goes on there."""
        dead = [other for other in self._with_page(page) if other.state == DEAD]
        if page in row.pages:
            self._keep(row, FAILED, reason=TO_ITSELF)
        elif self._is_open(page, but=row.id) or any(each.tries < MOST_TRIES for each in dead):
            self._wait(row, page)
        elif self._knows(page, once=request.once) and not dead:
            self._done(row)
        else:
            return False
        return True

    # Requests that end.

    def _in_flight(self, taken: tuple[int, int]) -> StoredRow | None:
        """Return the row of a request that is in flight, as it was taken; its state will change."""
        id_, takes = taken
        row = self._changes.get(id_)
        if row is None or row.takes != takes or row.state not in (IN_FLIGHT, ALONE):
            return None
        if row.state == ALONE:
            self._counts.alone = 0
        return row

    def end(self, ended: Ended) -> None:
        """End a request, if it is in flight."""
        is_done = ended.end is End.DONE
        if is_done and not ended.awaits and self._changes.remove_taken(*ended.id):
            return
        if (row := self._in_flight(ended.id)) is None:
            return
        awaited = {*ended.awaits} - {*row.pages} if ended.awaits else set()
        opened = [page for page in awaited if self._is_open(page, but=row.id)]
        if ended.end is End.UNREADABLE:
            self._changes.change(row, state=UNREADABLE)
        elif ended.end is End.RETURNED:
            self._changes.change(row, state=PENDING if row.deaths < MOST_DEATHS else SUSPECT)
        elif ended.end is End.FAILED:
            self._keep(row, FAILED, reason=ended.reason)
        elif is_done and len(opened) > 1:
            self._keep(row, FAILED, reason=TO_OTHERS)
        elif is_done and opened:
            self._wait(row, opened[0])
        else:
            self._done(row, with_hops=is_done)

    def _keep(
        self, row: StoredRow, state: int, *, reason: str = "", waits_for: bytes = b""
    ) -> None:
        """Keep a row as failed or waiting, or end it, as the settings say."""
        if not self._keeps_failed:
            self._done(row)
            return
        tries = row.tries
        if state == FAILED and row.is_filtered and row.page is not None:
            for other in self._failed(row.page):
                tries = max(tries, other.tries if other.state == FAILED else 0)
                self._changes.remove(other)
        self._changes.change(
            row,
            state=state,
            tries=tries,
            epoch=self._totals.epoch,
            reason=stored_text(reason),
            waits_for=waits_for,
        )

    def _failed(self, page: bytes) -> list[StoredRow]:
        """Return the failed and the dead rows of a page that another row may replace."""
        if not (self._counts.of[FAILED] or self._counts.of[DEAD]):
            return []
        rows = self._with_page(page)  # those that are not filtered are sessions of their own
        return [row for row in rows if row.is_filtered and row.state in (FAILED, DEAD)]

    def _wait(self, row: StoredRow, page: bytes) -> None:
        self._keep(row, WAITING, waits_for=page)
        others = (other for other in self._crawling(page) if not self._is_late(other))
        waiting = (other.waits_for for other in others if other.state == WAITING)
        if self._keeps_failed and any(page in row.pages for page in waiting):
            self.reply.circles.append(row.data)

    def _done(self, row: StoredRow, *, with_hops: bool = True) -> None:
        """End a row as done, and some of those that wait for its pages."""
        self._remove_done(row, with_hops=with_hops)
        self._end_waiting()

    def _remove_done(self, row: StoredRow, *, with_hops: bool = True) -> None:
        self._changes.remove(row)
        own = [] if row.page is None else [row.page]
        for page in row.pages if with_hops else own:
            if row.is_filtered and (row.once or row.hops):  # otherwise, it was when it entered
                self._record(page, once=bool(row.once), renews=with_hops and bool(row.hops))
            for kept in self._failed(page) if row.is_filtered else ():
                self._changes.remove(kept)
            done = (page, self._totals.epoch)
            if self._counts.of[WAITING] and self._query(_WAITING_FOR, (*done, 1)).fetchone():
                query = "INSERT OR IGNORE INTO done_pages VALUES (?, ?)"
                self._counts.done_pages += self._query(query, done).rowcount

    def _end_waiting(self) -> None:
        """End some rows that wait for pages that are done."""
        while self._counts.done_pages and self._room:
            done = self._query("SELECT page, epoch FROM done_pages LIMIT 1").fetchone()
            rows = self._query(_WAITING_FOR, (*done, self._room)).fetchall()
            if len(rows) < self._room:
                self._query("DELETE FROM done_pages WHERE (page, epoch) = (?, ?)", done)
                self._counts.done_pages -= 1
            self._room -= len(rows)
            for row in rows:
                self._remove_done(StoredRow._make(row))

    def go_on(self, *, is_started: bool) -> None:
        """End and try again some rows that earlier batches have left."""
        self._end_waiting()
        if not (self._counts.late and self._room):
            return
        totals = self._totals
        for values in self._query(_LATE[is_started], (totals.epoch, self._room)).fetchall():
            row = StoredRow._make(values)
            tries = row.tries + totals.adds_tries
            self._changes.try_again(row, tries)
            self.reply.given_up += tries >= MOST_TRIES

    # Requests that are taken.

    def take(self, batch: Batch, *, by_slot: bool) -> None:
        """Take pending requests, or else a suspect."""
        counts, taken = self._counts, self.reply.taken
        if counts.alone and not batch.stands_still:
            return

        def active(slot: str) -> int:
            # Not a copy of all figures: usually, one is asked for.
            return batch.downloads.get(slot, 0) + sum(each.slot == slot for each in taken)

        while len(taken) < batch.want and counts.of[PENDING]:
            row = self._next_by_slot(active) if by_slot else self._query(_NEXT).fetchone()
            taken.append(self._take(row, PENDING, IN_FLIGHT))
        is_free = batch.stands_still or not counts.in_flight
        if batch.want and is_free and not taken and counts.of[SUSPECT]:
            taken.append(self._take_suspect())

    def _take(self, row: Any, before: int, after: int) -> Taken:
        id_, takes, data, slot, tries = row
        query = "UPDATE requests SET state = ?, takes = ? WHERE id = ?"
        self._query(query, (after, takes, id_))
        self._counts.add(before, -1)
        self._counts.add(after, 1)
        return Taken((id_, takes), data, slot, tries)

    def _next_by_slot(self, active: Callable[[str], int]) -> Any:
        last = self._counts.last_slot
        best = row = first = self._first_after(last)
        # Usually, the next slot has no downloads. If it is the last slot again, there is only one.
        fewest = 0 if first[0] == last else active(first[0])
        while fewest > 0 and (row := self._first_after(row[0])) != first:
            if (number := active(row[0])) < fewest:
                best, fewest = row, number
        self._counts.last_slot, chosen = best
        return self._query(f"{_TAKE} WHERE id = ?", (chosen,)).fetchone()

    def _first_after(self, slot: str) -> Any:
        """Return the next slot by name, starting again after the last, and its first request."""
        row = self._query(_NEXT_OF_SLOTS, (slot,)).fetchone()
        return row or self._query(_FIRST_OF_SLOTS).fetchone()

    def _take_suspect(self) -> Taken:
        """Take a suspect, so that the next death is blamed on it alone."""
        counts = self._counts
        if counts.alone:
            self._query("UPDATE requests SET state = ? WHERE id = ?", (IN_FLIGHT, counts.alone))
            counts.add(ALONE, -1)
            counts.add(IN_FLIGHT, 1)
        taken = self._take(self._query(_NEXT_SUSPECT).fetchone(), SUSPECT, ALONE)
        counts.alone = taken.id[0]
        return taken

"""The store of a job directory: its requests in a SQLite database, which is the log of its filter.

A batch is one transaction. The filter gets the new fingerprints of a batch after that, and a
checkpoint writes them to its files later. So a fingerprint is in the files only after its request
is on the disk, whatever fails in between.
"""

import json
import secrets
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.files.backend import LocalBackend
from scrapy_bloom.queues.database import (
    ALONE,
    DEAD,
    FAILED,
    IN_FLIGHT,
    MOVABLE,
    PENDING,
    SET_TARGET,
    SUSPECT,
    UNREADABLE,
    JobDatabase,
    Transaction,
    by_state,
    stored_text,
)
from scrapy_bloom.queues.store import (
    LINKED,
    MOST_TRIES,
    Batch,
    Closed,
    End,
    Ended,
    Entered,
    Fate,
    Joining,
    Opened,
    Reply,
    State,
    Taken,
    differing,
    once_in,
)

_RUN_BYTES = 8
_MOST_RETRIED = 500  # failed requests that a batch makes pending, so that it takes some 10 ms

_REQUEST = "SELECT id, request, slot, tries FROM requests "
_IN_ORDER = "ORDER BY priority DESC, rank, position LIMIT 1"
_NEXT = f"{_REQUEST} WHERE state = 0 {_IN_ORDER}"
_NEXT_SUSPECT = f"""
    {_REQUEST} WHERE state != 0 AND state = {SUSPECT}
    ORDER BY slot, priority DESC, rank, position LIMIT 1
"""
# Without the serialized request, because only that of the chosen slot is needed.
_FIRST_OF_SLOTS = """
    SELECT slot, id FROM requests WHERE state = 0
    ORDER BY slot, priority DESC, rank, position LIMIT 1
"""
_NEXT_OF_SLOTS = _FIRST_OF_SLOTS.replace("ORDER", "AND slot > ? ORDER")
_SET_STATE = "UPDATE requests SET state = ? WHERE id = ?"
_KEPT = "SELECT id, state, tries, epoch FROM requests WHERE epoch != 0 AND fingerprint = ?"
_KEEP = """
    UPDATE requests SET (state, slot, priority, rank, position, deaths, tries, epoch, reason,
                         fingerprint, request) = (?, ?, ?, ?, ?, 0, ?, ?, ?, ?, ?)
    WHERE id = ?
"""
_EARLIER = """
    SELECT id, tries, fingerprint FROM requests WHERE state != 0 AND state = ? AND epoch < ?
    ORDER BY epoch, id LIMIT ?
"""
_COUNT_EARLIER = """
    SELECT count(*), count(CASE WHEN tries + 1 < ? THEN 1 END)
    FROM requests WHERE state != 0 AND state = ? AND epoch < ?
"""


@dataclass
class _Counts:
    """Figures of the requests, kept in memory so that the file need not be read.

    Attributes:
        of: how many requests have each state.
        alone: the id of the suspect that was taken last and is in flight; 0 if there is none.
        earlier: how many failed requests are of an earlier epoch.
        last_slot: the slot from which a request was taken last.
        has_targets: False: the table of targets is empty.
    """

    of: dict[int, int]
    alone: int = 0
    earlier: int = 0
    last_slot: str = ""
    has_targets: bool = False

    def copy(self) -> "_Counts":
        return replace(self, of=dict(self.of))

    def move(self, before: int | None, after: int | None) -> None:
        """Count a request whose state has changed; None: it was not, or is not, in the queue."""
        if before is not None:
            self.of[before] -= 1
        if after is not None:
            self.of[after] += 1

    @property
    def in_flight(self) -> int:
        return self.of[IN_FLIGHT] + self.of[ALONE]

    @property
    def left(self) -> int:
        return self.of[PENDING] + self.of[SUSPECT] + self.in_flight + self.earlier


class SQLiteStore:
    """The store of a job directory, as `store.Store` describes it.

    Its filter is opened and closed with it.

    Args:
        path: the database; created if missing. The caller has locked the job directory.
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
        self._epoch = 0
        self._is_late = self._has_failed = False
        self._runs_start = self._is_started = False
        self._counts = _Counts({})
        self._database: JobDatabase

    @property
    def pending(self) -> int:
        """How many requests can be taken, or are about to become pending."""
        return self._counts.left - self._counts.in_flight if self._counts.of else 0

    def open(self, joining: Joining) -> Opened:
        """Open the database and then the filter, and begin a run or join the current one.

        Raises:
            BloomError: the database or the filter cannot be used, or belongs to another spider.
                The files are as they were, or as the last process should have closed them.
        """
        self._database = database = JobDatabase(self._path, by_slot=self._by_slot)
        try:
            self._check_spider(joining)
            if self._backend is None:
                database.begin()
            else:
                self._backend.open(database)
            try:
                return self._join(joining)
            except sqlite3.Error as error:
                raise self._failed(error) from error
        except BaseException:
            if self._backend is not None and self._backend.overlay is not None:
                self._backend.close()
            database.close()
            raise

    def _check_spider(self, joining: Joining) -> None:
        (spider,) = self._database.query("SELECT spider FROM job").fetchone()
        if spider not in ("", stored_text(joining.spider)):
            raise StorageError(
                f"{self.name} belongs to spider {spider!r}, but this crawl runs "
                f"{joining.spider!r}; set another JOBDIR for each spider"
            )

    def _join(self, joining: Joining) -> Opened:
        database = self._database
        run, name, arguments, kept_from, self._epoch = database.query(
            "SELECT run, run_name, arguments, kept_from, epoch FROM job"
        ).fetchone()
        names = {each for (each,) in database.query("SELECT name FROM runs")}
        asked = stored_text(joining.run)
        is_other = run is None or asked not in ("", name)
        self._is_late = is_other and asked in names
        begins = is_other and not self._is_late
        counts = self._counts = _Counts(database.counts.copy())
        if not self._is_late:
            counts.of[PENDING] += counts.of[UNREADABLE]
            counts.of[UNREADABLE] = 0
        ended_at = 0.0 if counts.left else database.totals.ended_at
        if self._backend is not None:
            if kept_from and not (begins or ended_at):
                self._backend.kept_from = kept_from
            self._backend.begin()
            kept_from = int(self._backend.kept_from)
        new_epoch = begins or not (asked or counts.left)
        with database.transaction() as changes:
            if not self._is_late:
                changes.requeue_unreadable()
            if begins:
                run, name, arguments = secrets.token_bytes(_RUN_BYTES), asked, ""
                changes.begin_run(run, name, stored_text(joining.spider))
            elif new_epoch:
                changes.begin_epoch()
            arguments = arguments or json.dumps(dict(joining.arguments))
            values = (kept_from, arguments)
            changes.execute("UPDATE job SET kept_from = ?, arguments = ?", values)
        self.run, self._epoch = run, self._epoch + new_epoch
        counts.has_targets = bool(database.query("SELECT 1 FROM targets LIMIT 1").fetchone())
        counts.earlier, retried = database.query(
            _COUNT_EARLIER, (MOST_TRIES, FAILED, self._epoch)
        ).fetchone()
        return Opened(
            run=name,
            began=begins,
            counts=self.counts(),
            is_first=len(names) + begins == 1,
            is_late=self._is_late,
            retried=retried,
            killed=database.killed,
            died=database.died,
            differing=differing(json.loads(arguments), joining.arguments),
            ended_at=0.0 if begins or counts.left else ended_at,
        )

    def knows(self, fingerprint: bytes, *, once: bool = False) -> bool:
        """Return whether a fingerprint is certainly recorded, without asking a disk.

        With `once`, whether it is recorded for this run.
        """
        key = once_in(self.run, fingerprint) if once else fingerprint
        return self._backend is not None and self._backend.is_duplicate(key)

    def apply(self, batch: Batch) -> Reply:
        """Apply a batch in one transaction, and record its new fingerprints after that.

        Raises:
            StorageError: the database cannot be written or read, and nothing has changed; or,
                once, the last checkpoint of the filter has failed.
        """
        self._check_checkpoints()
        start_runs = self._runs_start or batch.may_start
        is_started = self._is_started or batch.start_ended
        try:
            if not (batch.changes or self._counts.earlier or self._has_more(batch)):
                reply = Reply(fates=self._fates(batch))
            else:
                reply = self._applied(batch)
        except sqlite3.Error as error:
            raise self._failed(error) from error
        self._runs_start, self._is_started = start_runs and not is_started, is_started
        totals = self._database.totals
        reply.pending, reply.left = self._counts.of[PENDING], self._counts.left
        reply.runs_start, reply.is_started = self._runs_start, is_started
        reply.ended_at = totals.ended_at
        reply.counters = (totals.left + totals.done, totals.done)
        reply.is_retired = self._is_late
        return reply

    def _has_more(self, batch: Batch) -> bool:
        """Return whether a batch without changes changes the file."""
        counts = self._counts
        may_take = not counts.alone or batch.stands_still
        if batch.want and may_take and (counts.of[PENDING] or counts.of[SUSPECT]):
            return True
        ends = batch.is_over and not (counts.left or self._database.totals.ended_at)
        return ends or self._database.has_applied

    def _applied(self, batch: Batch) -> Reply:
        counts = self._counts.copy()
        with self._database.transaction(is_batch=bool(batch.changes)) as changes:
            step = _Step(
                changes, counts, self._backend, self.run, self._epoch, by_slot=self._by_slot
            )
            queued = step.enter(batch)
            for ended in batch.ended:
                step.end(ended)
            step.retry()
            taken = [] if self._is_late else step.take(batch)
            if counts.left:
                changes.totals.ended_at = 0.0
            elif batch.is_over and not changes.totals.ended_at:
                changes.totals.ended_at = time.time()
            fates = self._fates(batch)
        self._counts = counts
        if self._backend is not None:
            assert self._backend.overlay is not None
            self._backend.add_many(list(step.recorded))
            self._backend.overlay.stored(self._database.seq)
        return Reply(queued=queued, taken=taken, fates=fates, given_up=step.given_up)

    def _fates(self, batch: Batch) -> dict[bytes, Fate]:
        return {fingerprint: self._fate(fingerprint) for fingerprint in batch.asked}

    def _fate(self, fingerprint: bytes) -> Fate:
        query = "SELECT failed FROM targets WHERE fingerprint = ?"
        row = self._database.query(query, (fingerprint,)).fetchone()
        if row is None:
            return Fate.OTHER
        return Fate.FAILED if row[0] else Fate.UNFINISHED

    def move_some(self, state: State, to: State | None, slot: str | None = None) -> int:
        """Make up to 1,000 requests pending, or drop them, as `Queue.move` does.

        Returns how many; the caller repeats the call until it is 0.

        Raises:
            StorageError: the database cannot be written, and nothing has changed.
        """
        try:
            with self._database.transaction(is_batch=True) as changes:
                moved = changes.move_some(state, to, slot)
        except sqlite3.Error as error:
            raise self._failed(error) from error
        before, number = MOVABLE[state], len(moved)
        self._counts.of[before] -= number
        if to is not None:
            self._counts.of[PENDING] += number
            self._counts.has_targets = True
        if before == FAILED:
            self._counts.earlier -= sum(each.epoch < self._epoch for each in moved)
        return number

    def sync(self) -> None:
        """Write all batches so far to the disk; raises StorageError."""
        try:
            self._database.sync()
        except OSError as error:
            raise self._failed(error) from error

    def counts(self) -> Mapping[State, int]:
        """Return how many requests of each state there are."""
        return by_state(self._counts.of)

    def close(self) -> Closed:
        """Close the filter and the database; the next opening makes requests in flight pending.

        Raises:
            StorageError: the filter could not be written; the next run completes it.
        """
        try:
            if self._backend is not None:
                self._backend.close()
        finally:
            self._database.close()
        counts = dict(self.counts())
        counts[State.PENDING] += counts[State.IN_FLIGHT]
        counts[State.IN_FLIGHT] = 0
        return Closed(counts, ended_at=self._database.totals.ended_at)

    def _check_checkpoints(self) -> None:
        """Raise a StorageError, once, if a checkpoint has failed in another thread."""
        overlay = self._backend.overlay if self._backend is not None else None
        if overlay is not None and overlay.failure is not None and not self._has_failed:
            raise self._failed(overlay.failure)

    def _failed(self, error: Exception) -> StorageError:
        """Return the error of the crawl after an error of the disk.

        No checkpoint follows, because the contents of the disk are unknown. The log is complete, so
        the next run makes it.
        """
        self._has_failed = True
        if self._backend is not None and (overlay := self._backend.overlay) is not None:
            overlay.failure = overlay.failure or error
        if isinstance(error, StorageError):
            return error
        return StorageError(
            f"{self.name}, or its filter, cannot be written or read: {error}; nothing "
            "is lost: free some space or repair the disk, and start the crawl again"
        )


class _Step:
    """The changes of one batch, in a transaction that may still fail.

    Attributes:
        recorded: the new fingerprints, in order.
        given_up: how many requests have become dead, because they have failed in too many runs.
    """

    def __init__(
        self,
        changes: Transaction,
        counts: _Counts,
        backend: LocalBackend | None,
        run: bytes,
        epoch: int,
        *,
        by_slot: bool,
    ) -> None:
        self.recorded: dict[bytes, None] = {}
        self.given_up = 0
        self._changes = changes
        self._query = changes.execute
        self._counts = counts
        self._backend = backend
        self._run = run
        self._epoch = epoch
        self._by_slot = by_slot

    # Requests that enter.

    def enter(self, batch: Batch) -> list[bool]:
        """Queue requests unless they are duplicates, and record; return which were queued."""
        queued = []
        rows: list[tuple[Entered, int]] = []
        for request in batch.entered:
            fingerprint = request.fingerprint
            is_new = fingerprint is not None and self._is_new(fingerprint, request)
            is_queued = fingerprint is None or is_new or not request.is_filtered
            queued.append(is_queued)
            if not is_queued:
                self._keep_link(request)
                continue
            tries = 0
            if is_new and fingerprint is not None:
                if request.is_recorded:
                    self._record(fingerprint, once=request.once)
                if request.once:
                    tries = self._replace_kept(fingerprint)
            rows.append((request, tries))
            self._set_targets(request.via, is_failed=False)
        if rows:
            self._changes.insert(rows)
            self._counts.of[PENDING] += len(rows)
        for fingerprint in batch.recorded:
            self._record(fingerprint)
        if self.recorded:
            self._changes.record(self.recorded)
        return queued

    def _is_new(self, fingerprint: bytes, request: Entered) -> bool:
        key = once_in(self._run, fingerprint) if request.once else fingerprint
        return not (self._is_recorded(key) or self._is_target(fingerprint))

    def _is_target(self, fingerprint: bytes) -> bool:
        """Return whether a fingerprint is unfinished, or has failed in this run."""
        if not self._counts.has_targets:
            return False
        query = "SELECT 1 FROM targets WHERE fingerprint = ?"
        return self._query(query, (fingerprint,)).fetchone() is not None

    def _keep_link(self, request: Entered) -> None:
        """Keep a duplicate as failed until its page is done, if that is not recorded."""
        fingerprint = request.fingerprint
        assert fingerprint is not None
        if request.via or self._is_recorded(fingerprint) or not self._is_target(fingerprint):
            return
        if self._query(_KEPT, (fingerprint,)).fetchone() is None:
            self._changes.insert([(request, 0)])
            self._counts.of[self._keep_as(self._changes.last_id, request, 0, LINKED)] += 1
            if request.is_recorded:
                self._record(fingerprint)

    def _is_recorded(self, fingerprint: bytes) -> bool:
        if fingerprint in self.recorded:
            return True
        return self._backend is not None and fingerprint in self._backend

    def _record(self, fingerprint: bytes, *, once: bool = False) -> None:
        if self._backend is None:
            return
        keys = (fingerprint, once_in(self._run, fingerprint)) if once else (fingerprint,)
        for key in keys:
            if not self._is_recorded(key):
                self.recorded[key] = None

    def _replace_kept(self, fingerprint: bytes) -> int:
        """Drop the failed or dead request of a fingerprint, which enters again, if there is one.

        Returns:
            in how many runs it has failed.
        """
        if (row := self._query(_KEPT, (fingerprint,)).fetchone()) is None:
            return 0
        number, state, tries, epoch = row
        self._drop_kept(number, state, is_earlier=epoch != self._epoch)
        return min(int(tries) + 1, MOST_TRIES)

    def _drop_kept(self, number: int, state: int, *, is_earlier: bool) -> None:
        self._changes.delete(number, state)
        self._counts.of[state] -= 1
        self._counts.earlier -= is_earlier and state == FAILED

    def _set_targets(self, fingerprints: Sequence[bytes], *, is_failed: bool) -> None:
        for fingerprint in fingerprints:
            self._counts.has_targets = True
            self._query(SET_TARGET, (fingerprint, is_failed))

    # Requests that end.

    def end(self, ended: Ended) -> None:
        """End a request, if it is in flight."""
        counts = self._counts
        state = ALONE if ended.id == counts.alone else IN_FLIGHT
        if ended.end is End.FAILED:
            is_ours, after = self._keep(ended, state)
        elif ended.end is End.UNREADABLE:
            query = f"{_SET_STATE} AND state = ?"
            is_ours = bool(self._query(query, (UNREADABLE, ended.id, state)).rowcount)
            after = UNREADABLE
        else:
            is_ours, after = self._changes.delete(ended.id, state), None
            if is_ours and ended.end is End.DONE:
                for fingerprint in ended.via:
                    self._finish(fingerprint)
        if is_ours:
            counts.move(state, after)
            if state == ALONE:
                counts.alone = 0

    def _finish(self, fingerprint: bytes) -> None:
        """Note that a page is done, and drop the links to it that this run has kept."""
        self._query("DELETE FROM targets WHERE fingerprint = ?", (fingerprint,))
        row = self._query(_KEPT, (fingerprint,)).fetchone()
        if row is not None and row[1] == FAILED and row[3] == self._epoch:
            self._drop_kept(row[0], FAILED, is_earlier=False)

    def _keep(self, ended: Ended, state: int) -> tuple[bool, int]:
        """Keep a request as failed, or dead if its fingerprint is; return whether it was ours."""
        assert ended.first is not None
        query = "SELECT 1 FROM requests WHERE id = ? AND state = ?"
        if self._query(query, (ended.id, state)).fetchone() is None:
            return False, FAILED
        self._set_targets(ended.via, is_failed=True)
        return True, self._keep_as(ended.id, ended.first, ended.tries, ended.reason)

    def _keep_as(self, id_: int, request: Entered, tries: int, reason: str) -> int:
        """Keep a request in the row of an id, in place of one of its fingerprint.

        Returns its state.
        """
        assert request.fingerprint is not None
        if kept := self._query(_KEPT, (request.fingerprint,)).fetchone():
            number, before, tries_before, epoch = kept
            tries = max(tries, tries_before)
            self._drop_kept(number, before, is_earlier=epoch != self._epoch)
        after = FAILED if tries < MOST_TRIES else DEAD
        values = (
            after,
            stored_text(request.slot),
            request.clipped_priority,
            request.rank,
            -id_ if request.newest_first else id_,
            tries,
            self._epoch,
            stored_text(reason),
            request.fingerprint,
            request.data,
        )
        self._query(_KEEP, (*values, id_))
        return after

    def retry(self) -> None:
        """Make some requests that failed in an earlier epoch pending, or dead."""
        counts = self._counts
        if not counts.earlier:
            return
        rows = self._query(_EARLIER, (FAILED, self._epoch, _MOST_RETRIED)).fetchall()
        for number, tries, fingerprint in rows:
            if tries + 1 < MOST_TRIES:
                self._changes.to_pending(number, tries + 1, fingerprint)
                counts.move(FAILED, PENDING)
                counts.has_targets = True
            else:
                query = "UPDATE requests SET state = ?, tries = ? WHERE id = ?"
                self._query(query, (DEAD, tries + 1, number))
                counts.move(FAILED, DEAD)
                self.given_up += 1
        counts.earlier -= len(rows)

    # Requests that are taken.

    def take(self, batch: Batch) -> list[Taken]:
        """Take pending requests, or else a suspect."""
        counts = self._counts
        if counts.alone and not batch.stands_still:
            return []
        taken: list[Taken] = []

        def active(slot: str) -> int:
            # Not a copy of all figures: usually, one is asked for.
            return batch.downloads.get(slot, 0) + sum(each.slot == slot for each in taken)

        while len(taken) < batch.want and counts.of[PENDING]:
            new = Taken(*self._next(active))
            self._query(_SET_STATE, (IN_FLIGHT, new.id))
            counts.move(PENDING, IN_FLIGHT)
            taken.append(new)
        is_free = batch.stands_still or not counts.in_flight
        if batch.want and is_free and not taken and counts.of[SUSPECT]:
            taken.append(self._take_suspect())
        return taken

    def _next(self, active: Callable[[str], int]) -> Any:
        if not self._by_slot:
            return self._query(_NEXT).fetchone()
        last = self._counts.last_slot
        best = row = first = self._first_after(last)
        # Usually, the next slot has no downloads. If it is the last slot again, there is only one.
        fewest = 0 if first[0] == last else active(first[0])
        while fewest > 0 and (row := self._first_after(row[0])) != first:
            if (number := active(row[0])) < fewest:
                best, fewest = row, number
        self._counts.last_slot, chosen = best
        return self._query(f"{_REQUEST} WHERE id = ?", (chosen,)).fetchone()

    def _first_after(self, slot: str) -> Any:
        """Return the next slot by name, starting again after the last, and its first request."""
        row = self._query(_NEXT_OF_SLOTS, (slot,)).fetchone()
        return row or self._query(_FIRST_OF_SLOTS).fetchone()

    def _take_suspect(self) -> Taken:
        """Take a suspect, so that the next death is blamed on it alone."""
        counts = self._counts
        taken = Taken(*self._query(_NEXT_SUSPECT).fetchone())
        if counts.alone:
            self._query(_SET_STATE, (IN_FLIGHT, counts.alone))
            counts.move(ALONE, IN_FLIGHT)
        self._query(_SET_STATE, (ALONE, taken.id))
        counts.move(SUSPECT, ALONE)
        counts.alone = taken.id
        return taken

"""Read and change the queues of a job directory outside its crawl.

A job directory can hold Scrapy's own queue and the database of CrashSafeScheduler. A crawl uses
only one of them. The filter would report the requests in the other queue as duplicates, although
they were never crawled. Commands read the database also while a crawl uses it, and change it only
while none does. `scrapy_bloom.queues.redis_queue` is for a queue in Redis.
"""

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import get_type_hints

from scrapy_bloom.exceptions import LockedError, StorageError
from scrapy_bloom.job import jobdir, scrapys_queue
from scrapy_bloom.job.file import reading, stored_text, typed
from scrapy_bloom.queues.handed_over import Move, count_handed_over, hand_over_move
from scrapy_bloom.queues.rows import NUMBERS, StoredRow, by_state, changed, counts_of
from scrapy_bloom.queues.store import Progress, Row, State
from scrapy_bloom.text import counted

_TYPES = tuple(get_type_hints(StoredRow).values())


class SQLiteQueue:
    """The queue of a job directory, as `store.Queue` describes it.

    The methods may read it while a crawl uses it, which alone may change it.

    Args:
        path: the file of the job.
        db: a connection for reading; None: open one for each method.
    """

    def __init__(self, path: Path, db: sqlite3.Connection | None = None) -> None:
        self.path = path
        self._db = db

    @classmethod
    def found(cls, path: Path) -> "SQLiteQueue | None":
        """Return the queue in the file of a job, if CrashSafeScheduler has begun to use one.

        Raises StorageError.
        """
        if not jobdir.is_database(path):
            return None
        with reading(path) as db:
            (is_used,) = db.execute("SELECT run IS NOT NULL OR left > 0 FROM job").fetchone()
        return cls(path) if is_used else None

    def _reading(self) -> AbstractContextManager[sqlite3.Connection]:
        return reading(self.path) if self._db is None else nullcontext(self._db)

    def counts(self) -> Mapping[State, int]:
        """Return how many requests of each state there are; raises StorageError."""
        with self._reading() as db:
            (left,) = typed(db.execute("SELECT left FROM job").fetchone(), int)
            return by_state(counts_of(db.execute, left))

    def progress(self) -> Progress:
        """Return how far the crawl is; raises StorageError."""
        query = "SELECT ifnull(spider, ''), ifnull(run_name, ''), done, ended_at FROM job"
        with self._reading() as db:
            row = db.execute(query).fetchone()
            spider, run, done, ended_at = typed(row, str, str, int, float)
        return Progress(spider, run, done, count_handed_over(self.path.parent), ended_at)

    def slots(self) -> Mapping[str, int]:
        """Return how many requests of each slot are pending; raises StorageError."""
        query = "SELECT slot, count(*) FROM requests WHERE state < 1 GROUP BY slot ORDER BY slot"
        with self._reading() as db:
            return dict(typed(row, str, int) for row in db.execute(query))

    def requests(self, state: State, slot: str | None = None) -> Iterator[Row]:
        """Return the rows of a state, or of one of its slots, in the order of taking.

        Raises StorageError.
        """
        # The conditions of the indexes that have the rows.
        conditions = {State.PENDING: "state < 1", State.IN_FLIGHT: "state != 0 AND state IN (1, 2)"}
        where = conditions.get(state, f"state > 2 AND state = {NUMBERS[state]}")
        where += "" if slot is None else " AND slot = ?"
        query = f"SELECT * FROM requests WHERE {where} ORDER BY priority DESC, rank, position"  # noqa: S608 - constants
        values = [] if slot is None else [stored_text(slot)]
        with self._reading() as db:
            for row in db.execute(query, values):
                yield StoredRow(*typed(row, *_TYPES)).as_row()

    def move(self, state: State, to: State | None, slot: str | None = None) -> int | None:
        """Make rows of a state pending as they first entered, or drop them (None).

        Returns their number. If a crawl uses the job, hand the change over to it, and return None.
        Raises StorageError.
        """
        job_dir, number = self.path.parent, 0
        try:
            lock = jobdir.lock_job(job_dir.absolute())
        except LockedError:
            hand_over_move(job_dir, Move(state, to, slot))
            return None
        try:
            while some := self._move_some(state, to, slot):
                number += some
            return number
        finally:
            lock.release()

    def _move_some(self, state: State, to: State | None, slot: str | None) -> int:
        with changed(self.path) as changes:
            return changes.move_some(state, to, slot)

    def empty(self) -> None:
        """Drop all requests and runs, as in a new job, of which only the filter is kept.

        No crawl may use the job. Raises StorageError.
        """
        with changed(self.path) as changes:
            for table in ("requests", "hops", "done_pages", "runs"):
                changes.execute(f"DELETE FROM {table}")  # noqa: S608 - constants
            changes.execute("UPDATE job SET spider = '', run = NULL, run_name = ''")
            totals = changes.totals
            totals.left, totals.done, totals.ended_at = 0, 0, 0.0


def check_no_database(job_dir: Path, *, in_redis: bool = False) -> None:
    """Raise a StorageError if the job's database of CrashSafeScheduler has pending requests.

    Args:
        job_dir: the job directory.
        in_redis: the crawl uses CrashSafeScheduler, with its queue in Redis.
    """
    database = job_dir / jobdir.FILE
    number = _count_pending(database)
    if number and in_redis:
        raise StorageError(
            f"{database} holds {counted(number, 'pending request')}, which this crawl would not "
            "use, because BLOOM_REDIS_URL is set. Remove that setting; or copy filter and "
            "queue with `scrapy bloom copy`, and remove JOBDIR or set another one"
        )
    if number:
        raise StorageError(
            f"{database} holds {counted(number, 'pending request')}, which this crawl's scheduler "
            'cannot use. Set SCHEDULER = "scrapy_bloom.CrashSafeScheduler" again, or set another '
            "JOBDIR"
        )


def check_no_disk_queue(job_dir: Path) -> None:
    """Raise a StorageError if Scrapy's own queue has pending requests, or a kill left it broken.

    The crawl has its queue in Redis.
    """
    queue = job_dir / jobdir.QUEUE
    try:
        holds_requests = queue.exists() and (
            scrapys_queue.has_queued(job_dir) or not scrapys_queue.was_closed_by_scrapy(job_dir)
        )
    except OSError as error:
        raise StorageError(
            f"{job_dir} cannot be read: {error.strerror or error}; allow the crawl to read it, or "
            "set another JOBDIR"
        ) from error
    if holds_requests:
        raise StorageError(
            f"{job_dir} is a job of Scrapy's own scheduler, and this crawl would not use its "
            "pending requests, because BLOOM_REDIS_URL is set. Remove that setting to finish the "
            f"job, set another JOBDIR, or move {queue} and the filter next to it away to start "
            "the job over"
        )


def has_pending(job_dir: Path) -> bool:
    """Return whether a queue of a job has requests that are pending, or in flight at a kill."""
    return scrapys_queue.has_queued(job_dir) or _count_pending(job_dir / jobdir.FILE) > 0


def _count_pending(database: Path) -> int:
    if not jobdir.is_database(database):
        return 0
    counts = SQLiteQueue(database).counts()
    return sum(counts.values()) - counts[State.DEAD] + count_handed_over(database.parent)

"""Read and change the queues of a job directory outside its crawl.

A job directory can hold Scrapy's own queue and the database of CrashSafeScheduler. A crawl uses
only one of them. The filter would report the requests in the other queue as duplicates, although
they were never crawled. Commands read the database also while a crawl uses it, and change it only
while none does. `scrapy_bloom.queues.redis_queue` is for a queue in Redis.
"""

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import get_type_hints

from scrapy_bloom.exceptions import LockedError, StorageError
from scrapy_bloom.job import jobdir, scrapys_queue
from scrapy_bloom.job.file import reading, stored_text, typed
from scrapy_bloom.queues import inbox
from scrapy_bloom.queues.rows import CONDITIONS, StoredRow, by_state, changed, counts_of
from scrapy_bloom.queues.store import QueueStatus, Row, RunBegin, State
from scrapy_bloom.text import counted

_RUN_TYPES = tuple(get_type_hints(RunBegin).values())
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

    def status(self) -> QueueStatus:
        """Return the figures of the queue; raises StorageError."""
        query = "SELECT ifnull(spider, ''), ifnull(run_name, ''), done, ended_at FROM job"
        with self._reading() as db:
            row = db.execute(query).fetchone()
            spider, run, done, ended_at = typed(row, str, str, int, float)
        return QueueStatus(
            self.counts(),
            spider,
            run,
            done,
            ended_at=ended_at,
            handed_over=inbox.count_handed_over(self.path.parent),
        )

    def runs(self) -> list[RunBegin]:
        """Return the begins of all runs; raises StorageError."""
        with self._reading() as db:
            return [RunBegin(*typed(row, *_RUN_TYPES)) for row in db.execute("SELECT * FROM runs")]

    def slots(self) -> Mapping[str, int]:
        """Return how many requests of each slot are pending; raises StorageError."""
        query = "SELECT slot, count(*) FROM requests WHERE state < 1 GROUP BY slot ORDER BY slot"
        with self._reading() as db:
            return dict(typed(row, str, int) for row in db.execute(query))

    def requests(self, state: State, slot: str | None = None) -> Iterator[Row]:
        """Return the rows of a state, or of one of its slots, in the order of taking.

        Raises StorageError.
        """
        where = CONDITIONS[state] + ("" if slot is None else " AND slot = ?")
        query = f"SELECT * FROM requests WHERE {where} ORDER BY priority DESC, rank, position"  # noqa: S608 - constants
        values = [] if slot is None else [stored_text(slot)]
        with self._reading() as db:
            for row in db.execute(query, values):
                yield StoredRow(*typed(row, *_TYPES)).as_row()

    def move(self, state: State, to: State | None, slot: str | None = None) -> int | None:
        """Make rows of a state pending as they first entered, or drop them (None).

        Returns their number; None if a crawl uses the job, and makes the change. Raises
        StorageError.
        """
        job_dir = self.path.parent.absolute()
        # First, so that one of the two makes the change if a crawl begins or ends meanwhile.
        own = inbox.add(job_dir, [inbox.Move(state, to, slot)])
        try:
            lock = jobdir.lock_job(job_dir)
        except LockedError:
            return None
        try:
            numbers = {}
            with changed(self.path) as changes:
                # Also those that a killed crawl has not made.
                for id_, move in inbox.read(job_dir, only_moves=True):
                    if isinstance(move, inbox.Move):
                        numbers[id_] = sum(iter(partial(changes.move_some, *move), 0))
        except BaseException:
            inbox.remove(job_dir, [own])
            raise
        else:
            inbox.remove(job_dir, [*numbers])
            return numbers.get(own)
        finally:
            lock.release()

    def empty(self) -> None:
        """Drop all requests and runs, as in a new job, of which only the filter is kept.

        No crawl may use the job. Raises StorageError.
        """
        with changed(self.path) as changes:
            for table in ("requests", "hops", "done_pages", "runs"):
                changes.execute(f"DELETE FROM {table}")  # noqa: S608 - constants
            changes.execute("UPDATE job SET spider = '', run = NULL, run_name = ''")
            figures = changes.figures
            figures.left, figures.done, figures.ended_at = 0, 0, 0.0


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
    return sum(counts.values()) - counts[State.DEAD] + inbox.count_handed_over(database.parent)

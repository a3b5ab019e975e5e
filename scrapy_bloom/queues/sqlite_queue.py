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
from scrapy_bloom.job.filter import unpack_fingerprints
from scrapy_bloom.queues import inbox
from scrapy_bloom.queues.rows import CONDITIONS, changed, counts_of
from scrapy_bloom.queues.store import QueueStatus, Row, RunBegin, State
from scrapy_bloom.text import counted

_RUN_TYPES = tuple(get_type_hints(RunBegin).values())
_TYPES = [{State: int, bool: int}.get(kind, kind) for kind in get_type_hints(Row).values()]


class SQLiteQueue:
    """The queue of a job directory; implements `Queue` as described there.

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
            (is_used,) = db.execute("SELECT run IS NOT NULL OR num_rows > 0 FROM job").fetchone()
        return cls(path) if is_used else None

    def _reading(self) -> AbstractContextManager[sqlite3.Connection]:
        return reading(self.path) if self._db is None else nullcontext(self._db)

    def status(self) -> QueueStatus:
        query = "SELECT ifnull(spider, ''), ifnull(run_name, ''), done, ended_at, num_rows FROM job"
        with self._reading() as db:
            row = typed(db.execute(query).fetchone(), str, str, int, float, int)
            spider, run, done, ended_at, num_rows = row
            counts = counts_of(db.execute, num_rows)
        return QueueStatus(
            dict(zip(State, counts, strict=True)),
            spider,
            run,
            done,
            ended_at=ended_at,
            handed_over=inbox.count_handed_over(self.path.parent),
        )

    def runs(self) -> list[RunBegin]:
        with self._reading() as db:
            return [RunBegin(*typed(row, *_RUN_TYPES)) for row in db.execute("SELECT * FROM runs")]

    def slots(self) -> Mapping[str, int]:
        query = "SELECT slot, count(*) FROM requests WHERE state < 1 GROUP BY slot ORDER BY slot"
        with self._reading() as db:
            return dict(typed(row, str, int) for row in db.execute(query))

    def requests(self, state: State, slot: str | None = None) -> Iterator[Row]:
        where = CONDITIONS[state] + ("" if slot is None else " AND slot = ?")
        query = f"SELECT * FROM requests WHERE {where} ORDER BY priority DESC, rank, position"  # noqa: S608 - constants
        values = [] if slot is None else [stored_text(slot)]
        with self._reading() as db:
            for columns in db.execute(query, values):
                row = Row(*typed(columns, *_TYPES))
                unpack_fingerprints(row.packed_hops)  # raises ValueError if they are damaged
                yield row._replace(state=State(row.state))

    def move(self, state: State, to: State | None, slot: str | None = None) -> int | None:
        job_dir, moves = self.path.parent.absolute(), [inbox.Move(state, to, slot)]
        try:
            lock = jobdir.lock_job(job_dir)
        except LockedError:
            inbox.add(job_dir, moves)
            moves = []
            try:  # if the crawl has ended meanwhile, it has not seen the message
                lock = jobdir.lock_job(job_dir)
            except LockedError:
                return None
        try:
            with changed(self.path) as changes:
                # Also those that a killed crawl has not made.
                earlier, number = inbox.read(job_dir, only_moves=True), 0
                for move in (*(message for _, message in earlier), *moves):
                    if isinstance(move, inbox.Move):
                        number = sum(iter(partial(changes.move_some, *move), 0))
            inbox.remove(job_dir, [id_ for id_, _ in earlier])
            return number
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
            figures.num_rows, figures.done, figures.ended_at = 0, 0, 0.0


def check_no_database(job_dir: Path, *, in_redis: bool = False) -> None:
    """Raise a StorageError if CrashSafeScheduler's queue in a job has pending requests.

    `in_redis`: the crawl uses that scheduler, with its queue in Redis.
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
    status = SQLiteQueue(database).status()
    return status.total - status.counts[State.DEAD] + status.handed_over

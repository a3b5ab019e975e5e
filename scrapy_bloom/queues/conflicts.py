"""The two queues that a job directory can hold: Scrapy's own, and that of CrashSafeScheduler.

A crawl uses one of them. The requests in the other one are recorded in the filter, but would never
be crawled.
"""

from pathlib import Path

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.job import paths as jobdir
from scrapy_bloom.queues.added import count_added
from scrapy_bloom.text import counted

_ONE, _MORE = "request of the job waits", "requests of the job wait"


def check_no_database(job_dir: Path, *, in_redis: bool = False) -> None:
    """Raise a StorageError if requests wait in CrashSafeScheduler's queue, not this one's.

    With `in_redis`, this one is CrashSafeScheduler's, too.
    """
    database = job_dir / jobdir.DATABASE
    waiting = _waiting_in(database)
    if waiting and in_redis:
        raise StorageError(
            f'{counted(waiting, _ONE, _MORE)} in {database}, and BLOOM_BACKEND is "redis": set '
            'it to "local" again; or copy filter and queue with `scrapy bloom push`, and give the '
            "crawl another JOBDIR, or none"
        )
    if waiting:
        raise StorageError(
            f"{counted(waiting, _ONE, _MORE)} in {database}, and this crawl's scheduler does "
            'not know of them: set SCHEDULER = "scrapy_bloom.CrashSafeScheduler" again, or give '
            "the crawl another JOBDIR"
        )


def check_no_disk_queue(job_dir: Path) -> None:
    """Raise a StorageError if requests wait in Scrapy's own queue, or it was broken by a kill."""
    queue = job_dir / jobdir.QUEUE
    try:
        holds_requests = queue.exists() and (
            jobdir.has_queued(job_dir) or not jobdir.was_closed_by_scrapy(job_dir)
        )
    except OSError as error:
        raise StorageError(
            f"{job_dir} cannot be read: {error.strerror or error}; give the crawl the right to, or "
            "another JOBDIR"
        ) from error
    if holds_requests:
        raise StorageError(
            f"{job_dir} is a job of Scrapy's own scheduler, whose requests CrashSafeScheduler does "
            'not know: let it finish without SCHEDULER = "scrapy_bloom.CrashSafeScheduler", or '
            f"give the crawl another JOBDIR; or move {queue} away, and the filter beside it, to "
            "start the job over"
        )


def has_pending(job_dir: Path) -> bool:
    """Return whether requests wait in either queue of a job, or were in flight at a kill."""
    return jobdir.has_queued(job_dir) or _waiting_in(job_dir / jobdir.DATABASE) > 0


def _waiting_in(database: Path) -> int:
    if not jobdir.is_database(database):
        return 0
    from scrapy_bloom.queues.sqlite import read_counts  # noqa: PLC0415 - SQLite takes a MB

    return sum(read_counts(database)) + count_added(database.parent)

"""Check that a job directory has no pending requests in a queue that the crawl does not use.

A job directory can hold Scrapy's own queue and the database of CrashSafeScheduler. A crawl uses
only one of them. The filter would report the requests in the other queue as duplicates, although
they were never crawled.
"""

from pathlib import Path

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.job import paths as jobdir
from scrapy_bloom.queues.added import count_added
from scrapy_bloom.text import counted


def check_no_database(job_dir: Path, *, in_redis: bool = False) -> None:
    """Raise a StorageError if the job's database of CrashSafeScheduler has pending requests.

    Args:
        job_dir: the job directory.
        in_redis: the crawl uses CrashSafeScheduler, with its queue in Redis.
    """
    database = job_dir / jobdir.DATABASE
    number = _count_pending(database)
    if number and in_redis:
        raise StorageError(
            f"{database} holds {counted(number, 'pending request')}, which this crawl would not "
            'use, because BLOOM_BACKEND is "redis". Set it to "local" again; or copy filter and '
            "queue with `scrapy bloom push`, and remove JOBDIR or set another one"
        )
    if number:
        raise StorageError(
            f"{database} holds {counted(number, 'pending request')}, which this crawl's scheduler "
            'cannot use. Set SCHEDULER = "scrapy_bloom.CrashSafeScheduler" again, or set another '
            "JOBDIR"
        )


def check_no_disk_queue(job_dir: Path) -> None:
    """Raise a StorageError if Scrapy's own queue has pending requests, or a kill left it broken."""
    queue = job_dir / jobdir.QUEUE
    try:
        holds_requests = queue.exists() and (
            jobdir.has_queued(job_dir) or not jobdir.was_closed_by_scrapy(job_dir)
        )
    except OSError as error:
        raise StorageError(
            f"{job_dir} cannot be read: {error.strerror or error}; allow the crawl to read it, or "
            "set another JOBDIR"
        ) from error
    if holds_requests:
        raise StorageError(
            f"{job_dir} is a job of Scrapy's own scheduler, and CrashSafeScheduler cannot use its "
            'pending requests. Finish the job without SCHEDULER = "scrapy_bloom.'
            'CrashSafeScheduler", set another JOBDIR, or move '
            f"{queue} and the filter next to it away to start the job over"
        )


def has_pending(job_dir: Path) -> bool:
    """Return whether a queue of a job has requests that are pending, or in flight at a kill."""
    return jobdir.has_queued(job_dir) or _count_pending(job_dir / jobdir.DATABASE) > 0


def _count_pending(database: Path) -> int:
    if not jobdir.is_database(database):
        return 0
    from scrapy_bloom.queues.job_state import read_counts  # noqa: PLC0415 - SQLite takes 1 MB of memory

    return sum(read_counts(database)) + count_added(database.parent)

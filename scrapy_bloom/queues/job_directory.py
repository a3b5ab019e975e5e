"""The queues in a job directory: requests handed over to a crawl, and a queue that it does not use.

A job directory can hold Scrapy's own queue and the database of CrashSafeScheduler. A crawl uses
only one of them. The filter would report the requests in the other queue as duplicates, although
they were never crawled.

Only the crawl may change its database and its filter. So `scrapy bloom add` writes each file of
requests atomically into a directory of the job, and the crawl deletes the file once its requests
are queued. If the crawl is killed before that, the next run reads the file again. Its filter drops
the requests that were queued already, except requests with `dont_filter`, which are queued twice.
"""

import re
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.job import paths as jobdir
from scrapy_bloom.job.disk import replace_file, sync_directory
from scrapy_bloom.queues.batch import plain, serialized
from scrapy_bloom.queues.job_state import read_counts
from scrapy_bloom.text import counted

MOST_IN_A_FILE = 1000  # requests: the crawl queues a file in one turn of its event loop

_DIRECTORY = "requests.added"
# The time of writing in nanoseconds, random digits, and the number of requests in the file.
_NAME = re.compile(r"\d{20}-[0-9a-f]{8}-(\d{1,4})")


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
    return sum(read_counts(database)) + count_added(database.parent)


def hand_over(job_dir: Path, requests: Sequence[Mapping[str, Any]]) -> None:
    """Write requests, in the form of `Request.to_dict`, for the crawl of a job.

    Raises OSError.
    """
    directory = job_dir / _DIRECTORY
    directory.mkdir(exist_ok=True)
    sync_directory(job_dir)
    name = f"{time.time_ns():020}-{secrets.token_hex(4)}-{len(requests)}"
    replace_file(directory / name, serialized({"requests": list(requests)}))


def added_files(job_dir: Path) -> list[Path]:
    """Return the files that the crawl of a job has not queued yet, the oldest first."""
    try:
        found = [each for each in (job_dir / _DIRECTORY).iterdir() if _NAME.fullmatch(each.name)]
    except OSError:  # usually, there is no such directory
        return []
    return sorted(found)


def count_added(job_dir: Path) -> int:
    """Return how many handed-over requests the crawl of a job has not queued yet."""
    return sum(int(each.name.rpartition("-")[2]) for each in added_files(job_dir))


def read_added(path: Path) -> list[dict[str, Any]] | None:
    """Return the requests in a file, or None if it is damaged.

    Code that the file may contain is not run. Raises OSError if the file cannot be read.
    """
    try:
        jobdir.check_file(path)
    except StorageError:
        return None
    found = (plain(path.read_bytes()) or {}).get("requests")
    if isinstance(found, list) and all(isinstance(each, dict) for each in found):
        return found
    return None

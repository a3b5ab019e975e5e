"""Read and change the queues of a job directory outside its crawl, and hand requests over to it.

A job directory can hold Scrapy's own queue and the database of CrashSafeScheduler. A crawl uses
only one of them. The filter would report the requests in the other queue as duplicates, although
they were never crawled. Commands read the database also while a crawl uses it, and change it only
while none does. `scrapy_bloom.queues.shared_state` is for a queue in Redis.

Only the crawl may add to its database and its filter. So `scrapy bloom add` writes each file of
requests atomically into a directory of the job, and the crawl deletes the file once its requests
are queued. If the crawl is killed before that, the next run reads the file again. Its filter drops
the requests that were queued already, except requests with `dont_filter`, which are queued twice.
"""

import contextlib
import re
import secrets
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.files.log import Change, unpack_changes
from scrapy_bloom.job import jobdir
from scrapy_bloom.job.disk import (
    check_file,
    check_no_links,
    connect_readonly,
    replace_file,
    sync_directory,
)
from scrapy_bloom.queues.batch import Found, plain, round_robin, serialized
from scrapy_bloom.queues.sqlite import (
    ALONE,
    DEAD,
    IN_FLIGHT,
    INSERT,
    PENDING,
    SET_ASIDE,
    SUSPECT,
    RequestDatabase,
    check_database,
    checksum_of,
    row_of,
    unusable,
)
from scrapy_bloom.text import counted

MOST_IN_A_FILE = 1000  # requests: the crawl queues a file in one turn of its event loop

_DIRECTORY = "requests.added"
# The time of writing in nanoseconds, random digits, and the number of requests in the file.
_NAME = re.compile(r"\d{20}-[0-9a-f]{8}-(\d{1,4})")


def read_counts(path: Path) -> tuple[int, int]:
    """Count the requests that are pending, and those in flight.

    The crawl may be running.

    Raises:
        StorageError: the file cannot be read, or is damaged.
    """
    counts = dict(_read(path, "SELECT state, count(*) FROM requests GROUP BY state"))
    pending = sum(counts.get(state, 0) for state in (PENDING, SUSPECT, SET_ASIDE))
    return pending, counts.get(IN_FLIGHT, 0) + counts.get(ALONE, 0)


def read_done(path: Path) -> int:
    """Return how many requests of a job were finished, in all its runs; raises StorageError."""
    ((done,),) = _read(path, "SELECT done FROM filter_log")
    return int(done)


def read_dead(path: Path) -> list[bytes]:
    """Return the dead requests, serialized; raises StorageError."""
    query = "SELECT request FROM requests WHERE state = ? ORDER BY id"
    return [data for (data,) in _read(path, query, DEAD)]


def read_slots(path: Path) -> dict[str, int]:
    """Return how many requests of each slot are pending; raises StorageError."""
    query = "SELECT slot, count(*) FROM requests WHERE state = ? GROUP BY slot ORDER BY slot"
    return dict(_read(path, query, PENDING))


def read_first(path: Path, slots: Mapping[str, int], most: int) -> list[bytes]:
    """Return the first pending requests, serialized, round-robin by slot.

    Args:
        path: the file.
        slots: how many requests of each slot are pending.
        most: how many requests to return.
    """
    query = """
        SELECT request FROM requests WHERE state = 0 AND slot = ?
        ORDER BY priority DESC, rank, position LIMIT ?
    """
    return round_robin(
        slots, most, lambda slot, number: [data for (data,) in _read(path, query, slot, number)]
    )


class QueuedRequest(NamedTuple):
    """A request of a queue that no crawl uses, to be copied into another queue.

    Attributes:
        found: the request; its fingerprint is not copied, because the filter has it.
        state: PENDING, IN_FLIGHT, SUSPECT, DEAD, SET_ASIDE or ALONE.
        position: 1 for the request that was queued first, 2 for the next, and so on.
        deaths: how many processes died with the request in flight.
    """

    found: Found
    state: int
    position: int
    deaths: int


def read_requests(path: Path) -> Iterator[QueuedRequest]:
    """Return all requests of a job in the order of their queueing; raises StorageError."""
    query = (
        "SELECT request, NULL, slot, priority, rank, position < 0, state, abs(position), "
        "deaths FROM requests ORDER BY abs(position), id"
    )
    try:
        with contextlib.closing(connect_readonly(path)) as db:
            for *found, state, position, deaths in db.execute(query):
                yield QueuedRequest(Found(*found), state, position, deaths)
    except sqlite3.Error as error:
        raise unusable(path, error) from error


def write_requests(path: Path, requests: Iterable[QueuedRequest]) -> int:
    """Create a job's database with requests, in any order; return their number."""
    empty = RequestDatabase(path, by_slot=True)
    empty.begin()
    empty.close()
    number = latest = 0
    with _changed(path) as db:
        for number, (found, state, position, deaths) in enumerate(requests, 1):
            latest = max(latest, position)
            _, _, *row, _, _, data = row_of(position, found)
            db.execute(INSERT, (-number, state, *row, deaths, None, data))
        # Ids are higher than any position, so that the position of a later request is higher, too.
        db.execute("UPDATE requests SET id = ? - id", (latest,))
        db.execute(
            "UPDATE filter_log SET (left, checksum) = "
            "(SELECT count(*), ifnull(sum(id), 0) FROM requests)"
        )
    return number


def requeue_dead(path: Path) -> int:
    """Make the dead requests of a job pending, with no deaths counted; return their number.

    No crawl may use the job. Raises StorageError.
    """
    with _changed(path) as db:
        query = "UPDATE requests SET state = ?, deaths = 0 WHERE state = ?"
        return db.execute(query, (PENDING, DEAD)).rowcount


def drop_dead(path: Path) -> int:
    """Remove the dead requests of a job, which no crawl may use; return their number.

    Raises StorageError.
    """
    return _drop(path, "state = ?", DEAD)


def drop_slot(path: Path, slot: str) -> int:
    """Remove the pending requests of a slot of a job, which no crawl may use.

    Returns:
        their number.

    Raises:
        StorageError: the file cannot be changed, or is damaged.
    """
    return _drop(path, "state = ? AND slot = ?", PENDING, slot)


def _drop(path: Path, where: str, *values: object) -> int:
    with _changed(path) as db:
        query = f"SELECT count(*), ifnull(sum(id), 0) FROM requests WHERE {where}"  # noqa: S608
        number, ids = db.execute(query, values).fetchone()
        (checksum,) = db.execute("SELECT checksum FROM filter_log").fetchone()
        db.execute(f"DELETE FROM requests WHERE {where}", values)  # noqa: S608 - only constants
        db.execute(
            "UPDATE filter_log SET left = left - ?, checksum = ?",
            (number, checksum_of(checksum - ids, 0)),
        )
    return int(number)


@contextlib.contextmanager
def _changed(path: Path) -> Iterator[sqlite3.Connection]:
    """Change a database in a `with` block, in one transaction."""
    try:
        check_no_links(path)
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
            check_database(db, path)
            db.execute("BEGIN IMMEDIATE")
            yield db
            db.execute("COMMIT")
    except (sqlite3.Error, OSError) as error:
        raise unusable(path, error) from error


def read_recent(path: Path) -> list[Change]:
    """Return the changes that a filter may lack, in order; raises StorageError."""
    try:
        rows = _read(path, "SELECT changes FROM ops ORDER BY seq")
        return [change for (data,) in rows for change in unpack_changes(data)]
    except ValueError as error:
        raise unusable(path, error) from error


def _read(path: Path, query: str, *values: object) -> list[Any]:
    try:
        with contextlib.closing(connect_readonly(path)) as db:
            check_database(db, path)
            return db.execute(query, values).fetchall()
    except (sqlite3.Error, OSError) as error:
        raise unusable(path, error) from error


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
            jobdir.has_queued(job_dir) or not jobdir.was_closed_by_scrapy(job_dir)
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
        check_file(path)
    except StorageError:
        return None
    found = (plain(path.read_bytes()) or {}).get("requests")
    if isinstance(found, list) and all(isinstance(each, dict) for each in found):
        return found
    return None

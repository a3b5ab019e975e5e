"""What commands read of a job's queue, and change in it while no crawl has it."""

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

from scrapy_bloom.files.log import Change, unpack_changes
from scrapy_bloom.job.sqlite_files import check_no_links, connect_readonly
from scrapy_bloom.queues.sqlite import (
    DEAD,
    IN_FLIGHT,
    PENDING,
    SET_ASIDE,
    SUSPECT,
    check_database,
    unusable,
)

_REQUEUE = "UPDATE requests SET state = ?, deaths = 0 WHERE state = ?"


def read_counts(path: Path) -> tuple[int, int]:
    """Count the requests that are pending, and in flight, also of a running crawl.

    Raises a StorageError if the file cannot be read, or is damaged.
    """
    counts = dict(_read(path, "SELECT state, count(*) FROM requests GROUP BY state"))
    waiting = counts.get(PENDING, 0) + counts.get(SUSPECT, 0) + counts.get(SET_ASIDE, 0)
    return waiting, counts.get(IN_FLIGHT, 0)


def read_dead(path: Path) -> list[bytes]:
    """Return the dead requests, serialized; raises as `read_counts`."""
    query = "SELECT request FROM requests WHERE state = ? ORDER BY id"
    return [data for (data,) in _read(path, query, DEAD)]


def requeue_dead(path: Path) -> int:
    """Make the dead requests of a job pending, and suspect of nothing; return how many there were.

    No crawl may use the job. Raises as `read_counts`.
    """
    try:
        check_no_links(path)
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
            check_database(db, path)
            return db.execute(_REQUEUE, (PENDING, DEAD)).rowcount
    except (sqlite3.Error, OSError) as error:
        raise unusable(path, error) from error


def read_recent(path: Path) -> list[Change]:
    """Return the changes that a filter may lack, in order; raises as `read_counts`."""
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

"""Copying the queue of CrashSafeScheduler between a job's SQLite database and Redis."""

import sqlite3
import struct
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from scrapy_bloom.copying.drafts import Draft
from scrapy_bloom.job import paths as jobdir
from scrapy_bloom.job.disk import beside, connect_readonly
from scrapy_bloom.queues.batch import Found
from scrapy_bloom.queues.shared import Member, order_of
from scrapy_bloom.queues.shared_state import SETS, read_members
from scrapy_bloom.queues.sqlite import (
    DEAD,
    MOST_DEATHS,
    PENDING,
    SET_ASIDE,
    SUSPECT,
    RequestDatabase,
    read_counts,
    read_dead,
    unusable,
)
from scrapy_bloom.redis.connection.server import RedisServer

_NEWEST_FIRST = 2**53  # less a number: the position, if the newest comes first
_WRITTEN_BYTES = 1 << 20  # at once, if not a single request is larger
_INSERT = "INSERT INTO requests VALUES (?, ?, ?, ?, ?, ?, ?, NULL, ?)"

# The states of requests in each set of Redis, and the sets of all other states are "pending".
_STATES = {"pending": PENDING, "leased": PENDING, "aside": SET_ASIDE, "suspects": SUSPECT}
_STATES["dead"] = DEAD
_SETS = {SUSPECT: "suspects", DEAD: "dead"}


def waiting_database(directory: Path) -> Path | None:
    """Return the database beside a job's filter in JOBDIR/bloom, if there are requests in it.

    Raises a StorageError if that file is something else, or damaged: the copied filter would
    report the requests that it lost as duplicates.
    """
    database = directory.parent / jobdir.DATABASE
    if directory.name != "bloom" or not database.exists():
        return None
    if not jobdir.is_database(database):
        raise unusable(database, "it is empty, or no queue of CrashSafeScheduler")
    return database if sum(read_counts(database)) or read_dead(database) else None


def load_queue(database: Path, draft: Draft) -> int:
    """Write the requests of a job into the draft of a filter; return how many there are.

    They get new positions, 1 and up, so that the next one gets the number of all and one more.
    """
    query = (
        "SELECT state, slot, priority, is_start, position < 0, deaths, request FROM requests "
        "ORDER BY abs(position), id"
    )
    batches: dict[str, list[tuple[float, bytes]]] = {"pending": [], "suspects": [], "dead": []}
    number = size = 0
    try:
        with closing(connect_readonly(database)) as db:
            for number, row in enumerate(db.execute(query), 1):
                state, member = row[0], _packed(number, row)
                if size + len(member) > _WRITTEN_BYTES:
                    _flush(batches, draft)
                    size = 0
                batches[_SETS.get(state, "pending")].append((0, member))
                size += len(member)
    except sqlite3.Error as error:
        raise unusable(database, error) from error
    _flush(batches, draft)
    return number


def _packed(number: int, row: tuple[Any, ...]) -> bytes:
    _, slot, priority, rank, newest_first, deaths, data = row
    position = _NEWEST_FIRST - number if newest_first else number
    deaths = min(deaths, MOST_DEATHS)
    workers = b"".join(b"%016x" % each for each in range(deaths))  # whichever: they are dead
    order = order_of(Found(data, slot=slot, priority=priority, rank=rank))
    return b"".join((order, struct.pack(">QB", position, deaths), workers, data))


def _flush(batches: dict[str, list[tuple[float, bytes]]], draft: Draft) -> None:
    for name, batch in batches.items():
        if batch:
            draft.add(name, batch)
            batch.clear()


def save_queue(server: RedisServer, key: str, database: Path) -> int:
    """Save a queue in Redis, which no worker uses, as that of a job; return the number of requests.

    The file appears when it is complete. Raises a StorageError if a request is damaged.
    """
    new = _unfinished(database)
    for part in (new, *beside(new)):  # of a copy that was killed
        part.unlink(missing_ok=True)
    empty = RequestDatabase(new, by_slot=True)
    empty.begin()
    empty.close()
    number = most = 0
    with closing(sqlite3.connect(new, isolation_level=None)) as db:
        db.execute("BEGIN")
        for state, member in _members(server, key):
            number += 1
            newest_first = member.position > _NEWEST_FIRST // 2
            position = member.position - (_NEWEST_FIRST if newest_first else 0)
            most = max(most, abs(position))
            # As the database has the slots: without surrogates.
            slot = member.slot.encode(errors="backslashreplace").decode()
            deaths = member.deaths if state == SUSPECT else min(member.deaths, MOST_DEATHS - 1)
            row = (state, slot, member.priority, member.rank, position, deaths, member.data)
            db.execute(_INSERT, (-number, *row))
        # Ids are higher than any position, so that what is queued later gets a higher one, too.
        db.execute("UPDATE requests SET id = ? - id", (most,))
        db.execute(
            "UPDATE filter_log SET (left, checksum) = "
            "(SELECT count(*), ifnull(sum(id), 0) FROM requests)"
        )
        db.execute("COMMIT")
    new.replace(database)
    return number


def _members(server: RedisServer, key: str) -> Iterator[tuple[int, Member]]:
    """Return each request once: a script that failed half-way left it in two sets."""
    found = set()
    for name in reversed(SETS):  # the largest last
        for member in read_members(server, key, name):
            request = (member.position, member.data)
            if request not in found:
                yield _STATES[name], member
            if name != "pending":
                found.add(request)


@contextmanager
def removed_after_error(database: Path) -> Iterator[None]:
    """Remove the database that a block has made if it fails, whole or not."""
    try:
        yield
    except BaseException:
        new = _unfinished(database)
        for path in (database, new, *beside(new)):
            path.unlink(missing_ok=True)
        raise


def _unfinished(database: Path) -> Path:
    return database.with_name(f"{database.name}.new")

"""Copy the queue of CrashSafeScheduler between a job's SQLite database and Redis."""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scrapy_bloom.job import paths as jobdir
from scrapy_bloom.job.disk import log_and_index
from scrapy_bloom.queues.batch import Found
from scrapy_bloom.queues.job_state import (
    QueuedRequest,
    read_counts,
    read_dead,
    read_requests,
    write_requests,
)
from scrapy_bloom.queues.shared import order_of
from scrapy_bloom.queues.shared_state import SETS
from scrapy_bloom.queues.shared_state import read_requests as read_shared_requests
from scrapy_bloom.queues.sqlite import DEAD, MOST_DEATHS, PENDING, SET_ASIDE, SUSPECT, unusable
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.making import Maker
from scrapy_bloom.redis.scripts import keys_of

_NEWEST_FIRST = 2**53  # minus a number: the position, if the newest comes first
_WRITTEN_BYTES = 1 << 20  # per write, unless a single request is larger

# The state of requests in each set in Redis. Requests in flight are copied to "pending".
_STATES = {"pending": PENDING, "leased": PENDING, "aside": SET_ASIDE, "suspects": SUSPECT}
_STATES["dead"] = DEAD


def database_beside(directory: Path) -> Path | None:
    """Return the database of the job with the filter JOBDIR/bloom, if it has requests.

    Raises StorageError if the file is not a database of ours, or is damaged: the copied filter
    would report the lost requests as duplicates.
    """
    database = directory.parent / jobdir.DATABASE
    if directory.name != "bloom" or not database.exists():
        return None
    if not jobdir.is_database(database):
        raise unusable(database, "it is empty, or no queue of CrashSafeScheduler")
    return database if sum(read_counts(database)) or read_dead(database) else None


def load_queue(database: Path, maker: Maker, key: str) -> int:
    """Write the requests of a job into the sets of a new filter; return their number.

    The requests get the positions 1 to that number, so that the next request continues them.
    """
    names = keys_of(key)
    sets = {PENDING: names[1], SUSPECT: names[4], DEAD: names[5]}
    batches: dict[str, list[bytes]] = {name: [] for name in sets.values()}
    number = size = 0

    def flush() -> None:
        for name, batch in batches.items():
            if batch:
                maker.add(name, 0, batch)
                batch.clear()

    for number, request in enumerate(read_requests(database), 1):
        member = _packed(number, request)
        if size + len(member) > _WRITTEN_BYTES:
            flush()
            size = 0
        batches[sets.get(request.state, names[1])].append(member)
        size += len(member)
    flush()
    return number


def _packed(number: int, request: QueuedRequest) -> bytes:
    found = request.found
    position = _NEWEST_FIRST - number if found.newest_first else number
    deaths = min(request.deaths, MOST_DEATHS)
    workers = b"".join(b"%016x" % each for each in range(deaths))  # any ids: these workers are dead
    return b"".join((order_of(found), struct.pack(">QB", position, deaths), workers, found.data))


def save_queue(server: RedisServer, key: str, database: Path) -> int:
    """Save a queue in Redis, which no worker may use, as the database of a job.

    The file appears when it is complete.

    Returns:
        the number of requests.

    Raises:
        StorageError: a request is damaged.
    """
    new = _unfinished(database)
    for part in (new, *log_and_index(new)):  # of a copy whose process was killed
        part.unlink(missing_ok=True)
    number = write_requests(new, _requests(server, key))
    new.replace(database)
    return number


def _requests(server: RedisServer, key: str) -> Iterator[QueuedRequest]:
    """Return each request once, also if a script that failed half-way left it in two sets."""
    known = set()
    for name in reversed(SETS):  # the largest set comes last
        state = _STATES[name]
        for slot, priority, rank, position, deaths, data in read_shared_requests(server, key, name):
            if (position, data) in known:
                continue
            if name != "pending":
                known.add((position, data))
            newest_first = position > _NEWEST_FIRST // 2
            yield QueuedRequest(
                Found(data, None, slot, priority, rank, newest_first),
                state,
                _NEWEST_FIRST - position if newest_first else position,
                deaths if state == SUSPECT else min(deaths, MOST_DEATHS - 1),
            )


@contextmanager
def removed_after_error(database: Path) -> Iterator[None]:
    """If a `with` block fails, remove the database that it has made."""
    try:
        yield
    except BaseException:
        new = _unfinished(database)
        for path in (database, new, *log_and_index(new)):
            path.unlink(missing_ok=True)
        raise


def _unfinished(database: Path) -> Path:
    return database.with_name(f"{database.name}.new")

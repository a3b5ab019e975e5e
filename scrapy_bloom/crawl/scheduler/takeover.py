"""Take over the pending requests of Scrapy's own scheduler in a job directory.

The requests are written to a draft, which is renamed to the job's database when it is complete.
Then the filter is opened, which detects that the last process was killed, and last the queue of
Scrapy's scheduler is renamed. A process that is killed before the first rename has changed nothing.
After it, the next run finds the digest of the queue among the run ids of the database, and does not
take over the queue again.
"""

import hashlib
import json
import logging
import marshal
import mmap
import pickle
import re
import shutil
import sqlite3
import struct
from array import array
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from scrapy import Request
from scrapy.crawler import Crawler
from scrapy.dupefilters import BaseDupeFilter
from scrapy.utils.request import request_from_dict

from scrapy_bloom.crawl.dupefilter import BloomDupeFilter
from scrapy_bloom.crawl.fingerprinting import fingerprint_function
from scrapy_bloom.crawl.scheduler.order import serves_least_busy_slot
from scrapy_bloom.crawl.scheduler.stored_requests import StoredRequests
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.files.file import FileGeneration
from scrapy_bloom.job import jobdir
from scrapy_bloom.job.disk import connect_readonly, log_and_index, opened, sync_directory
from scrapy_bloom.job.recovery import Job
from scrapy_bloom.queues.database import JobDatabase
from scrapy_bloom.queues.serialized import with_line
from scrapy_bloom.queues.store import Entered

logger = logging.getLogger(__name__)

_SLICE = 1000  # requests in a transaction
_LENGTH = struct.Struct(">L")  # of a request in queuelib's files
_LONGEST_CUT = 4 << 20  # bytes of a partial request at the end of a file
_NAME = re.compile(r"(-?\d+)s?")  # the negated priority; "s": start requests
_CHUNK = re.compile(r"q(\d+)")
_SQLITE = b"SQLite format 3\0"
_MARSHALLED = (b"\x7b", b"\xfb")  # the first byte of a dict; a pickle begins with 0x80


def take_over(crawler: Crawler, df: BaseDupeFilter, job: Path) -> bool:
    """Copy the requests in the queue of Scrapy's scheduler into the job's database.

    Call `finish` once the store is open.

    Args:
        crawler: the crawler of the requests.
        df: the duplicate filter, not opened yet.
        job: the job directory, locked by the caller.

    Returns:
        whether the database is new, and only a copy of the queue.

    Raises:
        StorageError: the queue cannot be read, or it is damaged although Scrapy closed it; or the
            database cannot be written. Neither of them was changed.
    """
    queue, database = job / jobdir.QUEUE, job / jobdir.DATABASE
    draft = database.with_name(f"{database.name}.tmp")
    by_slot = serves_least_busy_slot(crawler)
    try:
        if not jobdir.has_queued(job):
            return False
        _roll_back(queue)
        run = _digest(queue)
        _remove(draft)  # of a takeover that was killed
        is_new = not database.exists()
        if not is_new:
            if _is_taken_over(database, run, by_slot=by_slot):
                return False
            shutil.copyfile(database, draft)
        logger.info(
            "Taking over the queue of Scrapy's own scheduler in %s",
            queue,
            extra={"spider": crawler.spider},
        )
        try:
            new = JobDatabase(draft, by_slot=by_slot)
            new.run = run
            with closing(new):
                new.begin()
                if is_new:
                    _begin_run(new, crawler)
                _fill(new, queue, _Converter(crawler, df), was_killed=_was_killed(job))
            if log_and_index(draft)[0].exists():
                raise OSError(f"{draft} could not be written to the disk")
            draft.replace(database)
        finally:
            _remove(draft)
        sync_directory(job)
    except (sqlite3.Error, OSError) as error:
        raise StorageError(
            f"the requests in {queue}, the queue of Scrapy's own scheduler, cannot be taken over: "
            f"{error}; the queue was left as it is: fix the cause, or set another JOBDIR"
        ) from error
    return is_new


def finish(crawler: Crawler, df: BaseDupeFilter, job: Path) -> None:
    """Rename the queue that was taken over, unless the filter has renamed it.

    Raises a StorageError if it cannot be renamed.
    """
    queue = job / jobdir.QUEUE
    if not jobdir.has_queued(job):
        return
    extra = {"spider": crawler.spider}
    if not isinstance(df, BloomDupeFilter) and _was_killed(job):
        logger.warning(
            "The last process did not close %s: it was killed, or the machine went down. The "
            "requests that could be read are crawled; the spider may find the others again",
            queue,
            extra=extra,
        )
    try:
        aside = jobdir.set_aside(queue)
    except OSError as error:
        raise StorageError(
            f"{queue} was taken over, but cannot be renamed: {error.strerror or error}; allow the "
            "crawl to write to the JOBDIR"
        ) from error
    logger.info(
        "The pending requests of Scrapy's own scheduler are in %s now; its queue was renamed to %s",
        job / jobdir.DATABASE,
        aside,
        extra=extra,
    )


def undo(job: Path) -> None:
    """Remove the database of a takeover, unless a crawl has begun to use it.

    Call the function if `take_over` has returned True, and the store could not be opened.
    """
    with closing(JobDatabase(job / jobdir.DATABASE, by_slot=True)) as database:
        (openings,) = database.query("SELECT count(*) FROM openings").fetchone()
    if openings == 1:
        _remove(job / jobdir.DATABASE)


def _begin_run(database: JobDatabase, crawler: Crawler) -> None:
    """Begin a run that goes on with that of Scrapy's scheduler.

    Its id is empty, so a request that is new once in each run is recorded under its fingerprint
    alone: start requests that Scrapy's scheduler has recorded are duplicates in this run.
    """
    assert crawler.spider is not None
    with database.transaction() as changes:
        changes.begin_run(b"", "", crawler.spider.name)


def _was_killed(job: Path) -> bool:
    """Return whether the last process under Scrapy's scheduler was killed, as the filter has it."""
    files = jobdir.filter_files(job / "bloom")
    is_in_use = any(FileGeneration.at(file).in_use for file in files)
    return is_in_use or Job(job).was_killed(has_filter=bool(files))


def _is_taken_over(database: Path, run: str, *, by_slot: bool) -> bool:
    """Return whether a database has the requests of a queue; if not, settle it for a copy."""
    with closing(JobDatabase(database, by_slot=by_slot)) as existing:
        if existing.has_run(run):
            return True
        if existing.was_killed:
            existing.begin()  # so that the close moves its write-ahead log into the file
    return False


def _digest(queue: Path) -> str:
    """Return an id of the contents of a queue: the names, sizes and times of its files."""
    digest = hashlib.sha256()
    for file in sorted(queue.rglob("*")):
        if file.is_file():
            status = file.stat()
            name = file.relative_to(queue).as_posix()
            digest.update(f"{name!a} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _remove(path: Path) -> None:
    """Remove a database that is only a copy of Scrapy's queue; raises OSError."""
    for part in (path, *log_and_index(path)):
        part.unlink(missing_ok=True)


def _roll_back(queue: Path) -> None:
    """Let SQLite roll back the transactions that a kill has interrupted in a queue's files."""
    for journal in queue.rglob("*-journal"):
        file = journal.with_name(journal.name.removesuffix("-journal"))
        if file.exists():
            with closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=rw", uri=True)) as db:
                db.execute("SELECT count(*) FROM sqlite_master")


class _Converter:
    """Turns the requests of Scrapy's queue into those of a database."""

    def __init__(self, crawler: Crawler, df: BaseDupeFilter) -> None:
        assert crawler.request_fingerprinter is not None
        self._spider = crawler.spider
        self._is_filtered = isinstance(df, BloomDupeFilter)
        self._fingerprint = fingerprint_function(crawler.request_fingerprinter)
        self._requests = StoredRequests(crawler)

    def converted(self, data: bytes, priority: int) -> Entered:
        """Return a request of the queue.

        A request that cannot be deserialized is kept as it is: when it is taken, it is unreadable.
        """
        try:
            loads = marshal.loads if data.startswith(_MARSHALLED) else pickle.loads
            request = request_from_dict(loads(data), spider=self._spider)  # as Scrapy does it
            page = self._recorded_as(request)
            return self._requests.entered(request, page, is_filtered=page is not None)
        except Exception:  # noqa: BLE001 - a callback that was renamed, for example
            return Entered(with_line("", "", data), is_filtered=False, priority=priority)

    def _recorded_as(self, request: Request) -> bytes | None:
        """Return the fingerprint to record; None if the request is not filtered, or has none."""
        if not self._is_filtered or request.dont_filter:
            return None
        if not request.meta.get("bloom_record", True):
            return None
        try:
            return self._fingerprint(request)
        except Exception:  # noqa: BLE001 - the request is crawled, and not recorded
            return None


def _fill(database: JobDatabase, queue: Path, converter: _Converter, *, was_killed: bool) -> None:
    """Store all requests of a queue, and record them, slice by slice.

    Raises a StorageError if a file of the queue is damaged, although the last process was closed.
    """
    some: list[Entered] = []
    for file in sorted(_files(queue)):
        priority = -int(file.name.rstrip("s"))
        try:
            for data in _requests(file):
                some.append(converter.converted(data, priority))
                if len(some) >= _SLICE:
                    _store(database, some)
                    some = []
        except ValueError as error:
            # After a kill, a file has lost its end, and the crawl starts over with the rest.
            if not was_killed:
                raise StorageError(
                    f"{file} is damaged: {error}; it was left as it is. Restore it from a backup, "
                    f"or remove {queue / 'active.json'}: the crawl then starts over with the "
                    "requests that it can read"
                ) from error
    _store(database, some)


def _store(database: JobDatabase, entered: list[Entered]) -> None:
    with database.transaction(is_batch=True) as changes:
        changes.insert([changes.new_row(each) for each in entered])
        changes.record(each.fingerprint for each in entered if each.fingerprint is not None)


def _files(queue: Path) -> Iterator[Path]:
    """Return the files and directories of a queue that hold the requests of one priority."""
    for path in queue.iterdir():
        if _NAME.fullmatch(path.name):
            yield path
        elif path.is_dir():  # of a slot
            yield from (each for each in path.iterdir() if _NAME.fullmatch(each.name))


def _requests(path: Path) -> Iterator[bytes]:
    """Return the serialized requests of a file or directory in the order of their queueing.

    Raises a ValueError if something is damaged, after all requests that can be read.
    """
    if path.is_dir():
        return _of_chunks(path)
    with opened(path) as file:
        is_sqlite = file.read(len(_SQLITE)) == _SQLITE
    return _of_sqlite(path) if is_sqlite else _of_stack(path)


def _of_sqlite(path: Path) -> Iterator[bytes]:
    """Return the requests of queuelib's SQLite queues."""
    try:
        with closing(connect_readonly(path)) as db:
            for (data,) in db.execute("SELECT item FROM queue ORDER BY id"):
                yield bytes(data)
    except (sqlite3.Error, TypeError) as error:
        raise ValueError(str(error)) from error


def _of_chunks(directory: Path) -> Iterator[bytes]:
    """Return the requests of queuelib's FifoDiskQueue: files in which a length precedes the data.

    `info.json` says where the first request is; after a kill, it is missing, or that of an earlier
    pause, whose first request cannot come after the first one now.
    """
    info = _info(directory)
    first, _, offset = info.get("tail", (0, 0, 0))
    named = ((_CHUNK.fullmatch(path.name), path) for path in directory.iterdir())
    chunks = sorted((int(match[1]), path) for match, path in named if match)
    number = 0
    for chunk, path in chunks:
        if chunk >= first:
            for data in _of_chunk(path, offset if chunk == first else 0):
                number += 1
                yield data
    if number != info.get("size", number):
        raise ValueError("it does not hold as many requests as its info.json says")


def _info(directory: Path) -> dict[str, Any]:
    try:
        with opened(directory / "info.json") as file:
            info: dict[str, Any] = json.load(file)
    except FileNotFoundError:
        return {}
    except ValueError:  # a kill while Scrapy wrote it
        return {"size": -1}
    return info


def _of_chunk(path: Path, offset: int) -> Iterator[bytes]:
    end = path.stat().st_size
    with opened(path) as file:
        file.seek(offset)
        while offset < end:
            header = file.read(_LENGTH.size)
            offset += _LENGTH.size
            size = _LENGTH.unpack(header)[0] if len(header) == _LENGTH.size else end
            offset += size
            if offset > end:
                raise ValueError(f"{path.name} is cut off")
            yield file.read(size)


def _of_stack(path: Path) -> Iterator[bytes]:
    """Return the requests of queuelib's LifoDiskQueue: a file in which the data precede a length.

    The file begins with the number of requests at the last clean close. After a kill, the file ends
    within a request, so the end of the last complete request is searched.
    """
    size = path.stat().st_size
    if size <= _LENGTH.size:
        return
    with opened(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        ends: array[int] | None = None
        for end in range(size, max(_LENGTH.size, size - _LONGEST_CUT) - 1, -1):
            if (ends := _ends(data, end)) is not None:
                break
        if ends is None:
            raise ValueError("no request can be found in it")
        begin = _LENGTH.size
        for end in reversed(ends):
            if end > begin:
                yield data[begin:end]
            begin = end + _LENGTH.size
        (number,) = _LENGTH.unpack_from(data)
        if begin != size or number != len(ends):
            raise ValueError("it is cut off, or was not closed")


def _ends(data: mmap.mmap, end: int) -> "array[int] | None":
    """Return the ends of the data of all requests, newest first, if the last length ends at `end`.

    Return None if the lengths do not lead back to the beginning of the file.
    """
    ends = array("Q")
    while end > _LENGTH.size:
        end -= _LENGTH.size
        ends.append(end)
        if end < _LENGTH.size:
            return None
        end -= _LENGTH.unpack_from(data, end)[0]
        # Each serialized request ends with one of these bytes, of pickle or of marshal.
        if len(ends) == 1 and end < ends[0] and data[ends[0] - 1] not in b".0":
            return None
    return ends if end == _LENGTH.size else None

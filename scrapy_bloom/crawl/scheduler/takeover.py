"""Take over the pending requests of Scrapy's own scheduler in a job directory.

The requests are popped from a copy of the queue and written to a draft, which is renamed to the
job's database when it is complete. Then the filter is opened, which detects that the last process
was killed, and last the queue of Scrapy's scheduler is renamed. A process that is killed before the
first rename has changed nothing. After it, the next run finds the digest of the queue among the run
ids of the database, and does not take over the queue again.
"""

import hashlib
import logging
import marshal
import pickle
import re
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

from queuelib.queue import LifoDiskQueue
from scrapy import Request
from scrapy.crawler import Crawler
from scrapy.dupefilters import BaseDupeFilter
from scrapy.utils.misc import load_object
from scrapy.utils.request import request_from_dict

from scrapy_bloom.crawl.dupefilter import BloomDupeFilter
from scrapy_bloom.crawl.fingerprinting import fingerprint_function
from scrapy_bloom.crawl.scheduler.order import serves_least_busy_slot
from scrapy_bloom.crawl.scheduler.stored_requests import StoredRequests
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.files.file import FileGeneration
from scrapy_bloom.job import jobdir
from scrapy_bloom.job.disk import check_file, log_and_index, sync_directory
from scrapy_bloom.job.recovery import Job
from scrapy_bloom.queues.database import JobDatabase
from scrapy_bloom.queues.serialized import serialized, with_line
from scrapy_bloom.queues.store import Entered

logger = logging.getLogger(__name__)

_SLICE = 1000  # requests in a transaction
_NAME = re.compile(r"-?\d+s?")  # the negated priority; "s": start requests
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
    copy = queue.with_name(f"{queue.name}.tmp")
    by_slot = serves_least_busy_slot(crawler)
    try:
        shutil.rmtree(copy, ignore_errors=True)  # of a takeover that was killed
        _remove(draft)
        if not jobdir.has_queued(job):
            return False
        run = _digest(queue)
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
            shutil.copytree(queue, copy, copy_function=shutil.copyfile)
            new = JobDatabase(draft, by_slot=by_slot)
            new.run = run
            with closing(new):
                new.begin()
                if is_new:
                    _begin_run(new, crawler)
                _fill(new, _requests(copy, crawler, df, was_killed=_was_killed(job)))
            if log_and_index(draft)[0].exists():
                raise OSError(f"{draft} could not be written to the disk")
            draft.replace(database)
        finally:
            shutil.rmtree(copy, ignore_errors=True)
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
    """Return an id of the contents of a queue: the names, sizes and times of its files.

    Raises a StorageError if one of them is a link or a pipe.
    """
    digest = hashlib.sha256()
    for file in sorted(queue.rglob("*")):
        check_file(file)
        if file.is_file():
            status = file.stat()
            name = file.relative_to(queue).as_posix()
            digest.update(f"{name!a} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _remove(path: Path) -> None:
    """Remove a database that is only a copy of Scrapy's queue; raises OSError."""
    for part in (path, *log_and_index(path)):
        part.unlink(missing_ok=True)


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

        A request that cannot be deserialized is kept: when it is taken, it is unreadable.
        """
        kept = with_line("", "", data)
        try:
            loads = marshal.loads if data.startswith(_MARSHALLED) else pickle.loads
            as_dict = loads(data)
            kept = serialized(as_dict)
            request = request_from_dict(as_dict, spider=self._spider)  # as Scrapy does it
            page = self._recorded_as(request)
            entered = self._requests.entered(request, page, is_filtered=page is not None, data=kept)
        except Exception:  # noqa: BLE001 - a callback that was renamed, for example
            entered = Entered(kept, is_filtered=False, priority=priority)
        # In the order of Scrapy's pops, and after all requests that are added later to a queue that
        # takes the newest request first.
        return entered._replace(newest_first=False)

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


def _requests(
    copy: Path, crawler: Crawler, df: BaseDupeFilter, *, was_killed: bool
) -> Iterator[Entered]:
    """Pop all requests from a copy of Scrapy's queue.

    Raises a StorageError if a file is damaged, although the last process closed the queue.
    """
    converter, settings = _Converter(crawler, df), crawler.settings
    others = settings["SCHEDULER_DISK_QUEUE"]
    starts = settings["SCHEDULER_START_DISK_QUEUE"] or others
    for file in sorted(path for path in copy.rglob("*") if _NAME.fullmatch(path.name)):
        kind = starts if file.name.endswith("s") else others
        try:
            for data in _popped(file, load_object(kind)):
                yield converter.converted(data, -int(file.name.rstrip("s")))
        except Exception as error:
            if was_killed:  # the crawl starts over with what Scrapy's queue returns
                continue
            queue = copy.with_suffix("")
            raise StorageError(
                f"{queue / file.relative_to(copy)} is damaged, or not a queue of {kind}: {error}; "
                "it was left as it is. Set SCHEDULER_DISK_QUEUE as in the last crawl, restore the "
                f"file from a backup, or remove {queue / 'active.json'}: the crawl then starts "
                "over with the requests that it can read"
            ) from error


def _popped(file: Path, kind: type) -> Iterator[bytes]:
    """Pop the serialized requests of a disk queue; may raise any exception if it is damaged.

    The class of queuelib on which Scrapy's class is based returns them before Scrapy's class
    deserializes them.
    """
    base = next(each for each in kind.__mro__ if each.__module__ == "queuelib.queue")
    with closing(base(file)) as queue:
        if db := vars(queue).get("_db"):  # without syncs, because the file is a copy
            db.executescript("PRAGMA synchronous = OFF; PRAGMA journal_mode = MEMORY")
        while data := queue.pop():
            yield data
        has_rest = base is LifoDiskQueue and file.stat().st_size > LifoDiskQueue.SIZE_SIZE
        if data is not None or len(queue) or has_rest:  # for example zeros, after a power cut
            raise ValueError("it does not hold as many requests as it should")


def _fill(database: JobDatabase, entered: Iterator[Entered]) -> None:
    """Store all requests of a queue, and record them, slice by slice."""
    while some := list(islice(entered, _SLICE)):
        with database.transaction(is_batch=True) as changes:
            changes.insert([changes.new_row(request) for request in some])
            changes.record(one.fingerprint for one in some if one.fingerprint is not None)

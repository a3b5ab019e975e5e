"""Take over the pending requests of Scrapy's own scheduler in a job directory."""

import hashlib
import logging
import marshal
import pickle
import re
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

from queuelib.queue import LifoDiskQueue
from scrapy.crawler import Crawler
from scrapy.dupefilters import BaseDupeFilter
from scrapy.utils.misc import load_object
from scrapy.utils.request import request_from_dict

from scrapy_bloom.crawl.dupefilter import BloomDupeFilter
from scrapy_bloom.crawl.fingerprinting import fingerprint_function
from scrapy_bloom.crawl.scheduler.stored_requests import StoredRequests
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.job import jobdir, scrapys_queue
from scrapy_bloom.job.disk import check_file
from scrapy_bloom.job.reader import was_killed_under_scrapy
from scrapy_bloom.queues.serialized import serialized, with_line
from scrapy_bloom.queues.sqlite_store import SQLiteStore
from scrapy_bloom.queues.store import Entered, Joining, Opened

logger = logging.getLogger(__name__)

_NAME = re.compile(r"-?\d+s?")  # the negated priority; "s": start requests
_MARSHALLED = (b"\x7b", b"\xfb")  # the first byte of a dict; a pickle begins with 0x80


def open_with_scrapys_queue(
    crawler: Crawler, df: BaseDupeFilter, job: Path, store: SQLiteStore, joining: Joining
) -> Opened:
    """Open the store of a job; take over the requests in the queue of Scrapy's scheduler first.

    The caller has locked the job. Raises a BloomError if the store cannot be opened, or the queue
    cannot be read or renamed, or is damaged although Scrapy closed it.
    """
    queue, extra = job / jobdir.QUEUE, {"spider": crawler.spider}
    copy = queue.with_name(f"{queue.name}.tmp")
    shutil.rmtree(copy, ignore_errors=True)  # of a takeover that was killed
    if not scrapys_queue.has_queued(job):
        return store.open(joining)
    was_killed = was_killed_under_scrapy(job)
    try:
        digest = _digest(queue)
        shutil.copytree(queue, copy, copy_function=shutil.copyfile)
        requests = _requests(copy, crawler, df, was_killed=was_killed)
        opened = store.open(joining, digest, requests)
    except (sqlite3.Error, OSError) as error:
        raise StorageError(
            f"the requests in {queue}, the queue of Scrapy's own scheduler, cannot be taken over: "
            f"{error}; the queue was left as it is: fix the cause, or set another JOBDIR"
        ) from error
    finally:
        shutil.rmtree(copy, ignore_errors=True)
    try:
        aside = jobdir.set_aside(queue)
    except OSError as error:
        store.close()
        raise StorageError(
            f"{queue} was taken over, but cannot be renamed: {error.strerror or error}; allow the "
            "crawl to write to the JOBDIR"
        ) from error
    if not isinstance(df, BloomDupeFilter) and was_killed:
        logger.warning(
            "The last process did not close %s: it was killed, or the machine went down. The "
            "requests that could be read are crawled; the spider may find the others again",
            queue,
            extra=extra,
        )
    logger.info(
        "The pending requests of Scrapy's own scheduler are in %s now; its queue was renamed to %s",
        store.name,
        aside,
        extra=extra,
    )
    return opened


def _digest(queue: Path) -> str:
    """Return an id of the names, sizes and times of a queue's files; raises StorageError."""
    digest = hashlib.sha256()
    for file in sorted(queue.rglob("*")):
        check_file(file)  # for links and pipes
        if file.is_file():
            status = file.stat()
            name = file.relative_to(queue).as_posix()
            digest.update(f"{name!a} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _requests(
    copy: Path, crawler: Crawler, df: BaseDupeFilter, *, was_killed: bool
) -> Iterator[Entered]:
    """Pop all requests from a copy of Scrapy's queue; raises a StorageError if it is damaged."""
    queue = copy.with_suffix("")
    logger.info(
        "Taking over the queue of Scrapy's own scheduler in %s",
        queue,
        extra={"spider": crawler.spider},
    )
    assert crawler.request_fingerprinter is not None
    fingerprint = fingerprint_function(crawler.request_fingerprinter)
    settings, stored = crawler.settings, StoredRequests(crawler)
    others = settings["SCHEDULER_DISK_QUEUE"]
    starts = settings["SCHEDULER_START_DISK_QUEUE"] or others

    def convert(data: bytes, priority: int) -> Entered:
        entered = Entered(with_line("", "", data), priority=priority, is_filtered=False)
        # Otherwise, it is unreadable when it is taken: a callback was renamed, for example.
        with suppress(Exception):
            values = (marshal if data.startswith(_MARSHALLED) else pickle).loads(data)
            entered = entered._replace(data=serialized(values))
            request = request_from_dict(values, spider=crawler.spider)  # as Scrapy does it
            is_filtered = isinstance(df, BloomDupeFilter) and not request.dont_filter
            if is_filtered and request.meta.get("bloom_record", True):
                entered = entered._replace(fingerprint=fingerprint(request), is_filtered=True)
            entered = stored.pack(request, entered)
        # In the order of Scrapy's pops, and after all requests that are added later to a queue that
        # takes the newest request first.
        return entered._replace(newest_first=False)

    for file in sorted(path for path in copy.rglob("*") if _NAME.fullmatch(path.name)):
        kind = starts if file.name.endswith("s") else others
        try:
            for data in _pop_all(file, load_object(kind)):
                yield convert(data, -int(file.name.rstrip("s")))
        except Exception as error:
            if was_killed:  # the crawl starts over with what Scrapy's queue returns
                continue
            raise StorageError(
                f"{queue / file.relative_to(copy)} is damaged, or not a queue of {kind}: {error}; "
                "it was left as it is. Set SCHEDULER_DISK_QUEUE as in the last crawl, restore the "
                f"file from a backup, or remove {queue / 'active.json'}: the crawl then starts "
                "over with the requests that it can read"
            ) from error


def _pop_all(file: Path, kind: type) -> Iterator[bytes]:
    """Pop the serialized requests of a disk queue; may raise any exception if it is damaged."""
    # The class of queuelib on which Scrapy's is based returns requests that are not deserialized.
    base = next(base for base in kind.__mro__ if base.__module__ == "queuelib.queue")
    with closing(base(file)) as queue:
        if db := vars(queue).get("_db"):  # without syncs, because the file is a copy
            db.executescript("PRAGMA synchronous = OFF; PRAGMA journal_mode = MEMORY")
        while data := queue.pop():
            yield data
        has_rest = base is LifoDiskQueue and file.stat().st_size > LifoDiskQueue.SIZE_SIZE
        if data is not None or len(queue) or has_rest:  # for example zeros, after a power cut
            raise ValueError("it does not hold as many requests as it should")

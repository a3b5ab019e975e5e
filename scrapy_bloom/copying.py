"""Copy a filter and its queue between job directories and Redis.

The blocks are copied byte for byte. The copy can be used when all of it is written: a filter
without its queue would report the pending requests as duplicates.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeAlias

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.filters.sizing import BLOCK_BYTES
from scrapy_bloom.job import jobdir
from scrapy_bloom.job.disk import log_and_index, sync_directory
from scrapy_bloom.job.file import JobFile, explaining
from scrapy_bloom.job.filter import insert_filter
from scrapy_bloom.job.reader import FilterReader, check_complete
from scrapy_bloom.job.scrapys_queue import has_queued
from scrapy_bloom.queues.inbox import count_handed_over
from scrapy_bloom.queues.redis_queue import RedisQueue
from scrapy_bloom.queues.rows import JobDatabase
from scrapy_bloom.queues.sqlite_queue import SQLiteQueue
from scrapy_bloom.queues.store import MOST_DEATHS, Row, State
from scrapy_bloom.redis import stored
from scrapy_bloom.redis.layout import CHUNK_BLOCKS, bitmap_key, block_key, named_keys
from scrapy_bloom.redis.server import RedisServer
from scrapy_bloom.redis.stored import RedisGeneration, RedisReader
from scrapy_bloom.text import counted

logger = logging.getLogger(__name__)

_LARGEST_POSITION = 2**52
_DRAFT = f"{jobdir.FILE}.copy"
_PARTS = {f"{_DRAFT}{end}" for end in ("", "-wal", "-shm", ".tmp")}


class FileSource(FilterReader):
    """A job directory to be copied, as it is now, with the interface of `RedisSource`.

    A crawl with CrashSafeScheduler may use it meanwhile, or may have been killed. Raises a
    StorageError if a crawl under Scrapy's scheduler uses it or has not closed it, or if requests
    are not queued yet. `done` is the number of requests that have left the queue.
    """

    def __init__(self, job_dir: Path) -> None:
        if added := count_handed_over(job_dir):
            raise StorageError(
                f"{job_dir} has {counted(added, 'request')} that `scrapy bloom add` has handed "
                "over, and that no crawl has queued yet: resume the job for a moment first"
            )
        path = job_dir / jobdir.FILE
        # SQLite keeps no snapshot of a file without a log: that of a job that was closed.
        self._changed_at = None if log_and_index(path)[0].exists() else _changed_at(path)
        super().__init__(path, is_snapshot=True)
        with ExitStack() as stack:
            stack.callback(self.close)
            check_complete(self.db, path, may_be_open=True)
            self._queue = SQLiteQueue(path, self.db)
            self.done = self._queue.status().done
            if has_queued(job_dir):
                logger.warning(
                    "Scrapy's own queue in %s has pending requests, which are not copied. A crawl "
                    "with the copy skips them as duplicates: let that crawl finish first, and make "
                    "the copy again",
                    job_dir,
                )
            stack.pop_all()

    def requests(self) -> Iterator[Row]:
        """Return the requests of the queue, after the blocks; check at the end what was read."""
        with explaining(self.path):
            for state in State:
                yield from self._queue.requests(state)
        if self._changed_at not in (None, _changed_at(self.path)):
            raise _used_meanwhile(self.location)


def _changed_at(path: Path) -> int:
    with explaining(path):
        return path.stat().st_mtime_ns


class RedisSource(RedisReader):
    """A filter in Redis to be copied, with its queue, which no worker may use.

    Crawls with another scheduler may use the filter meanwhile. A copy may lack what they record.
    """

    def __init__(self, server: RedisServer, key: str) -> None:
        self._queue = RedisQueue(server, key)
        self._status = self._queue.find_unused("copied")
        self.done = self._status.done if self._status else 0
        super().__init__(server, key)

    def requests(self) -> Iterator[Row]:
        """Return each request once, also if a script that failed half-way left it in two sets.

        At the end, raise a StorageError if a worker has used the queue meanwhile: it may have moved
        a request from a set that was not read yet into one that was.
        """
        if self._status is None:
            return
        known, number = set(), 0
        for state in reversed(State):  # the largest set comes last
            for request in self._queue.requests(state):
                number += 1
                if (request.position, request.data) in known:
                    continue
                if state is not State.PENDING:
                    known.add((request.position, request.data))
                most = MOST_DEATHS - (state is not State.SUSPECT)
                yield request._replace(deaths=min(request.deaths, most))
        now = self._queue.find_unused("copied")
        if now is None or (now.total, now.done) != (number, self.done):
            raise _used_meanwhile(self.location)


Source: TypeAlias = FileSource | RedisSource


def _used_meanwhile(location: str) -> StorageError:
    return StorageError(
        f"a crawl has used {location} meanwhile; nothing was copied. Stop the crawl, and try again"
    )


def copy_to_job(source: Source, path: Path) -> int:
    """Copy a filter and its queue into a new job directory; return how many requests it has.

    Requests that were in flight are pending in the copy. The next crawl runs the spider's start()
    again, like each run of a job. Raises a StorageError if the source has lost parts, the directory
    exists, or there is no room. The incomplete copy was removed then.
    """
    draft = path / _DRAFT
    with jobdir.no_new_directory(path), explaining(draft), ExitStack() as stack:
        _check_vacant(path)
        stack.callback(jobdir.lock_job(path).release)
        _check_vacant(path)  # another copy may have ended meanwhile
        _remove_draft(path)  # of a copy that was killed
        stack.callback(_remove_draft, path)
        queued = _write_file(source, draft)
        draft.rename(path / jobdir.FILE)
        sync_directory(path)
        sync_directory(path.parent)
    return queued


def _check_vacant(job_dir: Path) -> None:
    """Raise a StorageError unless a directory is missing, or has at most parts of a copy."""
    is_directory = job_dir.is_dir() and not job_dir.is_symlink()
    files = {file.name for file in job_dir.iterdir()} if is_directory else set()
    if os.path.lexists(job_dir) and not (is_directory and files <= {jobdir.LOCK_NAME, *_PARTS}):
        raise StorageError(
            f"{job_dir} exists already; nothing was changed. Give a directory that does not exist "
            "yet"
        )


def _remove_draft(job_dir: Path) -> None:
    for name in _PARTS:
        (job_dir / name).unlink(missing_ok=True)


def _write_file(source: Source, path: Path) -> int:
    file = JobFile(path)
    try:
        with file.step():
            insert_filter(file.execute, source.origin, source.generations)
            for index, generation in enumerate(source.generations):
                for number, bits in enumerate(_pieces(source.blocks(index), BLOCK_BYTES)):
                    if any(bits):
                        row = (generation.number, number, bits)
                        file.execute("INSERT INTO blocks VALUES (?, ?, ?)", row)
        with JobDatabase(file).transaction() as changes:
            return changes.copy(_rows(source))
    finally:
        file.close()


def copy_to_redis(source: Source, server: RedisServer, key: str) -> int:
    """Copy a filter and its queue to a new key, as `copy_to_job` copies them into a directory.

    Until all is written, the filter has a field that makes crawls and commands refuse it.
    """
    copied = [RedisGeneration(**vars(figures)) for figures in source.generations]
    known = None
    if stored.read_stored(server, key) is None:
        known = stored.create(server, key, source.origin, copied, copying="1")
    if known is None:
        raise StorageError(
            f"{server.address} has a filter {key!r} already; nothing was changed. Give another "
            "key, or remove that filter first"
        )
    try:
        return _fill(source, server, key, known, copied)
    except BaseException:
        server.forget_outage()
        with suppress(StorageError):  # otherwise `scrapy bloom reset` removes it
            stored.remove_filter(server, key, known[0])
            stored.remove_blocks(server, key, [generation.id for generation in copied])
        raise


def _fill(
    source: Source,
    server: RedisServer,
    key: str,
    known: tuple[str, str],
    copied: Sequence[RedisGeneration],
) -> int:
    """Write the parts of a copy, and have it used; return how many requests it has."""
    sizes: dict[tuple[str, str], int] = {}  # the answers of the commands that count what is there
    for index, generation in enumerate(copied):
        chunks = _pieces(source.blocks(index), CHUNK_BLOCKS * BLOCK_BYTES)
        number = _write_chunks(server, key, generation, chunks)
        sizes["BITCOUNT", bitmap_key(key, generation.id)] = number + 1
    queued, last = RedisQueue(server, key).load(known[0], _rows(source))
    fields = {}
    if queued:
        sizes["HLEN", named_keys(key)["rows"]] = queued
        counters = {"pushed": source.done + queued, "done": source.done, "epoch": 1}
        counters["numbered"] = max(queued, last)
        fields = {name: str(value) for name, value in counters.items()}
        if source.origin.spider:
            fields["crawl"] = source.origin.spider
    is_complete = server.transaction([*sizes]) == [*sizes.values()]
    if not is_complete or stored.change(server, key, known, fields, removed=["copying"]) != "ok":
        raise StorageError(
            f"{server.address}: the copy {key!r} was removed meanwhile, or the server has lost a "
            "part of it; the rest of it was removed. Try again"
        )
    return queued


def _write_chunks(
    server: RedisServer, key: str, new: RedisGeneration, chunks: Iterable[bytes]
) -> int:
    """Write the keys of a generation that have bits, and return their number."""
    made = 0
    for chunk, data in enumerate(chunks):
        if any(data):
            # First, so that all keys are removed if the copy fails.
            server.send("SETBIT", bitmap_key(key, new.id), chunk, 1)
            server.send("SET", block_key(key, new.id, chunk), data)
            made += 1
    return made


def _pieces(blocks: Iterable[bytes], size: int) -> Iterator[bytes]:
    """Return the same bytes in pieces of a size, the last of which may be shorter."""
    rest = b""
    for some in blocks:
        rest += some
        while len(rest) >= size:
            yield rest[:size]
            rest = rest[size:]
    if rest:
        yield rest


def _rows(source: Source) -> Iterator[Row]:
    """Return the rows of a queue; raise a StorageError if a position is not one of ours."""
    for row in source.requests():
        if not 0 < abs(row.position) < _LARGEST_POSITION:
            raise StorageError(
                f"the queue of this filter is damaged: a request has the position "
                f"{row.position:,}; nothing was copied"
            )
        is_unreadable = row.state is State.UNREADABLE  # it may be readable there
        yield row._replace(state=State.PENDING) if is_unreadable else row

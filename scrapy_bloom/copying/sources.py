"""Read a filter and its queue for a copy, from a job directory or from Redis.

Both classes have the same attributes and methods. `origin` is what all generations share, with
the salt; `generations` are their figures, oldest first; `done` says how many requests have left
the queue of CrashSafeScheduler, and `name` is that of the place, for messages.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TypeAlias

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.generations.policy import Generation
from scrapy_bloom.job import jobdir
from scrapy_bloom.job.disk import log_and_index
from scrapy_bloom.job.file import explaining
from scrapy_bloom.job.reader import FilterReader, check_complete
from scrapy_bloom.job.scrapys_queue import has_queued
from scrapy_bloom.queues.inbox import count_handed_over
from scrapy_bloom.queues.redis_queue import RedisQueue, read_unused
from scrapy_bloom.queues.sqlite_queue import SQLiteQueue
from scrapy_bloom.queues.store import MOST_DEATHS, Row, State
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.layout import CHUNK_BLOCKS
from scrapy_bloom.redis.stored import chunks, read_existing
from scrapy_bloom.text import counted


class FileSource:
    """A job directory, as it is now.

    A crawl with CrashSafeScheduler may use it meanwhile, or may have been killed. Raises a
    StorageError if a crawl under Scrapy's scheduler uses it or has not closed it, or if requests
    are not queued yet.
    """

    def __init__(self, job_dir: Path) -> None:
        self.name, self._path = str(job_dir), job_dir / jobdir.FILE
        if added := count_handed_over(job_dir):
            raise StorageError(
                f"{job_dir} has {counted(added, 'request')} that `scrapy bloom add` has handed "
                "over, and that no crawl has queued yet: resume the job for a moment first"
            )
        # SQLite keeps no snapshot of a file without a log: that of a job that was closed.
        self._changed_at = None if log_and_index(self._path)[0].exists() else self._mtime()
        self._reader = FilterReader(self._path, is_snapshot=True)
        try:
            check_complete(self._reader.db, self._path, may_be_open=True)
            self._queue = SQLiteQueue(self._path, self._reader.db)
            self.done = self._queue.status().done
        except BaseException:
            self.close()
            raise
        self.has_scrapys_queue = has_queued(job_dir)  # which is not copied
        self.origin = self._reader.origin
        self.generations: Sequence[Generation] = self._reader.generations

    def _mtime(self) -> int:
        with explaining(self._path):
            return self._path.stat().st_mtime_ns

    def chunks(self, index: int) -> Iterator[bytes]:
        """Return the blocks of a generation, 15 at a time, as keys in Redis have them."""
        blocks = self._reader.blocks(index)
        while chunk := b"".join(islice(blocks, CHUNK_BLOCKS)):
            yield chunk

    def requests(self) -> Iterator[Row]:
        """Return the requests of the queue, after the blocks; check at the end what was read."""
        with explaining(self._path):
            for state in State:
                yield from self._queue.requests(state)
        if self._changed_at not in (None, self._mtime()):
            raise _used_meanwhile(self.name)

    def close(self) -> None:
        """Close the file."""
        self._reader.close()


class RedisSource:
    """A filter in Redis, with its queue, which no worker may use.

    Crawls with another scheduler may use the filter meanwhile. A copy may lack what they record.
    """

    has_scrapys_queue = False

    def __init__(self, server: RedisServer, key: str) -> None:
        self._place = server, key
        self.name = f"{key} in {server.address}"
        self._state = read_unused(*self._place, "copied")
        self.done = self._state.done if self._state else 0
        stored = read_existing(server, key)
        self.origin = stored.origin
        self.generations = stored.generations

    def chunks(self, index: int) -> Iterator[bytes]:
        """Return the blocks of a generation, 15 at a time."""
        return chunks(*self._place, self.generations[index])

    def requests(self) -> Iterator[Row]:
        """Return each request once, also if a script that failed half-way left it in two sets.

        At the end, raise a StorageError if a worker has used the queue meanwhile: it may have moved
        a request from a set that was not read yet into one that was.
        """
        if (before := self._state) is None:
            return
        known, number = set(), 0
        queue = RedisQueue(*self._place)
        for state in reversed(State):  # the largest set comes last
            for request in queue.requests(state):
                number += 1
                if (request.position, request.data) in known:
                    continue
                if state is not State.PENDING:
                    known.add((request.position, request.data))
                if state is not State.SUSPECT:
                    request.deaths = min(request.deaths, MOST_DEATHS - 1)
                yield request
        now = read_unused(*self._place, "copied")
        if now is None or (now.total, now.done) != (number, before.done):
            raise _used_meanwhile(self.name)


def _used_meanwhile(name: str) -> StorageError:
    return StorageError(
        f"a crawl has used {name} meanwhile; nothing was copied. Stop the crawl, and try again"
    )


Source: TypeAlias = FileSource | RedisSource

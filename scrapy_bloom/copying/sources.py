"""Read a filter and its queue for a copy, from a job directory or from Redis.

Both classes have the same attributes and methods. `origin` is what all generations share, with
the salt; `generations` are their figures, oldest first; `queued` says how many requests are in the
queue of CrashSafeScheduler, `done` how many have left it, and `name` is that of the place, for
messages.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.files.directory import FilterReader, check_closed, filter_directory
from scrapy_bloom.generations.policy import Generation
from scrapy_bloom.job import jobdir
from scrapy_bloom.queues.database import unusable
from scrapy_bloom.queues.handed_over import count_handed_over
from scrapy_bloom.queues.redis_queue import RedisQueue, read_unused
from scrapy_bloom.queues.sqlite_queue import SQLiteQueue
from scrapy_bloom.queues.store import MOST_DEATHS, Row, State
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.layout import CHUNK_BLOCKS
from scrapy_bloom.redis.stored import chunks, read_existing
from scrapy_bloom.text import counted


class FileSource:
    """A filter in files, with the queue of its job; both are locked until `close`.

    Args:
        path: a job directory with a filter, or the directory of a filter.

    Raises:
        StorageError: or one of its children: there is no filter, or it is damaged, in use, or was
            not closed; or the queue is damaged, or lacks requests.
    """

    def __init__(self, path: Path) -> None:
        directory = filter_directory(path)
        if not jobdir.filter_files(directory):
            raise StorageError(
                f"{path} holds no filter; give a JOBDIR, or a directory with the files of a filter"
            )
        job_dir = directory.parent if directory.name == "bloom" else directory
        self.name = str(job_dir)
        with ExitStack() as stack:
            stack.callback(jobdir.lock_directory(directory).release)  # also the lock of the job
            self._reader = stack.enter_context(closing(FilterReader(directory)))
            check_closed(directory, self._reader.files)
            if added := count_handed_over(job_dir):
                raise StorageError(
                    f"{job_dir} has {counted(added, 'request')} that `scrapy bloom add` has "
                    "handed over, and that no crawl has queued yet: resume the job for a moment "
                    "first"
                )
            self._database = job_dir / jobdir.DATABASE
            self.queued = self.done = 0
            if self._database.exists():
                # Without its queue, the copy would report the lost requests as duplicates.
                if not jobdir.is_database(self._database):
                    raise unusable(self._database, "it is empty, or no queue of CrashSafeScheduler")
                queue = SQLiteQueue(self._database)
                self.queued = sum(queue.counts().values())
                self.done = queue.progress().done
            self._stack = stack.pop_all()
        self.has_scrapys_queue = jobdir.has_queued(job_dir)  # which is not copied
        self.origin = self._reader.files[-1].origin
        self.generations: Sequence[Generation] = self._reader.generations

    def chunks(self, index: int) -> Iterator[bytes]:
        """Return the blocks of a generation, 15 at a time, as keys in Redis have them."""
        bits = self._reader.files[index].filter
        for start in range(0, bits.num_blocks, CHUNK_BLOCKS):
            yield bytes(bits.blocks(start, start + CHUNK_BLOCKS))

    def requests(self) -> Iterator[Row]:
        """Return the requests of the queue."""
        for state in State:
            yield from SQLiteQueue(self._database).requests(state)

    def close(self) -> None:
        """Unmap the files, and release the lock."""
        self._stack.close()


class RedisSource:
    """A filter in Redis, with its queue, which no worker may use.

    Crawls with another scheduler may use the filter meanwhile. A copy may lack what they record.

    Args:
        server: the connection, which `close` leaves open.
        key: the key of the filter.

    Raises:
        StorageError: or one of its children: the server has no such filter, has lost parts of it,
            or workers use the queue.
    """

    has_scrapys_queue = False

    def __init__(self, server: RedisServer, key: str) -> None:
        self._place = server, key
        self.name = f"{key} in {server.address}"
        self._state = state = read_unused(*self._place, "copied")
        self.queued, self.done = (state.total, state.done) if state else (0, 0)
        stored = read_existing(server, key)
        self.origin = stored.origin
        self._stored = stored.generations
        self.generations = [each.figures for each in stored.generations]

    def chunks(self, index: int) -> Iterator[bytes]:
        """Return the blocks of a generation, 15 at a time."""
        return chunks(*self._place, self._stored[index])

    def requests(self) -> Iterator[Row]:
        """Return each request once, also if a script that failed half-way left it in two sets.

        At the end, raise a StorageError if a worker has used the queue meanwhile: it may have moved
        a request from a set that was not read yet into one that was.
        """
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
        now, before = read_unused(*self._place, "copied"), self._state
        if before is None or now is None or (now.total, now.done) != (number, before.done):
            raise StorageError(
                f"a worker has used the queue {self.name} meanwhile; nothing was copied. Stop the "
                "workers, and try again"
            )


Source = FileSource | RedisSource

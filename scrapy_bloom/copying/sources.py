"""Read a filter and its queue for a copy: from a job directory, from Redis, or merged.

The three classes have the same attributes and methods. `origin` is what all generations share, with
the salt; `generations` are their figures, oldest first; `queued` says how many requests are in the
queue of CrashSafeScheduler, and `name` is that of the place, for messages.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import combinations, zip_longest
from pathlib import Path

from scrapy_bloom.exceptions import (
    FingerprinterMismatchError,
    GeometryMismatchError,
    StorageError,
)
from scrapy_bloom.files.directory import FilterReader, check_closed, filter_directory
from scrapy_bloom.filters.sizing import Contents, block_fills
from scrapy_bloom.generations.policy import Generation
from scrapy_bloom.job import jobdir
from scrapy_bloom.queues.database import unusable
from scrapy_bloom.queues.handed_over import count_handed_over
from scrapy_bloom.queues.redis_queue import RedisQueue, read_unused
from scrapy_bloom.queues.sqlite_queue import SQLiteQueue
from scrapy_bloom.queues.store import MOST_DEATHS, State, Stored
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.scripts import CHUNK_BLOCKS
from scrapy_bloom.redis.stored import chunks, read_existing
from scrapy_bloom.text import counted

NEWEST_FIRST = 2**53  # minus a number: a position in Redis, if the newest comes first


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
            self.queued = self._count_queued()
            self._stack = stack.pop_all()
        self.has_scrapys_queue = jobdir.has_queued(job_dir)  # which is not copied
        self.origin = self._reader.files[-1].origin
        self.generations: Sequence[Generation] = self._reader.generations

    def _count_queued(self) -> int:
        """Count the requests in the database of the job.

        Raises StorageError if the file is not a database of ours, or is damaged: the copied filter
        would report the lost requests as duplicates.
        """
        if not self._database.exists():
            return 0
        if not jobdir.is_database(self._database):
            raise unusable(self._database, "it is empty, or no queue of CrashSafeScheduler")
        return sum(SQLiteQueue(self._database).counts().values())

    def chunks(self, index: int) -> Iterator[bytes]:
        """Return the blocks of a generation, 127 at a time, as keys in Redis have them."""
        bits = self._reader.files[index].filter
        for start in range(0, bits.num_blocks, CHUNK_BLOCKS):
            yield bytes(bits.blocks(start, start + CHUNK_BLOCKS))

    def requests(self) -> Iterator[Stored]:
        """Return the requests of the queue, with positions as `write_requests` takes them."""
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
        self._state = read_unused(*self._place, "copied")
        self.queued = self._state.total if self._state else 0
        stored = read_existing(server, key)
        self.origin = stored.origin
        self._stored = stored.generations
        self.generations = [each.figures for each in stored.generations]

    def chunks(self, index: int) -> Iterator[bytes]:
        """Return the blocks of a generation, 127 at a time."""
        return chunks(*self._place, self._stored[index])

    def requests(self) -> Iterator[Stored]:
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
                position, deaths = request.position, request.deaths
                if position > NEWEST_FIRST // 2:
                    position -= NEWEST_FIRST
                if state is not State.SUSPECT:
                    deaths = min(deaths, MOST_DEATHS - 1)
                yield request._replace(position=position, deaths=deaths)
        now, before = read_unused(*self._place, "copied"), self._state
        if before is None or now is None or (now.total, now.done) != (number, before.done):
            raise StorageError(
                f"a worker has used the queue {self.name} meanwhile; nothing was copied. Stop the "
                "workers, and try again"
            )

    def close(self) -> None:
        """Do nothing, because the caller has made the connection."""


class MergedSource:
    """The requests that any of several filters has; without their queues.

    Args:
        sources: at least two filters, which the caller closes.

    Raises:
        GeometryMismatchError: sizes, hashes or salts differ, or a filter has a window.
        FingerprinterMismatchError: their fingerprints cannot be compared.
    """

    queued = 0

    def __init__(self, sources: Sequence[FileSource | RedisSource]) -> None:
        self._sources = sources
        self.origin = sources[0].origin
        _check_alike(sources)
        self.generations = [
            self._merged(index, [each for each in parts if each is not None])
            for index, parts in enumerate(zip_longest(*(each.generations for each in sources)))
        ]

    def _merged(self, index: int, parts: Sequence[Generation]) -> Generation:
        count = parts[0].count
        if len(parts) > 1:  # an estimate from the bits, and at least that of each part
            fills = (fill for data in self.chunks(index) for fill in block_fills(data))
            requests = Contents.of(fills, parts[0].geometry.num_hashes).requests
            count = max(requests, *(each.count for each in parts))
        created_at = min(each.created_at for each in parts)
        return replace(parts[0], created_at=created_at, count=count)

    def chunks(self, index: int) -> Iterator[bytes]:
        """Return the merged blocks of a generation, 127 at a time."""
        parts = [each.chunks(index) for each in self._sources if index < len(each.generations)]
        for alike in zip(*parts, strict=True):
            bits = 0
            for data in alike:
                bits |= int.from_bytes(data, "little")
            yield bits.to_bytes(len(alike[0]), "little")

    def requests(self) -> Iterator[Stored]:
        """Return nothing, because queues cannot be merged."""
        return iter(())


Source = FileSource | RedisSource | MergedSource


def _check_alike(sources: Sequence[FileSource | RedisSource]) -> None:
    for source in sources:
        if any(each.open_until for each in source.generations):
            raise GeometryMismatchError(
                f"{source.name} has a time window (BLOOM_WINDOW_SECS): its generations end at "
                "different times, so they cannot be merged"
            )
    for one, other in combinations(sources, 2):
        names = [each.origin.fingerprinter for each in (one, other)]
        if names[0] != names[1]:
            raise FingerprinterMismatchError(
                f"the filters were recorded with different REQUEST_FINGERPRINTER_CLASS: "
                f"{names[0]!r} and {names[1]!r}; only the same requests with the same fingerprints "
                "can be merged"
            )
        pairs = zip(one.generations, other.generations, strict=False)
        differ = "the salts" if one.origin.salt != other.origin.salt else ""
        if any(ours.geometry != theirs.geometry for ours, theirs in pairs):
            differ = "the sizes of their generations"
        if differ:
            raise GeometryMismatchError(
                f"{one.name} and {other.name} cannot be merged: {differ} differ. Create both with "
                "the same BLOOM_EXPECTED_REQUESTS, BLOOM_ERROR_RATE and BLOOM_SALT (see `scrapy "
                "bloom info`), for example from their sources with `scrapy bloom import`"
            )

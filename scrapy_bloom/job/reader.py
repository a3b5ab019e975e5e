"""Read the filter in the file of a job from outside its crawl: lock and change nothing."""

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path

from scrapy_bloom.exceptions import StorageError, UncleanShutdownError
from scrapy_bloom.filters.sizing import BLOCK_BYTES, block_fills
from scrapy_bloom.generations.memory import Lookup
from scrapy_bloom.job import jobdir, scrapys_queue
from scrapy_bloom.job.disk import log_and_index
from scrapy_bloom.job.file import explaining, identity, reading, typed
from scrapy_bloom.job.filter import block_loader, filter_of, stored_filter, unpack_fingerprints

_EMPTY = bytes(BLOCK_BYTES)


def has_filter(path: Path) -> bool:
    """Return whether a file is that of a job with a filter, which may be damaged."""
    if not jobdir.is_database(path):
        return False
    with reading(path) as db:
        return bool(db.execute("SELECT count(*) FROM generations").fetchone()[0])


def was_killed_under_scrapy(job_dir: Path) -> bool:
    """Return whether the last crawl with a job, under Scrapy's scheduler, was killed."""
    path, stored, in_use = job_dir / jobdir.FILE, None, False
    if jobdir.is_database(path):
        with reading(path) as db:
            stored = stored_filter(db.execute)
            (in_use,) = db.execute("SELECT in_use FROM job").fetchone()
    return bool(in_use) or scrapys_queue.was_killed(job_dir, has_filter=stored is not None)


def check_free(job_dir: Path) -> None:
    """Raise a StorageError if a crawl uses a job, or was killed with it; it need not exist."""
    if (job_dir / jobdir.LOCK_NAME).exists():
        jobdir.lock_job(job_dir).release()  # first, for the clearest message if a crawl runs
    if jobdir.is_database(path := job_dir / jobdir.FILE):
        with reading(path) as db:
            check_complete(db, path, may_be_open=False)
    if was_killed_under_scrapy(job_dir):
        raise UncleanShutdownError(
            f"the crawl with the job directory {job_dir} was killed: the filter would report the "
            "requests of its queue as duplicates, and they would never be crawled. Start that "
            "crawl again, and it will recover; or use another directory"
        )


def check_complete(db: sqlite3.Connection, path: Path, *, may_be_open: bool) -> None:
    """Raise an UncleanShutdownError if a file may lack requests that its filter has recorded.

    Args:
        db: a connection for reading.
        path: the file.
        may_be_open: whether a crawl with CrashSafeScheduler may use the file, or have been killed.
    """
    query = "SELECT opened_as, in_use, run IS NOT NULL FROM job"
    opened_as, in_use, has_queue = typed(db.execute(query).fetchone(), str, int, int)
    is_copy = not opened_as.startswith(identity(path)) or not log_and_index(path)[0].exists()
    if opened_as and (in_use or is_copy or (has_queue and not may_be_open)):
        raise UncleanShutdownError(
            f"{path} is in use by a crawl, or its last crawl did not close it: it may report "
            "requests as duplicates that were queued and never crawled. Wait for the crawl to end; "
            "or start it again, and it will recover"
        )


class FilterReader:
    """A filter in the file of a job: the reader locks and changes nothing.

    While a crawl runs, the reader has what was recorded when it was opened, and may have some of
    what is recorded later. `RedisReader` has the same methods.

    Args:
        path: the file.
        is_snapshot: whether to read all of it as it is now. Meanwhile, a crawl cannot shorten the
            log of the file.

    Raises:
        StorageError: there is no filter, or it is damaged.
    """

    def __init__(self, path: Path, *, is_snapshot: bool = False) -> None:
        self.path = path
        self.location = str(path.parent.absolute())
        with contextlib.ExitStack() as stack:
            self.db = stack.enter_context(reading(path))
            stored = stored_filter(self.db.execute)
            if stored is None:
                raise StorageError(f"{path} holds no filter yet: a crawl with this JOBDIR makes it")
            (opened_as,) = typed(self.db.execute("SELECT opened_as FROM job").fetchone(), str)
            if not is_snapshot:
                self.db.execute("COMMIT")
            self._stack = stack.pop_all()
        self.is_closed = not opened_as  # by the last crawl
        self.origin, self.generations = stored.origin, stored.generations
        self.spider, self.fingerprinter = self.origin.spider, self.origin.fingerprinter
        self.error_rate = self.origin.error_rate  # BLOOM_ERROR_RATE of the crawl that made it
        self._filters = [
            filter_of(each, self.origin.salt, self.db.execute, path) for each in self.generations
        ]

    def _ops(self) -> Iterator[tuple[int, list[bytes]]]:
        """Yield fingerprints that the blocks may lack, and their generation."""
        for row in self.db.execute("SELECT generation, fingerprints FROM ops"):
            generation, data = typed(row, int, bytes)
            yield generation, unpack_fingerprints(data)

    @cached_property
    def _lookup(self) -> Lookup:
        return Lookup(self._filters)

    @cached_property
    def _recent(self) -> set[bytes]:
        return {each for _, fingerprints in self._ops() for each in fingerprints}

    def are_seen(self, fingerprints: Sequence[bytes]) -> list[bool]:
        """Return which fingerprints are recorded, with false positives."""
        with explaining(self.path):
            return [each in self._recent or each in self._lookup for each in fingerprints]

    def replay(self) -> None:
        """Add the fingerprints that the blocks may lack, for `blocks`."""
        filters = dict(zip((each.number for each in self.generations), self._filters, strict=True))
        with explaining(self.path):
            for generation, fingerprints in self._ops():
                for each in fingerprints if generation in filters else ():
                    filters[generation].add(each)

    def blocks(self, index: int) -> Iterator[bytes]:
        """Yield the blocks of a generation, without keeping them in memory."""
        bits, number = self._filters[index], self.generations[index].number
        load = block_loader(self.db.execute, self.path, number)
        for block in range(bits.num_blocks):
            changed = bits.changed[block]
            yield bytes(bits.blocks(block, block + 1)) if changed else load(block) or _EMPTY

    def block_fills(self) -> list[Iterator[float]]:
        """Return for each generation the share of set bits of each of its blocks, 0 to 1."""
        return [
            chain.from_iterable(map(block_fills, self.blocks(index)))
            for index in range(len(self.generations))
        ]

    @property
    def is_in_use(self) -> bool | None:
        """Return whether a crawl uses the filter now; None if unknown."""
        found = jobdir.holders(self.path.with_name(jobdir.LOCK_NAME))
        return None if found is None else bool(found)

    def close(self) -> None:
        """Close the file."""
        self._stack.close()

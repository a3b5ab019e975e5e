"""Read the filter in the file of a job from outside its crawl: lock and change nothing."""

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

from scrapy_bloom.exceptions import StorageError, UncleanShutdownError
from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.filters.sizing import BLOCK_BYTES
from scrapy_bloom.generations.memory import Lookup
from scrapy_bloom.job import jobdir, scrapys_queue
from scrapy_bloom.job.disk import limit_steps, log_and_index
from scrapy_bloom.job.file import explaining, identity, reading, typed
from scrapy_bloom.job.filter import block_loader, stored_filter, with_bits

_EMPTY = bytes(BLOCK_BYTES)
_FEW_BLOCKS = 10_000  # are found in few steps


def has_filter(path: Path) -> bool:
    """Return whether a file is that of a job with a filter, which may be damaged."""
    if not jobdir.is_database(path):
        return False
    with reading(path) as db:
        return db.execute("SELECT 1 FROM generations LIMIT 1").fetchone() is not None


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

    A crawl with CrashSafeScheduler may use it, or have been killed, only if it `may_be_open`.
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
        self._stored = stored
        self.origin, self.generations = stored.origin, stored.generations

    @cached_property
    def _filters(self) -> Sequence[BloomFilter]:
        with explaining(self.path):
            generations = with_bits(self._stored, self.db.execute, self.path)
        return [generation.filter for generation in generations]

    def are_seen(self, fingerprints: Sequence[bytes]) -> list[bool]:
        """Return which fingerprints are recorded, with false positives."""
        lookup = Lookup(self.origin.salt, self.generations, self._filters)
        with explaining(self.path):
            limit_steps(self.db, self.path)  # again, for there is no limit of fingerprints
            return [fingerprint in lookup for fingerprint in fingerprints]

    def blocks(self, index: int) -> Iterator[bytes]:
        """Yield the blocks of a generation, without keeping them in memory."""
        bits, number = self._filters[index], self.generations[index].number
        load = block_loader(self.db.execute, self.path, number)
        for block in range(bits.num_blocks):
            if block % _FEW_BLOCKS == 0:
                limit_steps(self.db, self.path)  # again: an empty filter is small, with many blocks
            changed = bits.changed[block]
            yield bytes(bits.blocks(block, block + 1)) if changed else load(block) or _EMPTY

    @property
    def is_in_use(self) -> bool | None:
        """Return whether a crawl uses the filter now; None if unknown."""
        found = jobdir.holders(self.path.with_name(jobdir.LOCK_NAME))
        return None if found is None else bool(found)

    def close(self) -> None:
        """Close the file."""
        self._stack.close()

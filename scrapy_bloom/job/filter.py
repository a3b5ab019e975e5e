"""The filter in the file of a job.

The bits are in memory. A block is read from the file when it is first needed, and a thread writes
the changed ones, so space and memory grow with the crawl.

With CrashSafeScheduler, each transaction also has the fingerprints of its batch (table `ops`),
until they are in the blocks. Under Scrapy's scheduler, there are none, because after a kill the
crawl starts over anyway.
"""

import contextlib
import logging
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from scrapy_bloom.exceptions import FingerprinterMismatchError
from scrapy_bloom.filters.bloom import BloomFilter, Load
from scrapy_bloom.filters.hashing import HASH_SCHEME
from scrapy_bloom.filters.sizing import BLOCK_BYTES, Geometry
from scrapy_bloom.generations.memory import LocalGeneration, MemoryBackend
from scrapy_bloom.generations.policy import (
    Generation,
    NoRoomError,
    Origin,
    Policy,
    check_generation,
    with_headroom,
)
from scrapy_bloom.job import jobdir, scrapys_queue
from scrapy_bloom.job.disk import sync_tree
from scrapy_bloom.job.file import JobFile, explaining, stored_text, transaction, typed, unusable
from scrapy_bloom.job.requests_seen import SeenFile, import_seen
from scrapy_bloom.text import size_text

logger = logging.getLogger(__name__)

Execute = Callable[..., sqlite3.Cursor]  # of a connection, or of the file of a job
_LENGTH_BYTES = 4
_OP_BYTES = _LENGTH_BYTES + 20  # of a fingerprint of Scrapy's in the table `ops`
_MOST_AT_CLOSE = 8192  # blocks (64 MB) that a close writes, so that nothing need be replayed
_WRITTEN_AT_ONCE = 64  # blocks in a transaction of the thread, which delays others by some ms
_PAUSE_SECS = 0.002  # between two of them, so that others need not wait for several
_DELETED_AT_ONCE = 100  # rows in a transaction
_MOST_GENERATIONS = 1000  # more than any filter has: a hostile file may have rows without an end
_FIGURES = ("capacity", "error_rate", "first_run", "last_run", "count")
_GENERATION = (int, int, int, int, float, float, float, int)  # the types of its columns
_UPDATE = "UPDATE generations SET count = ?, last_run = ? WHERE number = ?"
_WRITE = "INSERT OR REPLACE INTO blocks VALUES (?, ?, ?)"


def pack_fingerprints(fingerprints: Iterable[bytes]) -> bytes:
    """Serialize fingerprints.

    >>> unpack_fingerprints(pack_fingerprints([b"page 1", b"page 2"]))
    [b'page 1', b'page 2']
    """
    return b"".join(len(page).to_bytes(_LENGTH_BYTES, "big") + page for page in fingerprints)


def unpack_fingerprints(data: bytes) -> list[bytes]:
    """Deserialize what `pack_fingerprints` serialized; raises ValueError if damaged."""
    fingerprints = []
    end = 0
    while end < len(data):
        begin = end + _LENGTH_BYTES
        end = begin + int.from_bytes(data[end:begin], "big")
        if end > len(data):
            raise ValueError("its fingerprints of the filter are damaged")
        fingerprints.append(data[begin:end])
    return fingerprints


class StoredFilter(NamedTuple):
    """The figures of a filter in a file: what all generations share, and each, oldest first."""

    origin: Origin
    sample: str
    generations: Sequence[Generation]


def stored_filter(execute: Execute) -> StoredFilter | None:
    """Read and check the figures of a filter; None if there is none.

    Raises sqlite3.Error or, if they are damaged, ValueError.
    """
    query = "SELECT * FROM generations ORDER BY number"
    rows = execute(query).fetchmany(_MOST_GENERATIONS)
    row = execute("SELECT * FROM filter").fetchone()
    if not rows or row is None:
        return None
    scheme, salt, fingerprinter, spider, asked, sample = typed(
        row, int, bytes, str, str, float, str
    )
    if scheme != HASH_SCHEME:
        raise ValueError(f"its filter is of hash scheme {scheme}, which is unknown")
    generations = []
    for values in rows:
        number, num_blocks, num_hashes, *figures = typed(values, *_GENERATION)
        geometry, more = Geometry(num_blocks, num_hashes), dict(zip(_FIGURES, figures, strict=True))
        generations.append(Generation(number=number, geometry=geometry, **more))
        check_generation(generations[-1])
    origin = Origin(salt=salt, fingerprinter=fingerprinter, spider=spider, error_rate=asked)
    return StoredFilter(origin, sample, generations)


def block_loader(execute: Execute, path: Path, generation: int) -> Load:
    """Return a function that reads a block of a generation, and raises StorageError."""

    def load(block: int) -> bytes | None:
        query = "SELECT bits FROM blocks WHERE generation = ? AND number = ?"
        with explaining(path):
            row = execute(query, (generation, block)).fetchone()
        if row is None:
            return None
        bits = row[0]
        if not isinstance(bits, bytes) or len(bits) != BLOCK_BYTES:
            raise unusable(path, f"block {block} of generation {generation} is damaged")
        return bits

    return load


def insert_filter(execute: Execute, origin: Origin, generations: Iterable[Generation]) -> None:
    """Store the figures of a new filter; raises sqlite3.Error."""
    texts = stored_text(origin.fingerprinter), stored_text(origin.spider)
    values = (HASH_SCHEME, origin.salt, *texts, origin.error_rate, "")
    execute("INSERT INTO filter VALUES (?, ?, ?, ?, ?, ?)", values)
    for generation in generations:
        insert_generation(execute, generation)


def insert_generation(execute: Execute, new: Generation) -> None:
    """Store the figures of a new generation; raises sqlite3.Error."""
    values = (new.number, *new.geometry, *(getattr(new, name) for name in _FIGURES))
    execute("INSERT INTO generations VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)


def with_bits(stored: StoredFilter, execute: Execute, path: Path) -> list[LocalGeneration]:
    """Return the generations of a stored filter with their bits, which are read when needed.

    They have the fingerprints that the blocks in the file may lack. Raises sqlite3.Error, or, if
    these are damaged, ValueError.
    """
    generations = {}
    for figures in stored.generations:
        load = block_loader(execute, path, figures.number)
        generations[figures.number] = LocalGeneration.of(figures, stored.origin.salt, load)
    for row in execute("SELECT generation, fingerprints FROM ops"):
        number, data = typed(row, int, bytes)
        fingerprints = unpack_fingerprints(data)
        for fingerprint in fingerprints if number in generations else ():
            generations[number].filter.add(fingerprint)
    return [*generations.values()]


class LocalBackend(MemoryBackend):
    """A Bloom filter in the file of a job.

    Args:
        job_dir: the job directory, locked by the caller.
        policy: how large the filter is, and when it grows and expires.
        origin: which spider and fingerprinter the filter is for, and its salt.
        is_crawl: False if a command uses the filter, so that a kill loses no requests.
    """

    # New requests after which the blocks are written, or a 400th of the capacity. Twice as many are
    # replayed after a kill.
    _least_new = 100_000

    def __init__(
        self, job_dir: Path, policy: Policy, origin: Origin, *, is_crawl: bool = True
    ) -> None:
        super().__init__(policy, origin)
        self.location = str(job_dir / jobdir.FILE)
        self._job_dir = job_dir
        self._is_crawl = is_crawl
        self._is_closed = False
        self._owns_file = False
        self._continues_run = False  # whether Scrapy's queue has requests of the last process
        self._stored_sample = ""
        self._recorded_seq = 0  # the number of the last batch whose bits are set
        self._file: JobFile

    def open(self, file: JobFile | None = None) -> None:
        """Open or create the filter; if that fails, change nothing, and raise a BloomError.

        With the opened file of a job, its queue calls `write` and `record`. Otherwise, the file is
        opened here, and not marked as in use until `begin`.
        """
        self._owns_file = file is None
        self._file = file or JobFile(self._job_dir / jobdir.FILE)
        try:
            with explaining(self._file.path):
                self._open()
        except BaseException:
            if self._owns_file:
                self._file.close()
            raise

    def _open(self) -> None:
        stored, why = stored_filter(self._file.execute), ""
        if self._is_crawl:  # a command changes no queue
            why = _queue_lacks(self._file, self._job_dir, has_filter=stored is not None)
        if why and self._owns_file:
            self._set_aside(why, has_filter=stored is not None)
            stored, why = None, ""
        self._continues_run = self._owns_file and scrapys_queue.has_queued(self._job_dir)
        file = self._file
        if stored is not None and stored.origin.fingerprinter != self._origin.fingerprinter:
            former, own = stored.origin.fingerprinter, self._origin.fingerprinter
            raise FingerprinterMismatchError.of(file.name, former, own, "another JOBDIR")
        if why:
            logger.warning(_STARTS_OVER_WITH_QUEUE, why)
        elif file.was_killed and not self._owns_file:
            logger.info(
                "The last process did not close %s: it was killed, or the machine went down. "
                "Queue and filter are complete: nothing is lost, and the requests that were in "
                "flight are crawled again",
                file.name,
            )
        if stored is None or why:
            self._create(imports=not why)
        else:
            self._origin, self.sample = stored.origin, stored.sample
            self.live = with_bits(stored, file.execute, file.path)
            self.log_kept_settings()
        self._stored_sample = self.sample
        self._use_live()
        _warn_of_memory(file.name, sum(generation.geometry.nbytes for generation in self.live))

    def _set_aside(self, why: str, *, has_filter: bool) -> None:
        """Rename the queue and the file of a killed crawl, and open a new file."""
        queue = self._job_dir / jobdir.QUEUE
        moved = [str(jobdir.set_aside(queue))] if queue.exists() else []
        # The filter is moved last: if the process dies in between, the next one continues.
        if has_filter:
            self._file.close_whole()
            moved.append(str(jobdir.set_aside(self._file.path)))
            self._file = JobFile(self._job_dir / jobdir.FILE)
        logger.warning(_STARTS_OVER, why, ", ".join(moved))

    def _create(self, *, imports: bool) -> None:
        """Create the first generation, with what the job has recorded already.

        It is stored after its blocks: if the process dies in between, the next one begins again.
        """
        file = self._file
        with file.step():
            for table in ("generations", "filter", "blocks", "ops"):
                file.execute(f"DELETE FROM {table}")  # noqa: S608 - constants
        path = scrapys_queue.importable(self._job_dir) if imports else None
        seen = None if path is None else SeenFile(path)
        where = "FROM requests WHERE page IS NOT NULL AND is_filtered"
        (number,) = file.execute(f"SELECT count(*) {where}").fetchone()
        number += 0 if seen is None else seen.count()
        room = with_headroom(number) if number else 0
        self._make_first(self._policy.first(self._clock(), room))
        new = self.live[0]
        if seen is not None:
            new.count = import_seen(seen, new.filter.add)
        for (page,) in file.execute(f"SELECT page {where}"):
            new.count += new.filter.add(page)
        deque(self._write_blocks(file.execute, file.step), maxlen=0)
        with file.step():
            insert_filter(file.execute, self._origin, [new])

    def begin(self, run_at: float | None = None) -> None:
        """Begin the crawl, in a run that began at `run_at`; None: now, or with the queue."""
        if self._owns_file and not self._has_begun:
            self._file.begin(self.write_changed, in_use=self._is_crawl, logs_failure=True)
        super().begin(self._newest.last_run if run_at is None and self._continues_run else run_at)

    def update(self, run_at: float, new: Generation | None = None, expired: int = 0) -> bool:
        """Change the generations, as `LifeCycle.update` says; always return True."""
        is_nested, before = self._file.is_in_step, self.live
        try:
            with self._file.step():
                super().update(run_at, new, expired)
                if new is not None:
                    insert_generation(self._file.execute, self._newest)
                self._write_figures(self._file.execute)
                oldest = self.live[0].number
                self._file.execute("DELETE FROM generations WHERE number < ?", (oldest,))
        except sqlite3.Error as error:
            self.live = before
            self._use_live()
            self._stored_sample = ""
            if is_nested:
                raise
            raise NoRoomError(str(unusable(self._file.path, error))) from error
        return True

    # With a queue in the same file.

    def write(self, seq: int, fingerprints: Collection[bytes]) -> None:
        """Store the new fingerprints of a batch, in its transaction; `record` must follow it."""
        execute, newest = self._file.execute, self._newest
        count = newest.count + len(fingerprints)
        execute(_UPDATE, (count, newest.last_run, newest.number))
        self._write_sample(execute)
        values = (seq, newest.number, pack_fingerprints(fingerprints))
        execute("INSERT INTO ops VALUES (?, ?, ?)", values)

    def record(self, seq: int, fingerprints: Collection[bytes]) -> None:
        """Record the fingerprints of a batch, which is stored."""
        recorded, newest = self._recorded, self._newest
        for fingerprint in fingerprints:
            recorded.add(fingerprint, newest.filter)
            newest.count += 1
        self._recorded_seq = seq

    def grow_if_full(self) -> None:
        """Add a generation if the newest one is full; not in a transaction."""
        if self.is_full():
            self.grow()

    def lacks_in_newest(self, fingerprint: bytes) -> bool:
        """Return whether the newest generation lacks a fingerprint that must expire with it."""
        hashed = self._recorded.hashed(fingerprint)
        return bool(self._policy.window) and not self._newest.filter.has_hashed(*hashed)

    def write_last(self) -> None:
        """Write all changes, in the last transaction, unless they are many and `ops` has them."""
        execute = self._file.execute
        self._write_figures(execute)
        number = sum(generation.filter.changed.count(1) for generation in self.live)
        if number <= _MOST_AT_CLOSE or self._owns_file:
            deque(self._write_blocks(execute, self._file.step), maxlen=0)
            execute("DELETE FROM ops")
        if self._owns_file and self._is_crawl:
            # Scrapy does not sync its queue. Before the file says that it is closed:
            sync_tree(self._job_dir / jobdir.QUEUE)

    # In either case.

    def write_changed(self, db: sqlite3.Connection) -> Iterator[None]:
        """Write the changed blocks in a thread; with a queue, only after many new requests.

        Yields after each transaction.
        """
        if not self._has_begun:  # a takeover has a transaction, and sets bits before its end
            return
        # Otherwise, a bit is set after the batch of its request is stored. So it may be written.
        last, written = self._recorded_seq, 0
        query = "SELECT total(length(fingerprints)) FROM ops WHERE seq <= ?"
        (nbytes,) = db.execute(query, (last,)).fetchone()
        capacity = sum(generation.capacity for generation in self.live)
        if self._owns_file or nbytes >= _OP_BYTES * max(self._least_new, capacity // 400):
            for _ in self._write_blocks(db.execute, partial(transaction, db)):
                yield
                time.sleep(_PAUSE_SECS)
            written = last
        if self._owns_file:
            with transaction(db):
                self._write_figures(db.execute)
        has_rest = True
        while has_rest:
            with transaction(db):
                has_rest = _delete_some(db.execute, written)
            yield

    def _write_blocks(
        self, execute: Execute, step: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> Iterator[None]:
        """Write all changed blocks, some in each transaction, and yield after it."""
        for generation in self.live:
            changed = _changed(generation.filter)
            while some := list(islice(changed, _WRITTEN_AT_ONCE)):
                with step():
                    for block in some:
                        generation.filter.changed[block] = 0  # first: it may change again meanwhile
                        bits = bytes(generation.filter.blocks(block, block + 1))
                        execute(_WRITE, (generation.number, block, bits))
                yield

    def _write_figures(self, execute: Execute) -> None:
        for generation in self.live:
            execute(_UPDATE, (generation.count, generation.last_run, generation.number))
        self._write_sample(execute)

    def _write_sample(self, execute: Execute) -> None:
        if (sample := self.sample) != self._stored_sample:
            execute("UPDATE filter SET sample = ?", (sample,))
            self._stored_sample = sample

    def close(self) -> None:
        """Write all changes, and close a file that was opened here; raises StorageError.

        The second time, nothing happens.
        """
        is_first, self._is_closed = not self._is_closed, True
        if is_first and self._owns_file:
            self._file.close(self.write_last)
            if not self._is_crawl and (failure := self._file.failure) is not None:
                raise unusable(self._file.path, failure)


def _delete_some(execute: Execute, written: int) -> bool:
    """Delete some of what is needed no longer; return whether there was anything."""
    deleted = execute(
        "DELETE FROM ops WHERE seq IN (SELECT seq FROM ops WHERE seq <= ? LIMIT ?)",
        (written, _DELETED_AT_ONCE),
    ).rowcount
    deleted += execute(
        "DELETE FROM blocks WHERE (generation, number) IN (SELECT generation, number FROM "
        "blocks WHERE generation < (SELECT min(number) FROM generations) LIMIT ?)",
        (_DELETED_AT_ONCE,),
    ).rowcount
    return deleted > 0


def _changed(bits: BloomFilter) -> Iterator[int]:
    """Yield the numbers of changed blocks, in order."""
    block = -1
    while (block := bits.changed.find(1, block + 1)) >= 0:
        yield block


def _queue_lacks(file: JobFile, job_dir: Path, *, has_filter: bool) -> str:
    """Return why the queue may lack requests that the filter has recorded, as a clause, or ""."""
    if file.in_use or scrapys_queue.was_killed(job_dir, has_filter=has_filter):
        cause = "it was killed, or ran out of memory, or the machine went down"
        if not file.in_use:
            cause += "; or the files were copied without their times (cp -a keeps them)"
        return f"The last process did not close {file.name if has_filter else job_dir} ({cause})"
    if file.is_copy:
        return f"{file.name} was copied, moved, or parted from its log while a crawl had it open"
    return ""


_STARTS_OVER = (
    "%s, so the queued requests are lost, and the filter would report them as duplicates. The "
    "crawl starts over with an empty filter, so that pages are crawled again rather than lost. "
    "Set aside, not deleted: %s. With SCHEDULER = 'scrapy_bloom.CrashSafeScheduler', a job "
    "survives a kill"
)
_STARTS_OVER_WITH_QUEUE = (
    "%s: requests that the queue lacks would never be crawled, because the filter reports "
    "them as duplicates. The crawl starts over with an empty filter and the requests of the "
    "queue, so that pages are crawled again rather than lost"
)


def _warn_of_memory(name: str, nbytes: int) -> None:
    """Log a warning if a filter may not fit into the memory when it is full."""
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        available = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not on Linux
        return
    if nbytes > available * 1024:
        logger.warning(
            "%s takes up to %s of memory when it is full, and this machine has %s available; lower "
            "BLOOM_EXPECTED_REQUESTS, raise BLOOM_ERROR_RATE, or use a machine with more memory",
            name,
            size_text(nbytes),
            size_text(available * 1024),
        )

"""Copying a filter together with its queue, between a job directory and Redis.

The queue is that of CrashSafeScheduler: in a job's SQLite database, or shared by many workers. At
no instant is there a copy of the filter without that of the queue: what waits would look seen.
"""

import hashlib
import os
import secrets
import sqlite3
import struct
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from scrapy_bloom.copying.new_filter import no_new_directory
from scrapy_bloom.copying.transfer import Copied, QueueDraft, download, upload
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.job import paths as jobdir
from scrapy_bloom.job.disk import sync_directory
from scrapy_bloom.job.locks import lock_directory
from scrapy_bloom.job.sqlite_files import beside, connect_readonly
from scrapy_bloom.queues.members import NEWEST_FIRST, Member, keys_of_queue, parsed, parsed_leased
from scrapy_bloom.queues.sqlite import DEAD, RequestDatabase, read_counts, unusable
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.keys.blocks import DRAFT_SECS

_READ = 100  # requests that are read from the server at once
_WRITTEN_BYTES = 1 << 20  # and written to it, if not a single one is larger


@dataclass
class CopiedQueue:
    """The figures of a copy, found alike on both sides.

    Attributes:
        requests: how many.
        nbytes: their size, serialized, with their places in the order.
        checksum: sum of the hashes of all of them, in any order.
    """

    requests: int = 0
    nbytes: int = 0
    checksum: int = 0

    @classmethod
    def of(cls, members: Iterable[bytes]) -> "CopiedQueue":
        """Return the figures of these requests."""
        new = cls()
        for member in members:
            new.add(member)
        return new

    def add(self, member: bytes) -> None:
        """Count a request, as members of the shared queue have it."""
        self.requests += 1
        self.nbytes += len(member)
        digest = hashlib.blake2b(member, digest_size=8).digest()
        self.checksum = (self.checksum + int.from_bytes(digest, "big")) % 2**64


def waiting_database(directory: Path) -> Path | None:
    """Return the database beside a job's filter in JOBDIR/bloom, if requests wait in it.

    Raises a StorageError if that file is something else, or damaged: the copied filter would
    report the requests that it lost as duplicates.
    """
    database = directory.parent / jobdir.DATABASE
    if directory.name != "bloom" or not database.exists():
        return None
    if not jobdir.is_database(database):
        raise unusable(database, "it is empty, or no queue of CrashSafeScheduler")
    return database if sum(read_counts(database)) else None


def upload_with_queue(
    directory: Path, server: RedisServer, key: str
) -> tuple[Copied, CopiedQueue | None]:
    """Copy the filter of a closed job into Redis, and what waits in the queue beside it, if any.

    Arguments and errors are those of `upload`. There must not be a queue in Redis either, and the
    job must not be in use. The spider's start() is run again by the first worker, as by each run of
    a job.
    """
    if not (directory.parent / jobdir.DATABASE).exists():
        return upload(directory, server, key), None
    with _locked(directory):
        database = waiting_database(directory)
        if database is None:
            return upload(directory, server, key, is_locked=True), None
        with _draft(database, server, key) as (draft, queue):
            return upload(directory, server, key, draft, is_locked=True), queue


def download_with_queue(
    server: RedisServer, key: str, directory: Path
) -> tuple[Copied, CopiedQueue]:
    """Save a filter in Redis, and its queue, to a job directory, where a single crawl goes on.

    Requests that workers have in flight are pending in the copy. What live workers do meanwhile may
    be missing in it.

    Args:
        server: the connection.
        key: see `download`.
        directory: JOBDIR/bloom, without a filter or a queue yet; made if missing.

    Raises:
        StorageError: see `download`; the job directory has a queue. What was begun is removed.
    """
    job_dir = directory.parent
    database = job_dir / jobdir.DATABASE
    new = database.with_name(f"{database.name}.new")
    copied_queues: list[CopiedQueue] = []

    def save() -> None:
        copied_queues.append(_save(server, key, new))
        new.replace(database)
        sync_directory(job_dir)

    with no_new_directory(directory), _locked(directory):
        if os.path.lexists(database) or jobdir.has_queued(job_dir):
            raise StorageError(
                f'{job_dir} holds a queue already; give it the "bloom" of another JOBDIR'
            )
        try:
            # The filter is read first: what is recorded from now on is in the queue already. But
            # the queue is in its place first: a filter without it would take what waits for seen.
            copied = download(server, key, directory, before=save, is_locked=True)
            return copied, copied_queues[0]
        except BaseException:
            for path in (database, new, *beside(new)):
                path.unlink(missing_ok=True)
            raise


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    lock = lock_directory(directory)  # that of the job, see `lock_job`
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _draft(
    database: Path, server: RedisServer, key: str
) -> Iterator[tuple[QueueDraft, CopiedQueue]]:
    """Write a queue to Redis, where no worker finds it before it is published."""
    *keys, of_filter = keys_of_queue(key)
    pending, _, _, state = keys
    if server.send("HEXISTS", state, "flushed"):
        server.send("UNLINK", state)  # a note for workers of a crawl that is over
    if server.send("EXISTS", *keys):
        raise StorageError(
            f"{server.address} has a queue {key!r} already; nothing was changed: give it another "
            "key, or remove that one with `scrapy bloom reset --queue`"
        )
    queue = secrets.token_hex(8)
    draft = f"{pending}:{queue}"
    try:
        with closing(connect_readonly(database)) as db:
            last = db.execute("SELECT max(max(id, abs(position))) FROM requests").fetchone()[0]
            copied = CopiedQueue()
            for batch in _batches(_rows(db), copied):
                scored = [word for each in batch for word in (0, each)]
                server.transaction(("ZADD", draft, *scored), ("EXPIRE", draft, DRAFT_SECS))
        _compare(copied, CopiedQueue.of(_members(server, draft)), server.address)
        publish = (
            ("RENAME", draft, pending),
            ("PERSIST", pending),
            ("HSET", state, "id", queue, "pushed", last),  # the next one gets another position
            ("HSET", of_filter, "queue", queue),
        )
        yield QueueDraft(draft, keys, publish), copied
    except BaseException as error:
        with suppress(StorageError):
            server.send("UNLINK", draft)
        if isinstance(error, sqlite3.Error):
            raise unusable(database, error) from error
        raise


def _rows(db: sqlite3.Connection) -> Iterator[bytes]:
    # A dead letter stays behind: elsewhere it would be pending.
    query = "SELECT slot, priority, is_start, position, request FROM requests WHERE state != ?"
    rows = db.execute(query, (DEAD,))
    for slot, priority, rank, position, data in rows:
        place = position + (NEWEST_FIRST if position < 0 else 0)
        yield Member(slot, priority, rank, place, data).packed


def _batches(members: Iterable[bytes], copied: CopiedQueue) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size = 0
    for member in members:
        copied.add(member)
        if batch and size + len(member) > _WRITTEN_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(member)
        size += len(member)
    if batch:
        yield batch


def _save(server: RedisServer, key: str, path: Path) -> CopiedQueue:
    pending, leased, *_ = keys_of_queue(key)
    for part in (path, *beside(path)):  # of a copy that was killed
        part.unlink(missing_ok=True)
    new = RequestDatabase(path, by_slot=True)
    new.begin()
    new.close()
    copied = CopiedQueue()
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN")
        # Workers that live may take a request meanwhile, or give it back.
        for name in (leased, pending, leased):
            for member in _members(server, name):
                each = _parsed(member, name, is_leased=name == leased)
                if _insert(db, each):
                    copied.add(each.packed)
        db.execute(
            "UPDATE filter_log SET (pushed, checksum) = "
            "(SELECT count(*), ifnull(sum(id), 0) FROM requests)"
        )
        db.execute("COMMIT")
        found = CopiedQueue.of(_rows(db))
    _compare(copied, found, str(path.parent))
    return copied


def _parsed(member: bytes, name: str, *, is_leased: bool) -> Member:
    try:
        found = parsed_leased(member)[2] if is_leased else parsed(member)
    except (struct.error, ValueError):
        raise StorageError(
            f"the key {name!r} holds {member[:60]!r}, which is no request of CrashSafeScheduler; "
            "it was left as it is"
        ) from None
    # As the database has the slots: without surrogates.
    return found._replace(slot=found.slot.encode(errors="backslashreplace").decode())


def _insert(db: sqlite3.Connection, member: Member) -> bool:
    newest_first = member.position > NEWEST_FIRST // 2
    position = member.position - (NEWEST_FIRST if newest_first else 0)
    row = (abs(position), member.slot, member.priority, member.rank, position, member.data)
    insert = "INSERT OR IGNORE INTO requests VALUES (?, 0, ?, ?, ?, ?, 0, NULL, ?)"
    return db.execute(insert, row).rowcount == 1


def _members(server: RedisServer, name: str) -> Iterator[bytes]:
    start = b"-"
    while some := server.send("ZRANGEBYLEX", name, start, "+", "LIMIT", 0, _READ):
        yield from some
        start = b"(" + some[-1]


def _compare(source: CopiedQueue, copy: CopiedQueue, what: str) -> None:
    if copy != source:
        raise StorageError(
            f"the copy of the queue in {what} differs ({copy} in place of {source}); it was "
            "removed: try again, and check the memory and disk of that machine"
        )

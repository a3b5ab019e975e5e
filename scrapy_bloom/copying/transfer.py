"""Make the copy of a filter and its queue, as a job directory or in Redis.

The blocks are copied byte for byte. The copy can be used when all of it is written: a filter
without its queue would report the pending requests as duplicates.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from scrapy_bloom.copying.sources import Source
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.filters.sizing import BLOCK_BYTES
from scrapy_bloom.job import jobdir
from scrapy_bloom.job.disk import sync_directory
from scrapy_bloom.job.file import JobFile, explaining
from scrapy_bloom.job.filter import Execute, insert_filter
from scrapy_bloom.queues.redis_store import load_rows
from scrapy_bloom.queues.rows import JobDatabase
from scrapy_bloom.queues.store import Row, State
from scrapy_bloom.redis.changes import change, remove_blocks, remove_filter
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.layout import bitmap_key, block_key, named_keys
from scrapy_bloom.redis.lua_scripts import script
from scrapy_bloom.redis.stored import RedisGeneration, described, read_stored

_LARGEST_POSITION = 2**52
_WRITTEN = 100  # rows that are written at once, or fewer if one is large
_LARGE_BYTES = 100_000
_DRAFT = f"{jobdir.FILE}.copy"
_PARTS = {f"{_DRAFT}{end}" for end in ("", "-wal", "-shm", ".tmp")}


def copy_to_job(source: Source, path: Path) -> int:
    """Copy a filter and its queue into a new job directory, without changing the source.

    The queue of CrashSafeScheduler is copied with its filter. Requests that were in flight are
    pending in the copy. The next crawl runs the spider's start() again, like each run of a job.

    Args:
        source: what to copy.
        path: of the job directory.

    Returns:
        How many requests of a queue were copied.

    Raises:
        StorageError: or one of its children: the source has lost parts; the directory exists; there
            is no room. The incomplete copy was removed.
    """
    draft = path / _DRAFT
    with jobdir.no_new_directory(path), explaining(draft):
        _check_vacant(path)
        lock = jobdir.lock_job(path)
        try:
            _check_vacant(path)  # another copy may have ended meanwhile
            _remove_draft(path)  # of a copy that was killed
            queued = _write_file(source, draft)
            draft.rename(path / jobdir.FILE)
            sync_directory(path)
            sync_directory(path.parent)
        except BaseException:
            _remove_draft(path)
            raise
        finally:
            lock.release()
    return queued


def _write_file(source: Source, path: Path) -> int:
    file = JobFile(path)
    try:
        with file.step():
            insert_filter(file.execute, source.origin, source.generations)
            for index, generation in enumerate(source.generations):
                _write_blocks(file.execute, generation.number, source.chunks(index))
        with JobDatabase(file, by_slot=True).transaction() as changes:
            return changes.copy(_requests(source))
    finally:
        file.close()


def _remove_draft(job_dir: Path) -> None:
    for name in _PARTS:
        (job_dir / name).unlink(missing_ok=True)


def _write_blocks(execute: Execute, generation: int, chunks: Iterator[bytes]) -> None:
    number = 0
    for chunk in chunks:
        for start in range(0, len(chunk), BLOCK_BYTES):
            if any(bits := chunk[start : start + BLOCK_BYTES]):
                execute("INSERT INTO blocks VALUES (?, ?, ?)", (generation, number, bits))
            number += 1


def copy_to_redis(source: Source, server: RedisServer, key: str) -> int:
    """Copy a filter and its queue to a server, as `copy_to_job` copies them into a directory.

    Until all is written, the filter has a field that makes crawls and commands refuse it.

    Args:
        source: what to copy.
        server: the connection.
        key: the key of the new filter.
    """
    copied = [RedisGeneration(**vars(each)) for each in source.generations]
    copy, version = _RedisCopy(server, key), secrets.token_hex(8)
    fields = {"id": copy.filter_id, "filter": described(source.origin), "copying": "1"}
    for each in copied:
        fields |= each.fields
    vacant = ("", "")
    if (
        read_stored(server, key) is not None
        or change(server, key, vacant, fields, next_version=version, added=copied) != "ok"
    ):
        raise StorageError(
            f"{server.address} has a filter {key!r} already; nothing was changed. Give another "
            "key, or remove that filter first"
        )
    try:
        for index, each in enumerate(copied):
            copy.blocks(each, source.chunks(index))
        queued, fields = copy.queue(source)
        answer = change(
            server,
            key,
            (copy.filter_id, version),
            fields,
            next_version=secrets.token_hex(8),
            removed=["copying"],
            sizes=copy.sizes,
        )
        copy.check(answer)
    except BaseException:
        server.forget_outage()
        with suppress(StorageError):  # otherwise `scrapy bloom reset` removes it
            remove_filter(server, key, copy.filter_id)
            remove_blocks(server, key, [each.id for each in copied])
        raise
    return queued


class _RedisCopy:
    """Writes the keys of a copy in Redis, and counts what they have: command and answer by key."""

    def __init__(self, server: RedisServer, key: str) -> None:
        self._server = server
        self._key = key
        self.filter_id = secrets.token_hex(8)
        self.sizes: dict[str, tuple[str, int]] = {}

    def _write(self, key: str, *command: Any) -> None:
        """Execute a command, which gets the key as its first argument, unless the copy was lost."""
        keys = [self._key, key]
        self.check(self._server.script(script("copy"), keys, self.filter_id, *command).decode())

    def check(self, answer: str) -> None:
        """Raise a StorageError if a script has found that the copy was lost."""
        if answer != "ok":
            raise StorageError(
                f"{self._server.address}: the copy {self._key!r} was removed meanwhile, or the "
                "server has lost a part of it; the rest of it was removed. Try again"
            )

    def blocks(self, new: RedisGeneration, chunks: Iterator[bytes]) -> None:
        """Write the blocks of a generation."""
        made, bitmap = 0, bitmap_key(self._key, new.id)
        for chunk, data in enumerate(chunks):
            if data == bytes(len(data)):
                continue
            # First, so that all keys are removed if the copy fails.
            self._write(bitmap, "SETBIT", chunk, 1)
            self._write(block_key(self._key, new.id, chunk), "SET", data)
            made += 1
        self.sizes[bitmap] = "BITCOUNT", made + 1

    def queue(self, source: Source) -> tuple[int, dict[str, str]]:
        """Write the requests of a queue.

        Returns the number of requests, and fields of the filter's hash.
        """
        rows: dict[int, Row] = {}
        number = numbered = nbytes = 0
        for number, request in enumerate(_requests(source), 1):
            numbered = max(numbered, request.position)
            is_unreadable = request.state is State.UNREADABLE  # it may be readable there
            rows[number] = replace(request, state=State.PENDING) if is_unreadable else request
            nbytes += len(request.data)
            if len(rows) == _WRITTEN or nbytes > _LARGE_BYTES:
                self._load(rows)
                nbytes = 0
        if not number:
            return 0, {}
        self._load(rows)
        self.sizes[named_keys(self._key)["rows"]] = "HLEN", number
        counters = {"pushed": source.done + number, "done": source.done, "epoch": 1}
        counters["numbered"] = max(number, numbered)
        fields = {name: str(value) for name, value in counters.items()}
        if source.origin.spider:
            fields["crawl"] = source.origin.spider
        return number, fields

    def _load(self, rows: dict[int, Row]) -> None:
        self.check("ok" if load_rows(self._server, self._key, self.filter_id, rows) else "other")
        rows.clear()


def _check_vacant(job_dir: Path) -> None:
    """Raise a StorageError unless a directory is missing, or has at most parts of a copy."""
    known = {jobdir.LOCK_NAME, *_PARTS}
    if os.path.lexists(job_dir) and (
        job_dir.is_symlink()
        or not job_dir.is_dir()
        or any(each.name not in known for each in job_dir.iterdir())
    ):
        raise StorageError(
            f"{job_dir} exists already; nothing was changed. Give a directory that does not exist "
            "yet"
        )


def _requests(source: Source) -> Iterator[Row]:
    """Return the requests of a queue; raise a StorageError if a position is not one of ours."""
    for request in source.requests():
        if not 0 < request.position < _LARGEST_POSITION:
            raise StorageError(
                f"the queue of this filter is damaged: a request has the position "
                f"{request.position:,}; nothing was copied"
            )
        yield request

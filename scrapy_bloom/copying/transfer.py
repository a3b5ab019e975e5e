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
from scrapy_bloom.job.filter import insert_filter
from scrapy_bloom.queues.redis_store import load_rows
from scrapy_bloom.queues.rows import JobDatabase
from scrapy_bloom.queues.store import Row, State
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.layout import bitmap_key, block_key, named_keys
from scrapy_bloom.redis.lua_scripts import script
from scrapy_bloom.redis.stored import (
    RedisGeneration,
    change,
    described,
    read_stored,
    remove_blocks,
    remove_filter,
)

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
                number = 0
                for chunk in source.chunks(index):
                    for start in range(0, len(chunk), BLOCK_BYTES):
                        if any(bits := chunk[start : start + BLOCK_BYTES]):
                            row = (generation.number, number, bits)
                            file.execute("INSERT INTO blocks VALUES (?, ?, ?)", row)
                        number += 1
        with JobDatabase(file).transaction() as changes:
            return changes.copy(_requests(source))
    finally:
        file.close()


def _remove_draft(job_dir: Path) -> None:
    for name in _PARTS:
        (job_dir / name).unlink(missing_ok=True)


def copy_to_redis(source: Source, server: RedisServer, key: str) -> int:
    """Copy a filter and its queue to a server, as `copy_to_job` copies them into a directory.

    Until all is written, the filter has a field that makes crawls and commands refuse it.

    Args:
        source: what to copy.
        server: the connection.
        key: the key of the new filter.
    """
    copied = [RedisGeneration.of(figures) for figures in source.generations]
    id_, version = secrets.token_hex(8), secrets.token_hex(8)
    fields = {"id": id_, "filter": described(source.origin), "copying": "1"}
    for generation in copied:
        fields |= generation.fields
    if (
        read_stored(server, key) is not None
        or change(server, key, ("", ""), fields, next_version=version, added=copied) != "ok"
    ):
        raise StorageError(
            f"{server.address} has a filter {key!r} already; nothing was changed. Give another "
            "key, or remove that filter first"
        )
    sizes: dict[str, tuple[str, int]] = {}  # what the keys have: a command and its answer
    try:
        for index, generation in enumerate(copied):
            bitmap = bitmap_key(key, generation.id)
            sizes[bitmap] = (
                "BITCOUNT",
                1 + _write_blocks(server, key, id_, generation, source.chunks(index)),
            )
        queued, last = _write_rows(server, key, id_, _requests(source))
        fields = {}
        if queued:
            sizes[named_keys(key)["rows"]] = "HLEN", queued
            counters = {"pushed": source.done + queued, "done": source.done, "epoch": 1}
            counters["numbered"] = max(queued, last)
            fields = {name: str(value) for name, value in counters.items()}
            if source.origin.spider:
                fields["crawl"] = source.origin.spider
        answer = change(server, key, (id_, version), fields, removed=["copying"], sizes=sizes)
        _check(server, key, is_there=answer == "ok")
    except BaseException:
        server.forget_outage()
        with suppress(StorageError):  # otherwise `scrapy bloom reset` removes it
            remove_filter(server, key, id_)
            remove_blocks(server, key, [generation.id for generation in copied])
        raise
    return queued


def _check(server: RedisServer, key: str, *, is_there: bool) -> None:
    """Raise a StorageError if a script has found that the copy was lost."""
    if not is_there:
        raise StorageError(
            f"{server.address}: the copy {key!r} was removed meanwhile, or the server has lost a "
            "part of it; the rest of it was removed. Try again"
        )


def _write_blocks(
    server: RedisServer, key: str, id_: str, new: RedisGeneration, chunks: Iterator[bytes]
) -> int:
    """Write the keys of a generation that have bits, and return their number."""

    def write(to: str, *command: Any) -> None:
        answer = server.script(script("copy"), [key, to], id_, *command)
        _check(server, key, is_there=answer == b"ok")

    made = 0
    for chunk, data in enumerate(chunks):
        if data != bytes(len(data)):
            # First, so that all keys are removed if the copy fails.
            write(bitmap_key(key, new.id), "SETBIT", chunk, 1)
            write(block_key(key, new.id, chunk), "SET", data)
            made += 1
    return made


def _write_rows(
    server: RedisServer, key: str, id_: str, requests: Iterator[Row]
) -> tuple[int, int]:
    """Write the requests of a queue; return their number and the last position."""
    rows: dict[int, Row] = {}
    number = last = nbytes = 0

    def load() -> None:
        _check(server, key, is_there=load_rows(server, key, id_, rows))
        rows.clear()

    for number, request in enumerate(requests, 1):
        last = max(last, request.position)
        is_unreadable = request.state is State.UNREADABLE  # it may be readable there
        rows[number] = replace(request, state=State.PENDING) if is_unreadable else request
        nbytes += len(request.data)
        if len(rows) == _WRITTEN or nbytes > _LARGE_BYTES:
            load()
            nbytes = 0
    if rows:
        load()
    return number, last


def _check_vacant(job_dir: Path) -> None:
    """Raise a StorageError unless a directory is missing, or has at most parts of a copy."""
    known = {jobdir.LOCK_NAME, *_PARTS}
    if os.path.lexists(job_dir) and (
        job_dir.is_symlink()
        or not job_dir.is_dir()
        or any(file.name not in known for file in job_dir.iterdir())
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

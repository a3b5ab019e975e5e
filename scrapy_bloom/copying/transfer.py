"""Make the copy of a filter and its queue, as a job directory or in Redis.

The blocks are copied byte for byte, and compared with what was written. The copy can be used when
all of it is written: a filter without its queue would report the pending requests as duplicates.
"""

import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from scrapy_bloom.copying.sources import Source
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.files.file import FileGeneration, FilterFile
from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.filters.sizing import BLOCK_BYTES
from scrapy_bloom.job import jobdir
from scrapy_bloom.job.disk import advice, check_file, sync_directory
from scrapy_bloom.queues.redis_store import load_rows
from scrapy_bloom.queues.sqlite_queue import write_requests
from scrapy_bloom.queues.store import Row, State
from scrapy_bloom.redis.changes import change, remove_blocks, remove_filter
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.layout import bitmap_key, block_key, named_keys
from scrapy_bloom.redis.lua_scripts import script
from scrapy_bloom.redis.stored import RedisGeneration, described, read_stored

_LARGEST_POSITION = 2**52
_WRITTEN = 100  # rows that are written at once, or fewer if one is large
_LARGE_BYTES = 100_000
_MADE = re.compile(r"bloom|lock|requests\.sqlite(-wal|-shm)?|generation-\d{4,}\.bloom(\.tmp)?")


def copy_to_job(source: Source, path: Path) -> int:
    """Copy a filter and its queue into a new job directory, without changing the source.

    The queue of CrashSafeScheduler is copied with its filter. Requests that were in flight are
    pending in the copy. The next crawl runs the spider's start() again, like each run of a job.

    Args:
        source: no crawl may use it.
        path: of the job directory, or of its directory for the filter.

    Returns:
        How many requests of a queue were copied.

    Raises:
        StorageError: or one of its children: the source has lost parts; the directory exists; there
            is no room; the copy differs. The incomplete copy was removed.
    """
    job_dir = path.parent if path.name == "bloom" else path
    check_vacant(job_dir)
    with _new_job(job_dir) as draft:
        for index, figures in enumerate(source.generations):
            new = FileGeneration(
                path=draft / "bloom" / jobdir.file_name(figures.number),
                origin=source.origin,
                oldest=source.generations[0].number,
                **vars(figures),
            )
            FilterFile.create(new, partial(_fill, source, index)).close()
        # The filter was read before the queue, and so has no request that the queue lacks.
        requests = _requests(source)
        return write_requests(draft / jobdir.DATABASE, requests) if source.queued else 0


def copy_to_redis(source: Source, server: RedisServer, key: str) -> int:
    """Copy a filter and its queue to a server, as `copy_to_job` copies them into a directory.

    Until all is written, the filter has a field that makes crawls and commands refuse it.

    Args:
        source: no crawl may use it.
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
        queued, fields = copy.queue(source) if source.queued else (0, {})
        for index, each in enumerate(copied):
            copy.blocks(each, source.chunks(index))
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
        """Write the blocks of a generation; raise a StorageError if one that is read differs."""
        made, bitmap = 0, bitmap_key(self._key, new.id)
        for chunk, data in enumerate(chunks):
            if data == bytes(len(data)):
                continue
            name = block_key(self._key, new.id, chunk)
            # First, so that all keys are removed if the copy fails.
            self._write(bitmap, "SETBIT", chunk, 1)
            self._write(name, "SET", data)
            written = self._server.send("GET", name)
            self.check("lost" if written is None else "ok")
            _check_equal(written, data)
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


def _check_equal(written: bytes, data: bytes) -> None:
    if written != data:
        raise StorageError(
            "the copy differs, and was removed. Check the memory and the disk of its machine, and "
            "try again"
        )


def check_vacant(job_dir: Path) -> None:
    """Raise a StorageError unless a directory is missing or empty."""
    with suppress(OSError):  # it is a file, for example
        if not os.path.lexists(job_dir) or not (job_dir.is_symlink() or any(job_dir.iterdir())):
            return
    raise StorageError(
        f"{job_dir} exists already; nothing was changed. Give a directory that does not exist yet"
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


def _fill(source: Source, index: int, bits: BloomFilter) -> int:
    """Copy the blocks of a generation into an empty filter; return its count."""
    start = 0
    for data in source.chunks(index):
        bits.write_blocks(start, data)
        stop = start + len(data) // BLOCK_BYTES
        _check_equal(bytes(bits.blocks(start, stop)), data)
        start = stop
    return source.generations[index].count


@contextmanager
def _new_job(job_dir: Path) -> Iterator[Path]:
    """Make a job directory from files that a `with` block makes in the directory that it gets.

    That directory, which has the lock of the job, becomes the job directory in one step. If the
    block fails, it is removed. If the process is killed, the next copy to the same place removes
    it.

    Raises:
        StorageError: the job directory exists by then, or cannot be made.
    """
    job_dir = job_dir.absolute()
    draft = job_dir.with_name(f"{job_dir.name}.unfinished-copy")
    with ExitStack() as stack:
        stack.enter_context(jobdir.no_new_directory(job_dir.parent))
        check_file(draft)
        check_file(draft / "bloom")
        lock = jobdir.lock_job(draft)
        stack.callback(lock.release)
        left = [*draft.iterdir(), *(draft / "bloom").iterdir()]  # of a copy that was killed
        for path in left:
            if not _MADE.fullmatch(path.name):
                raise StorageError(f"{path} is in the way; nothing was changed: move it away")
        try:
            for path in left:
                if path.name not in ("bloom", jobdir.LOCK_NAME):
                    path.unlink()
            yield draft
            sync_directory(draft / "bloom")
            sync_directory(draft)
            if sys.platform == "win32":  # which renames no directory with an open file
                lock.release()
            check_vacant(job_dir)
            draft.rename(job_dir)
            sync_directory(job_dir.parent)
        except BaseException as error:
            shutil.rmtree(draft, ignore_errors=True)
            if isinstance(error, OSError):
                raise StorageError(
                    f"{job_dir} cannot be created: {error.strerror or error}; {advice(error)}, or "
                    "give another path"
                ) from error
            raise

"""Make the copy of a filter and its queue, as a job directory or in Redis.

The blocks are copied byte for byte, and compared with what was written. The copy appears in one
step: a filter without its queue would report the pending requests as duplicates.
"""

import os
import re
import secrets
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from scrapy_bloom.copying.sources import Source
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.files.file import FileGeneration, FilterFile
from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.filters.sizing import BLOCK_BYTES
from scrapy_bloom.generations.lifecycle import NoRoomError
from scrapy_bloom.generations.policy import FilterStatus
from scrapy_bloom.job import jobdir
from scrapy_bloom.job.disk import advice, check_file, sync_directory
from scrapy_bloom.queues.redis_store import copied_row
from scrapy_bloom.queues.sqlite_queue import write_requests
from scrapy_bloom.queues.store import Row
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.layout import named_keys
from scrapy_bloom.redis.making import Maker, finish
from scrapy_bloom.redis.stored import (
    RedisGeneration,
    described,
    read_existing,
    read_stored,
)

_LARGEST_POSITION = 2**52
_WRITTEN = 100  # rows that are written at once, or fewer if one is large
_LARGE_BYTES = 100_000
_MADE = re.compile(r"bloom|lock|requests\.sqlite(-wal|-shm)?|generation-\d{4,}\.bloom(\.tmp)?")


class JobTarget:
    """A job directory that does not exist yet.

    Args:
        path: of the job directory, or of its directory for the filter.

    Raises:
        StorageError: it exists.
    """

    def __init__(self, path: Path) -> None:
        self._job_dir = path.parent if path.name == "bloom" else path
        self.location = str((self._job_dir / "bloom").absolute())
        check_vacant(self._job_dir)

    def write(self, source: Source) -> int:
        """Make the job directory with the filter and the queue of a source.

        Returns how many requests of a queue were copied.
        """
        with _new_job(self._job_dir) as draft:
            directory = draft / "bloom"
            for index, figures in enumerate(source.generations):
                new = FileGeneration(
                    path=directory / jobdir.file_name(figures.number),
                    origin=source.origin,
                    oldest=source.generations[0].number,
                    **vars(figures),
                )
                FilterFile.create(new, partial(_fill, source, index)).close()
            if not source.queued:
                return 0
            # The filter was read before the queue, and so has no request that the queue lacks.
            return write_requests(draft / jobdir.DATABASE, _requests(source))


class RedisTarget:
    """The place of a filter in Redis that does not exist yet.

    Args:
        server: the connection.
        key: the key of the filter.

    Raises:
        StorageError: it exists.
    """

    def __init__(self, server: RedisServer, key: str) -> None:
        self._server = server
        self._key = key
        self.location = f"{server.address}, key {key}"
        if read_stored(server, key) is not None:
            raise StorageError(
                f"{server.address} has a filter {key!r} already; nothing was changed. Give another "
                "key, or remove that filter first"
            )

    def write(self, source: Source) -> int:
        """Make the keys of a filter and its queue; return how many requests were copied.

        Keys that are not published expire within an hour.
        """
        server, key = self._server, self._key
        made = [RedisGeneration(**vars(each)) for each in source.generations]
        queued = 0
        with closing(Maker(server, key)) as maker:
            if not maker.begin("", ""):
                raise StorageError(
                    f"another crawl or copy is creating the filter {key!r} in {server.address}; "
                    "nothing was changed. Try again in a minute"
                )
            try:
                for index, new in enumerate(made):
                    maker.copy(new, source.chunks(index))
                fields = {"filter": described(source.origin), "version": secrets.token_hex(8)}
                if source.queued:
                    queued, numbered = _load_queue(source, maker, key)
                    pushed, done = source.done + queued, source.done
                    counters = {"pushed": pushed, "done": done, "numbered": numbered, "epoch": 1}
                    fields |= {name: str(value) for name, value in counters.items()}
                    if source.origin.spider:
                        fields["crawl"] = source.origin.spider
                maker.check()
                answer = maker.create(secrets.token_hex(8), fields)
            except NoRoomError as error:
                raise StorageError(
                    f"{server.address}: {error}; the incomplete copy was removed"
                ) from error
        if answer != "ok":
            raise StorageError(
                f"{server.address}: another crawl or copy has created the filter {key!r} "
                "meanwhile, or the server has lost a part of this copy; this copy was removed"
            )
        # Makes the keys permanent. If this fails, the first crawl that joins the filter does it.
        finish(server, key, read_existing(server, key).unfinished)
        return queued


def check_vacant(job_dir: Path) -> None:
    """Raise a StorageError unless a directory is missing or empty."""
    try:
        if not os.path.lexists(job_dir):
            return
        if not job_dir.is_symlink() and not any(job_dir.iterdir()):
            return
    except OSError:  # it is a file, for example
        pass
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
        if bytes(bits.blocks(start, stop)) != data:
            raise StorageError(
                "the copy differs, and was removed. Check the memory and the disk of this machine, "
                "and try again"
            )
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


def _load_queue(source: Source, maker: Maker, key: str) -> tuple[int, int]:
    """Write the requests of a queue into the keys of a new filter.

    Returns their number, and the highest one that any of them has as its id or position.
    """
    keys = named_keys(key)
    rows: dict[bytes, bytes] = {}
    members: defaultdict[str, list[bytes]] = defaultdict(list)

    def write() -> None:
        maker.add_fields(keys["rows"], rows)
        for name, some in members.items():
            maker.add(keys[name], some)
        rows.clear()
        members.clear()

    number = numbered = nbytes = 0
    for number, request in enumerate(_requests(source), 1):
        numbered = max(numbered, request.position)
        id_, rows[id_], places = copied_row(request, number)
        for name, member in places:
            members[name].append(member)
        nbytes += len(rows[id_])
        if len(rows) == _WRITTEN or nbytes > _LARGE_BYTES:
            write()
            nbytes = 0
    if rows:
        write()
    return number, max(number, numbered)


class Copied(NamedTuple):
    """The figures of a copy."""

    status: FilterStatus  # the figures of the copy
    queued: int  # how many requests of a queue were copied


def copy(source: Source, target: JobTarget | RedisTarget) -> Copied:
    """Copy a filter and its queue, without changing the source.

    The queue of CrashSafeScheduler is copied with its filter. Requests that were in flight are
    pending in the copy. The next crawl runs the spider's start() again, like each run of a job.

    Args:
        source: no crawl may use it.
        target: where the copy is made.

    Raises:
        StorageError: or one of its children: the source has lost parts; the target exists by now
            or has no room; the copy differs. The incomplete copy was removed.
    """
    queued = target.write(source)
    status = FilterStatus.of(target.location, source.generations, source.origin.error_rate)
    return Copied(status, queued)

"""Make the copy of a filter and its queue, as a job directory or in Redis.

The blocks are copied byte for byte, and compared with what was written. The copy appears in one
step: a filter without its queue would report the pending requests as duplicates.
"""

import os
import secrets
import shutil
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from scrapy_bloom.copying.sources import (
    NEWEST_FIRST,
    FileSource,
    MergedSource,
    RedisSource,
    Source,
)
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.files import forgotten as forgotten_file
from scrapy_bloom.files.file import FileGeneration, FilterFile
from scrapy_bloom.files.forgotten import ForgottenFile
from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.filters.sizing import BLOCK_BYTES
from scrapy_bloom.generations.lifecycle import NoRoomError
from scrapy_bloom.generations.policy import FilterStatus
from scrapy_bloom.job import jobdir
from scrapy_bloom.job.disk import sync_directory
from scrapy_bloom.queues.job_state import QueuedRequest, write_requests
from scrapy_bloom.queues.shared import member_start
from scrapy_bloom.queues.sqlite import DEAD, MOST_DEATHS, SUSPECT
from scrapy_bloom.redis.making import Maker, finish
from scrapy_bloom.redis.scripts import keys_of
from scrapy_bloom.redis.stored import (
    RedisGeneration,
    RedisPlace,
    described,
    read_existing,
    read_stored,
)

_WRITTEN = 100  # members that are written to a sorted set at once, or fewer if one is large
_LARGE_BYTES = 100_000


class Copied(NamedTuple):
    """The figures of a copy."""

    status: FilterStatus  # the figures of the copy
    queued: int  # how many requests of a queue were copied
    left_out: list[str]  # sources with pending requests that the copy reports as duplicates


def copy(
    sources: Sequence[str | os.PathLike[str] | RedisPlace],
    target: str | os.PathLike[str] | RedisPlace,
) -> Copied:
    """Copy a filter and its queue, or merge several filters, without changing the sources.

    The queue of CrashSafeScheduler is copied with its filter. Requests that were in flight are
    pending in the copy. The next crawl runs the spider's start() again, like each run of a job.
    Queues cannot be merged, so several filters are copied without them.

    Args:
        sources: the path of a JOBDIR or of the directory of a filter, or a place in Redis. No crawl
            may use them. Filters to be merged need equal sizes, hashes and salts.
        target: the path of a JOBDIR, or a place in Redis, that does not exist yet.

    Raises:
        GeometryMismatchError: filters to be merged differ, or have a window.
        StorageError: or one of its children: a source has no filter, or its filter is in use, was
            not closed or has lost parts; the target exists or has no room; the copy differs. The
            incomplete copy was removed.
    """
    with ExitStack() as stack:
        if not isinstance(target, RedisPlace):
            check_vacant(job := _job_of(Path(target)))
        elif read_stored(*target) is not None:
            raise StorageError(
                f"{target.server.address} has a filter {target.key!r} already; nothing was "
                "changed. Give another key, or remove that filter first"
            )
        opened = [
            stack.enter_context(
                closing(
                    RedisSource(each) if isinstance(each, RedisPlace) else FileSource(Path(each))
                )
            )
            for each in sources
        ]
        source: Source = opened[0] if len(opened) == 1 else MergedSource(opened)
        if isinstance(target, RedisPlace):
            queued = _write_shared(source, target)
            location = f"{target.server.address}, key {target.key}"
        else:
            queued = _write_job(source, job)
            location = str(job / "bloom")
        status = FilterStatus.of(location, source.generations, source.origin.error_rate)
        is_merged = len(opened) > 1
        left_out = [
            each.name for each in opened if each.has_scrapys_queue or (is_merged and each.queued)
        ]
        return Copied(status, queued, left_out)


def _job_of(path: Path) -> Path:
    """Return the job directory of a path, which may also be that of its filter."""
    return path.parent if path.name == "bloom" else path


# Into files.


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


def _write_job(source: Source, job_dir: Path) -> int:
    """Make a job directory with the filter and the queue of a source.

    Returns how many requests of a queue were copied.
    """
    with _new_job(job_dir) as draft:
        directory = draft / "bloom"
        for index, figures in enumerate(source.generations):
            new = FileGeneration(
                path=directory / jobdir.file_name(figures.number),
                origin=source.origin,
                oldest=source.generations[0].number,
                **vars(figures),
            )
            FilterFile.create(new, partial(_fill, source, index)).close()
        if forgotten := list(source.forgotten()):
            with closing(ForgottenFile(directory / forgotten_file.NAME)) as file:
                file.add(forgotten)
        if not source.queued:
            return 0
        # The filter was read before the queue, and so has no request that the queue lacks.
        return write_requests(draft / jobdir.DATABASE, _requests(source))


def _requests(source: Source) -> Iterator[QueuedRequest]:
    """Return the requests of a queue; raise a StorageError if a position is not one of ours."""
    for request in source.requests():
        if not 0 < request.position < NEWEST_FIRST // 2:
            raise StorageError(
                f"the queue of this filter is damaged: a request has the position "
                f"{request.position:,}; nothing was copied"
            )
        yield request


def _fill(source: Source, index: int, bits: BloomFilter) -> int:
    """Copy the blocks of a generation into an empty filter; return its count."""
    start = 0
    for data in source.chunks(index):
        bits.add_blocks(start, data)
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
        if any(each.is_symlink() for each in (draft, draft / "bloom")):
            raise StorageError(f"{draft} is or has a symbolic link; nothing was changed: remove it")
        lock = jobdir.lock_job(draft)
        stack.callback(lock.release)
        try:
            for path in (*draft.iterdir(), *(draft / "bloom").iterdir()):
                if path.name not in ("bloom", jobdir.LOCK_NAME):
                    path.unlink()  # a file of a copy that was killed
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
                    f"{job_dir} cannot be created: {error.strerror or error}; give another path"
                ) from error
            raise


# Into Redis.


def _write_shared(source: Source, place: RedisPlace) -> int:
    """Make the keys of a filter and its queue; return how many requests were copied.

    Keys that are not published expire within an hour.
    """
    server, key = place
    made = [RedisGeneration(**vars(each)) for each in source.generations]
    queued, now = 0, server.now()
    with closing(Maker(server, key)) as maker:
        if not maker.begin("", ""):
            raise StorageError(
                f"another crawl or copy is creating the filter {key!r} in {server.address}; "
                "nothing was changed. Try again in a minute"
            )
        try:
            for index, new in enumerate(made):
                maker.copy(new, source.chunks(index))
            forgotten = list(source.forgotten())
            for start in range(0, len(forgotten), _WRITTEN):
                maker.add(keys_of(key)[-1], now, forgotten[start : start + _WRITTEN])
            fields = {"filter": described(source.origin), "version": secrets.token_hex(8)}
            if source.queued:
                queued, latest = _load_queue(source, maker, key)
                fields |= {"pushed": str(latest), "done": str(latest - queued)}
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
            f"{server.address}: another crawl or copy has created the filter {key!r} meanwhile, or "
            "the server has lost a part of this copy; this copy was removed"
        )
    # Makes the keys permanent. If this fails, the first crawl that joins the filter does it.
    finish(server, key, read_existing(server, key).unfinished)
    return queued


def _load_queue(source: Source, maker: Maker, key: str) -> tuple[int, int]:
    """Write the requests of a queue into the sets of a new filter.

    Returns their number, and the position of the one that was queued last.
    """
    _, pending, _, _, suspects, dead, *_ = keys_of(key)
    names = {SUSPECT: suspects, DEAD: dead}
    batches: dict[str, list[bytes]] = {pending: [], suspects: [], dead: []}
    number = latest = 0
    for request in _requests(source):
        number += 1
        latest = max(latest, request.position)
        name = names.get(request.state, pending)
        batches[name].append(member := _packed(request))
        if len(batches[name]) == _WRITTEN or len(member) > _LARGE_BYTES:
            maker.add(name, 0, batches[name])
            batches[name] = []
    for name, rest in batches.items():
        if rest:
            maker.add(name, 0, rest)
    return number, latest


def _packed(request: QueuedRequest) -> bytes:
    found = request.found
    position = NEWEST_FIRST - request.position if found.newest_first else request.position
    deaths = min(request.deaths, MOST_DEATHS)
    workers = b"".join(b"%016x" % each for each in range(deaths))  # any ids: these workers are dead
    return b"".join(
        (member_start(found), struct.pack(">QB", position, deaths), workers, found.data)
    )

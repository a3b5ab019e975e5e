"""Copy a filter and the queue of CrashSafeScheduler between a directory and Redis.

The blocks are copied byte for byte. A copy of the filter never appears before the copy of the
queue, because it would report the pending requests as duplicates.
"""

import os
import secrets
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

from scrapy_bloom.copying.new_filter import add_forgotten, new_filter, no_new_directory
from scrapy_bloom.copying.queues import (
    database_beside,
    load_queue,
    removed_after_error,
    save_queue,
)
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.files.directory import check_closed, draft_directory, forgotten_of, open_files
from scrapy_bloom.files.file import FileGeneration, FilterFile
from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.generations.lifecycle import NoRoomError
from scrapy_bloom.generations.policy import Origin
from scrapy_bloom.job import paths as jobdir
from scrapy_bloom.job.disk import sync_directory
from scrapy_bloom.job.locks import lock_directory
from scrapy_bloom.job.paths import file_name, filter_files
from scrapy_bloom.job.recovery import Job
from scrapy_bloom.queues.job_directory import count_added
from scrapy_bloom.queues.shared_state import read_state
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.filter import SharedFilter
from scrapy_bloom.redis.forgotten import RedisForgotten
from scrapy_bloom.redis.making import Maker, finish
from scrapy_bloom.redis.reader import chunks, read_filter, unjoined
from scrapy_bloom.redis.stored import FilterInfo, RedisGeneration
from scrapy_bloom.text import counted

_FORGOTTEN_AT_ONCE = 1000


class Copied(NamedTuple):
    """The figures of a copy.

    Attributes:
        generations: the number of generations.
        requests: how many requests are recorded in them.
        nbytes: the size of their blocks in bytes.
        queued: how many requests of a queue were copied; None if no queue was copied.
    """

    generations: int
    requests: int
    nbytes: int
    queued: int | None

    @classmethod
    def of(cls, generations: Sequence[RedisGeneration], queued: int | None) -> "Copied":
        """Return the figures of copied generations and a queue."""
        requests = sum(each.count for each in generations)
        nbytes = sum(each.geometry.nbytes for each in generations)
        return cls(len(generations), requests, nbytes, queued)


def upload(directory: str | os.PathLike[str], server: RedisServer, key: str) -> Copied:
    """Copy the filter of a closed crawl, and the queue of CrashSafeScheduler, into Redis.

    The first worker runs the spider's start() again, like each run of a job.

    Args:
        directory: JOBDIR/bloom or BLOOM_DIR, which is not changed. No crawl may use it.
        server: the connection.
        key: BLOOM_REDIS_KEY, with the spider's name in place of %(spider)s. The server must not
            have this filter yet.

    Returns:
        The figures of the copy, which was read back and compared.

    Raises:
        StorageError: or one of its children: the directory has no filter, or its filter is in use
            or was not closed; the server has the filter already; the copy differs. The server then
            has no part of the copy.
    """
    directory = Path(directory)
    found = filter_files(directory)
    if not found:
        raise StorageError(f"{directory} holds no filter; give JOBDIR/bloom, or the BLOOM_DIR")
    fingerprinter = FileGeneration.at(found[-1]).origin.fingerprinter
    with ExitStack() as stack:
        stack.callback(lock_directory(directory).release)  # also the lock of the job
        files = open_files(directory, fingerprinter, Job(None, "stop")).files
        for file in files:
            stack.callback(file.close)
        check_closed(directory, files)
        if added := count_added(directory.parent):
            raise StorageError(
                f"{directory.parent} has {counted(added, 'request')} that `scrapy bloom add` has "
                "handed over, and that no crawl has queued yet: resume the job for a moment first"
            )
        return _uploaded(files, database_beside(directory), server, key)


def _uploaded(
    files: Sequence[FilterFile], database: Path | None, server: RedisServer, key: str
) -> Copied:
    filter_ = unjoined(server, key)
    filter_.read()  # raises an error if the key is not a filter
    newest = files[-1]
    made = [RedisGeneration(**vars(file.figures)) for file in files]
    queued, now = None, server.now()
    with closing(Maker(server, key)) as maker:
        if not maker.begin("", ""):
            raise _in_the_way(filter_)
        try:
            for file, new in zip(files, made, strict=True):
                maker.make(new, file.filter)
            forgotten = list(forgotten_of(newest.path.parent).all())
            for start in range(0, len(forgotten), _FORGOTTEN_AT_ONCE):
                some = forgotten[start : start + _FORGOTTEN_AT_ONCE]
                maker.add(filter_.keys[-1], now, some)
            info = FilterInfo.of(newest.origin, files[0].created_at)
            fields = {"filter": info.text, "version": secrets.token_hex(8)}
            if database is not None:
                queued = load_queue(database, maker, key)
                fields |= {"pushed": str(queued), "done": "0"}
                if newest.origin.spider:
                    fields["crawl"] = newest.origin.spider
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
    finish(server, key, read_filter(filter_).unfinished)
    return Copied.of(made, queued)


def _in_the_way(filter_: SharedFilter) -> StorageError:
    name, address = filter_.key, filter_.server.address
    if filter_.read() is not None:
        return StorageError(
            f"{address} has a filter {name!r} already; nothing was changed. Give another key, or "
            "remove that filter first"
        )
    return StorageError(
        f"another crawl or copy is creating the filter {name!r} in {address}; nothing was changed. "
        "Try again in a minute"
    )


def download(server: RedisServer, key: str, directory: str | os.PathLike[str]) -> Copied:
    """Save a filter in Redis to a directory, where a single crawl can continue with it.

    Crawls may use the filter meanwhile; the copy may lack requests that they record from now on. If
    the directory is JOBDIR/bloom, and the filter has a queue with requests, the queue is saved as
    the queue of the job; then no worker may use it. Requests that were in flight are pending in the
    copy.

    Args:
        server: the connection.
        key: BLOOM_REDIS_KEY, with the spider's name in place of %(spider)s.
        directory: JOBDIR/bloom or BLOOM_DIR, without a filter or queue yet; created if missing.

    Returns:
        The figures of the copy, which was read back and compared.

    Raises:
        StorageError: or one of its children: the server has no such filter, or has lost parts of
            it; the directory has a filter, or no room. Unfinished files are removed.
    """
    target = Path(directory)
    state = read_state(server, key)
    if state is None or not state.total or target.name != "bloom":
        return _downloaded(server, key, target, None)
    if state.live:
        names = ", ".join(each.name for each in state.live)
        raise StorageError(
            f"workers use the queue {key!r} in {server.address} now: {names}; nothing was copied. "
            "Stop them, and try again (a killed worker counts until its lease expires, "
            "BLOOM_QUEUE_LEASE_SECS)"
        )
    database = target.parent / jobdir.DATABASE
    with no_new_directory(target), ExitStack() as stack:
        stack.callback(lock_directory(target).release)
        if os.path.lexists(database) or jobdir.has_queued(target.parent):
            raise StorageError(
                f'{target.parent} holds a queue already; give it the "bloom" of another JOBDIR'
            )
        with removed_after_error(database):
            return _downloaded(server, key, target, database)


def _downloaded(server: RedisServer, key: str, target: Path, database: Path | None) -> Copied:
    filter_, queued = unjoined(server, key), None

    def save() -> None:
        # The filter was read before the queue, and so has no request that the queue lacks. But the
        # copy of the queue appears before that of the filter.
        nonlocal queued
        if database is not None:
            queued = save_queue(server, key, database)
            sync_directory(database.parent)

    otherwise, is_locked = "it an empty directory", database is not None
    with new_filter(target, otherwise=otherwise, before=save, is_locked=is_locked) as files:
        stored = read_filter(filter_)
        origin = Origin(
            salt=bytes.fromhex(stored.info.salt),
            fingerprinter=stored.info.fingerprinter,
            spider=stored.info.spider,
            error_rate=stored.info.error_rate,
        )
        for each in stored.generations:
            new = FileGeneration(
                path=draft_directory(target) / file_name(each.number),
                origin=origin,
                oldest=stored.generations[0].number,
                **vars(each.figures),
            )

            def fill(bits: BloomFilter, each: RedisGeneration = each) -> int:
                for chunk, data in enumerate(chunks(filter_, each)):
                    blocks = each.blocks(chunk)
                    bits.add_blocks(blocks.start, data)
                    if bytes(bits.blocks(blocks.start, blocks.stop)) != data:
                        raise StorageError(
                            f"the copy in {target} differs, and was removed. Check the memory and "
                            "the disk of this machine, and try again"
                        )
                return each.count

            files.append(FilterFile.create(new, fill))
        add_forgotten(draft_directory(target), RedisForgotten(server, key, stored.id).all())
    return Copied.of(stored.generations, queued)

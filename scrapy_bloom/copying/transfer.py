"""Copying a filter and its queue between a directory and Redis: the same blocks, byte for byte.

The queue is that of CrashSafeScheduler. At no instant is there a copy of the filter without that of
the queue: it would report the pending requests as duplicates.
"""

import os
import secrets
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

from scrapy_bloom.copying.new_filter import add_forgotten, new_filter, no_new_directory
from scrapy_bloom.copying.queues import (
    load_queue,
    removed_after_error,
    save_queue,
    waiting_database,
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
from scrapy_bloom.queues.shared_state import read_state
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.filter import SharedFilter
from scrapy_bloom.redis.forgotten import RedisForgotten
from scrapy_bloom.redis.making import Maker, finish
from scrapy_bloom.redis.reader import chunks, read_filter, unjoined
from scrapy_bloom.redis.stored import FilterInfo, RedisGeneration

_FORGOTTEN_AT_ONCE = 1000


class Copied(NamedTuple):
    """The figures of a copy, found alike on both sides.

    Attributes:
        generations: how many.
        requests: recorded in them.
        nbytes: size of their blocks.
        queued: requests in the queue that was copied with them; None without one.
    """

    generations: int
    requests: int
    nbytes: int
    queued: int | None

    @classmethod
    def of(cls, generations: Sequence[RedisGeneration], queued: int | None) -> "Copied":
        """Return the figures of these generations."""
        requests = sum(each.count for each in generations)
        nbytes = sum(each.geometry.nbytes for each in generations)
        return cls(len(generations), requests, nbytes, queued)


def upload(directory: str | os.PathLike[str], server: RedisServer, key: str) -> Copied:
    """Copy the filter of a closed crawl, and the queue of CrashSafeScheduler, into Redis.

    The spider's start() is run again by the first worker, as by each run of a job.

    Args:
        directory: JOBDIR/bloom or BLOOM_DIR; it is left as it is, and must not be in use.
        server: the connection.
        key: as in BLOOM_REDIS_KEY, with the spider's name in place of %(spider)s. There must not
            be a filter yet.

    Returns:
        What was copied, after it was read back and compared.

    Raises:
        StorageError: or one of its children: there is no filter, or one that is in use or was not
            closed; there is one in Redis already; the copy differs. Nothing is then in Redis that
            was not there before.
    """
    directory = Path(directory)
    found = filter_files(directory)
    if not found:
        raise StorageError(f"{directory} holds no filter; give it JOBDIR/bloom, or the BLOOM_DIR")
    fingerprinter = FileGeneration.at(found[-1]).origin.fingerprinter
    with ExitStack() as stack:
        stack.callback(lock_directory(directory).release)  # which is also that of the job
        files = open_files(directory, fingerprinter, Job(None, "stop")).files
        for file in files:
            stack.callback(file.close)
        check_closed(directory, files)
        return _uploaded(files, waiting_database(directory), server, key)


def _uploaded(
    files: Sequence[FilterFile], database: Path | None, server: RedisServer, key: str
) -> Copied:
    filter_ = unjoined(server, key)
    filter_.read()  # what is no filter is refused
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
                f"{server.address}: {error}; what was copied so far was removed"
            ) from error
    if answer != "ok":
        raise StorageError(
            f"{server.address}: another crawl or copy has made a filter {key!r} meanwhile, or the "
            "server has lost a part of this copy; this copy was removed"
        )
    # Makes the keys permanent. If this fails, the first crawl that joins does it.
    finish(server, key, read_filter(filter_).unfinished)
    return Copied.of(made, queued)


def _in_the_way(filter_: SharedFilter) -> StorageError:
    name, address = filter_.key, filter_.server.address
    if filter_.read() is not None:
        return StorageError(
            f"{address} has a filter {name!r} already; nothing was changed: give it another key, "
            "or remove that one"
        )
    return StorageError(
        f"another crawl or copy is making the filter {name!r} in {address}; nothing was changed: "
        "try again in a minute"
    )


def download(server: RedisServer, key: str, directory: str | os.PathLike[str]) -> Copied:
    """Save a filter in Redis to a directory, where a single crawl can go on with it.

    Crawlers may use the filter meanwhile; what they record from now on may be missing in the copy.
    If the directory is JOBDIR/bloom, and the filter has a queue with requests, that is saved as the
    job's, and no worker may use it. What workers that died had in flight is pending in the copy.

    Args:
        server: the connection.
        key: as in BLOOM_REDIS_KEY, with the spider's name in place of %(spider)s.
        directory: JOBDIR/bloom or BLOOM_DIR, without a filter or queue yet; made if missing.

    Returns:
        What was copied, after the files were read back and compared.

    Raises:
        StorageError: or one of its children: there is no filter in Redis, or parts of it were
            lost; the directory holds one, or has no room. Files that were begun are removed.
    """
    target = Path(directory)
    state = read_state(server, key)
    if state is None or not state.waiting or target.name != "bloom":
        return _downloaded(server, key, target, None)
    if state.live:
        names = ", ".join(each.name for each in state.live)
        raise StorageError(
            f"workers use the queue {key!r} in {server.address} now: {names}; nothing was copied. "
            "Stop them, and try again (one that was killed counts until its lease is over, "
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
        # The filter is read first: what is recorded from now on is in the queue already. But the
        # queue is in its place first.
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
                            f"the copy in {target} differs; it was removed: try again, and check "
                            "the memory and disk of this machine"
                        )
                return each.count

            files.append(FilterFile.create(new, fill))
        add_forgotten(draft_directory(target), RedisForgotten(server, key, stored.id).all())
    return Copied.of(stored.generations, queued)

"""Copying a filter between a directory and Redis: the same blocks, byte for byte."""

import binascii
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bitarray import bitarray

from scrapy_bloom.copying.new_filter import add_forgotten, new_filter
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.files.directory import check_closed, open_files
from scrapy_bloom.files.header import FileGeneration
from scrapy_bloom.files.mapping import FilterFile
from scrapy_bloom.files.reader import draft_directory, forgotten_beside
from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.generations.policy import Origin
from scrapy_bloom.job.locks import lock_directory
from scrapy_bloom.job.paths import file_name, filter_files
from scrapy_bloom.job.recovery import Job
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.forgotten import RedisForgotten
from scrapy_bloom.redis.keys.blocks import DRAFT_SECS
from scrapy_bloom.redis.keys.meta import CHUNK_BLOCKS, FilterInfo, RedisGeneration
from scrapy_bloom.redis.keys.store import RedisStore


class Copied(NamedTuple):
    """The figures of a copy, found alike on both sides.

    Attributes:
        generations: how many.
        requests: recorded in them.
        nbytes: size of their blocks.
        bits: how many bits are set.
        checksum: CRC32 of the blocks, generation after generation.
    """

    generations: int
    requests: int
    nbytes: int
    bits: int
    checksum: int


class QueueDraft(NamedTuple):
    """A queue that is written to Redis, and becomes the filter's when that is known.

    Attributes:
        key: of what waits in it; it expires.
        absent: keys that must not be there.
        publish: commands that make it known.
    """

    key: str
    absent: Sequence[str]
    publish: Sequence[Sequence[object]]


def upload(
    directory: str | os.PathLike[str],
    server: RedisServer,
    key: str,
    queue: QueueDraft | None = None,
    *,
    is_locked: bool = False,
) -> Copied:
    """Copy the filter of a closed crawl into Redis, where crawlers then share it.

    Args:
        directory: JOBDIR/bloom or BLOOM_DIR; it is left as it is.
        server: the connection.
        key: as in BLOOM_REDIS_KEY, with the spider's name in place of %(spider)s. There must not
            be a filter yet.
        queue: becomes known in the same step as the filter.
        is_locked: the caller has the lock of the directory.

    Returns:
        What was copied, after it was read back and compared.

    Raises:
        StorageError: or one of its children: there is no filter, or one that is in use or was not
            closed; there is one in Redis already; the copy differs. Nothing is then in Redis that
            was not there before.
    """
    directory, store = Path(directory), RedisStore(server, key)
    found = filter_files(directory)
    if not found:
        raise StorageError(f"{directory} holds no filter; give it JOBDIR/bloom, or the BLOOM_DIR")
    fingerprinter = FileGeneration.at(found[-1]).origin.fingerprinter
    with ExitStack() as stack:
        if not is_locked:
            stack.callback(lock_directory(directory).release)
        files = open_files(directory, fingerprinter, Job(None, "stop")).files
        for file in files:
            stack.callback(file.close)
        check_closed(directory, files)
        return _uploaded(files, store, queue)


def _uploaded(files: Sequence[FilterFile], store: RedisStore, queue: QueueDraft | None) -> Copied:
    if store.read().info is not None:
        raise StorageError(
            f"{store.server.address} has a filter {store.key!r} already; nothing was changed: give "
            "it another key, or remove that one"
        )
    newest = files[-1]
    info = FilterInfo.of(newest.origin, files[0].created_at)
    forgotten_there = RedisForgotten(store.server, store.key, info.epoch)
    store.drafts.keys = [forgotten_there.name, *([queue.key] if queue else [])]
    made: list[RedisGeneration] = []
    try:
        for file in files:
            new = RedisGeneration(epoch=info.epoch, **vars(file.figures))
            made.append(new)
            store.create(new, file.filter)
            if file is not newest:
                store.blocks.seal(new)
        here = _Digest.of(_file_chunks(files))
        _compare(here, _Digest.of(_chunks(store, made)), store.server.address)
        forgotten = list(forgotten_beside(newest.path.parent).all())
        forgotten_there.add(forgotten, secs=DRAFT_SECS)
        publish, absent = (queue.publish, queue.absent) if queue else ((), ())
        store.publish_filter(info, made, ("PERSIST", forgotten_there.name), *publish, absent=absent)
    except BaseException:
        if store.read().info != info:  # else we were interrupted when all was done
            for each in made:
                store.discard(each.id, each.num_chunks)
            forgotten_there.remove_all()
        raise
    return here.copied(made)


def _chunks(store: RedisStore, generations: Sequence[RedisGeneration]) -> Iterator[bytes]:
    for generation in generations:
        for chunk in store.blocks.chunks(generation):
            store.drafts.renew()
            yield chunk


def download(
    server: RedisServer,
    key: str,
    directory: str | os.PathLike[str],
    *,
    before: Callable[[], None] = lambda: None,
    is_locked: bool = False,
) -> Copied:
    """Save a filter in Redis to a directory, where a single crawl can go on with it.

    Crawlers may use it meanwhile; what they record from now on may be missing in the copy.

    Args:
        server: the connection.
        key: as in BLOOM_REDIS_KEY, with the spider's name in place of %(spider)s.
        directory: JOBDIR/bloom or BLOOM_DIR, without a filter yet; made if missing.
        before: called when the files are complete, before they are put in their place.
        is_locked: the caller has the lock of the directory.

    Returns:
        What was copied, after the files were read back and compared.

    Raises:
        StorageError: or one of its children: there is no filter in Redis, or parts of it were
            lost; the directory holds one, or has no room. Files that were begun are removed.
    """
    target, store = Path(directory), RedisStore(server, key)
    received = _Digest()
    otherwise = "it an empty directory"
    with new_filter(target, otherwise=otherwise, before=before, is_locked=is_locked) as files:
        info, generations = store.read_filter()
        origin = Origin(
            salt=bytes.fromhex(info.salt),
            fingerprinter=info.fingerprinter,
            spider=info.spider,
            error_rate=info.error_rate,
        )
        for each in generations:
            new = FileGeneration(
                path=draft_directory(target) / file_name(each.number),
                origin=origin,
                oldest=generations[0].number,
                **vars(each.figures),
            )

            def fill(bits: BloomFilter, each: RedisGeneration = each) -> int:
                for chunk, data in enumerate(store.blocks.chunks(each)):
                    received.add(data)
                    bits.add_blocks(each.blocks(chunk).start, data)
                return each.count

            files.append(FilterFile.create(new, fill))
        _compare(received, _Digest.of(_file_chunks(files)), str(target))
        forgotten = RedisForgotten(server, key, info.epoch).everything()
        add_forgotten(draft_directory(target), forgotten)
    return received.copied(generations)


@dataclass
class _Digest:
    """Set bits and CRC32 of blocks, one after the other."""

    bits: int = 0
    checksum: int = 0

    def add(self, data: bytes | memoryview) -> None:
        self.bits += bitarray(buffer=data).count()
        self.checksum = binascii.crc32(data, self.checksum)

    @classmethod
    def of(cls, chunks: Iterable[bytes | memoryview]) -> "_Digest":
        new = cls()
        for chunk in chunks:
            new.add(chunk)
        return new

    def copied(self, generations: Sequence[RedisGeneration]) -> Copied:
        requests = sum(each.count for each in generations)
        nbytes = sum(each.geometry.nbytes for each in generations)
        return Copied(len(generations), requests, nbytes, self.bits, self.checksum)


def _file_chunks(files: Iterable[FilterFile]) -> Iterator[memoryview]:
    for bits in (file.filter for file in files):
        for start in range(0, bits.num_blocks, CHUNK_BLOCKS):
            yield bits.blocks(start, min(start + CHUNK_BLOCKS, bits.num_blocks))


def _compare(source: _Digest, copy: _Digest, what: str) -> None:
    if copy != source:
        raise StorageError(
            f"the copy in {what} differs ({copy} in place of {source}); it was removed: try "
            "again, and check the memory and disk of that machine"
        )

"""Copying a filter between a directory and Redis: the same blocks, byte for byte."""

import binascii
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitarray import bitarray

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.files import forgotten as forgotten_file
from scrapy_bloom.files.directory import FilterDirectory, check_free, set_changed_at
from scrapy_bloom.files.forgotten import ForgottenFile
from scrapy_bloom.files.header import Header, State, read_header
from scrapy_bloom.files.mapping import FilterFile
from scrapy_bloom.files.reader import forgotten_beside
from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.job.paths import filter_files
from scrapy_bloom.job.recovery import Job
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.forgotten import RedisForgotten, remove_forgotten
from scrapy_bloom.redis.keys.meta import CHUNK_BLOCKS, FilterInfo, RedisGeneration
from scrapy_bloom.redis.keys.store import RedisStore
from scrapy_bloom.redis.reader import chunks_of


@dataclass(frozen=True)
class Copied:
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


def upload(
    directory: str | os.PathLike[str],
    url: str,
    key: str,
    *,
    params: Mapping[str, Any] | None = None,
    cluster: bool = False,
    sentinel: str | None = None,
    deadline_secs: float = 30.0,
) -> Copied:
    """Copy the filter of a closed crawl into Redis, where crawlers then share it.

    Args:
        directory: JOBDIR/bloom or BLOOM_DIR; it is left as it is.
        url: as in BLOOM_REDIS_URL.
        key: as in BLOOM_REDIS_KEY, with the spider's name in place of %(spider)s. There must not
            be a filter yet.
        params: options of redis-py for what the URL does not say, as in REDIS_PARAMS.
        cluster: as in BLOOM_REDIS_CLUSTER.
        sentinel: as in BLOOM_REDIS_SENTINEL.
        deadline_secs: as in BLOOM_REDIS_DEADLINE_SECS.

    Returns:
        What was copied, after it was read back and compared.

    Raises:
        StorageError: or one of its children: there is no filter, or one that is in use or was not
            closed; there is one in Redis already; the copy differs. Nothing is then in Redis that
            was not there before.
    """
    with closing(
        RedisServer(
            url, params=params, cluster=cluster, sentinel=sentinel, deadline_secs=deadline_secs
        )
    ) as server:
        return copy_to_redis(Path(directory), RedisStore(server, key))


def download(
    url: str,
    key: str,
    directory: str | os.PathLike[str],
    *,
    params: Mapping[str, Any] | None = None,
    cluster: bool = False,
    sentinel: str | None = None,
    deadline_secs: float = 30.0,
) -> Copied:
    """Save a filter in Redis to a directory, where a single crawl can go on with it.

    Crawlers may use it meanwhile; what they record from now on may be missing in the copy.

    Args:
        url: as in BLOOM_REDIS_URL.
        key: as in BLOOM_REDIS_KEY, with the spider's name in place of %(spider)s.
        directory: JOBDIR/bloom or BLOOM_DIR, without a filter yet; made if missing.
        params: options of redis-py for what the URL does not say, as in REDIS_PARAMS.
        cluster: as in BLOOM_REDIS_CLUSTER.
        sentinel: as in BLOOM_REDIS_SENTINEL.
        deadline_secs: as in BLOOM_REDIS_DEADLINE_SECS.

    Returns:
        What was copied, after the files were read back and compared.

    Raises:
        StorageError: or one of its children: there is no filter in Redis, or parts of it were
            lost; the directory holds one, or has no room. Files that were begun are removed.
    """
    with closing(
        RedisServer(
            url, params=params, cluster=cluster, sentinel=sentinel, deadline_secs=deadline_secs
        )
    ) as server:
        return copy_from_redis(RedisStore(server, key), Path(directory))


def copy_to_redis(directory: Path, store: RedisStore) -> Copied:
    """Copy a filter from files into Redis; see `upload`."""
    found = filter_files(directory)
    if not found:
        raise StorageError(f"{directory} holds no filter; give it JOBDIR/bloom, or the BLOOM_DIR")
    source = FilterDirectory(
        directory,
        fingerprinter=read_header(found[-1])[0].fingerprinter,
        job=Job(None, "stop"),
    )
    with ExitStack() as stack:
        source.lock()
        stack.callback(source.unlock)
        files = source.load()
        for file in files:
            stack.callback(file.close)
        return _uploaded(files, store)


def copy_from_redis(store: RedisStore, directory: Path) -> Copied:
    """Copy a filter from Redis into files; see `download`."""
    check_free(directory)
    target = FilterDirectory(directory, fingerprinter="", job=Job(None, "stop"))
    target.lock()
    try:
        if filter_files(directory):
            raise StorageError(f"{directory} holds a filter already; give it an empty directory")
        return _downloaded(store, target)
    finally:
        target.unlock()


def _uploaded(files: Sequence[FilterFile], store: RedisStore) -> Copied:
    stored = store.read()
    if stored.info is not None:
        raise StorageError(
            f"{store.server.address} has a filter {store.key!r} already; nothing was changed: give "
            "it another key, or remove that one"
        )
    newest = files[-1]
    info = FilterInfo(
        salt=newest.header.salt.hex(),
        fingerprinter=newest.header.fingerprinter,
        spider=newest.header.spider,
        created_at=files[0].header.created_at,
    )
    made: list[RedisGeneration] = []
    try:
        for file in files:
            new = RedisGeneration(**vars(file.figures))
            made.append(new)
            store.create(new, file.filter)
            if file is not newest:
                store.blocks.seal(new)
        here = _Digest.of(_file_chunks(files))
        there = _Digest.of(chunk for each in made for chunk in chunks_of(store, each))
        _compare(here, there, store.server.address)
        if forgotten := list(forgotten_beside(newest.path.parent).all()):
            _forgotten(store, info).add(forgotten)
        _publish(store, info, made)
    except BaseException:
        for each in made:
            store.discard(each.id, each.num_chunks)
        remove_forgotten(store.server, store.key, info.epoch)
        raise
    return here.copied(made)


def _downloaded(store: RedisStore, target: FilterDirectory) -> Copied:
    info, generations = store.read_filter()
    received = _Digest()
    files: list[FilterFile] = []
    try:
        for each in generations:
            header = Header(
                geometry=each.geometry,
                capacity=each.capacity,
                error_rate=each.error_rate,
                salt=bytes.fromhex(info.salt),
                fingerprinter=info.fingerprinter,
                spider=info.spider,
                created_at=each.created_at,
                generation=each.number,
            )
            # In use, until all are there: should we be killed, what there is is no filter.
            state = State(in_use=True, open_until=each.open_until, oldest=generations[0].number)

            def fill(bits: BloomFilter, each: RedisGeneration = each) -> int:
                for chunk, data in enumerate(chunks_of(store, each)):
                    received.add(data)
                    bits.add_blocks(each.blocks(chunk).start, data)
                return each.count

            files.append(target.create(header, state, fill))
        _compare(received, _Digest.of(_file_chunks(files)), str(target.path))
        if forgotten := _forgotten(store, info).everything():
            with closing(ForgottenFile(target.path / forgotten_file.NAME)) as copy:
                copy.add(forgotten)
        for file in files:
            file.save_state(in_use=False)
            file.sync()
    except BaseException:
        for path in [*(file.path for file in files), *forgotten_file.files(target.path)]:
            path.unlink()
        raise
    finally:
        for file in files:
            file.close()
            set_changed_at(file.path)
    return received.copied(generations)


def _forgotten(store: RedisStore, info: FilterInfo) -> RedisForgotten:
    return RedisForgotten(store.server, store.key, lambda: info.epoch, store.server.now)


def _publish(store: RedisStore, info: FilterInfo, made: Sequence[RedisGeneration]) -> None:
    if not store.publish_filter(info, made):
        raise StorageError(
            f"{store.server.address}: another crawler made a filter {store.key!r} meanwhile; the "
            "copy was removed"
        )


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
        return Copied(
            generations=len(generations),
            requests=sum(each.count for each in generations),
            nbytes=sum(each.geometry.nbytes for each in generations),
            bits=self.bits,
            checksum=self.checksum,
        )


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

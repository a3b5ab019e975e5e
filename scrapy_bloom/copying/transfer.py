"""Copy a filter and the queue of CrashSafeScheduler between a directory and Redis.

The blocks are copied byte for byte. A copy of the filter never appears before the copy of the
queue, because it would report the pending requests as duplicates.
"""

import os
import secrets
import struct
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

from scrapy_bloom.copying.merging import add_forgotten, new_filter
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.files.directory import FilterReader, check_closed
from scrapy_bloom.files.file import FileGeneration, FilterFile
from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.generations.lifecycle import NoRoomError
from scrapy_bloom.generations.policy import FilterStatus
from scrapy_bloom.job import jobdir
from scrapy_bloom.queues.batch import Found
from scrapy_bloom.queues.job_state import (
    QueuedRequest,
    count_added,
    read_counts,
    read_dead,
    read_requests,
    write_requests,
)
from scrapy_bloom.queues.shared import member_start
from scrapy_bloom.queues.shared_state import SETS, read_state
from scrapy_bloom.queues.shared_state import read_requests as read_shared_requests
from scrapy_bloom.queues.sqlite import DEAD, MOST_DEATHS, PENDING, SET_ASIDE, SUSPECT, unusable
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.forgotten import RedisForgotten
from scrapy_bloom.redis.making import Maker, finish
from scrapy_bloom.redis.scripts import keys_of
from scrapy_bloom.redis.stored import RedisGeneration, chunks, described, read_existing, read_stored
from scrapy_bloom.text import counted

_WRITTEN = 100  # members that are written to a sorted set at once, or fewer if one is large
_LARGE_BYTES = 100_000
_NEWEST_FIRST = 2**53  # minus a number: the position, if the newest comes first

# The state of requests in each set in Redis. Requests in flight are copied to "pending".
_STATES = {
    "pending": PENDING,
    "leased": PENDING,
    "aside": SET_ASIDE,
    "suspects": SUSPECT,
    "dead": DEAD,
}


def upload(
    directory: str | os.PathLike[str], server: RedisServer, key: str
) -> tuple[FilterStatus, int | None]:
    """Copy the filter of a closed crawl, and the queue of CrashSafeScheduler, into Redis.

    The first worker runs the spider's start() again, like each run of a job.

    Args:
        directory: JOBDIR/bloom or BLOOM_DIR, which is not changed. No crawl may use it.
        server: the connection.
        key: BLOOM_REDIS_KEY, with the spider's name in place of %(spider)s. The server must not
            have this filter yet.

    Returns:
        The figures of the copy, which was read back and compared; and how many requests of a queue
        were copied, or None if there is no queue.

    Raises:
        StorageError: or one of its children: the directory has no filter, or its filter is in use
            or was not closed; the server has the filter already; the copy differs. The server then
            has no part of the copy.
    """
    directory = Path(directory)
    if not jobdir.filter_files(directory):
        raise StorageError(f"{directory} holds no filter; give JOBDIR/bloom, or the BLOOM_DIR")
    with ExitStack() as stack:
        stack.callback(jobdir.lock_directory(directory).release)  # also the lock of the job
        reader = stack.enter_context(closing(FilterReader(directory)))
        check_closed(directory, reader.files)
        if added := count_added(directory.parent):
            raise StorageError(
                f"{directory.parent} has {counted(added, 'request')} that `scrapy bloom add` has "
                "handed over, and that no crawl has queued yet: resume the job for a moment first"
            )
        return _uploaded(reader, _database_beside(directory), server, key)


def _database_beside(directory: Path) -> Path | None:
    """Return the database of the job with the filter JOBDIR/bloom, if it has requests.

    Raises StorageError if the file is not a database of ours, or is damaged: the copied filter
    would report the lost requests as duplicates.
    """
    database = directory.parent / jobdir.DATABASE
    if directory.name != "bloom" or not database.exists():
        return None
    if not jobdir.is_database(database):
        raise unusable(database, "it is empty, or no queue of CrashSafeScheduler")
    return database if sum(read_counts(database)) or read_dead(database) else None


def _uploaded(
    reader: FilterReader, database: Path | None, server: RedisServer, key: str
) -> tuple[FilterStatus, int | None]:
    if read_stored(server, key) is not None:
        raise StorageError(
            f"{server.address} has a filter {key!r} already; nothing was changed. Give another "
            "key, or remove that filter first"
        )
    origin = reader.files[-1].origin
    made = [RedisGeneration(**vars(each)) for each in reader.generations]
    queued, now = None, server.now()
    with closing(Maker(server, key)) as maker:
        if not maker.begin("", ""):
            raise StorageError(
                f"another crawl or copy is creating the filter {key!r} in {server.address}; "
                "nothing was changed. Try again in a minute"
            )
        try:
            for file, new in zip(reader.files, made, strict=True):
                maker.make(new, file.filter)
            forgotten = list(reader.forgotten.all())
            for start in range(0, len(forgotten), _WRITTEN):
                maker.add(keys_of(key)[-1], now, forgotten[start : start + _WRITTEN])
            fields = {"filter": described(origin), "version": secrets.token_hex(8)}
            if database is not None:
                queued = _load_queue(database, maker, key)
                fields |= {"pushed": str(queued), "done": "0"}
                if origin.spider:
                    fields["crawl"] = origin.spider
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
    return FilterStatus.of(f"{server.address}, key {key}", made, origin.error_rate), queued


def _load_queue(database: Path, maker: Maker, key: str) -> int:
    """Write the requests of a job into the sets of a new filter; return their number.

    The requests get the positions 1 to that number, so that the next request continues them.
    """
    _, pending, _, _, suspects, dead, *_ = keys_of(key)
    names = {SUSPECT: suspects, DEAD: dead}
    batches: dict[str, list[bytes]] = {pending: [], suspects: [], dead: []}
    number = 0
    for number, request in enumerate(read_requests(database), 1):
        name = names.get(request.state, pending)
        batches[name].append(member := _packed(number, request))
        if len(batches[name]) == _WRITTEN or len(member) > _LARGE_BYTES:
            maker.add(name, 0, batches[name])
            batches[name] = []
    for name, rest in batches.items():
        if rest:
            maker.add(name, 0, rest)
    return number


def _packed(number: int, request: QueuedRequest) -> bytes:
    found = request.found
    position = _NEWEST_FIRST - number if found.newest_first else number
    deaths = min(request.deaths, MOST_DEATHS)
    workers = b"".join(b"%016x" % each for each in range(deaths))  # any ids: these workers are dead
    return b"".join(
        (member_start(found), struct.pack(">QB", position, deaths), workers, found.data)
    )


def download(
    server: RedisServer, key: str, directory: str | os.PathLike[str]
) -> tuple[FilterStatus, int | None]:
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
        The figures of the copy, which was read back and compared; and how many requests of a queue
        were copied, or None if no queue was.

    Raises:
        StorageError: or one of its children: the server has no such filter, or has lost parts of
            it; the directory has a filter, or no room. Unfinished files are removed.
    """
    target = Path(directory)
    state, queued = read_state(server, key), None
    has_queue = state is not None and state.total > 0 and target.name == "bloom"
    if state and has_queue and state.live_workers:
        names = ", ".join(each.name for each in state.live_workers)
        raise StorageError(
            f"workers use the queue {key!r} in {server.address} now: {names}; nothing was copied. "
            "Stop them, and try again (a killed worker counts until its lease expires, "
            "BLOOM_QUEUE_LEASE_SECS)"
        )
    job_dir = target.parent
    with new_filter(target) as drafts:
        if has_queue and (os.path.lexists(job_dir / jobdir.DATABASE) or jobdir.has_queued(job_dir)):
            raise StorageError(
                f'{job_dir} holds a queue already; give it the "bloom" of another JOBDIR'
            )
        stored = read_existing(server, key)
        oldest = stored.generations[0].number
        for each in stored.generations:
            new = FileGeneration(
                path=drafts / jobdir.file_name(each.number),
                origin=stored.origin,
                oldest=oldest,
                **vars(each.figures),
            )

            def fill(bits: BloomFilter, each: RedisGeneration = each) -> int:
                for chunk, data in enumerate(chunks(server, key, each)):
                    blocks = each.blocks(chunk)
                    bits.add_blocks(blocks.start, data)
                    if bytes(bits.blocks(blocks.start, blocks.stop)) != data:
                        raise StorageError(
                            f"the copy in {target} differs, and was removed. Check the memory "
                            "and the disk of this machine, and try again"
                        )
                return each.count

            FilterFile.create(new, fill).close()
        add_forgotten(drafts, RedisForgotten(server, key).all())
        if has_queue:
            # The filter was read before the queue, and so has no request that the queue lacks.
            queued = write_requests(drafts / jobdir.DATABASE, _shared_requests(server, key))
    return FilterStatus.of(str(target), stored.generations, stored.origin.error_rate), queued


def _shared_requests(server: RedisServer, key: str) -> Iterator[QueuedRequest]:
    """Return each request once, also if a script that failed half-way left it in two sets."""
    known = set()
    for name in reversed(SETS):  # the largest set comes last
        state = _STATES[name]
        for slot, priority, rank, position, deaths, data in read_shared_requests(server, key, name):
            if (position, data) in known:
                continue
            if name != "pending":
                known.add((position, data))
            newest_first = position > _NEWEST_FIRST // 2
            yield QueuedRequest(
                Found(data, None, slot, priority, rank, newest_first),
                state,
                _NEWEST_FIRST - position if newest_first else position,
                deaths if state == SUSPECT else min(deaths, MOST_DEATHS - 1),
            )

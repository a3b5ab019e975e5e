"""How far one server goes: its time per page, and its memory, by the size of a shared crawl."""

import hashlib
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from statistics import median

import scrapy

from benchmarks.script_times import host_of, requests
from benchmarks.shared.report import Section, Table
from scrapy_bloom.generations.policy import Origin, Policy
from scrapy_bloom.queues.collected import MAX_BATCH
from scrapy_bloom.queues.redis_store import RedisStore
from scrapy_bloom.queues.serialized import serialized
from scrapy_bloom.queues.store import Batch, Ended, Entered, Joining, Row
from scrapy_bloom.redis.backend import RedisBackend
from scrapy_bloom.redis.layout import bitmap_key, block_key
from scrapy_bloom.redis.server import RedisServer
from scrapy_bloom.text import size_text
from tests.support.request_queues import fill_shared
from tests.support.servers import PROGRAMS, Server

KEY = "k"
RATE = 1e-9
PAGES = MAX_BATCH // 3  # of a batch: so many are found, taken and done
FACTOR = 100  # between one size and the next
LINKS = 50  # of a page, to pages that are recorded
WRITTEN = 1000  # requests that are written at once, to fill the queue


@dataclass(frozen=True)
class Sizes:
    """The larger crawl, and how often batches are sent.

    Attributes:
        pending: requests in the queue.
        recorded: requests in the filter.
        rounds: how often each crawl is measured, in turn with the other.
        batches: in each round.
    """

    pending: int
    recorded: int
    rounds: int
    batches: int


FULL, QUICK = Sizes(10**6, 10**8, 15, 40), Sizes(10**4, 10**6, 3, 5)


@dataclass
class Figures:
    """What was measured of one crawl, or computed of a larger one.

    Attributes:
        pending: requests in the queue.
        recorded: requests in the filter.
        bytes_pending: memory of the server for each request in the queue.
        bytes_recorded: memory of the server for each request that the filter has room for.
        page_us: microseconds of the server for a page, of each round.
        duplicate_us: likewise for a duplicate.
    """

    pending: int
    recorded: int
    bytes_pending: float
    bytes_recorded: float
    page_us: list[float] = field(default_factory=list)
    duplicate_us: list[float] = field(default_factory=list)


class FullCrawl:
    """A worker of a crawl on a server of its own, whose queue and filter are filled.

    Args:
        server: an empty one.
        pending: requests to put into the queue.
        recorded: requests that the filter has room for, and has recorded nearly all of.
    """

    def __init__(self, server: Server, pending: int, recorded: int) -> None:
        self._client = server.client
        self._loader = RedisServer(server.url)
        spider = scrapy.Spider("shop")
        self._requests = enumerate(requests(spider, 10**12))
        self._spider = spider
        self._ended: list[Ended] = []
        policy = Policy(expected=recorded, error_rate=RATE)
        # Without a mirror, each duplicate comes to the server.
        backend = RedisBackend(RedisServer(server.url), KEY, policy, Origin(), mirror=False)
        before = self._used()
        backend.join()
        self._fill_filter(backend, recorded)
        filled = self._used()
        self._store = RedisStore(backend, lease_secs=3600)
        self._store.open(Joining(spider.name))
        joined = self._used()
        self._fill_queue(pending)
        self.figures = Figures(
            pending, recorded, (self._used() - joined) / pending, (filled - before) / recorded
        )

    def _used(self) -> int:
        return int(self._client.info("memory")["used_memory"])

    def _fill_filter(self, filter_: RedisBackend, recorded: int) -> None:
        """Set half of all bits at random: so many are set in a filter that is nearly full."""
        (generation,) = filter_.live
        for chunk in range(generation.num_chunks):
            name = block_key(KEY, generation.id, chunk)
            self._client.set(name, os.urandom(generation.chunk_bytes(chunk)))
            self._client.setbit(bitmap_key(KEY, generation.id), chunk, 1)
        self._client.hset(KEY, f"count:{generation.number}", recorded * 99 // 100)
        filter_.refresh()

    def _entered(self, count: int) -> list[Entered]:
        """Return so many new requests."""
        return [
            Entered(
                serialized(request.to_dict(spider=self._spider)),
                hashlib.sha1(b"%d" % number).digest(),
                host_of(number),
            )
            for number, request in islice(self._requests, count)
        ]

    def _fill_queue(self, pending: int) -> None:
        """Add requests as the scripts would."""
        for first in range(0, pending, WRITTEN):
            entered = self._entered(min(WRITTEN, pending - first))
            rows = [
                Row(data=entry.data, slot=entry.slot, page=entry.fingerprint, is_filtered=True)
                for entry in entered
            ]
            fill_shared(self._loader, KEY, rows)

    def measure(self, batches: int) -> None:
        """Send batches of new requests, and then batches of the same ones as duplicates."""
        entered = [self._entered(PAGES) for _ in range(batches)]
        used = self._microseconds()
        for some in entered:
            batch = Batch(some, ended=self._ended, want=PAGES)
            self._ended = [Ended(entry.id) for entry in self._store.apply(batch).taken]
            assert len(self._ended) == PAGES
        page = (self._microseconds() - used) / (batches * PAGES)
        self.figures.page_us.append(page)
        known = [entry for some in entered for entry in some]
        starts = range(0, len(known) - MAX_BATCH + 1, MAX_BATCH)
        used = self._microseconds()
        for start in starts:
            self._store.apply(Batch(known[start : start + MAX_BATCH]))
        duplicate = (self._microseconds() - used) / (len(starts) * MAX_BATCH)
        self.figures.duplicate_us.append(duplicate)

    def _microseconds(self) -> float:
        """Return the processor time of the thread that executes the commands."""
        used = self._client.info("cpu")
        return 1e6 * float(used["used_cpu_user_main_thread"] + used["used_cpu_sys_main_thread"])


def run(quick: bool) -> Section:  # noqa: FBT001 - every benchmark is called like this
    sizes = QUICK if quick else FULL
    measured = {program.capitalize(): _measured(program, sizes) for program in PROGRAMS}
    return Section(
        title="One server, by the size of a crawl",
        method=(
            f"A crawl of workers that share CrashSafeScheduler's queue, with {sizes.pending:,} "
            f"pending requests of 500 hosts and {sizes.recorded:,} recorded ones, and another with "
            f"a hundredth of both, in turns. The bits of the filter are set at random, half of "
            f"them; the requests in the queue are pickled ones. A page is a request that is found, "
            f"taken and done; a batch has {PAGES} pages, or {MAX_BATCH} duplicates, of which "
            "no mirror knows. The time is the processor time of the one thread that serves all "
            "clients, with the reading of the batch and the writing of the answer. Computed: "
            f"{FACTOR} times as many recorded and pending. The script does the same for them with "
            "more entries in its sorted sets, so the time grows by as much as from the small crawl "
            "to the large one; the memory of the filter is that of its keys, at a false-positive "
            f"rate of {RATE:g}."
        ),
        tables=[
            Table(
                (
                    name,
                    *("pending", "recorded", "us per page", "us per duplicate"),
                    *("pages per second", f"with {LINKS} duplicates each"),
                    *("bytes per recorded", "bytes per pending", "memory"),
                ),
                [
                    _row("measured", small),
                    _row("measured", large),
                    _row("computed", _computed(small, large)),
                ],
            )
            for name, (small, large) in measured.items()
        ],
        notes=(
            "Pages per second are those at which the thread that executes scripts is busy all the "
            "time. A worker with a mirror (a filter of at most 1 GiB) sends no duplicates.\n"
            "The memory is used by filter and queue, without what a snapshot takes meanwhile."
        ),
    )


def _measured(program: str, sizes: Sizes) -> tuple[Figures, Figures]:
    """Return the figures of the small crawl and of the large one."""
    with ExitStack() as stack:
        crawls = [
            FullCrawl(
                stack.enter_context(Server(program)),
                sizes.pending // factor,
                sizes.recorded // factor,
            )
            for factor in (FACTOR, 1)
        ]
        for number in range(sizes.rounds):
            for crawl in crawls if number % 2 else crawls[::-1]:
                crawl.measure(sizes.batches)
        return crawls[0].figures, crawls[1].figures


def _computed(small: Figures, large: Figures) -> Figures:
    """Return the figures of a crawl that is so much larger as the large one is than the small."""
    recorded = large.recorded * FACTOR
    sizes = [
        Policy(expected=entry, error_rate=RATE).first() for entry in (large.recorded, recorded)
    ]
    now, then = (size.geometry.nbytes / size.capacity for size in sizes)
    return Figures(
        large.pending * FACTOR,
        recorded,
        large.bytes_pending,
        large.bytes_recorded * then / now,
        [_once_more(small.page_us, large.page_us)],
        [_once_more(small.duplicate_us, large.duplicate_us)],
    )


def _once_more(small: Sequence[float], large: Sequence[float]) -> float:
    return median(large) + max(0.0, median(large) - median(small))


def _row(how: str, figures: Figures) -> Sequence[str]:
    page, duplicate = median(figures.page_us), median(figures.duplicate_us)
    nbytes = figures.bytes_pending * figures.pending + figures.bytes_recorded * figures.recorded
    return (
        how,
        f"{figures.pending:,}",
        f"{figures.recorded:,}",
        f"{page:.0f}",
        f"{duplicate:.0f}",
        *(f"{float(f'{1e6 / us:.2g}'):,.0f}" for us in (page, page + LINKS * duplicate)),
        f"{figures.bytes_recorded:.1f}",
        f"{figures.bytes_pending:.0f}",
        size_text(round(nbytes)),
    )

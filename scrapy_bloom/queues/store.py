"""The interface of the stores of CrashSafeScheduler: what a crawl asks of them, and the answers.

A store has the requests of a job that are not done, and the filter of the job. `sqlite_store` is
that of a job directory, `redis_store` that on a Redis server. Values go down to a store, and
results come back: a store calls nobody. It knows no threads: the scheduler calls it in the event
loop or in a thread of its own, one call at a time.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from hashlib import sha1
from typing import Any, NamedTuple, Protocol

from scrapy_bloom.exceptions import StorageError

LARGEST_PRIORITY = 2**63 - 1  # which is also the largest integer of SQLite
MOST_DEATHS = 3  # a request becomes a suspect when so many processes died with it in flight
MOST_TRIES = 5  # a request that failed in so many runs is dead
TRIES_SECS = 3600.0  # between two openings without a run's name that count as tries
TO_ITSELF = "it was redirected to itself"  # the reason of a failed row
TO_OTHERS = "it led to redirects to pages that are not done"

_ORDER = struct.Struct(">QB")  # priority and rank


class State(str, Enum):
    """The states of a row in a store. A visit that is done has no row any more."""

    PENDING = "pending"  # can be taken
    IN_FLIGHT = "in_flight"  # taken by a process, which has not reported its end
    SUSPECT = "suspect"  # was in flight in three processes that died; is taken alone
    WAITING = "waiting"  # was redirected to a page that is open, and ends as that page does
    FAILED = "failed"  # has failed for good; the next run tries it again
    DEAD = "dead"  # has failed in five runs, or was in flight alone when its process died
    UNREADABLE = "unreadable"  # this run cannot deserialize it


class Entered(NamedTuple):
    """A request that enters the queue: as a new row, or in the row of the request it replaces.

    Attributes:
        data: the serialized request.
        fingerprint: the fingerprint that is looked up and recorded; None: the request is neither
            filtered nor a start request.
        slot: the downloader's slot, usually a host.
        priority: any integer, clipped to 64 bits; a higher priority is taken first.
        rank: -128 to 127; within a priority, a lower rank is taken first.
        newest_first: whether the request that was queued last is taken first, among requests of
            the same priority and rank.
        is_filtered: whether it is queued only if its fingerprint is new.
        is_recorded: whether its fingerprint is recorded. Only a row whose request is filtered and
            recorded, or a start request, has a page: its fingerprint.
        passes: whether a filtered request is queued even if it is not new; then its row has no
            page. A subclass of the duplicate filter has let it pass.
        once: whether the request is new once in each run: it is looked up under `once_in(run)` of
            its fingerprint, and recorded under that and under the fingerprint itself.
        is_start: whether start() has yielded it; then `once` is true. If it is not filtered, it
            takes the place of one unfiltered start row of its page that has entered before this
            start() (of several, the first) and is failed, waiting, dead or pending.
        replaces: the id of `Taken` of the request in whose row it enters (a retry or a redirect).
            Without effect if that request is not in flight any more.
        has_parent: whether another request, or start(), leads to this request again if both are
            lost.
        context: what the caller needs when the store has answered. It is not stored.
    """

    data: bytes
    fingerprint: bytes | None = None
    slot: str = ""
    priority: int = 0
    rank: int = 0
    newest_first: bool = True
    is_filtered: bool = True
    is_recorded: bool = True
    passes: bool = False
    once: bool = False
    is_start: bool = False
    replaces: Any = None
    has_parent: bool = True
    context: Any = None

    @property
    def clipped_priority(self) -> int:
        """The priority as stores have it, in 64 bits."""
        return max(-LARGEST_PRIORITY, min(self.priority, LARGEST_PRIORITY))

    @property
    def order(self) -> bytes:
        """Slot, priority and rank as `packed_order` returns them."""
        return packed_order(self.slot, self.clipped_priority, self.rank)


@dataclass
class Row:
    """A visit of a page: from the request that entered the queue to the page that answers.

    It goes through all retries and redirects, and is all that a store knows of the visit. Commands
    and copies read and write rows of all stores in this form.

    Attributes:
        data: the serialized request, now.
        state: its state.
        slot: its slot, now; `priority`, `rank` and `newest_first` are those of its request, too.
        position: positive; raised when it enters, and when it becomes pending again. Within
            priority and rank, the lowest is taken first, or the highest if the newest comes first.
        first: as it first entered: `packed_first`; empty: as it is now.
        page: its fingerprint; None if it has none.
        hops: fingerprints of the pages to which it was redirected, which are recorded when it is
            done.
        is_filtered: whether it was filtered when it first entered.
        is_start: whether start() has yielded it.
        once: whether it is new once in each run.
        was_taken: whether it was in flight before.
        tries: in how many runs it has failed, or waited to the end.
        deaths: how many processes died with it in flight.
        epoch: of a failed or waiting row: the epoch in which it has failed, or begun to wait.
        reason: of a failed row: why.
        waits_for: of a waiting row: the fingerprint of the open page.
    """

    data: bytes
    state: State = State.PENDING
    slot: str = ""
    priority: int = 0
    rank: int = 0
    newest_first: bool = True
    position: int = 0
    first: bytes = b""
    page: bytes | None = None
    hops: Sequence[bytes] = ()
    is_filtered: bool = False
    is_start: bool = False
    once: bool = False
    was_taken: bool = False
    tries: int = 0
    deaths: int = 0
    epoch: int = 0
    reason: str = ""
    waits_for: bytes = b""

    @property
    def pages(self) -> Sequence[bytes]:
        """Its page, and those to which it was redirected."""
        return self.hops if self.page is None else (self.page, *self.hops)

    @property
    def order(self) -> bytes:
        """Slot, priority and rank as `packed_order` returns them."""
        return packed_order(self.slot, self.priority, self.rank)

    @property
    def first_data(self) -> bytes:
        """The serialized request as it first entered; as it is now if that is damaged."""
        with suppress(struct.error):
            return parsed_order(self.first)[-1][1:] if self.first else self.data
        return self.data


class End(str, Enum):
    """How a request in flight ended."""

    DONE = "done"  # its row is removed, and its hops are recorded
    TAKEN_OVER = "taken over"  # its errback has yielded a request; its hops are not recorded
    FAILED = "failed"  # its row is kept for the next run
    UNREADABLE = "unreadable"  # its row is kept as it is
    RETURNED = "returned"  # it was not crawled, and its row is pending as before


class Ended(NamedTuple):
    """The end of a request that was taken.

    Attributes:
        id: the id of `Taken`. Without effect if the request is not in flight any more.
        end: how it ended.
        reason: of a failed request: why, in at most 200 characters.
        awaits: of a request that is done: pages on whose ends it depends, because requests that it
            led to, or itself, were redirected to them, and dropped as duplicates. If one of them,
            other than its own, is open, the row waits for it; if several are, it has failed.
    """

    id: Any
    end: End = End.DONE
    reason: str = ""
    awaits: Sequence[bytes] = ()


class Share(NamedTuple):
    """Slots whose keys are in a range, and the number of requests that a worker may hold of each.

    Attributes:
        first: the beginning of the range, in the order of `slot_key`.
        last: its end, which is not in it.
        number: how many requests of each slot.
    """

    first: bytes
    last: bytes
    number: int


ANY_NUMBER = 10**6  # of requests of a slot, for `Share`
END_OF_SLOTS = b"\xff" * 5
ALL_SLOTS = (Share(b"", END_OF_SLOTS, ANY_NUMBER),)


@dataclass
class Batch:
    """Changes of a queue and its filter that a store applies in one step, and wishes.

    A request is reported as ended only in the batch that contains the requests it led to, or in a
    later batch.

    Attributes:
        entered: requests to be queued, in order.
        recorded: fingerprints that are recorded without a request.
        ended: requests that have ended.
        want: how many requests to take.
        downloads: how many downloads a slot has, without slots that have none. In Redis, also those
            requests count that this worker has taken, and not handed out yet.
        shares: in Redis, the slots of which requests may be taken, in ascending order. Of each
            other slot, another worker has the whole limit.
        own_shares: numbers of slots in these ranges that have limits of their own, by `slot_key`.
        stands_still: whether all requests in flight in this process wait, perhaps for a suspect.
        may_start: whether this worker can run the spider's start().
        start_ended: whether start() has ended in this worker.
        is_over: whether this worker has found that the crawl has ended.
    """

    entered: list[Entered] = field(default_factory=list)
    recorded: list[bytes] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    want: int = 0
    downloads: Mapping[str, int] = field(default_factory=dict)
    shares: Sequence[Share] = ALL_SLOTS
    own_shares: Mapping[bytes, int] = field(default_factory=dict)
    stands_still: bool = False
    may_start: bool = False
    start_ended: bool = False
    is_over: bool = False

    @property
    def changes(self) -> int:
        """The number of changes."""
        lists: tuple[Sized, ...] = (self.entered, self.recorded, self.ended)
        return sum(map(len, lists))


class Taken(NamedTuple):
    """A request that a store has handed out, so that it is in flight.

    Attributes:
        id: identifies the row and this take of it: another take has another id.
        data: the serialized request.
        slot: the downloader's slot, as the store has it.
        tries: in how many runs it has failed.
    """

    id: Any
    data: bytes
    slot: str
    tries: int = 0


@dataclass
class Reply:
    """The reply to a batch.

    Attributes:
        queued: whether each request that entered was queued as pending, also if the first reply
            was lost.
        added: how many fingerprints the batch has recorded, without those of `once_in`.
        taken: requests that are in flight from now on, at most `Batch.want`.
        pending: how many requests can be taken.
        left: how many rows are pending, suspect, in flight in any process, or about to become
            pending or to end because their page is done.
        runs_start: whether this worker has to run the spider's start().
        is_started: whether start() has ended.
        ended_at: when the queue became empty, in seconds since 1970; 0: it is not empty.
        counters: how many requests entered the queue, and how many left it.
        is_stopped: whether `scrapy bloom stop` asks this worker to end.
        is_retired: whether another run has begun since the store was opened, so that this worker
            takes nothing more.
        died: serialized requests that this batch has made dead, because processes died with them.
        given_up: how many requests this batch has made dead, because they have failed in five runs.
        circles: serialized requests that wait for a row that waits for them, since this batch.
        expired: for each worker whose lease has expired, its name and how many requests it had.
        workers: how many workers take requests; they share the limits of slots.
        rank: the place of this worker among them, in the order in which they joined, from 0 on; -1:
            it has taken no requests for a while.
    """

    queued: list[bool] = field(default_factory=list)
    added: int = 0
    taken: list[Taken] = field(default_factory=list)
    pending: int = 0
    left: int = 0
    runs_start: bool = False
    is_started: bool = False
    ended_at: float = 0.0
    counters: tuple[int, int] = (0, 0)
    is_stopped: bool = False
    is_retired: bool = False
    died: list[bytes] = field(default_factory=list)
    given_up: int = 0
    circles: list[bytes] = field(default_factory=list)
    expired: dict[str, int] = field(default_factory=dict)
    workers: int = 1
    rank: int = 0


@dataclass(frozen=True)
class Joining:
    """What a crawl tells a store when it opens it.

    Attributes:
        spider: the name of the spider; a store belongs to one spider.
        run: the name of the run; a name that the store has not had begins a new run; "" and the
            name of the current run join that.
        is_crawl: False: a command, which begins no run and has nothing tried again.
        keeps_failed: whether failed and waiting rows are kept; otherwise they end as done.
    """

    spider: str
    run: str = ""
    is_crawl: bool = True
    keeps_failed: bool = True


@dataclass(frozen=True)
class Opened:
    """What a store tells a crawl that has opened it.

    Attributes:
        run: the name of the current run.
        began: whether this opening has begun the run; the first run of a store has begun, too.
        is_first: whether it is the first run of the store.
        is_late: whether an earlier run has the name of `Joining`, so that there is nothing to do.
        counts: how many requests of each state the store has, before failed ones are retried.
        retried: how many failed and waiting rows become pending, or dead, from now on.
        others: how many other workers there are; 0 in a job directory.
        killed: how many requests were in flight when the last process died.
        died: serialized requests that have become dead at the opening.
        ended_at: when the queue became empty, in seconds since 1970; 0: it is not empty.
    """

    run: str
    began: bool
    counts: Mapping[State, int]
    is_first: bool = False
    is_late: bool = False
    retried: int = 0
    others: int = 0
    killed: int = 0
    died: Sequence[bytes] = ()
    ended_at: float = 0.0


@dataclass(frozen=True)
class Closed:
    """What a store tells a crawl that has closed it.

    Attributes:
        counts: how many requests of each state are left.
        others: how many other workers there are; 0 in a job directory.
        ended_at: when the queue became empty, in seconds since 1970; 0: it is not empty.
    """

    counts: Mapping[State, int] = field(default_factory=dict)
    others: int = 0
    ended_at: float = 0.0


class Progress(NamedTuple):
    """How far the crawl of a queue is, for commands.

    Attributes:
        spider: the name of the spider; empty if no crawl has used the queue yet.
        run: the name of the current run.
        done: how many requests have left the queue since it was created.
        handed_over: how many requests commands have handed over that are not in the queue yet.
        ended_at: when the queue became empty, in seconds since 1970; 0: it is not empty.
    """

    spider: str
    run: str
    done: int
    handed_over: int
    ended_at: float


class Worker(NamedTuple):
    """A process of a crawl, for commands.

    Attributes:
        id: in Redis, the random id of the worker; of a job, that of its process.
        name: host:pid.
        in_flight: how many requests it has in flight.
        is_alive: whether its lease is valid; True of a job.
        done: how many requests it has finished; None: unknown.
        heartbeat_secs: the time since its last heartbeat; None: it sends none.
        lease_secs: after how long without a heartbeat it counts as killed; None: it sends none.
    """

    id: str
    name: str
    in_flight: int
    is_alive: bool = True
    done: int | None = None
    heartbeat_secs: float | None = None
    lease_secs: float | None = None

    @property
    def is_silent(self) -> bool:
        """Whether it has missed at least two heartbeats, of which it sends four per lease."""
        return (self.heartbeat_secs or 0) > (self.lease_secs or 0) / 2


class RejoinedError(StorageError):
    """The store has lost changes of this worker, or its lease, so the worker has joined again.

    Requests that the worker had taken are pending again, and it has a new id.

    Attributes:
        lost: requests of earlier batches that the queue may lack.
    """

    def __init__(self, name: str, lost: Sequence[Entered]) -> None:
        super().__init__(f"the queue in {name} was replaced, or has no lease of this worker")
        self.lost = lost


class Store(Protocol):
    """The requests of a job and their filter.

    A crawl calls `open` first, and `close` last. `knows` may be called in another thread than the
    other methods. Each method may raise a StorageError.

    Attributes:
        name: the place of the store in messages.
        run: a random id of the current run; empty before `open`.
    """

    name: str
    run: bytes

    @property
    def pending(self) -> int:
        """How many requests can be taken, or are about to become pending; in Redis, at last."""

    def open(self, joining: Joining) -> Opened:
        """Open the store, and create it if there is none.

        If another run has begun, the failed and waiting rows become pending as they first entered,
        some with each batch, or dead after five tries; also if nothing else is left, no other
        worker is there, and `joining` does not name the run (what names it joins a run that has
        ended). The latter counts as a try at most once an hour. Unreadable rows become pending,
        too, if there is no other worker.
        """

    def knows(self, fingerprint: bytes, *, once: bool = False) -> bool:
        """Return whether a fingerprint is certainly recorded, without asking a server or a disk.

        With `once`, whether it is recorded for this run.
        """

    def apply(self, batch: Batch) -> Reply:
        """Apply a batch in one step; after an error, the same batch may be applied again.

        **Open** pages are those of rows that were taken and are not done, of rows that are new once
        in each run, and all hops. Rows that are dead do not count. Rows that have failed or begun
        to wait in an earlier epoch count as if they were pending already: without hops, and nothing
        ends them.

        Of these, a store needs an index by page, without the rows that are pending, were never
        taken, and are not `once`: nearly all.

        - **A filtered request** is dropped if it is recorded. If its page is open as a hop, and no
          row has it as its own page, its row waits for that page. Otherwise, it is pending. In both
          cases it is recorded. A request that is new once in each run takes the place of filtered
          rows of its page that are dead, or kept since an earlier epoch, with one try more; it only
          removes them if another row of the index has the page.
        - **A request that replaces another one** takes its row, with a new position, as if it had
          just entered, if it is not filtered. If it is filtered, and its page is one of the row's,
          the row has failed. If the page is open in another row, or dead because processes died,
          the row waits for it. If the page is recorded, and no dead row has it, the row is done.
          Else it becomes a hop (if the request is recorded), and the request takes the row.
        - **A row that is done** is removed; if it was filtered, its pages are recorded: all of them
          in the newest generation if it has hops. Then filtered failed and dead rows of its pages
          are removed. Rows that wait for its pages are done, too: in slices, from a stored list of
          pages.
        - **A row that has failed** and is filtered takes the place of other filtered failed rows of
          its page, with the highest number of tries, and of dead ones.
        - **Rows of an earlier epoch** become pending in slices; start requests when start() has
          ended, because it may yield them again.
        """

    def counts(self) -> Mapping[State, int]:
        """Return how many requests of each state there are."""

    def close(self) -> Closed:
        """Make the requests in flight in this process pending again, and close the store."""


class Queue(Protocol):
    """The queue of a store for commands, which may read it while crawls use it.

    Each method may raise a StorageError.
    """

    def counts(self) -> Mapping[State, int]:
        """Return how many requests of each state there are."""

    def progress(self) -> Progress:
        """Return how far the crawl is."""

    def slots(self) -> Mapping[str, int]:
        """Return how many requests of each slot are pending; the slot that is next comes first."""

    def requests(self, state: State, slot: str | None = None) -> Iterator[Row]:
        """Return the rows of a state, or of one of its slots, in the order of taking."""

    def move(self, state: State, to: State | None, slot: str | None = None) -> int | None:
        """Make rows of a state pending as they first entered, with no tries, or drop them (None).

        Returns their number; None: the change was handed over to the crawl that runs. Suspects,
        requests in flight and unreadable ones cannot be moved.
        """


def once_in(run: bytes, fingerprint: bytes) -> bytes:
    """Return the fingerprint of a request that is new once in each run."""
    return fingerprint + run


def slot_name(slot: str) -> bytes:
    """Return the name of a slot as stores have it."""
    return slot.encode(errors="surrogatepass").replace(b"\0", b"\1")


@lru_cache(maxsize=10_000)
def slot_key(slot: str) -> bytes:
    """Return a hash of the name of a slot (4 bytes), and the name."""
    name = slot_name(slot)
    return sha1(name, usedforsecurity=False).digest()[:4] + name


def packed_order(slot: str, priority: int, rank: int) -> bytes:
    """Return slot, priority and rank so that bytes in ascending order are in the order of taking.

    The slot is without NUL, which ends it.
    """
    return slot_name(slot) + b"\0" + _ORDER.pack(LARGEST_PRIORITY - priority, rank + 128)


def parsed_order(packed: bytes) -> tuple[str, int, int, bytes]:
    """Return slot, priority, rank, and the bytes after them; raise ValueError or struct.error."""
    name, _, rest = packed.partition(b"\0")
    try:
        slot = name.decode(errors="surrogatepass")
    except UnicodeDecodeError:  # untrusted
        slot = name.decode(errors="backslashreplace")
    priority, rank = _ORDER.unpack_from(rest)
    return slot, LARGEST_PRIORITY - priority, rank - 128, rest[_ORDER.size :]


def packed_first(order: bytes, data: bytes, *, newest_first: bool) -> bytes:
    """Return a request as it first entered the queue: `packed_order`, a flag, and its bytes."""
    return order + (b"\1" if newest_first else b"\0") + data

"""The interface of the stores of CrashSafeScheduler: what a crawl asks of them, and the answers.

A store has the requests of a job that are not done, and the filter of the job. `sqlite_store` is
the store of a job directory, `redis_store` the store on a Redis server. A store makes no callbacks
and starts no threads: the scheduler calls it in the event loop or in a thread, one call at a time.
"""

import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from functools import lru_cache
from hashlib import sha1
from typing import Any, NamedTuple, Protocol

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.job.filter import unpack_fingerprints
from scrapy_bloom.text import counted

LARGEST_PRIORITY = 2**63 - 1  # which is also the largest integer of SQLite
MOST_DEATHS = 3  # a request becomes a suspect when so many processes died with it in flight
MOST_TRIES = 5  # a request that failed in so many runs is dead
TRIES_SECS = 3600.0  # between two openings without a run's name that count as tries
TO_ITSELF = "it was redirected to itself"  # the reason of a failed row
TO_OTHERS = "it led to redirects to pages that are not done"

_ORDER = struct.Struct(">QB")  # priority and rank


class State(IntEnum):
    """The states of a row in a store. A visit that is done has no row any more."""

    PENDING = 0  # can be taken
    IN_FLIGHT = 1  # taken by a process, which has not reported its end
    SUSPECT = 2  # was in flight in three processes that died; is taken alone
    WAITING = 3  # was redirected to a page that is open, and ends as that page does
    FAILED = 4  # has failed after all retries of this run; the next run tries it again
    DEAD = 5  # has failed in five runs, or was in flight alone when its process died
    UNREADABLE = 6  # this run cannot deserialize it

    @property
    def label(self) -> str:
        """Its name for people and in JSON."""
        return self.name.lower()


class Entered(NamedTuple):
    """A request that enters the queue: as a new row, or in the row of the request it replaces."""

    data: bytes  # the serialized request
    # The fingerprint that is looked up and recorded; None: the request is neither filtered nor a
    # start request.
    fingerprint: bytes | None = None
    slot: str = ""  # the downloader's slot, usually a host
    priority: int = 0  # any integer, clipped to 64 bits; a higher priority is taken first
    rank: int = 0  # -128 to 127; within a priority, a lower rank is taken first
    # Whether the request that was queued last is taken first, among requests of the same priority
    # and rank.
    newest_first: bool = True
    is_filtered: bool = True  # whether it is queued only if its fingerprint is new
    # Whether its fingerprint is recorded. Only a row whose request is filtered and recorded, or a
    # start request, has a page: its fingerprint.
    is_recorded: bool = True
    # Whether a filtered request is queued even if it is not new; then its row has no page. A
    # subclass of the duplicate filter has let it pass.
    passes: bool = False
    # Whether the request is new once in each run: it is looked up under `once_in(run)` of its
    # fingerprint, and recorded under that and under the fingerprint itself.
    once: bool = False
    # Whether start() has yielded it; then `once` is true. If it is not filtered, it takes the place
    # of one unfiltered start row of its page that has entered before this start() (of several, the
    # first) and is failed, waiting, dead or pending.
    is_start: bool = False
    # The id of `Taken` of the request in whose row it enters (a retry or a redirect). Without
    # effect if that request is not in flight any more.
    replaces: Any = None
    # Whether another request, or start(), leads to this request again if both are lost.
    has_parent: bool = True
    context: Any = None  # what the caller needs when the store has answered; it is not stored

    @property
    def clipped_priority(self) -> int:
        """The priority as stores have it, in 64 bits."""
        return max(-LARGEST_PRIORITY, min(self.priority, LARGEST_PRIORITY))

    @property
    def order(self) -> bytes:
        """Slot, priority and rank as `packed_order` returns them."""
        return packed_order(self.slot, self.clipped_priority, self.rank)


class Row(NamedTuple):
    """A visit of a page: from the request that entered the queue to the page that answers.

    It goes through all retries and redirects, and is all that a store knows of the visit. Commands
    and copies read and write rows of all stores in this form. The file of a job has a column for
    each field, with numbers for states and flags.
    """

    id: int = 0  # in the file of a job
    state: State = State.PENDING
    slot: str = ""  # now; `priority`, `rank` and `position` are those of its request now, too
    priority: int = 0
    rank: int = 0
    # A new number when it enters, and when it becomes pending again, except after a death or a
    # close; negative if the newest comes first. Within priority and rank, the lowest comes first.
    position: int = 0
    takes: int = 0  # how often it was taken; read from Redis: at most 1
    deaths: int = 0  # how many processes died with it in flight
    tries: int = 0  # in how many runs it has failed, or waited to the end
    epoch: int = 0  # of a failed or waiting row: the epoch in which it has failed, or begun to wait
    is_filtered: bool = False  # whether it was filtered when it first entered
    is_start: bool = False  # whether start() has yielded it
    once: bool = False  # whether it is new once in each run
    reason: str = ""  # of a failed row: why
    page: bytes | None = None  # its fingerprint; None if it has none
    # Fingerprints of the pages to which it was redirected, which are recorded when it is done.
    packed_hops: bytes = b""
    waits_for: bytes = b""  # of a waiting row: the fingerprint of the open page
    first: bytes = b""  # as it first entered: `packed_first`; empty: as it is now
    data: bytes = b""  # the serialized request, now

    @property
    def newest_first(self) -> bool:
        """Whether the newest comes first, among rows of the same priority and rank."""
        return self.position < 0

    @property
    def was_taken(self) -> bool:
        """Whether it was in flight before."""
        return self.takes > 0

    @property
    def hops(self) -> tuple[bytes, ...]:
        """The pages to which it was redirected; raises ValueError if they are damaged."""
        return tuple(unpack_fingerprints(self.packed_hops))

    @property
    def pages(self) -> tuple[bytes, ...]:
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
    """The end of a request that was taken."""

    id: Any  # the id of `Taken`; without effect if the request is not in flight any more
    end: End = End.DONE  # how it ended
    reason: str = ""  # of a failed request: why, in at most 200 characters
    # Of a request that is done: pages on whose ends it depends, because requests that it led to, or
    # itself, were redirected to them, and dropped as duplicates. If one of them, other than its
    # own, is open, the row waits for it; if several are, it has failed.
    awaits: Sequence[bytes] = ()


class Share(NamedTuple):
    """Slots whose keys are in a range, and how many requests of each a worker may hold."""

    first: bytes  # the beginning of the range, in the order of `slot_key`
    last: bytes  # its end, which is not in it
    number: int  # how many requests of each slot


ANY_NUMBER = 10**6  # of requests of a slot, for `Share`
END_OF_SLOTS = b"\xff" * 5
ALL_SLOTS = (Share(b"", END_OF_SLOTS, ANY_NUMBER),)


@dataclass
class Batch:
    """Changes of a queue and its filter that a store applies in one step, and wishes.

    A request is reported as ended only in the batch that contains the requests it led to, or in a
    later batch.
    """

    entered: list[Entered] = field(default_factory=list)  # requests to be queued, in order
    # Fingerprints that are recorded without a request.
    recorded: list[bytes] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)  # requests that have ended
    want: int = 0  # how many requests to take
    # How many downloads a slot has; 0 of any other slot, as a Counter has it. In Redis, also those
    # requests count that this worker has taken, and not handed out yet.
    downloads: Mapping[str, int] = field(default_factory=Counter)
    # In Redis, the slots of which requests may be taken, in ascending order. Of each other slot,
    # another worker has the whole limit.
    shares: Sequence[Share] = ALL_SLOTS
    # Whether all requests in flight in this process wait, perhaps for a suspect.
    stands_still: bool = False
    may_start: bool = False  # whether this worker can run the spider's start()
    start_ended: bool = False  # whether start() has ended in this worker
    is_over: bool = False  # whether this worker has found that the crawl has ended

    @property
    def changes(self) -> int:
        """The number of changes."""
        return len(self.entered) + len(self.recorded) + len(self.ended)


class Taken(NamedTuple):
    """A request that a store has handed out, so that it is in flight."""

    id: Any  # identifies the row and this take of it: another take has another id
    data: bytes  # the serialized request
    slot: str  # the downloader's slot, as the store has it
    tries: int = 0  # in how many runs it has failed


@dataclass
class Reply:
    """The reply to a batch."""

    # Whether each request that entered was queued as pending, also if the first reply was lost.
    queued: list[bool] = field(default_factory=list)
    added: int = 0  # how many fingerprints the batch has recorded, without those of `once_in`
    # Requests that are in flight from now on, at most `Batch.want`.
    taken: list[Taken] = field(default_factory=list)
    pending: int = 0  # how many requests can be taken
    # How many rows are pending, suspect, in flight in any process, or about to become pending or to
    # end because their page is done.
    unfinished: int = 0
    runs_start: bool = False  # whether this worker has to run the spider's start()
    is_started: bool = False  # whether start() has ended
    ended_at: float = 0.0  # when the queue became empty, in seconds since 1970; 0: it is not empty
    counters: tuple[int, int] = (0, 0)  # how many requests entered the queue, and how many left it
    is_stopped: bool = False  # whether `scrapy bloom stop` asks this worker to end
    # Whether another run has begun since the store was opened, so that this worker takes nothing
    # more.
    is_retired: bool = False
    # Serialized requests that this batch has made dead, because processes died with them.
    died: list[bytes] = field(default_factory=list)
    # How many requests this batch has made dead, because they have failed in five runs.
    given_up: int = 0
    # Serialized requests that wait for a row that waits for them, since this batch.
    circles: list[bytes] = field(default_factory=list)
    # For each worker whose lease has expired, its name and how many requests it had.
    expired: dict[str, int] = field(default_factory=dict)
    workers: int = 1  # how many workers take requests; they share the limits of slots
    # The place of this worker among them, in the order in which they joined, from 0 on; -1: it has
    # taken no requests for a while.
    rank: int = 0


@dataclass(frozen=True)
class Joining:
    """The arguments with which a crawl opens a store."""

    spider: str  # the name of the spider; a store belongs to one spider
    # The name of the run; a name that the store has not had begins a new run; "" and the name of
    # the current run join that.
    run: str = ""
    is_crawl: bool = True  # False: a command, which begins no run and has nothing tried again
    # Whether failed and waiting rows are kept; otherwise they end as done.
    keeps_failed: bool = True


class RunBegin(NamedTuple):
    """The figures of a queue when a run began, for commands."""

    name: str  # of the run; empty if runs have no names
    began: float  # in seconds since 1970
    entered: int  # how many requests had entered the queue
    done: int  # how many requests had left it
    failed: int
    dead: int
    ended_before: float  # when the queue had become empty; 0: it had not


@dataclass(frozen=True)
class Worker:
    """A process of a crawl, for commands."""

    id: str  # in Redis, the random id of the worker; of a job, that of its process
    name: str  # host:pid
    in_flight: int  # how many requests it has in flight
    is_alive: bool = True  # whether its lease is valid; True of a job
    done: int | None = None  # how many requests it has finished; None: unknown
    heartbeat_secs: float | None = None  # the time since its last heartbeat; None: it sends none
    # After how long without a heartbeat it counts as killed; None: it sends none.
    lease_secs: float | None = None


@dataclass(frozen=True)
class QueueStatus:
    """The figures of a queue at one moment."""

    counts: Mapping[State, int]  # how many requests of each state there are
    spider: str = ""  # the name of the spider; empty if no crawl has used the queue yet
    run: str = ""  # the name of the current run
    done: int = 0  # how many requests have left the queue since it was created
    is_started: bool = False  # whether the spider's start() has ended; of a job: False
    ended_at: float = 0.0  # when the queue became empty, in seconds since 1970; 0: it is not empty
    # How many requests commands have handed over that are not in the queue yet.
    handed_over: int = 0
    # The workers of a queue in Redis, also those whose lease has expired.
    workers: Sequence[Worker] = ()

    @property
    def total(self) -> int:
        """Return how many requests are in the queue, of any state."""
        return sum(self.counts.values())

    @property
    def live_workers(self) -> Sequence[Worker]:
        """Return the workers whose lease is valid."""
        return [worker for worker in self.workers if worker.is_alive]

    @property
    def users(self) -> str:
        """Return the beginning of a sentence on them: the subject and the verb."""
        names = ", ".join(worker.name for worker in self.live_workers)
        verb = "uses" if len(self.live_workers) == 1 else "use"
        return f"{counted(len(self.live_workers), 'worker')} ({names}) {verb}"


@dataclass(frozen=True)
class Opened(QueueStatus):
    """A queue as a crawl has opened it, before failed requests are retried."""

    # Whether this opening has begun the run; the first run of a store has begun, too.
    began: bool = False
    is_first: bool = False  # whether it is the first run of the store
    # Whether an earlier run has the name of `Joining`, so that there is nothing to do.
    is_late: bool = False
    retried: int = 0  # how many failed and waiting rows become pending, or dead, from now on
    others: int = 0  # how many other workers there are; 0 in a job directory
    killed: int = 0  # how many requests were in flight when the last process died
    died: Sequence[bytes] = ()  # serialized requests that have become dead at the opening


class RejoinedError(StorageError):
    """The store has lost changes of this worker, or its lease, so the worker has joined again.

    Requests that the worker had taken are pending again, and it has a new id. `lost` has requests
    of earlier batches that the queue may lack.
    """

    def __init__(self, name: str, lost: Sequence[Entered]) -> None:
        super().__init__(f"the queue in {name} was replaced, or has no lease of this worker")
        self.lost = lost


class Store(Protocol):
    """The requests of a job and their filter.

    A crawl calls `open` first, and `close` last. `knows` may be called in another thread than the
    other methods. Each method may raise a StorageError.
    """

    name: str  # the place of the store in messages
    run: bytes  # a random id of the current run; empty before `open`

    @property
    def pending(self) -> int:
        """How many requests can be taken, or are about to; in Redis, by the last reply."""

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

    def close(self) -> QueueStatus | None:
        """Make the requests in flight in this process pending again, and close the store.

        Returns what is left, if no other worker uses the store.
        """


class Queue(Protocol):
    """The queue of a store for commands, which may read it while crawls use it.

    Each method may raise a StorageError.
    """

    def status(self) -> QueueStatus:
        """Return the figures of the queue."""

    def runs(self) -> Sequence[RunBegin]:
        """Return the begins of all runs."""

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

"""The interface of the stores of CrashSafeScheduler: what a crawl asks of them, and the answers.

A store has the requests of a job that are not done, and the filter of the job. `sqlite_store` is
that of a job directory, `redis_store` that on a Redis server. Values go down to a store, and
results come back: a store calls nobody. It knows no threads: the scheduler calls it in the event
loop or in a thread of its own, one call at a time.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

from scrapy_bloom.exceptions import StorageError

LARGEST_PRIORITY = 2**63 - 1  # which is also the largest integer of SQLite
MOST_DEATHS = 3  # a request becomes a suspect when so many processes died with it in flight
MOST_TRIES = 5  # a request that failed in so many runs is dead
LINKED = "a redirect to it has failed"  # the reason of a link that is kept, see `Entered.via`


class State(str, Enum):
    """The states of a request in a store.

    A request that is done is not in the store any more.
    """

    PENDING = "pending"  # can be taken
    IN_FLIGHT = "in_flight"  # taken by a process, which has not reported its end
    SUSPECT = "suspect"  # was in flight in three processes that died; is taken alone
    FAILED = "failed"  # has failed for good; the next run tries it again
    DEAD = "dead"  # has failed in five runs, or was in flight alone when its process died
    UNREADABLE = "unreadable"  # this run cannot deserialize it


class Entered(NamedTuple):
    """A request that enters the queue.

    Attributes:
        data: the serialized request.
        fingerprint: the fingerprint that is looked up, and recorded with the request; None: the
            request is not filtered.
        slot: the downloader's slot, usually a host.
        priority: any integer, clipped to 64 bits; a higher priority is taken first.
        rank: -128 to 127; within a priority, a lower rank is taken first.
        newest_first: whether the request that was queued last is taken first, among requests of
            the same priority and rank.
        is_filtered: whether it is queued only if its fingerprint is new.
        is_recorded: whether its fingerprint is recorded.
        once: whether the request is new once in each run: it is looked up under `once_in(run)` of
            its fingerprint, and recorded under that and under the fingerprint itself.
        via: of a retry or a redirect: the fingerprints of the requests in whose place it entered,
            and its own; of a request that is new once in each run, its own. Until it ends, they are
            unfinished for `Batch.asked`. A request whose fingerprint is unfinished, or has failed
            in this run, is not new, even if it is not recorded; if it has no `via`, it is recorded,
            and kept as failed until its page is done. So a redirect should be recorded when it is
            done, and not when it enters: if it fails, only the first request of the chain is kept,
            and a link to its page.
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
    once: bool = False
    via: Sequence[bytes] = ()
    has_parent: bool = True
    context: Any = None

    @property
    def clipped_priority(self) -> int:
        """The priority as stores have it, in 64 bits."""
        return max(-LARGEST_PRIORITY, min(self.priority, LARGEST_PRIORITY))


class End(str, Enum):
    """How a request in flight ended."""

    DONE = "done"  # it leaves the queue
    REPLACED = "replaced"  # it leaves the queue, and a request in its place has entered
    FAILED = "failed"  # it is kept as failed, in the form of `Ended.first`
    UNREADABLE = "unreadable"  # it is kept as it is


class Ended(NamedTuple):
    """The end of a request that was taken.

    Attributes:
        id: the id of `Taken`. It has no effect if the request is not in flight in this process.
        end: how it ended.
        via: fingerprints of the request, and of those in whose place it entered. After DONE, they
            are not unfinished any more; after FAILED, they have failed in this run.
        first: of a failed request: the request as it first entered the queue, which is what is
            kept. Its fingerprint is not None. A store keeps one failed or dead request of a
            fingerprint.
        tries: of a failed request: `Taken.tries`.
        reason: of a failed request: why, in at most 200 characters.
    """

    id: Any
    end: End = End.DONE
    via: Sequence[bytes] = ()
    first: Entered | None = None
    tries: int = 0
    reason: str = ""


@dataclass
class Batch:
    """Changes of a queue and its filter that a store applies in one step, and wishes.

    A request is reported as ended only in the batch that contains the requests it led to, or in a
    later batch.

    Attributes:
        entered: requests to be queued, in order.
        recorded: fingerprints that are recorded without a request.
        ended: requests that have ended.
        asked: fingerprints whose fate the reply tells.
        downloaded: requests that are downloaded, if their slots have limits: the id, the slot, and
            for how many seconds no other worker may take a request of the slot.
        want: how many requests to take.
        downloads: how many downloads a slot has, without slots that have none.
        stands_still: whether all requests in flight in this process wait, perhaps for a suspect.
        may_start: whether this worker can run the spider's start().
        start_ended: whether start() has ended in this worker.
        is_over: whether this worker has found that the crawl has ended.
    """

    entered: list[Entered] = field(default_factory=list)
    recorded: list[bytes] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    asked: Collection[bytes] = ()
    downloaded: list[tuple[Any, str, float]] = field(default_factory=list)
    want: int = 0
    downloads: Mapping[str, int] = field(default_factory=dict)
    stands_still: bool = False
    may_start: bool = False
    start_ended: bool = False
    is_over: bool = False

    @property
    def changes(self) -> int:
        """The number of changes."""
        lists: tuple[Sized, ...] = (self.entered, self.recorded, self.ended, self.downloaded)
        return sum(map(len, lists))


class Taken(NamedTuple):
    """A request that a store has handed out, so that it is in flight.

    Attributes:
        id: the id of the request in the store.
        data: the serialized request.
        slot: the downloader's slot, as the store has it.
        tries: in how many runs it has failed.
    """

    id: Any
    data: bytes
    slot: str
    tries: int = 0


class Fate(str, Enum):
    """The state of the requests of a fingerprint, for redirects to their page."""

    UNFINISHED = "unfinished"  # a retry, a redirect or a failed request is tried again
    FAILED = "failed"  # in this run
    OTHER = "other"


@dataclass
class Reply:
    """The reply to a batch.

    Attributes:
        queued: whether each request that entered was queued; True if the first reply was lost.
        taken: requests that are in flight from now on, at most `Batch.want`.
        fates: of the fingerprints that were asked about.
        pending: how many requests can be taken.
        left: how many requests are pending, suspect, in flight in any process, or failed and about
            to become pending.
        runs_start: whether this worker has to run the spider's start().
        is_started: whether start() has ended.
        ended_at: when the queue became empty, in seconds since 1970; 0: it is not empty.
        counters: how many requests entered the queue, and how many left it.
        is_stopped: whether `scrapy bloom stop` asks this worker to end.
        is_retired: whether another run has begun since the store was opened, so that this worker
            takes nothing more.
        died: serialized requests that this batch has made dead, because processes died with them.
        given_up: how many requests this batch has made dead, because they have failed in five runs.
        expired: for each worker whose lease has expired, its name and how many requests it had.
    """

    queued: list[bool] = field(default_factory=list)
    taken: list[Taken] = field(default_factory=list)
    fates: Mapping[bytes, Fate] = field(default_factory=dict)
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
    expired: dict[str, int] = field(default_factory=dict)


class Limit(NamedTuple):
    """The limit of a slot of the downloader.

    Attributes:
        concurrency: how many of its requests may be downloaded at a time; 0: any number.
        has_delay: whether there is a delay between its downloads.
    """

    concurrency: int = 0
    has_delay: bool = False


NO_LIMIT = Limit()


@dataclass(frozen=True)
class Limits:
    """The limits of the slots of a crawl.

    Attributes:
        usual: the limit of each slot without a limit of its own.
        slots: the limits of slots that have their own.
    """

    usual: Limit = NO_LIMIT
    slots: Mapping[str, Limit] = field(default_factory=dict)

    def of(self, slot: str) -> Limit:
        """Return the limit of a slot."""
        return self.slots.get(slot, self.usual)


@dataclass(frozen=True)
class Joining:
    """What a crawl tells a store when it opens it.

    Attributes:
        spider: the name of the spider; a store belongs to one spider.
        run: the name of the run; a name that the store has not had begins a new run; "" and the
            name of the current run join that.
        arguments: a digest of each argument of the spider, and of BOT_NAME, by its name; empty if
            they are unknown.
    """

    spider: str
    run: str = ""
    arguments: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Opened:
    """What a store tells a crawl that has opened it.

    Attributes:
        run: the name of the current run.
        began: whether this opening has begun the run; the first run of a store has begun, too.
        is_first: whether it is the first run of the store.
        is_late: whether an earlier run has the name of `Joining`, so that there is nothing to do.
        counts: how many requests of each state the store has, before failed ones are retried.
        retried: how many failed requests become pending from now on.
        others: how many other workers there are; 0 in a job directory.
        killed: how many requests were in flight when the last process died.
        died: serialized requests that have become dead at the opening.
        differing: the names of arguments that differ from those of the run.
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
    differing: Sequence[str] = ()
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


class Stored(NamedTuple):
    """A request of a queue, for commands.

    Attributes:
        data: the serialized request.
        state: its state.
        slot: its slot.
        priority: its priority.
        rank: its rank.
        position: within priority and rank, a lower position is taken first.
        deaths: how many processes died with the request in flight.
        tries: in how many runs it has failed.
        reason: why it failed; empty if it has not.
        fingerprint: that of a failed request.
    """

    data: bytes
    state: State
    slot: str
    priority: int
    rank: int
    position: int
    deaths: int = 0
    tries: int = 0
    reason: str = ""
    fingerprint: bytes | None = None


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

        If another run has begun, the failed requests become pending, some with each batch; also if
        nothing else is left, no other worker is there, and `joining` does not name the run: what
        names it joins a run that has ended. Unreadable ones become pending, too, if there is no
        other worker.
        """

    def knows(self, fingerprint: bytes, *, once: bool = False) -> bool:
        """Return whether a fingerprint is certainly recorded, without asking a server or a disk.

        With `once`, whether it is recorded for this run.
        """

    def apply(self, batch: Batch) -> Reply:
        """Apply a batch in one step.

        After an error, the method may be called again with the same batch.
        """

    def counts(self) -> Mapping[State, int]:
        """Return how many requests of each state there are."""

    def close(self) -> Closed:
        """Make the requests in flight in this process pending again, and close the store."""


class Queue(Protocol):
    """The queue of a store for commands, which may read it while crawls use it.

    Each method may raise a StorageError.
    """

    name: str

    def counts(self) -> Mapping[State, int]:
        """Return how many requests of each state there are."""

    def progress(self) -> Progress:
        """Return how far the crawl is."""

    def slots(self) -> Mapping[str, int]:
        """Return how many requests of each slot are pending; the slot that is next comes first."""

    def requests(self, state: State, slot: str | None = None) -> Iterator[Stored]:
        """Return the requests of a state, or of one of its slots, in the order of taking."""

    def move(self, state: State, to: State | None, slot: str | None = None) -> int | None:
        """Make requests of a state pending with no deaths and tries counted, or drop them (None).

        Returns their number; None: the change was handed over to the crawl that runs. Suspects,
        requests in flight and unreadable ones cannot be moved.
        """


def differing(known: Mapping[str, str], arguments: Mapping[str, str]) -> Sequence[str]:
    """Return the names of arguments that differ from those of the run, unless these are unknown."""
    names = sorted({*known, *arguments}) if known else []
    return [name for name in names if known.get(name) != arguments.get(name)]


def once_in(run: bytes, fingerprint: bytes) -> bytes:
    """Return the fingerprint of a request that is new once in each run."""
    return fingerprint + run

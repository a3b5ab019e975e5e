"""The log of a filter: changes that a crawl has stored with its queue, and not in the filter yet.

A filter's files are the checkpoint of that log. So a request is recorded in them only after the
request itself is on the disk, whatever fails in between.
"""

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.files.forgotten import ForgottenFile
from scrapy_bloom.generations.memory import LocalGeneration, Recorded
from scrapy_bloom.job.disk import replace_file
from scrapy_bloom.job.paths import check_file
from scrapy_bloom.job.recovery import Damage, UncleanEnd

_LENGTH_BYTES = 4
_LETTERS = {None: b"r", False: b"a", True: b"f"}  # recorded, again, forgotten
_KINDS = {letter: forgets for forgets, letter in _LETTERS.items()}


class Change(NamedTuple):
    """A change of a filter.

    Attributes:
        forgets: True: the fingerprint is forgotten. None: it is recorded. False: it is recorded
            again, and no longer forgotten. (A new one leaves the set of forgotten fingerprints as
            it is: `scrapy bloom forget` may have added it since.)
        fingerprint: of a request.
    """

    forgets: bool | None
    fingerprint: bytes


class FilterLog(Protocol):
    """Stores changes of a filter in numbered batches, each together with a step of a queue.

    Attributes:
        id: random, of this log.
        run: random, of this opening.
        name: where it is, for people.
        path: where it is, absolute; a filter of several logs knows them by it.
        seq: number of the last batch that is stored; 0 if none is.
        applied: number of the last batch whose changes were deleted, since the filter has them.
        left: how many requests are not done.
        was_killed: the last process that had it open did not close it.
        is_copy: it was copied, or moved to another disk, while it was open.
    """

    id: str
    run: str
    name: str
    path: str
    seq: int
    applied: int
    left: int
    was_killed: bool
    is_copy: bool

    def begin(self) -> None:
        """Begin a run: from now on its end without a close is known; raises StorageError."""

    def start_over(self) -> str:
        """Set the log aside before it has begun, for an empty one; return where it is then."""

    def has_run(self, run: str) -> bool:
        """Return whether that opening is one of this log's."""

    def changes(self) -> Iterable[tuple[int, Sequence[Change]]]:
        """Return the batches that the filter may lack, in order."""

    def unfinished(self) -> Iterable[bytes]:
        """Return the fingerprints of all requests that are pending, or were in flight."""

    def sync(self) -> None:
        """Write all batches so far to the disk; in any thread; raises OSError."""

    def checkpointed(self, seq: int) -> None:
        """Note that the filter has all changes up to that batch, on the disk; in any thread."""


def pack_changes(changes: Iterable[Change]) -> bytes:
    """Return changes as bytes.

    >>> unpack_changes(pack_changes([Change(None, b"page 1"), Change(True, b"page 2")]))
    [Change(forgets=None, fingerprint=b'page 1'), Change(forgets=True, fingerprint=b'page 2')]
    """
    return b"".join(
        _LETTERS[forgets] + len(fingerprint).to_bytes(_LENGTH_BYTES, "big") + fingerprint
        for forgets, fingerprint in changes
    )


def unpack_changes(data: bytes) -> list[Change]:
    """Return the changes in what `pack_changes` made; raises ValueError if it is damaged."""
    return list(_unpacked(data))


def _unpacked(data: bytes) -> Iterator[Change]:
    end = 0
    while end < len(data):
        begin = end + 1 + _LENGTH_BYTES
        kind, length = data[end : end + 1], int.from_bytes(data[end + 1 : begin], "big")
        end = begin + length
        if kind not in _KINDS or end > len(data):
            raise ValueError("its changes of the filter are damaged")
        yield Change(_KINDS[kind], data[begin:end])


LOGS_NAME = "logs.json"
_MOST_LOGS = 1000  # the ones that were used last; a nightly crawl has a new one each time
_MOST_BYTES = 32 << 20  # what 1000 logs never take


@dataclass
class LogRecord:
    """What a filter has of a log.

    Attributes:
        path: where the log was.
        run: the opening of the log in which this was written.
        seq: the last batch whose changes the filter may have.
        left: how many requests were not done then.
    """

    path: str
    run: str
    seq: int
    left: int


@dataclass
class LogRecords:
    """The records of a filter's logs, by their ids, the one that was used last at the end.

    Attributes:
        open: the id of the log whose crawl uses the filter, or was killed; empty if there is none.
    """

    logs: dict[str, LogRecord] = field(default_factory=dict)
    open: str = ""

    @classmethod
    def read(cls, directory: Path) -> "LogRecords":
        """Read the records of the filter in a directory; raises StorageError if damaged."""
        path = directory / LOGS_NAME
        try:
            found = json.loads(_contents(path))
            logs = {id_: _record(each) for id_, each in found["logs"].items()}
            return cls(logs, _checked(found["open"], str))
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise StorageError(
                f"{path} cannot be read: {error}; it was left as it is: restore it from a backup, "
                "or move it away with the filter beside it, to start with an empty filter"
            ) from error

    def update(self, log: FilterLog, seq: int) -> None:
        """Note that the filter may have the changes of a log up to a batch."""
        self.logs.pop(log.id, None)
        self.logs[log.id] = LogRecord(log.path, log.run, seq, log.left)
        for oldest in list(self.logs)[:-_MOST_LOGS]:
            del self.logs[oldest]

    def write(self, directory: Path) -> None:
        """Write the records to the disk, whole or not at all; raises OSError."""
        replace_file(directory / LOGS_NAME, json.dumps(asdict(self), indent=1))

    def misfit(self, log: FilterLog, *, has_filter: bool, is_own: bool) -> UncleanEnd | None:
        """Return what is wrong with a log and a filter that are to be used together, if anything.

        Args:
            log: opened, and not begun.
            has_filter: whether there is a filter.
            is_own: the filter is the job's own, so each of its crawls had this log.
        """
        record = self.logs.get(log.id) if has_filter else None
        of_job = [id_ for id_, each in self.logs.items() if is_own or each.path == log.path]
        last = of_job[-1] if has_filter and of_job else log.id
        damage, why = Damage.QUEUE, ""
        if last != log.id and (last == self.open or self.logs[last].left):
            why = f"{log.name} is not the queue that the filter was used with"
        elif record is None:
            if log.applied:
                damage, why = Damage.FILTER, f"the filter lacks what {log.name} has recorded"
        elif log.is_copy:
            why = f"{log.name} was copied or moved while a crawl used it, or after it was killed"
        elif not log.has_run(record.run) or record.seq > log.seq:
            why = f"{log.name} is older than the filter"
        elif record.seq < log.applied:
            damage, why = Damage.FILTER, f"the filter is older than {log.name}"
        return UncleanEnd(why, damage, may_reset=is_own) if why else None


def _contents(path: Path) -> bytes:
    check_file(path)
    with path.open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"it is longer than {_MOST_BYTES:,} bytes")
    return data


def _record(found: Mapping[str, Any]) -> LogRecord:
    new = LogRecord(**found)
    for name, kind in LogRecord.__annotations__.items():
        _checked(getattr(new, name), kind)
    if not new.run.isascii():  # no database can be asked for half a character
        raise ValueError("there is no such run")
    return new


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r:.50} is not of type {kind.__name__}")
    return value


class _Pending(NamedTuple):
    forgets: bool | None
    fingerprint: bytes
    newest: LocalGeneration  # that it is to be recorded in


class Overlay:
    """The changes of a filter that are not in it yet.

    They are collected until the store has them: see `collected` and `stored`. Then `take` hands
    them to a checkpoint, in another thread, and `prune` forgets what that has done.
    """

    def __init__(self, log: FilterLog) -> None:
        self.log = log
        self.failure: Exception | None = None  # of a checkpoint: there will be no further one
        self._latest: dict[bytes, _Pending] = {}
        self._collected: list[_Pending] = []
        self._stored: deque[tuple[int, Sequence[_Pending]]] = deque()
        self._applied: deque[Sequence[_Pending]] = deque()
        self._known: Recorded
        self._newest: LocalGeneration

    def use(self, known: Recorded, newest: LocalGeneration) -> None:
        """Add to what these generations have from now on, and record in the newest of them."""
        self._known, self._newest = known, newest

    def __len__(self) -> int:
        return len(self._latest)

    def __contains__(self, fingerprint: bytes) -> bool:
        return fingerprint in self._latest or fingerprint in self._known

    def is_forgotten(self, fingerprint: bytes) -> bool | None:
        """Return whether the latest change forgets a fingerprint; None if it does not say so."""
        latest = self._latest.get(fingerprint)
        return None if latest is None else latest.forgets

    def forgotten(self) -> list[bytes]:
        """Return the fingerprints whose latest change forgets them."""
        return [each for each, latest in self._latest.items() if latest.forgets]

    def add(self, fingerprint: bytes) -> bool:
        """Record a fingerprint, unless it is recorded; True if it was new."""
        if fingerprint in self._latest or fingerprint in self._known:
            return False
        self._change(None, fingerprint)
        self._newest.unapplied += 1
        return True

    def record_again(self, fingerprint: bytes) -> None:
        """Record a fingerprint that is recorded already, but forgotten, or in an older quarter."""
        self._change(False, fingerprint)

    def forget(self, fingerprints: Iterable[bytes]) -> None:
        """Let fingerprints be forgotten."""
        for fingerprint in fingerprints:
            self._change(True, fingerprint)

    def _change(self, forgets: bool | None, fingerprint: bytes) -> None:  # noqa: FBT001 - called often
        new = _Pending(forgets, fingerprint, self._newest)
        self._latest[fingerprint] = new
        self._collected.append(new)

    # Towards the store.

    @property
    def number(self) -> int:
        """Return how many changes are collected."""
        return len(self._collected)

    @property
    def last(self) -> bytes:
        """Return the fingerprint of the change that was collected last."""
        return self._collected[-1].fingerprint

    def collected(self) -> list[Change]:
        """Return the changes that are not stored yet, in order."""
        return [Change(each.forgets, each.fingerprint) for each in self._collected]

    def stored(self, seq: int) -> None:
        """Note that all changes that were collected are stored, in that batch."""
        if self._collected:
            self._stored.append((seq, self._collected))
            self._collected = []
        self.prune()

    def hold(self, since: int) -> list[_Pending]:
        """Take out the changes that were collected after the first ones: they are stored later."""
        held = self._collected[since:]
        del self._collected[since:]
        return held

    def release(self, held: Sequence[_Pending]) -> None:
        """Collect changes that were held."""
        self._collected += held

    # Towards the filter.

    def take(self) -> tuple[int, Sequence[_Pending]]:
        """Return the changes to be applied, and the number of the last batch; in any thread."""
        seq = 0
        taken: list[_Pending] = []
        while self._stored:
            seq, some = self._stored.popleft()
            taken += some
        return seq, taken

    def applied(self, taken: Sequence[_Pending]) -> None:
        """Note that changes are in the filter now; in any thread."""
        self._applied.append(taken)

    def prune(self) -> None:
        """Forget the changes that the filter has."""
        while self._applied:
            for each in self._applied.popleft():
                each.newest.unapplied -= each.forgets is None  # as `add` has counted it
                if self._latest.get(each.fingerprint) is each:
                    del self._latest[each.fingerprint]


class ForgottenOverlay:
    """The forgotten requests of a filter with a log.

    Taking a fingerprint out is a change of the log, as forgetting it is.
    """

    def __init__(self, file: ForgottenFile, overlay: Overlay) -> None:
        self._file = file
        self._overlay = overlay
        self.news, self.expire = file.news, file.expire

    def all(self) -> Iterable[bytes]:
        """Return the whole set, perhaps with some fingerprints that were just taken out."""
        return [*self._file.all(), *self._overlay.forgotten()]

    def add(self, fingerprints: Sequence[bytes]) -> None:
        """Add fingerprints; those that are there count as added now."""
        self._overlay.forget(fingerprints)

    def has(self, fingerprint: bytes) -> bool:
        """Return whether a fingerprint is in the set."""
        is_forgotten = self._overlay.is_forgotten(fingerprint)
        return self._file.has(fingerprint) if is_forgotten is None else is_forgotten

    def take(self, fingerprint: bytes) -> bool:
        """Take a fingerprint out; return whether it was there."""
        is_forgotten = self.has(fingerprint)
        if is_forgotten:
            self._overlay.record_again(fingerprint)
        return is_forgotten

    def close(self) -> None:
        """Close the file."""
        self._file.close()

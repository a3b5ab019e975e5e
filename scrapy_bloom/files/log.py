"""Keep the changes of a filter that a crawl has stored with its queue, but not in the filter yet.

The log has these changes first, and the filter's files are its checkpoint. So a fingerprint enters
the files only after its request is on the disk, whatever fails in between.
"""

import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.generations.memory import LocalGeneration, Recorded
from scrapy_bloom.job.disk import check_file, replace_file

_LENGTH_BYTES = 4
_LETTERS = {None: b"r", False: b"a", True: b"f"}  # recorded, recorded again, forgotten
_KINDS = {letter: forgets for forgets, letter in _LETTERS.items()}


class Change(NamedTuple):
    """A change of a filter.

    Attributes:
        forgets: True: forget the fingerprint. None: record it. False: record it, and remove it from
            the set of forgotten fingerprints. (None leaves that set as it is, because
            `scrapy bloom forget` may have added the fingerprint meanwhile.)
        fingerprint: the fingerprint of a request.
        generation: the generation that a checkpoint adds the fingerprint to; None: it adds it to
            none, or the change was read from the log.
    """

    forgets: bool | None
    fingerprint: bytes
    generation: LocalGeneration | None = None


class FilterLog(Protocol):
    """A store of numbered batches, each with changes of a filter and of the crawl's queue."""

    id: str  # random id of this log
    run: str  # random id of this opening
    name: str  # path of the log in messages
    path: str  # absolute path of the log; a filter recognizes its logs by it
    seq: int  # number of the last stored batch; 0 if there is none
    applied: int  # number of the last batch whose changes were deleted, as the filter has them
    left: int  # number of requests that are not done
    was_killed: bool  # whether the last process that opened the log did not close it
    is_copy: bool  # whether the log was copied, or moved to another disk, while it was open

    def begin(self) -> None:
        """Mark the log as open, so that the next run detects a kill; raises StorageError."""

    def has_run(self, run: str) -> bool:
        """Return whether the log was opened with this run id."""

    def changes(self) -> Iterable[tuple[int, Sequence[Change]]]:
        """Return the batches that the filter may lack, in order."""

    def unfinished(self) -> Iterable[bytes]:
        """Return the fingerprints of all requests that are pending, or were in flight."""

    def sync(self) -> None:
        """Sync all batches to the disk; may be called in any thread; raises OSError."""

    def checkpointed(self, seq: int) -> None:
        """Delete the changes up to a batch, which the filter has on the disk; in any thread."""


def pack_changes(changes: Iterable[Change]) -> bytes:
    """Serialize changes.

    >>> unpack_changes(pack_changes([Change(True, b"page 1")]))
    [Change(forgets=True, fingerprint=b'page 1', generation=None)]
    """
    return b"".join(
        _LETTERS[forgets] + len(fingerprint).to_bytes(_LENGTH_BYTES, "big") + fingerprint
        for forgets, fingerprint, _ in changes
    )


def unpack_changes(data: bytes) -> list[Change]:
    """Deserialize the changes that `pack_changes` serialized; raises ValueError if damaged."""
    changes = []
    end = 0
    while end < len(data):
        begin = end + 1 + _LENGTH_BYTES
        kind, length = data[end : end + 1], int.from_bytes(data[end + 1 : begin], "big")
        end = begin + length
        if kind not in _KINDS or end > len(data):
            raise ValueError("its changes of the filter are damaged")
        changes.append(Change(_KINDS[kind], data[begin:end]))
    return changes


LOGS_NAME = "logs.json"
_MOST_LOGS = 1000  # the logs that were used last; a nightly crawl has a new one for each run
_MOST_BYTES = 32 << 20  # more than 1000 records ever take


@dataclass
class LogRecord:
    """The state of a log that the filter has applied."""

    path: str  # absolute path of the log
    run: str  # run id of the log
    seq: int  # number of the last batch whose changes the filter may have
    left: int  # number of requests in the log that were not done

    def __post_init__(self) -> None:
        """Raise a TypeError or a ValueError if a damaged file has other values."""
        for name, kind in LogRecord.__annotations__.items():
            if type(value := getattr(self, name)) is not kind:
                raise TypeError(f"{value!r:.50} is not of type {kind.__name__}")
        if not self.run.isascii():  # SQLite refuses a lone surrogate
            raise ValueError("its run id is not ASCII")


@dataclass
class LogRecords:
    """The records of the logs that used a filter."""

    # By the ids of the logs, the last used log at the end.
    logs: dict[str, LogRecord] = field(default_factory=dict)
    open: str = ""  # id of the log whose crawl uses the filter, or was killed

    @classmethod
    def read(cls, directory: Path) -> "LogRecords":
        """Read the records of the filter in a directory; raises StorageError if damaged."""
        path = directory / LOGS_NAME
        try:
            found = json.loads(_contents(path))
            logs = {id_: LogRecord(**each) for id_, each in found["logs"].items()}
            return cls(logs, str(found["open"]))
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise StorageError(
                f"{path} cannot be read: {error}; it was left as it is: restore it from a backup, "
                "or move it away with the filter in its directory to start with an empty filter"
            ) from error

    def update(self, log: FilterLog, seq: int) -> None:
        """Record that the filter may have the changes of a log up to a batch."""
        self.logs.pop(log.id, None)
        self.logs[log.id] = LogRecord(log.path, log.run, seq, log.left)
        for oldest in list(self.logs)[:-_MOST_LOGS]:
            del self.logs[oldest]

    def write(self, directory: Path) -> None:
        """Write the records to the disk atomically; raises OSError."""
        replace_file(directory / LOGS_NAME, json.dumps(asdict(self), indent=1))

    def misfit(self, log: FilterLog, *, has_filter: bool, is_own: bool) -> tuple[str, bool]:
        """Return why a log and the filter do not belong together; an empty text if they do.

        The second value is whether the queue may lack requests that the filter has recorded.

        Args:
            log: the log of this run, opened and not begun.
            has_filter: whether there is a filter.
            is_own: whether the filter is the job's own, so that each of its crawls used this log.
        """
        record = self.logs.get(log.id) if has_filter else None
        of_job = [id_ for id_, each in self.logs.items() if is_own or each.path == log.path]
        last = of_job[-1] if has_filter and of_job else log.id
        if last != log.id and (last == self.open or self.logs[last].left):
            return f"{log.name} is not the queue that the filter was last used with", True
        if record is None:
            why = f"the filter lacks requests that {log.name} has recorded" if log.applied else ""
            return why, False
        if log.is_copy:
            why = f"{log.name} was copied or moved while a crawl used it, or after it was killed"
            return why, True
        if not log.has_run(record.run) or record.seq > log.seq:
            return f"{log.name} is older than the filter", True
        why = f"the filter is older than {log.name}" if record.seq < log.applied else ""
        return why, False


def _contents(path: Path) -> bytes:
    check_file(path)
    with path.open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"it is longer than {_MOST_BYTES:,} bytes")
    return data


class Overlay:
    """The changes of a filter that its files lack.

    A change is collected first. The queue stores the collected changes in a batch, and calls
    `stored`. A checkpoint, in another thread, gets them with `take`, applies them, and calls
    `applied`. Then `prune` drops them.

    Attributes:
        log: the log that stores the changes.
        collected: the changes for the next batch, in order. The queue may remove changes, and add
            them again later: lookups see them meanwhile, but no checkpoint applies them.
        failure: error of a checkpoint or of the log; after it, no checkpoint follows in this run.
    """

    def __init__(self, log: FilterLog) -> None:
        self.log = log
        self.collected: list[Change] = []
        self.failure: Exception | None = None
        self._seq = log.seq  # of the last batch whose changes were taken
        self._latest: dict[bytes, Change] = {}
        self._stored: deque[tuple[int, Sequence[Change]]] = deque()
        self._applied: deque[Sequence[Change]] = deque()
        self._in_files: Recorded
        self._newest: LocalGeneration

    def use(self, in_files: Recorded, newest: LocalGeneration) -> None:
        """Set the live generations: look up in all of them, and record in the newest."""
        self._in_files, self._newest = in_files, newest

    def __len__(self) -> int:
        return len(self._latest)

    def __contains__(self, fingerprint: bytes) -> bool:
        return fingerprint in self._latest or fingerprint in self._in_files

    def is_forgotten(self, fingerprint: bytes) -> bool | None:
        """Return whether the latest change forgets a fingerprint; None if no change says so."""
        latest = self._latest.get(fingerprint)
        return None if latest is None else latest.forgets

    def forgotten(self) -> list[bytes]:
        """Return the fingerprints whose latest change forgets them."""
        return [each for each, latest in self._latest.items() if latest.forgets]

    def add(self, fingerprint: bytes) -> bool:
        """Record a fingerprint unless it is recorded already; return True if it was new."""
        if fingerprint in self._latest or fingerprint in self._in_files:
            return False
        self._change(None, fingerprint)
        self._newest.unapplied += 1
        return True

    def record_again(self, fingerprint: bytes) -> None:
        """Record a fingerprint that is forgotten, or recorded in an older generation."""
        self._change(False, fingerprint)

    def forget(self, fingerprints: Iterable[bytes]) -> None:
        """Forget fingerprints, so that their requests are crawled again."""
        for fingerprint in fingerprints:
            self._change(True, fingerprint)

    def _change(self, forgets: bool | None, fingerprint: bytes) -> None:  # noqa: FBT001 - called often
        new = Change(forgets, fingerprint, None if forgets else self._newest)
        self._latest[fingerprint] = new
        self.collected.append(new)

    def stored(self, seq: int) -> None:
        """Move the collected changes to the stored ones, after the log has stored a batch."""
        if self.collected:
            self._stored.append((seq, self.collected))
            self.collected = []
        self.prune()

    def take(self) -> tuple[int, Sequence[Change]]:
        """Return the last batch number and the stored changes; may be called in any thread."""
        taken: list[Change] = []
        while self._stored:
            self._seq, some = self._stored.popleft()
            taken += some
        return self._seq, taken

    def applied(self, taken: Sequence[Change]) -> None:
        """Mark changes as applied to the filter; may be called in any thread."""
        self._applied.append(taken)

    def prune(self) -> None:
        """Drop the changes that are applied to the filter."""
        while self._applied:
            for each in self._applied.popleft():
                if each.forgets is None and each.generation is not None:  # `add` counted these
                    each.generation.unapplied -= 1
                if self._latest.get(each.fingerprint) is each:
                    del self._latest[each.fingerprint]

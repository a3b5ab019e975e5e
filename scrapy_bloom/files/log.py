"""Keep the fingerprints that a crawl has stored with its queue, but not in the filter yet.

The log has them first, and the filter's files are its checkpoint. So a fingerprint enters
the files only after its request is on the disk, whatever fails in between.
"""

import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.generations.memory import LocalGeneration, Recorded
from scrapy_bloom.job.disk import opened, replace_file

_LENGTH_BYTES = 4


class FilterLog(Protocol):
    """A store of numbered batches, each with fingerprints to record and changes of the queue."""

    id: str  # random id of this log
    run: str  # random id of this opening
    name: str  # path of the log in messages
    was_killed: bool  # whether the last process that opened the log did not close it
    is_copy: bool  # whether the log was copied, or moved to another disk, while it was open

    @property
    def seq(self) -> int:
        """The number of the last stored batch; 0 if there is none."""

    @property
    def applied(self) -> int:
        """The number of the last batch whose fingerprints were deleted; the filter has them."""

    @property
    def left(self) -> int:
        """The number of requests that are not done."""

    def begin(self) -> None:
        """Mark the log as open, so that the next run detects a kill; raises StorageError."""

    def has_run(self, run: str) -> bool:
        """Return whether the log was opened with this run id."""

    def recorded(self) -> Iterable[bytes]:
        """Return the fingerprints of the batches that the filter may lack, in order."""

    def unfinished(self) -> Iterable[bytes]:
        """Return the fingerprints of all requests that are pending, or were in flight."""

    def sync(self) -> None:
        """Sync all batches to the disk; may be called in any thread; raises OSError."""

    def checkpointed(self, seq: int) -> None:
        """Delete the fingerprints up to a batch: the filter has them on the disk; in any thread."""


def pack_fingerprints(fingerprints: Iterable[bytes]) -> bytes:
    """Serialize fingerprints.

    >>> unpack_fingerprints(pack_fingerprints([b"page 1", b"page 2"]))
    [b'page 1', b'page 2']
    """
    return b"".join(len(each).to_bytes(_LENGTH_BYTES, "big") + each for each in fingerprints)


def unpack_fingerprints(data: bytes) -> list[bytes]:
    """Deserialize what `pack_fingerprints` serialized; raises ValueError if damaged."""
    fingerprints = []
    end = 0
    while end < len(data):
        begin = end + _LENGTH_BYTES
        end = begin + int.from_bytes(data[end:begin], "big")
        if end > len(data):
            raise ValueError("its fingerprints of the filter are damaged")
        fingerprints.append(data[begin:end])
    return fingerprints


RECORD_NAME = "log.json"
_MOST_BYTES = 10_000  # more than a record ever takes


@dataclass
class LogRecord:
    """The state of the log up to which its fingerprints are in the filter."""

    id: str  # id of the log
    run: str  # run id of the log
    seq: int  # number of the last batch whose fingerprints the filter may have
    left: int  # number of requests in the log that were not done
    is_open: bool  # whether a crawl uses filter and log, or was killed with them

    def __post_init__(self) -> None:
        """Raise a TypeError or a ValueError if a damaged file has other values."""
        for name, kind in LogRecord.__annotations__.items():
            if type(value := getattr(self, name)) is not kind:
                raise TypeError(f"{value!r:.50} is not of type {kind.__name__}")
        if not self.run.isascii():  # SQLite refuses a lone surrogate
            raise ValueError("its run id is not ASCII")

    @classmethod
    def read(cls, directory: Path) -> "LogRecord | None":
        """Read the record of the filter in a directory; None if the filter never had a log.

        Raises StorageError if the record is damaged.
        """
        path = directory / RECORD_NAME
        try:
            return cls(**json.loads(contents(path)))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise StorageError(
                f"{path} cannot be read: {error}; it was left as it is: restore it from a backup, "
                "or move it away with the filter in its directory to start with an empty filter"
            ) from error

    def write(self, directory: Path) -> None:
        """Write the record to the disk atomically; raises OSError."""
        replace_file(directory / RECORD_NAME, json.dumps(asdict(self), indent=1))


def misfit(record: LogRecord | None, log: FilterLog) -> tuple[str, bool]:
    """Return why a log and a filter do not belong together; an empty text if they do.

    The second value is whether the queue may lack requests that the filter has recorded.

    Args:
        record: the record of the filter; None: it never had a log, or there is no filter.
        log: the log of this run, opened and not begun.
    """
    if record is not None and record.id != log.id:
        if record.is_open or record.left:
            return f"{log.name} is not the queue that the filter was last used with", True
        record = None
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


def contents(path: Path) -> bytes:
    """Return the contents of a small file; raises OSError, StorageError, or ValueError."""
    with opened(path) as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"it is longer than {_MOST_BYTES:,} bytes")
    return data


# A fingerprint that the files lack, and the generation to which a checkpoint adds it.
Missing = tuple[bytes, LocalGeneration]


class Overlay:
    """The fingerprints of a filter that its files lack.

    After the log has stored a batch, its new fingerprints are added here, and `stored` is called. A
    checkpoint, in another thread, gets them with `take`, adds them to the files, and calls
    `applied`. Then `prune` drops them.

    Attributes:
        log: the log that stores the fingerprints.
        failure: error of a checkpoint or of the log; after it, no checkpoint follows in this run.
    """

    def __init__(self, log: FilterLog) -> None:
        self.log = log
        self.failure: Exception | None = None
        self._seq = log.seq  # of the last batch whose fingerprints were taken
        self._added: list[bytes] = []  # since the last `stored`
        self._missing: dict[bytes, LocalGeneration] = {}  # where a checkpoint adds each
        self._stored: deque[tuple[int, Sequence[bytes]]] = deque()
        self._applied: deque[Sequence[Missing]] = deque()
        self._in_files: Recorded
        self._newest: LocalGeneration

    def use(self, in_files: Recorded, newest: LocalGeneration) -> None:
        """Set the live generations: look up in all of them, and record in the newest."""
        self._in_files, self._newest = in_files, newest

    def __len__(self) -> int:
        return len(self._missing)

    def __contains__(self, fingerprint: bytes) -> bool:
        return fingerprint in self._missing or fingerprint in self._in_files

    def add(self, fingerprint: bytes, *, renews: bool = False) -> bool:
        """Record a fingerprint unless it is recorded already; return True if it was new.

        With `renews`, it is recorded already only if the newest generation has it.
        """
        in_files = self._newest.filter if renews else self._in_files
        if fingerprint in self._missing or fingerprint in in_files:
            return False
        self._missing[fingerprint] = self._newest
        self._newest.unapplied += 1
        self._added.append(fingerprint)
        return True

    def stored(self, seq: int) -> None:
        """Let checkpoints add the fingerprints of the batch that the log has stored last."""
        if self._added:
            self._stored.append((seq, self._added))
            self._added = []
        self.prune()

    def take(self) -> tuple[int, Sequence[Missing]]:
        """Return the last batch number and the stored fingerprints; may be called in any thread."""
        taken: list[Missing] = []
        while self._stored:
            self._seq, some = self._stored.popleft()
            taken += [(fingerprint, self._missing[fingerprint]) for fingerprint in some]
        return self._seq, taken

    def applied(self, taken: Sequence[Missing]) -> None:
        """Mark fingerprints as added to the filter; may be called in any thread."""
        self._applied.append(taken)

    def prune(self) -> None:
        """Drop the fingerprints that were added to the filter."""
        while self._applied:
            for fingerprint, generation in self._applied.popleft():
                generation.unapplied -= 1
                del self._missing[fingerprint]

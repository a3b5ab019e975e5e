"""The log of a filter: changes that a crawl has stored with its queue, and not in the filter yet.

A filter's files are the checkpoint of that log. So a request is recorded in them only after the
request itself is on the disk, whatever fails in between.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

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

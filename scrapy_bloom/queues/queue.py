"""Interface of a queue, as CrashSafeScheduler needs it: one for SQLite and Redis."""

import pickle
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol


class Taken(NamedTuple):
    """A request that is in flight from now on: its row, and what was pushed, serialized."""

    id: Any
    data: bytes


class RequestQueue(Protocol):
    """The requests of a crawl that are not done yet: pending, in flight, or gone.

    Each step happens whole or not at all, whenever a process dies. What the place of the queue
    refuses is raised as `sqlite3.Error` or `StorageError`: nothing has changed then.

    Attributes:
        name: where it is, for people.
    """

    name: str

    @property
    def pending(self) -> int:
        """Return how many requests can be taken, as far as is known here."""

    def push(self, data: bytes, *, slot: str, priority: int, rank: int, newest_first: bool) -> int:
        """Add a pending request, and return its row, which is not 0.

        Args:
            data: the request, serialized.
            slot: of the downloader.
            priority: any integer, clipped to 64 bits; higher ones are taken first.
            rank: -128 to 127; lower ones are taken first within a priority.
            newest_first: of those with one priority and rank, the last one is taken first.
        """

    def take_back(self) -> None:
        """Remove the pending request that was pushed last."""

    def take(self, active: Callable[[str], int]) -> Taken | None:
        """Take the next request, if any: from now on, it is in flight.

        By slots, that is one of the slot with the fewest downloads, as `active` counts them: of
        several, the one after that which was served last, in the order of their names.
        """

    def done(self, row: Any) -> None:
        """Remove a request that is in flight, and done."""

    def set_aside(self, row: Any) -> None:
        """Keep a request in flight for a later run: it cannot be made again in this one."""

    def close(self) -> None:
        """Leave the queue to others, as it is."""


def packed(request: Mapping[str, Any]) -> bytes:
    """Return what `Request.to_dict` makes, serialized; raises ValueError if it cannot be."""
    try:
        return pickle.dumps(request, protocol=4)
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def unpacked(data: bytes) -> Mapping[str, Any]:
    """Return the serialized request. It may raise anything: a class may be gone since."""
    found: Mapping[str, Any] = pickle.loads(data)  # noqa: S301 - of our own queue
    return found

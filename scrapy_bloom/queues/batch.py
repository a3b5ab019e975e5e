"""Batches: what a crawl changes in its queue and its filter, as one step."""

import io
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from scrapy_bloom.files.log import Change


class Found(NamedTuple):
    """A request to be queued.

    Attributes:
        data: the request, serialized.
        fingerprint: as it was recorded in the filter for it; None if nothing was.
        slot: of the downloader.
        priority: any integer, clipped to 64 bits; higher ones are taken first.
        rank: -128 to 127; lower ones are taken first within a priority.
        newest_first: of those with one priority and rank, the last one is taken first.
        kind: with a fingerprint, in a shared queue: it is queued if that is "n": new, and recorded
            then; "?": new, which is not recorded; "u": new or not.
        is_limited: it counts against BLOOM_MAX_PAGES_PER_SLOT.
    """

    data: bytes
    fingerprint: bytes | None = None
    slot: str = ""
    priority: int = 0
    rank: int = 0
    newest_first: bool = True
    kind: str = "n"
    is_limited: bool = False


@dataclass
class Batch:
    """Requests that were found, requests that are done, and changes of the filter, in order.

    A request is done only in a batch that contains, or follows, everything it led to.
    """

    found: list[Found] = field(default_factory=list)
    changes: Sequence[Change] = ()
    done: list[Any] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.found or self.changes or self.done)


class Taken(NamedTuple):
    """A request that is in flight from now on: its id in the store, and the serialized request.

    A shared store adds its slot.
    """

    id: Any
    data: bytes
    slot: str = ""


class Limit(NamedTuple):
    """How many requests of a slot may be downloaded at a time (0: any), and if it has a delay."""

    concurrency: int = 0
    has_delay: bool = False


NO_LIMIT = Limit()


@dataclass(frozen=True)
class Limits:
    """The limits of the slots of a crawl.

    Attributes:
        usual: of each slot that has none of its own.
        slots: of those that have.
    """

    usual: Limit = NO_LIMIT
    slots: Mapping[str, Limit] = field(default_factory=dict)

    def of(self, slot: str) -> Limit:
        """Return the limit of a slot."""
        return self.slots.get(slot, self.usual)


def serialized(request: Mapping[str, Any]) -> bytes:
    """Return what `Request.to_dict` makes, serialized; raises ValueError if it cannot be."""
    try:
        return pickle.dumps(request, protocol=4)
    except Exception as error:  # a __reduce__ may raise anything, and no page may be lost for it
        raise ValueError(f"{type(error).__name__}: {error}") from error


def deserialized(data: bytes) -> Mapping[str, Any]:
    """Return the serialized request. It may raise anything: a class may be gone since."""
    found: Mapping[str, Any] = pickle.loads(data)  # noqa: S301 - of our own queue
    return found


def url_of(data: bytes) -> str:
    """Return the URL of a serialized request, without running any code that is in it."""
    found = plain(data)
    return str(found["url"]) if found and "url" in found else "a request that cannot be read"


def turns_of(pending: Iterable[int], most: int) -> int:
    """Return how often slots with so many requests take turns until they have given `most`.

    >>> turns_of([20, 3, 1], 10)
    6
    """
    numbers, turns = list(pending), 1
    while turns < max(numbers, default=0) and sum(min(each, turns) for each in numbers) < most:
        turns += 1
    return turns


def plain(data: bytes) -> Mapping[str, Any] | None:
    """Return a serialized request of plain values; None if it has others, which might run code."""
    try:
        found = _PlainUnpickler(io.BytesIO(data)).load()
    except Exception:  # noqa: BLE001 - whatever is in it
        return None
    return found if isinstance(found, dict) else None


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"{module_name}.{global_name}")

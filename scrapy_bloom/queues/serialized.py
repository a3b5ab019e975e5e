"""Serialize the requests of a queue, and read serialized ones."""

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any


def serialized(request: Mapping[str, Any]) -> bytes:
    """Return a serialized `Request.to_dict`; raises ValueError if it cannot be serialized."""
    try:
        return pickle.dumps(request, protocol=4)
    except Exception as error:  # a __reduce__ may raise anything, and the request must not be lost
        raise ValueError(f"{type(error).__name__}: {error}") from error


def deserialized(data: bytes) -> Mapping[str, Any]:
    """Return a request that was serialized.

    May raise any exception, for example because a class was renamed.
    """
    found: Mapping[str, Any] = pickle.loads(data)  # noqa: S301 - our own queue
    return found


def url_of(data: bytes) -> str:
    """Return the URL of a serialized request, without running code that the pickle may contain."""
    found = plain(data)
    return str(found["url"]) if found and "url" in found else "a request that cannot be read"


def round_robin(
    pending: Mapping[str, int], most: int, read: Callable[[str, int], Sequence[bytes]]
) -> list[bytes]:
    """Return the first pending requests, serialized, round-robin by slot.

    Args:
        pending: how many requests of each slot are pending.
        most: how many requests to return.
        read: returns the first requests of a slot, serialized, up to a number.

    >>> rows = {"a": [b"a1", b"a2", b"a3", b"a4"], "b": [b"b1"]}
    >>> round_robin({"a": 4, "b": 1}, 4, lambda slot, number: rows[slot][:number])
    [b'a1', b'b1', b'a2', b'a3']
    """
    slots, numbers, turns = list(pending)[:most], list(pending.values())[:most], 1
    while turns < max(numbers, default=0) and sum(min(each, turns) for each in numbers) < most:
        turns += 1
    rows = [read(slot, turns) for slot in slots]
    return [data for turn in zip_longest(*rows) for data in turn if data is not None][:most]


def plain(data: bytes) -> Mapping[str, Any] | None:
    """Return a serialized request; None if it has more than plain values, which might run code."""
    try:
        found = _PlainUnpickler(io.BytesIO(data)).load()
    except Exception:  # noqa: BLE001 - a pickle may raise anything
        return None
    return found if isinstance(found, dict) else None


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"{module_name}.{global_name}")

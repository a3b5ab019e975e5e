"""Serialize the requests of a queue, and read serialized ones."""

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from json.encoder import encode_basestring_ascii as json_string
from typing import Any, TypeVar

_LONGEST_LINE = 1_000_000  # bytes
_T = TypeVar("_T")


def serialized(request: Mapping[str, Any]) -> bytes:
    """Return a serialized `Request.to_dict`; raises ValueError if it cannot be serialized."""
    try:
        data = pickle.dumps(request, protocol=4)
    except Exception as error:  # a __reduce__ may raise anything, and the request must not be lost
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return with_line(str(request.get("method", "GET")), str(request.get("url", "")), data)


def with_line(method: str, url: str, data: bytes) -> bytes:
    """Return a pickle after a line with method and URL, so that lists need not read the pickle."""
    return f"[{json_string(method)}, {json_string(url)}]\n".encode() + data


def deserialized(data: bytes) -> Mapping[str, Any]:
    """Return a request that was serialized.

    May raise any exception, for example because a class was renamed.
    """
    found: Mapping[str, Any] = pickle.loads(data.partition(b"\n")[2])  # noqa: S301 - our own queue
    return found


def line_of(data: bytes) -> tuple[str, str]:
    """Return method and URL of a serialized request, which is untrusted."""
    try:
        method, url = json.loads(data[: data.find(b"\n", 0, _LONGEST_LINE)])
    except (ValueError, TypeError, RecursionError):
        return "", ""
    return str(method), str(url)


def url_of(data: bytes) -> str:
    """Return the URL of a serialized request, for people."""
    return line_of(data)[1] or "a request that cannot be read"


def round_robin(
    pending: Mapping[str, int], most: int, read: Callable[[str, int], Sequence[_T]]
) -> list[_T]:
    """Return the first pending requests, at most `most`, round-robin by slot.

    `read` returns the first requests of a slot, up to a number.

    >>> rows = {"a": ["a1", "a2", "a3", "a4"], "b": ["b1"]}
    >>> round_robin({"a": 4, "b": 1}, 4, lambda slot, number: rows[slot][:number])
    ['a1', 'b1', 'a2', 'a3']
    """
    slots, numbers, turns = list(pending)[:most], list(pending.values())[:most], 1
    while turns < max(numbers, default=0) and sum(min(number, turns) for number in numbers) < most:
        turns += 1
    rows = [read(slot, turns) for slot in slots]
    return [row for turn in zip_longest(*rows) for row in turn if row is not None][:most]

"""Serialize the requests of a queue, and read serialized ones."""

import pickle
import pickletools
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

LONGEST_URL = 1_000_000  # characters
_MOST_OPCODES = 1_000_000
_T = TypeVar("_T")


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


def values_of(data: bytes) -> dict[str, Any] | None:
    """Return the values of a serialized request, or None if it cannot be read.

    No class is loaded and no code runs: an `Unloaded` stands for whatever is not made of plain
    values. The result is a tree whose `url` is a text, so it is safe to process.
    """
    try:
        values = _built(data)
        url = values["url"]
    except Exception:  # noqa: BLE001 - it is untrusted
        return None
    return values if isinstance(url, str) and len(url) <= LONGEST_URL else None


def url_of(data: bytes) -> str:
    """Return the URL of a serialized request, for people."""
    values = values_of(data)
    return str(values["url"]) if values else "a request that cannot be read"


class Unloaded:
    """Stands for an object that is not made of plain values, in what `values_of` returns."""


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}


def _built(data: bytes) -> Any:
    """Return the object of a pickle, built from its opcodes alone.

    Python's unpickler would call functions, and allocate what the pickle asks for. A container that
    occurs several times becomes an `Unloaded`: 100 bytes of a pickle can nest a tuple so that 2^50
    steps are needed to visit it.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if number == _MOST_OPCODES:
            raise ValueError("it is too long")
        name = opcode.name
        if name == "STOP":
            return stack.pop()
        if name == "MARK":
            marks.append(len(stack))
        elif name in {"MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"}:
            memo[len(memo) if argument is None else argument] = stack[-1]
        elif name in {"DUP", "GET", "BINGET", "LONG_BINGET"}:
            value = stack[-1] if argument is None else memo[argument]
            stack.append(Unloaded() if isinstance(value, dict | list | tuple) else value)
        else:
            items: list[Any] = []
            before = len(opcode.stack_before)
            if pickletools.markobject in opcode.stack_before:
                start = marks.pop()
                items = stack[start:]
                del stack[start:]
                before = opcode.stack_before.index(pickletools.markobject)
            if before:
                items = [*stack[-before:], *items]
                del stack[-before:]
            if opcode.stack_after:
                stack.append(_result(opcode, argument, items))
    raise ValueError("it has no end")


def _result(opcode: pickletools.OpcodeInfo, argument: Any, items: list[Any]) -> Any:
    """Return what an opcode makes of its argument in the pickle and of items from the stack."""
    if argument is not None and opcode.stack_after != [pickletools.anyobject]:
        return argument
    name = opcode.name.removeprefix("EMPTY_").rstrip("123S")
    result: Any = {} if name == "DICT" else items[0] if items else None
    if name in {"DICT", "SETITEM"} and isinstance(result, dict):
        some = items if name == "DICT" else items[1:]
        pairs = zip(some[::2], some[1::2], strict=True)
        # Other keys are dropped, because the pickle may choose their hashes.
        result.update((key, each) for key, each in pairs if isinstance(key, str | bytes))
    elif name == "APPEND" and isinstance(result, list):
        result += items[1:]
    elif name in {"LIST", "TUPLE"}:
        result = items if name == "LIST" else tuple(items)
    else:
        result = _CONSTANTS.get(name, Unloaded())
    return result


def round_robin(
    pending: Mapping[str, int], most: int, read: Callable[[str, int], Sequence[_T]]
) -> list[_T]:
    """Return the first pending requests, round-robin by slot.

    Args:
        pending: how many requests of each slot are pending.
        most: how many requests to return.
        read: returns the first requests of a slot, up to a number.

    >>> rows = {"a": ["a1", "a2", "a3", "a4"], "b": ["b1"]}
    >>> round_robin({"a": 4, "b": 1}, 4, lambda slot, number: rows[slot][:number])
    ['a1', 'b1', 'a2', 'a3']
    """
    slots, numbers, turns = list(pending)[:most], list(pending.values())[:most], 1
    while turns < max(numbers, default=0) and sum(min(each, turns) for each in numbers) < most:
        turns += 1
    rows = [read(slot, turns) for slot in slots]
    return [each for turn in zip_longest(*rows) for each in turn if each is not None][:most]

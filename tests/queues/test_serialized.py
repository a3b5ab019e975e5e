"""What is shown of a serialized request: its values, without the code of its classes."""

import copyreg
import datetime as dt
import decimal
import enum
import os
import pickle
import struct
import uuid
from array import array
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lxml import html
from scrapy import Field, Item, Request
from scrapy.http import Headers, HtmlResponse

from scrapy_bloom.queues.serialized import Unloaded, url_of, values_of
from tests.support.request_queues import Trap

URL = "https://shop.example/1"
PROTOCOLS = range(2, pickle.HIGHEST_PROTOCOL + 1)
UNREADABLE = "a request that cannot be read"


class Product(Item):
    name = Field()


@dataclass
class Offer:
    name: str


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 5


class Flags(enum.Flag):
    A = 1
    B = 2


class Text(str):  # noqa: SLOT000 - as spiders write it
    pass


class Words(list):  # type: ignore[type-arg]
    pass


class Table(dict):  # type: ignore[type-arg]
    pass


class Pair(tuple):  # type: ignore[type-arg]  # noqa: SLOT001 - as spiders write it
    pass


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1


class NewArguments:
    """Made with named arguments."""

    def __new__(cls, *, name: str = "") -> Any:
        return super().__new__(cls)

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, str]]:
        return (), {"name": "x"}


class Reduced:
    """As an array of numpy: made by a function, with a state."""

    def __reduce__(self) -> tuple[Any, ...]:
        return copyreg._reconstructor, (Reduced, object, None), {"a": [1, 2]}  # type: ignore[attr-defined]


class Filled:
    """Made with items that are appended, and keys that are set."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Table, (), {"state": 1}, None, iter([("key", (1, 2))])


Point = namedtuple("Point", "x y")  # noqa: PYI024 - as spiders write it

(LINK_TEXT,) = html.fromstring("<p><a>text</a></p>").xpath("//a/text()")
CYCLE: list[Any] = [1]
CYCLE.append(CYCLE)
OBJECTS: dict[str, Any] = {
    "link_text": LINK_TEXT,
    "date": dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc),
    "interval": dt.timedelta(1),
    "decimal": decimal.Decimal("1.5"),
    "fraction": Fraction(1, 3),
    "complex": 1j,
    "item": Product(name="x"),
    "dataclass": Offer("x"),
    "enum": Color.RED,
    "flags": Flags.A | Flags.B,
    "namedtuple": Point(1, 2),
    "subclasses": [Text("x"), Words([1]), Table(a=1), Pair([1])],
    "collections": [OrderedDict(a=1), defaultdict(list, a=[1]), Counter("ab"), deque([1, 2])],
    "sets": [{1, 2}, frozenset({3}), {(1, 2)}, set()],
    "bytes": [b"", b"\xff" * 300, bytearray(b"x")],
    "array": array("d", [1.0]),
    "path": Path("x"),
    "uuid": uuid.UUID(int=5),
    "namespace": SimpleNamespace(a=1),
    "slots": Slotted(),
    "new": NewArguments(name="x"),
    "reduced": Reduced(),
    "filled": Filled(),
    "headers": Headers({"a": "b"}),
    "response": HtmlResponse(URL, body=b"x", request=Request(URL)),
    "class": Offer,
    "function": os.getcwd,
    "builtin": len,
    "ellipsis": ...,
    "range": range(5),
    "slice": slice(1, 2),
    "error": KeyError("x"),
    "tuple key": {(1, 2): 3, Point(1, 2): 4, None: 5, 6: 7},
    "cycle": CYCLE,
    "numbers": [-1, 2**31, 2**70, 1.5, True, None],
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", OBJECTS)
def test_a_request_with_any_object(name: str, protocol: int) -> None:
    value = OBJECTS[name]
    meta = {name: value, "again": value, "depth": 3}
    request = Request(
        URL,
        callback=None,
        method="POST",
        body=b"\xff=1",
        headers={"A": "b"},
        priority=-7,
        meta=meta,
        cb_kwargs={name: value},
    )
    data = pickle.dumps({**request.to_dict(), "callback": "parse", "errback": "failed"}, protocol)
    values = values_of(data)
    assert values
    assert values["meta"]["depth"] == 3
    assert {name: values[name] for name in ("url", "method", "callback", "errback")} == {
        "url": URL,
        "method": "POST",
        "callback": "parse",
        "errback": "failed",
    }
    if protocol > 2:  # which has no bytes
        assert (values["body"], values["headers"]) == (b"\xff=1", {b"A": [b"b"]})
    assert (values["priority"], values["dont_filter"]) == (-7, False)


def test_plain_values_are_read_as_pickle_reads_them() -> None:
    request = {
        "url": URL,
        "meta": {"a": [1, (2, (3.5, [])), {"b": {}}], "c": "é\ud800", "d": "", "e": ()},
        "cb_kwargs": {"x": None, "y": True, "z": -(2**80)},
    }
    for protocol in PROTOCOLS:
        assert values_of(pickle.dumps(request, protocol)) == request


def test_no_code_runs(tmp_path: Path) -> None:
    for protocol in PROTOCOLS:
        request = {"url": URL, "meta": {"trap": Trap(tmp_path / "sprung")}}
        assert url_of(pickle.dumps(request, protocol)) == URL
    assert not (tmp_path / "sprung").exists()


NESTED = b")" + b"2\x86" * 50  # a tuple of two tuples of two tuples ...: 2^50 steps to visit it
FROM_MEMO = b")\x94" + b"".join(b"h%ch%c\x86\x94" % (i, i) for i in range(50))


def request_with(value: bytes, key: bytes = b"\x8c\x04meta") -> bytes:
    url = struct.pack("<B", len(URL)) + URL.encode()
    return b"\x80\x04}(\x8c\x03url\x8c" + url + key + value + b"u."


@pytest.mark.parametrize("value", [NESTED, FROM_MEMO, b"(" * 9 + b"l" * 9], ids=range(3))
def test_what_would_take_long_to_visit(value: bytes) -> None:
    data = request_with(value)
    assert url_of(data) in {URL, UNREADABLE}
    assert len(repr(values_of(data))) < 10_000


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no pickle",
        b"\x80\x04N.",
        b"\x80\x04]" + b"(]" * 10 + b".",
        pickle.dumps({"name": "x"}),
        pickle.dumps({"url": 5}),
        pickle.dumps({"url": b"https://a.example"}),
        pickle.dumps({"url": 1 << 160_000}),
        pickle.dumps({"url": (URL,)}),
        pickle.dumps({"url": Text(URL)}),
        pickle.dumps({"url": "x" * 1_000_001}),
        b"\x80\x04}\x8c\x03url" + NESTED + b"s.",
        b"\x80\x04}" + NESTED + b"Ns.",
        b"\x80\x04}r\xff\xff\xff\x7f0.",  # a memo of 2 GiB
        b"\x80\x04\x8b\xff\xff\xff\x7f0.",  # an integer of 2 GiB
        b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7f.",  # a text of 8 EiB
        b"\x80\x04" + b"0" * 9 + b".",
        b"\x80\x04" + b"N0" * 1_000_000 + pickle.dumps({"url": URL})[2:],
    ],
    ids=lambda data: repr(data[:30]),
)
def test_what_is_not_readable(data: bytes) -> None:
    assert values_of(data) is None
    assert url_of(data) == UNREADABLE


def test_deep_values_are_no_trouble() -> None:
    for value in (b"]" * 100_000 + b"a" * 99_999, b")" + b"\x85" * 100_000):
        assert url_of(request_with(value)) == URL


def test_stand_ins() -> None:
    values = values_of(
        pickle.dumps({"url": URL, "priority": Level.HIGH, "meta": {"a": Offer("x")}})
    )
    assert values
    assert isinstance(values["priority"], Unloaded)
    assert isinstance(values["meta"]["a"], Unloaded)

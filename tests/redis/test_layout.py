"""The tables of keys, arguments and replies, from which the scripts and their callers are made."""

import re
from collections.abc import Iterator, Sequence

import pytest

from scrapy_bloom.queues.store import MOST_DEATHS, MOST_TRIES, TO_ITSELF, TO_OTHERS, TRIES_SECS
from scrapy_bloom.redis import batch_script, layout, scripts
from scrapy_bloom.redis.layout import Field, named_keys, parsed_reply, words_of
from tests.support.request_queues import InRedis

ARGUMENTS = {
    "batch": (layout.BATCH, batch_script.BATCH),
    "join": (layout.JOIN, scripts.JOIN),
    "leave": (layout.LEAVE, scripts.LEAVE),
    "move": (layout.MOVE, scripts.MOVE),
    "record": (layout.RECORD, batch_script.RECORD),
}
REPLIES = {
    "batch": (layout.BATCH_REPLY, batch_script.BATCH),
    "join": (layout.JOIN_REPLY, scripts.JOIN),
    "leave": (layout.LEAVE_REPLY, scripts.LEAVE),
}


def all_fields(fields: Sequence[Field]) -> Iterator[Field]:
    for field in fields:
        yield field
        yield from all_fields(field.rows)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_each_argument_is_used(name: str) -> None:
    fields, script = ARGUMENTS[name]
    body = script.partition("local given = {}")[2]
    unused = [
        field.name
        for field in all_fields(fields)
        if not re.search(rf"\w\.{field.name}\b(?! = )", body)
    ]
    assert unused == []


@pytest.mark.parametrize("name", REPLIES)
def test_each_field_of_a_reply_is_given(name: str) -> None:
    fields, script = REPLIES[name]
    for call in re.findall(r"return replied\(\{(.*?)\}\)\n", script, re.DOTALL):
        given = re.findall(r"(?:^|,)\s*(\w+) = ", re.sub(r"\([^()]*\)", "", call))
        assert sorted(given) == sorted(field.name for field in fields)


def test_each_argument_has_a_place_of_its_own() -> None:
    rows = [Field("a", "text", ""), Field("b", "rows", "", [Field("c", "texts", "")])]
    fields = [Field("n", "number", ""), Field("rows", "rows", "", rows), Field("f", "flag", "")]
    values = {
        "n": 5,
        "rows": [{"a": b"", "b": []}, {"a": b"xy", "b": [{"c": ["p", "q"]}]}],
        "f": True,
    }
    words = [5, 2, b"", 0, b"xy", 1, 2, "p", "q", 1]
    assert words_of(fields, values) == words
    assert parsed_reply(fields[:1], [b"ok", 7]) == {"n": 7}
    with pytest.raises(ValueError, match="zip"):
        parsed_reply(fields, [b"ok", 7])


def test_the_documented_fields_are_those_of_the_tables() -> None:
    text = scripts.__doc__ or ""
    hashes = {"filter", "rows", "runs", "workers"}
    for name in (*layout.QUEUE_FIELDS, *(name for name in layout.KEYS if name not in hashes)):
        assert re.search(rf"^    (\w+, )*{name}\b", text, re.MULTILINE), name
    assert all(
        about.startswith("a hash: ") == (key in hashes) for key, about in layout.KEYS.items()
    )


def test_the_fields_of_a_queue_are_those_of_the_table(shared: InRedis) -> None:
    """So that the removal of a queue removes all of them."""
    written = set()
    for script in (batch_script.BATCH, scripts.JOIN, scripts.LEAVE, scripts.MOVE):
        written |= set(re.findall(r"call\('H(?:SET|SETNX|INCRBY)', filter, '(\w+)'", script))
    assert written <= set(layout.QUEUE_FIELDS)
    store = shared.open()
    store.close()
    names = {name.decode() for name in shared.server.send("HKEYS", shared.key)}
    of_the_filter = re.compile(r"id|version|filter|(gen|count|mirror):\w+")
    assert {name for name in names if not of_the_filter.fullmatch(name)} <= set(layout.QUEUE_FIELDS)


def test_limits_are_those_of_the_other_stores() -> None:
    numbers = f"{MOST_DEATHS}, {MOST_TRIES}, {round(1000 * TRIES_SECS)}"
    assert f"local MOST_DEATHS, MOST_TRIES, TRIES_MS = {numbers}\n" in scripts.COMMON
    for name, reason in (("TO_ITSELF", TO_ITSELF), ("TO_OTHERS", TO_OTHERS)):
        assert f"local {name} = '{reason}'\n" in batch_script.BATCH


def test_all_keys_of_a_filter_are_in_one_slot_of_a_cluster() -> None:
    keys = named_keys("shop:bloom")
    assert keys.pop("filter") == "shop:bloom"
    assert all(key == f"{{shop:bloom}}:{name}" for name, key in keys.items())

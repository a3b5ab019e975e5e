"""The scripts, and what they share with Python: keys, constants, and values in msgpack."""

import re
from pathlib import Path

import pytest

from scrapy_bloom import redis
from scrapy_bloom.exceptions import RefusedError
from scrapy_bloom.redis import layout
from scrapy_bloom.redis.lua_scripts import packed, reply_of
from tests.support.request_queues import InRedis

SCRIPTS = sorted(
    path.stem
    for path in (Path(redis.__file__).parent / "lua").iterdir()
    if "ARGV" in path.read_text()
)
EXTREMES = {
    "none": False,
    "all": True,
    "zero": 0,
    "negative": -1,
    "largest": 2**53,
    "empty": "",
    "text": "\ud800 \N{SNOWMAN}",
    "binary": bytes(range(256)),
    "large": bytes(1 << 20),
    "no list": [],
    "list": [b"\0", [], [1, [False]]],
    "many": list(range(20_000)),
}


def lua(name: str) -> str:
    return (Path(redis.__file__).parent / "lua" / f"{name}.lua").read_text()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_documents_its_arguments(name: str) -> None:
    head, _, body = lua(name).partition("\nlocal ")
    for argument in re.findall(r"\bgiven\.(\w+)", body):
        assert re.search(rf"\b{argument}\b", head), argument


@pytest.mark.parametrize("key", EXTREMES)
def test_values_pass_through_lua(shared: InRedis, key: str) -> None:
    echo = "return cmsgpack.pack(cmsgpack.unpack(ARGV[1]))"
    value = EXTREMES[key]
    expected = value.encode(errors="surrogatepass") if isinstance(value, str) else value
    assert reply_of(shared.server.script(echo, [], packed({key: value}))) == {key: expected}


@pytest.mark.parametrize("reply", [7, b"text", [b"ok"], packed([1]), None])
def test_a_reply_of_another_kind_is_refused(reply: object) -> None:
    with pytest.raises(RefusedError, match="a script has returned"):
        reply_of(reply)


def test_the_documented_fields_are_those_of_the_tables() -> None:
    text = layout.__doc__ or ""
    hashes = {"filter", "rows", "runs", "workers"}
    for name in (*layout.QUEUE_FIELDS, *(name for name in layout.KEYS if name not in hashes)):
        assert re.search(rf"^    (\w+, )*{name}\b", text, re.MULTILINE), name
    assert all(
        about.startswith("a hash: ") == (key in hashes) for key, about in layout.KEYS.items()
    )


def test_the_fields_of_a_queue_are_those_of_the_table(shared: InRedis) -> None:
    """So that the removal of a queue removes all of them."""
    written = set()
    for name in SCRIPTS:
        written |= set(
            re.findall(r"call\('H(?:SET|SETNX|INCRBY)', keys.filter, '(\w+)'", lua(name))
        )
    assert len(written) >= 10
    assert written <= set(layout.QUEUE_FIELDS)
    store = shared.open()
    store.close()
    names = {name.decode() for name in shared.server.send("HKEYS", shared.key)}
    of_the_filter = re.compile(r"id|version|filter|(gen|count|mirror):\w+")
    assert {name for name in names if not of_the_filter.fullmatch(name)} <= set(layout.QUEUE_FIELDS)

"""The scripts, and what they share with Python: keys, constants, and values in msgpack."""

import re
from itertools import takewhile
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
    if "ARGV:" in path.read_text()
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
    lines = lua(name).splitlines()
    head = " ".join(takewhile(lambda line: line.startswith("--"), lines))
    body = "\n".join(lines)
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


def test_the_documented_keys_are_those_of_the_scripts() -> None:
    for name in layout.KEYS:
        assert re.search(
            rf"^    (\w+, )*{name}\b|`[^`]*{name}`", layout.__doc__ or "", re.MULTILINE
        ), name


def test_fields_of_a_queue_and_of_its_filter(shared: InRedis) -> None:
    """So that the removal of a queue removes all of them, and nothing else."""
    shared.filter()
    assert not any(map(layout.is_field_of_queue, shared.server.send("HKEYS", shared.key)))
    before = set(shared.server.send("HKEYS", shared.key))
    shared.open().close()
    added = set(shared.server.send("HKEYS", shared.key)) - before
    assert len(added) >= 5
    assert all(map(layout.is_field_of_queue, added))

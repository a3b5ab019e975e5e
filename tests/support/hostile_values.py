"""What the hash of a filter in Redis should never hold, and may: damaged, foreign or hostile.

Run as a program, it puts one after the other into a server, and tells what became of a backend that
met it; in a process of its own, whose memory and time have bounds.
"""

import contextlib
import json
import resource
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import redis

from scrapy_bloom import BloomError
from scrapy_bloom.redis.backend import RedisBackend
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.reader import RedisReader
from tests.support.backends import redis_backend

KEY = "shop:bloom"
FINGERPRINTER = "scrapy.utils.request.RequestFingerprinter"
LIMIT_SECS, LIMIT_BYTES = 10, 3 << 30  # for one of them

Fields = dict[bytes, bytes]

DEEP = "[" * 100_000 + "]" * 100_000
VALUES: dict[str, str] = {
    "null": "null",
    "true": "true",
    "text": '"text"',
    "empty text": '""',
    "list": "[1, 0]",
    "object": '{"a": 1}',
    "deep": DEEP,
    "zero": "0",
    "negative": "-1",
    "fraction": "0.5",
    "nan": "NaN",
    "infinite": "Infinity",
    "beyond a float": "1e999",
    "tiny": "1e-300",
    "65,535": "65535",
    "2 ** 31": str(2**31),
    "2 ** 63": str(2**63),
    "10 ** 30": str(10**30),
    "5,000 digits": "9" * 5000,
    "half a character": '"\\ud800"',
    "line ends": '"a\\nb\\u001b[31m"',
    "not hexadecimal": '"zz345678"',
    "other digits": '"١٢٣٤٥٦٧٨"',
    "long text": json.dumps("x" * 1_000_000),
}
TEXTS: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"{",
    "no UTF-8": b"\xff\xfe\x00",
    "two values": b"{} {}",
    **{name: text.encode() for name, text in VALUES.items()},
}
COUNTS: dict[str, bytes] = {
    "nothing": b"",
    "text": b"many",
    "negative": b"-1",
    "fraction": b"0.5",
    "nan": b"nan",
    "no UTF-8": b"\xff",
    "other digits": "١٢".encode(),
    "with an underscore": b"1_0",
    "with a space": b" 7",
    "10 ** 15": b"1" + b"0" * 15,
    "2 ** 63 - 1": str(2**63 - 1).encode(),
    "10 ** 30": b"1" + b"0" * 30,
    "5,000 digits": b"9" * 5000,
}
NAMES = [
    *(b"", b":", b"a", b"a:b:c:d", b"\xff", b"other", b"abcd0123:", b"abcd0123:0"),
    *(b"abcd0123:-1", b"abcd0123:1.5", b"abcd0123:1_0", b"abcd0123:x", b"abcd0123:" + b"9" * 5000),
    *(b"unlink", b"unlink:", b"unlink:a:b", b"persist:../../x", b"unlink:\xff", b"*:1", b"\r\n:1"),
]
KEYS = ["-1", "1.5", "", "x", "1000000000000", "1" * 30]
LEFT_OVER: list[dict[str, Any]] = [{"num_blocks": 10**12}, {"num_blocks": -1}, {"num_hashes": 0}]

# What may be so, though it never was: figures within their ranges, and texts that nobody reads.
HARMLESS = {
    *(
        f"filter.{name}: {value}"
        for name in ("spider", "fingerprinter")
        for value in ("text", "empty text", "not hexadecimal", "other digits", "line ends")
    ),
    *("filter.format: missing", "filter.hash_scheme: missing", "filter.error_rate: missing"),
    *(f"filter.error_rate: {value}" for value in ("zero", "fraction", "tiny")),
    *("generation: one member more", "filter: one member more"),
    *("generation: {'counter_bits': 2}", "generation: {'counter_bits': 8}"),
    *(f"field {name[:30]!r}" for name in NAMES if not name.startswith((b"unlink", b"persist"))),
    *(f"left over: {what}" for what in LEFT_OVER),
    *("generation.error_rate: fraction", "generation: {'error_rate': 0.999}"),
    *("generation: {'num_hashes': 64}", "generation: {'capacity': 1}"),
    *("unlink: zero", "unlink: 65,535"),
    *(
        f"{place}.{name}: {value}"
        for place, name in (
            ("filter", "created_at"),
            *(("generation", each) for each in ("created_at", "open_until")),
        )
        for value in ("zero", "fraction", "65,535", "2 ** 31", "tiny")
    ),
}


def mutations(fields: Mapping[bytes, bytes]) -> Iterator[tuple[str, Fields]]:
    """A name for each, and all fields of the hash."""
    generations = sorted(name for name in fields if name.startswith(b"gen:"))
    newest = generations[-1]
    for place, name in (("filter", b"filter"), ("generation", newest)):
        for what, text in _texts(place, fields[name]):
            yield what, {**fields, name: text}
    yield "generation: two with the same keys", {**fields, newest: fields[generations[0]]}
    for what, text in _misfits(fields[newest]):
        yield what, {**fields, newest: text}
    for what, text in _salts(fields[b"filter"]):
        yield what, {**fields, b"filter": text}
    for what, count in COUNTS.items():
        yield f"count: {what}", {**fields, newest.replace(b"gen", b"count"): count}
    for name in NAMES:
        yield f"field {name[:30]!r}", {**fields, name: b"{}"}
    for what, text in [*TEXTS.items(), *((each, each.encode()) for each in KEYS)]:
        yield f"unlink: {what}", {**fields, b"unlink:0123456789abcdef": text}
    for what in LEFT_OVER:
        text = _changed(fields[newest], id="01234567", **what)
        yield f"left over: {what}", {**fields, b"abcd0123:1": text}


def _texts(place: str, good: bytes) -> Iterator[tuple[str, bytes]]:
    """In place of an object, and of each of its members."""
    for what, text in TEXTS.items():
        yield f"{place}: {what}", text
    members = json.loads(good)
    for member in members:
        others = {key: value for key, value in members.items() if key != member}
        yield f"{place}.{member}: missing", json.dumps(others).encode()
        for what, value in VALUES.items():
            new = json.dumps({**others, member: "HERE"}).replace('"HERE"', value)
            yield f"{place}.{member}: {what}", new.encode()
    yield f"{place}: one member more", _changed(good, more=1)


def _misfits(good: bytes) -> Iterator[tuple[str, bytes]]:
    """Figures of a generation, each of which could be, but not with the others."""
    own = json.loads(good)["id"]
    for changed in (
        *({"num_blocks": 10**9}, {"num_blocks": 10**9, "capacity": 10**12}),
        *({"num_hashes": 1}, {"num_hashes": 64}, {"capacity": 10**12}, {"capacity": 1}),
        *({"error_rate": 1e-19}, {"error_rate": 0.999}, {"counter_bits": 2}, {"counter_bits": 8}),
        *({"id": own[:7]}, {"id": own * 2}, {"id": "../../ab"}),
        *({"created_at": 1e15}, {"open_until": 1e15}),
    ):
        yield f"generation: {changed}", _changed(good, **changed)


def _salts(good: bytes) -> Iterator[tuple[str, bytes]]:
    own = json.loads(good)["salt"]
    for what, salt in {
        "short": "00",
        "longer": own + "00",
        "half a byte less": own[:-1],
        "with spaces": " ".join(own),
        "not hexadecimal": "z" * 32,
    }.items():
        yield f"filter.salt: {what}, as a text", _changed(good, salt=salt)


def _changed(good: bytes, **members: Any) -> bytes:
    return json.dumps({**json.loads(good), **members}).encode()


class TooLongError(BaseException):
    """Nothing of ours may catch it."""


def _too_long(*_: object) -> None:
    raise TooLongError


def outcome(use: Any) -> str:
    """What became of it: "fine", the one line of an error, or what must not be."""
    signal.alarm(LIMIT_SECS)
    try:
        use()
    except BloomError as error:
        return f"refused: {error}"
    except BaseException as error:  # noqa: BLE001 - told to whoever reads the output
        return f"FAILED: {type(error).__name__}: {str(error)[:80]}"
    finally:
        signal.alarm(0)
    return "fine"


def _backend(url: str) -> RedisBackend:
    return redis_backend(
        RedisServer(url, deadline_secs=2),
        KEY,
        capacity=100,
        error_rate=1e-6,
        fingerprinter=FINGERPRINTER,
        window_secs=1e6,
    )


def _crawl(url: str) -> None:
    backend = _backend(url)
    backend.open()
    with contextlib.closing(backend):
        backend.begin()
        for number in range(20):
            backend.add(b"another page %d" % number)
            backend.add(b"another page %d" % number)
        str(backend.status().error_rate_now)


def _look(url: str) -> None:
    with contextlib.closing(RedisServer(url, deadline_secs=2)) as server:
        reader = RedisReader(server, KEY)
        reader.are_seen([b"page", b"another"])


def good_fields(url: str) -> Fields:
    """Those of a filter of two generations, and of keys that are to be removed."""
    client = redis.Redis.from_url(url)
    client.flushdb()
    backend = _backend(url)
    backend.open()
    backend.begin()
    for number in range(150):
        backend.add(b"page %d" % number)
    backend.close()
    fields: Fields = client.hgetall(KEY)
    return {**fields, b"unlink:0123456789abcdef": b"1"}


def main(url: str) -> None:
    signal.signal(signal.SIGALRM, _too_long)
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    client = redis.Redis.from_url(url)
    fields = good_fields(url)
    blocks = {key: client.get(key) for key in client.keys(f"{{{KEY}}}:blocks:*")}
    for name, changed in mutations(fields):
        told = {"name": name}
        for how, use in (("crawl", _crawl), ("look", _look)):
            pipeline = client.pipeline()
            pipeline.flushdb()
            pipeline.hset(KEY, mapping=changed)
            pipeline.mset(blocks)
            pipeline.execute()
            told[how] = outcome(lambda use=use: use(url))
            told[f"{how} left it"] = client.hgetall(KEY) == changed
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

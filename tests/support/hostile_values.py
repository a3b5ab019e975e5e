"""What the hash of a filter in Redis should never hold, and may: damaged, foreign or hostile.

Run as a program, it puts one value after the other into a server, and prints what became of a
backend and of a reader that met it: in a process of its own, whose memory and time have bounds.
"""

import contextlib
import json
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import redis

from scrapy_bloom import BloomError
from scrapy_bloom.redis.backend import RedisBackend
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.reader import RedisReader
from tests.support.backends import redis_backend

KEY = "shop:bloom"
FINGERPRINTER = "scrapy.utils.request.RequestFingerprinter"
LIMIT_SECS, LIMIT_BYTES = 10, 3 << 30  # for one value

Fields = dict[bytes, bytes]

VALUES = [
    *("null", "true", '"text"', '""', "[1, 0]", '{"a": 1}', "[" * 100_000 + "]" * 100_000),
    *("0", "-1", "0.5", "NaN", "Infinity", "1e999", "1e-300", "65535", str(2**31), str(2**63)),
    *(str(10**30), "9" * 5000, '"\\ud800"', '"a\\nb\\u001b[31m"', '"zz345678"', '"١٢٣٤٥٦٧٨"'),
    json.dumps("x" * 1_000_000),
]
TEXTS = [b"", b"{", b"\xff\xfe\x00", b"{} {}", *(value.encode() for value in VALUES)]
COUNTS = [b"", b"many", b"-1", b"0.5", b"nan", b"\xff", b"1_0", b" 7", b"9" * 5000]
COUNTS += [str(number).encode() for number in (10**15, 2**63 - 1, 10**30)]
NAMES = [
    *(b"", b":", b"a", b"a:b:c:d", b"\xff", b"other", b"abcd0123:", b"abcd0123:0"),
    *(b"abcd0123:-1", b"abcd0123:1.5", b"abcd0123:1_0", b"abcd0123:x", b"abcd0123:" + b"9" * 5000),
    *(b"*:1", b"\r\n:1"),
    *(b"unlink", b"unlink:", b"unlink:a:b", b"persist:../../x", b"unlink:\xff"),
]
UNFINISHED = [
    b"persist:0123456789abcdef",
    b"unlink:0123456789abcdef",
]  # keys that are made or removed
KEYS = [b"-1", b"1.5", b"x", b"1000000000000", b"1" * 30]
KEYS += [b"[1, 2, 3]", b'["1", 0]', b"[-1, 0]", b"[1, null]", b"[1, -1e999]", b"[1000000000000, 0]"]
# Figures of a generation, each of which could be, but not with the others.
MISFITS: list[dict[str, Any]] = [
    *({"num_blocks": 10**9}, {"num_blocks": 10**9, "capacity": 10**12}, {"num_blocks": 10**30}),
    *({"num_hashes": 1}, {"num_hashes": 64}, {"capacity": 10**12}, {"capacity": 1}),
    *({"error_rate": 1e-19}, {"error_rate": 0.999}, {"counter_bits": 2}, {"counter_bits": 8}),
    *({"id": "0123456"}, {"id": "../../ab"}, {"created_at": 1e15}, {"open_until": 1e15}),
]


def mutations(fields: Mapping[bytes, bytes]) -> Iterator[tuple[str, Fields]]:
    """Yield a name for each, and all fields of the hash."""
    generations = sorted(name for name in fields if name.startswith(b"gen:"))
    newest = generations[-1]
    replaced = [(b"filter", text) for text in _texts(fields[b"filter"])]
    replaced += [(newest, text) for text in _texts(fields[newest])]
    replaced += [(newest, _changed(fields[newest], **each)) for each in MISFITS]
    replaced += [(newest, fields[generations[0]])]  # two with the same keys
    replaced += [(newest.replace(b"gen", b"count"), count) for count in COUNTS]
    replaced += [(name, b"{}") for name in NAMES]
    replaced += [(name, each) for name in UNFINISHED for each in [*TEXTS, *KEYS]]
    for number, (name, text) in enumerate(replaced):
        yield f"{number} {name[:30]!r}: {text[:60]!r}", {**fields, name: text}


def _texts(good: bytes) -> Iterator[bytes]:
    """Yield what may be in place of an object, and of each of its members."""
    yield from TEXTS
    members = json.loads(good)
    for member in members:
        yield json.dumps(
            {name: value for name, value in members.items() if name != member}
        ).encode()
        for value in VALUES:
            yield json.dumps({**members, member: "HERE"}).replace('"HERE"', value).encode()


def _changed(good: bytes, **members: Any) -> bytes:
    return json.dumps({**json.loads(good), **members}).encode()


class TooLongError(BaseException):
    """Nothing of ours may catch it."""


def _too_long(*_: object) -> None:
    raise TooLongError


def outcome(use: Callable[[str], None], url: str) -> str:
    """Return "fine", the one line of an error, or what must not be."""
    signal.alarm(LIMIT_SECS)
    try:
        use(url)
    except BloomError as error:
        return f"refused: {error}"
    except BaseException as error:  # noqa: BLE001 - shown to whoever reads the output
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


def crawl(url: str) -> None:
    backend = _backend(url)
    backend.open()
    with contextlib.closing(backend):
        backend.begin()
        for number in range(20):
            backend.add(b"another page %d" % number)
            backend.add(b"another page %d" % number)
        str(backend.status().error_rate_now)


def look(url: str) -> None:
    with contextlib.closing(RedisServer(url, deadline_secs=2)) as server:
        RedisReader(server, KEY).are_seen([b"page", b"another"])


def good_fields(url: str) -> Fields:
    """Make a filter of two generations; return its fields."""
    client = redis.Redis.from_url(url)
    client.flushdb()
    backend = _backend(url)
    backend.open()
    backend.begin()
    for number in range(150):
        backend.add(b"page %d" % number)
    backend.close()
    fields: Fields = client.hgetall(KEY)
    return fields


def main(url: str) -> None:
    signal.signal(signal.SIGALRM, _too_long)
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    client = redis.Redis.from_url(url)
    fields = good_fields(url)
    blocks = {key: client.get(key) for key in client.keys(f"{{{KEY}}}:blocks:*")}
    for name, changed in mutations(fields):
        for use in (crawl, look):
            pipeline = client.pipeline()
            pipeline.flushdb()
            pipeline.hset(KEY, mapping=changed)
            pipeline.mset(blocks)
            pipeline.execute()
            became = outcome(use, url)
            print(json.dumps([name, became, client.hgetall(KEY) == changed]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

"""Read what a crawl with scrapy-redis has in Redis: its fingerprints, queue and start URLs."""

import json
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from scrapy import FormRequest, Request

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.queues.serialized import Unloaded, serialized, values_of
from scrapy_bloom.redis.connection.server import RedisServer

_PAGE = 100  # requests that are read at once
_SCAN_COUNT = 1000  # fingerprints that are read at once

# The commands that read members of a key, by its type.
_READS = {b"list": "LRANGE", b"zset": "ZRANGE"}


@dataclass(frozen=True)
class RedisSet:
    """The fingerprints in a set of scrapy-redis, in hexadecimal digits."""

    server: RedisServer
    key: str

    def count(self) -> int:
        """Count its members."""
        kind = self.server.send("TYPE", self.key)
        if kind == b"none":
            raise StorageError(
                f"{self.server.address} has no key {self.key!r}; give the name of scrapy-redis's "
                "set after the URL, as in #shop:dupefilter (SCHEDULER_DUPEFILTER_KEY, by default "
                "<spider>:dupefilter)"
            )
        if kind != b"set":
            raise StorageError(
                f"the key {self.key!r} of {self.server.address} is a {kind.decode()}, not a set "
                "of fingerprints"
            )
        return int(self.server.send("SCARD", self.key))

    def __iter__(self) -> Generator[bytes, None, None]:
        """Yield each fingerprint at least once, also while crawlers add fingerprints."""
        for member in chain.from_iterable(_scanned(self.server, self.key, _SCAN_COUNT)):
            try:
                yield bytes.fromhex(member.decode())
            except ValueError:
                raise StorageError(
                    f"the set {self.key!r} of {self.server.address} holds {member[:60]!r}, "
                    "which is not a fingerprint (hexadecimal digits); it was left as it is"
                ) from None


def _scanned(server: RedisServer, key: str, count: int) -> Iterator[list[bytes]]:
    """Yield the members of a set, about `count` at once."""
    cursor = None
    while cursor is None or int(cursor):
        cursor, members = server.send("SSCAN", key, int(cursor or 0), "COUNT", count)
        yield members


class New(NamedTuple):
    """A request to be added."""

    request: Mapping[str, Any]  # in the form of `Request.to_dict`
    is_filtered: bool = True  # False: it is queued even if the filter has recorded it
    data: bytes = b""  # the serialized request, if it may have more than plain values


@dataclass
class RedisKey:
    """A key of scrapy-redis: its queue, or its start URLs.

    Attributes:
        server: the server of the key.
        key: name of a list, a set or a sorted set.
        is_queue: the members are pickled requests; otherwise, URLs or JSON objects.
        skipped: number of members so far that are not valid requests.
        first_skipped: the first of these members, and the reason.
    """

    server: RedisServer
    key: str
    is_queue: bool
    skipped: int = 0
    first_skipped: str = ""

    def pages(self) -> Iterator[list[New]]:
        """Yield requests, page by page. No code that the pickles may contain is run."""
        kind = self.server.send("TYPE", self.key)
        if kind == b"none":  # Redis has no empty keys
            return
        if kind != b"set" and kind not in _READS:
            raise StorageError(
                f"the key {self.key!r} of {self.server.address} is a {kind.decode()}, not a queue "
                "of scrapy-redis"
            )
        members = _scanned(self.server, self.key, _PAGE) if kind == b"set" else self._read(kind)
        for page in members:
            yield [request for member in page if (request := self._request(member))]

    def _read(self, kind: bytes) -> Iterator[list[bytes]]:
        start = 0
        while members := self.server.send(_READS[kind], self.key, start, start + _PAGE - 1):
            yield members
            start += len(members)

    def _request(self, member: bytes) -> New | None:
        try:
            if self.is_queue:
                return _queued(member)
            values = _start_request(member).to_dict()
            return New(values, data=serialized(values))
        except Exception as error:  # noqa: BLE001 - the member may be damaged
            self.skipped += 1
            self.first_skipped = self.first_skipped or f"{member[:60]!r}: {error}"
            return None


def _queued(member: bytes) -> New:
    values = values_of(member)
    if values is None:
        raise ValueError("it is not a pickled request")
    request_of(values)
    # The filter may have recorded it, if scrapy-redis's set was imported.
    return New(values, is_filtered=False, data=member)


def _start_request(member: bytes) -> Request:
    """Return the request that scrapy-redis creates for a start URL."""
    text = member.decode()
    if not text.startswith("{"):
        return Request(text)
    fields = json.loads(text)
    url, method, meta = fields.pop("url"), fields.pop("method", "GET"), fields.pop("meta", {})
    if not fields:
        return Request(url, method=method, meta=meta)
    return FormRequest(url, method=method, meta=meta, formdata=fields)


def request_of(found: dict[str, Any] | Any) -> Request:
    """Return a request without its callbacks, for its fingerprint and its slot.

    Its class is not loaded, because that would run code. Raises any exception if it is not valid.
    """
    names = ("url", "method", "headers", "body", "meta", "encoding", "priority")
    values = {name: found[name] for name in names if name in found}
    if isinstance(values.get("priority"), Unloaded):  # a member of an enum, for example
        del values["priority"]
    for name, value in values.items():
        if isinstance(value, Unloaded):
            raise TypeError(f"its {name} is an object")
    return Request(**values)

"""Read what a crawl with scrapy-redis has in Redis: its fingerprints, queue and start URLs."""

import json
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from scrapy import FormRequest, Request

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.queues.serialized import plain
from scrapy_bloom.redis.connection.server import RedisServer

_PAGE = 100  # requests that are read at once
_SCAN_COUNT = 1000  # fingerprints that are read at once

# The commands that read members of a key, and those that remove a member, by the type of the key.
_READS = {b"list": "LRANGE", b"zset": "ZRANGE"}
_REMOVES = {b"list": ("LREM", 1), b"zset": ("ZREM",), b"set": ("SREM",)}


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
                    "which is no fingerprint in hexadecimal digits; it was left as it is"
                ) from None


def _scanned(server: RedisServer, key: str, count: int) -> Iterator[list[bytes]]:
    """Yield the members of a set, about `count` at once."""
    cursor = None
    while cursor is None or int(cursor):
        cursor, members = server.send("SSCAN", key, int(cursor or 0), "COUNT", count)
        yield members


@dataclass
class RedisKey:
    """A key of scrapy-redis: its queue, or its start URLs.

    Attributes:
        server: the server of the key.
        key: name of a list, a set or a sorted set.
        is_queue: the members are pickled requests; otherwise, URLs or JSON objects.
        drains: remove each member once the caller asks for the next page.
        skipped: number of members so far that are not valid requests.
        first_skipped: the first of these members, and the reason.
    """

    server: RedisServer
    key: str
    is_queue: bool
    drains: bool = False
    skipped: int = 0
    first_skipped: str = ""

    def pages(self) -> Iterator[list[dict[str, Any]]]:
        """Yield requests as `Request.to_dict` makes them, page by page.

        Pickled code is not run: a request with other than plain values is skipped.
        """
        kind = self.server.send("TYPE", self.key)
        if kind == b"none":  # Redis has no empty keys
            return
        if kind not in _REMOVES:
            raise StorageError(
                f"the key {self.key!r} of {self.server.address} is a {kind.decode()}, not a queue "
                "of scrapy-redis"
            )
        command, *options = _REMOVES[kind]
        unreadable: set[bytes] = set()  # while a set shrinks, Redis may return a member twice
        for members in self._members(kind):
            new = [member for member in members if member not in unreadable]
            made = [(member, request) for member in new if (request := self._request(member))]
            yield [request for _, request in made]
            if self.drains:
                self.server.batches([(command, self.key, *options, each) for each, _ in made])
            if kind == b"set":
                unreadable.update(set(new) - dict(made).keys())

    def _members(self, kind: bytes) -> Iterator[list[bytes]]:
        if kind == b"set":
            yield from _scanned(self.server, self.key, _PAGE)
            return
        start = 0
        while members := self.server.send(_READS[kind], self.key, start, start + _PAGE - 1):
            yield members
            start = self.skipped if self.drains else start + len(members)

    def _request(self, member: bytes) -> dict[str, Any] | None:
        try:
            return _queued(member) if self.is_queue else _start_request(member)
        except Exception as error:  # noqa: BLE001 - the member may be damaged
            self.skipped += 1
            self.first_skipped = self.first_skipped or f"{member[:60]!r}: {error}"
            return None


def _queued(member: bytes) -> dict[str, Any]:
    found = plain(member)
    if found is None:
        raise ValueError("it is not a pickled request of plain values")
    request_of(found)
    return dict(found)


def _start_request(member: bytes) -> dict[str, Any]:
    """Return the request that scrapy-redis creates for a start URL."""
    text = member.decode()
    if not text.startswith("{"):
        return Request(text).to_dict()
    fields = json.loads(text)
    url, method, meta = fields.pop("url"), fields.pop("method", "GET"), fields.pop("meta", {})
    if not fields:
        return Request(url, method=method, meta=meta).to_dict()
    return FormRequest(url, method=method, meta=meta, formdata=fields).to_dict()


def request_of(found: dict[str, Any] | Any) -> Request:
    """Return a request without its callbacks, for its fingerprint and its slot.

    Its class is not loaded, because that would run code. Raises any exception if it is not valid.
    """
    names = ("url", "method", "headers", "body", "meta", "encoding", "priority")
    return Request(**{name: found[name] for name in names if name in found})

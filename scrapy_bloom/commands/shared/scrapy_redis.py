"""Read what a crawl with scrapy-redis has in Redis: its fingerprints, queue and start URLs."""

import json
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

from scrapy import FormRequest, Request

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.queues.batch import plain
from scrapy_bloom.redis.connection.server import RedisServer

_PAGE = 100  # requests that are read at once
_SCAN_COUNT = 1000  # fingerprints that are read at once

# The command that reads members of each type of key, and the command that removes a member.
_READS = {b"list": "LRANGE", b"zset": "ZRANGE", b"set": "SSCAN"}
_REMOVES = {b"list": ("LREM", 1), b"zset": ("ZREM",), b"set": ("SREM",)}


@dataclass(frozen=True)
class RedisSet:
    """The fingerprints in a set of scrapy-redis, in hexadecimal digits."""

    server: RedisServer
    key: str

    def count(self) -> int:
        """Count its members."""
        kind = self.server.call(lambda client: client.type(self.key))
        if kind == b"none":
            raise StorageError(
                f"{self.server.address} has no key {self.key!r}; give the name of scrapy-redis's "
                "set with --source-key (its SCHEDULER_DUPEFILTER_KEY, by default "
                "<spider>:dupefilter)"
            )
        if kind != b"set":
            raise StorageError(
                f"the key {self.key!r} of {self.server.address} is a {kind.decode()}, not a set "
                "of fingerprints"
            )
        return int(self.server.call(lambda client: client.scard(self.key)))

    def __iter__(self) -> Generator[bytes, None, None]:
        """Yield each fingerprint at least once, also while crawlers add fingerprints."""
        cursor = None
        while cursor is None or int(cursor):
            cursor, members = self.server.send(
                "SSCAN", self.key, int(cursor or 0), "COUNT", _SCAN_COUNT
            )
            for member in members:
                try:
                    yield bytes.fromhex(member.decode())
                except ValueError:
                    raise StorageError(
                        f"the set {self.key!r} of {self.server.address} holds {member[:60]!r}, "
                        "which is no fingerprint in hexadecimal digits; it was left as it is"
                    ) from None


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
        if kind not in _READS:
            raise StorageError(
                f"the key {self.key!r} of {self.server.address} is a {kind.decode()}, not a queue "
                "of scrapy-redis"
            )
        start: Any = 0
        unreadable: set[bytes] = set()
        while True:
            if kind == b"set":
                start, members = self.server.send("SSCAN", self.key, start, "COUNT", _PAGE)
                # While a set shrinks, Redis may return a member twice.
                members = [each for each in members if each not in unreadable]
            else:
                members = self.server.send(_READS[kind], self.key, start, start + _PAGE - 1)
            made = [(member, request) for member in members if (request := self._request(member))]
            yield [request for _, request in made]
            if kind == b"set":
                unreadable.update(set(members) - dict(made).keys())
            if self.drains:
                words = _REMOVES[kind]
                self.server.batches([(words[0], self.key, *words[1:], each) for each, _ in made])
            if kind == b"set":
                if not int(start):
                    return
            elif members:
                start += len(members) - (len(made) if self.drains else 0)
            else:
                return

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

"""Read the fingerprints of a crawl with scrapy-redis."""

from collections.abc import Generator
from dataclasses import dataclass

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.redis.connection.server import RedisServer

_SCAN_COUNT = 1000  # fingerprints that are read at once


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
        cursor = None
        while cursor is None or int(cursor):
            answer = self.server.send("SSCAN", self.key, int(cursor or 0), "COUNT", _SCAN_COUNT)
            cursor, members = answer
            for member in members:
                try:
                    yield bytes.fromhex(member.decode())
                except ValueError:
                    raise StorageError(
                        f"the set {self.key!r} of {self.server.address} holds {member[:60]!r}, "
                        "which is not a fingerprint (hexadecimal digits); it was left as it is"
                    ) from None

"""The forgotten requests of a shared filter: a sorted set in Redis, by the time of forgetting.

`scrapy_bloom.redis.scripts` documents the set; the scripts of a batch change it, too.
"""

import time
from collections.abc import Iterable, Sequence

from scrapy_bloom.exceptions import OutageError
from scrapy_bloom.redis.connection.server import RedisServer, next_attempt
from scrapy_bloom.redis.filter import OtherFilterError
from scrapy_bloom.redis.scripts import keys_of

_BATCH = 1000
_OVERLAP_SECS = 10.0  # of two reads, because the clock may differ after a failover

_NOW = """
local time = redis.call('TIME')
local now = string.format('%d.%06d', time[1], time[2])
"""

# Keys: the filter's hash, the set. Arguments: id of the filter; fingerprints, which get the current
# time. A change of the filter's `forgets` makes other crawls read the set.
_ADD = (
    _NOW
    + """
if redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] then return 0 end
for index = 2, #ARGV do redis.call('ZADD', KEYS[2], now, ARGV[index]) end
redis.call('HINCRBY', KEYS[1], 'forgets', 1)
return 1
"""
)

# Key: the set. Argument: a time. Returns the current time, and the fingerprints added since then.
_SINCE = _NOW + "return {now, redis.call('ZRANGEBYSCORE', KEYS[1], ARGV[1], '+inf')}"


class RedisForgotten:
    """A set of forgotten fingerprints that many crawlers share; only one crawler can take each.

    Args:
        server: the connection.
        key: the key of the filter.
        filter_id: the id of the filter; to the set of another filter, nothing is added.

    Attributes:
        filter_id: to be set when the crawl continues with another filter.
    """

    def __init__(self, server: RedisServer, key: str, filter_id: str) -> None:
        self.filter_id = filter_id
        self._server = server
        self._filter = key
        self._name = keys_of(key)[-1]
        self._looked_at = ("", 0.0)  # the filter's id, and the server's time
        self._look_again_at = 0.0  # on a monotonic clock

    def news(self) -> Iterable[bytes]:
        """Return the fingerprints that others have added since the last call.

        During an outage, return nothing.
        """
        found: list[bytes]
        if (begun := time.monotonic()) < self._look_again_at:
            return []
        last_id, at = self._looked_at
        since = at - _OVERLAP_SECS if last_id == self.filter_id else 0.0
        try:
            now, found = self._server.script(_SINCE, [self._name], since, patient=False)
        except OutageError:
            self._look_again_at = next_attempt(begun)
            return []
        self._looked_at = (self.filter_id, float(now))
        return found

    def all(self) -> Iterable[bytes]:
        """Return the whole set."""
        members: list[bytes] = self._server.send("ZRANGE", self._name, 0, -1)
        return members

    def add(self, fingerprints: Sequence[bytes]) -> None:
        """Add fingerprints; raises an OtherFilterError if the filter was replaced."""
        for start in range(0, len(fingerprints), _BATCH):
            batch = fingerprints[start : start + _BATCH]
            if not self._server.script(_ADD, [self._filter, self._name], self.filter_id, *batch):
                raise OtherFilterError(
                    f"the filter {self._filter!r} in {self._server.address} was removed, or lost"
                )

    def take(self, fingerprint: bytes) -> bool:
        """Remove a fingerprint; return whether it was in the set.

        After a lost reply, the result is True, so that the request is crawled again rather than
        skipped.
        """
        retries = self._server.retries
        removed = self._server.send("ZREM", self._name, fingerprint)
        return bool(removed) or self._server.retries != retries

    def has(self, fingerprint: bytes) -> bool:
        """Return whether a fingerprint is in the set."""
        return self.among([fingerprint])[0]

    def among(self, fingerprints: Sequence[bytes]) -> list[bool]:
        """Return for each fingerprint whether it is in the set."""
        if not fingerprints:
            return []
        scores = self._server.send("ZMSCORE", self._name, *fingerprints)
        return [score is not None for score in scores]

    def __len__(self) -> int:
        number: int = self._server.send("ZCARD", self._name)
        return number

    def expire(self, secs: float) -> None:
        """Remove fingerprints that were added more than `secs` seconds ago."""
        self._server.send("ZREMRANGEBYSCORE", self._name, "-inf", self._server.now() - secs)

    def close(self) -> None:
        """Do nothing, because the backend closes the connection."""

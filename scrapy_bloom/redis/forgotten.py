"""The forgotten requests of a shared filter: a sorted set by the time of forgetting.

`scrapy_bloom.redis.scripts` documents the sets; the scripts of a batch change them, too.
"""

import time
from collections.abc import Iterable, Sequence

from scrapy_bloom.exceptions import OutageError
from scrapy_bloom.redis.connection.server import RedisServer, next_attempt
from scrapy_bloom.redis.scripts import keys_of

_AT_ONCE = 1000  # fingerprints
_OVERLAP_SECS = 10.0  # of two reads, because the clock may differ after a failover

_NOW = """
local time = redis.call('TIME')
local now = string.format('%d.%06d', time[1], time[2])
"""

# Keys: the filter's hash, the set. Arguments: fingerprints, which get the current time. A change of
# the filter's `forgets` makes other crawls read the set.
_ADD = (
    _NOW
    + """
if redis.call('HEXISTS', KEYS[1], 'id') == 0 then return end
for index = 1, #ARGV do redis.call('ZADD', KEYS[2], now, ARGV[index]) end
redis.call('HINCRBY', KEYS[1], 'forgets', 1)
"""
)

# Key: the set. Argument: a time. Returns the current time, and the fingerprints added since then.
_SINCE = _NOW + "return {now, redis.call('ZRANGEBYSCORE', KEYS[1], ARGV[1], '+inf')}"


class RedisForgotten:
    """A set of forgotten fingerprints that many crawlers share; only one crawler can take each.

    Args:
        server: the connection.
        key: the name of the filter's hash.
    """

    def __init__(self, server: RedisServer, key: str) -> None:
        self._server = server
        self._key = key
        self._set = keys_of(key)[-1]
        self._looked_at = 0.0  # the server's time
        self._look_again_at = 0.0  # on a monotonic clock

    def news(self) -> Iterable[bytes]:
        """Return the fingerprints that others have added since the last call.

        During an outage, return nothing.
        """
        if (begun := time.monotonic()) < self._look_again_at:
            return []
        since = self._looked_at - _OVERLAP_SECS
        try:
            now, news = self._server.script(_SINCE, [self._set], since, patient=False)
        except OutageError:
            self._look_again_at = next_attempt(begun)
            return []
        self._looked_at = float(now)
        return list(news)

    def all(self) -> Iterable[bytes]:
        """Return the whole set."""
        return list(self._server.send("ZRANGE", self._set, 0, -1))

    def add(self, fingerprints: Sequence[bytes]) -> None:
        """Add fingerprints, unless the filter was removed, to which every fingerprint is new."""
        for start in range(0, len(fingerprints), _AT_ONCE):
            some = fingerprints[start : start + _AT_ONCE]
            self._server.script(_ADD, [self._key, self._set], *some)

    def take(self, fingerprint: bytes) -> bool:
        """Remove a fingerprint; return whether it was in the set.

        After a lost reply, the result is True, so that the request is crawled again rather than
        skipped.
        """
        retries = self._server.retries
        removed = self._server.send("ZREM", self._set, fingerprint)
        return bool(removed) or self._server.retries != retries

    def has(self, fingerprint: bytes) -> bool:
        """Return whether a fingerprint is in the set."""
        return self.among([fingerprint])[0]

    def among(self, fingerprints: Sequence[bytes]) -> list[bool]:
        """Return for each fingerprint whether it is in the set."""
        scores = self._server.batches([("ZSCORE", self._set, each) for each in fingerprints])
        return [score is not None for score in scores]

    def __len__(self) -> int:
        return int(self._server.send("ZCARD", self._set))

    def expire(self, secs: float) -> None:
        """Remove fingerprints that were added more than `secs` seconds ago."""
        self._server.send("ZREMRANGEBYSCORE", self._set, "-inf", self._server.now() - secs)

    def close(self) -> None:
        """Do nothing, because the backend closes the connection."""

"""The forgotten requests of a shared filter: a sorted set per shard, by the time of forgetting.

`scrapy_bloom.redis.scripts` documents the sets; the scripts of a batch change them, too.
"""

import time
from collections.abc import Iterable, Sequence

from scrapy_bloom.exceptions import OutageError
from scrapy_bloom.redis.connection.server import RedisServer, next_attempt
from scrapy_bloom.redis.scripts import keys_of, shard_of

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
    """A set of forgotten fingerprints that many crawlers share.

    Args:
        server: the connection.
        keys: the keys of all shards of the filter.
    """

    def __init__(self, server: RedisServer, keys: Sequence[str]) -> None:
        self._server = server
        self._keys = keys
        self._sets = [keys_of(each)[-1] for each in keys]
        self._looked_at = [0.0 for _ in keys]  # the server's time
        self._look_again_at = 0.0  # on a monotonic clock

    def _set_of(self, fingerprint: bytes) -> str:
        return self._sets[shard_of(fingerprint, len(self._sets))]

    def news(self) -> Iterable[bytes]:
        """Return the fingerprints that others have added since the last call.

        During an outage, return nothing.
        """
        news: list[bytes] = []
        if (begun := time.monotonic()) < self._look_again_at:
            return news
        try:
            for shard, name in enumerate(self._sets):
                since = self._looked_at[shard] - _OVERLAP_SECS
                now, found = self._server.script(_SINCE, [name], since, patient=False)
                self._looked_at[shard] = float(now)
                news += found
        except OutageError:
            self._look_again_at = next_attempt(begun)
        return news

    def all(self) -> Iterable[bytes]:
        """Return the whole set."""
        return [each for name in self._sets for each in self._server.send("ZRANGE", name, 0, -1)]

    def add(self, fingerprints: Sequence[bytes]) -> None:
        """Add fingerprints, unless the filter was removed, to which every fingerprint is new."""
        for key, name in zip(self._keys, self._sets, strict=True):
            mine = [each for each in fingerprints if self._set_of(each) == name]
            for start in range(0, len(mine), _AT_ONCE):
                self._server.script(_ADD, [key, name], *mine[start : start + _AT_ONCE])

    def remove(self, fingerprint: bytes) -> None:
        """Remove a fingerprint, if it is in the set."""
        self._server.send("ZREM", self._set_of(fingerprint), fingerprint)

    def among(self, fingerprints: Sequence[bytes]) -> list[bool]:
        """Return for each fingerprint whether it is in the set."""
        scores = self._server.batches(
            [("ZSCORE", self._set_of(each), each) for each in fingerprints]
        )
        return [score is not None for score in scores]

    def __len__(self) -> int:
        return sum(self._server.send("ZCARD", name) for name in self._sets)

    def expire(self, secs: float) -> None:
        """Remove fingerprints that were added more than `secs` seconds ago."""
        for name in self._sets:
            self._server.send("ZREMRANGEBYSCORE", name, "-inf", self._server.now() - secs)

    def close(self) -> None:
        """Do nothing, because the backend closes the connection."""

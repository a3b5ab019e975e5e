"""The forgotten requests of a shared filter: a sorted set in Redis, by the time of forgetting."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any

from scrapy_bloom.redis_server import RedisServer

_BATCH = 1000
_OVERLAP_SECS = 10.0  # between two looks: crawlers' notions of the server's time differ a little


class RedisForgotten:
    """A set of forgotten fingerprints that many crawlers share: each is taken by exactly one.

    Args:
        server: the connection.
        key: of the filter.
        epoch: returns that of the filter: another filter has a set of its own.
        now: returns the server's time.
    """

    def __init__(
        self,
        server: RedisServer,
        key: str,
        epoch: Callable[[], str],
        now: Callable[[], float],
    ) -> None:
        self._server = server
        self._key = key
        self._epoch = epoch
        self._now = now
        self._looked_at, self._looked_at_set = 0.0, ""

    @property
    def _set(self) -> str:
        return forgotten_key(self._key, self._epoch())

    def news(self) -> Iterable[bytes]:
        """See `ForgottenStore`."""
        name, now = self._set, self._now()
        since = self._looked_at if name == self._looked_at_set else 0.0
        found: list[bytes] = self._server.call(
            lambda client: client.zrangebyscore(name, since, "+inf"), patient=False
        )
        self._looked_at, self._looked_at_set = now - _OVERLAP_SECS, name
        return found

    def all(self) -> Iterable[bytes]:
        """See `ForgottenStore`."""
        found: list[bytes] = self._server.call(lambda client: client.zrange(self._set, 0, -1))
        return found

    def add(self, fingerprints: Sequence[bytes]) -> None:
        """See `ForgottenStore`."""
        now, rest = self._now(), iter(fingerprints)
        while batch := list(islice(rest, _BATCH)):
            scores = dict.fromkeys(batch, now)
            self._server.call(partial(self._added, scores))

    def _added(self, scores: dict[bytes, float], client: Any) -> None:
        client.zadd(self._set, scores)

    def take(self, fingerprint: bytes) -> bool:
        """See `ForgottenStore`. After a lost reply nobody knows: rather twice than never."""
        retries = self._server.retries
        removed = self._server.call(lambda client: client.zrem(self._set, fingerprint))
        return bool(removed) or self._server.retries != retries

    def has(self, fingerprint: bytes) -> bool:
        """See `ForgottenStore`."""
        score = self._server.call(lambda client: client.zscore(self._set, fingerprint))
        return score is not None

    def remove(self, fingerprint: bytes) -> None:
        """See `ForgottenStore`."""
        self._server.call(lambda client: client.zrem(self._set, fingerprint))

    def expire(self, secs: float) -> None:
        """See `ForgottenStore`."""
        before = self._now() - secs
        self._server.call(lambda client: client.zremrangebyscore(self._set, "-inf", before))

    def close(self) -> None:
        """See `ForgottenStore`."""


def forgotten_key(key: str, epoch: str) -> str:
    """Return the name of the sorted set of a filter."""
    return f"{key}:forgotten:{epoch}"

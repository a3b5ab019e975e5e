"""The forgotten requests of a shared filter: a sorted set in Redis, by the time of forgetting.

Where a run's queue dies with it, what the run takes is only claimed: it moves to a sorted set of
that run, `{KEY}:claimed:EPOCH:RUN`, and back when the run ends, or when another one finds it dead.
All keys of a filter's forgotten requests are in one slot of a Cluster.
"""

import time
from collections.abc import Callable, Iterable, Sequence

from scrapy_bloom.job.paths import SET_ASIDE
from scrapy_bloom.job.processes import name_this_process, process_lives
from scrapy_bloom.redis.connection.server import RedisServer

_OVERLAP_SECS = 10.0  # between two looks: crawlers' notions of the server's time differ a little
_ALIVE_SECS = 600  # that a run on another machine may be silent
_RENEW_SECS = 60.0
_BATCH = 1000


class RedisForgotten:
    """A set of forgotten fingerprints that many crawlers share: each is taken by exactly one.

    Args:
        server: the connection.
        key: of the filter.
        epoch: returns the epoch of the filter; each epoch has a set of its own.
        now: returns the server's time.
        claims: what is taken is only claimed for this run.
    """

    def __init__(
        self,
        server: RedisServer,
        key: str,
        epoch: Callable[[], str],
        now: Callable[[], float],
        *,
        claims: bool = False,
    ) -> None:
        self._server = server
        self._key = key
        self._epoch = epoch
        self._now = now
        self.claims = claims
        self._run = name_this_process()
        self._claimed: set[bytes] = set()  # no more than are queued
        self._known_keys = Keys(key, "")
        self._looked_at = 0.0
        self._look_at_runs = 0.0  # on a monotonic clock

    @property
    def _keys(self) -> "Keys":
        if self._known_keys.epoch != self._epoch():  # another filter
            self._known_keys = Keys(self._key, self._epoch())
            self._claimed.clear()
            self._looked_at = self._look_at_runs = 0.0
        return self._known_keys

    def news(self) -> Iterable[bytes]:
        """See `ForgottenStore`."""
        keys = self._keys
        if self.claims and time.monotonic() >= self._look_at_runs:
            self._look_at_runs = time.monotonic() + _RENEW_SECS
            if self._claimed:
                self._stay_alive()
            if self._bury_the_dead():
                self._looked_at = 0.0
        since, now = self._looked_at, self._now()
        command = ("ZRANGEBYSCORE", keys.forgotten, since, "+inf")
        found: list[bytes] = self._server.send(*command, patient=False)
        self._looked_at = now - _OVERLAP_SECS
        return found

    def all(self) -> Iterable[bytes]:
        """See `ForgottenStore`."""
        found: list[bytes] = self._server.send("ZRANGE", self._keys.forgotten, 0, -1)
        return found

    def add(self, fingerprints: Sequence[bytes]) -> None:
        """See `ForgottenStore`."""
        for start in range(0, len(fingerprints), _BATCH):
            batch = fingerprints[start : start + _BATCH]
            now = self._now()
            scores = [word for each in batch for word in (now, each)]
            claimed = [each for each in batch if each in self._claimed]
            commands = [("ZADD", self._keys.forgotten, *scores)]
            if claimed:
                commands.append(("ZREM", self._keys.claimed(self._run), *claimed))
            self._server.transaction(*commands)
            self._claimed.difference_update(batch)

    def take(self, fingerprint: bytes) -> bool:
        """See `ForgottenStore`. After a lost reply it is taken: rather twice than never."""
        if fingerprint in self._claimed:
            return False
        if self.claims and not self._claimed:
            self._stay_alive()
        retries = self._server.retries
        taken = ("ZREM", self._keys.forgotten, fingerprint)
        if self.claims:
            claimed = ("ZADD", self._keys.claimed(self._run), self._now(), fingerprint)
            _, removed = self._server.transaction(claimed, taken)
        else:
            removed = self._server.send(*taken)
        if not removed and self._server.retries == retries:
            if self.claims:  # another run was faster
                self._server.send("ZREM", self._keys.claimed(self._run), fingerprint)
            return False
        if self.claims:
            self._claimed.add(fingerprint)
        return True

    def has(self, fingerprint: bytes) -> bool:
        """See `ForgottenStore`."""
        return self.among([fingerprint])[0]

    def among(self, fingerprints: Sequence[bytes]) -> list[bool]:
        """Check which of some fingerprints can be taken, at least one."""
        scores = self._server.send("ZMSCORE", self._keys.forgotten, *fingerprints)
        return [score is not None for score in scores]

    def everything(self) -> list[bytes]:
        """Return what is forgotten, claimed or not."""
        runs = [each.decode() for each in self._server.send("SMEMBERS", self._keys.runs)]
        sets = [self._keys.forgotten, *map(self._keys.claimed, runs)]
        return [each for name in sets for each in self._server.send("ZRANGE", name, 0, -1)]

    def remove(self, fingerprint: bytes) -> None:
        """See `ForgottenStore`."""
        keys = [self._keys.forgotten]
        if fingerprint in self._claimed:
            keys.append(self._keys.claimed(self._run))
        self._server.transaction(*[("ZREM", key, fingerprint) for key in keys])
        self._claimed.discard(fingerprint)

    def expire(self, secs: float) -> None:
        """See `ForgottenStore`."""
        before = self._now() - secs
        self._server.send("ZREMRANGEBYSCORE", self._keys.forgotten, "-inf", before)

    def close(self) -> None:
        """See `ForgottenStore`."""
        if self.claims:
            self._give_back(self._run)
        self._claimed.clear()

    def _stay_alive(self) -> None:
        """Tell other runs that this one lives, and has claims."""
        self._server.transaction(
            ("SADD", self._keys.runs, self._run),
            ("SET", self._keys.alive(self._run), 1, "EX", _ALIVE_SECS),
        )

    def _bury_the_dead(self) -> bool:
        """Give back what killed runs had claimed; return whether there was such a run."""
        runs: set[bytes] = self._server.send("SMEMBERS", self._keys.runs, patient=False)
        dead = [name for name in map(bytes.decode, runs) if self._is_dead(name)]
        for name in dead:
            self._give_back(name)
        return bool(dead)

    def _is_dead(self, name: str) -> bool:
        if name == self._run:
            return False
        lives = process_lives(name)
        if lives is None:  # on another machine
            lives = bool(self._server.send("EXISTS", self._keys.alive(name)))
        return not lives

    def _give_back(self, name: str) -> None:
        """Give back what a run has claimed, unless that was done before."""
        claimed, forgotten = self._keys.claimed(name), self._keys.forgotten
        self._server.transaction(
            ("ZUNIONSTORE", forgotten, 2, forgotten, claimed, "AGGREGATE", "MAX"),
            ("UNLINK", claimed),
            ("UNLINK", self._keys.alive(name)),
            ("SREM", self._keys.runs, name),
        )


class Keys:
    """The names of the keys of a filter's forgotten requests."""

    def __init__(self, key: str, epoch: str) -> None:
        key = key.partition(SET_ASIDE)[0]  # what is set aside keeps its keys
        self.epoch = epoch
        self._key = key
        self.forgotten = f"{{{key}}}:forgotten:{epoch}"
        self.runs = f"{{{key}}}:runs:{epoch}"

    def claimed(self, run: str) -> str:
        """Return the name of what a run has claimed."""
        return f"{{{self._key}}}:claimed:{self.epoch}:{run}"

    def alive(self, run: str) -> str:
        """Return the name of the sign of life of a run."""
        return f"{{{self._key}}}:alive:{self.epoch}:{run}"


def remove_forgotten(server: RedisServer, key: str, epoch: str) -> None:
    """Remove all forgotten requests of a filter that is gone."""
    keys = Keys(key, epoch)
    runs = [each.decode() for each in server.send("SMEMBERS", keys.runs)]
    names = (keys.forgotten, keys.runs, *map(keys.claimed, runs), *map(keys.alive, runs))
    server.transaction(*[("UNLINK", name) for name in names])

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
        key: of the filter, with a set for each of its epochs.
        epoch: of the filter.
        now: returns the server's time; None: ask it each time.
        claims: see `ForgottenStore`.

    Attributes:
        name: of the key of the set.
    """

    def __init__(
        self,
        server: RedisServer,
        key: str,
        epoch: str,
        now: Callable[[], float] | None = None,
        *,
        claims: bool = False,
    ) -> None:
        self.claims = claims
        self._server = server
        self._filter = key.partition(SET_ASIDE)[0]  # what is set aside keeps its keys
        self._now = now or server.now
        self._run = name_this_process()
        self.enter(epoch)

    def enter(self, epoch: str) -> None:
        """Go on to the set of another epoch."""
        self.epoch = epoch
        self.name, self._runs = self._key("forgotten"), self._key("runs")
        self._claimed: set[bytes] = set()  # no more than are queued
        self._looked_at = 0.0
        self._look_at_runs = 0.0  # on a monotonic clock

    def _key(self, kind: str, run: str = "") -> str:
        name = f"{{{self._filter}}}:{kind}:{self.epoch}"
        return f"{name}:{run}" if run else name

    def news(self) -> Iterable[bytes]:
        """See `ForgottenStore`."""
        if self.claims and time.monotonic() >= self._look_at_runs:
            self._look_at_runs = time.monotonic() + _RENEW_SECS
            if self._claimed:
                self._stay_alive()
            if self._bury_the_dead():
                self._looked_at = 0.0
        since, now = self._looked_at, self._now()
        command = ("ZRANGEBYSCORE", self.name, since, "+inf")
        found: list[bytes] = self._server.send(*command, patient=False)
        self._looked_at = now - _OVERLAP_SECS
        return found

    def all(self) -> Iterable[bytes]:
        """See `ForgottenStore`."""
        return self._members(self.name)

    def add(self, fingerprints: Sequence[bytes], *, secs: int = 0) -> None:
        """See `ForgottenStore`; with `secs`, the set expires then."""
        for start in range(0, len(fingerprints), _BATCH):
            batch = fingerprints[start : start + _BATCH]
            now = self._now()
            scores = [word for each in batch for word in (now, each)]
            claimed = [each for each in batch if each in self._claimed]
            commands: list[Sequence[object]] = [("ZADD", self.name, *scores)]
            if secs:
                commands.append(("EXPIRE", self.name, secs))
            if claimed:
                commands.append(("ZREM", self._key("claimed", self._run), *claimed))
            self._server.transaction(*commands)
            self._claimed.difference_update(batch)

    def take(self, fingerprint: bytes) -> bool:
        """See `ForgottenStore`. After a lost reply it is taken: rather twice than never."""
        if fingerprint in self._claimed:
            return False
        if self.claims and not self._claimed:
            self._stay_alive()
        retries, own = self._server.retries, self._key("claimed", self._run)
        taken = ("ZREM", self.name, fingerprint)
        if self.claims:
            claimed = ("ZADD", own, self._now(), fingerprint)
            _, removed = self._server.transaction(claimed, taken)
        else:
            removed = self._server.send(*taken)
        if not removed and self._server.retries == retries:
            if self.claims:  # another run was faster
                self._server.send("ZREM", own, fingerprint)
            return False
        if self.claims:
            self._claimed.add(fingerprint)
        return True

    def has(self, fingerprint: bytes) -> bool:
        """See `ForgottenStore`."""
        return self.among([fingerprint])[0]

    def among(self, fingerprints: Sequence[bytes]) -> list[bool]:
        """Check which of some fingerprints can be taken."""
        if not fingerprints:
            return []
        scores = self._server.send("ZMSCORE", self.name, *fingerprints)
        return [score is not None for score in scores]

    def everything(self) -> list[bytes]:
        """Return what is forgotten, claimed or not."""
        claimed = [self._key("claimed", run) for run in self._names_of_runs()]
        return [each for name in [self.name, *claimed] for each in self._members(name)]

    def remove(self, fingerprint: bytes) -> None:
        """See `ForgottenStore`."""
        keys = [self.name]
        if fingerprint in self._claimed:
            keys.append(self._key("claimed", self._run))
        self._server.transaction(*[("ZREM", key, fingerprint) for key in keys])
        self._claimed.discard(fingerprint)

    def remove_all(self) -> None:
        """Remove the keys of a filter that is gone."""
        runs = self._names_of_runs()
        own = [self._key(kind, run) for kind in ("claimed", "alive") for run in runs]
        keys = [self.name, self._runs, *own]
        self._server.transaction(*[("UNLINK", key) for key in keys])

    def expire(self, secs: float) -> None:
        """See `ForgottenStore`."""
        self._server.send("ZREMRANGEBYSCORE", self.name, "-inf", self._now() - secs)

    def close(self) -> None:
        """See `ForgottenStore`."""
        if self.claims:
            self._give_back(self._run)
        self._claimed.clear()

    def _members(self, key: str) -> list[bytes]:
        members: list[bytes] = self._server.send("ZRANGE", key, 0, -1)
        return members

    def _names_of_runs(self, *, patient: bool = True) -> list[str]:
        names = self._server.send("SMEMBERS", self._runs, patient=patient)
        return [name.decode() for name in names]

    def _stay_alive(self) -> None:
        """Tell other runs that this one lives, and has claims."""
        self._server.transaction(
            ("SADD", self._runs, self._run),
            ("SET", self._key("alive", self._run), 1, "EX", _ALIVE_SECS),
        )

    def _bury_the_dead(self) -> bool:
        """Give back what killed runs had claimed; return whether there was such a run."""
        dead = [name for name in self._names_of_runs(patient=False) if self._is_dead(name)]
        for name in dead:
            self._give_back(name)
        return bool(dead)

    def _is_dead(self, name: str) -> bool:
        if name == self._run:
            return False
        lives = process_lives(name)
        if lives is None:  # on another machine
            lives = bool(self._server.send("EXISTS", self._key("alive", name)))
        return not lives

    def _give_back(self, name: str) -> None:
        """Give back what a run has claimed, unless that was done before."""
        claimed, forgotten = self._key("claimed", name), self.name
        self._server.transaction(
            ("ZUNIONSTORE", forgotten, 2, forgotten, claimed, "AGGREGATE", "MAX"),
            ("UNLINK", claimed),
            ("UNLINK", self._key("alive", name)),
            ("SREM", self._runs, name),
        )

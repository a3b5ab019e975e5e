"""The lock of a shared filter: one crawler at a time makes a generation of it.

It saves work and memory, and decides nothing: a generation counts by being published, of each
number only one. So who loses it, since the server or the process stood still, goes on.
"""

import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

from scrapy_bloom.exceptions import OutageError, StorageError
from scrapy_bloom.redis.connection.server import RedisServer

logger = logging.getLogger(__name__)

LEASE_SECS = 10.0  # a batch of keys is made in one; that long the others wait for one that died
_LONGEST_LEASE_SECS = 60.0  # that any version has given
_SHOWN = 100  # characters of who holds it

_POLL_SECS, _LONGEST_POLL_SECS = 0.02, 0.5  # while another crawler makes the next generation
_START_PATIENCE_SECS = 3600.0  # before the crawl begins: 10^11 requests take some minutes
_SILENT_SECS = 5.0  # that we wait without a word


class RedisLock:
    """Held by one crawler at a time; a dead one's ends by itself."""

    def __init__(self, server: RedisServer, key: str) -> None:
        self._server = server
        self._name = f"{key}:lock"
        self._own = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}".encode()
        self._is_told = False

    def take(self) -> bool:
        """Try to take it; whether we hold it."""

        def fill(pipeline: Any) -> None:
            pipeline.set(self._name, self._own, nx=True, px=_milliseconds(LEASE_SECS))
            pipeline.get(self._name)
            pipeline.pttl(self._name)

        _, holder, left = self._server.transaction(fill)
        if holder == self._own:
            return True
        if holder is not None and not 0 <= left <= _milliseconds(_LONGEST_LEASE_SECS):
            self._shorten(holder)
        return False

    def _shorten(self, holder: bytes) -> None:
        """Give a lock an end that has none, or one that no crawler gives it."""
        self._server.call(
            lambda client: client.pexpire(self._name, _milliseconds(LEASE_SECS)),
        )
        if not self._is_told:
            self._is_told = True
            logger.warning(
                "The lock %r in %s had no end within a minute, which no crawler gives it; it is "
                "held by %s, and ends in %.0f seconds unless that one renews it",
                self._name,
                self._server.address,
                _shown(holder),
                LEASE_SECS,
            )

    def renew(self) -> None:
        """Keep it for another lease, if it is still ours."""
        self._if_ours(lambda pipeline: pipeline.pexpire(self._name, _milliseconds(LEASE_SECS)))

    def release(self, *, after: float = 0.0) -> None:
        """Let others take it, if it is still ours. Not vital: it ends by itself.

        Args:
            after: seconds that they are to wait still.
        """
        with contextlib.suppress(StorageError):
            if after:
                self._if_ours(lambda pipeline: pipeline.pexpire(self._name, _milliseconds(after)))
            else:
                self._if_ours(lambda pipeline: pipeline.delete(self._name))

    def _if_ours(self, change: Callable[[Any], object]) -> None:
        """Compare and change it in one step: it may have ended, and be another's by now."""

        def do(client: Any) -> None:
            with client.pipeline(transaction=True) as pipeline:
                pipeline.watch(self._name)
                if pipeline.get(self._name) != self._own:
                    return
                pipeline.multi()
                change(pipeline)
                pipeline.execute()  # if it changed meanwhile, this fails, and is done again

        self._server.call(do)

    def told(self) -> str:
        """Return who holds it, and where it is, for people."""
        holder = self._server.call(lambda client: client.get(self._name))
        return f"the lock {self._name!r} is held by {_shown(holder) if holder else 'nobody now'}"


class Patience:
    """Waits for another crawler that holds the lock: for long, before the crawl begins.

    Later the whole crawl waits with us: so it is some seconds, and after that a single attempt
    each time, until one succeeds.

    Args:
        server: where the lock is.
        lock: held by the crawler that is waited for.
        name: the filter, for people.

    Attributes:
        secs: how long the next wait may last.
    """

    def __init__(self, server: RedisServer, lock: RedisLock, name: str) -> None:
        self.secs = _START_PATIENCE_SECS
        self._server = server
        self._lock = lock
        self._name = name
        self._waits_since = 0.0  # since then every attempt was in vain; 0: all is well

    def wait_until(self, succeeds: Callable[[], bool]) -> None:
        """Try something again and again that another crawler keeps us from.

        Raises:
            OutageError: that was in vain.
        """
        begun, pause, is_told = time.monotonic(), _POLL_SECS, False
        while not succeeds():
            waited = time.monotonic() - begun
            if waited >= self.secs:
                self.secs, self._waits_since = 0.0, self._waits_since or begun
                waited = time.monotonic() - self._waits_since
                raise OutageError(
                    f"{self._busy()} since {waited:,.0f} seconds; look after that one, or end it",
                    since=self._waits_since,
                    until="it is done",
                )
            if waited >= _SILENT_SECS and not is_told:
                is_told = True
                logger.warning("Waiting, since %s", self._busy())
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_SECS)
        self.restore()

    def restore(self) -> None:
        """Forget that attempts were in vain."""
        # What a dead crawler holds ends with its lease; an outage would be waited out as long.
        self.secs = LEASE_SECS + self._server.deadline_secs
        self._waits_since = 0.0

    def _busy(self) -> str:
        return f"another crawler is changing {self._name} ({self._lock.told()})"


def _milliseconds(secs: float) -> int:
    return max(1, round(1000 * secs))


def _shown(holder: bytes) -> str:
    """Return the host and the process that a lock names; else what it holds."""
    host, *rest = holder[:_SHOWN].decode("ascii", "replace").split(":")
    if len(rest) == 2 and rest[0].isdecimal() and host.isprintable():
        return f"process {rest[0]} on {host}"
    return ascii(holder[:_SHOWN])

"""The lock of a shared filter: one crawler at a time makes a generation of it.

It saves work and memory, and decides nothing: only one generation of each number can be published.
So a crawler that loses the lock, since the server or the process stood still, goes on.
"""

import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

from scrapy_bloom.exceptions import OutageError, StorageError
from scrapy_bloom.redis.connection.server import RedisServer

logger = logging.getLogger(__name__)

LEASE_SECS = 10.0  # a batch of keys is made in one; that long the others wait for one that died
_LEASE_MS = round(1000 * LEASE_SECS)
_LONGEST_LEASE_MS = 60_000  # that any version has given
_SHOWN = 100  # characters of who holds it

_POLL_SECS, _LONGEST_POLL_SECS = 0.02, 0.5  # while another crawler makes the next generation
_START_PATIENCE_SECS = 3600.0  # before the crawl begins: 10^11 requests take some minutes
_SILENT_SECS = 5.0  # that we wait without a word


class RedisLock:
    """Held by one crawler at a time; a dead one's ends by itself.

    Before the crawl begins, the others wait for long. Later the whole crawl waits with them: so
    they wait for some seconds once, and then make single attempts until one succeeds.
    """

    def __init__(self, server: RedisServer, key: str) -> None:
        self.patience_secs = _START_PATIENCE_SECS  # how long the next wait may last
        self._server = server
        self._key = f"{key}:lock"
        self._name = f"the filter {key!r} in {server.address}"
        self._own = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}".encode()
        self._is_told = False
        self._waits_since = 0.0  # since then every attempt was in vain; 0: all is well

    def take(self) -> bool:
        """Try to take it; return whether we hold it."""
        _, holder, left = self._server.transaction(
            ("SET", self._key, self._own, "NX", "PX", _LEASE_MS),
            ("GET", self._key),
            ("PTTL", self._key),
        )
        if holder == self._own:
            return True
        if holder is not None and not 0 <= left <= _LONGEST_LEASE_MS:
            self._shorten(holder)
        return False

    def _shorten(self, holder: bytes) -> None:
        """Give an end to a lock that has none, or one that no crawler gives."""
        self._server.send("PEXPIRE", self._key, _LEASE_MS)
        if not self._is_told:
            self._is_told = True
            logger.warning(
                "The lock %r in %s had no end within a minute, which no crawler gives it; it is "
                "held by %s, and ends in %.0f seconds unless that one renews it",
                self._key,
                self._server.address,
                _shown(holder),
                LEASE_SECS,
            )

    def renew(self) -> None:
        """Keep it for another lease, if it is still ours."""
        self._end_after(_LEASE_MS)

    def release(self, *, after: float = 0.0) -> None:
        """Let others take it, so many seconds from now. Not vital: it ends by itself."""
        with contextlib.suppress(StorageError):
            self._end_after(round(1000 * after))  # 0: PEXPIRE removes it at once

    def _end_after(self, milliseconds: int) -> None:
        """Let it end then, if it is still ours, in one step: it may be another crawler's by now."""

        def do(client: Any) -> None:
            with client.pipeline(transaction=True) as pipeline:
                pipeline.watch(self._key)
                if pipeline.get(self._key) != self._own:
                    return
                pipeline.multi()
                pipeline.execute_command("PEXPIRE", self._key, milliseconds)
                pipeline.execute()  # if it changed meanwhile, this fails, and is done again

        self._server.call(do)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Wait for the lock, and hold it; raises OutageError."""
        self.wait_until(self.take)
        try:
            yield
        finally:
            self.release()

    def wait_until(self, succeeds: Callable[[], bool]) -> None:
        """Try something again while another crawler keeps us from it; raises OutageError."""
        begun, pause, is_told = time.monotonic(), _POLL_SECS, False
        while not succeeds():
            waited = time.monotonic() - begun
            if waited >= self.patience_secs:
                self.patience_secs, self._waits_since = 0.0, self._waits_since or begun
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
        self.restore_patience()

    def restore_patience(self) -> None:
        """Forget that attempts were in vain."""
        # What a dead crawler holds ends with its lease; an outage would be waited out as long.
        self.patience_secs = LEASE_SECS + self._server.deadline_secs
        self._waits_since = 0.0

    def _busy(self) -> str:
        holder = self._server.send("GET", self._key)
        return (
            f"another crawler is changing {self._name} (the lock {self._key!r} is held by "
            f"{_shown(holder) if holder else 'nobody now'})"
        )


def _shown(holder: bytes) -> str:
    """Return the host and the process that a lock names; else what it holds."""
    host, *rest = holder[:_SHOWN].decode("ascii", "replace").split(":")
    if len(rest) == 2 and rest[0].isdecimal() and host.isprintable():
        return f"process {rest[0]} on {host}"
    return ascii(holder[:_SHOWN])

"""The lease of a worker: a thread renews it, whatever the crawl is busy with."""

import contextlib
import threading
import time
from collections.abc import Callable

from scrapy_bloom.exceptions import StorageError

_RENEWALS = 4  # in the time that a lease lasts


class Lease:
    """Has `renew` called by a thread, four times while the lease lasts, until it is ended.

    That returns whether there still was a lease to renew; a StorageError says nothing about it.

    Attributes:
        secs: how long the lease lasts.
    """

    def __init__(self, renew: Callable[[], bool], secs: float) -> None:
        self.secs = secs
        self._renew = renew
        self._renewed_at = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scrapy_bloom lease", daemon=True)
        self._thread.start()

    def may_be_over(self) -> bool:
        """Return whether it was not renewed for so long that others may have taken it for over."""
        return time.monotonic() - self._renewed_at >= self.secs

    def renewed(self) -> None:
        """Note that it was renewed otherwise."""
        self._renewed_at = time.monotonic()

    def end(self) -> None:
        """End the thread; it waits for an answer that is on its way."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self.secs / _RENEWALS):
            asked_at = time.monotonic()
            with contextlib.suppress(StorageError):  # the crawl will find out, and tell
                if self._renew():
                    self._renewed_at = asked_at

"""Call a store: at once, or in a thread that also sends heartbeats.

The store knows neither threads nor the event loop.
"""

import queue
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

from scrapy_bloom.crawl.engine import loop_caller
from scrapy_bloom.queues.store import Batch, Closed, RejoinedError, Reply, Store

# None: the next batch will be answered by an error. `Closed` or an error after `leave`.
Outcome = Reply | Closed | Exception | None
Handle = Callable[[Batch | None, Outcome], object]  # the batch is None after `leave`

_HEARTBEATS = 4  # per lease
_LONGEST_SHARE_SECS = 60.0


class InThread:
    """Applies batches in a thread of its own: for a store that waits for a server.

    The thread also applies an empty batch a few times per lease, because the event loop may not run
    while a callback computes.

    Args:
        store: the store, which is open.
        handle: called in the event loop with each batch and its outcome. The outcome is None if a
            heartbeat has found that the worker had to rejoin. Send the next batch as usual: it is
            not applied, and its outcome is a `RejoinedError`.
        lease_secs: the duration of a lease.
    """

    def __init__(self, store: Store, handle: Handle, lease_secs: float) -> None:
        self._leased_until = _clock() + lease_secs
        self._shares_until = 0.0
        self._store = store
        self._lease_secs = lease_secs
        self._handle = handle
        self._rejoined: RejoinedError | None = None  # to be reported
        self._call_in_loop = loop_caller()
        self._outbox: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="scrapy_bloom sender", daemon=True).start()

    @property
    def has_lease(self) -> bool:
        """Return whether no other worker can have got the requests or the shares of this one."""
        return _clock() < min(self._leased_until, self._shares_until)

    def send(self, batch: Batch) -> None:
        """Apply a batch, after all earlier batches were answered."""
        self._outbox.put(batch)

    def leave(self) -> None:
        """Close the store, and end the thread."""
        self._outbox.put(None)

    def _run(self) -> None:
        batch: Batch | None = Batch()
        while batch is not None:
            outcome: Outcome
            try:
                wait = None if self._rejoined else self._lease_secs / _HEARTBEATS
                batch = self._outbox.get(timeout=wait)
            except queue.Empty:
                batch = Batch()
                outcome = self._renewed(batch)
                if isinstance(outcome, RejoinedError):
                    self._rejoined, outcome = outcome, None
            else:
                if batch is None:
                    outcome = closed(self._store)
                elif self._rejoined:
                    outcome, self._rejoined = self._rejoined, None
                else:
                    outcome = self._renewed(batch)
            self._call_in_loop(partial(self._handle, batch, outcome))

    def _renewed(self, batch: Batch) -> Reply | Exception:
        """Apply a batch, which renews the lease."""
        sent_at = _clock()
        outcome = applied(self._store, batch)
        if isinstance(outcome, Reply):
            self._leased_until = sent_at + self._lease_secs
            if batch.may_start:  # not a heartbeat
                self._shares_until = _clock() + min(self._lease_secs, _LONGEST_SHARE_SECS) / 2
        return outcome


def _clock() -> float:
    """Return the time in seconds, on a clock that goes on while the machine is suspended."""
    if sys.platform == "win32":
        return time.monotonic()
    # Linux's CLOCK_MONOTONIC stands still then, unlike that of macOS.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def applied(store: Store, batch: Batch) -> Reply | Exception:
    """Apply a batch; return the error if that failed."""
    try:
        return store.apply(batch)
    except Exception as error:  # noqa: BLE001 - the queue closes the spider
        return error


def closed(store: Store) -> Closed | Exception:
    """Close a store; return the error if that failed."""
    try:
        return store.close()
    except Exception as error:  # noqa: BLE001 - the queue logs it
        return error

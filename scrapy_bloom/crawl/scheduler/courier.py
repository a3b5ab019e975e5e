"""A thread that sends a worker's batches, one at a time: the event loop never waits for them."""

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

_In = TypeVar("_In")
_Out = TypeVar("_Out")


class Courier(Generic[_In, _Out]):
    """Has batches sent by a thread, and their outcomes delivered in the event loop.

    Args:
        exchange: called in the thread with each batch; it must not raise.
        deliver: called in the event loop with each batch and what `exchange` has returned.
        call_in_loop: calls a function in the event loop, from any thread.
        nothing: makes an empty batch, which is sent when there was no other for some time.
        renew_secs: that time, in seconds.
    """

    def __init__(
        self,
        exchange: Callable[[_In], _Out],
        deliver: Callable[[_In, _Out], None],
        call_in_loop: Callable[[Callable[[], object]], object],
        nothing: Callable[[], _In],
        renew_secs: float,
    ) -> None:
        self._exchange = exchange
        self._deliver = deliver
        self._call_in_loop = call_in_loop
        self._nothing = nothing
        self._renew_secs = renew_secs
        self._outbox: queue.SimpleQueue[_In | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="scrapy_bloom courier", daemon=True)
        self._thread.start()

    def send(self, batch: _In) -> None:
        """Have a batch sent, after those before it."""
        self._outbox.put(batch)

    def end(self) -> None:
        """End the thread, once it has sent what it was given."""
        self._outbox.put(None)

    def _run(self) -> None:
        while True:
            try:
                batch = self._outbox.get(timeout=self._renew_secs)
            except queue.Empty:
                batch = self._nothing()
            if batch is None:
                return
            outcome = self._exchange(batch)
            self._call_in_loop(partial(self._deliver, batch, outcome))

"""Send a worker's batches in a thread, one at a time, so that the event loop never waits."""

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

_In = TypeVar("_In")
_Out = TypeVar("_Out")


class Courier(Generic[_In, _Out]):
    """A thread that sends batches, and passes the replies to the event loop.

    Args:
        exchange: sends a batch, and returns the reply; called in the thread; it must not raise.
        deliver: called in the event loop with each batch and its reply.
        call_in_loop: calls a function in the event loop, from any thread.
        nothing: returns an empty batch.
        renew_secs: seconds without a batch after which the thread sends an empty one.
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
        """Send a batch after the previous ones."""
        self._outbox.put(batch)

    def end(self) -> None:
        """End the thread after it has sent all batches."""
        self._outbox.put(None)

    def _run(self) -> None:
        while True:
            try:
                batch = self._outbox.get(timeout=self._renew_secs)
            except queue.Empty:
                batch = self._nothing()
            if batch is None:
                return
            reply = self._exchange(batch)
            self._call_in_loop(partial(self._deliver, batch, reply))

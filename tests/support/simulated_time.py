"""The time, the threads and the event loops of a simulation, of which only one runs at a time."""

import functools
import heapq
import math
import queue
import random
import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from scrapy.utils import asyncio as scrapy_asyncio
from scrapy.utils import defer as scrapy_defer
from twisted.internet.defer import Deferred

from scrapy_bloom.crawl import engine as engine_module
from scrapy_bloom.crawl.scheduler import in_flight, in_thread
from scrapy_bloom.queues import collected, redis_store
from scrapy_bloom.redis import backend as backend_module
from scrapy_bloom.redis import server as server_module

EPOCH = 1_700_000_000.0  # on the wall, when the monotonic clock is 0


class KilledError(BaseException):
    """Ends a thread of a worker that was killed."""


clock = SimpleNamespace(now=0.0)  # in seconds; of the world that is simulated


class Actor(threading.Thread):
    """A thread of a worker, which runs when it is chosen: once it is ready, or a time has come."""

    def __init__(
        self,
        target: Callable[[], object],
        name: str = "",
        *,
        worker: Any = None,
        daemon: bool = True,
    ) -> None:
        super().__init__(name=name, daemon=daemon)
        self.worker: Any = worker or current().worker
        self.worker.actors.append(self)
        self.is_ready: Callable[[], object] = bool
        self.until = 0.0
        self._chosen = threading.Lock()
        self._chosen.acquire()
        self._function = target

    def run(self) -> None:
        world = self.worker.world
        try:
            self._be_chosen()
            self._function()
        except KilledError:
            pass
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test shall show it
            world.errors.append(error)
        self.worker.actors.remove(self)
        world.is_back.release()

    def wait(self, until: float = 0.0, is_ready: Callable[[], object] = bool) -> None:
        if not self.worker.is_killed:
            self.until, self.is_ready = until, is_ready
            self.worker.world.is_back.release()
        self._be_chosen()

    def run_on(self) -> None:
        """Let the thread run until it waits again; called by the main thread."""
        self._chosen.release()
        assert self.worker.world.is_back.acquire(timeout=60)

    def _be_chosen(self) -> None:
        if not self.worker.is_killed:
            self._chosen.acquire()
        if self.worker.is_killed:
            raise KilledError


def current() -> Actor:
    return cast(Actor, threading.current_thread())


def now() -> float:
    return cast(float, clock.now)


def sleep(secs: float) -> None:
    current().wait(now() + secs)


class SimpleQueue:
    """In place of that of the module `queue`."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)

    def get(self, timeout: float | None = None) -> Any:
        current().wait(math.inf if timeout is None else now() + timeout, lambda: self._items)
        if not self._items:
            raise queue.Empty
        return self._items.popleft()


class Loop:
    """The event loop of a worker: functions that are called one at a time."""

    def __init__(self, dice: random.Random) -> None:
        self.calls: deque[Callable[[], object]] = deque()  # of other threads
        self.events: list[Callable[[], object]] = []  # of the world outside, in any order
        self._dice = dice
        self._timers: list[tuple[float, int, SimpleNamespace]] = []
        self._number = 0

    def call_later(self, secs: float, function: Callable[..., object], *args: Any) -> Any:
        self._number += 1
        timer = SimpleNamespace(call=functools.partial(function, *args))
        timer.cancel = lambda: setattr(timer, "call", bool)
        heapq.heappush(self._timers, (now() + secs, self._number, timer))
        return timer

    def pause(self) -> Deferred[None]:
        """Return what a coroutine awaits so that the schedule decides when it continues."""
        paused: Deferred[None] = Deferred()

        def go_on() -> None:
            if not paused.called:
                paused.callback(None)

        self.events.append(go_on)
        return paused

    def run_once(self) -> None:
        until = self._timers[0][0] if self._timers else math.inf
        current().wait(until, lambda: self.calls or self.events)
        kinds = ["calls"] * bool(self.calls) + ["events"] * min(len(self.events), 2)
        if self._timers and self._timers[0][0] <= now():
            kinds += ["timers"] * 2
        kind = self._dice.choice(kinds)
        if kind == "timers":
            heapq.heappop(self._timers)[2].call()
        elif kind == "calls":
            self.calls.popleft()()
        else:
            self.events.pop(self._dice.randrange(len(self.events)))()


def replaced() -> list[tuple[object, str, object]]:
    """Return what is replaced by simulated threads, timers and clocks: owner, name, value."""
    time = SimpleNamespace(monotonic=now, sleep=sleep, time=lambda: EPOCH + now())
    with_time = (in_flight, in_thread, collected, redis_store, backend_module, server_module)
    with_timers = (in_thread, engine_module, scrapy_asyncio)

    def call_later(secs: float, function: Callable[..., object], *args: Any) -> Any:
        return current().worker.loop.call_later(secs, function, *args)

    return [
        *((module, "time", time) for module in with_time),
        *((module, "call_later", call_later) for module in with_timers),
        (engine_module, "monotonic", now),
        (scrapy_defer, "is_asyncio_available", lambda: False),
        (in_thread, "threading", SimpleNamespace(Thread=Actor)),
        (in_thread, "SimpleQueue", SimpleQueue),
        (in_thread, "_clock", now),
        (in_thread, "loop_caller", lambda: current().worker.loop.calls.append),
    ]

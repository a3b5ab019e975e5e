"""The requests that a crawl has taken from its scheduler and is not done with.

The output of a request's callback or errback has been consumed, and its items have passed the
pipelines: then it has ended. Or a downloader middleware has put another request in its place (a
retry, a redirect), and that one is scheduled. It is done when all that it led to is stored, too.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from scrapy import Request
from scrapy.utils.reactor import CallLaterOnce
from twisted.python.failure import Failure

from scrapy_bloom.crawl.engine import listen


@dataclass(eq=False)
class _Flight:
    """A request until it is done.

    Attributes:
        request: kept, so that its id() stays its own.
        done: called when it is done.
        downloaded: called when its download has ended, or was not begun.
        waits_for: how many requests in memory have to be done before.
        held_up: the requests that wait for this one, which is in memory.
    """

    request: Request
    done: Callable[[], None]
    downloaded: Callable[[], object] = lambda: None
    waits_for: int = 0
    has_ended: bool = False
    held_up: list["_Flight"] = field(default_factory=list)


class InFlight:
    """Watches requests until they are done, and calls a function of each then.

    Raises a SettingError if this version of Scrapy works in another way.
    """

    def __init__(self, engine: Any) -> None:
        # By id(): two requests in flight may be equal.
        self._flights: dict[int, _Flight] = {}
        self._in_memory: dict[int, _Flight] = {}
        self._not_fetched: set[int] = set()
        self._replaced: list[Request] = []
        listen(
            engine,
            "CrashSafeScheduler does not work",
            "use Scrapy's own scheduler",
            scraping=self._scraping,
            fetching=self._fetching,
        )

    def keep_in_memory(self, request: Request, done: Callable[[], None]) -> None:
        """Note that a request cannot be stored: the request that led to it is not done before.

        Scrapy does not tell which one that is, so this holds for all that are in flight now.
        """
        held_up = list(self._flights.values())
        for each in held_up:
            each.waits_for += 1
        self._in_memory[id(request)] = _Flight(request, done, held_up=held_up)

    def add(
        self,
        request: Request,
        done: Callable[[], None] = lambda: None,
        downloaded: Callable[[], object] = lambda: None,
    ) -> None:
        """Note that a request was taken; for one from memory, `done` is known."""
        self.end_replaced()  # it may be one that was replaced by itself
        flight = self._in_memory.pop(id(request), None) or _Flight(request, done, downloaded)
        self._flights[id(request)] = flight
        self._not_fetched.add(id(request))

    def _scraping(self, request: Request, result: Any) -> Callable[[Any], None]:
        if isinstance(result, Failure) and isinstance(result.value, asyncio.CancelledError):
            # The event loop is ended, and with it what is being downloaded: nothing has failed.
            self.leave(request)
        return lambda _: self.end(request)

    def _fetching(self, request: Request) -> Callable[[Any], None]:
        # A callback may fetch its own request once more: that is not this one's end.
        is_first = id(request) in self._not_fetched
        self._not_fetched.discard(id(request))
        return lambda result: self._fetched(request, result) if is_first else None

    def _fetched(self, request: Request, result: Any) -> None:
        if (flight := self._flights.get(id(request))) is not None:
            _end_download(flight)
        if isinstance(result, Request):
            # Not yet: the engine schedules the other one right after this.
            self._replaced.append(request)
            CallLaterOnce(self.end_replaced).schedule()

    def leave(self, request: Request) -> None:
        """Note that a request is never done: not all that it leads to is stored."""
        if (flight := self._flights.pop(id(request), None)) is not None:
            _end_download(flight)

    def __len__(self) -> int:
        return len(self._flights)

    def end_replaced(self) -> None:
        """End the requests that were replaced: the others are scheduled by now."""
        while self._replaced:
            self.end(self._replaced.pop())

    def end(self, request: Request) -> None:
        """Note that a request has ended: it is done once it waits for no other."""
        self._not_fetched.discard(id(request))
        if (flight := self._flights.pop(id(request), None)) is None:
            return
        _end_download(flight)
        flight.has_ended = True
        ended = [flight]
        while ended:
            flight = ended.pop()
            if flight.waits_for:
                continue
            flight.done()
            for each in flight.held_up:
                each.waits_for -= 1
                if each.has_ended:
                    ended.append(each)


def _end_download(flight: _Flight) -> None:
    downloaded, flight.downloaded = flight.downloaded, lambda: None
    downloaded()

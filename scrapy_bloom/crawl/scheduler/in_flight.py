"""Track the requests in flight: taken from the scheduler, and not done yet.

A request has ended when Scrapy has consumed the output of its callback or errback, and its items
have passed the pipelines. It has also ended when a downloader middleware has replaced it by another
request (a retry, a redirect), and that request is scheduled. An ended request is done when
everything that it led to is stored.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from scrapy import Request
from scrapy.utils.reactor import CallLaterOnce
from twisted.python.failure import Failure

from scrapy_bloom.crawl.engine import listen


@dataclass(eq=False)
class _Flight:
    """A request until it is done.

    Attributes:
        request: the request, kept so that no other object gets its id().
        done: called when the request is done.
        downloaded: called when its download has ended, or was skipped.
        is_fetched: whether its download has begun.
        waits_for: number of requests in memory that must be done first.
        has_ended: whether the request has ended.
        dependents: the requests that wait for this one, if it is in memory.
    """

    request: Request
    done: Callable[[], None]
    downloaded: Callable[[], object] = lambda: None
    is_fetched: bool = False
    waits_for: int = 0
    has_ended: bool = False
    dependents: list["_Flight"] = field(default_factory=list)


class InFlight:
    """The requests in flight; a function that belongs to a request is called when it is done.

    Raises a SettingError if this version of Scrapy lacks a method.
    """

    def __init__(self, engine: Any) -> None:
        # By id(), because two requests in flight may be equal.
        self._flights: dict[int, _Flight] = {}
        self._in_memory: dict[int, _Flight] = {}
        self._replaced: list[Request] = []
        listen(engine, scraping=self._scraping, fetching=self._fetching)

    def keep_in_memory(self, request: Request, done: Callable[[], None]) -> None:
        """Add a pending request that cannot be stored; the request that led to it waits for it.

        Scrapy does not tell which request that is, so all requests in flight wait.
        """
        dependents = list(self._flights.values())
        for each in dependents:
            each.waits_for += 1
        self._in_memory[id(request)] = _Flight(request, done, dependents=dependents)

    def add(
        self,
        request: Request,
        done: Callable[[], None] = lambda: None,
        downloaded: Callable[[], object] = lambda: None,
    ) -> None:
        """Add a request that was taken; a request from memory keeps its own `done`."""
        self.end_replaced()  # a middleware may have replaced a request by itself
        flight = self._in_memory.pop(id(request), None) or _Flight(request, done, downloaded)
        self._flights[id(request)] = flight

    def _scraping(self, request: Request, result: Any) -> Callable[[Any], None]:
        if isinstance(result, Failure) and isinstance(result.value, asyncio.CancelledError):
            # The event loop ends and cancels the downloads, so the request has not failed.
            self.leave(request)
        return lambda _: self.end(request)

    def _fetching(self, request: Request) -> Callable[[Any], None]:
        flight = self._flights.get(id(request))
        # A callback may fetch its own request again, which does not end the request.
        if flight is None or flight.is_fetched:
            return lambda _: None
        flight.is_fetched = True
        return partial(self._fetched, flight)

    def _fetched(self, flight: _Flight, result: Any) -> None:
        _end_download(flight)
        if isinstance(result, Request):
            # Not at once, because the engine schedules the other request right after this call.
            self._replaced.append(flight.request)
            CallLaterOnce(self.end_replaced).schedule()

    def leave(self, request: Request) -> None:
        """Remove a request that is never done, so that it stays in the queue for the next run."""
        if (flight := self._flights.pop(id(request), None)) is not None:
            _end_download(flight)

    def __len__(self) -> int:
        return len(self._flights)

    def end_replaced(self) -> None:
        """End the requests that were replaced, now that the other requests are scheduled."""
        while self._replaced:
            self.end(self._replaced.pop())

    def end(self, request: Request) -> None:
        """Mark a request as ended; it is done once it waits for no other request."""
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
            for each in flight.dependents:
                each.waits_for -= 1
                if each.has_ended:
                    ended.append(each)


def _end_download(flight: _Flight) -> None:
    downloaded, flight.downloaded = flight.downloaded, lambda: None
    downloaded()

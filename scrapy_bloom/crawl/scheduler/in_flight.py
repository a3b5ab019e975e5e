"""Track the requests in flight: taken from the scheduler, and not done yet.

A request has ended when Scrapy has consumed the output of its callback or errback, and its items
have passed the pipelines. It has also ended when a downloader middleware has replaced it by another
request (a retry, a redirect), and that request is scheduled. A request leads to the requests that
its callback or errback yields, and to the request that replaces it. An ended request is done when
everything that it led to is stored, or done itself if it can only be kept in memory.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from scrapy import Request
from scrapy.utils.reactor import CallLaterOnce
from twisted.python.failure import Failure

from scrapy_bloom.crawl.engine import listen


@dataclass(eq=False)
class Flight:
    """A request from when it is taken, or kept in memory, until it is done.

    Attributes:
        request: the request; None once it has ended, so that waiting takes little memory.
        done: called when the request is done.
        downloaded: called when its download has ended, or was skipped.
        parents: the requests that led to this one and are not done before it, if it is in memory.
        is_taken: whether it was taken; otherwise it is pending in memory.
        is_fetched: whether its download has begun.
        result: its response or failure, which Scrapy handles; None before.
        is_handled: whether Scrapy has begun to handle its response or failure.
        waits_for: number of requests in memory that must be done first.
        has_ended: whether the request has ended.
    """

    request: Request | None
    done: Callable[[], None]
    downloaded: Callable[[], object] = lambda: None
    parents: list["Flight"] = field(default_factory=list)
    is_taken: bool = False
    is_fetched: bool = False
    result: Any = None
    is_handled: bool = False
    waits_for: int = 0
    has_ended: bool = False

    @property
    def is_done(self) -> bool:
        """Return whether the request is done."""
        return self.has_ended and not self.waits_for


class InFlight:
    """The requests in flight; a function that belongs to a request is called when it is done.

    A spider may schedule a Request object while the same object is in flight, so an object may have
    several flights. Raises a SettingError if this version of Scrapy lacks a method.
    """

    def __init__(self, engine: Any) -> None:
        self._flights: dict[Request, list[Flight]] = {}  # also those pending in memory
        self._num_taken = 0
        # The requests that led to a request. The values do not keep the key alive: a flight drops
        # its request when it ends.
        self._parents: WeakKeyDictionary[Request, list[Flight]] = WeakKeyDictionary()
        self._replaced: list[Flight] = []
        listen(engine, scraping=self._scraping, fetching=self._fetching)

    def led_to(self, parent: Flight, request: Request) -> None:
        """Note that a request in flight has led to another one, which is about to be scheduled."""
        # Often all but one of the parents are done: an object that every callback yields.
        parents = [each for each in self._parents.get(request, ()) if not each.is_done]
        self._parents[request] = [*parents, parent]

    def keep_in_memory(self, request: Request, done: Callable[[], None]) -> None:
        """Add a pending request that cannot be stored; the requests that led to it wait for it.

        No request waits if it came from elsewhere: from start(), or from an extension.
        """
        parents = [each for each in self._parents.get(request, ()) if not each.is_done]
        for each in parents:
            each.waits_for += 1
        self._flights.setdefault(request, []).append(Flight(request, done, parents=parents))

    def add(
        self,
        request: Request,
        done: Callable[[], None] = lambda: None,
        downloaded: Callable[[], object] = lambda: None,
    ) -> Flight:
        """Add a request that was taken; a request from memory keeps its own `done`."""
        self.end_replaced()  # a middleware may have replaced a request by itself
        flight = self._first(request, lambda each: not each.is_taken)
        if flight is None:
            flight = Flight(request, done, downloaded)
            self._flights.setdefault(request, []).append(flight)
        flight.is_taken = True
        self._num_taken += 1
        return flight

    def _first(self, request: Request, condition: Callable[[Flight], bool]) -> Flight | None:
        """Return the first flight of a request object that meets a condition."""
        for each in self._flights.get(request, ()):
            # A project's class of requests may define that different objects are equal.
            if each.request is request and condition(each):
                return each
        return None

    def handled(self, request: Request, result: Any) -> Flight | None:
        """Return the flight of a request whose response or failure Scrapy is handling."""
        return self._first(request, lambda each: each.result is result)

    def _scraping(self, request: Request, result: Any) -> Callable[[Any], None]:
        # The engine passes on a response as it is, and a copy of a failure.
        flight = self.handled(request, result) or self._first(
            request, lambda each: each.is_taken and not each.is_handled
        )
        if flight is None:
            return lambda _: None
        flight.result, flight.is_handled = result, True
        if isinstance(result, Failure) and isinstance(result.value, asyncio.CancelledError):
            # The event loop ends and cancels the downloads, so the request has not failed.
            self.leave(flight)
        return lambda _: self.end(flight)

    def _fetching(self, request: Request) -> Callable[[Any], None]:
        # A callback may fetch its own request again, which does not end the request.
        flight = self._first(request, lambda each: each.is_taken and not each.is_fetched)
        if flight is None:
            return lambda _: None
        flight.is_fetched = True
        return partial(self._fetched, flight)

    def _fetched(self, flight: Flight, result: Any) -> None:
        _end_download(flight)
        if isinstance(result, Request):
            # Not at once, because the engine schedules the other request right after this call.
            self.led_to(flight, result)
            self._replaced.append(flight)
            CallLaterOnce(self.end_replaced).schedule()
        else:
            flight.result = result

    def leave(self, flight: Flight) -> None:
        """Remove a request that is never done, so that it stays in the queue for the next run."""
        if (request := flight.request) is None:
            return
        flight.request = flight.result = None
        flights = self._flights[request]
        flights.remove(flight)
        if not flights:
            del self._flights[request]
        self._num_taken -= 1
        _end_download(flight)

    def __len__(self) -> int:
        return self._num_taken

    def end_replaced(self) -> None:
        """End the requests that were replaced, now that the other requests are scheduled."""
        while self._replaced:
            self.end(self._replaced.pop())

    def end(self, flight: Flight) -> None:
        """Mark a request as ended; it is done once it waits for no other request."""
        if flight.request is None:  # it has ended, or left
            return
        self.leave(flight)
        flight.has_ended = True
        ended = [flight]
        while ended:
            flight = ended.pop()
            if not flight.is_done:
                continue
            flight.done()
            for each in flight.parents:
                each.waits_for -= 1
                if each.is_done:
                    ended.append(each)


def _end_download(flight: Flight) -> None:
    downloaded, flight.downloaded = flight.downloaded, lambda: None
    downloaded()

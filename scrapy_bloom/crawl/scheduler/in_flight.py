"""Track the requests in flight: taken from the scheduler, and not done yet.

A request has ended when Scrapy has consumed the output of its callback or errback, and its items
have passed the pipelines. It has also ended when a downloader middleware has replaced it by another
request (a retry, a redirect), which takes its row in the store. A request leads to the requests
that its callback or errback yields, and to the request that replaces it. An ended request is done
when everything that it led to is stored, or done itself if it can only be kept in memory.

A request has failed if its download failed for good, if its response was refused, if a callback, an
errback or an item pipeline raised an exception, or if a request in memory that it led to has
failed. It has not failed if its errback has yielded a request that the queue accepts, because the
spider has taken over then, or if the project has dropped it on purpose.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from traceback import walk_tb
from typing import Any
from weakref import WeakKeyDictionary

from scrapy import Request, signals
from scrapy.crawler import Crawler
from scrapy.exceptions import CloseSpider, IgnoreRequest, StopDownload
from scrapy.spidermiddlewares.httperror import HttpError
from scrapy.utils.reactor import CallLaterOnce
from twisted.python.failure import Failure

from scrapy_bloom.crawl.engine import listen
from scrapy_bloom.crawl.scheduler.reachability import Reachability
from scrapy_bloom.crawl.start_requests import unmark
from scrapy_bloom.queues.store import Taken

_LONGEST_REASON = 200  # characters
_FORBIDDEN = 403  # the usual status for crawlers that are blocked for a while
# Modules whose IgnoreRequest means that a page could not be had: too many redirects, or too large
# when decompressed. The others drop a request on purpose.
_GIVING_UP = [[f"scrapy.downloadermiddlewares.{name}"] for name in ("redirect", "httpcompression")]


@dataclass(eq=False)
class Flight:
    """A request from when it is taken, or kept in memory, until it is done."""

    request: Request | None  # None once it has ended, so that waiting takes little memory
    done: Callable[["Flight"], None]  # called with the flight when the request is done
    taken: Taken | None = None  # how the store has handed it out; None if it is only in memory
    url: str = ""
    # Of a request in memory: the requests that led to it and are not done before it, its
    # fingerprint, and those of the requests that it has replaced.
    parents: list["Flight"] = field(default_factory=list)
    pages: Sequence[bytes] = ()
    is_taken: bool = False  # otherwise it is pending in memory
    is_fetched: bool = False  # whether its download has begun
    result: Any = None  # its response or failure, which Scrapy handles
    is_handled: bool = False  # whether Scrapy has begun to handle its response or failure
    has_no_response: bool = False  # its download failed
    # Why it has failed. `refusal`, unless its errback takes over: its download failed, or the
    # status of its response is not allowed. `error`: a callback, an errback or a pipeline raised an
    # exception, or a request in memory that it led to has failed.
    refusal: str = ""
    error: str = ""
    is_taken_over: bool = False  # whether the queue has accepted a request of its errback
    # Fingerprints of pages on whose ends it depends: it, or a request in memory that it led to, was
    # redirected to them, and dropped as a duplicate.
    awaits: list[bytes] = field(default_factory=list)
    is_replaced: bool = False  # whether another request has taken its row
    waits_for: int = 0  # number of requests and answers that it waits for
    has_ended: bool = False

    @property
    def is_done(self) -> bool:
        """Return whether the request is done."""
        return self.has_ended and not self.waits_for

    @property
    def reason(self) -> str:
        """Return why the request has failed; empty if it has not."""
        return self.error or ("" if self.is_taken_over else self.refusal)


class InFlight:
    """The requests in flight; a function that belongs to a request is called when it is done.

    A spider may schedule a Request object while the same object is in flight, so an object may have
    several flights. Raises a SettingError if this version of Scrapy lacks a method.
    """

    def __init__(self, crawler: Crawler) -> None:
        self._flights: dict[Request, list[Flight]] = {}  # also those pending in memory
        self.reachability = Reachability()
        self._num_taken = 0
        self._num_waiting = 0  # that have ended and are not done
        # The requests that led to a request. The values do not keep the key alive: a flight drops
        # its request when it ends.
        self._parents: WeakKeyDictionary[Request, list[Flight]] = WeakKeyDictionary()
        # Retries and redirects that are about to be scheduled, and what they replace.
        self._replaced: list[tuple[Request, Flight]] = []
        retried = map(int, crawler.settings.getlist("RETRY_HTTP_CODES"))
        self._failing_statuses = {_FORBIDDEN, *retried}
        listen(
            crawler.engine, scraping=self._scraping, fetching=self._fetching, error=self._has_error
        )
        crawler.signals.connect(self._item_error, signals.item_error)

    def led_to(self, parent: Flight, request: Request) -> None:
        """Note that a request in flight has led to another one, which is about to be scheduled."""
        # Often all but one of the parents are done: an object that every callback yields.
        self._parents[request] = [*self._open_parents(request), parent]

    def _open_parents(self, request: Request) -> list[Flight]:
        return [parent for parent in self._parents.get(request, ()) if not parent.is_done]

    def replaced_by(self, request: Request) -> Flight | None:
        """Return the flight that a request replaces, which is about to be scheduled."""
        return next((flight for new, flight in self._replaced if new is request), None)

    def refused_parents(self, request: Request) -> list[Flight]:
        """Return the flights whose errbacks have yielded a request, so that it may take over."""
        return [parent for parent in self._parents.get(request, ()) if parent.refusal]

    def keep_in_memory(
        self, request: Request, done: Callable[[Flight], None], pages: Sequence[bytes] = ()
    ) -> None:
        """Add a pending request that cannot be stored; the requests that led to it wait for it.

        No request waits if it came from elsewhere: from start(), or from an extension.
        """
        parents = self._open_parents(request)
        for parent in parents:
            parent.waits_for += 1
        flight = Flight(request, done, url=request.url, parents=parents, pages=pages)
        self._flights.setdefault(request, []).append(flight)

    def add(
        self,
        request: Request,
        done: Callable[[Flight], None] = lambda _: None,
        taken: Taken | None = None,
    ) -> Flight:
        """Add a request that was taken; a request from memory keeps its own `done`."""
        self.end_replaced()  # a middleware may have replaced a request by itself
        flight = self._first(request, lambda flight: not flight.is_taken)
        if flight is None:
            flight = Flight(request, done, taken, request.url)
            self._flights.setdefault(request, []).append(flight)
        flight.is_taken = True
        self._num_taken += 1
        return flight

    def _first(self, request: Request, condition: Callable[[Flight], bool]) -> Flight | None:
        """Return the first flight of a request object that meets a condition."""
        for flight in self._flights.get(request, ()):
            # A project's class of requests may define that different objects are equal.
            if flight.request is request and condition(flight):
                return flight
        return None

    def handled(self, request: Request, result: Any) -> Flight | None:
        """Return the flight of a request whose response or failure Scrapy is handling."""
        return self._first(request, lambda flight: flight.result is result)

    def _scraping(self, request: Request, result: Any) -> Callable[[Any], None]:
        unmark(request, result)
        # The engine passes on a response as it is, and a copy of a failure.
        flight = self.handled(request, result) or self._first(
            request, lambda flight: flight.is_taken and not flight.is_handled
        )
        if flight is None:
            return lambda _: None
        flight.result, flight.is_handled = result, True
        flight.has_no_response = isinstance(result, Failure)
        if not flight.has_no_response and flight.taken is not None:
            # Not when it is done: its callback may take long, and other downloads fail meanwhile.
            self.reachability.add_response(flight.taken.slot)
        if isinstance(result, Failure) and isinstance(result.value, asyncio.CancelledError):
            # The event loop ends and cancels the downloads, so the request has not failed.
            self.leave(flight)
        return partial(self._scraped, flight)

    def _scraped(self, flight: Flight, result: Any) -> None:
        if isinstance(result, Failure):  # a bug, which Scrapy logs
            flight.error = _reason(result.value)
        self.end(flight)

    def _has_error(self, request: Request, error: BaseException) -> None:
        """Note an error that was passed to an errback, or that a callback or errback raised.

        One error may be reported several times.
        """
        flight = self._first(request, lambda flight: flight.is_handled)
        if flight is None or not self._is_failure(error):
            return
        is_of_download = isinstance(flight.result, Failure) and flight.result.value is error
        if is_of_download or isinstance(error, HttpError):
            flight.refusal = _reason(error)
        else:
            flight.error = _reason(error)

    def _is_failure(self, error: BaseException) -> bool:
        if isinstance(error, HttpError):
            return error.response.status in self._failing_statuses
        if isinstance(error, IgnoreRequest):
            modules = [frame.f_globals.get("__name__") for frame, _ in walk_tb(error.__traceback__)]
            return modules[-1:] in _GIVING_UP
        return not isinstance(error, (StopDownload, CloseSpider))

    def _item_error(self, response: Any, failure: Failure) -> None:
        if response is None:  # an item of start(), or of an extension
            return
        for flights in self._flights.values():
            for flight in flights:
                if flight.result is response:
                    flight.error = _reason(failure.value)

    def _fetching(self, request: Request) -> Callable[[Any], None]:
        # A callback may fetch its own request again, which does not end the request.
        flight = self._first(request, lambda flight: flight.is_taken and not flight.is_fetched)
        if flight is None:
            return lambda _: None
        flight.is_fetched = True
        return partial(self._fetched, flight)

    def slot_of(self, request: Request) -> str | None:
        """Return the slot under which the store has a request that is being downloaded."""
        flight = self._first(request, lambda flight: flight.is_fetched and not flight.result)
        return flight.taken.slot if flight is not None and flight.taken is not None else None

    def _fetched(self, flight: Flight, result: Any) -> None:
        if isinstance(result, Request):
            # Not at once, because the engine schedules the other request right after this call.
            self.led_to(flight, result)
            self._replaced.append((result, flight))
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

    def __len__(self) -> int:
        return self._num_taken

    @property
    def is_idle(self) -> bool:
        """Whether all requests are done, also those in memory and those that wait for them."""
        return not (self._flights or self._num_waiting)

    def end_replaced(self) -> None:
        """End the requests that were replaced, now that the other requests are scheduled."""
        while self._replaced:
            self.end(self._replaced.pop()[1])

    def end(self, flight: Flight) -> None:
        """Mark a request as ended; it is done once it waits for nothing."""
        if flight.request is None:  # it has ended, or left
            return
        self.leave(flight)
        flight.has_ended = True
        self._num_waiting += 1
        self._settle(flight)

    def release(self, flight: Flight) -> None:
        """Have a request wait for one thing less."""
        flight.waits_for -= 1
        self._settle(flight)

    def _settle(self, flight: Flight) -> None:
        """Report a request that waits for nothing as done, and then those that led to it."""
        ended = [flight]
        while ended:
            flight = ended.pop()
            if not flight.is_done:
                continue
            self._num_waiting -= 1
            flight.done(flight)
            for parent in flight.parents:
                parent.error = parent.error or flight.reason
                parent.awaits += flight.awaits
                parent.waits_for -= 1
                if parent.is_done:
                    ended.append(parent)


def _reason(error: BaseException | None) -> str:
    """Return an error as one short line."""
    if isinstance(error, HttpError):
        return f"HTTP status {error.response.status}"
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 - of a project's class
        text = ""
    name = type(error).__name__
    return (f"{name}: {text}" if text else name)[:_LONGEST_REASON]

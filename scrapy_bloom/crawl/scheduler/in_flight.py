"""Track the requests in flight: taken from the scheduler, and not done yet.

A request has ended when its output is consumed, or when another request has replaced it (a retry, a
redirect). It is done when everything that it led to is stored, or done itself if it is in memory.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
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

from scrapy_bloom.crawl.engine import (
    listen_to_errors,
    listen_to_fetches,
    listen_to_scrapes,
    unmark,
)
from scrapy_bloom.queues.store import Taken

MOST_UNREACHABLE = 200  # downloads in a row that fail without a response
LEAST_SECS = 60.0  # without any response, before the network counts as lost
_MOST_SLOTS = 1000  # that have answered, of which the last ones are known
_STANDSTILL_SECS = 5.0  # without progress, after which callbacks may be waiting for a suspect
_LONGEST_REASON = 200  # characters
_FORBIDDEN = 403  # the usual status for crawlers that are blocked for a while
# Modules whose IgnoreRequest means that a page could not be had: too many redirects, or too large
# when decompressed. The others drop a request on purpose.
_GIVING_UP = [[f"scrapy.downloadermiddlewares.{name}"] for name in ("redirect", "httpcompression")]


class Stage(Enum):
    """How far a request has come."""

    PENDING = "pending"  # in memory, because it cannot be stored
    TAKEN = "taken"
    FETCHED = "fetched"  # its download has begun
    HANDLED = "handled"  # Scrapy has begun to handle its response or failure
    ENDED = "ended"


@dataclass(eq=False)
class Flight:
    """A request from when it is taken, or kept in memory, until it is done."""

    request: Request | None  # None once it has ended, so that waiting takes little memory
    on_done: Callable[["Flight"], None]  # called with the flight when the request is done
    # How the store has handed it out; None if it is only in memory, or another request has its row.
    taken: Taken | None = None
    url: str = ""
    stage: Stage = Stage.TAKEN
    # Of a request in memory: the requests that led to it and are not done before it, and the
    # fingerprints that are recorded when it is done: its own, and those of what it has replaced.
    parents: list["Flight"] = field(default_factory=list)
    pages: Sequence[bytes] = ()
    result: Any = None  # its response or failure, which Scrapy handles
    # Why it has failed. `refusal`, unless its errback takes over: its download failed, or the
    # status of its response is not allowed. `error`: a callback, an errback or a pipeline raised an
    # exception, or a request in memory that it led to has failed.
    refusal: str = ""
    error: str = ""
    is_taken_over: bool = False  # whether the queue has accepted a request of its errback
    # Fingerprints of pages on whose ends it depends: it, or a request in memory that it led to, was
    # redirected to them, and dropped as a duplicate.
    awaits: list[bytes] = field(default_factory=list)
    waits_for: int = 0  # number of requests and answers that it waits for

    @property
    def is_done(self) -> bool:
        """Return whether the request is done."""
        return self.stage is Stage.ENDED and not self.waits_for

    @property
    def reason(self) -> str:
        """Return why the request has failed; empty if it has not."""
        return self.error or ("" if self.is_taken_over else self.refusal)


class InFlight:
    """The requests in flight.

    A spider may schedule a Request object while the same object is in flight, so an object may have
    several flights. Raises a SettingError if this version of Scrapy lacks a method.
    """

    def __init__(self, crawler: Crawler) -> None:
        self.reachability = Reachability(time.monotonic)
        self._engine: Any = crawler.engine
        self._flights: dict[Request, list[Flight]] = {}  # also those pending in memory
        self._progress_at = time.monotonic()  # when a request was taken or done
        # The requests that led to a request. The values do not keep the key alive: a flight drops
        # its request when it ends.
        self._parents: WeakKeyDictionary[Request, list[Flight]] = WeakKeyDictionary()
        # Retries and redirects that are about to be scheduled, and what they replace.
        self._replaced: list[tuple[Request, Flight]] = []
        retried = map(int, crawler.settings.getlist("RETRY_HTTP_CODES"))
        self._failing_statuses = {_FORBIDDEN, *retried}
        listen_to_scrapes(crawler.engine, self._on_scrape)
        listen_to_errors(crawler.engine, self._on_error)
        listen_to_fetches(crawler.engine, self._on_fetch)
        crawler.signals.connect(self._on_item_error, signals.item_error)

    def led_to(self, parent: Flight | None, element: object) -> None:
        """Note what a request in flight has led to: perhaps a request, about to be scheduled."""
        if parent is not None and isinstance(element, Request):
            # Often all but one of the parents are done: an object that every callback yields.
            self._parents[element] = [*self._open_parents(element), parent]

    def _open_parents(self, request: Request) -> list[Flight]:
        return [parent for parent in self._parents.get(request, ()) if not parent.is_done]

    def replaced_by(self, request: Request) -> Flight | None:
        """Return the flight that a request replaces, which is about to be scheduled."""
        return next((flight for new, flight in self._replaced if new is request), None)

    def waiting_for(self, request: Request, replaced: Flight | None) -> list[Flight]:
        """Return whose errbacks have yielded a request, and what it replaces that has no row."""
        refused = [parent for parent in self._parents.get(request, ()) if parent.refusal]
        return refused if replaced is None or replaced.taken else [*refused, replaced]

    def keep_in_memory(
        self, request: Request, on_done: Callable[[Flight], None], pages: Sequence[bytes]
    ) -> Flight:
        """Add a pending request that cannot be stored; the requests that led to it wait for it."""
        parents = self._open_parents(request)
        for parent in parents:
            parent.waits_for += 1
        flight = Flight(request, on_done, None, request.url, Stage.PENDING, parents, pages)
        self._flights.setdefault(request, []).append(flight)
        return flight

    def add(
        self,
        request: Request,
        on_done: Callable[[Flight], None] = lambda _: None,
        taken: Taken | None = None,
    ) -> Flight:
        """Add a request that was taken; a request from memory keeps its own `on_done`."""
        self.end_replaced()  # a middleware may have replaced a request by itself
        flight = self._first(request, Stage.PENDING)
        if flight is None:
            flight = Flight(request, on_done, taken, request.url)
            self._flights.setdefault(request, []).append(flight)
        flight.stage = Stage.TAKEN
        self._progress_at = time.monotonic()
        return flight

    def _of(self, request: Request) -> Iterator[Flight]:
        """Return the flights of a request object."""
        for flight in self._flights.get(request, ()):
            # A project's class of requests may define that different objects are equal.
            if flight.request is request:
                yield flight

    def _first(self, request: Request, *stages: Stage) -> Flight | None:
        return next((flight for flight in self._of(request) if flight.stage in stages), None)

    def find(self, request: Request, result: Any) -> Flight | None:
        """Return the flight of a request whose response or failure Scrapy is handling."""
        return next((flight for flight in self._of(request) if flight.result is result), None)

    def _on_scrape(self, request: Request, result: Any) -> Callable[[Any], None]:
        unmark(request, result)
        # The engine passes on a response as it is, and a copy of a failure.
        flight = self.find(request, result) or self._first(request, Stage.TAKEN, Stage.FETCHED)
        if flight is None:
            return lambda _: None
        flight.result, flight.stage = result, Stage.HANDLED
        if not isinstance(result, Failure):
            if flight.taken is not None:
                self.reachability.add_response(flight.taken.slot)
        elif isinstance(result.value, asyncio.CancelledError):
            # The event loop ends and cancels the downloads, so the request has not failed.
            self.remove(flight)
        return partial(self._on_scraped, flight)

    def _on_scraped(self, flight: Flight, result: Any) -> None:
        if isinstance(result, Failure):  # a bug, which Scrapy logs
            flight.error = _reason(result.value)
        self.end(flight)

    def _on_error(self, request: Request, error: BaseException) -> None:
        """Note an error of a request, which may be reported several times."""
        flight = self._first(request, Stage.HANDLED)
        if flight is None or not self._is_failure(error):
            return
        is_of_download = isinstance(flight.result, Failure) and flight.result.value is error
        if is_of_download or isinstance(error, HttpError):
            taken = flight.taken
            if is_of_download and not flight.refusal and taken is not None and not taken.tries:
                self.reachability.add_failure(taken.slot)
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

    def _on_item_error(self, response: Any, failure: Failure) -> None:
        if response is None:  # an item of start(), or of an extension
            return
        for flights in self._flights.values():
            for flight in flights:
                if flight.result is response:
                    flight.error = _reason(failure.value)

    def _on_fetch(self, request: Request) -> Callable[[Any], None]:
        # A callback may fetch its own request again, which does not end the request.
        flight = self._first(request, Stage.TAKEN)
        if flight is None:
            return lambda _: None
        flight.stage = Stage.FETCHED
        return partial(self._on_fetched, flight)

    def slot_of(self, request: Request) -> str | None:
        """Return the slot under which the store has a request that is being downloaded."""
        flight = self._first(request, Stage.FETCHED)
        if flight is None or flight.taken is None or flight.result is not None:
            return None
        return flight.taken.slot

    def _on_fetched(self, flight: Flight, result: Any) -> None:
        if isinstance(result, Request):
            # Not at once, because the engine schedules the other request right after this call.
            self.led_to(flight, result)
            self._replaced.append((result, flight))
            CallLaterOnce(self.end_replaced).schedule()
        else:
            flight.result = result

    def remove(self, flight: Flight) -> None:
        """Remove a request that is never done, so that it stays in the queue for the next run."""
        if (request := flight.request) is None:
            return
        flight.request = flight.result = None
        flights = self._flights[request]
        flights.remove(flight)
        if not flights:
            del self._flights[request]

    def __len__(self) -> int:
        flights = (flight for same in self._flights.values() for flight in same)
        return sum(flight.stage is not Stage.PENDING for flight in flights)

    @property
    def is_slow(self) -> bool:
        """Whether no request was taken or done for some seconds."""
        return time.monotonic() >= self._progress_at + _STANDSTILL_SECS

    @property
    def stands_still(self) -> bool:
        """Whether the requests that are not done wait, perhaps for a suspect."""
        return self.is_slow and not self._engine.downloader.active

    def end_replaced(self) -> None:
        """End the requests that were replaced, now that the other requests are scheduled."""
        while self._replaced:
            self.end(self._replaced.pop()[1])

    def end(self, flight: Flight) -> None:
        """Mark a request as ended; it is done once it waits for nothing."""
        if flight.request is None:  # it has ended, or was removed
            return
        self.remove(flight)
        flight.stage = Stage.ENDED
        self._report_done(flight)

    def release(self, flight: Flight) -> None:
        """Note that one of the requests or answers for which a request waits has come."""
        flight.waits_for -= 1
        self._report_done(flight)

    def _report_done(self, flight: Flight) -> None:
        """Report a request that waits for nothing as done, and then those that led to it."""
        self._progress_at = time.monotonic()
        ended = [flight]
        while ended:
            flight = ended.pop()
            if not flight.is_done:
                continue
            flight.on_done(flight)
            for parent in flight.parents:
                parent.error = parent.error or flight.reason
                parent.awaits += flight.awaits
                parent.waits_for -= 1
                if parent.is_done:
                    ended.append(parent)


class Reachability:
    """Watches the ends of downloads, for whether the machine has lost its network.

    It has if the last 200 downloads had no response, none came for a minute, and nothing has
    answered in this process, or a slot is among them that had answered: not if many hosts are dead.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._responded_at = clock()
        self._answered: dict[str, None] = {}  # slots
        self._failures = 0  # in a row
        self._last_known = 0  # of these, the last one from a slot that had answered

    def add_response(self, slot: str) -> None:
        """Note a response, whatever its status, from a slot of the downloader."""
        self._responded_at = self._clock()
        self._failures = self._last_known = 0
        self._answered.pop(slot, None)
        self._answered[slot] = None  # as the last one
        if len(self._answered) > _MOST_SLOTS:
            del self._answered[next(iter(self._answered))]

    def add_failure(self, slot: str) -> None:
        """Note a download without a response, of a request that did not fail in an earlier run."""
        self._failures += 1
        if slot in self._answered:
            self._last_known = self._failures

    @property
    def is_lost(self) -> bool:
        """Return whether nothing can be reached any more."""
        before = self._failures - MOST_UNREACHABLE
        return (
            before >= 0
            and self._clock() >= self._responded_at + LEAST_SECS
            and (self._last_known > before or not self._answered)
        )


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

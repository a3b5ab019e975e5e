"""The requests that a crawl has taken from its scheduler and is not done with.

A request is done when the output of its callback or errback has been consumed and its items have
passed the pipelines. Or a downloader middleware has put another request in its place (a retry, a
redirect), and that one is scheduled.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from scrapy import Request
from scrapy.utils.reactor import CallLaterOnce
from twisted.python.failure import Failure

from scrapy_bloom.crawl.engine import listen


class InFlight:
    """Watches requests until they are done, and has `done` called with the row of each.

    Raises a SettingError if this version of Scrapy works in another way.
    """

    def __init__(self, engine: Any, done: Callable[[int], None]) -> None:
        self._done = done
        # Requests are told apart by what they are, not by what they say.
        self._rows: dict[int, tuple[Request, int]] = {}
        self._not_fetched: set[int] = set()
        self._replaced: list[Request] = []
        listen(
            engine,
            "CrashSafeScheduler does not work",
            "use Scrapy's own scheduler",
            scraping=self._scraping,
            fetching=self._fetching,
        )

    def add(self, request: Request, row: int) -> None:
        """Note that a request was taken."""
        self._rows[id(request)] = (request, row)
        self._not_fetched.add(id(request))

    def _scraping(self, request: Request, result: Any) -> Callable[[Any], None]:
        if isinstance(result, Failure) and isinstance(result.value, asyncio.CancelledError):
            # The event loop is ended, and with it what is being downloaded: nothing has failed.
            self._rows.pop(id(request), None)
        return lambda _: self._ended(request)

    def _fetching(self, request: Request) -> Callable[[Any], None]:
        # A callback may fetch its own request once more: that is not this one's end.
        is_first = id(request) in self._not_fetched
        self._not_fetched.discard(id(request))
        return lambda result: self._fetched(request, result) if is_first else None

    def _fetched(self, request: Request, result: Any) -> None:
        if isinstance(result, Request):
            # Not now: the engine schedules the other one right after this.
            self._replaced.append(request)
            CallLaterOnce(self.settle).schedule()

    def __len__(self) -> int:
        return len(self._rows)

    def settle(self) -> None:
        """End the requests that were replaced: the others are scheduled by now."""
        while self._replaced:
            self._ended(self._replaced.pop())

    def _ended(self, request: Request) -> None:
        self._not_fetched.discard(id(request))
        _, row = self._rows.pop(id(request), (None, None))
        if row is not None:
            self._done(row)

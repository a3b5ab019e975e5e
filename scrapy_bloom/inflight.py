"""The requests that a crawl has taken from its scheduler and is not done with.

A request is done when its callback's or errback's output has been consumed and its items have
passed the pipelines, or when a downloader middleware has put another one in its place (a retry, a
redirect) and that one is scheduled. No signal of Scrapy says so. But all that is not replaced goes
through the scraper's `enqueue_scrape`, whose Deferred fires at that very moment; and what replaces
a request comes out of the downloader's `fetch`, and is scheduled next. Both are public methods of
public attributes of the engine, in all versions from 2.13 on, and are wrapped in this crawl alone.
"""

from collections.abc import Callable
from typing import Any

import scrapy
from scrapy import Request

from scrapy_bloom.engine import call_soon
from scrapy_bloom.exceptions import SettingError


class InFlight:
    """Watches requests until they are done.

    Args:
        engine: the crawler's.
        done: called with the row of each request when it is done.

    Raises:
        SettingError: this version of Scrapy works in another way.
    """

    def __init__(self, engine: Any, done: Callable[[int], None]) -> None:
        self._done = done
        # Requests are told apart by what they are, not by what they say.
        self._rows: dict[int, tuple[Request, int]] = {}
        self._replaced: list[Request] = []
        scraper, downloader = engine.scraper, engine.downloader
        for each, name in ((scraper, "enqueue_scrape"), (downloader, "fetch")):
            if not hasattr(each, name):
                raise SettingError(
                    f"CrashSafeScheduler does not work with this version of Scrapy, "
                    f"{scrapy.__version__}, whose {type(each).__name__} has no {name}; upgrade "
                    "scrapy_bloom, or use Scrapy's own scheduler"
                )
        self._enqueue_scrape = scraper.enqueue_scrape
        self._fetch = downloader.fetch
        scraper.enqueue_scrape = self._scraped
        downloader.fetch = self._fetched

    def add(self, request: Request, row: int) -> None:
        """A request was taken."""
        self._rows[id(request)] = (request, row)

    def _scraped(self, result: Any, request: Request, *args: Any) -> Any:
        return self._enqueue_scrape(result, request, *args).addBoth(self._ended, request)

    def _fetched(self, request: Request, *args: Any) -> Any:
        return self._fetch(request, *args).addCallback(self._perhaps_replaced, request)

    def _perhaps_replaced(self, result: Any, request: Request) -> Any:
        if isinstance(result, Request):
            # Not now: the engine schedules the other one right after this.
            self._replaced.append(request)
            call_soon(self.settle)
        return result

    def settle(self) -> None:
        """Those that were replaced are done: the others are scheduled by now."""
        while self._replaced:
            self._ended(None, self._replaced.pop())

    def _ended(self, result: Any, request: Request) -> Any:
        _, row = self._rows.pop(id(request), (None, None))
        if row is not None:
            self._done(row)
        return result

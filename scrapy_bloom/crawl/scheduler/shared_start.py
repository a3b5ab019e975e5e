"""Run the spider's start() once per run, in one of the workers of a shared queue."""

from collections.abc import AsyncIterator
from typing import Any

from scrapy import Request
from scrapy.crawler import Crawler
from scrapy.utils.defer import deferred_from_coro

from scrapy_bloom.crawl.engine import (
    ask_scheduler,
    give_turn,
    read_start_again,
    reads_start,
    replace_start,
    start_again,
)
from scrapy_bloom.crawl.scheduler.in_flight import Flight
from scrapy_bloom.crawl.scheduler.in_thread import InThread
from scrapy_bloom.crawl.scheduler.queue import CrawlQueue
from scrapy_bloom.crawl.start_requests import mark

_POLL_SECS = 0.5


class SharedStart:
    """Runs start() when the queue says that this worker has to.

    Other workers run it if this one dies. It is over when it has ended and all requests that it
    yielded are stored.

    The engine must not have read start() yet. Raises a SettingError if this version of Scrapy lacks
    an attribute.
    """

    def __init__(self, crawler: Crawler, queue: CrawlQueue, driver: InThread) -> None:
        self._crawler = crawler
        self._engine: Any = crawler.engine
        self._queue = queue
        self._driver = driver
        self._flight: Flight | None = None  # while start() runs, and afterwards
        self._rejoined = 0  # `InThread.rejoined` when it began
        replace_start(self._engine, self._run)
        deferred_from_coro(self._run_again())

    @property
    def _begins(self) -> bool:
        """Return whether this worker has to run start(), and has not begun to do so."""
        queue, driver = self._queue, self._driver
        if self._flight is not None and self._rejoined != driver.rejoined:
            queue.in_flight.leave(self._flight)  # run again, by this worker or another
            self._flight = None
        return driver.runs_start and self._flight is None

    async def _run_again(self) -> None:
        """Have the engine read start() once more, if it has ended here and has to be run again."""
        queue, driver = self._queue, self._driver
        while queue.is_open:
            await driver.changed.wait(_POLL_SECS)
            if self._begins and queue.is_open and not reads_start(self._engine):
                # Otherwise, the loop that has read the former start() may read this one, too.
                await give_turn(self._engine)
                read_start_again(self._engine, self._run(None), mark, queue.may_go_on)

    async def _run(self, start: AsyncIterator[Any] | None) -> AsyncIterator[Any]:
        """Yield nothing until the crawl has ended, or this worker has to run start()."""
        queue, driver = self._queue, self._driver
        while queue.is_open and not driver.is_over:
            if not self._begins:
                await driver.changed.wait(_POLL_SECS)
                ask_scheduler(self._engine)
                continue
            self._rejoined = driver.rejoined
            self._flight = flight = queue.in_flight.add(
                Request("data:,start()"), lambda _: driver.end_start()
            )
            try:
                # After the server has lost the queue, start() is called again.
                items, start = start or await start_again(self._crawler), None
                async for element in items:
                    if flight is not self._flight or self._rejoined != driver.rejoined:
                        break
                    if isinstance(element, Request):
                        queue.in_flight.led_to(flight, element)
                    yield element
                    await driver.offer()
            except Exception:  # as under Scrapy's scheduler, start() ends with an error
                if self._engine.running:  # otherwise, Twisted's reactor has cancelled it
                    queue.in_flight.end(flight)
                raise
            # While the crawl is being closed, requests that start() yields may be dropped.
            if self._engine.running:
                queue.in_flight.end(flight)

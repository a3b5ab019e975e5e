"""The queue of a crawl in Redis, whose workers run the spider's start() once per run."""

from collections.abc import AsyncIterator
from functools import partial
from typing import Any, cast

from scrapy import Request
from scrapy.crawler import Crawler
from scrapy.utils.defer import deferred_from_coro

from scrapy_bloom.crawl.dupefilter import BloomDupeFilter
from scrapy_bloom.crawl.engine import (
    MayGoOn,
    ask_scheduler,
    give_turn,
    hold_back,
    mark,
    read_start_again,
    reads_start,
    replace_start,
    start_again,
)
from scrapy_bloom.crawl.scheduler.in_thread import InThread
from scrapy_bloom.crawl.scheduler.queue import CrawlQueue
from scrapy_bloom.queues.store import Joining
from scrapy_bloom.redis.backend import RedisBackend
from scrapy_bloom.settings import BloomSettings

_POLL_SECS = 0.5


def open_in_redis(
    crawler: Crawler, df: BloomDupeFilter, settings: BloomSettings, memory: Any
) -> CrawlQueue:
    """Open the queue in Redis that belongs to a filter; raises BloomError."""
    from scrapy_bloom.queues.redis_store import RedisStore  # noqa: PLC0415 - half a MB, which only crawls with Redis need

    assert crawler.spider is not None
    backend = cast(RedisBackend, df.backend)
    store = RedisStore(backend, lease_secs=settings.queue_lease_secs)
    joining = Joining(crawler.spider.name, settings.run, keeps_failed=settings.keep_failed)
    opened = store.open(joining)
    driver = InThread(crawler, store, opened, df.failures, server=backend.server, settings=settings)
    queue = CrawlQueue(crawler, df, driver, opened, settings=settings, memory=memory)
    replace_start(crawler.engine, partial(_run_start, crawler, driver))
    deferred_from_coro(_run_start_again(crawler, driver, queue.may_go_on))
    hold_back(crawler.engine, lambda: not len(memory) and driver.is_held_back())
    return queue


async def _run_start(
    crawler: Crawler, driver: InThread, start: AsyncIterator[Any] | None
) -> AsyncIterator[Any]:
    """Yield nothing until the crawl has ended, or this worker has to run start()."""
    engine: Any = crawler.engine
    while driver.is_open and not driver.is_over:
        if not driver.has_to_start:
            await driver.changed.wait(_POLL_SECS)
            ask_scheduler(engine)
            continue
        flight = driver.begin_start()
        try:
            # After the server has lost the queue, start() is called again.
            items, start = start or await start_again(crawler), None
            async for element in items:
                if flight is not driver.start_flight:
                    break
                if isinstance(element, Request):
                    driver.in_flight.led_to(flight, element)
                yield element
                await driver.offer()
        except Exception:  # as under Scrapy's scheduler, start() ends with an error
            if engine.running:  # otherwise, Twisted's reactor has cancelled it
                driver.in_flight.end(flight)
            raise
        # While the crawl is being closed, requests that start() yields may be dropped.
        if engine.running:
            driver.in_flight.end(flight)


async def _run_start_again(crawler: Crawler, driver: InThread, may_go_on: MayGoOn) -> None:
    """Have the engine read start() once more, if it has ended here and has to be run again."""
    engine: Any = crawler.engine
    while driver.is_open:
        await driver.changed.wait(_POLL_SECS)
        if driver.has_to_start and not reads_start(engine):
            # Otherwise, the loop that has read the former start() may read this one, too.
            await give_turn(engine)
            read_start_again(engine, _run_start(crawler, driver, None), mark, may_go_on)

"""A crawl whose workers share a queue: who runs the spider's start(), and when all end."""

import logging
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, cast

from scrapy.crawler import Crawler
from twisted.internet.defer import Deferred

from scrapy_bloom.crawl.backends import redis_server
from scrapy_bloom.crawl.dupefilter import BloomDupeFilter
from scrapy_bloom.crawl.engine import (
    ask_scheduler,
    is_running,
    replace_start,
    start_again,
    until,
)
from scrapy_bloom.crawl.scheduler.safe_queue import SafeQueue
from scrapy_bloom.crawl.scheduler.shared_queue import most_in_flight
from scrapy_bloom.queues.redis import SharedRequests
from scrapy_bloom.queues.shared_state import remove_queue
from scrapy_bloom.redis.backend import RedisBackend
from scrapy_bloom.text import counted

_POLL_SECS = 0.5
_LONGEST_PREFETCH = 16


class SharedCrawl:
    """A worker's part in a crawl: its queue, and what stands in for the spider's start().

    That lasts until the crawl is over, so no worker is idle while another may still find something
    for it. One of them runs the spider's own. Raises a BloomError if the server cannot be used, or
    has lost the queue.

    Attributes:
        queue: the requests.
    """

    def __init__(
        self,
        crawler: Crawler,
        df: BloomDupeFilter,
        record: Callable[[bytes], object],
        *,
        by_slot: bool,
    ) -> None:
        self._crawler = crawler
        self._backend = cast("RedisBackend", df.backend)
        self._flush = df.settings.redis_flush
        self._is_closed = False
        self._waking: Deferred[None] | None = None
        self._logger = logging.LoggerAdapter(logging.getLogger(__name__), df.failures.extra)
        self._renewing = redis_server(df.settings)
        concurrent = crawler.settings.getint("CONCURRENT_REQUESTS")
        join = partial(
            SharedRequests,
            self._backend.server,
            self._renewing,
            self._backend.key,
            by_slot=by_slot,
            lease_secs=df.settings.queue_lease_secs,
            most_in_flight=most_in_flight(crawler.settings),
            prefetch=max(1, min(_LONGEST_PREFETCH, concurrent // 4)),
            record=record,
        )
        self.queue = join()
        if self._flush and self.queue.ended_at and self.queue.is_last:
            # The last worker of that crawl could not do it: it died.
            server = self._backend.server
            deadline_secs = server.deadline_secs
            self.queue.close()
            server.deadline_secs = deadline_secs  # it is no real close
            remove_queue(server, self._backend.key)
            df.clear()
            self.queue = join()
        self.queue.flush = self._flush

    def begin(self, safe: SafeQueue) -> None:
        """Begin the crawl, with the queue as it is used.

        Raises a SettingError if this version of Scrapy works in another way.
        """
        self._safe = safe
        if self.queue.pending:
            self._logger.info(
                "Joining the crawl of the queue in %s: pending requests: %s",
                self.queue.name,
                f"{self.queue.pending:,}",
            )
        replace_start(self._crawler.engine, self._run)

    async def _run(self, start: AsyncIterator[Any]) -> AsyncIterator[Any]:
        if self.queue.ended_at:
            self._log_over()
            return
        began_in = b""
        while not (self._is_closed or self._safe.has_failed or self.queue.ended_at):
            if not (self.queue.can_start and self._safe.attempt(self.queue.claim_start)):
                await self._wait()
                continue
            is_first, began_in = not began_in, self.queue.id
            is_through = False
            try:
                if not is_first:  # the server has lost the queue, or that this was through
                    start = await start_again(self._crawler)
                async for each in start:
                    yield each
                # What it yields while the crawl is being closed may be dropped.
                is_through = is_running(self._crawler.engine)
            finally:  # if it has failed, another worker tries
                self._safe.attempt(self.queue.end_start, began_in, is_through=is_through)
            if not is_through:  # the crawl is being closed
                return

    async def _wait(self) -> None:
        self._waking = Deferred()
        await until(self._waking, _POLL_SECS)
        ask_scheduler(self._crawler.engine)
        if not self._safe.in_flight:
            self._backend.idle()

    def _log_over(self) -> None:
        ended = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.queue.ended_at))
        self._logger.info(
            "The crawl of the queue in %s ended at %s, and nothing is left of it: this worker has "
            "nothing to do. To crawl again, set another BLOOM_REDIS_KEY, or start after `scrapy "
            "bloom reset`; with --queue, that keeps the filter",
            self.queue.name,
            ended,
        )

    def close(self) -> None:
        """End this worker's part, after that of its queue; the last one flushes, if that is set."""
        self._is_closed = True
        if self._waking is not None and not self._waking.called:
            self._waking.callback(None)
        self._renewing.close()
        self._backend.flush = self.queue.was_flushed
        if not self.queue.is_last:
            return
        if not self.queue.ended_at:
            self._logger.info(
                "The crawl of the queue in %s is not over, and nobody is left to crawl: pending "
                "requests: %s. The same command goes on with them",
                self.queue.name,
                f"{self.queue.pending:,}",
            )
        elif self._flush and (number := self.queue.set_aside_for_later):
            self._logger.warning(
                "The queue in %s, and its filter, are not removed (BLOOM_REDIS_FLUSH): %s "
                "left in it that could not be made again",
                self.queue.name,
                counted(number, "request is", "requests are"),
            )

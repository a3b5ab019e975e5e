"""The spider of crawls that share their queue: each page once, the start page too."""

import time
from typing import ClassVar

import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry
from scrapy import Request, signals
from scrapy.core.engine import ExecutionEngine
from scrapy.exceptions import DontCloseSpider

from tests.support.link_spider import LinkSpider

ExecutionEngine._SLOT_HEARTBEAT_INTERVAL = 0.1  # seconds between two signals of an idle spider


class SharedSpider(LinkSpider):
    name = "shared"
    # As docs/scrapy-redis.md says: scrapy-redis's own connection gives up at once, and loses the
    # request that it was about to put into its queue.
    custom_settings: ClassVar = {
        "REDIS_PARAMS": {
            "retry": Retry(ExponentialBackoff(cap=1, base=0.05), 20),
            "retry_on_error": [redis.ConnectionError, redis.TimeoutError],
        }
    }

    async def start(self):
        for url in self.start_urls:
            yield Request(url)  # filtered: all crawlers start with it, one of them crawls it

    @classmethod
    def from_crawler(cls, crawler, *args, **kwargs):
        spider = super().from_crawler(crawler, *args, **kwargs)
        spider.busy_at = time.monotonic()
        spider.idle_secs = crawler.settings.getfloat("IDLE_SECS", 3.0)  # others may find links
        crawler.signals.connect(spider.busy, signals.response_received)
        crawler.signals.connect(spider.idle, signals.spider_idle)
        return spider

    def busy(self):
        self.busy_at = time.monotonic()

    def idle(self):
        if time.monotonic() - self.busy_at < self.idle_secs:
            raise DontCloseSpider

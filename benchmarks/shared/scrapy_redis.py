"""Workers of scrapy-redis, to compare with ours."""

from collections.abc import Mapping
from typing import Any

import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry
from scrapy import signals
from scrapy.crawler import Crawler
from scrapy.exceptions import DontCloseSpider

from tests.support import worker_faults

SCRAPY_REDIS = "scrapy-redis"


class PatientRedis(redis.Redis):
    """Scrapy-redis's connection, which waits for the server, as docs/scrapy-redis.md says."""

    @classmethod
    def from_url(cls, url: str, **kwargs: Any) -> redis.Redis:
        """Return a connection that tries again."""
        kwargs["retry"] = Retry(ExponentialBackoff(cap=1, base=0.05), 40)
        kwargs["retry_on_error"] = [redis.ConnectionError, redis.TimeoutError]
        return super().from_url(url, **kwargs)


class Waiting:
    """Keeps the spider open for ever, for what other workers find, as scrapy-redis's spiders do."""

    @classmethod
    def from_crawler(cls, crawler: Crawler) -> "Waiting":
        """Listen to the signal of an idle spider."""
        waiting = cls()
        crawler.signals.connect(waiting.wait, signals.spider_idle)
        return waiting

    def wait(self) -> None:
        """Keep the spider open."""
        raise DontCloseSpider


def settings_of(name: str, url: str, expected: int, **more: object) -> Mapping[str, object]:
    """Return the settings of a worker of SCRAPY_REDIS, or of ours, which alone has `more`."""
    if name != SCRAPY_REDIS:
        return worker_faults.settings_of(url, expected, **more)
    return {
        "JOBDIR": None,
        "LOG_LEVEL": "INFO",
        "SCHEDULER": "scrapy_redis.scheduler.Scheduler",
        "SCHEDULER_PERSIST": True,
        "DUPEFILTER_CLASS": "scrapy_redis.dupefilter.RFPDupeFilter",
        "REDIS_URL": url,
        "REDIS_PARAMS": f'{{"redis_cls": "{__name__}.{PatientRedis.__name__}"}}',
        "EXTENSIONS": f'{{"{__name__}.{Waiting.__name__}": 1}}',
    }

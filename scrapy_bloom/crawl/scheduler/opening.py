"""Read from a crawl what its store is opened with: spider, run and limits."""

from scrapy.crawler import Crawler

from scrapy_bloom.queues.shares import Limit, Limits
from scrapy_bloom.queues.store import Joining
from scrapy_bloom.settings import BloomSettings


def joining_of(crawler: Crawler, settings: BloomSettings) -> Joining:
    """Return what a store has to know about a crawl."""
    assert crawler.spider is not None
    return Joining(crawler.spider.name, settings.run, keeps_failed=settings.keep_failed)


def limits_of(crawler: Crawler) -> Limits:
    """Return the limits that Scrapy's settings and the spider set for each slot."""
    settings, spider = crawler.settings, crawler.spider
    # With CONCURRENT_REQUESTS_PER_IP, Scrapy refuses the priority queue that tells hosts apart.
    usual = settings.getint("CONCURRENT_REQUESTS_PER_DOMAIN")
    usual = getattr(spider, "max_concurrent_requests", usual)
    delay = getattr(spider, "download_delay", settings.getfloat("DOWNLOAD_DELAY")) or 0.0
    # AutoThrottle changes the delay of the worker that has the slot.
    adapts = settings.getbool("AUTOTHROTTLE_ENABLED")
    least = max(settings.getfloat("AUTOTHROTTLE_START_DELAY"), 1.0) if adapts else 0.0
    return Limits(
        Limit(int(usual), max(delay, least)),
        {
            slot: Limit(each.get("concurrency", usual), max(each.get("delay", delay), least))
            for slot, each in settings.getdict("DOWNLOAD_SLOTS").items()
        },
    )

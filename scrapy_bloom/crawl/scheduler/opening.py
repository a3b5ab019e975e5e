"""Read from a crawl what its store is opened with: spider, run, arguments and limits."""

from collections.abc import Mapping
from hashlib import sha256

from scrapy.crawler import Crawler

from scrapy_bloom.queues.store import Joining, Limit, Limits
from scrapy_bloom.settings import BloomSettings

_MOST_ARGUMENTS = 100


def joining_of(crawler: Crawler, settings: BloomSettings) -> Joining:
    """Return what a store has to know about a crawl."""
    assert crawler.spider is not None
    return Joining(crawler.spider.name, settings.run, arguments_of(crawler))


def arguments_of(crawler: Crawler) -> Mapping[str, str]:
    """Return digests of BOT_NAME and of the spider's arguments.

    Digests, because an argument may be a password. Arguments are the attributes of the spider that
    are strings, as those of the command line are; names with an underscore are of scrapyd.
    """
    texts = {
        name: value
        for name, value in sorted(vars(crawler.spider).items())
        if isinstance(value, str) and name != "name" and not name.startswith("_")
    }
    values = {"BOT_NAME": str(crawler.settings["BOT_NAME"]), **texts}
    return {
        name: sha256(value.encode(errors="surrogatepass")).hexdigest()[:16]
        for name, value in list(values.items())[:_MOST_ARGUMENTS]
    }


def limits_of(crawler: Crawler) -> Limits:
    """Return the limits that Scrapy's settings and the spider set for each slot."""
    settings, spider = crawler.settings, crawler.spider
    # With CONCURRENT_REQUESTS_PER_IP, Scrapy refuses the priority queue that tells hosts apart.
    usual = settings.getint("CONCURRENT_REQUESTS_PER_DOMAIN")
    usual = getattr(spider, "max_concurrent_requests", usual)
    adapts = settings.getbool("AUTOTHROTTLE_ENABLED")  # AutoThrottle changes a worker's delay
    delay = getattr(spider, "download_delay", settings.getfloat("DOWNLOAD_DELAY"))
    return Limits(
        Limit(int(usual), bool(delay) or adapts),
        {
            slot: Limit(each.get("concurrency", usual), bool(each.get("delay", delay)) or adapts)
            for slot, each in settings.getdict("DOWNLOAD_SLOTS").items()
        },
    )

"""Open the store of a crawl, and log what the crawl begins with."""

import logging
from collections.abc import Mapping
from hashlib import sha256

from scrapy.crawler import Crawler

from scrapy_bloom.crawl.scheduler.order import serves_least_busy_slot
from scrapy_bloom.queues.batch import Limit, Limits
from scrapy_bloom.queues.store import Joining, Opened, State
from scrapy_bloom.settings import BloomSettings
from scrapy_bloom.text import counted, escaped, time_text

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
    usual = settings.getint("CONCURRENT_REQUESTS_PER_IP") or settings.getint(
        "CONCURRENT_REQUESTS_PER_DOMAIN"
    )
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


def log_opening(crawler: Crawler, settings: BloomSettings, name: str, opened: Opened) -> None:
    """Log the run that a crawl has joined, and what is left of it.

    Args:
        crawler: the crawler.
        settings: the BLOOM_* settings.
        name: the place of the store.
        opened: what the store has told.
    """
    logger = logging.LoggerAdapter(logging.getLogger(__name__), {"spider": crawler.spider})
    run = f" {escaped(opened.run)!r}" if opened.run else ""
    if opened.is_late:
        logger.warning(
            "BLOOM_RUN is %r, the name of an earlier run of %s, so there is nothing to do in the "
            "current run%s. To begin a new run, set a name that it has not had",
            escaped(settings.run),
            name,
            run,
        )
        return
    pending = sum(opened.counts.get(state, 0) for state in (State.PENDING, State.SUSPECT))
    if opened.began and not opened.is_first:
        others = opened.others
        logger.log(
            logging.WARNING if others else logging.INFO,
            "The run%s of %s begins; unfinished requests of earlier runs: %s%s",
            run,
            name,
            f"{pending + opened.counts.get(State.IN_FLIGHT, 0):,}",
            f". Workers of the run before: {others:,}, which shut down" if others else "",
        )
    if opened.differing:
        logger.warning(
            "This crawl has joined the run%s of %s with other values of %s, and requests of both "
            "are in one queue: start it with the same values, or set another %s or BLOOM_RUN",
            run,
            name,
            ", ".join(map(escaped, opened.differing)),
            "BLOOM_REDIS_KEY" if settings.shares_queue else "JOBDIR",
        )
    if opened.retried:
        logger.info(
            "%s tried again, because an earlier run could not crawl %s",
            counted(opened.retried, "failed request is", "failed requests are"),
            "it" if opened.retried == 1 else "them",
        )
    elif opened.ended_at and settings.queue_when_empty == "close":
        logger.warning(
            "The run%s of %s ended at %s, and nothing is pending. To crawl again, set BLOOM_RUN "
            "to a name that it has not had, for example the date",
            run,
            name,
            time_text(opened.ended_at),
        )
    if settings.shares_queue:
        _log_joining(logger, settings, name, pending)
    elif pending and not opened.began:
        killed = opened.killed
        logger.info(
            "Resuming crawl (%d requests scheduled%s)",
            pending,
            f", {killed:,} of them in flight when the last run was killed" if killed else "",
        )


def _log_joining(
    logger: "logging.LoggerAdapter[logging.Logger]",
    settings: BloomSettings,
    name: str,
    pending: int,
) -> None:
    if settings.queue_when_empty == "wait":
        logger.info(
            "The workers of the queue in %s stay open when it is empty (BLOOM_QUEUE_WHEN_EMPTY "
            'is "wait"). To end them, run `scrapy bloom stop`, or press Ctrl-C; pending '
            "requests: %s",
            name,
            f"{pending:,}",
        )
    elif pending:
        logger.info(
            "Joining the crawl of the queue in %s: pending requests: %s", name, f"{pending:,}"
        )


def log_limits(crawler: Crawler, settings: BloomSettings, name: str) -> None:
    """Log whether the limits of downloads per host hold for all workers together."""
    logger = logging.LoggerAdapter(logging.getLogger(__name__), {"spider": crawler.spider})
    if not settings.shared_limits:
        return
    if serves_least_busy_slot(crawler):
        logger.info(
            "The limits of downloads per host (CONCURRENT_REQUESTS_PER_DOMAIN, DOWNLOAD_DELAY, "
            "DOWNLOAD_SLOTS) apply to all workers of the queue in %s together "
            "(BLOOM_SHARED_LIMITS)",
            name,
        )
        return
    logger.warning(
        "The limits of downloads per host apply to each worker of the queue in %s separately, "
        "because SCHEDULER_PRIORITY_QUEUE is not "
        '"scrapy.pqueues.DownloaderAwarePriorityQueue", which tells hosts apart. So each '
        "further worker adds to the load of a host: set CONCURRENT_REQUESTS_PER_DOMAIN and "
        "DOWNLOAD_DELAY for the number of workers, and BLOOM_SHARED_LIMITS = False",
        name,
    )

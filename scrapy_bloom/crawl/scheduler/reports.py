"""Log what a crawl begins with, what its store tells it meanwhile, and what is left at its end."""

import logging
from typing import TypeAlias

from scrapy.crawler import Crawler

from scrapy_bloom.crawl.scheduler.order import serves_least_busy_slot
from scrapy_bloom.queues.serialized import url_of
from scrapy_bloom.queues.store import MOST_DEATHS, Closed, Opened, Reply, State
from scrapy_bloom.settings import BloomSettings
from scrapy_bloom.text import counted, escaped, time_text

Logger: TypeAlias = "logging.LoggerAdapter[logging.Logger]"


def log_opening(logger: Logger, settings: BloomSettings, name: str, opened: Opened) -> None:
    """Log the run that a crawl has joined, and what is left of it.

    Args:
        logger: of the crawl.
        settings: the BLOOM_* settings.
        name: the place of the store.
        opened: what the store has told.
    """
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
    failed = opened.counts.get(State.FAILED, 0) + opened.counts.get(State.WAITING, 0)
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
    if opened.retried:
        logger.info(
            "%s of earlier runs: tried again, unless five runs could not crawl it",
            counted(opened.retried, "failed request"),
        )
    elif opened.ended_at and settings.queue_when_empty == "close":
        logger.warning(
            "The run%s of %s ended at %s, and nothing is pending%s. To crawl again, set BLOOM_RUN "
            "to a name that it has not had, for example the date",
            run,
            name,
            time_text(opened.ended_at),
            f" (failed requests are for the next run: {failed:,})" if failed else "",
        )
    if settings.shares_queue:
        _log_joining(logger, settings, name, pending)
    elif pending and not opened.began:
        killed = opened.killed
        logger.info(
            "Resuming crawl (%d requests scheduled%s)",
            pending,
            f", {killed:,} of them in flight when the last process was killed" if killed else "",
        )


def _log_joining(logger: Logger, settings: BloomSettings, name: str, pending: int) -> None:
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


def log_limits(logger: Logger, crawler: Crawler, settings: BloomSettings, name: str) -> None:
    """Log whether the limits of downloads per host hold for all workers together."""
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


def log_no_share(logger: Logger, name: str, workers: int) -> None:
    """Log that a worker takes no requests, because others have the limits of all hosts."""
    logger.info(
        "This worker waits, because the %d workers of the queue in %s share the limits per host "
        "(BLOOM_SHARED_LIMITS), and it has no share of a host with pending requests",
        workers,
        name,
    )


def log_reply(logger: Logger, name: str, reply: Reply) -> None:
    """Log which requests are not crawled in this run any more, and which leases have expired.

    Args:
        logger: of the crawl.
        name: the place of the store.
        reply: of the store.
    """
    for data in reply.died:
        log_dead(logger, name, data)
    if reply.given_up:
        logger.error(
            "%s failed in five runs, and %s no longer tried: `scrapy bloom queue --dead` shows why",
            counted(reply.given_up, "request has", "requests have"),
            "is" if reply.given_up == 1 else "are",
        )
    for data in reply.circles:
        logger.warning(
            "%s was redirected to a page that waits for it, because that was redirected to it: "
            "the next run tries both again",
            escaped(url_of(data)),
        )
    for worker, number in reply.expired.items():
        logger.info(
            "The lease of the worker %s of the queue in %s has expired without a heartbeat: %s "
            "pending again",
            escaped(worker),
            name,
            counted(number, "request is", "requests are"),
        )


def log_dead(logger: Logger, name: str, data: bytes) -> None:
    """Log that a request is no longer crawled, because processes died with it."""
    logger.error(
        "%s was in flight in %d processes that died, the last time alone: it is no longer "
        "crawled. It is kept in %s: `scrapy bloom queue --dead` shows it",
        escaped(url_of(data)),
        MOST_DEATHS + 1,
        name,
    )


def log_end(logger: Logger, name: str, closed: Closed) -> None:
    """Log what is left for the next process; the last worker does so."""
    if closed.others:
        return
    pending = closed.counts.get(State.PENDING, 0) + closed.counts.get(State.SUSPECT, 0)
    failed = closed.counts.get(State.FAILED, 0) + closed.counts.get(State.WAITING, 0)
    if pending or not closed.ended_at:
        logger.info(
            "The crawl of the queue in %s is unfinished; pending requests: %s, failed "
            "requests: %s. Run the same command again to resume it",
            name,
            f"{pending:,}",
            f"{failed:,}",
        )
    elif failed:
        logger.info(
            "The crawl of the queue in %s finished, with %s. The next run, which a new BLOOM_RUN "
            "begins, or the same command if it sets none, tries those again that have failed in "
            "fewer than five runs; `scrapy bloom queue --failed` shows them",
            name,
            counted(failed, "failed request"),
        )

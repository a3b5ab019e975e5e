"""Log with what a crawl begins, what happens to its queue meanwhile, and what is left."""

import logging
from collections.abc import Sequence
from typing import TypeAlias

from scrapy.crawler import Crawler

from scrapy_bloom.crawl.scheduler.stored_requests import serves_least_busy_slot
from scrapy_bloom.queues.serialized import url_of
from scrapy_bloom.queues.store import MOST_DEATHS, Opened, QueueStatus, Reply, State
from scrapy_bloom.settings import BloomSettings
from scrapy_bloom.text import counted, escaped, time_text

Logger: TypeAlias = "logging.LoggerAdapter[logging.Logger]"


def log_opening(
    logger: Logger, store: str, crawler: Crawler, settings: BloomSettings, opened: Opened
) -> None:
    """Log the run that a crawl has joined, and what is left of it."""
    _log_dead(logger, store, opened.died)
    run = f" {escaped(opened.run)!r}" if opened.run else ""
    if opened.is_late:
        logger.warning(
            "BLOOM_RUN is %r, the name of an earlier run of %s, so there is nothing to do in "
            "the current run%s. To begin a new run, set a name that it has not had",
            escaped(settings.run),
            store,
            run,
        )
        return
    pending = sum(opened.counts[state] for state in (State.PENDING, State.SUSPECT))
    failed = opened.counts[State.FAILED] + opened.counts[State.WAITING]
    if opened.began and not opened.is_first:
        others = opened.others
        logger.log(
            logging.WARNING if others else logging.INFO,
            "The run%s of %s begins; unfinished requests of earlier runs: %s%s",
            run,
            store,
            f"{pending + opened.counts[State.IN_FLIGHT]:,}",
            f". Workers of the run before: {others:,}, which shut down" if others else "",
        )
    if opened.retried:
        logger.info(
            "%s of earlier runs: tried again, except after failures in five runs",
            counted(opened.retried, "failed request"),
        )
    elif opened.ended_at and settings.queue_when_empty == "close":
        logger.warning(
            "The run%s of %s ended at %s, and nothing is pending%s. To crawl again, set "
            "BLOOM_RUN to a name that it has not had, for example the date",
            run,
            store,
            time_text(opened.ended_at),
            f" (failed requests are for the next run: {failed:,})" if failed else "",
        )
    if pending and not opened.began:
        killed = opened.killed
        logger.info(
            "Resuming crawl (%d requests scheduled%s)",
            pending,
            f", {killed:,} of them in flight when the last process was killed" if killed else "",
        )
    has_limits = settings.shares_queue and settings.shared_limits
    if has_limits and not serves_least_busy_slot(crawler):
        logger.warning(
            "The limits of downloads per host apply to each worker of the queue in %s separately, "
            "because SCHEDULER_PRIORITY_QUEUE is not "
            '"scrapy.pqueues.DownloaderAwarePriorityQueue", which tells hosts apart. So each '
            "further worker adds to the load of a host: set CONCURRENT_REQUESTS_PER_DOMAIN and "
            "DOWNLOAD_DELAY for the number of workers, and BLOOM_SHARED_LIMITS = False",
            store,
        )


def log_reply(logger: Logger, store: str, reply: Reply) -> None:
    """Log which requests are no longer crawled in this run, and which leases have expired."""
    _log_dead(logger, store, reply.died)
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
            store,
            counted(number, "request is", "requests are"),
        )


def _log_dead(logger: Logger, store: str, died: Sequence[bytes]) -> None:
    for data in died:
        logger.error(
            "%s was in flight in %d processes that died, the last time alone: it is no longer "
            "crawled. It is kept in %s: `scrapy bloom queue --dead` shows it",
            escaped(url_of(data)),
            MOST_DEATHS + 1,
            store,
        )


def log_end(logger: Logger, store: str, closed: QueueStatus) -> None:
    """Log what is left for the next process; the last worker does so."""
    pending = closed.counts[State.PENDING] + closed.counts[State.SUSPECT]
    failed = closed.counts[State.FAILED] + closed.counts[State.WAITING]
    if pending or not closed.ended_at:
        logger.info(
            "The crawl of the queue in %s is unfinished; pending requests: %s, failed "
            "requests: %s. Run the same command again to resume it",
            store,
            f"{pending:,}",
            f"{failed:,}",
        )
    elif failed:
        logger.info(
            "The crawl of the queue in %s finished, with %s. The next run, which a new "
            "BLOOM_RUN begins, or the same command if it sets none, tries those again that "
            "have failed in fewer than five runs; `scrapy bloom queue --failed` shows them",
            store,
            counted(failed, "failed request"),
        )

"""Leftovers of a crawl that ends early, for later ones with the same filter: a queue, or none."""

import logging
from collections.abc import Mapping
from enum import Enum
from typing import Any

from scrapy_bloom.crawl.telemetry.outlets import Outlets
from scrapy_bloom.settings.settings import BloomSettings

logger = logging.getLogger(__name__)


class Leftover(Enum):
    """Tells where the requests are that a crawl had recorded as seen, and queued at its end.

    Attributes:
        NOTHING: of no concern: the next run has both queue and filter, or neither.
        JOB: in a JOBDIR, and the filter is elsewhere.
        LOST: nowhere.
    """

    NOTHING = "nothing"
    JOB = "job"
    LOST = "lost"

    @classmethod
    def of(cls, settings: BloomSettings, job_dir: str | None) -> "Leftover":
        """Return what a crawl with Scrapy's scheduler, or CrashSafeScheduler, would leave."""
        if not outlives_the_run(settings) or settings.record_on == "crawled":
            return cls.NOTHING
        return cls.JOB if job_dir else cls.LOST


def outlives_the_run(settings: BloomSettings) -> bool:
    """Return whether a crawl's filter is there for later ones, wherever its queue is."""
    if settings.backend == "redis":
        return not settings.redis_flush
    return settings.dir is not None


def log_risk(
    leftover: Leftover, shared_queue: str, location: str, extra: Mapping[str, Any]
) -> None:
    """Say at the start what becomes of the queue, while there is time to change that.

    A shared queue is given by the URL of its Redis server, without secrets.
    """
    if leftover is Leftover.LOST:
        logger.info(
            "There is no JOBDIR: should this crawl end early, what it has queued then is lost, but "
            "looks seen in %s. A JOBDIR keeps the queue",
            location,
            extra=extra,
        )
    if leftover is Leftover.JOB:
        logger.info(
            "Should this crawl be killed, or end early, run the same command again: what it has "
            "queued waits in its JOBDIR, looks seen in %s, and is crawled by nobody else",
            location,
            extra=extra,
        )
    if shared_queue and not location.startswith(shared_queue.rpartition("/")[0]):
        logger.info(
            "The queue is in %s, and the filter in %s: should the queue alone be lost, what was in "
            "it still looks seen. Then start over with another BLOOM_REDIS_KEY, or after `scrapy "
            "bloom reset`; on one server, both are lost together, and the crawl goes on",
            shared_queue,
            location,
            extra=extra,
        )


def log_end(
    leftover: Leftover, reason: str, location: str, outlets: Outlets, *, recorded: int
) -> None:
    """Say at the close of a crawl that has not finished what was left behind."""
    if leftover is Leftover.JOB:
        logger.info(
            "What is queued waits in the JOBDIR, and looks seen in %s: only a crawl with both goes "
            "on with it",
            location,
            extra=outlets.extra,
        )
    if leftover is not Leftover.LOST:
        return
    lost = recorded
    if (queued := outlets.stats.get_value("scheduler/enqueued")) is not None:
        # Some of these may not be recorded: with dont_filter, as start requests are.
        lost = min(recorded, queued - outlets.stats.get_value("scheduler/dequeued", 0))
    if lost > 0:
        logger.warning(
            "The crawl ended early (%s), and without a JOBDIR: up to %s requests that were queued "
            "are lost, but look seen in %s to later runs. To crawl them, start over: with another "
            "BLOOM_DIR or BLOOM_REDIS_KEY, or after `scrapy bloom reset`. With a JOBDIR the same "
            'command goes on; BLOOM_RECORD_ON = "crawled" records in a file what was crawled only',
            reason,
            f"{lost:,}",
            location,
            extra=outlets.extra,
        )


def log_that_all_was_seen(filtered: int, location: str, outlets: Outlets) -> None:
    """Tell at the close of a run that nothing has passed the filter, since all was seen.

    That is a WARNING if nothing was crawled at all, also no start page that is never filtered.
    """
    if not filtered:
        return
    logger.log(
        logging.INFO if outlets.stats.get_value("scheduler/dequeued", 0) else logging.WARNING,
        "Nothing new was crawled: each of the %s requests that came to the filter was recorded in "
        '%s before. Pages that lead to new ones are crawled once in each run with meta={"bloom_'
        'filter": "run"}; to crawl pages again after some time, set BLOOM_WINDOW_SECS; to start '
        "over, use another JOBDIR, BLOOM_DIR or BLOOM_REDIS_KEY, or `scrapy bloom reset`",
        f"{filtered:,}",
        location,
        extra=outlets.extra,
    )

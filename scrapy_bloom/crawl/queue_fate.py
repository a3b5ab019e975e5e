"""The fate of a crawl's queue, when its filter is there for later crawls."""

import logging
from dataclasses import dataclass

from scrapy_bloom.crawl.telemetry.telemetry import Telemetry
from scrapy_bloom.settings.settings import BloomSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class QueueFate:
    """Tells where the recorded requests are that were still queued at the end of a crawl.

    By default the next run has both queue and filter, or neither.

    Attributes:
        is_lost: they are nowhere if the crawl ends early.
        is_in_job: they are in a JOBDIR, and the filter is elsewhere.
        shared_at: of a queue in Redis, the URL of its server, without secrets. That queue is not
            lost, and others may have what is seen here.
    """

    is_lost: bool = False
    is_in_job: bool = False
    shared_at: str = ""

    @classmethod
    def of(cls, settings: BloomSettings, job_dir: str | None) -> "QueueFate":
        """Return the fate of the queue under Scrapy's scheduler, or CrashSafeScheduler."""
        if not settings.outlives_the_run or settings.record_on == "crawled":
            return cls()
        return cls(is_lost=not job_dir, is_in_job=bool(job_dir))

    def log_risk(self, location: str, telemetry: Telemetry) -> None:
        """Say at the start what becomes of the queue, while there is time to change that."""
        if self.is_lost:
            logger.info(
                "There is no JOBDIR: should this crawl end early, what it has queued then is lost, "
                "but looks seen in %s. A JOBDIR keeps the queue",
                location,
                extra=telemetry.extra,
            )
        if self.is_in_job:
            logger.info(
                "Should this crawl be killed, or end early, run the same command again: what it "
                "has queued waits in its JOBDIR, looks seen in %s, and is crawled by nobody else",
                location,
                extra=telemetry.extra,
            )
        if self.shared_at and not location.startswith(self.shared_at.rpartition("/")[0]):
            logger.info(
                "The queue is in %s, and the filter in %s: should the queue alone be lost, what "
                "was in it still looks seen. Then start over with another BLOOM_REDIS_KEY, or "
                "after `scrapy bloom reset`; on one server, both are lost together, and the crawl "
                "goes on",
                self.shared_at,
                location,
                extra=telemetry.extra,
            )

    def log_early_end(self, reason: str, location: str, telemetry: Telemetry) -> None:
        """Say at the close of a crawl that has not finished what was left behind."""
        if self.is_in_job:
            logger.info(
                "What is queued waits in the JOBDIR, and looks seen in %s: only a crawl with both "
                "goes on with it",
                location,
                extra=telemetry.extra,
            )
        lost, stats = telemetry.added if self.is_lost else 0, telemetry.stats
        if (queued := stats.get_value("scheduler/enqueued")) is not None:
            # Some of these may not be recorded: with dont_filter, as start requests are.
            lost = min(lost, queued - stats.get_value("scheduler/dequeued", 0))
        if lost > 0:
            logger.warning(
                "The crawl ended early (%s), and without a JOBDIR: up to %s requests that were "
                "queued are lost, but look seen in %s to later runs. To crawl them, start over: "
                "with another BLOOM_DIR or BLOOM_REDIS_KEY, or after `scrapy bloom reset`. With a "
                'JOBDIR the same command goes on; BLOOM_RECORD_ON = "crawled" records in a file '
                "what was crawled only",
                reason,
                f"{lost:,}",
                location,
                extra=telemetry.extra,
            )

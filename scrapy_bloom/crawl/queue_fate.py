"""The fate of a crawl's queue, when its filter is there for later crawls."""

import logging

from scrapy.crawler import Crawler
from scrapy.utils.job import job_dir

from scrapy_bloom.crawl.telemetry import Telemetry
from scrapy_bloom.redis.connection.url import without_secrets
from scrapy_bloom.settings.scrapy_redis import url_of_queue
from scrapy_bloom.settings.settings import BloomSettings


class QueueFate:
    """Tells where the recorded requests are that were still queued at the end of a crawl.

    By default the next run has both queue and filter, or neither. Else they are nowhere if the
    crawl ends early, or they are in a JOBDIR, and the filter is elsewhere. A queue in Redis is not
    lost, and others may have what is seen here.
    """

    def __init__(
        self, crawler: Crawler, settings: BloomSettings, telemetry: Telemetry, *, is_shared: bool
    ) -> None:
        is_scrapy_redis = is_shared and not settings.shares_queue
        self._shared_at = (
            without_secrets(url_of_queue(crawler.settings)[0]) if is_scrapy_redis else ""
        )
        job = job_dir(crawler.settings)
        is_apart = settings.outlives_the_run and settings.record_on != "crawled" and not is_shared
        self._is_lost = is_apart and not job
        self._is_in_job = is_apart and bool(job)
        self._telemetry = telemetry
        self._logger = logging.LoggerAdapter(logging.getLogger(__name__), telemetry.extra)

    def log_risk(self, location: str) -> None:
        """Say at the start what becomes of the queue, while there is time to change that."""
        if self._is_lost:
            self._logger.info(
                "There is no JOBDIR: should this crawl end early, what it has queued then is lost, "
                "but looks seen in %s. A JOBDIR keeps the queue",
                location,
            )
        if self._is_in_job:
            self._logger.info(
                "Should this crawl be killed, or end early, run the same command again: what it "
                "has queued waits in its JOBDIR, looks seen in %s, and is crawled by nobody else",
                location,
            )
        if self._shared_at and not location.startswith(self._shared_at.rpartition("/")[0]):
            self._logger.info(
                "The queue is in %s, and the filter in %s: should the queue alone be lost, what "
                "was in it still looks seen. Then start over with another BLOOM_REDIS_KEY, or "
                "after `scrapy bloom reset`; on one server, both are lost together, and the crawl "
                "goes on",
                self._shared_at,
                location,
            )

    def log_early_end(self, reason: str, location: str) -> None:
        """Say at the close of a crawl that has not finished what was left behind."""
        if self._is_in_job:
            self._logger.info(
                "What is queued waits in the JOBDIR, and looks seen in %s: only a crawl with both "
                "goes on with it",
                location,
            )
        lost, stats = self._telemetry.added if self._is_lost else 0, self._telemetry.stats
        if (queued := stats.get_value("scheduler/enqueued")) is not None:
            # Some of these may not be recorded: with dont_filter, as start requests are.
            lost = min(lost, queued - stats.get_value("scheduler/dequeued", 0))
        if lost > 0:
            self._logger.warning(
                "The crawl ended early (%s), and without a JOBDIR: up to %s requests that were "
                "queued are lost, but look seen in %s to later runs. To crawl them, start over: "
                "with another BLOOM_DIR or BLOOM_REDIS_KEY, or after `scrapy bloom reset`. With a "
                'JOBDIR the same command goes on; BLOOM_RECORD_ON = "crawled" records in a file '
                "what was crawled only",
                reason,
                f"{lost:,}",
                location,
            )

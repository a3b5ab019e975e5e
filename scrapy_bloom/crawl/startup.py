"""How a crawl starts: the add-on, the filter that its settings ask for, and errors in one line."""

import functools
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from scrapy.crawler import Crawler
from scrapy.settings import BaseSettings
from scrapy.utils.job import job_dir
from scrapy.utils.misc import load_object
from scrapy.utils.python import global_object_name
from twisted.logger import globalLogBeginner

from scrapy_bloom.crawl.engine import engine_of
from scrapy_bloom.exceptions import TROUBLESHOOTING, BloomError, SettingError, StorageError
from scrapy_bloom.files.backend import LocalBackend
from scrapy_bloom.generations.backend import Backend
from scrapy_bloom.generations.memory import MemoryBackend, RecordCrawled
from scrapy_bloom.generations.policy import Origin, Policy
from scrapy_bloom.job.recovery import Job
from scrapy_bloom.queues.conflicts import check_no_database
from scrapy_bloom.settings.settings import BloomSettings

if TYPE_CHECKING:
    from scrapy_bloom.redis.backend import RedisBackend
    from scrapy_bloom.redis.shards import ShardedBackend

logger = logging.getLogger(__name__)


class Addon:
    """Makes BloomDupeFilter the duplicate filter, and checks the BLOOM_* settings before the crawl.

    In `ADDONS = {"scrapy_bloom.Addon": 500}` it does what the DUPEFILTER_CLASS line does; a bad
    setting then stops the crawl with its error as the last line. A DUPEFILTER_CLASS that the
    project, the spider or the command line sets is left alone, as with every add-on.
    """

    def __init__(self, crawler: Crawler | None = None) -> None:
        self._crawler = crawler

    @classmethod
    def from_crawler(cls, crawler: Crawler) -> "Addon":
        """Build it, for Scrapy."""
        return cls(crawler)

    def update_settings(self, settings: BaseSettings) -> None:
        """Check the settings, and set DUPEFILTER_CLASS.

        Raises:
            SettingError: a BLOOM_* setting is not valid.
        """
        try:
            BloomSettings.from_settings(settings)
        except SettingError as error:
            if self._crawler is None:
                raise
            fail_at_the_start(self._crawler, error)
        settings.set("DUPEFILTER_CLASS", "scrapy_bloom.BloomDupeFilter", "addon")


def create_backend(crawler: Crawler, settings: BloomSettings) -> Backend:
    """Make the backend that a crawl's settings ask for, not yet opened.

    Raises a StorageError if the job directory is one of another scheduler. A job directory is
    locked.
    """
    path = job_dir(crawler.settings)
    job_path = Path(path).absolute() if path else None
    only_crawled = settings.record_on == "crawled"
    if job_path is not None and settings.shares_queue:
        check_no_database(job_path, in_redis=True)
        job_path = None  # the queue is in Redis
    elif job_path is not None and not _is_crash_safe(crawler):
        check_no_database(job_path)
    job = Job(job_path, settings.on_unclean_shutdown, only_crawled=only_crawled)
    spider = getattr(crawler.spider or crawler.spidercls, "name", "")
    fingerprinter = global_object_name(type(crawler.request_fingerprinter))
    origin = Origin(salt=settings.salt, fingerprinter=fingerprinter, spider=spider)
    if settings.backend == "redis":
        return redis_backend(settings, origin, job)
    policy = settings.policy
    if only_crawled:
        policy = replace(policy, error_rate=policy.error_rate / 2)
    stored, directory = MemoryBackend(policy, origin), settings.directory(path, spider)
    if directory is not None:
        stored = LocalBackend(directory, policy, origin, job=job, sync_secs=settings.sync_secs)
    if not only_crawled:
        return stored
    return RecordCrawled(stored, MemoryBackend(replace(policy, on_full="grow")))


def redis_backend(
    settings: BloomSettings, origin: Origin, job: Job
) -> "RedisBackend | ShardedBackend":
    """Make the filter in Redis that settings ask for, not yet opened; raises a SettingError."""
    from scrapy_bloom.redis.backend import RedisBackend  # noqa: PLC0415 - for those who use it
    from scrapy_bloom.redis.shards import ShardedBackend, shard_key, share_of  # noqa: PLC0415

    key = settings.redis_key % {"spider": origin.spider}
    if "{" in key or "}" in key:
        raise SettingError(
            f"BLOOM_REDIS_KEY makes {key!r} of the spider's name; allowed is a name without "
            'braces: set one without "%(spider)s"'
        )
    server, shards = settings.redis_server(), settings.redis_shards
    share = share_of(settings.expected_requests, shards)
    parts = [
        RedisBackend(
            server,
            shard_key(key, shard),
            replace(settings.policy, expected=share),
            origin,
            mirror=settings.redis_mirror,
            flush=settings.redis_flush and not settings.shares_queue,  # the last worker does it
            job=job,
            shards=shards,
        )
        for shard in range(shards)
    ]
    return parts[0] if shards == 1 else ShardedBackend(parts)


def has_log(crawler: Crawler, settings: BloomSettings) -> bool:
    """Return whether the filter has a log: the queue that CrashSafeScheduler has in the JOBDIR.

    Then the scheduler locks the job, and opens the filter.
    """
    return not settings.shares_queue and bool(job_dir(crawler.settings)) and _is_crash_safe(crawler)


def _is_crash_safe(crawler: Crawler) -> bool:
    return getattr(load_object(crawler.settings["SCHEDULER"]), "is_crash_safe", False)


def backend_without_crawl(crawler: Crawler, command: str) -> Backend:
    """Make a filter in memory, not yet opened: what is tried by hand is not part of any crawl.

    Raises a StorageError if there is a JOBDIR. The command (of Scrapy) would take a paused job's
    requests. Scrapy's shell then waits for ever for its page, too: its callback gets lost in the
    disk queue.
    """
    if path := job_dir(crawler.settings):
        raise StorageError(
            f"scrapy {command} does not work with a job directory, whose requests it would take, "
            f"and this project has JOBDIR = {path!r}; start it with -s JOBDIR="
        )
    return MemoryBackend(Policy(expected=100_000, error_rate=1e-9))


def fail_at_the_start(crawler: Crawler, error: BloomError) -> NoReturn:
    """Log an error that ends the crawl before it begins, as the last line of the log; raise it.

    Scrapy would close the spider, which is not open yet, and bury the error under one of its own.
    The event loop would log a traceback.
    """
    text = f"{error} ({TROUBLESHOOTING})"
    logger.error("%s", text, extra={"spider": crawler.spider})
    if crawler.settings["LOG_FILE"] or not crawler.settings.getbool("LOG_ENABLED"):
        sys.stderr.write(f"{text}\n")  # else the terminal would show nothing at all
    # Its closing would fail; and with a spider, older Scrapy ends with exit status 0.
    crawler.spider = None
    if (engine := engine_of(crawler)) is not None:
        engine.spider = None
    error.is_logged = True
    _log_only_news()
    raise error.with_traceback(None) from None


@functools.cache
def _log_only_news() -> None:
    """Keep the event loops of this process from logging an error again that `is_logged`."""
    for name in ("asyncio", "twisted"):
        logging.getLogger(name).addFilter(_OnlyNews())
    # Until somebody begins its logging, which Scrapy does not, Twisted prints tracebacks itself.
    globalLogBeginner.beginLoggingTo([], redirectStandardIO=False)


class _OnlyNews(logging.Filter):
    """Drops log records that say no more than the error that was logged at the start."""

    _headline: logging.LogRecord | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        headline, self._headline = self._headline, None
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, BloomError) and error.is_logged:
            return False
        message = record.getMessage()
        if message.startswith("Unhandled error in Deferred"):
            self._headline = record  # of the next record: dropped or logged with it
            return False
        if headline is not None:
            logging.getLogger(headline.name).callHandlers(headline)
        # What an engine leaves that was built and never started.
        return not message.startswith("Unclosed client session")

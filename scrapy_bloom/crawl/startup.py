"""Start a crawl: the backend that the settings ask for, and errors in one line."""

import contextlib
import functools
import logging
import os
import re
import sys
from pathlib import Path
from typing import NoReturn, TypeAlias

from scrapy.core.scheduler import Scheduler
from scrapy.crawler import Crawler
from scrapy.utils.job import job_dir
from scrapy.utils.misc import load_object
from scrapy.utils.python import global_object_name
from twisted.logger import globalLogBeginner

from scrapy_bloom.crawl.engine import command_without_crawl, engine_of
from scrapy_bloom.exceptions import BloomError, SettingError, StorageError
from scrapy_bloom.generations.memory import MemoryBackend
from scrapy_bloom.generations.policy import Origin
from scrapy_bloom.job.filter import LocalBackend
from scrapy_bloom.queues.sqlite_queue import check_no_database
from scrapy_bloom.redis.backend import RedisBackend
from scrapy_bloom.settings import BloomSettings
from scrapy_bloom.text import masked_url

logger = logging.getLogger(__name__)

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # as a Path has it, too; C:/ is none

Backend: TypeAlias = MemoryBackend | RedisBackend


def starts_crawl(crawler: Crawler) -> bool:
    """Return whether Scrapy's command is a crawl; raise a BloomError if it cannot use JOBDIR."""
    path = str(crawler.settings["JOBDIR"] or "")
    if _URL.match(path):
        with contextlib.suppress(OSError):
            os.removedirs(path)  # Scrapy has made it, empty, for its extensions
        raise SettingError(
            f"JOBDIR is {masked_url(path)}, which is a URL and not a directory; set "
            "BLOOM_REDIS_URL to the URL of a server, and JOBDIR to a directory or nothing. If the "
            "URL has a password, replace it, because Scrapy has logged JOBDIR as it is"
        )
    command = command_without_crawl(crawler)
    if command and path:
        raise StorageError(
            f"scrapy {command} does not work with a job directory, because it would take requests "
            f"of the job, and this project has JOBDIR = {path!r}; start it with -s JOBDIR="
        )
    return command is None


def create_backend(crawler: Crawler, settings: BloomSettings) -> Backend:
    """Build the backend that the settings ask for, not opened yet; raise a BloomError."""
    path = job_dir(crawler.settings)
    job_path = Path(path).absolute() if path else None
    # For issubclass(), every class with the methods of a scheduler is a subclass.
    is_scrapys = Scheduler in getattr(load_object(crawler.settings["SCHEDULER"]), "__mro__", ())
    spider = getattr(crawler.spider or crawler.spidercls, "name", "")
    fingerprinter = global_object_name(type(crawler.request_fingerprinter))
    origin = Origin(fingerprinter=fingerprinter, spider=spider)
    if settings.is_in_redis:
        if job_path is not None and is_scrapys:  # a kill destroys that queue
            raise SettingError(
                "BLOOM_REDIS_URL is set, but Scrapy's scheduler keeps its queue in the JOBDIR "
                f"({path}), and after a kill, the filter would report the lost requests as "
                'duplicates; set SCHEDULER = "scrapy_bloom.CrashSafeScheduler", which keeps the '
                "queue in Redis, too, or remove JOBDIR"
            )
        if job_path is not None and settings.is_crash_safe:
            check_no_database(job_path, in_redis=True)
        key = settings.redis_key % {"spider": spider}
        # With another queue, a server that loses both must be asked about each duplicate.
        mirror = settings.redis_mirror and (settings.is_crash_safe or is_scrapys)
        return RedisBackend(settings.redis_server(), key, settings.policy, origin, mirror=mirror)
    if "BLOOM_REDIS_KEY" in crawler.settings:
        logger.warning(
            "BLOOM_REDIS_KEY has no effect without BLOOM_REDIS_URL: the filter is in %s. Set "
            "BLOOM_REDIS_URL, or remove BLOOM_REDIS_KEY",
            job_path or "memory",
            extra={"spider": crawler.spider},
        )
    if job_path is None:
        return MemoryBackend(settings.policy, origin)
    if not settings.is_crash_safe:
        check_no_database(job_path)
    return LocalBackend(job_path, settings.policy, origin)


def log_and_raise(crawler: Crawler | None, error: BloomError) -> NoReturn:
    """Raise an error that prevents the crawl, after logging it as the last line of the log."""
    if error.is_logged:
        raise error
    logger.error("%s", error, extra={"spider": crawler and crawler.spider})
    if crawler is not None:
        if crawler.settings["LOG_FILE"] or not crawler.settings.getbool("LOG_ENABLED"):
            sys.stderr.write(f"{error}\n")  # otherwise the terminal would show nothing
        # Closing the spider would fail; and with a spider, Scrapy 2.14 ends with exit status 0.
        crawler.spider = None
        if (engine := engine_of(crawler)) is not None:
            engine.spider = None
    error.is_logged = True
    _drop_repeated_errors()
    raise error.with_traceback(None) from None


@functools.cache
def _drop_repeated_errors() -> None:
    """Keep the event loops of this process from logging an error again that `is_logged`."""
    for name in ("asyncio", "twisted"):
        logging.getLogger(name).addFilter(_is_not_repeated)
    # Twisted prints tracebacks itself until its logging begins, and Scrapy does not begin it.
    globalLogBeginner.beginLoggingTo([], redirectStandardIO=False)


def _is_not_repeated(record: logging.LogRecord) -> bool:
    """Return whether a log record does not repeat the error that prevented the crawl."""
    error = record.exc_info[1] if record.exc_info else None
    while error is not None:  # what Scrapy raises in its place has it as context
        if isinstance(error, BloomError) and error.is_logged:
            return False
        error = error.__context__
    # The record before the one with the error.
    return not record.getMessage().startswith("Unhandled error in Deferred")

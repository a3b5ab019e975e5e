"""Errors that end a crawl before it begins: one line, the last one of the log."""

import functools
import logging
import sys
from typing import NoReturn

from scrapy.crawler import Crawler
from twisted.logger import globalLogBeginner

from scrapy_bloom.crawl.engine import take_spider_away
from scrapy_bloom.exceptions import BloomError


def fail_at_the_start(crawler: Crawler, error: BloomError, logger: logging.Logger) -> NoReturn:
    """Log an error that ends the crawl before it begins, as the last line of the log; raise it.

    Scrapy would close the spider, which is not open yet, and bury the error under one of its own.
    The event loop would log a traceback.

    Args:
        crawler: the crawler that is being built.
        error: what is wrong, in one line.
        logger: that of the component that cannot be built.
    """
    logger.error("%s", error, extra={"spider": crawler.spider})
    if crawler.settings["LOG_FILE"] or not crawler.settings.getbool("LOG_ENABLED"):
        sys.stderr.write(f"{error}\n")  # or whoever started the crawl would see nothing at all
    take_spider_away(crawler)
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

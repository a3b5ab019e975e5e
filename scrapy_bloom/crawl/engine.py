"""Access to Scrapy's engine, across the versions of Scrapy."""

import asyncio
import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import scrapy
from scrapy import signals
from scrapy.crawler import Crawler
from scrapy.statscollectors import StatsCollector
from scrapy.utils.defer import deferred_from_coro
from scrapy.utils.reactor import is_reactor_installed
from twisted.logger import globalLogBeginner

from scrapy_bloom.exceptions import BloomError, SettingError

try:
    from scrapy.utils.asyncio import create_looping_call
except ImportError:  # Scrapy 2.13, which always has a reactor
    from twisted.internet import task

    create_looping_call = task.LoopingCall  # type: ignore[assignment]


@dataclass(frozen=True)
class Outlets:
    """Ways by which the parts of a filter reach their crawl: its stats, its log and its end.

    Attributes:
        stats: the crawler's.
        extra: for the log records.
        close_spider: closes the spider with the reason given.
    """

    stats: StatsCollector
    extra: Mapping[str, Any]
    close_spider: Callable[[str], None]


def command_without_crawl(crawler: Crawler) -> str | None:
    """Return the name of Scrapy's command if it is one that tries a page by hand; else None.

    Those commands put a `start()` of their own into the spider: `parse`, `fetch` (and so `view`),
    `check`, `bench`. The shell opens the filter, and never closes it: only there is an engine
    without `Crawler.crawl`. Whether it runs already does not matter, since the shell starts it in
    another thread.
    """
    module, _, command = getattr(crawler.spidercls.start, "__module__", "").rpartition(".")
    if module == "scrapy.commands":
        return command
    try:
        engine = crawler.engine
    except RuntimeError:  # Scrapy 2.19: not there yet
        return None
    return "shell" if engine is not None and not crawler.crawling else None


def wrap_methods(
    part: Any, wrappers: Mapping[str, Callable[..., Any]], feature: str, way_out: str
) -> None:
    """Have functions called in place of methods of the scraper or downloader of one crawl.

    Each is called with the method, and then the method's arguments.

    Raises:
        SettingError: this version of Scrapy works in another way. It says which feature does not
            work then, and the way out.
    """
    if missing := [name for name in wrappers if not hasattr(part, name)]:
        raise SettingError(
            f"{feature} with this version of Scrapy, {scrapy.__version__}, whose "
            f"{type(part).__name__} has no {' or '.join(missing)}; upgrade scrapy_bloom, or "
            f"{way_out}"
        )
    for name, wrapper in wrappers.items():
        setattr(part, name, functools.partial(wrapper, getattr(part, name)))


def close_spider_soon(crawler: Crawler, reason: str) -> None:
    """Close the spider once the request under way is in the queue, so that it is not lost.

    Args:
        crawler: the running crawler.
        reason: the finish_reason, for example "bloom_full".
    """

    def close() -> None:
        engine = crawler.engine
        if engine is None or crawler.spider is None or engine.spider is None:
            return
        if hasattr(engine, "close_spider_async"):
            deferred_from_coro(engine.close_spider_async(reason=reason))
        else:  # Scrapy 2.13
            engine.close_spider(crawler.spider, reason)

    call_soon(close)


def call_soon(function: Callable[[], object]) -> None:
    """Call a function from the event loop, with or without a Twisted reactor."""
    if is_reactor_installed():
        from twisted.internet import reactor  # noqa: PLC0415 - importing it earlier installs one

        cast("Any", reactor).callLater(0, function)
    else:
        asyncio.get_running_loop().call_soon(function)


def fail_at_the_start(crawler: Crawler, error: BloomError, logger: logging.Logger) -> NoReturn:
    """Log an error that ends the crawl before it begins, as the last line of the log; raise it.

    Scrapy would close the spider, which is not open yet, and bury the error under one of its own.
    The event loop would log a traceback of what is said here in one line.

    Args:
        crawler: the crawler that is being built.
        error: what is wrong, in one line.
        logger: the logger of the component that cannot be built.

    Raises:
        BloomError: the error.
    """
    logger.error("%s", error, extra={"spider": crawler.spider})
    if crawler.settings["LOG_FILE"] or not crawler.settings.getbool("LOG_ENABLED"):
        sys.stderr.write(f"{error}\n")  # or whoever started the crawl would see nothing at all
    # Older Scrapy ends with exit status 0 unless the crawler has no spider.
    crawler.spider = None
    with contextlib.suppress(RuntimeError):  # Scrapy 2.19: no engine yet
        if crawler.engine is not None:
            crawler.engine.spider = None
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
    """Drops what says no more than the error that was logged at the start."""

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


class Ticker:
    """Calls a function every so many seconds while the spider is open, with or without a reactor.

    Args:
        crawler: before its spider is opened. Its signals keep no reference to the ticker, so that
            something else must.
        secs: time between the calls, and before the first one; more than 0.
        function: it must not raise, or it is not called again.
    """

    def __init__(self, crawler: Crawler, secs: float, function: Callable[[], None]) -> None:
        self._secs = secs
        self._function = function
        self._loop: Any = None
        crawler.signals.connect(self._start, signals.spider_opened)
        crawler.signals.connect(self._stop, signals.spider_closed)

    def _start(self) -> None:
        # Not earlier: what it is made of depends on the event loop that is running.
        self._loop = create_looping_call(self._function)
        self._loop.start(self._secs, now=False)

    def _stop(self) -> None:
        if self._loop is not None and self._loop.running:
            self._loop.stop()

"""Scrapy's engine, across the versions of Scrapy: only this module touches its internals.

No signal of Scrapy says how a request ended, nor when all that it led to is stored: a download that
failed for good ends silently in an errback, or in a line of the log, and so does a response that
HttpErrorMiddleware has refused. But all that is not retried or redirected goes through three
methods of the scraper, and what replaces a request comes out of the downloader's `fetch`. These are
public methods of public attributes of the engine, in all versions from 2.13 on. So they are hooked,
in this crawl only. Middlewares would see the same, but would have to be put into the settings of
each project, and could not tell when the item pipelines are done.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, cast

import scrapy
from scrapy import Request, signals
from scrapy.crawler import Crawler
from scrapy.utils.defer import deferred_from_coro
from scrapy.utils.reactor import is_reactor_installed
from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from scrapy_bloom.exceptions import SettingError

try:
    from scrapy.utils.asyncio import create_looping_call
except ImportError:  # Scrapy 2.13, which always has a reactor
    from twisted.internet import task

    create_looping_call = task.LoopingCall  # type: ignore[assignment]


def command_without_crawl(crawler: Crawler) -> str | None:
    """Return the name of Scrapy's command if it is one that tries a page by hand; else None.

    `parse`, `fetch` (and so `view`), `check` and `bench` put a `start()` of their own into the
    spider. The shell has an engine without `Crawler.crawl`.
    """
    module, _, command = getattr(crawler.spidercls.start, "__module__", "").rpartition(".")
    if module == "scrapy.commands":
        return command
    return "shell" if _engine(crawler) is not None and not crawler.crawling else None


def _engine(crawler: Crawler) -> Any:
    """Return a crawler's engine, None if there is none yet."""
    try:
        return crawler.engine
    except RuntimeError:  # Scrapy 2.19
        return None


class _Hook:
    """Stands in for a method of one crawl's scraper or downloader, and tells its listeners."""

    def __init__(self, method: Callable[..., Any], wrapper: Callable[..., Any]) -> None:
        self.method = method
        self.listeners: list[Callable[..., Any]] = []
        self._wrapper = wrapper

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._wrapper(self, *args, **options)

    def tell(self, *args: Any) -> list[Any]:
        return [listener(*args) for listener in self.listeners]

    @contextlib.contextmanager
    def errors_told(self, request: Request) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.tell(request, error)
            raise


def _scrape(hook: _Hook, result: Any, request: Request, *args: Any) -> Any:
    ends = hook.tell(request, result)
    scraped = hook.method(result, request, *args)
    for end in ends:
        scraped.addBoth(_passed_on, end)
    return scraped


def _passed_on(result: Any, end: Callable[[Any], None]) -> Any:
    end(result)
    return result


async def _call_spider(hook: _Hook, result: Any, request: Request) -> Any:
    if isinstance(result, Failure):  # of the download, or of a spider middleware's input
        hook.tell(request, result.value)
    # Errors are seen here, too: a spider middleware may swallow them.
    with hook.errors_told(request):
        output = await hook.method(result, request)
    watch = _watched_async if hasattr(output, "__aiter__") else _watched
    return watch(hook, output, request)


def _watched(hook: _Hook, output: Any, request: Request) -> Iterator[Any]:
    with hook.errors_told(request):
        yield from output


async def _watched_async(hook: _Hook, output: Any, request: Request) -> AsyncIterator[Any]:
    with hook.errors_told(request):
        async for each in output:
            yield each


def _spider_error(hook: _Hook, failure: Failure, request: Request, *args: Any) -> None:
    hook.tell(request, failure.value)
    hook.method(failure, request, *args)


def _fetch(hook: _Hook, request: Request, *args: Any) -> Any:
    fetched = hook.method(request, *args)
    if isinstance(fetched, Deferred):
        hook.tell(request, fetched)
    return fetched


_HOOKS = (  # what is told; the part of the engine, its method, and what stands in for that
    ("scraping", "scraper", "enqueue_scrape", _scrape),
    ("error", "scraper", "call_spider_async", _call_spider),
    ("error", "scraper", "handle_spider_error", _spider_error),
    ("fetching", "downloader", "fetch", _fetch),
)


def listen(engine: Any, feature: str, way_out: str, **listeners: Callable[..., Any]) -> None:
    """Have functions told what becomes of the requests of one crawl. They must not raise.

    Args:
        engine: the crawler's, before the first request.
        feature: what does not work without, for the message.
        way_out: what to do then.
        **listeners: any of these.
            scraping(request, result): a response or failure is about to be handled. Returns a
                function that is called, with a Failure or anything else, when the output of the
                callback or errback is consumed, and the items have passed the pipelines.
            error(request, error): an exception is on its way to the errback, or came out of the
                callback or errback; perhaps more than once.
            fetching(request, fetched): the downloader was given a request. The Deferred fires with
                a response, or with a request that is scheduled in its place (a retry, a redirect).

    Raises:
        SettingError: this version of Scrapy works in another way.
    """
    for event, part_name, method, wrapper in _HOOKS:
        if event not in listeners:
            continue
        part = getattr(engine, part_name)
        if not hasattr(part, method):
            raise SettingError(
                f"{feature} with this version of Scrapy, {scrapy.__version__}, whose "
                f"{type(part).__name__} has no {method}; upgrade scrapy_bloom, or {way_out}"
            )
        hook = getattr(part, method)
        if not isinstance(hook, _Hook):
            hook = _Hook(hook, wrapper)
            setattr(part, method, hook)
        hook.listeners.append(listeners[event])


def close_spider_soon(crawler: Crawler, reason: str) -> None:
    """Close the spider once the request under way is in the queue, so that none is lost."""

    def close() -> None:
        if not is_open(crawler):
            return
        engine: Any = crawler.engine
        if hasattr(engine, "close_spider_async"):
            deferred_from_coro(engine.close_spider_async(reason=reason))
        else:  # Scrapy 2.13
            engine.close_spider(crawler.spider, reason)

    call_soon(close)


def take_spider_away(crawler: Crawler) -> None:
    """Let a crawl that cannot begin end without its spider, whose closing would fail.

    Older Scrapy ends with exit status 0 unless the crawler has none.
    """
    crawler.spider = None
    if (engine := _engine(crawler)) is not None:
        engine.spider = None


def is_open(crawler: Crawler) -> bool:
    """Return whether a crawl has a spider that can be given requests, or closed."""
    engine = crawler.engine
    return engine is not None and crawler.spider is not None and engine.spider is not None


def schedule(crawler: Crawler, requests: Iterable[Request]) -> None:
    """Give requests to the scheduler."""
    for request in requests:
        crawler.engine.crawl(request)


def slots(crawler: Crawler) -> tuple[Callable[[Request], str], Callable[[str], int]]:
    """Return functions: the downloader's slot of a request, and how many downloads a slot has."""
    downloader: Any = crawler.engine.downloader
    running = downloader.slots

    def active(slot: str) -> int:
        return len(running[slot].active) if slot in running else 0

    return downloader.get_slot_key, active


def call_soon(function: Callable[[], object]) -> None:
    """Call a function from the event loop, with or without a Twisted reactor."""
    if is_reactor_installed():
        from twisted.internet import reactor  # noqa: PLC0415 - importing it earlier installs one

        cast("Any", reactor).callLater(0, function)
    else:
        asyncio.get_running_loop().call_soon(function)


class Ticker:
    """Calls a function every so many seconds while the spider is open, with or without a reactor.

    Args:
        crawler: before its spider is opened. Its signals keep no reference to the ticker.
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

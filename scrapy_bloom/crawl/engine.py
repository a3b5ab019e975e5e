"""Hook into Scrapy's engine, in all supported versions, and use its private attributes.

No signal of Scrapy says how a request ended, or when the requests that it led to are stored. But
every request that is not retried or redirected passes through methods of the scraper, and the
downloader's `fetch` returns the request that replaces another. So this module replaces these public
methods in the current crawl. (A middleware would have to be added to each project's settings, and
cannot tell when the item pipelines are done.) It also needs the output of `start()` and the slot of
the engine, which are private; no other module uses private attributes of Scrapy. Methods are
replaced before the first request, with a SettingError if this version of Scrapy lacks one.
"""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from time import monotonic
from typing import Any

import scrapy
from scrapy import Request
from scrapy.crawler import Crawler
from scrapy.utils.asyncgen import as_async_generator
from scrapy.utils.asyncio import call_later
from scrapy.utils.defer import deferred_from_coro, maybe_deferred_to_future
from scrapy.utils.reactor import CallLaterOnce, is_reactor_installed
from twisted.internet.defer import CancelledError, Deferred, DeferredLock, maybeDeferred
from twisted.python.failure import Failure

from scrapy_bloom.exceptions import SettingError

# The longest turn before the event loop runs. The number of steps is limited, too, because Scrapy
# may collect twice CONCURRENT_ITEMS requests in no time, and then schedule them all at once.
_TURN_SECS, _TURN_STEPS = 0.02, 50
START = "bloom_start"  # a key in the meta of start requests that are about to be scheduled

_Function = Callable[..., Any]
Drops = Callable[[Any], object]  # called with each element, which is left out if the result is true
# Awaited before each element but the first 50; if the result is False, the output ends there.
MayGoOn = Callable[[], Awaitable[bool]]
# Called with the output of a request, the request, and its response or failure, before the output
# is consumed; returns what is consumed in its place.
Watch = Callable[[Any, Request, Any], Any]


def command_without_crawl(crawler: Crawler) -> str | None:
    """Return the name of Scrapy's command if it is not a crawl, such as `shell`; None if it is."""
    # `parse`, `fetch`, `view`, `check` and `bench` replace the spider's `start()`. The shell has an
    # engine although nobody called `Crawler.crawl`.
    module, _, command = getattr(crawler.spidercls.start, "__module__", "").rpartition(".")
    if module == "scrapy.commands":
        return command
    return "shell" if engine_of(crawler) is not None and not crawler.crawling else None


def engine_of(crawler: Crawler) -> Any:
    """Return a crawler's engine; None if there is none yet."""
    try:
        return crawler.engine
    except RuntimeError:  # Scrapy 2.19
        return None


def _passed_on(result: Any, end: Callable[[Any], None]) -> Any:
    end(result)
    return result


@contextlib.contextmanager
def _reporting(on_error: _Function) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        on_error(error)
        raise


def _watched(output: Iterable[Any], on_error: _Function) -> Iterator[Any]:
    with _reporting(on_error):
        yield from output


async def _watched_async(output: AsyncIterator[Any], on_error: _Function) -> AsyncIterator[Any]:
    with _reporting(on_error):
        async for element in output:
            yield element


async def paced(output: Any, drops: Drops, may_go_on: MayGoOn | None = None) -> AsyncIterator[Any]:
    """Yield the output of a callback, an errback or start(), except what is dropped."""
    elements = output if isinstance(output, AsyncIterator) else as_async_generator(output)
    number = 0
    async for element in elements:
        if not drops(element):
            yield element
        number += 1  # the output of most callbacks is short enough to need no pause
        if number >= _TURN_STEPS and may_go_on is not None and not await may_go_on():
            return


def _replace(part: Any, name: str, replacement: _Function) -> None:
    """Call a function in place of a method, which is its first argument, followed by others."""
    setattr(part, name, functools.partial(replacement, _existing(part, name)))


def _existing(part: Any, name: str) -> Any:
    """Return an attribute of a part of Scrapy; raise a SettingError if this version lacks it."""
    if not hasattr(part, name):
        raise SettingError(
            f"This version of Scrapy, {scrapy.__version__}, has no {type(part).__name__}.{name}: "
            "install Scrapy 2.14 or later, upgrade scrapy_bloom, or remove CrashSafeScheduler from "
            "SCHEDULER"
        )
    return getattr(part, name)


# The functions that listen are called at events of the requests of one crawl, and must not raise.


def listen_to_scrapes(engine: Any, scraping: _Function) -> None:
    """Call `scraping` with a request and its response or failure, before they are handled.

    It returns a function that is called when the output is consumed, and the items have passed the
    pipelines.
    """

    def scrape(method: _Function, result: Any, request: Request, *args: Any) -> Any:
        end = scraping(request, result)
        return method(result, request, *args).addBoth(_passed_on, end)

    _replace(engine.scraper, "enqueue_scrape", scrape)


def listen_to_fetches(engine: Any, fetching: _Function) -> None:
    """Call `fetching` with a request that is about to be downloaded.

    It returns a function that is called with the response, the failure or the replacing request.
    """

    def fetch(method: _Function, request: Request, *args: Any) -> Any:
        end = fetching(request)
        return maybeDeferred(deferred_from_coro, method(request, *args)).addBoth(_passed_on, end)

    _replace(engine.downloader, "fetch", fetch)


def listen_to_errors(engine: Any, has_error: _Function) -> None:
    """Call `has_error`, perhaps repeatedly, with a request and what its download or code raised."""

    async def call_spider(method: _Function, result: Any, request: Request) -> Any:
        on_error = functools.partial(has_error, request)
        if isinstance(result, Failure):  # from the download, or from process_spider_input
            on_error(result.value)
        # A spider middleware may swallow an error, so that handle_spider_error never gets it.
        with _reporting(on_error):
            output = await method(result, request)
        watched = _watched_async if hasattr(output, "__aiter__") else _watched
        return watched(output, on_error)

    def handle(method: _Function, failure: Failure, request: Request, *args: Any) -> None:
        has_error(request, failure.value)
        method(failure, request, *args)

    _replace(engine.scraper, "call_spider_async", call_spider)
    _replace(engine.scraper, "handle_spider_error", handle)


def watch_callbacks(engine: Any, watch: Watch) -> None:
    """Watch the output of callbacks and errbacks before the spider middlewares get it."""

    async def call_spider(method: _Function, result: Any, request: Request) -> Any:
        return watch(await method(result, request), request, result)

    _replace(engine.scraper, "call_spider_async", call_spider)


def watch_scheduled(engine: Any, watch: Watch) -> None:
    """Watch their output after the spider middlewares: the objects that are to be scheduled."""

    def handle(method: _Function, output: Any, request: Request, result: Any, *args: Any) -> Any:
        return method(watch(output, request, result), request, result, *args)

    _replace(engine.scraper, "handle_spider_output_async", handle)


def watch_start(engine: Any, drops: Drops, may_go_on: MayGoOn | None = None) -> None:
    """Watch what start() yields, after the spider middlewares."""
    if (start := _existing(engine, "_start")) is not None:
        engine._start = paced(start, drops, may_go_on)  # noqa: SLF001 - no public attribute has it


def taking_turns(most_steps: float = _TURN_STEPS) -> MayGoOn:
    """Return a function to await between short steps, so that the event loop runs in between.

    After 20 ms or `most_steps` steps, the function waits until the event loop has run, which also
    runs between any two coroutines that wait. The result is always True.
    """
    lock = DeferredLock()
    ends_at, steps = 0.0, 0

    def next_turn() -> Deferred[None]:
        turn: Deferred[None] = Deferred()
        call_later(0, turn.callback, None)
        return turn

    async def give_way() -> bool:
        nonlocal ends_at, steps
        if steps >= most_steps or monotonic() >= ends_at:
            # Without asyncio, the engine logs a cancelled wait at its end.
            with contextlib.suppress(CancelledError):
                await maybe_deferred_to_future(lock.run(next_turn))
            ends_at, steps = monotonic() + _TURN_SECS, 0
        steps += 1
        return True

    return give_way


def hold_back(engine: Any, is_held_back: Callable[[], bool]) -> None:
    """Have the engine take no request, as if the downloader was full, while a function is true."""
    needs_backout = _existing(engine, "needs_backout")
    engine.needs_backout = lambda: needs_backout() or is_held_back()


def count_downloads_at_once(engine: Any) -> None:
    """Have the downloader count a download from when it leaves the queue of its slot.

    With asyncio, Scrapy counts it a turn later, and so may exceed the limit of the slot.
    """

    def wait_for_download(method: _Function, slot: Any, request: Request, *args: Any) -> Any:
        slot.transferring.add(request)
        return method(slot, request, *args)

    _replace(engine.downloader, "_wait_for_download", wait_for_download)


def replace_start(engine: Any, replacement: _Function) -> None:
    """Replace the spider's start(), after its middlewares, by another iterator, or by None."""
    engine._start = replacement(_existing(engine, "_start"))  # noqa: SLF001 - not public


def reads_start(engine: Any) -> bool:
    """Return whether the engine still consumes what start() yields."""
    return engine._start is not None  # noqa: SLF001 - no public attribute has it


def read_start_again(engine: Any, start: AsyncIterator[Any]) -> None:
    """Let the engine consume another iterator after start() has ended."""
    engine._start = start  # noqa: SLF001 - no public attribute has it

    async def read() -> None:
        while engine._start is start and engine.spider and engine.running:  # noqa: SLF001
            await engine._process_start_next()  # noqa: SLF001

    deferred_from_coro(read())


def listeners(crawler: Crawler, signal: object) -> list[Any]:
    """Return the functions and bound methods that are connected to a signal of a crawl."""
    from pydispatch import dispatcher  # type: ignore[import-untyped]  # noqa: PLC0415 - rarely needed

    receivers = dispatcher.getAllReceivers(crawler.signals.sender, signal)
    return list(dispatcher.liveReceivers(receivers))


def is_closing(engine: Any) -> bool:
    """Return whether the spider is closed, or about to be."""
    slot = engine._slot  # noqa: SLF001 - no public attribute has it
    return slot is None or slot.closing is not None


def is_filter(engine: Any, df: object) -> bool:
    """Return whether a scheduler still has a duplicate filter: a spider may have set another."""
    slot = engine._slot  # noqa: SLF001 - no public attribute has it
    return slot is not None and slot.scheduler.df is df


def ask_scheduler(engine: Any) -> None:
    """Make the engine ask the scheduler for requests soon, because there may be new ones."""
    if (slot := engine._slot) is not None:  # noqa: SLF001 - no public attribute has it
        slot.nextcall.schedule()


async def give_turn(engine: Any) -> None:
    """Wait until the engine has asked the scheduler for requests, unless it is paused."""
    if (slot := engine._slot) is not None:  # noqa: SLF001 - no public attribute has it
        slot.nextcall.schedule()
        with contextlib.suppress(CancelledError):
            await slot.nextcall.wait()


class Bell:
    """An event that several coroutines wait for, any number of times."""

    def __init__(self) -> None:
        self._waiting: list[Deferred[None]] = []

    async def wait(self, secs: float) -> None:
        """Wait until somebody calls `ring`, but at most `secs` seconds."""
        event: Deferred[None] = Deferred()
        self._waiting.append(event)
        timer = call_later(secs, self.ring)
        with contextlib.suppress(CancelledError):
            await maybe_deferred_to_future(event)
        timer.cancel()

    def ring(self) -> None:
        """Wake all coroutines that wait now."""
        waiting, self._waiting = self._waiting, []
        for event in waiting:
            if not event.called:
                event.callback(None)


def loop_caller() -> Callable[[Callable[[], object]], object]:
    """Return a function that any thread can use to call functions in this thread's event loop."""
    if is_reactor_installed():
        from twisted.internet import reactor  # noqa: PLC0415 - the import installs a reactor

        return reactor.callFromThread  # type: ignore[no-any-return]
    return asyncio.get_running_loop().call_soon_threadsafe


def close_spider_soon(crawler: Crawler, reason: str) -> None:
    """Close the spider in the next turn of the event loop, after the current request is queued."""
    CallLaterOnce(_close_spider, crawler, reason).schedule()


def _close_spider(crawler: Crawler, reason: str) -> None:
    if (engine := engine_of(crawler)) is not None and engine.spider is not None:
        deferred_from_coro(engine.close_spider_async(reason=reason))


# Scrapy's `is_start_request` does not tell what start() has yielded, because spiders copy the meta
# of a response to requests. Retries and redirects copy this mark; callbacks do not see it.


def mark(element: object) -> None:
    """Mark an element that start() has yielded, if it is a request."""
    if isinstance(element, Request):
        element.meta[START] = True


def unmark(request: Request, result: Any) -> Callable[[Any], None]:
    """Remove the mark of a request whose response or failure is about to be handled."""
    request.meta.pop(START, None)
    # A middleware may have assigned another request to the response.
    if (other := getattr(result, "request", None)) is not None:
        other.meta.pop(START, None)
    return lambda _: None

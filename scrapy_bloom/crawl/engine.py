"""Hook into Scrapy's engine, in all supported versions, and use its private attributes.

No signal of Scrapy says how a request ended, or when the requests that it led to are stored. (A
download that failed for good ends silently in an errback, or in a line of the log, and so does a
response that HttpErrorMiddleware has refused.) But every request that is not retried or redirected
passes through methods of the scraper, and the downloader's `fetch` returns the request that
replaces another. These are public methods of public attributes of the engine, so this module
replaces them in the current crawl. A middleware would see the same requests, but each project would
have to add it to its settings, and a middleware cannot tell when the item pipelines are done.
CrashSafeScheduler also needs private attributes of the engine: the output of `start()`, and its
slot. No other module uses private attributes of Scrapy. A function that replaces something is
called before the first request, and raises a SettingError if this version of Scrapy lacks it.
"""

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from time import monotonic
from typing import Any

import scrapy
from scrapy import Request
from scrapy.crawler import Crawler
from scrapy.http import Response
from scrapy.utils.asyncio import call_later
from scrapy.utils.defer import deferred_from_coro, maybe_deferred_to_future
from scrapy.utils.reactor import CallLaterOnce, is_reactor_installed
from twisted.internet.defer import CancelledError, Deferred
from twisted.python.failure import Failure

from scrapy_bloom.exceptions import SettingError

# The longest turn before the event loop runs. The number of steps is limited, too, because Scrapy
# may collect twice CONCURRENT_ITEMS requests in no time, and then schedule them all at once.
_TURN_SECS, _TURN_STEPS = 0.02, 50

_Function = Callable[..., Any]
Drops = Callable[[Any], object]  # called with each element, which is left out if the result is true
# Awaited before each element but the first 50; if the result is False, the output ends there.
MayGoOn = Callable[[], Awaitable[bool]]
# Called before the output of a request is consumed, with the request, and the response or failure;
# None: the output needs no watching.
Watch = Callable[[Request, Any], tuple[Drops, MayGoOn] | None]


def command_without_crawl(crawler: Crawler) -> str | None:
    """Return the name of Scrapy's command if it is not a crawl, such as `shell` or `fetch`.

    `parse`, `fetch` (and so `view`), `check` and `bench` replace the spider's `start()`. The shell
    has an engine although nobody called `Crawler.crawl`. Returns None for a crawl.
    """
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


# Each of these functions replaces a method of a crawl's scraper or downloader. It gets that method
# and a listener of `listen`, and then the arguments of a call.


def _scrape(
    method: _Function, scraping: _Function, result: Any, request: Request, *args: Any
) -> Any:
    end = scraping(request, result)
    return method(result, request, *args).addBoth(_passed_on, end)


def _passed_on(result: Any, end: Callable[[Any], None]) -> Any:
    end(result)
    return result


async def _call_spider(
    method: _Function, listener: _Function, result: Any, request: Request
) -> Any:
    if isinstance(result, Failure):  # from the download, or from process_spider_input
        listener(request, result.value)
    # A spider middleware may swallow an error, so that handle_spider_error never gets it.
    try:
        output = await method(result, request)
    except Exception as error:
        listener(request, error)
        raise
    if hasattr(output, "__aiter__"):
        return _AsyncWatched(listener, output, request)
    return _Watched(listener, output, request)


# These two are no generators, which end with the first exception: Scrapy continues after it.


class _Watched(Iterator[Any]):
    """The output of a callback or errback; a listener is told what it raises."""

    def __init__(self, listener: _Function, output: Any, request: Request) -> None:
        self._listener = listener
        self._output = iter(output)
        self._request = request

    def __next__(self) -> Any:
        try:
            return next(self._output)
        except StopIteration:
            raise
        except Exception as error:
            self._listener(self._request, error)
            raise


class _AsyncWatched(AsyncIterator[Any]):
    """The same for asynchronous output."""

    def __init__(self, listener: _Function, output: Any, request: Request) -> None:
        self._listener = listener
        self._output = aiter(output)
        self._request = request

    async def __anext__(self) -> Any:
        try:
            return await anext(self._output)
        except StopAsyncIteration:
            raise
        except Exception as error:
            self._listener(self._request, error)
            raise


def _spider_error(
    method: _Function, listener: _Function, failure: Failure, request: Request, *args: Any
) -> None:
    listener(request, failure.value)
    method(failure, request, *args)


def _fetch(method: _Function, fetching: _Function, request: Request, *args: Any) -> Any:
    end = fetching(request)
    fetched = method(request, *args)
    if isinstance(fetched, Deferred):
        return fetched.addBoth(_passed_on, end)
    if not isinstance(fetched, (Request, Response)):
        raise SettingError(
            f"The downloader's fetch() has returned a {type(fetched).__name__} instead of a "
            "Deferred, so that CrashSafeScheduler would not see the end of the download: remove "
            f"DOWNLOADER, or upgrade scrapy_bloom for Scrapy {scrapy.__version__}"
        )
    end(fetched)
    return fetched


class _Output(AsyncIterator[Any]):
    """The output of a callback, an errback or start(), of which some elements may be left out.

    The output of most callbacks is short enough to need no pause. A generator would not do, because
    it ends with the first exception, and Scrapy continues after an exception.
    """

    def __init__(self, output: Any, drops: Drops, may_go_on: MayGoOn) -> None:
        self._drops = drops
        self._may_go_on = may_go_on
        self._number = 0
        self._is_async = isinstance(output, AsyncIterator)
        self._output = output if self._is_async else iter(output)

    async def __anext__(self) -> Any:
        while True:
            self._number += 1
            if self._number > _TURN_STEPS and not await self._may_go_on():
                raise StopAsyncIteration
            if self._is_async:
                element = await anext(self._output)
            else:
                try:
                    element = next(self._output)
                except StopIteration:
                    raise StopAsyncIteration from None
            if not self._drops(element):
                return element


_HOOKS = (  # event, part of the engine, its method, and the function that replaces the method
    ("scraping", "scraper", "enqueue_scrape", _scrape),
    ("error", "scraper", "call_spider_async", _call_spider),
    ("error", "scraper", "handle_spider_error", _spider_error),
    ("fetching", "downloader", "fetch", _fetch),
)


def listen(engine: Any, **listeners: Callable[..., Any]) -> None:
    """Register functions that are called at events of the requests of one crawl.

    The functions must not raise. They are given by the name of the event:

    - scraping(request, result): Scrapy is about to handle a response or failure. Returns a
      function. Scrapy has consumed the output of the callback or errback, and the items have passed
      the pipelines, when that function is called with the result.
    - error(request, error): an exception is passed to the errback, or the callback or errback
      raised it; the function may be called more than once for one exception.
    - fetching(request): the downloader is about to get a request. Returns a function that is called
      with the response or failure, or with a request that the engine is about to schedule instead
      (a retry, a redirect).
    """
    for event, part_name, method, wrapper in _HOOKS:
        if event not in listeners:
            continue
        part = getattr(engine, part_name)
        wrapped = functools.partial(wrapper, _existing(part, method), listeners[event])
        setattr(part, method, wrapped)


def _existing(part: Any, name: str) -> Any:
    """Return an attribute of a part of Scrapy; raise a SettingError if this version lacks it."""
    if not hasattr(part, name):
        raise SettingError(
            f"This version of Scrapy, {scrapy.__version__}, has no {type(part).__name__}.{name}: "
            "install Scrapy 2.14 or later, upgrade scrapy_bloom, or remove CrashSafeScheduler from "
            "SCHEDULER"
        )
    return getattr(part, name)


def watch_callbacks(engine: Any, watch: Watch) -> None:
    """Watch the output of callbacks and errbacks before the spider middlewares get it."""
    method = _existing(engine.scraper, "call_spider_async")

    async def call_spider(result: Any, request: Request) -> Any:
        output = await method(result, request)
        watched = watch(request, result)
        return output if watched is None else _Output(output, *watched)

    engine.scraper.call_spider_async = call_spider


def watch_scheduled(engine: Any, watch: Watch) -> None:
    """Watch the output of callbacks and errbacks after the spider middlewares.

    Each request of the output is the object that is about to be scheduled.
    """
    method = _existing(engine.scraper, "handle_spider_output_async")

    def handle_output(output: Any, request: Request, result: Any, *args: Any) -> Any:
        if (watched := watch(request, result)) is not None:
            output = _Output(output, *watched)
        return method(output, request, result, *args)

    engine.scraper.handle_spider_output_async = handle_output


async def _always() -> bool:
    return True


def watch_start(engine: Any, drops: Drops, may_go_on: MayGoOn = _always) -> None:
    """Watch what start() yields, after the spider middlewares."""
    if (start := _existing(engine, "_start")) is not None:
        engine._start = _Output(start, drops, may_go_on)  # noqa: SLF001 - no public attribute has it


def taking_turns(most_steps: float = _TURN_STEPS) -> MayGoOn:
    """Return a function to await between short steps, so that the event loop runs in between.

    After 20 ms or `most_steps` steps, the function waits until the event loop has run. Coroutines
    that wait at the same time continue one after the other, and the event loop runs between them.
    The result of the function is always True.
    """
    waiting: deque[Deferred[None]] = deque()
    ends_at, steps = 0.0, 0

    def wake_next() -> None:
        turn = waiting.popleft()
        if waiting:
            call_later(0, wake_next)
        if not turn.called:
            turn.callback(None)

    async def give_way() -> bool:
        nonlocal ends_at, steps
        if steps >= most_steps or monotonic() >= ends_at:
            turn: Deferred[None] = Deferred()
            waiting.append(turn)
            if len(waiting) == 1:
                call_later(0, wake_next)
            # Without asyncio, the engine logs a cancelled wait at its end.
            with contextlib.suppress(CancelledError):
                await maybe_deferred_to_future(turn)
            ends_at, steps = monotonic() + _TURN_SECS, 0
        steps += 1
        return True

    return give_way


def hold_back(engine: Any, is_held_back: Callable[[], bool]) -> None:
    """Have the engine behave as if the downloader was full while a function returns True.

    The engine asks the scheduler for no request meanwhile, and a lazy start() waits.
    """
    needs_backout = _existing(engine, "needs_backout")
    engine.needs_backout = lambda: needs_backout() or is_held_back()


def count_downloads_at_once(engine: Any) -> None:
    """Have the downloader count a download from when it leaves the queue of its slot.

    With asyncio, Scrapy counts it a turn of the event loop later, and so may begin more downloads
    than the limit of the slot allows.
    """
    method = _existing(engine.downloader, "_wait_for_download")

    def wait_for_download(slot: Any, request: Request, *args: Any) -> Any:
        slot.transferring.add(request)
        return method(slot, request, *args)

    engine.downloader._wait_for_download = wait_for_download  # noqa: SLF001 - not public


def replace_start(
    engine: Any, replacement: Callable[[AsyncIterator[Any]], AsyncIterator[Any]]
) -> None:
    """Replace the spider's start(), after its middlewares, by another iterator.

    The spider is not idle before the iterator has ended.
    """
    engine._start = replacement(_existing(engine, "_start"))  # noqa: SLF001 - not public


async def nothing(_: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Replace start() by an iterator that yields nothing."""
    nothing_to_yield: tuple[Any, ...] = ()
    for element in nothing_to_yield:
        yield element


async def start_again(crawler: Crawler) -> AsyncIterator[Any]:
    """Call the spider's start() again, and return its requests after the spider middlewares."""
    engine: Any = crawler.engine
    middlewares = engine.scraper.spidermw
    started: AsyncIterator[Any] = await middlewares.process_start()
    return started


def reads_start(engine: Any) -> bool:
    """Return whether the engine still consumes what start() yields."""
    return engine._start is not None  # noqa: SLF001 - no public attribute has it


def read_start_again(
    engine: Any, start: AsyncIterator[Any], drops: Drops, may_go_on: MayGoOn
) -> None:
    """Let the engine consume another iterator after start() has ended, as `watch_start` does."""
    watched = _Output(start, drops, may_go_on)
    engine._start = watched  # noqa: SLF001 - no public attribute has it

    async def read() -> None:
        while engine._start is watched and engine.spider and engine.running:  # noqa: SLF001
            await engine._process_start_next()  # noqa: SLF001

    deferred_from_coro(read())


def listeners(crawler: Crawler, signal: object) -> list[Any]:
    """Return the functions and bound methods that are connected to a signal of a crawl."""
    from pydispatch import dispatcher  # type: ignore[import-untyped]  # noqa: PLC0415 - rarely needed

    found = dispatcher.getAllReceivers(crawler.signals.sender, signal)
    return list(dispatcher.liveReceivers(found))


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
    ask_scheduler(engine)
    if (slot := engine._slot) is not None:  # noqa: SLF001 - no public attribute has it
        with contextlib.suppress(CancelledError):  # without asyncio, the engine logs it at its end
            await slot.nextcall.wait()


class Bell:
    """An event that several coroutines wait for, any number of times."""

    def __init__(self) -> None:
        self._waiting: list[Deferred[None]] = []
        self._timer: Any = None

    async def wait(self, secs: float) -> None:
        """Wait until somebody calls `ring`, but at most `secs` seconds."""
        if not self._waiting:
            self._timer = call_later(secs, self.ring)
        event: Deferred[None] = Deferred()
        self._waiting.append(event)
        with contextlib.suppress(CancelledError):  # without asyncio, the engine logs it at its end
            await maybe_deferred_to_future(event)

    def ring(self) -> None:
        """Wake all coroutines that wait now."""
        if self._timer is not None:  # otherwise there would be a further timer after each call
            self._timer.cancel()
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
    if is_open(crawler):
        engine: Any = crawler.engine
        deferred_from_coro(engine.close_spider_async(reason=reason))


def is_open(crawler: Crawler) -> bool:
    """Return whether the crawl has an open spider."""
    engine = engine_of(crawler)
    return engine is not None and engine.spider is not None

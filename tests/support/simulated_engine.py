"""A stand-in of Scrapy's engine, with what CrashSafeScheduler uses of it."""

from collections.abc import AsyncIterator, Coroutine
from types import SimpleNamespace
from typing import Any

from scrapy import Request, signals
from scrapy.crawler import Crawler
from scrapy.downloadermiddlewares.redirect import RedirectMiddleware
from scrapy.downloadermiddlewares.retry import get_retry_request
from scrapy.exceptions import IgnoreRequest
from scrapy.http import Response
from scrapy.spidermiddlewares.httperror import HttpError
from scrapy.utils.reactor import CallLaterOnce
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.error import ConnectionLost
from twisted.python.failure import Failure

from scrapy_bloom.crawl.scheduler.scheduler import CrashSafeScheduler
from tests.support.simulated_site import SimSpider, page_of, url_of_page
from tests.support.simulated_time import KilledError


def failure(error: BaseException | None = None) -> Failure:
    """Return a failure with an error; None: with the one that is being handled."""
    return Failure(error)  # type: ignore[no-untyped-call]


class Engine:
    """What the package uses of Scrapy's engine, and of its scraper and downloader."""

    scheduler_cls = CrashSafeScheduler

    def __init__(self, worker: Any, crawler: Crawler) -> None:
        self.scraper: Any = self
        self.downloader: Any = self
        self.spidermw: Any = self
        self.spider = crawler.spider
        self.running = True
        self.active: set[Request] = set()
        self.slots: dict[str, Any] = {}
        self.scheduler: CrashSafeScheduler
        self._crawler = crawler
        self._worker = worker
        self._slot: Any = SimpleNamespace(
            closing=None, nextcall=CallLaterOnce(self._start_scheduled_requests)
        )
        self._in_progress = 0
        self._redirect = RedirectMiddleware.from_crawler(crawler)
        self._start: AsyncIterator[Any] | None = None

    # The engine.

    def open(self, scheduler: CrashSafeScheduler) -> None:
        assert isinstance(self.spider, SimSpider)
        self.scheduler, self._start = scheduler, self.spider.start()
        scheduler.open(self.spider)
        self._slot.scheduler = scheduler
        self._slot.nextcall.schedule()
        self._reading = self._begin(self._read_start())

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> Deferred[None]:
        return Deferred.fromCoroutine(coroutine).addErrback(self._note_failure)

    def _note_failure(self, noted: Failure) -> None:
        """Have the test show an error that does not belong to the site."""
        if not isinstance(noted.value, KilledError):
            self._worker.world.errors.append(noted.value)

    async def process_start(self) -> AsyncIterator[Any]:
        assert isinstance(self.spider, SimSpider)
        return self.spider.start()

    async def _read_start(self) -> None:
        try:
            while self._start and self.spider and self.running:
                await self._process_start_next()
                if not self.needs_backout():
                    self._slot.nextcall.schedule()
                    await self._slot.nextcall.wait()
        except CancelledError:
            pass

    async def _process_start_next(self) -> None:
        assert self._start is not None
        try:
            request = await anext(self._start)
        except Exception as error:  # noqa: BLE001 - as in Scrapy
            self._start = None
            if not isinstance(error, (StopAsyncIteration, ZeroDivisionError, CancelledError)):
                self._worker.world.errors.append(error)
        else:
            if self.spider:
                self.crawl(request)

    def needs_backout(self) -> bool:
        most = self._crawler.settings.getint("CONCURRENT_REQUESTS")
        return not self.running or bool(self._slot.closing) or len(self.active) >= most

    def crawl(self, request: Request) -> None:
        if self._slot is None:
            return
        self.scheduler.enqueue_request(request)
        self._slot.nextcall.schedule()

    def _start_scheduled_requests(self) -> None:
        if self._slot is None or self._slot.closing:
            return
        while not self.needs_backout():
            if (request := self.scheduler.next_request()) is None:
                break
            self._in_progress += 1
            fetched = self.downloader.fetch(request)
            fetched.addBoth(self._handle_result, request)
            fetched.addBoth(self._remove_request)
        is_busy = self._in_progress or self._start is not None
        if not (is_busy or self.scheduler.has_pending_requests()):
            self._begin(self.close_spider_async(reason="finished"))

    def _handle_result(self, result: Any, request: Request) -> Any:
        if isinstance(result, Request):
            return self.crawl(result)
        return self.scraper.enqueue_scrape(result, request)

    def _remove_request(self, result: Any) -> None:
        if isinstance(result, Failure):
            self._note_failure(result)
        self._in_progress -= 1
        self._slot.nextcall.schedule()
        self._fire_closing()

    def stop(self) -> None:
        """Close the spider, as after Ctrl-C."""
        self.running = False
        self._reading.cancel()
        self._begin(self.close_spider_async(reason="shutdown"))

    async def close_spider_async(self, *, reason: str) -> None:
        if self._slot is None or self._slot.closing:
            return
        closing: Deferred[None] = Deferred()
        self._slot.closing = closing
        self._fire_closing()
        await closing
        if (closed := self.scheduler.close(reason)) is not None:
            await closed
        self._slot = self.spider = None
        self._worker.reason = reason

    def _fire_closing(self) -> None:
        closing = self._slot.closing
        if closing and not self._in_progress and not closing.called:
            self._slot.nextcall.cancel()
            closing.callback(None)

    # The downloader.

    def get_slot_key(self, request: Request) -> str:
        return request.url.split("/")[2]

    def fetch(self, request: Request) -> Deferred[Any]:
        key = request.meta["download_slot"] = self.get_slot_key(request)
        empty = SimpleNamespace(active=set(), transferring=set(), queue=(), delay=0.0)
        slot = self.slots.setdefault(key, empty)
        self.active.add(request)
        slot.active.add(request)
        self._wait_for_download(slot, request)
        reached: Any = signals.request_reached_downloader
        self._crawler.signals.send_catch_log(reached, request=request, spider=self.spider)
        fetched: Deferred[Any] = Deferred()

        def end() -> None:
            result = self._download(request)
            slot.transferring.discard(request)
            left: Any = signals.request_left_downloader
            self._crawler.signals.send_catch_log(left, request=request, spider=self.spider)
            self.active.discard(request)
            slot.active.discard(request)
            fetched.callback(result)

        self._worker.loop.events.append(end)
        return fetched

    def _wait_for_download(self, slot: Any, request: Request) -> None:
        """Do nothing; the schedule says when the download ends."""

    def _download(self, request: Request) -> Response | Request | Failure:
        outcome = self._worker.world.visit(self._worker, page_of(request.url))
        assert self.spider is not None
        if isinstance(outcome, int):
            headers = {"Location": url_of_page(outcome)}
            response = Response(request.url, status=302, headers=headers, request=request)
            try:
                return self._redirect.process_response(request, response)
            except IgnoreRequest:
                return failure()
        if outcome in ("down", "503"):
            retry = get_retry_request(request, spider=self.spider, reason=outcome)
            if retry is not None:
                return retry
        if outcome == "down":
            return failure(ConnectionLost())
        status, flags = 503 if outcome == "503" else 200, ["raises"] * (outcome == "raises")
        return Response(request.url, status=status, request=request, flags=flags)

    # The scraper, which consumes the output of a callback as the schedule says.

    def enqueue_scrape(self, result: Any, request: Request) -> Deferred[None]:
        return Deferred.fromCoroutine(self._scrape(result, request))

    async def _scrape(self, result: Any, request: Request) -> None:
        passed = result
        if isinstance(result, Response) and result.status != 200:
            passed = failure(HttpError(result, "it is not allowed"))
        try:
            output = await self.scraper.call_spider_async(passed, request)
        except Exception as error:  # noqa: BLE001 - as in Scrapy
            if not isinstance(passed, Failure) or error is not passed.value:
                self.scraper.handle_spider_error(failure(), request, result)
        else:
            await self.scraper.handle_spider_output_async(output, request, result)

    async def call_spider_async(self, result: Any, request: Request) -> Any:
        await self._worker.loop.pause()
        if not isinstance(result, Failure):
            assert request.callback is not None
            return request.callback(result)
        result.request = request  # type: ignore[attr-defined]  # as Scrapy does
        assert request.errback is not None
        return request.errback(result)

    async def handle_spider_output_async(self, output: Any, request: Request, result: Any) -> None:
        while True:
            try:
                found = await anext(output)
            except StopAsyncIteration:
                return
            except Exception:  # noqa: BLE001 - as in Scrapy
                self.scraper.handle_spider_error(failure(), request, result)
                continue
            self.crawl(found)
            await self._worker.loop.pause()

    def handle_spider_error(self, error: Failure, request: Request, result: Any) -> None:
        """Do nothing; Scrapy logs the error."""

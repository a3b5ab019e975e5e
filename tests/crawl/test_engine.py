"""The functions that replace methods of Scrapy's engine."""

from types import SimpleNamespace

import pytest
from scrapy import Request
from scrapy.http import Response
from twisted.internet.defer import Deferred, succeed

from scrapy_bloom import SettingError
from scrapy_bloom.crawl import engine as engine_module
from scrapy_bloom.crawl.engine import Bell, listen

PAGE = Request("https://example.com/")


def engine(**methods: object) -> SimpleNamespace:
    return SimpleNamespace(
        scraper=SimpleNamespace(enqueue_scrape=lambda result, _: succeed(result)),
        downloader=SimpleNamespace(**methods),
    )


def test_the_first_listener_is_called_first() -> None:
    events: list[str] = []
    crawled = engine()

    def listener(name: str):
        def scraping(request: Request, result: object):
            assert request is PAGE
            events.append(f"{name}: {result}")
            return lambda result: events.append(f"{name}, done: {result}")

        return scraping

    listen(crawled, scraping=listener("first"))
    listen(crawled, scraping=listener("scheduler"))
    scraped = crawled.scraper.enqueue_scrape("response", PAGE)
    assert events == [
        "scheduler: response",
        "first: response",
        "first, done: response",
        "scheduler, done: response",
    ]
    assert scraped.result == "response"  # for Scrapy, as without us


def test_what_a_downloader_may_return() -> None:
    ends: list[object] = []
    later: Deferred[str] = Deferred()
    answers = [later, Response(PAGE.url), "a coroutine"]
    crawled = engine(fetch=lambda _: answers.pop(0))
    listen(crawled, fetching=lambda _: ends.append)
    assert crawled.downloader.fetch(PAGE) is later
    response = crawled.downloader.fetch(PAGE)
    later.callback("later")
    assert ends == [response, "later"]
    with pytest.raises(SettingError, match=r"fetch\(\) has returned a str instead of a Deferred"):
        crawled.downloader.fetch(PAGE)


def test_a_method_that_is_missing_is_named() -> None:
    with pytest.raises(SettingError, match=r"This version of Scrapy, .*, has no .*\.fetch: "):
        listen(engine(), fetching=lambda *_: None)


def test_a_bell_has_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits in a loop would otherwise leave a further timer after each ring."""
    timers: list[SimpleNamespace] = []

    def call_later(secs: float, function: object) -> SimpleNamespace:
        timers.append(timer := SimpleNamespace(is_active=True))
        timer.cancel = lambda: setattr(timer, "is_active", False)
        return timer

    monkeypatch.setattr(engine_module, "call_later", call_later)
    monkeypatch.setattr(engine_module, "maybe_deferred_to_future", lambda deferred: deferred)
    bell = Bell()

    async def wait() -> None:
        while True:
            await bell.wait(0.5)

    Deferred.fromCoroutine(wait())
    for _ in range(3):
        bell.ring()
    assert len(timers) == 4
    assert sum(timer.is_active for timer in timers) == 1

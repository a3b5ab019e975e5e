"""The functions that replace methods of Scrapy's engine."""

from types import SimpleNamespace

import pytest
from scrapy import Request
from scrapy.http import Response
from twisted.internet.defer import Deferred, succeed

from scrapy_bloom import SettingError
from scrapy_bloom.crawl.engine import listen

PAGE = Request("https://example.com/")


def engine(**methods: object) -> SimpleNamespace:
    return SimpleNamespace(
        scraper=SimpleNamespace(enqueue_scrape=lambda result, _: succeed(result)),
        downloader=SimpleNamespace(**methods),
    )


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

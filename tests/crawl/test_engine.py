"""The functions that replace methods of Scrapy's engine."""

from types import SimpleNamespace

import pytest

from scrapy_bloom import SettingError
from scrapy_bloom.crawl.engine import listen_to_fetches


def test_a_method_that_is_missing_is_named() -> None:
    engine = SimpleNamespace(scraper=SimpleNamespace(enqueue_scrape=bool), downloader=None)
    with pytest.raises(SettingError, match=r"This version of Scrapy, .*, has no .*\.fetch: "):
        listen_to_fetches(engine, lambda *_: None)

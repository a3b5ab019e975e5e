"""BloomDupeFilter through Scrapy's real scheduler."""

import logging
import os
from contextlib import contextmanager
from pathlib import Path

import pytest
from scrapy import Request, Spider
from scrapy.core.scheduler import Scheduler
from scrapy.dupefilters import RFPDupeFilter
from scrapy.utils.test import get_crawler

from scrapy_bloom import BloomDupeFilter
from tests.support.workspace import in_redis

pytestmark = pytest.mark.usefixtures("reactor")


@contextmanager
def opened(close: bool = True, **settings: object):
    """A scheduler with our filter, opened, as the engine does it."""
    scheduler = made(**settings)
    scheduler.open(scheduler.crawler.spider)
    yield scheduler
    if close:
        scheduler.close("finished")


def made(**settings: object) -> Scheduler:
    crawler = get_crawler(
        Spider,
        {
            "DUPEFILTER_CLASS": BloomDupeFilter,
            "TELNETCONSOLE_ENABLED": False,
            "REMOTE_CONTROL_ENABLED": False,
            # The default one asks a running engine about its downloader.
            "SCHEDULER_PRIORITY_QUEUE": "scrapy.pqueues.ScrapyPriorityQueue",
            **settings,
        },
    )
    crawler.spider = crawler._create_spider("docs")
    return Scheduler.from_crawler(crawler)


def requests(numbers: range) -> list[Request]:
    return [Request(f"https://example.com/{number}") for number in numbers]


def bloom_stats(scheduler: Scheduler) -> dict[str, object]:
    stats = scheduler.crawler.stats.get_stats()
    return {name: value for name, value in stats.items() if name.startswith(("bloom/", "dupe"))}


def test_filters_what_was_seen() -> None:
    with opened() as scheduler:
        assert scheduler.enqueue_request(Request("https://example.com/?a=1&b=2"))
        assert not scheduler.enqueue_request(Request("https://example.com/?b=2&a=1"))
        assert not scheduler.enqueue_request(Request("https://example.com/?a=1&b=2#top"))
        assert scheduler.enqueue_request(Request("https://example.com/?a=1&b=2", method="POST"))
        assert scheduler.enqueue_request(Request("https://example.com/?a=1&b=2", dont_filter=True))
        assert len(scheduler) == 3


def test_stats() -> None:
    with opened(BLOOM_EXPECTED_REQUESTS=5000) as scheduler:
        for request in [*requests(range(2500)), *requests(range(1000))]:
            scheduler.enqueue_request(request)
        live = bloom_stats(scheduler)
    assert live["bloom/added"] == 2000  # brought up to date every thousand requests
    final = bloom_stats(scheduler)
    assert final.pop("bloom/fill_ratio") == pytest.approx(0.150, abs=0.001)
    assert 0 < final.pop("bloom/error_rate") < 1e-9
    assert 0 < final.pop("bloom/expected_false_positives") < 1e-6
    assert final == {
        "bloom/added": 2500,
        "bloom/count": 2500,
        "bloom/capacity": 5000,
        "bloom/bytes": 32_768,
        "bloom/generations": 1,
        "dupefilter/filtered": 1000,
    }


def test_log_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="scrapy_bloom")
    for known in (0, 100):
        caplog.clear()
        with opened(JOBDIR=os.fspath(tmp_path)) as scheduler:
            for request in requests(range(known, known + 100)):
                scheduler.enqueue_request(request)
        first, last = (record.getMessage() for record in caplog.records)
        assert first == (
            f"Bloom filter in {tmp_path}/bloom.sqlite: {known} of 1,000,000 requests, 5.4 MiB"
        )
        assert last == (
            f"Bloom filter closed: 100 new, {known + 100} in all, "
            "expected false positives practically 0"
        )
        assert all(record.spider is scheduler.crawler.spider for record in caplog.records)


@pytest.mark.parametrize("debug", [False, True])
def test_duplicates_are_logged(debug: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Once, or each if that is asked for."""
    caplog.set_level(logging.DEBUG, logger="scrapy.dupefilters")
    with opened(DUPEFILTER_DEBUG=debug) as scheduler:
        for referer in ("https://a.com", "https://b.com", "https://c.com"):
            scheduler.enqueue_request(Request("https://example.com/", headers={"Referer": referer}))
        lines = [r.getMessage() for r in caplog.records if r.levelno == logging.DEBUG]
        assert bloom_stats(scheduler)["dupefilter/filtered"] == 2
    start = "Filtered duplicate request: <GET https://example.com/>"
    first = (
        f"{start} - no more duplicates will be shown (see DUPEFILTER_DEBUG to show all duplicates)"
    )
    each = [f"{start} (referer: https://{name}.com)" for name in "bc"]
    assert lines == (each if debug else [first])


def test_a_subclass_that_logs_duplicates_itself() -> None:
    """As one of Scrapy's own does, which has that attribute."""
    logged = []

    class Mine(BloomDupeFilter):
        def log(self, request: Request, spider: Spider) -> None:
            if self.debug:
                logged.append(request.url)

    with opened(DUPEFILTER_CLASS=Mine, DUPEFILTER_DEBUG=True) as scheduler:
        for _ in range(3):
            scheduler.enqueue_request(Request("https://example.com/"))
    assert logged == ["https://example.com/"] * 2


@pytest.mark.parametrize("place", ["memory", "valkey"])
def test_what_the_meta_of_one_request_changes(place: str, tmp_path: Path) -> None:
    variant = in_redis(os.fspath(tmp_path)) if place == "valkey" else {}
    page, listed = "https://example.com/list", {"bloom_record": False}
    other = "https://example.com/other"
    with opened(**variant) as scheduler:
        for _ in (1, 2):
            assert scheduler.enqueue_request(Request(page, meta=listed))
            assert scheduler.enqueue_request(Request(other, meta={"bloom_filter": False}))
        assert scheduler.enqueue_request(Request(page, meta={"bloom_record": True}))
        for again in (page, other):
            assert not scheduler.enqueue_request(Request(again, meta=listed))
            assert not scheduler.enqueue_request(Request(again, meta={"bloom_filter": True}))
            assert not scheduler.enqueue_request(Request(again))
    assert bloom_stats(scheduler)["bloom/added"] == 2


@pytest.mark.parametrize("reset", ["clear", "fingerprints"])
def test_a_reset_in_a_crawl(reset: str) -> None:
    """As for the next site, or with other cookies; Scrapy's filter gets a new set."""
    page = Request("https://example.com/")
    with opened() as scheduler:
        assert scheduler.enqueue_request(page)
        if reset == "clear":
            scheduler.df.clear()
        else:
            for wrong in (lambda df: len(df.fingerprints), lambda df: setattr(df, reset, set())):
                with pytest.raises(AttributeError, match="no set of fingerprints: set dont_filter"):
                    wrong(scheduler.df)
        assert scheduler.enqueue_request(page) is (reset == "clear")
        assert not scheduler.enqueue_request(page)


def test_no_reset_in_a_job(tmp_path: Path) -> None:
    """It would lose what an earlier run has recorded."""
    with opened(JOBDIR=os.fspath(tmp_path / "job")) as opened_one:
        assert opened_one.enqueue_request(Request("https://example.com/"))
        with pytest.raises(AttributeError, match="only for a filter in memory or Redis: set dont"):
            opened_one.df.clear()
        assert not opened_one.enqueue_request(Request("https://example.com/"))


def test_what_scrapys_filter_has() -> None:
    request, theirs = Request("https://example.com/?b=1&a=2"), made(DUPEFILTER_CLASS=RFPDupeFilter)
    with opened() as ours:
        assert type(ours.df.fingerprinter) is type(theirs.df.fingerprinter)
        assert ours.df.request_fingerprint(request) == theirs.df.request_fingerprint(request)


def test_an_error_of_a_subclass_releases_the_job(tmp_path: Path) -> None:
    class Fails(BloomDupeFilter):
        def __init__(self, **options: object) -> None:
            super().__init__(**options)
            raise ValueError("of the subclass")

    with pytest.raises(ValueError, match="of the subclass"):
        made(DUPEFILTER_CLASS=Fails, JOBDIR=os.fspath(tmp_path / "job"))
    with opened(JOBDIR=os.fspath(tmp_path / "job")) as scheduler:
        assert scheduler.enqueue_request(Request("https://example.com/"))

"""BLOOM_RECORD_ON = "crawled" without a crawl: requests are recorded when they were crawled."""

from pathlib import Path

from scrapy_bloom.generations.memory import RecordCrawled
from tests.support.local_filters import make


def opened(directory: Path) -> RecordCrawled:
    new = RecordCrawled(make(directory), make(None))
    new.begin()
    return new


def test_only_crawled_requests_are_recorded_for_later_runs(tmp_path: Path) -> None:
    crawl = opened(tmp_path)
    assert [crawl.add(each) for each in (b"crawled", b"queued", b"queued")] == [True, True, False]
    assert crawl.record(b"crawled")
    assert not crawl.record(b"crawled")
    assert [each in crawl for each in (b"crawled", b"queued", b"other")] == [True, True, False]
    assert crawl.scheduled == 2
    status = crawl.status()
    assert (status.count, status.error_rate) == (1, 2e-9)
    assert [each.count for each in status.volatile] == [2]
    crawl.close()
    crawl = opened(tmp_path)
    assert [crawl.add(each) for each in (b"crawled", b"queued")] == [False, True]
    crawl.close()


def test_forgotten_requests_are_new_once_in_each_run_until_they_were_crawled(
    tmp_path: Path,
) -> None:
    for _ in range(2):
        crawl = opened(tmp_path)
        crawl.add(b"page")
        crawl.record(b"page")
        crawl.forget([b"page"])
        assert b"page" not in crawl
        assert [crawl.add(b"page"), crawl.add(b"page")] == [True, False]
        assert b"page" in crawl
        crawl.close()
    crawl = opened(tmp_path)
    assert crawl.add(b"page")
    assert crawl.record(b"page")
    crawl.close()
    crawl = opened(tmp_path)
    assert not crawl.add(b"page")
    crawl.close()

"""A file that cannot grow, at each size that a crawl reaches: filter and queue stay complete."""

import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import pytest

from scrapy_bloom import StorageError
from scrapy_bloom.job.disk import log_and_index
from scrapy_bloom.job.reader import FilterReader
from scrapy_bloom.queues.store import State
from tests.support.backends import local_backend
from tests.support.local_filters import file_size_limit, fps
from tests.support.request_queues import SHOP, done, enter, page, take
from tests.support.stores import InFiles

BATCHES = 12
OPTIONS = {"capacity": 100_000, "error_rate": 1e-6}  # so that nearly each page has its own block


def grown(job: Path) -> int:
    """Return the size of the larger one of file and log."""
    path = job / "bloom.sqlite"
    return max(each.stat().st_size for each in (path, log_and_index(path)[0]) if each.exists())


def pages(batch: int) -> list[str]:
    return [f"{batch} {number}" for number in range(10)]


def crawl(files: InFiles, room: int) -> tuple[int, int]:
    """Crawl until the file cannot grow; return how many pages were queued, and how many left."""
    store = files.make()
    store.open(SHOP)
    entered = ended = 0
    with file_size_limit(grown(files.job) + room):
        with suppress(StorageError, sqlite3.Error):
            for batch in range(BATCHES):
                enter(store, *map(page, pages(batch)))
                entered += 10
                if batch % 4 == 3:
                    store._database.file._sync_all()
                taken = take(store)
                assert taken
                done(store, taken)
                ended += 1
        with suppress(StorageError):
            store.close()
    return entered, ended


def test_a_queue_has_what_the_filter_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the blocks, which are written after each fourth batch."""
    monkeypatch.setattr("scrapy_bloom.job.filter._LEAST_NEW", 10)
    reached = set()
    for room in range(0, 2_000_000, 40_000):
        files = InFiles(tmp_path / str(room), **OPTIONS, salt=bytes(16))
        files.open()
        files.close()
        entered, ended = crawl(files, room)
        reached.add(entered)
        store = files.open()
        counts = store.counts()
        left = counts[State.PENDING] + counts[State.IN_FLIGHT]
        assert left == entered - ended, room
        known = [store.knows(page(name).fingerprint) for b in range(BATCHES) for name in pages(b)]
        assert known == [True] * entered + [False] * (len(known) - entered), room
        files.close()
    assert len(reached) > 3
    assert max(reached) == BATCHES * 10


def test_under_scrapys_scheduler_the_filter_is_whole_or_set_aside(tmp_path: Path) -> None:
    whole = set()
    for room in range(0, 2_000_000, 40_000):
        job = tmp_path / str(room)
        local_backend(job, **OPTIONS).open()
        backend = local_backend(job, **OPTIONS)
        backend.open()
        backend.begin()
        with file_size_limit(grown(job) + room):
            backend.add_many(fps(120))
            with suppress(StorageError):
                backend.close()
        again = local_backend(job, **OPTIONS)
        again.open()
        again.close()
        with closing(FilterReader(job / "bloom.sqlite")) as reader:
            seen = reader.are_seen(fps(120))
        was_set_aside = bool([*job.glob("bloom.sqlite.set-aside-*")])
        assert seen == [not was_set_aside] * 120, room
        whole.add(not was_set_aside)
    assert whole == {True, False}

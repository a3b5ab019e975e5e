"""Time windows of a queue's filter: what begins a run, and that every worker begins it."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from scrapy_bloom.queues.store import Joining, Store
from tests.support.clock import Clock
from tests.support.request_queues import InRedis as Shared
from tests.support.request_queues import done, enter, page, replaced, taken
from tests.support.stores import InFiles, InRedis, Place

WINDOW = 1000.0


@pytest.fixture(params=["files", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "files":
        yield InFiles(tmp_path, window_secs=WINDOW)
        return
    place = InRedis()
    place.shared.window_secs = WINDOW
    yield place
    place.end()


def finds(store: Store, *names: str) -> list[bool]:
    """Crawl pages; return which are new."""
    queued = enter(store, *map(page, names))
    for _ in range(sum(queued)):
        done(store, taken(store))
    store.close()
    return queued


@pytest.mark.parametrize("run", ["monday", ""])
def test_a_process_that_continues_a_run_turns_and_expires_nothing(run: str, place: Place) -> None:
    store = place.open(Joining("shop", run))
    assert enter(store, page("a"), page("left")) == [True, True]
    done(store, taken(store))
    store.close()
    place.age(2 * WINDOW)
    store = place.open(Joining("shop", run))
    assert enter(store, page("a"), page("b")) == [False, True]
    place.die()
    place.age(2 * WINDOW)
    store = place.open(Joining("shop", run))
    assert enter(store, page("a"), page("b")) == [False, False]
    done(store, taken(store), taken(store))
    store.close()


def test_without_names_a_process_that_finds_nothing_left_begins_a_run(place: Place) -> None:
    assert finds(place.open(), "a") == [True]
    place.age(WINDOW / 2)
    assert finds(place.open(), "a", "b") == [False, True]
    place.age(WINDOW / 2)
    assert finds(place.open(), "a", "b") == [True, False]


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_redirect_and_its_page_expire_together(is_killed: bool, place: Place) -> None:
    """Though the redirected page was recorded in an earlier part; also that of a row that waits."""
    store = place.open(Joining("shop", "1"))
    enter(store, page("old"), page("waits"), page("page"))
    store.close()
    place.age(0.3 * WINDOW)
    store = place.open(Joining("shop", "2"))
    first, second = taken(store), taken(store)
    assert replaced(store, first, page("hop"))
    hop = taken(store)
    assert replaced(store, second, page("other hop"))
    assert not replaced(store, taken(store), page("hop"))
    assert done(store, hop).unfinished == 1
    if is_killed:
        place.die()
    else:
        store.close()
    place.age(0.9 * WINDOW)
    store = place.open(Joining("shop", "3"))
    names = ["old", "page", "hop", "waits", "other hop"]
    assert enter(store, *map(page, names)) == [True] + [False] * 4
    store.close()


def test_workers_that_begin_a_run_at_once_find_each_page_new_once(shared: Shared) -> None:
    shared.window_secs = WINDOW
    names = [f"page {number}" for number in range(10)]
    for night in range(8):
        workers = [shared.make() for _ in range(5)]
        barrier = threading.Barrier(len(workers))

        def begin(worker: Store) -> list[bool]:
            barrier.wait(60)  # noqa: B023 - each night waits for its workers
            worker.open(Joining("shop", f"{night}"))  # noqa: B023
            return enter(worker, *map(page, names))

        with ThreadPoolExecutor(len(workers)) as pool:
            found = list(pool.map(begin, workers))
        assert [sum(new) for new in zip(*found, strict=True)] == [1] * len(names)
        for _ in names:
            done(workers[0], taken(workers[0]))
        for worker in workers:
            worker.close()
        shared.age(WINDOW)


def test_where_the_workers_wait_for_requests_the_time_begins_runs(shared: Shared) -> None:
    shared.window_secs, shared.is_endless = WINDOW, True
    worker = shared.open()
    clock = worker._filter.now = Clock(worker._filter.now())
    found = []
    for _ in range(5):
        found += enter(worker, page("a"))
        clock.now += WINDOW / 3
    assert found == [True, False, False, True, False]

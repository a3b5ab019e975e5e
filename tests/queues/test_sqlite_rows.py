"""Rows of a job's database: slices, indexes, windows, copies. Their rules are the contract's."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from scrapy_bloom import StorageError
from scrapy_bloom.job.disk import log_and_index
from scrapy_bloom.job.jobdir import DATABASE
from scrapy_bloom.queues.sqlite_queue import SQLiteQueue, write_requests
from scrapy_bloom.queues.sqlite_store import SQLiteStore
from scrapy_bloom.queues.store import (
    Batch,
    End,
    Ended,
    Entered,
    Row,
    State,
    Store,
    Taken,
    packed_first,
)
from tests.support.request_queues import SHOP, done, enter, failed, names, page, replaced, taken
from tests.support.stores import InFiles

SLICE = 500


@pytest.fixture
def place() -> Iterator[InFiles]:
    place = InFiles(capacity=5000)
    yield place
    place.end()


def some_wait(store: Store, number: int) -> Taken:
    """Have rows wait for a page, which is in flight."""
    enter(store, page("target"))
    target = taken(store)
    enter(store, *(page(str(n), newest_first=False) for n in range(number)))
    while some := store.apply(Batch(want=50)).taken:
        redirects = [page("target")._replace(replaces=each.id) for each in some]
        assert not any(enter(store, *redirects))
    assert store.counts()[State.WAITING] == number
    return target


class TestSlices:
    def test_rows_that_wait_end_in_slices_also_after_a_kill(self, place: InFiles) -> None:
        store = place.open()
        assert done(store, some_wait(store, 1200)).left == 1
        assert store.counts()[State.WAITING] == 1200 - SLICE
        assert store.pending == 1
        place.die()
        store = place.open()
        assert place.opened.counts[State.WAITING] == 1200 - SLICE
        assert place.opened.retried == 0
        lefts = [store.apply(Batch()).left for _ in range(2)]
        assert (lefts, sum(store.counts().values())) == ([1, 0], 0)
        assert store.apply(Batch()).counters == (1201, 1201)
        place.close()

    def test_rows_whose_page_is_done_end_in_the_next_run_too(self, place: InFiles) -> None:
        store = place.open()
        done(store, some_wait(store, 1200))
        place.close()
        store = place.open(replace(SHOP, run="2"))
        lefts = [store.apply(Batch(want=50)).left for _ in range(2)]
        assert (lefts, store.counts()[State.WAITING]) == ([201, 0], 0)
        assert store.apply(Batch()).counters == (1201, 1201)
        place.close()

    def test_rows_are_tried_again_in_slices_in_the_order_of_their_ids(self, place: InFiles) -> None:
        store = place.open()
        failed(store, some_wait(store, 1200))
        assert store.apply(Batch()).left == 0
        place.close()
        store = place.open(replace(SHOP, run="2"))
        assert (place.opened.retried, store.pending) == (1201, 1201)
        numbers = []
        while place.store.counts()[State.PENDING] < 1201:
            reply = store.apply(Batch())
            assert reply.left == 1201
            numbers.append(reply.pending)
        assert numbers == [SLICE, 2 * SLICE, 1201]
        assert names(store, 4) == ["target", "0", "1", "2"]
        place.close()


def test_no_step_reads_all_rows(place: InFiles) -> None:
    """SQLite uses an index for each query, though most indexes have a condition."""
    store = place.open(by_slot=True)
    for start in range(0, 3000, 500):
        enter(store, *(page(f"page {start + n}", slot=str(n % 9)) for n in range(500)))
    steps: list[int] = []
    place.store._database._db.set_progress_handler(lambda: steps.append(1), 10)
    target, first, second, third, fourth = store.apply(Batch(want=5)).taken
    urls = [page("hop"), page("hop"), page("other hop")]
    requests = zip(urls, (target, first, second), strict=True)
    enter(store, *(each._replace(replaces=taken.id) for each, taken in requests))
    done(store, third)
    failed(store, fourth)
    enter(store, page("hop"), page("start", once=True, is_start=True))
    for _ in range(3):
        done(store, *store.apply(Batch(want=1)).taken)
    assert len(steps) < 300
    place.close()
    assert place.queue().move(State.FAILED, State.PENDING) == 1
    assert (place.queue().move(State.PENDING, None, "0") or 0) > 300


def test_a_large_request_is_not_written_again_when_it_is_taken(place: InFiles) -> None:
    store = place.open()
    enter(store, Entered(os.urandom(1_000_000)))
    log, _ = log_and_index(place.path)
    size = log.stat().st_size
    (request,) = store.apply(Batch(want=1)).taken
    assert log.stat().st_size < size + 100_000
    done(store, request)
    place.close()


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_redirect_and_its_page_expire_together(tmp_path: Path, *, is_killed: bool) -> None:
    """Though the redirected page was recorded in an earlier quarter of the window."""
    now = [1e9]
    place = InFiles(tmp_path / "job", window_secs=1000, clock=lambda: now[0])
    store = place.open(replace(SHOP, run="1"))
    enter(store, page("old"), page("page"))
    place.close()
    now[0] += 300
    store = place.open(replace(SHOP, run="2"))
    row = taken(store)
    assert replaced(store, row, page("hop"))
    assert done(store, taken(store)).left == 1
    if is_killed:
        place.die()
    else:
        place.close()
    now[0] += 1000
    store = place.open(replace(SHOP, run="3"))
    found = [store.knows(page(name).fingerprint or b"") for name in ("old", "page", "hop")]
    assert found == [False, True, True]
    place.close()


class TestCopies:
    @pytest.fixture
    def rows(self, place: InFiles) -> list[Row]:
        """Rows of each state, and of each kind."""
        store = place.open(by_slot=True)
        for _ in range(4):  # a dead one, and a suspect
            enter(store, page("dead", slot="b"))
            taken(store)
            place.die()
            store = place.open(by_slot=True)
        enter(store, page("start", once=True, is_start=True), page("target"), page("waits"))
        waits, target, start = store.apply(Batch(want=3)).taken
        assert replaced(store, target, page("hop", slot="a", priority=3, newest_first=False))
        assert not replaced(store, waits, page("hop"))
        failed(store, start, "\ud800 503")
        enter(store, page("unreadable"), page("unfiltered", is_filtered=False), page("pending"))
        *_, unreadable = store.apply(Batch(want=3)).taken
        store.apply(Batch(ended=[Ended(unreadable.id, End.UNREADABLE)]))
        enter(store, page("newest", slot="c"))
        place.close()
        return [row for state in State for row in place.queue().requests(state)]

    def test_they_have_all_columns(self, rows: list[Row], tmp_path: Path) -> None:
        copy = tmp_path / DATABASE
        assert write_requests(copy, reversed(rows)) == len(rows) > 6
        states = {row.state for row in rows}
        assert states == {*State} - {State.IN_FLIGHT, State.SUSPECT}
        copied = [row for state in State for row in SQLiteQueue(copy).requests(state)]
        assert copied == [replace(row, epoch=0) for row in rows]

    def test_they_are_crawled(self, rows: list[Row], tmp_path: Path) -> None:
        write_requests(tmp_path / DATABASE, rows)
        place = InFiles(tmp_path)
        store = place.open()
        assert place.opened.retried == 2
        store.apply(Batch(start_ended=True))
        assert enter(store, page("hop"), page("other")) == [False, True]  # the first one waits
        rest = {"hop", "waits", "start", "unreadable", "unfiltered", "pending", "newest", "other"}
        assert set(names(store, 20)) == rest
        assert store.counts()[State.WAITING] == 1
        place.close()

    def test_requests_in_flight_are_pending(self, rows: list[Row], tmp_path: Path) -> None:
        copy = tmp_path / DATABASE
        (hop,) = (row for row in rows if row.hops)
        assert write_requests(copy, [replace(hop, state=State.IN_FLIGHT)]) == 1
        assert [*SQLiteQueue(copy).requests(State.PENDING)] == [hop]

    def test_two_of_a_position_are_refused(self, rows: list[Row], tmp_path: Path) -> None:
        with pytest.raises(StorageError, match="cannot be used"):
            write_requests(tmp_path / DATABASE, [*rows, rows[0]])


class TestCommands:
    def test_a_failed_row_becomes_pending_as_it_first_entered(self, place: InFiles) -> None:
        store = place.open(by_slot=True)
        first = page("page", slot="a", priority=3, rank=1, newest_first=False)
        enter(store, first)
        assert replaced(store, taken(store), page("hop", slot="b", priority=-1))
        failed(store, taken(store))
        place.close()
        (row,) = place.queue().requests(State.FAILED)
        order = packed_first(first.order, first.data, newest_first=False)
        assert (row.slot, row.hops, row.first) == ("b", (page("hop").fingerprint,), order)
        assert place.queue().move(State.FAILED, State.PENDING) == 1
        (row,) = place.queue().requests(State.PENDING)
        assert (row.data, row.order, row.newest_first) == (first.data, first.order, False)
        assert (row.first, row.hops, row.reason, row.tries) == (b"", (), "", 0)
        place.close()

    def test_a_row_that_is_dropped_has_no_hops(self, place: InFiles) -> None:
        store = place.open()
        enter(store, page("page"))
        assert replaced(store, taken(store), page("hop"))
        place.close()
        assert place.queue().move(State.PENDING, None) == 1
        store = place.open()
        assert enter(store, page("hop")) == [True]
        assert place.store._database.counts.hops == 0
        place.close()


def test_a_store_without_a_filter(place: InFiles) -> None:
    store = SQLiteStore(place.path, None, by_slot=False)
    store.open(SHOP)
    reply = store.apply(Batch([page("a"), page("a")]))
    assert (reply.queued, reply.added) == ([True, True], 0)
    assert replaced(store, taken(store), page("b"))
    assert done(store, taken(store), taken(store)).left == 0
    store.close()


def test_a_command_begins_no_run_and_tries_nothing_again(place: InFiles) -> None:
    store = place.open(replace(SHOP, is_crawl=False))
    assert (place.opened.run, place.opened.began, store.run) == ("", False, b"")
    assert enter(store, page("a")) == [True]
    place.close()
    store = place.open(replace(SHOP, run="1"))
    assert (place.opened.began, place.opened.is_first) == (True, True)
    failed(store, taken(store))
    place.close()
    store = place.open(replace(SHOP, is_crawl=False))
    assert (place.opened.run, place.opened.began, place.opened.retried) == ("1", False, 0)
    assert store.apply(Batch()).left == 0
    place.close()

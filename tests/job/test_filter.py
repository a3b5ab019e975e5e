"""The filter in the file of a job has the bits that it would have in memory, whatever happens."""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from scrapy_bloom import StorageError
from scrapy_bloom.job import file as file_module
from scrapy_bloom.job.filter import LocalBackend, unpack_fingerprints
from scrapy_bloom.queues.sqlite_store import SQLiteStore
from scrapy_bloom.queues.store import Batch, Ended, Entered, Joining, Store
from tests.support.backends import local_backend
from tests.support.clock import Clock
from tests.support.local_filters import SALT, fps, make
from tests.support.stores import IN_MEMORY, InFiles

WINDOW = 1000.0
FILTER = {"capacity": 1000, "error_rate": 1e-9, "salt": SALT, "window_secs": WINDOW}


@pytest.fixture
def job() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as directory:
        yield Path(directory)


def in_file(store: SQLiteStore | LocalBackend, query: str) -> list[tuple[Any, ...]]:
    file = store._file if isinstance(store, LocalBackend) else store._database.file
    return file.execute(query).fetchall()


def record(store: Store, *numbers: int) -> list[bytes]:
    store.apply(Batch(recorded=(new := fps(*numbers))))
    return new


def all_known(store: Store, *numbers: int) -> bool:
    return all(map(store.knows, fps(*numbers)))


class Filters(RuleBasedStateMachine):
    """A job, and a filter in memory that records what the job has stored."""

    @initialize(capacity=st.sampled_from([1000, 50_000]))
    def begin(self, capacity: int) -> None:
        options = {**FILTER, "capacity": capacity}
        self.place = InFiles(**options, least_new=700)
        self.number = self.run = 0
        self.store = self.opened()
        assert self.store._backend
        clock = Clock(self.store._backend.live[0].first_run)
        self.model = local_backend(None, **options, clock=clock)
        self.model.open()
        self.begin_run()

    def opened(self, run: str = "") -> SQLiteStore:
        store = self.place.open(Joining("shop", run))
        assert isinstance(store, SQLiteStore)
        return store

    def begin_run(self) -> None:
        self.model.turn(self.store._database.figures.began)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.place.end()

    @rule(
        queued=st.integers(0, 5),
        recorded=st.sampled_from([0, 1, 300]),
        again=st.integers(0, 400),
        done=st.integers(0, 3),
        room=st.sampled_from([None, None, 0, 4]),
        times=st.integers(1, 6),
    )
    def batches(self, times: int, **options: Any) -> None:
        for _ in range(times):
            self.batch(**options)

    def batch(self, queued: int, recorded: int, again: int, done: int, room: int | None) -> None:
        """Store a batch, perhaps on a disk with room for so few pages."""
        first = max(0, self.number - again)
        new = fps(self.number, self.number + queued + recorded)
        old = fps(first, min(first + 5, self.number))
        entered = [Entered(bytes(3000), entry) for entry in new[:queued] + old]
        batch = Batch(entered, recorded=new[queued:], want=2)
        run = self.store._database.file.execute
        taken = run("SELECT id, takes FROM requests WHERE state = 1 LIMIT ?", (done,)).fetchall()
        batch.ended = [Ended(entry) for entry in taken]
        if room is not None:
            size = run("PRAGMA page_count").fetchone()[0] + room
            run(f"PRAGMA max_page_count = {size}")
        try:
            reply = self.store.apply(batch)
        except StorageError:
            assert room is not None
            reply = None
        finally:
            run(f"PRAGMA max_page_count = {2**30}")
        assert self.store._backend
        if self.store._backend.live[-1].number > self.model.live[-1].number:
            self.model.grow()
        if reply is None:
            return
        self.number += queued + recorded
        assert reply.queued == self.add_to_model(new[:queued] + old)
        assert all(self.add_to_model(new[queued:]))

    def add_to_model(self, fingerprints: Sequence[bytes]) -> list[bool]:
        is_new = [fingerprint not in self.model for fingerprint in fingerprints]
        for fingerprint, new in zip(fingerprints, is_new, strict=True):
            newest = self.model._newest
            newest.count += new and self.model._recorded.add(fingerprint, newest.filter)
        return is_new

    @rule()
    def write(self) -> None:
        self.store._database.file._sync_all()

    @rule(is_killed=st.booleans())
    def reopen(self, is_killed: bool) -> None:
        self.place.die() if is_killed else self.place.close()
        self.store = self.opened()
        self.begin_run()

    @rule(secs=st.sampled_from([10.0, 300.0, 600.0]), is_killed=st.booleans())
    def next_run(self, secs: float, is_killed: bool) -> None:
        self.place.die() if is_killed else self.place.close()
        self.place.age(secs)
        for generation in self.model.live:
            generation.first_run -= secs
            generation.last_run -= secs
        self.run += 1
        self.store = self.opened(f"run {self.run}")
        self.begin_run()

    @invariant()
    def same_bits(self) -> None:
        if not hasattr(self, "store"):
            return
        assert self.store._backend
        live, model = self.store._backend.live, self.model.live
        assert [*map(asdict, live)] == [*map(asdict, model)]
        for entry, other in zip(live, model, strict=True):
            blocks = (0, entry.geometry.num_blocks)
            assert entry.filter.blocks(*blocks) == other.filter.blocks(*blocks)
        query = "SELECT number, count FROM generations ORDER BY number"
        counts = self.store._database.file.execute(query).fetchall()
        assert counts == [(entry.number, entry.count) for entry in model]


@pytest.mark.parametrize("examples", [8, pytest.param(400, marks=pytest.mark.soak)])
def test_the_bits_are_those_of_a_filter_in_memory(examples: int) -> None:
    run_state_machine_as_test(
        Filters, settings=settings(max_examples=examples, stateful_step_count=20)
    )


# Replays.


def test_what_is_in_the_blocks_is_not_replayed(job: Path) -> None:
    """Also if each process is killed before it has recorded much."""
    place = InFiles(job, capacity=10_000, least_new=100)
    store, most = place.open(), 0
    for batch in range(50):
        if batch % 7 == 6:
            place.die()
            store = place.open()
        record(store, 10 * batch, 10 * batch + 10)
        assert isinstance(store, SQLiteStore)
        store._database.file._sync_all()
        ops = in_file(place.store, "SELECT fingerprints FROM ops")
        most = max(most, sum(len(unpack_fingerprints(data)) for (data,) in ops))
    assert most == 100 - 10
    place.die()
    assert all_known(place.open(), 500)
    place.close()


@pytest.mark.parametrize("blocks", [1000, 12_000])
def test_a_close_leaves_nothing_to_replay_unless_many_blocks_have_changed(
    blocks: int, job: Path
) -> None:
    place = InFiles(job, capacity=30_000_000)  # so that nearly each page has its own block
    record(place.open(), blocks)
    place.close()
    store = place.open()
    assert bool(in_file(place.store, "SELECT * FROM ops")) == (blocks > 8192)
    assert all_known(store, blocks)
    place.close()


@pytest.mark.parametrize("window_secs", [0.0, WINDOW])
def test_false_positives_after_growth_and_kills(window_secs: float, job: Path) -> None:
    rate, asked, number = 0.02, 20_000, 0
    options = {"error_rate": rate, "window_secs": window_secs, "least_new": 1500}
    place = InFiles(job, capacity=8000, **options)
    for run in range(30):
        store = place.open(Joining("shop", f"{run}"))
        for _ in range(5):
            number += len(record(store, number, number + 400))
        place.die() if run % 3 else place.close()
        place.age(WINDOW / 16)
    place.open()
    assert place.store._backend
    assert len(place.store._backend.live) >= 4
    false = sum(map(place.store.knows, fps(number, number + asked)))
    assert false < rate * asked + 4 * (rate * asked) ** 0.5
    assert window_secs or false > 0.5 * rate * asked
    place.close()


# Under Scrapy's scheduler.


def test_a_close_writes_all_blocks(job: Path) -> None:
    """However many have changed."""
    backend = make(job, capacity=30_000_000)
    assert backend.add_many(fps(12_000)) == 12_000
    backend.close()
    backend = make(job)
    assert backend.add_many(fps(12_000)) == 0
    backend.close()


def test_what_changes_while_the_thread_writes_is_written_again(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_module, "SYNC_SECS", 0.0)
    interval = sys.getswitchinterval()
    try:
        sys.setswitchinterval(1e-5)
        for first in range(0, 6000, 2000):  # each time, the filter is opened again
            backend = make(job, capacity=1000)
            assert backend.add_many(fps(first + 2000)) == 2000
            backend.close()
    finally:
        sys.setswitchinterval(interval)
    backend = make(job)
    assert all(entry in backend for entry in fps(6000))
    assert sum(entry.count for entry in backend.live) == 6000
    backend.close()

"""The database of a job against a plain model: batches, checkpoints, kills and closes."""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from scrapy_bloom.files.log import Change
from scrapy_bloom.queues.batch import Batch, Found, Taken
from scrapy_bloom.queues.job_state import read_counts, read_dead, read_recent
from scrapy_bloom.queues.sqlite import RequestDatabase
from tests.support.request_queues import begun, killed

FOUND = st.builds(
    Found,
    data=st.binary(max_size=5),
    fingerprint=st.none() | st.binary(min_size=1, max_size=3),
    slot=st.sampled_from("abc"),
    priority=st.integers(-2, 2),
    rank=st.integers(-1, 1),
    newest_first=st.booleans(),
    request=st.none(),
)
# The log does not store the generation of a change.
CHANGES = st.lists(st.builds(Change, st.booleans(), st.binary(max_size=3), st.none()))


@dataclass
class Row:
    found: Found
    place: tuple[int, int, int]
    state: str = "pending"
    deaths: int = 0


class Jobs(RuleBasedStateMachine):
    @initialize(by_slot=st.booleans())
    def begin(self, by_slot: bool) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.path = self.directory / "requests.sqlite"
        self.rows: dict[int, Row] = {}
        self.ops: list[tuple[int, list[Change]]] = []
        self.seq = self.applied = 0
        self.open(by_slot)

    def open(self, by_slot: bool) -> None:
        self.by_slot = by_slot
        self.database: RequestDatabase = begun(self.path, by_slot=by_slot)
        self.last_id = max(self.rows, default=0)
        self.last_slot, self.suspect = "", 0
        self.checkpointed = self.applied
        for row in self.rows.values():
            if row.state in {"in flight", "set aside"}:
                row.state = "suspect" if row.deaths >= 3 else "pending"
        assert self.database.resumed == len(self.of("pending")) + len(self.of("suspect"))

    def of(self, state: str) -> list[int]:
        return [number for number, row in self.rows.items() if row.state == state]

    def next(self) -> int | None:
        pending = self.of("pending")
        if self.by_slot and pending:
            slots = sorted({self.rows[number].found.slot for number in pending})
            after = [slot for slot in slots if slot > self.last_slot]
            self.last_slot = [*after, *slots][0]
            pending = [each for each in pending if self.rows[each].found.slot == self.last_slot]
        return min(pending, key=lambda number: self.rows[number].place, default=None)

    def stored(self, batch: Batch) -> None:
        for found in batch.found:
            self.last_id += 1
            position = -self.last_id if found.newest_first else self.last_id
            self.rows[self.last_id] = Row(found, (-found.priority, found.rank, position))
        for number in batch.done:
            del self.rows[number]
        self.seq += bool(batch)
        if batch.changes:
            self.ops.append((self.seq, list(batch.changes)))
        self.applied = self.checkpointed
        self.ops = [(seq, changes) for seq, changes in self.ops if seq > self.applied]

    def check(self, taken: Taken | None, number: int | None) -> None:
        if taken is None:
            assert number is None
            return
        assert taken[:2] == (number, self.rows[taken.id].found.data)
        self.rows[taken.id].state = "in flight"

    @rule(data=st.data(), found=st.lists(FOUND, max_size=4), changes=CHANGES, takes=st.booleans())
    def batch(
        self, data: st.DataObject, found: list[Found], changes: list[Change], takes: bool
    ) -> None:
        in_flight = self.of("in flight")
        done = data.draw(st.sets(st.sampled_from(in_flight))) if in_flight else set()
        batch = Batch(found, changes, sorted(done))
        if takes:
            taken = self.database.take(batch)
            self.stored(batch)
            self.check(taken, self.next())
        else:
            self.database.apply(batch)
            self.stored(batch)

    @rule(number=st.integers(1, 5))
    def take(self, number: int) -> None:
        for _ in range(number):
            taken = self.database.take(Batch())
            self.stored(Batch())
            self.check(taken, self.next())

    @precondition(lambda self: self.of("suspect"))
    @rule()
    def take_suspect(self) -> None:
        taken = self.database.take_suspect()
        self.stored(Batch())
        first = min(self.of("suspect"), key=lambda number: self.rows[number].place)
        self.check(taken, first)
        self.suspect = first

    @precondition(lambda self: self.of("in flight"))
    @rule(data=st.data())
    def set_aside(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.of("in flight")))
        self.database.set_aside(number)
        self.rows[number].state = "set aside"

    @rule(data=st.data())
    def checkpoint(self, data: st.DataObject) -> None:
        self.checkpointed = data.draw(st.integers(self.checkpointed, self.seq))
        self.database.sync()
        self.database.checkpointed(self.checkpointed)

    @rule(by_slot=st.booleans())
    def kill(self, by_slot: bool) -> None:
        killed(self.database)
        in_flight = self.of("in flight")
        died = [self.suspect] if self.suspect in in_flight else []
        for number in died or in_flight:
            self.rows[number].deaths += 1
            if died:
                self.rows[number].state = "dead"
        self.open(by_slot)
        assert self.database.was_killed
        assert self.database.were_in_flight == len(in_flight)
        assert self.database.died == [self.rows[number].found.data for number in died]

    @precondition(lambda self: self.of("pending") and not self.of("suspect"))
    @rule(number=st.integers(1, 2))
    def die_until_some_are_suspects(self, number: int) -> None:
        while self.of("pending") and not self.of("suspect"):
            self.take(number)
            self.kill(self.by_slot)

    @rule(by_slot=st.booleans())
    def close(self, by_slot: bool) -> None:
        self.database.close()
        self.stored(Batch())
        self.open(by_slot)
        assert not self.database.was_killed
        assert (self.database.were_in_flight, self.database.died) == (0, [])

    @invariant()
    def is_like_the_model(self) -> None:
        database = self.database
        assert (database.seq, database.applied) == (self.seq, self.applied)
        assert list(database.changes()) == self.ops
        assert read_recent(self.path) == [each for _, changes in self.ops for each in changes]
        pending, suspects = len(self.of("pending")), len(self.of("suspect"))
        assert (database.pending, database.suspects) == (pending, suspects)
        assert database.left == len(self.rows)
        waiting = pending + suspects + len(self.of("set aside"))
        assert read_counts(self.path) == (waiting, len(self.of("in flight")))
        assert read_dead(self.path) == [self.rows[each].found.data for each in self.of("dead")]
        fingerprints = [row.found.fingerprint for row in self.rows.values()]
        assert sorted(database.unfinished()) == sorted(each for each in fingerprints if each)

    def teardown(self) -> None:
        self.database.close()
        shutil.rmtree(self.directory)


@pytest.mark.parametrize("examples", [25, pytest.param(200, marks=pytest.mark.soak)])
def test_any_order_of_steps(examples: int) -> None:
    run_state_machine_as_test(
        Jobs, settings=settings(max_examples=examples, stateful_step_count=40, deadline=None)
    )

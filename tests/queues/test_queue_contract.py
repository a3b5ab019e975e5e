"""What every queue of CrashSafeScheduler does, in a file or on a server: order, kills, counts."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from crawls import SUPPORT
from redis_filters import PLACES
from request_queues import (
    InFile,
    InRedis,
    done,
    name_of,
    names,
    push,
    store_in,
    take,
    withdraw,
)
from scrapy_bloom.queues.batch import Batch, Found, serialized

Store = InFile | InRedis

SLOTS = ["", "\0", "a\0b", "a", "b.example", "\ud800", "ÿ", "\U0010ffff", "\x01", "x" * 10_000]


@pytest.fixture(params=["file", *PLACES])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    store = store_in(request.param, tmp_path)
    yield store
    store.end()


# Order.


def test_priorities_ranks_and_positions(store: Store) -> None:
    queue = store.open_store()
    push(queue, "start 1", rank=1, newest_first=False)
    push(queue, "start 2", rank=1, newest_first=False)
    for name in ("old", "new"):
        push(queue, name)
    push(queue, "before all others", rank=-128)
    push(queue, "after all others", rank=127)
    push(queue, "urgent", priority=5)
    push(queue, "late", priority=-5)
    order = ["urgent", "before all others", "new", "old", "start 1", "start 2", "after all others"]
    assert names(queue, 9) == [*order, "late"]


def test_newest_and_oldest_first_in_one_rank(store: Store) -> None:
    """As when a setting was changed between two runs: each kind keeps its order."""
    queue = store.open_store()
    for number in range(10):
        push(queue, str(number), newest_first=number % 2 == 0)
    order = [int(name) for name in names(queue, 11)]
    assert [number for number in order if number % 2 == 0] == [8, 6, 4, 2, 0]
    assert [number for number in order if number % 2] == [1, 3, 5, 7, 9]


def test_priorities_beyond_64_bits(store: Store) -> None:
    queue = store.open_store()
    for priority in (-(2**70), 0, 2**70):
        push(queue, str(priority), priority=priority)
    push(queue, "least", priority=-(2**63) + 2)
    push(queue, "most", priority=2**63 - 2)
    assert names(queue, 5) == [str(2**70), "most", "0", "least", str(-(2**70))]


def test_slots_take_turns(store: Store) -> None:
    """The next slot in the order of names that has the fewest downloads."""
    queue = store.open_store(by_slot=True)
    for number in range(3):
        for slot in "abc":
            push(queue, f"{slot}{number}", slot=slot, newest_first=False)
    downloads: dict[str, int] = defaultdict(int)
    order = []
    for _ in range(6):
        taken = take(queue, downloads.__getitem__)
        assert taken
        order.append(name_of(taken))
        downloads[order[-1][0]] += 1
    assert order == ["a0", "b0", "c0", "a1", "b1", "c1"]
    downloads.update(a=5, b=1, c=1)
    taken = take(queue, downloads.__getitem__)
    assert taken
    assert name_of(taken) == "b2"  # after c comes a, but that is busy


def test_priority_counts_within_a_slot_only(store: Store) -> None:
    queue = store.open_store(by_slot=True)
    push(queue, "a urgent", slot="a", priority=9)
    push(queue, "a more urgent", slot="a", priority=10)
    push(queue, "b late", slot="b", priority=-9)
    assert names(queue, 4) == ["a more urgent", "b late", "a urgent"]


def test_slots_of_any_name(store: Store) -> None:
    queue = store.open_store(by_slot=True)
    for number, slot in itertools.product(range(2), SLOTS):
        push(queue, f"{slot} {number}", slot=slot, newest_first=False)
    turns = [names(queue, len(SLOTS)) for _ in range(2)]
    assert sorted(map(sorted, turns)) == [sorted(f"{slot} {n}" for slot in SLOTS) for n in range(2)]
    assert take(queue) is None


def test_many_slots(store: Store) -> None:
    queue = store.open_store(by_slot=True)
    number = 10_000
    for each in range(number):
        push(queue, str(each), slot=f"{each % (number // 2)}.example", newest_first=False)
    assert queue.pending == number
    first = {int(name) for name in names(queue, 100)}
    assert len(first) == 100
    assert max(first) < number // 2  # of as many slots


class BothStores(RuleBasedStateMachine):
    """A queue in a file and one on a server: the same steps have the same answers."""

    @initialize(by_slot=st.booleans(), newest_first=st.sets(st.integers(-1, 1)))
    def begin(self, by_slot: bool, newest_first: set[int]) -> None:
        self.path = Path(tempfile.mkdtemp())
        self.by_slot, self.newest_first = by_slot, newest_first  # ranks of which the newest is
        self.stores = [store_in(place, self.path) for place in ("file", "valkey")]
        self.queues: list[Any] = [store.open_store(by_slot=by_slot) for store in self.stores]
        self.pushed = 0
        self.in_flight: list[list] = []

    @rule(
        slot=st.sampled_from("ab"),
        priority=st.integers(-2, 2),
        rank=st.integers(-1, 1),
        is_taken_back=st.booleans(),
    )
    def push(self, slot: str, priority: int, rank: int, is_taken_back: bool) -> None:
        self.pushed += 1
        for queue in self.queues:
            push(
                queue,
                str(self.pushed),
                slot=slot if self.by_slot else "",
                priority=priority,
                rank=rank,
                newest_first=rank in self.newest_first,
            )
            if is_taken_back:
                withdraw(queue)

    @rule()
    def take(self) -> None:
        self.queues[1].requests._look_again = 0
        both = [take(queue) for queue in self.queues]
        assert len({taken and name_of(taken) for taken in both}) == 1
        if both[0]:
            self.in_flight.append(both)

    @precondition(lambda self: self.in_flight)
    @rule()
    def done(self) -> None:
        for queue, taken in zip(self.queues, self.in_flight.pop(), strict=True):
            done(queue, taken)

    @invariant()
    def as_many_are_pending(self) -> None:
        assert self.queues[0].pending == self.queues[1].pending

    def teardown(self) -> None:
        for queue in self.queues:
            queue.close()
        pending, in_flight = self.stores[1].counts()
        assert self.stores[0].counts() == (pending, 0)
        assert in_flight == 0  # the close gives back
        for store in self.stores:
            store.end()
        shutil.rmtree(self.path)


TestBothStores = BothStores.TestCase
TestBothStores.settings = settings(max_examples=40, stateful_step_count=30)


# Pending, in flight, gone.


def test_what_was_in_flight_is_pending_again(store: Store) -> None:
    queue = store.open_store()
    for name in "abcd":
        push(queue, name)
    first, second = take(queue), take(queue)
    assert first
    assert second
    assert [name_of(each) for each in (first, second)] == ["d", "c"]
    assert store.counts() == (2, 2)
    push(queue, "e")
    withdraw(queue)
    done(queue, first)
    assert names(queue, 1) == ["b"]
    assert queue.pending == 1
    assert store.counts() == (1, 2)
    store.die(queue)
    store.bury()
    again = store.open_store(by_slot=True)  # the order may change between runs
    assert names(again, 4) == ["c", "b", "a"]
    assert take(again) is None


def test_it_is_as_it_was_after_a_kill(store: Store, tmp_path: Path) -> None:
    """Each change is stored before the call returns."""
    place = "file" if isinstance(store, InFile) else store.place
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from request_queues import *\n"
        "store = store_in(sys.argv[1], Path(sys.argv[2]), url=sys.argv[3])\n"
        "queue = store.open_store(by_slot=True)\n"
        "for n in range(500):\n"
        "    push(queue, str(n), newest_first=False)\n"
        "taken = [take(queue) for _ in range(10)]\n"
        "done(queue, taken[0])\n"
        "take(queue)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    url = "" if isinstance(store, InFile) else store.url
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    ended = subprocess.run(
        [sys.executable, "-c", script, place, tmp_path, url],
        timeout=60,
        check=False,
        env=environment,
    )
    assert ended.returncode == -signal.SIGKILL
    assert store.counts() == (489, 10)
    store.bury()
    queue = store.open_store(by_slot=True)
    assert names(queue, 500) == [str(n) for n in range(1, 500)]


def test_what_is_done_is_gone(store: Store) -> None:
    queue = store.open_store()
    for number in range(50):
        push(queue, str(number), newest_first=False)
    for number in range(50):
        taken = take(queue)
        assert taken
        assert name_of(taken) == str(number)
        done(queue, taken)
    assert take(queue) is None
    assert queue.pending == 0
    queue.close()
    assert store.counts() == (0, 0)
    assert take(store.open_store()) is None


def test_what_is_taken_back_was_never_there(store: Store) -> None:
    queue = store.open_store()
    push(queue, "a")
    push(queue, "b")
    withdraw(queue)
    push(queue, "c")
    assert queue.pending == 2
    assert names(queue, 3) == ["c", "a"]


def test_a_batch_is_stored_and_taken_from_in_one_step(store: Store) -> None:
    queue = store.open_store()
    batch = Batch([Found(serialized({"name": name}), newest_first=False) for name in "abc"])
    first = queue.take(batch, lambda _: 0)
    assert first
    assert name_of(first) == "a"
    assert store.counts() == (2, 1)
    batch = Batch([Found(serialized({"name": "urgent"}), priority=1)], done=[first.id])
    second = queue.take(batch, lambda _: 0)
    assert second
    assert name_of(second) == "urgent"
    assert queue.pending == 2
    assert store.counts() == (2, 1)
    queue.apply(Batch(done=[second.id]))
    assert names(queue, 3) == ["b", "c"]
    assert store.counts() == (0, 2)


def test_a_batch_of_many(store: Store) -> None:
    queue = store.open_store()
    found = [Found(serialized({"name": str(n)}), newest_first=False) for n in range(1000)]
    queue.apply(Batch(found))
    assert queue.pending == 1000
    taken = [take(queue) for _ in range(300)]
    assert [name_of(each) for each in taken] == [str(n) for n in range(300)]
    done(queue, *taken)
    assert names(queue, 1) == ["300"]
    assert store.counts() == (699, 1)


def test_what_is_set_aside_waits_for_a_later_run(store: Store) -> None:
    queue = store.open_store()
    push(queue, "gone callback")
    push(queue, "other")
    for name in ("other", "gone callback"):
        taken = take(queue)
        assert taken
        assert name_of(taken) == name
        if name == "other":
            done(queue, taken)
        else:
            queue.set_aside(taken.id)
    assert take(queue) is None
    assert queue.pending == 0
    queue.close()
    assert names(store.open_store(), 2) == ["gone callback"]


def test_a_row_is_true_and_its_own(store: Store) -> None:
    queue = store.open_store()
    for _ in range(20):
        push(queue, "same")
    rows = [taken.id for _ in range(20) if (taken := take(queue))]
    assert all(rows)
    assert len(set(rows)) == 20


def test_large_requests(store: Store) -> None:
    queue = store.open_store(by_slot=True)
    sizes = [0, 1, 2**16, 2**24]
    for size in sizes:
        data = bytes(range(256)) * (size // 256) + bytes(size % 256)
        queue.apply(Batch([Found(data, slot="a", newest_first=False)]))
    for size in sizes:
        taken = take(queue)
        assert taken
        assert len(taken.data) == size
        assert taken.data[:256] == bytes(range(256))[:size]
        done(queue, taken)
    assert take(queue) is None


def test_an_empty_queue(store: Store) -> None:
    queue = store.open_store(by_slot=True)
    assert (queue.pending, take(queue), store.counts()) == (0, None, (0, 0))
    queue.close()
    assert store.counts() == (0, 0)


def test_its_name_says_where_it_is(store: Store) -> None:
    name = store.open_store().name
    assert str(store.path if isinstance(store, InFile) else store.key) in name

"""What every queue of CrashSafeScheduler does, in a file or on a server: order, kills, counts."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
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
)

from scrapy_bloom.queues.batch import Batch, Found, Taken, serialized
from scrapy_bloom.queues.collected import SharedBatch
from scrapy_bloom.queues.shared import SharedStore
from tests.support.crawls import ROOT
from tests.support.redis_filters import PLACES
from tests.support.request_queues import (
    InFile,
    InRedis,
    done,
    find,
    name_of,
    names,
    push,
    set_aside,
    take,
)

SLOTS = ["", "\0", "a\0b", "a", "b.example", "\ud800", "ÿ", "\U0010ffff", "\x01", "x" * 10_000]


@pytest.fixture(params=["file", *PLACES])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[InFile | InRedis]:
    place = request.param
    store = InFile(tmp_path) if place == "file" else InRedis(place, str(tmp_path))
    yield store
    store.end()


# Order.


def test_priorities_ranks_and_positions(store: InFile | InRedis) -> None:
    queue = store.open()
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


def test_priorities_beyond_64_bits(store: InFile | InRedis) -> None:
    queue = store.open()
    for priority in (-(2**70), 0, 2**70):
        push(queue, str(priority), priority=priority)
    push(queue, "least", priority=-(2**63) + 2)
    push(queue, "most", priority=2**63 - 2)
    assert names(queue, 5) == [str(2**70), "most", "0", "least", str(-(2**70))]


def test_slots_are_served_round_robin(store: InFile | InRedis) -> None:
    """The next slot in the order of names that has the fewest downloads."""
    queue = store.open(by_slot=True)
    for number in range(3):
        for slot in "abc":
            push(queue, f"{slot}{number}", slot=slot, newest_first=False)
    downloads: Counter[str] = Counter()
    order = []
    for _ in range(6):
        taken = take(queue, downloads)
        assert taken
        order.append(name_of(taken))
        downloads[order[-1][0]] += 1
    assert order == ["a0", "b0", "c0", "a1", "b1", "c1"]
    downloads.update(a=5, b=1, c=1)
    taken = take(queue, downloads)
    assert taken
    assert name_of(taken) == "b2"  # after c comes a, but that is busy


def test_slots_of_any_name(store: InFile | InRedis) -> None:
    queue = store.open(by_slot=True)
    for number, slot in itertools.product(range(2), SLOTS):
        push(queue, f"{slot} {number}", slot=slot, newest_first=False)
    turns = [names(queue, len(SLOTS)) for _ in range(2)]
    assert sorted(map(sorted, turns)) == [sorted(f"{slot} {n}" for slot in SLOTS) for n in range(2)]
    assert take(queue) is None


def test_many_slots(store: InFile | InRedis) -> None:
    queue = store.open(by_slot=True)
    slots, at_once = 5000, 500
    for start in range(0, 2 * slots, at_once):
        numbers = range(start, start + at_once)
        find(
            queue,
            *(
                Found(serialized({"name": str(n)}), slot=f"{n % slots}.org", newest_first=False)
                for n in numbers
            ),
        )
    assert queue.pending == 2 * slots
    first = {int(name) for name in names(queue, 100)}
    assert len(first) == 100
    assert max(first) < slots  # of as many slots


class BothStores(RuleBasedStateMachine):
    """A queue in a file and one on a server: the same steps have the same answers."""

    @initialize(by_slot=st.booleans(), newest_first=st.sets(st.integers(-1, 1)))
    def begin(self, by_slot: bool, newest_first: set[int]) -> None:
        self.path = Path(tempfile.mkdtemp())
        self.by_slot, self.newest_first = by_slot, newest_first  # ranks of which the newest is
        self.file, self.redis = InFile(self.path), InRedis("valkey", str(self.path))
        self.database, self.shared = (
            each.open(by_slot=by_slot) for each in (self.file, self.redis)
        )
        self.slots: dict[str, str] = {}
        self.in_flight: list[tuple[Taken, Taken]] = []

    @rule(slot=st.sampled_from("abc"), priority=st.integers(-2, 2), rank=st.integers(-1, 1))
    def push(self, slot: str, priority: int, rank: int) -> None:
        name = str(len(self.slots))
        self.slots[name] = slot
        for queue in (self.database, self.shared):
            push(
                queue,
                name,
                slot=slot if self.by_slot else "",
                priority=priority,
                rank=rank,
                newest_first=rank in self.newest_first,
            )

    @rule(want=st.integers(1, 5), downloads=st.lists(st.sampled_from("abc"), max_size=4))
    def take(self, want: int, downloads: list[str]) -> None:
        """Some with one batch are those that are taken one by one."""
        counts = Counter(downloads)
        several = self.shared.apply(SharedBatch(want=want, downloads=counts)).taken
        for each in several:
            taken = take(self.database, counts)
            assert taken
            assert name_of(taken) == name_of(each)
            self.in_flight.append((taken, each))
            counts[self.slot_of(taken)] += 1
        if len(several) < want:
            assert take(self.database, counts) is None

    def slot_of(self, taken: Taken) -> str:
        return self.slots[name_of(taken)] if self.by_slot else ""

    @precondition(lambda self: self.in_flight)
    @rule()
    def done(self) -> None:
        taken, same = self.in_flight.pop()
        done(self.database, taken)
        done(self.shared, same)

    @invariant()
    def as_many_are_pending(self) -> None:
        if hasattr(self, "path"):
            assert self.database.pending == self.shared.pending

    def teardown(self) -> None:
        if not hasattr(self, "path"):
            return
        assert self.file.counts() == self.redis.counts()
        self.file.leave(self.database)
        self.redis.leave(self.shared)
        assert self.redis.counts() == (sum(self.file.counts()), 0)
        for store in (self.file, self.redis):
            store.end()
        shutil.rmtree(self.path)


TestBothStores = BothStores.TestCase
TestBothStores.settings = settings(max_examples=40, stateful_step_count=30)


# Pending, in flight, gone.


def test_it_is_as_it_was_after_a_kill(store: InFile | InRedis, tmp_path: Path) -> None:
    """Each change is stored before the call returns."""
    place = "" if isinstance(store, InFile) else store.place
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from tests.support.request_queues import *\n"
        "place, path, url = sys.argv[1:]\n"
        "store = InRedis(place, path, url=url) if place else InFile(Path(path))\n"
        "queue = store.open(by_slot=True)\n"
        "for n in range(500):\n"
        "    push(queue, str(n), newest_first=False)\n"
        "taken = [take(queue) for _ in range(10)]\n"
        "done(queue, taken[0])\n"
        "take(queue)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    url = "" if isinstance(store, InFile) else store.url
    ended = subprocess.run(
        [sys.executable, "-c", script, place, tmp_path, url],
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )
    assert ended.returncode == -signal.SIGKILL
    assert store.counts() == (489, 10)
    if isinstance(store, InRedis):
        store.lapse_all()
    queue = store.open(by_slot=True)
    assert names(queue, 500) == [str(n) for n in range(1, 500)]


def test_what_is_found_and_done_is_stored_in_one_step(store: InFile | InRedis) -> None:
    queue = store.open()
    push(queue, "parent")
    parent = take(queue)
    assert parent
    found = [Found(serialized({"name": name}), newest_first=False) for name in "abc"]
    if isinstance(queue, SharedStore):
        taken = queue.apply(SharedBatch(found, done=[parent.id], want=1)).taken
    else:
        taken = [each] if (each := queue.take(Batch(found, done=[parent.id]))) else []
    assert [name_of(each) for each in taken] == ["a"]
    assert queue.pending == 2
    assert store.counts() == (2, 1)
    urgent = Found(serialized({"name": "urgent"}), priority=1)
    find(queue, urgent)
    done(queue, *taken)
    assert names(queue, 4) == ["urgent", "b", "c"]
    assert store.counts() == (0, 3)


def test_what_is_set_aside_waits_for_a_later_run(store: InFile | InRedis) -> None:
    queue = store.open()
    push(queue, "gone callback")
    push(queue, "other")
    for name in ("other", "gone callback"):
        taken = take(queue)
        assert taken
        assert name_of(taken) == name
        if name == "other":
            done(queue, taken)
        else:
            set_aside(queue, taken)
    assert take(queue) is None
    assert queue.pending == 0
    store.leave(queue)
    assert names(store.open(), 2) == ["gone callback"]


def test_large_requests(store: InFile | InRedis) -> None:
    queue = store.open(by_slot=True)
    sizes = [0, 1, 2**16, 2**24]
    for size in sizes:
        data = bytes(range(256)) * (size // 256) + bytes(size % 256)
        find(queue, Found(data, slot="a", newest_first=False))
    for size in sizes:
        taken = take(queue)
        assert taken
        assert len(taken.data) == size
        assert taken.data[:256] == bytes(range(256))[:size]
        done(queue, taken)
    assert take(queue) is None

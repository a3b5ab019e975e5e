"""When generations follow, turn and expire, over a store of the test's own."""

import logging
import math
from collections.abc import Callable

import pytest

from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.filters.sizing import choose_geometry
from scrapy_bloom.generations.lifecycle import LifeCycle, NoRoomError
from scrapy_bloom.generations.memory import Lookup, Recent
from scrapy_bloom.generations.policy import Generation, Policy, Size
from tests.support.clock import Clock

WINDOW = 400.0
SALT = bytes(16)


class Store:
    """Keeps generations in a list; the test says what `append` answers."""

    held_from = math.inf

    def __init__(self, policy: Policy, clock: Clock) -> None:
        self.clock = clock
        self.live: list[Generation] = []
        self.answers: list[bool | Exception] = []
        self.appended: list[tuple[Size, float, float]] = []
        self.planned: Callable[[], None] = lambda: None
        self.add(policy.first(), clock.now, policy.open_until(clock.now))

    def add(self, size: Size, created_at: float, open_until: float) -> None:
        number = self.live[-1].number + 1 if self.live else 1
        new = Generation.of(size, number, created_at, open_until=open_until)
        self.live.append(new)
        self.planned()

    def now(self) -> float:
        return self.clock.now

    def ends(self, newest: Generation) -> float:
        return newest.open_until

    def append(self, size: Size, created_at: float, open_until: float) -> bool:
        self.appended.append((size, created_at, open_until))
        answer = self.answers.pop(0) if self.answers else True
        if isinstance(answer, Exception):
            raise answer
        if answer:
            self.add(size, created_at, open_until)
        return answer

    def extend(self, open_until: float) -> None:
        self.live[-1].open_until = open_until
        self.planned()

    def expire(self, number: int) -> None:
        del self.live[:number]
        self.planned()


class Forgotten:
    """Notes how long ago what expires was forgotten."""

    def __init__(self) -> None:
        self.expired: list[float] = []

    def expire(self, secs: float) -> None:
        self.expired.append(secs)


def made(clock: Clock, **options: object) -> tuple[LifeCycle, Store, Forgotten]:
    policy = Policy(**{"expected": 100, "error_rate": 1e-3, **options})
    store, forgotten = Store(policy, clock), Forgotten()
    life = LifeCycle(policy, store, forgotten)
    store.planned = life.plan
    life.plan()
    return life, store, forgotten


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


class TestGrowth:
    def test_it_grows_when_it_is_full(self, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        life, store, _ = made(clock)
        assert not life.has_window
        assert (life.grow_at, life.due_at) == (100, math.inf)
        store.live[0].count = 99
        assert not life.is_full()
        store.live[0].count = 100
        assert life.is_full()
        clock.now += 5
        life.grow()
        assert store.appended == [
            (Policy(expected=100, error_rate=1e-3).next(store.live[:1]), 1005, 0)
        ]
        assert not life.is_full()
        assert life.grow_at == 200
        nbytes = store.live[-1].geometry.nbytes
        (told,) = caplog.messages
        assert told == (
            "The filter is full with 100 requests and grows: generation 2 has room for 200 more at "
            f"error rate 0.00025, in {nbytes:,} bytes"
        )
        life.grow()
        assert "with 100 requests and grows: generation 3 has room for 400 more" in caplog.text

    @pytest.mark.parametrize(("capacity", "more"), [(50, 1), (199, 1), (1000, 10)])
    def test_another_crawl_is_making_the_next_one(
        self, clock: Clock, capacity: int, more: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        life, store, _ = made(clock, expected=capacity)
        store.answers = [False]
        store.live[0].count = capacity + 3
        life.grow()
        assert life.grow_at == capacity + 3 + more
        status = life.status("here", store.live)
        assert (status.location, status.errors, status.failure) == ("here", 0, "")
        assert not caplog.records

    @pytest.mark.parametrize(("capacity", "more"), [(10, 1), (39, 1), (1000, 50)])
    def test_no_room(
        self, clock: Clock, capacity: int, more: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        life, store, _ = made(clock, expected=capacity)
        store.answers = [NoRoomError("no place"), NoRoomError("none still"), True, NoRoomError("x")]
        store.live[0].count = capacity
        life.grow()
        assert life.grow_at == capacity + more
        assert isinstance(life.grow_at, int)
        life.grow()
        status = life.status("here", store.live, errors=5, failure="other", more={"a": 1})
        assert (status.errors, status.failure) == (
            7,
            "the filter is full, and there is no room for more of it: none still",
        )
        assert status.more == {"a": 1}
        assert len(caplog.records) == 1  # once, until there is room again
        assert "No room for a new generation: no place. The crawl goes on" in caplog.text
        life.grow()
        life.grow()
        assert [each.levelno for each in caplog.records] == [
            logging.ERROR,
            logging.INFO,
            logging.ERROR,
        ]


class TestTurns:
    def test_a_quarter_follows_another(
        self, clock: Clock, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        life, store, forgotten = made(clock, window=WINDOW)
        assert life.has_window
        assert life.due_at == 1100
        store.live[0].count = 7
        clock.now = 1099.9
        life.turn()
        assert len(store.live) == 1
        clock.now = 1100.0
        life.turn()
        assert [each.open_until for each in store.live] == [1100, 1200]
        assert store.appended[0][0].capacity == 25
        (told,) = caplog.messages
        assert told == (
            "A quarter of the time window is over: generation 2 takes what is new, generation 1 "
            "with 7 requests counts until it expires"
        )
        assert life.due_at == 1200
        clock.now = 1200.0
        life.turn()
        clock.now = 1300.0
        life.turn()
        clock.now = 1400.0
        life.turn()
        assert life.due_at == 1500
        assert not forgotten.expired

    def test_a_window_of_a_second_is_one(self, clock: Clock) -> None:
        assert made(clock, window=1.0)[0].has_window
        assert made(clock, window=0.5)[0].due_at == 1000.125

    def test_a_quarter_has_room_for_what_came_in_the_last(self, clock: Clock) -> None:
        life, store, _ = made(clock, window=WINDOW)
        store.live[0].count = 25
        life.grow()
        store.live[1].count = 31
        clock.now = 1100.0
        life.turn()
        assert store.appended[1][0].capacity == 56

    def test_they_expire(self, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        life, store, forgotten = made(clock, window=WINDOW)
        for number in range(1, 6):
            store.live[-1].count = 1000 * number
            clock.now += 100.0
            life.turn()
        assert life.due_at == 1500.0
        caplog.clear()
        clock.now = 1500.5
        life.turn()
        assert [each.number for each in store.live] == [2, 3, 4, 5, 6]
        assert forgotten.expired == [2 * WINDOW]
        assert caplog.messages[-1] == (
            "1,000 requests recorded more than 400 seconds ago are forgotten: generation 1 expired"
        )
        clock.now = 1750.0
        life.turn()
        assert "5,000 requests" in caplog.messages[-1]
        assert "generation 2, 3 expired" in caplog.messages[-1]
        assert life.status("here", store.live).expired == 6000

    def test_there_is_no_room(self, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
        life, store, _ = made(clock, window=WINDOW)
        store.answers = [NoRoomError("full"), True, NoRoomError("full again")]
        clock.now = 1110.0
        life.turn()
        assert store.live[0].open_until == 1210.0
        assert life.due_at == 1110 + WINDOW / 100
        assert "remembered for longer than BLOOM_WINDOW_SECS" in caplog.text
        assert "No room for a new generation: full. Requests" in caplog.text
        clock.now = 1114.0
        life.turn()
        assert len(store.live) == 2
        caplog.clear()
        clock.now = 1300.0
        life.turn()
        assert "No room for a new generation: full again." in caplog.text

    def test_another_crawl_is_making_it(
        self, clock: Clock, caplog: pytest.LogCaptureFixture
    ) -> None:
        life, store, _ = made(clock, window=WINDOW)
        store.answers = [False]
        clock.now = 1100.0
        life.turn()
        assert store.live[0].open_until == 1100 + WINDOW / 100
        assert life.due_at == 1100 + WINDOW / 200
        assert not caplog.records

    def test_another_crawl_has_made_one_that_has_ended_too(self, clock: Clock) -> None:
        life, store, _ = made(clock, window=WINDOW)
        append = store.append

        def late(size: Size, created_at: float, open_until: float) -> bool:
            if len(store.live) == 1:
                store.add(size, 1100.0, 1200.0)
                return True
            return append(size, created_at, open_until)

        store.append = late  # type: ignore[method-assign]
        clock.now = 1250.0
        life.turn()
        assert [each.open_until for each in store.live] == [1100, 1200, 1350]


class TestLookup:
    def test_each_generation_is_asked_with_its_own_number_of_hashes(self) -> None:
        few, many, newest = (BloomFilter(100, rate, salt=SALT) for rate in (0.3, 1e-9, 1e-3))
        assert few.num_hashes < newest.num_hashes < many.num_hashes
        few.add(b"few")
        many.add(b"many")
        lookup = Lookup([few, many, newest])
        assert not lookup.add(b"few")
        assert not lookup.add(b"many")
        assert lookup.add(b"new")
        assert not lookup.add(b"new")
        alone = BloomFilter(100, 1e-3, salt=SALT)
        alone.add(b"new")
        assert newest.blocks(0, 1) == alone.blocks(0, 1)  # no bit more than its own
        assert all(each in lookup for each in (b"few", b"many", b"new"))
        assert b"other" not in lookup
        assert b"new" not in Lookup([few, many])

    def test_a_newest_one_with_most_hashes(self) -> None:
        few, newest = (BloomFilter(100, rate, salt=SALT) for rate in (0.3, 1e-9))
        few.add(b"few")
        lookup = Lookup([few, newest])
        assert not lookup.add(b"few")
        assert lookup.add(b"new")
        assert b"new" in newest
        assert choose_geometry(100, 1e-9) == newest.geometry

    def test_the_recent_ones_are_emptied_when_they_are_many(self) -> None:
        recent = Recent(3)
        for each in (b"a", b"b", b"c"):
            recent.add(each)
        assert recent == {b"a", b"b", b"c"}
        recent.add(b"d")
        assert recent == {b"d"}

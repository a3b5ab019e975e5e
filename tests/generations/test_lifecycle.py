"""When a filter grows, turns and expires, over a store of the test's own."""

import math

import pytest

from scrapy_bloom.generations.lifecycle import LifeCycle, NoRoomError
from scrapy_bloom.generations.policy import Generation, Policy, Size
from tests.support.clock import Clock

P = 1e-3
WINDOW = 1000.0
QUARTER = WINDOW / 4


class Store:
    """Generations that are only figures; the test says whether there is room for more."""

    def __init__(self, policy: Policy) -> None:
        self.now = Clock()
        self.kept_from = math.inf
        self.full_text = ""  # why there is no room
        self.is_busy = False  # whether another crawl is adding a generation
        first = Generation.of(
            policy.first(), 1, self.now(), open_until=policy.open_until(self.now())
        )
        self.live = [first]
        self.life = LifeCycle(policy, self)
        self.life.plan()

    def ends(self, newest: Generation) -> float:
        return newest.open_until

    def append(self, size: Size, created_at: float, open_until: float) -> bool:
        if self.full_text:
            raise NoRoomError(self.full_text)
        if self.is_busy:
            return False
        number = self.live[-1].number + 1
        self.live.append(Generation.of(size, number, created_at, open_until=open_until))
        self.life.plan()
        return True

    def extend(self, open_until: float) -> None:
        self.live[-1].open_until = open_until
        self.life.plan()

    def expire(self, number: int) -> None:
        del self.live[:number]
        self.life.plan()

    def fill(self) -> None:
        """Fill the newest generation."""
        self.live[-1].count = self.live[-1].capacity

    @property
    def numbers(self) -> list[int]:
        return [each.number for each in self.live]


def growing(capacity: int = 100) -> Store:
    return Store(Policy(expected=capacity, error_rate=P))


def turning(capacity: int = 400) -> Store:
    return Store(Policy(expected=capacity, error_rate=P, window=WINDOW))


class TestGrow:
    def test_each_full_generation_is_followed_by_one_of_twice_its_size(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO")
        store = growing()
        for _ in range(3):
            assert not store.life.is_full()
            store.fill()
            assert store.life.is_full()
            store.life.grow()
        assert [each.capacity for each in store.live] == [100, 200, 400, 800]
        assert store.life.grow_at == 800
        assert [text.partition(" at ")[0] for text in caplog.messages] == [
            f"The filter is full with {count} requests and grows: generation {number} has room for "
            f"{room} more"
            for count, number, room in ((100, 2, 200), (300, 3, 400), (700, 4, 800))
        ]

    @pytest.mark.parametrize(("capacity", "more"), [(1, 1), (10, 1), (250, 2), (1000, 10)])
    def test_while_another_crawl_adds_a_generation_the_next_attempt_is_soon(
        self, capacity: int, more: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO")
        store = growing(capacity)
        store.is_busy = True
        store.fill()
        store.life.grow()
        assert store.life.grow_at == capacity + more
        assert not store.life.is_full()
        assert (store.numbers, caplog.messages) == ([1], [])

    @pytest.mark.parametrize(("capacity", "more"), [(1, 1), (10, 1), (50, 2), (1000, 50)])
    def test_without_room_it_is_tried_again_after_some_more_requests(
        self, capacity: int, more: int
    ) -> None:
        store = growing(capacity)
        store.full_text = "the disk is full"
        store.fill()
        store.life.grow()
        assert store.life.grow_at == capacity + more
        assert store.numbers == [1]

    def test_that_there_is_no_room_is_logged_once_until_there_is_room(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        store = growing()
        for number in (1, 2):
            store.full_text = f"disk {number} is full"
            store.fill()
            store.life.grow()
            store.life.grow()
            store.full_text = ""
            store.life.grow()
        assert [text.partition(". ")[0] for text in caplog.messages] == [
            f"No room for a new generation: disk {number} is full" for number in (1, 2)
        ]
        status = store.life.status("here", store.live)
        assert status.errors == 4
        assert status.failure.endswith("no room for another generation: disk 2 is full")


class TestTurn:
    def test_a_window_of_less_than_a_second(self) -> None:
        store = Store(Policy(expected=100, error_rate=P, window=0.5))
        assert store.life.has_window
        assert store.life.due_at == store.now() + 0.125
        assert not growing().life.has_window

    def test_each_quarter_has_a_generation_with_room_for_as_many_requests(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO")
        store = turning()
        begun = store.now()
        store.fill()
        store.life.grow()
        caplog.clear()
        store.live[-1].count = 60  # 160 in this quarter, which grew within it
        assert [each.open_until for each in store.live] == [begun + QUARTER] * 2
        store.now.now += QUARTER - 1
        store.life.turn()
        assert store.numbers == [1, 2]
        store.now.now += 1
        store.life.turn()
        assert [each.capacity for each in store.live] == [100, 200, 160]
        assert store.live[-1].open_until == store.life.due_at == begun + 2 * QUARTER
        (text,) = caplog.messages
        assert "generation 3 records new requests, and generation 2 with 60 requests" in text

    def test_a_generation_of_a_crawl_that_runs_is_extended(self) -> None:
        store = turning()
        store.kept_from = 1
        store.live[-1].count = 1
        store.now.now += QUARTER
        store.life.turn()
        assert store.numbers == [1]
        assert store.live[-1].open_until == store.now() + QUARTER

    def test_generations_of_a_crawl_that_runs_do_not_expire(self) -> None:
        store = turning()
        for _ in range(2):
            store.live[-1].count = 1
            store.now.now += QUARTER
            store.life.turn()
        store.kept_from = 2
        store.now.now += 2 * WINDOW
        store.life.turn()
        assert store.numbers == [2, 3]

    def test_generations_expire_after_a_window(self, caplog: pytest.LogCaptureFixture) -> None:
        store = turning()
        store.live[-1].count = 7
        store.now.now += QUARTER
        store.life.turn()
        store.live[-1].count = 2
        store.now.now += WINDOW
        store.life.turn()
        assert store.numbers == [1, 2, 3]
        assert store.life.due_at == store.now()
        caplog.set_level("INFO")
        store.now.now += 1
        store.life.turn()
        assert store.numbers == [2, 3]
        assert store.life.status("here", store.live).expired == 7
        (text,) = caplog.messages
        assert text.startswith("7 requests recorded more than 1000 seconds ago have expired")
        store.now.now += WINDOW
        store.life.turn()
        assert store.life.status("here", store.live).expired == 9

    def test_without_room_the_quarter_is_extended_and_the_next_attempt_is_soon(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        store = turning()
        for number in (1, 2):
            store.live[-1].count = 1
            store.now.now += QUARTER
            store.full_text = f"disk {number} is full"
            store.life.turn()
            assert store.numbers == list(range(1, number + 1))
            assert store.live[-1].open_until == store.now() + QUARTER
            assert store.life.due_at == store.now() + WINDOW / 100
            store.now.now += WINDOW / 100
            store.life.turn()
            store.full_text = ""
            store.now.now += WINDOW / 100
            store.life.turn()
            assert store.numbers == list(range(1, number + 2))
        assert caplog.messages == [
            f"No room for a new generation: disk {number} is full. Requests stay recorded for "
            "longer than BLOOM_WINDOW_SECS"
            for number in (1, 2)
        ]
        status = store.life.status("here", store.live)
        assert status.errors == 4
        assert status.failure.endswith(": disk 2 is full")

    def test_while_another_crawl_adds_a_generation_the_newest_stays_open(self) -> None:
        store = turning()
        store.live[-1].count = 1
        store.is_busy = True
        store.now.now += QUARTER
        store.life.turn()
        assert store.numbers == [1]
        assert store.live[-1].open_until == store.now() + WINDOW / 100
        assert store.life.due_at == store.now() + WINDOW / 200


def test_a_new_filter_has_no_failures() -> None:
    store = growing()
    status = store.life.status("here", store.live)
    assert (status.location, status.error_rate) == ("here", P)
    assert (status.errors, status.failure, status.expired, status.more) == (0, "", 0, {})
    assert status.generations == store.live

"""When a filter grows and expires, over a store of the test's own."""

import math
from dataclasses import replace

import pytest

from scrapy_bloom.generations.lifecycle import LifeCycle, NoRoomError
from scrapy_bloom.generations.policy import Generation, Policy, Size
from tests.support.clock import Clock

P = 1e-3
WINDOW = 1000.0
EIGHTH = WINDOW / 8


class Store:
    """Generations that are only figures; the test says whether there is room for more."""

    def __init__(self, policy: Policy) -> None:
        self.now = Clock()
        self.full_text = ""  # why there is no room
        self.is_busy = False  # whether another crawl is adding a generation
        self.live = [Generation.of(policy.first(), 1, self.now())]
        self.life = LifeCycle(policy, self)
        self.life.plan()

    def update(self, run_at: float, size: Size | None = None, expired: int = 0) -> bool:
        if size and self.full_text:
            raise NoRoomError(self.full_text)
        if self.is_busy:
            return False
        newest = self.live[-1]
        del self.live[:expired]
        if size:
            self.live.append(Generation.of(size, newest.number + 1, run_at))
        else:
            newest.last_run = run_at
        self.life.plan()
        return True

    def begin_run_after(self, secs: float) -> bool:
        self.now.now += secs
        return self.life.begin_run(self.now())

    def fill(self) -> None:
        """Fill the newest generation."""
        self.live[-1].count = self.live[-1].capacity

    @property
    def numbers(self) -> list[int]:
        return [each.number for each in self.live]


def growing(capacity: int = 100) -> Store:
    return Store(Policy(expected=capacity, error_rate=P))


def turning(capacity: int = 400, *, is_endless: bool = False) -> Store:
    return Store(
        Policy(expected=capacity, error_rate=P, window=WINDOW, is_endless=is_endless),
    )


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


class TestRuns:
    def test_a_run_that_begins_soon_records_in_the_newest_generation(self) -> None:
        store = turning()
        begun = store.now()
        assert store.begin_run_after(EIGHTH - 1)
        assert (store.live[0].first_run, store.live[0].last_run) == (begun, begun + EIGHTH - 1)
        assert store.begin_run_after(1)
        assert [each.first_run for each in store.live] == [begun, begun + EIGHTH]
        assert [each.last_run for each in store.live] == [begun + EIGHTH - 1, begun + EIGHTH]

    def test_growth_counts_for_the_run(self) -> None:
        store = turning()
        store.begin_run_after(1)
        begun = store.now()
        store.now.now += 2 * WINDOW
        store.fill()
        store.life.grow()
        assert (store.live[1].first_run, store.live[1].last_run) == (begun, begun)

    @pytest.mark.parametrize("before", [0.0, 1.0, 2 * WINDOW])
    def test_a_run_that_has_begun_changes_nothing(self, before: float) -> None:
        store = turning()
        store.begin_run_after(3 * WINDOW)
        live = [replace(each) for each in store.live]
        store.is_busy = True
        assert store.begin_run_after(-before)
        assert store.live == live

    def test_generations_expire_after_their_last_run(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO")
        store = turning()
        for count in (7, 2, 4):
            store.live[-1].count = count
            assert store.begin_run_after(EIGHTH)
        assert store.begin_run_after(WINDOW * 23 / 24 - 3 * EIGHTH - 1)
        assert (store.numbers, caplog.messages) == ([1, 2, 3, 4, 5], [])
        assert store.begin_run_after(1)
        assert store.numbers == [2, 3, 4, 5]
        assert store.begin_run_after(2 * EIGHTH)
        assert store.numbers == [4, 5, 6]
        assert store.life.status("here", store.live).expired == 13
        assert [text.partition(" after")[0] for text in caplog.messages] == [
            "7 requests have expired",
            "6 requests have expired",
        ]
        assert store.begin_run_after(WINDOW)
        assert store.numbers == [7]

    def test_without_room_the_older_generations_expire(self) -> None:
        store = turning()
        store.begin_run_after(EIGHTH)
        store.full_text = "the disk is full"
        assert store.begin_run_after(WINDOW)
        assert store.numbers == [2]

    def test_while_another_crawl_changes_the_generations_it_is_not_done(self) -> None:
        store = turning()
        store.is_busy = True
        assert not store.begin_run_after(EIGHTH)
        assert (store.numbers, store.live[0].last_run) == ([1], store.live[0].first_run)

    def test_without_a_window_only_the_time_of_the_run_is_kept(self) -> None:
        store = growing()
        assert store.begin_run_after(10**9)
        assert (store.numbers, store.live[0].last_run) == ([1], store.now())

    def test_the_time_begins_runs_of_endless_workers_only(self) -> None:
        assert turning().life.due_at == growing().life.due_at == math.inf
        policy = Policy(expected=100, error_rate=P, is_endless=True)
        assert Store(policy).life.due_at == math.inf
        store = turning(is_endless=True)
        assert store.life.due_at == pytest.approx(store.now() + WINDOW / 24)

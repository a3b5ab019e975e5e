"""When a filter grows and expires, over a store of the test's own."""

from dataclasses import replace

import pytest

from scrapy_bloom.generations.policy import Generation, LifeCycle, NoRoomError, Policy
from tests.support.clock import Clock

GROWING = Policy(expected=100, error_rate=1e-3)


class Store(LifeCycle):
    """Generations that are only figures; the test says whether there is room for more."""

    location = "here"

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.now = Clock()
        self.full_text = ""  # why there is no room
        self.live = [policy.first(self.now())]
        self.plan()

    def update(self, run_at: float, new: Generation | None = None, expired: int = 0) -> bool:
        if new and self.full_text:
            raise NoRoomError(self.full_text)
        newest = self.live[-1]
        del self.live[:expired]
        if new:
            self.live.append(new)
        else:
            newest.last_run = run_at
        self.plan()
        return True

    def begin_run_after(self, secs: float) -> bool:
        self.now.now += secs
        return self.turn(self.now())

    def fill(self) -> None:
        """Fill the newest generation."""
        self.live[-1].count = self.live[-1].capacity


class TestGrow:
    def test_each_full_generation_is_followed_by_one_of_twice_its_size(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO")
        store = Store(GROWING)
        for _ in range(3):
            assert not store.is_full()
            store.fill()
            assert store.is_full()
            store.grow()
        assert [entry.capacity for entry in store.live] == [100, 200, 400, 800]
        assert store.grow_at == 800
        assert [text.partition(" at ")[0] for text in caplog.messages] == [
            f"The filter is full with {count} requests and grows: generation {number} has room for "
            f"{room} more"
            for count, number, room in ((100, 2, 200), (300, 3, 400), (700, 4, 800))
        ]

    def test_that_there_is_no_room_is_logged_once_until_there_is_room(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        store = Store(GROWING)
        for number in (1, 2):
            store.full_text = f"disk {number} is full"
            store.fill()
            store.grow()
            store.grow()
            store.full_text = ""
            store.grow()
        assert [text.partition(". ")[0] for text in caplog.messages] == [
            f"No room for a new generation: disk {number} is full" for number in (1, 2)
        ]
        status = store.status()
        assert status.errors == 4
        assert status.failure.endswith("no room for another generation: disk 2 is full")


def test_without_room_the_older_generations_expire() -> None:
    store = Store(replace(GROWING, window=1000.0))
    store.begin_run_after(125)
    store.full_text = "the disk is full"
    assert store.begin_run_after(1000)
    assert [entry.number for entry in store.live] == [2]

"""The forgotten requests of a run, over a store of the test's own."""

from collections.abc import Iterable

import pytest

from scrapy_bloom.generations import forgotten
from scrapy_bloom.generations.forgotten import Forgotten, MemoryForgotten
from tests.support.clock import Clock


class Store(MemoryForgotten):
    """Counts the looks, and has news."""

    def __init__(self) -> None:
        super().__init__()
        self.fresh: list[bytes] = []
        self.looks = 0

    def news(self) -> Iterable[bytes]:
        self.looks += 1
        found, self.fresh = self.fresh, []
        self.add(found)
        return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Moves the clocks on which looks and attempts are planned."""
    clock = Clock(1000.0)
    monkeypatch.setattr(forgotten, "monotonic", clock)
    return clock


def test_what_is_added_can_be_taken_once() -> None:
    store = Store()
    found = Forgotten(store)
    assert not found.take(b"page")
    assert b"page" not in found
    found.open()
    assert found.known == set()
    for _ in range(2):
        found.add([b"page", b"other"])
        assert (b"page" in found, b"new" in found) == (True, False)
        assert found.take(b"page")
        assert not found.take(b"page")
        assert b"page" not in found
        assert found.known == set(store.all()) == {b"other"}


def test_what_others_add_is_looked_for_each_second(clock: Clock) -> None:
    store = Store()
    store.fresh = [b"before"]
    found = Forgotten(store)
    clock.now += 10_000
    assert not found.take(b"before")  # not open yet
    found.open()
    assert (store.looks, found.known) == (1, {b"before"})
    store.fresh = [b"page", b"other"]
    clock.now += 0.99
    assert not found.take(b"page")
    assert b"page" not in found
    clock.now += 0.01
    assert found.take(b"page")
    assert store.looks == 2
    store.fresh = [b"third"]
    clock.now += 1
    assert b"third" in found
    assert store.looks == 3


def test_another_store_replaces_the_first() -> None:
    store = Store()
    store.add([b"page"])
    found = Forgotten(Store())
    found.use(store)
    assert b"page" in found


def test_old_fingerprints_expire_in_memory() -> None:
    store = MemoryForgotten()
    store.add([b"page"])
    store.expire(1000.0)
    assert list(store.all()) == [b"page"]
    store.expire(-1000.0)
    assert not store.all()

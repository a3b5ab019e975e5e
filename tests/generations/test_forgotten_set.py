"""The forgotten requests of a run, over a store of the test's own."""

from collections.abc import Iterable

import pytest

from scrapy_bloom.generations import forgotten
from scrapy_bloom.generations.forgotten import Forgotten, MemoryForgotten
from tests.support.clock import Clock


class Store(MemoryForgotten):
    """Counts the questions, and has news."""

    def __init__(self) -> None:
        super().__init__()
        self.fresh: list[bytes] = []
        self.asked = self.looks = 0

    def news(self) -> Iterable[bytes]:
        self.looks += 1
        found, self.fresh = self.fresh, []
        self.add(found)
        return found

    def take(self, fingerprint: bytes) -> bool:
        self.asked += 1
        return super().take(fingerprint)

    def has(self, fingerprint: bytes) -> bool:
        self.asked += 1
        return super().has(fingerprint)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Moves the clocks on which looks and attempts are planned."""
    clock = Clock(1000.0)
    monkeypatch.setattr(forgotten, "monotonic", clock)
    return clock


def pages(*numbers: int) -> list[bytes]:
    return [b"page %d" % number for number in range(*numbers)]


def test_an_empty_set_is_not_asked_about() -> None:
    store = Store()
    found = Forgotten(store)
    assert found.is_empty
    assert not found.take(b"page")
    assert b"page" not in found
    found.open()
    assert (found.is_empty, store.asked) == (True, 0)
    found.add([b"page"])
    assert not found.is_empty


def test_only_what_may_be_in_it_is_asked_about() -> None:
    store = Store()
    found = Forgotten(store)
    for start in (0, 4096, 20_480, 50_000):  # in three tables
        found.add(pages(start, start + 100 if start == 50_000 else start + 4096))
    for page in pages(10**6, 10**6 + 1000):
        assert not found.take(page)
        assert page not in found
    assert store.asked < 2 * 3 * 40  # 1.4 % for each table
    assert all(page in found for page in [*pages(8192), *pages(20_480, 24_576)])
    assert all(map(found.take, pages(8192)))
    assert not any(map(found.take, pages(8192)))


def test_what_others_add_is_looked_for_each_second(clock: Clock) -> None:
    store = Store()
    store.fresh = [b"before"]
    found = Forgotten(store)
    clock.now += 10_000
    assert not found.take(b"before")  # not open yet
    found.open()
    assert (store.looks, found.is_empty) == (1, False)
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


def test_bits_are_rebuilt_once_most_reads_are_in_vain() -> None:
    store = Store()
    found = Forgotten(store)
    found.add(pages(10))
    for page in pages(9):
        assert found.take(page)
    for _ in range(4096):
        assert not found.take(b"page 0")
    assert store.asked == 9 + 4096
    assert not found.take(b"page 0")  # the last one that the old bits let through
    assert not found.take(b"page 0")
    assert store.asked == 9 + 4096 + 1
    assert found.take(b"page 9")
    found.add([b"page 0"])
    assert found.take(b"page 0")
    for _ in range(4097):  # counted from the beginning
        found.take(b"page 0")
    assert store.asked == 9 + 4096 + 1 + 2 + 4097


def test_another_store_replaces_the_first() -> None:
    store = Store()
    store.add([b"page"])
    found = Forgotten(Store())
    found.use(store)
    assert b"page" in found

"""How a worker's changes are put into batches, and which requests it keeps for a loss."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrapy_bloom.queues import collected as module
from scrapy_bloom.queues.collected import MAX_BATCH, MAX_BATCH_BYTES, Collected, Kept
from scrapy_bloom.queues.store import Ended, Entered

SIZES = st.sampled_from([1, 100, MAX_BATCH_BYTES // 3, MAX_BATCH_BYTES, 2 * MAX_BATCH_BYTES])
CHANGES = st.one_of(
    st.tuples(st.just("entered"), SIZES),
    st.sampled_from(["done", "recorded"]),
)


@pytest.mark.parametrize(("most", "most_bytes"), [(MAX_BATCH, MAX_BATCH_BYTES), (1000, math.inf)])
@given(wanted=st.lists(st.tuples(CHANGES, st.integers(1, 40)), max_size=20))
def test_batches_are_bounded_and_in_order(wanted: list, most: int, most_bytes: float) -> None:
    collected, number = Collected(most, most_bytes), 0
    for change, times in wanted:
        for _ in range(times):
            number += 1
            name = b"%d" % number
            if change == "recorded":
                collected.last().recorded.append(name)
            elif change == "done":
                collected.end(Ended(name))
            else:
                collected.enter(Entered(name.ljust(change[1])))
    sent, entering = 0, collected.entering
    while collected:
        batch = collected.next_batch()
        entered = [request.data.strip() for request in batch.entered]
        entering -= len(entered)
        assert entering == collected.entering
        names = [*entered, *batch.recorded, *(ended.id for ended in batch.ended)]
        # No change is sent before an earlier one.
        assert sorted(map(int, names)) == list(range(sent + 1, sent + len(names) + 1))
        sent += len(names)
        assert 0 < len(names) <= most
        sizes = [len(request.data) for request in batch.entered]
        assert len(sizes) <= 1 or sum(sizes) <= most_bytes
    assert sent == number
    assert (collected.has_room, collected.fills_a_batch) == (True, False)


@pytest.mark.parametrize(("size", "most"), [(1, 4 * MAX_BATCH), (MAX_BATCH_BYTES, 4)])
def test_there_is_no_room_for_many_or_large_batches(size: int, most: int) -> None:
    collected = Collected()
    while collected.has_room:
        collected.enter(Entered(bytes(size)))
    assert collected.entering == most + 1


# Requests that are kept in case the server loses them.


def page(number: int) -> Entered:
    return Entered(b"%d" % number, b"page %d" % number, has_parent=False)


def kept() -> Kept:
    """Return the kept requests of ten batches: batch 0 has page 0, and so on."""
    requests = Kept()
    for number in range(10):
        requests.add([page(number), page(number)._replace(has_parent=True)], number)
    return requests


def test_older_requests_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_KEPT_BYTES", 5)
    assert kept().lost(3) == [page(number) for number in range(5, 10)]
    monkeypatch.setattr(module, "_KEPT_SECS", -1)
    assert kept().lost(-1) == []

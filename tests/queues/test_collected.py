"""How a worker's changes are put into batches, and which requests it keeps for a loss."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrapy_bloom.queues.collected import MAX_BATCH, MAX_BATCH_BYTES, Collected, Kept
from scrapy_bloom.queues.store import Ended, Entered

SIZES = st.sampled_from([1, 100, MAX_BATCH_BYTES // 3, MAX_BATCH_BYTES, 2 * MAX_BATCH_BYTES])
CHANGES = st.one_of(
    st.tuples(st.just("entered"), SIZES),
    st.sampled_from(["done", "recorded"]),
)


@pytest.mark.parametrize(("most", "most_bytes"), [(MAX_BATCH, MAX_BATCH_BYTES), (1000, math.inf)])
@given(wanted=st.lists(st.tuples(CHANGES, st.integers(1, 40)), max_size=8))
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


def test_the_latest_requests_are_kept_in_case_the_server_loses_them() -> None:
    """Those without a parent, up to 64 MB."""
    kept, data = Kept(), bytes(1 << 24)
    requests = [Entered(data, b"page %d" % number, has_parent=False) for number in range(6)]
    for number, request in enumerate(requests):
        kept.add([request, request._replace(has_parent=True)], number)
    assert kept.lost(3) == requests[4:]
    assert kept.lost(-1) == requests[2:4]

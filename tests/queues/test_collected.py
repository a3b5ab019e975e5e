"""How a worker's changes are put into batches, and which requests it keeps for a loss."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrapy_bloom.queues import collected as module
from scrapy_bloom.queues.batch import Found
from scrapy_bloom.queues.collected import MAX_BATCH, MAX_BATCH_BYTES, Collected, Kept

SIZES = st.sampled_from([1, 100, MAX_BATCH_BYTES // 3, MAX_BATCH_BYTES, 2 * MAX_BATCH_BYTES])
CHANGES = st.one_of(
    st.tuples(st.just("found"), SIZES),
    st.sampled_from(["done", "set_aside", "recorded", "forgotten"]),
)


@given(st.lists(st.tuples(CHANGES, st.integers(1, 40)), max_size=20))
def test_batches_are_bounded_and_in_order(wanted: list) -> None:
    collected, number = Collected(), 0
    for change, times in wanted:
        for _ in range(times):
            number += 1
            name = b"%d" % number
            if isinstance(change, tuple):
                collected.add_found(Found(name.ljust(change[1])))
            else:
                getattr(collected.last(), change).append(name)
    sent = 0
    while collected:
        batch = collected.next_batch()
        found = [each.data.strip() for each in batch.found]
        rest = [*batch.done, *batch.set_aside, *batch.recorded, *batch.forgotten]
        names = sorted(map(int, [*found, *rest]))
        # No change is sent before an earlier one.
        assert names == list(range(sent + 1, sent + len(names) + 1))
        sent += len(names)
        assert 0 < len(names) <= MAX_BATCH
        assert len(found) <= 1 or sum(len(each.data) for each in batch.found) <= MAX_BATCH_BYTES
    assert sent == number
    assert (collected.has_room, collected.fills_a_batch) == (True, False)


def test_a_request_found_after_it_was_forgotten_is_in_a_later_batch() -> None:
    """A batch records the requests found before it forgets any."""
    collected = Collected()
    collected.add_found(Found(b"a", b"page"))
    collected.last().forgotten.append(b"page")
    collected.add_found(Found(b"b", b"page"))
    first, second = collected.next_batch(), collected.next_batch()
    assert ([each.data for each in first.found], first.forgotten) == ([b"a"], [b"page"])
    assert [each.data for each in second.found] == [b"b"]


def test_flags_are_sent_once_and_in_order() -> None:
    collected = Collected()
    for number in range(MAX_BATCH):
        collected.last().done.append(b"%d" % number)
    assert collected.fills_a_batch
    collected.last().start_ended = True
    first, second = collected.next_batch(), collected.next_batch()
    assert (first.start_ended, second.start_ended, bool(collected)) == (False, True, False)


@pytest.mark.parametrize(("size", "most"), [(1, 4 * MAX_BATCH), (MAX_BATCH_BYTES, 4)])
def test_there_is_no_room_for_many_or_large_batches(size: int, most: int) -> None:
    collected = Collected()
    while collected.has_room:
        collected.add_found(Found(bytes(size)))
    assert len(list(collected.found())) == most + 1


# Requests that are kept in case the server loses them.


def page(number: int) -> Found:
    return Found(b"%d" % number, b"page %d" % number, has_parent=False)


def kept() -> Kept:
    """Return the kept requests of ten batches: batch 0 has page 0, and so on."""
    requests = Kept()
    for number in range(10):
        requests.add([page(number), page(number)._replace(has_parent=True)], number)
    return requests


def test_requests_that_the_server_has_lost() -> None:
    requests = kept()
    assert requests.lost(6) == [page(number) for number in (7, 8, 9)]
    requests.add([page(10)._replace(request="of the crawl")], 1)  # by the new worker
    assert requests.lost(0) == [page(10)]
    assert requests.lost(-1) == [page(number) for number in range(7)]
    assert requests.lost(-1) == []


def test_older_requests_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_KEPT_BYTES", 5)
    assert kept().lost(3) == [page(number) for number in range(5, 10)]
    monkeypatch.setattr(module, "_KEPT_SECS", -1)
    assert kept().lost(-1) == []

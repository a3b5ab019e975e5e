"""What a worker tells the queue that it shares, batch by batch."""

from hypothesis import given
from hypothesis import strategies as st

from scrapy_bloom.crawl.scheduler.collected import Collected, Entry
from scrapy_bloom.queues.batch import Found
from scrapy_bloom.queues.shared import MAX_BATCH, MAX_BATCH_BYTES

SIZES = st.sampled_from([1, 100, MAX_BATCH_BYTES // 3, MAX_BATCH_BYTES, 2 * MAX_BATCH_BYTES])
CHANGES = st.one_of(
    st.tuples(st.just("found"), SIZES, st.sampled_from(["n", "u", "?"])),
    st.sampled_from(["done", "set_aside", "recorded", "forgotten"]),
)


def entry(data: bytes, fingerprint: bytes | None = None, kind: str = "n") -> Entry:
    return Entry(Found(data, fingerprint, kind=kind), None, has_parent=True)


@given(st.lists(st.tuples(CHANGES, st.integers(1, 40)), max_size=20))
def test_batches_are_bounded_and_in_order(wanted: list) -> None:
    collected, number, kinds = Collected(), 0, {}
    for change, times in wanted:
        for _ in range(times):
            number += 1
            name = b"%d" % number
            if isinstance(change, tuple):
                _, size, kinds[name] = change
                collected.add_found(entry(name.ljust(size), kind=kinds[name]))
            else:
                collected.add(change, name)
    assert len(collected) == number
    told = 0
    while collected:
        batch = collected.parcel()
        found = [each.data.strip() for each in batch.found]
        rest = [*batch.done, *batch.set_aside, *batch.recorded, *batch.forgotten]
        names = sorted(map(int, [*found, *rest]))
        # Nothing is told before what happened sooner.
        assert names == list(range(told + 1, told + len(names) + 1))
        told += len(names)
        assert 0 < len(names) <= MAX_BATCH
        assert len(found) <= 1 or sum(len(each.data) for each in batch.found) <= MAX_BATCH_BYTES
        assert all(each.kind == kinds[each.data.strip()] for each in batch.found)
        assert [each.found for each in batch.entries] == batch.found
    assert told == number
    assert (collected.found, collected.has_room, collected.fills_a_batch) == (0, True, False)


def test_what_is_found_after_it_was_forgotten_is_told_later() -> None:
    """A batch records what is found before it forgets anything."""
    collected = Collected([entry(b"a", b"page")])
    collected.add("forgotten", b"page")
    collected.add_found(entry(b"b", b"page"))
    first, second = collected.parcel(), collected.parcel()
    assert ([each.data for each in first.found], first.forgotten) == ([b"a"], [b"page"])
    assert [each.data for each in second.found] == [b"b"]


def test_flags_are_told_once_and_in_order() -> None:
    collected = Collected()
    for number in range(MAX_BATCH):
        collected.add("done", b"%d" % number)
    collected.add("start_ended", True)
    first, second = collected.parcel(), collected.parcel()
    assert (first.start_ended, second.start_ended, len(collected)) == (False, True, 0)


def test_there_is_no_room_for_many_or_large_ones() -> None:
    many, large = Collected(), Collected([entry(bytes(MAX_BATCH_BYTES))] * 16)
    while many.has_room:
        many.add_found(entry(b""))
    assert many.found == 4 * MAX_BATCH
    assert not large.has_room

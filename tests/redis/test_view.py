"""A crawl's view of a shared filter: what stays known when the generations change."""

from dataclasses import replace

import pytest

from scrapy_bloom.generations.lifecycle import Run
from scrapy_bloom.generations.policy import Policy, Size
from scrapy_bloom.redis.keys.meta import FilterInfo, RedisGeneration, Stored
from scrapy_bloom.redis.view import View

INFO = FilterInfo(salt=16 * "00", fingerprinter="", spider="", created_at=0.0)
OTHER = replace(INFO, epoch="another1")


def generation(number: int) -> RedisGeneration:
    return RedisGeneration.of(Size(capacity=100, error_rate=1e-3), number, 0.0)


def stored(*generations: RedisGeneration, info: FilterInfo | None = INFO) -> Stored:
    return Stored(info, generations, {}, {})


def run(window: float = 0.0) -> Run:
    run = Run(Policy(expected=100, error_rate=1e-3, on_full="grow", window=window))
    run.begin(1, 0.0)
    return run


def as_read(generation: RedisGeneration, count: int) -> RedisGeneration:
    """The same generation, as it is read from the server: nothing is known of its bits."""
    return replace(generation, count=count, mirror=None, complete=bytearray())


def test_what_is_known_of_a_generation_stays() -> None:
    first, second = generation(1), generation(2)
    before = View(INFO).then(stored(first), run(), mirror=True)
    after = before.then(stored(as_read(first, 7), second), run(), mirror=True)
    assert before.live == [first]  # a view does not change
    assert after.live == [first, second]
    assert first.count == 7
    assert after.mirrors == [second.mirror, first.mirror]
    assert (after.newest, after.older) == (second, [first])


def test_nothing_is_known_of_another_filter() -> None:
    first = generation(1)
    before = View(INFO).then(stored(first), run(), mirror=True)
    after = before.then(stored(as_read(first, 0), info=OTHER), run(), mirror=False)
    assert after.newest is not first
    assert not after.mirrors


def test_what_is_noted_is_known_without_a_look_at_the_bits() -> None:
    first = generation(1)
    view = View(INFO).then(stored(first), run(), mirror=True)
    assert view.hash_of_unknown(b"page") == view.locate(b"page")
    view.note_known(b"page")
    assert view.hash_of_unknown(b"page") is None
    assert view.hash_of_unknown(b"other") is not None
    after = view.then(stored(as_read(first, 1)), run(), mirror=True)
    assert after.hash_of_unknown(b"page") is not None


def test_what_is_noted_takes_no_more_than_some_memory() -> None:
    view = View(INFO).then(stored(generation(1)), run(), mirror=True)
    for number in range(100_000):
        view.note_known(b"%d" % number)
    assert view.hash_of_unknown(b"99999") is None
    known = [each for each in range(100_000) if view.hash_of_unknown(b"%d" % each) is None]
    assert 0 < len(known) <= 65_536


def test_without_a_mirror_nothing_is_noted() -> None:
    view = View(INFO).then(stored(generation(1)), run(), mirror=False)
    view.note_known(b"page")
    assert view.hash_of_unknown(b"page") == view.locate(b"page")


@pytest.mark.parametrize(("window", "is_kept"), [(0.0, False), (1000.0, True)])
def test_a_run_goes_on_to_ask_what_has_expired(window: float, is_kept: bool) -> None:
    first, second = replace(generation(1), created_at=1.0), generation(2)
    before = View(INFO).then(stored(first, second), run(window), mirror=True)
    after = before.then(stored(as_read(second, 0)), run(window), mirror=True)
    assert after.live == [second]
    assert (after.kept == [first]) is is_kept
    assert (first.mirror in after.mirrors) is is_kept


@pytest.mark.parametrize(
    ("there", "is_lost"),
    [
        (stored(info=None), True),
        (replace(stored(info=None), was_reset=True), False),
        (stored(), True),
        (stored(generation(1)), True),
        (stored(generation(2)), False),
        (stored(generation(1), info=OTHER), False),
    ],
    ids=["gone", "reset", "nothing in it", "older", "the same", "another filter"],
)
def test_what_counts_as_lost(there: Stored, is_lost: bool) -> None:
    view = View(INFO).then(stored(generation(1), generation(2)), run(), mirror=False)
    assert view.is_lost(there) is is_lost

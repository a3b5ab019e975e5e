"""CountingBloomFilter, used without Scrapy."""

import random
import re
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scrapy_bloom import BloomFilter, CountingBloomFilter
from scrapy_bloom.filters.sizing import Geometry

SALT = bytes(range(16))


def numbered(numbers: range) -> list[bytes]:
    return [number.to_bytes(20, "big") for number in numbers]


def one_block() -> CountingBloomFilter:
    """A filter of fingerprints that say which counters they have."""
    seen = CountingBloomFilter(1000, 0.1, salt=SALT, geometry=Geometry(1, 3))
    seen._locate = lambda positions: (0, [*positions])
    return seen


def counters(seen: CountingBloomFilter) -> Counter[int]:
    """All counters above 0, read from the bytes."""
    found = bytes(seen.blocks(0, seen.num_blocks))
    count: Counter[int] = Counter()
    for match in re.finditer(rb"[^\0]", found):  # fast, because most are 0
        high, low = divmod(match[0][0], 16)
        count[2 * match.start()], count[2 * match.start() + 1] = low, high
    return +count


def test_one_hash_is_enough() -> None:
    seen = CountingBloomFilter(1000, 0.5, salt=SALT)
    assert seen.num_hashes == 1
    assert seen.add(b"page")
    assert b"page" in seen
    assert seen.discard(b"page")
    assert b"page" not in seen


@pytest.mark.parametrize("error_rate", [0.5, 1e-2, 1e-6, 1e-15])
def test_it_takes_exactly_four_times_the_space(error_rate: float) -> None:
    plain, counting = BloomFilter(100_000, error_rate), CountingBloomFilter(100_000, error_rate)
    assert counting.nbytes == 4 * plain.nbytes == len(counting.blocks(0, counting.num_blocks))
    assert (counting.num_blocks, counting.num_hashes, counting.num_bits) == (
        plain.num_blocks,
        plain.num_hashes,
        plain.num_bits,
    )


def test_its_bits_are_those_of_a_plain_filter() -> None:
    plain, counting = (kind(20_000, 1e-3, salt=SALT) for kind in (BloomFilter, CountingBloomFilter))
    for name in numbered(range(20_000)):
        plain.add(name)
        counting.add(name)
    assert counting.fill_ratio == plain.fill_ratio
    assert counting.estimated_error_rate == plain.estimated_error_rate
    questions = numbered(range(20_000, 60_000))
    assert [question in counting for question in questions] == [
        question in plain for question in questions
    ]


class CountersAgainstCounter(RuleBasedStateMachine):
    """Any sequence of adding and discarding, compared with a Counter for each position.

    Few positions, one of them shared by many, so that counters are high and some saturate.
    """

    positions = st.tuples(st.integers(0, 1), st.integers(2, 40), st.integers(38, 60)).map(bytes)

    def __init__(self) -> None:
        super().__init__()
        self.filter = one_block()
        self.model: Counter[int] = Counter()
        self.live: list[bytes] = []
        self.saturated = 0

    @rule(positions=positions)
    def add(self, positions: bytes) -> None:
        new = not all(self.model[position] for position in positions)
        assert self.filter.add(positions) == new
        if new:
            self.live.append(positions)
            self.saturated += sum(self.model[position] == 15 for position in set(positions))
            self.model.update(position for position in set(positions) if self.model[position] < 15)

    @rule(seed=st.integers(0, 10**9))
    def add_many(self, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(30):
            self.add(bytes([rng.randint(0, 1), rng.randint(2, 40), rng.randint(38, 60)]))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.live) - 1))
        positions = self.live.pop(number)
        assert self.filter.discard(positions)
        self.model.subtract(position for position in set(positions) if self.model[position] < 15)

    @rule(positions=positions)
    def discard_what_is_not_there(self, positions: bytes) -> None:
        if not all(self.model[position] for position in positions):
            assert not self.filter.discard(positions)

    @rule()
    def discard_all(self) -> None:
        while self.live:
            positions = self.live.pop()
            assert self.filter.discard(positions)
            self.model.subtract(
                position for position in set(positions) if self.model[position] < 15
            )
        assert set(self.model.values()) <= {0, 15}

    @invariant()
    def counters_are_those_of_the_model(self) -> None:
        assert counters(self.filter) == +self.model
        assert self.filter.saturated == self.saturated

    @invariant()
    def there_is_no_false_negative(self) -> None:
        assert all(positions in self.filter for positions in self.live)


CountersAgainstCounter.TestCase.settings = settings(max_examples=20, stateful_step_count=25)
TestCounters = CountersAgainstCounter.TestCase

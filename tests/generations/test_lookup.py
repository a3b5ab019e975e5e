"""The filters of several generations, asked at once."""

from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.generations.memory import Lookup, Recent

SALT = bytes(16)


def test_each_generation_is_asked_with_its_own_number_of_hashes() -> None:
    few, many, newest = (BloomFilter(100, rate, salt=SALT) for rate in (0.3, 1e-9, 1e-3))
    assert few.num_hashes < newest.num_hashes < many.num_hashes
    few.add(b"few")
    many.add(b"many")
    lookup = Lookup([few, many, newest])
    assert b"few" in lookup
    assert b"many" in lookup
    assert b"new" not in lookup
    assert lookup.add(b"new")
    assert not lookup.add(b"new")
    alone = BloomFilter(100, 1e-3, salt=SALT)
    alone.add(b"new")
    assert newest.blocks(0, 1) == alone.blocks(0, 1)  # no bit more than its own
    assert all(each in lookup for each in (b"few", b"many", b"new"))
    assert b"other" not in lookup
    assert b"new" not in Lookup([few, many])


def test_the_recent_ones_are_emptied_when_they_are_many() -> None:
    recent = Recent(3)
    for each in (b"a", b"b", b"c"):
        recent.add(each)
    assert recent == {b"a", b"b", b"c"}
    recent.add(b"d")
    assert recent == {b"d"}

"""The textbook experiment: its figures against theory and against the published ones."""

import gzip
import hashlib
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrapy_bloom import BloomError, BloomFilter, CountingBloomFilter
from scrapy_bloom.analysis.experiment import (
    SALT,
    ClassicFilter,
    Contestant,
    ExactSet,
    Md5Set,
    classic_false_drops,
    compare,
    contestants,
)
from scrapy_bloom.commands.compare import count_urls, urls_in

NAMES = ["exact set", "MD5 set", "bitmap", "Bloom filter", "this package"]


def numbered(count: int) -> list[bytes]:
    return [b"https://example.com/catalogue/page-%d.html" % number for number in range(count)]


def drawn(count: int) -> list[bytes]:
    chance = random.Random(8)
    return [b"http://example.org/" + chance.randbytes(12).hex().encode() for _ in range(count)]


def of(urls: list[bytes], error_rate: float = 1e-6, **sizes: int) -> tuple[list[Contestant], list]:
    those = contestants(BloomFilter(len(urls), error_rate, salt=SALT), **sizes)
    return those, list(compare(urls, len(urls), [each.memory for each in those]))


@pytest.mark.parametrize("make", [numbered, drawn])
def test_the_published_figures(make: Callable[[int], list[bytes]]) -> None:
    those, rows = of(make(100_000))
    assert [each.name for each in those] == NAMES
    assert [row.read for row in rows] == list(range(10_000, 100_001, 10_000))
    assert [row.different for row in rows] == [row.read for row in rows]
    exact, md5, bitmap, bloom, ours = (100 * wrong / 100_000 for wrong in rows[-1].wrong)
    assert (exact, md5, ours) == (0, 0, 0)
    assert bitmap == pytest.approx(4.83, abs=0.3)
    assert bloom == pytest.approx(2.97, abs=0.3)
    # The sums, not the closed forms: what the n-th URL meets, for each n.
    m = 1_000_000
    assert bitmap == pytest.approx(
        sum(1 - (1 - 1 / m) ** i for i in range(100_000)) / 1000, abs=0.3
    )
    k, m = 3, 480_833
    assert bloom == pytest.approx(
        sum((1 - (1 - 1 / m) ** (k * i)) ** k for i in range(100_000)) / 1000, abs=0.3
    )
    # And on the way there, within five standard deviations of a count.
    for row in rows:
        for each, wrong in zip(those, row.wrong, strict=True):
            expected = each.theory(row.different)
            assert abs(wrong - expected) <= 5 * math.sqrt(expected) + 1, (each.name, row)
    sizes = [each.memory.nbytes for each in those]
    assert sizes[0] > sizes[1] > sizes[4] > sizes[2] > sizes[3]
    assert sizes[2:4] == [125_000, 60_105]
    assert sizes[4] == BloomFilter(100_000, 1e-6).nbytes


def test_our_own_filter_errs_as_expected_where_it_is_let() -> None:
    those, rows = of(numbered(30_000), error_rate=0.2)
    expected = those[4].theory(30_000)
    assert expected > 200
    assert rows[-1].wrong[4] == pytest.approx(expected, abs=5 * math.sqrt(expected))


def test_a_filter_too_small_takes_almost_all_for_seen() -> None:
    those, rows = of(numbered(2000), bitmap_bits=100, bloom_bits=64, bloom_hashes=2)
    assert rows[-1].wrong[2] == 1900
    assert those[2].theory(2000) == pytest.approx(1900, abs=1)
    assert 1936 <= rows[-1].wrong[3] < 2000
    assert those[3].theory(2000) == pytest.approx(rows[-1].wrong[3], abs=15)


def test_a_repeated_url_is_not_wrongly_seen() -> None:
    urls = numbered(5000) * 4
    those, rows = of(urls, bitmap_bits=20_000, bloom_bits=20_000)
    assert (rows[-1].read, rows[-1].different) == (20_000, 5000)
    _, once = of(numbered(5000), bitmap_bits=20_000, bloom_bits=20_000)
    assert rows[-1].wrong == once[-1].wrong
    assert rows[-1].wrong[2] == pytest.approx(those[2].theory(5000), rel=0.15)
    assert [row.different for row in rows[2:]] == [5000] * 8


def test_the_same_urls_give_the_same_figures() -> None:
    urls = numbered(3000)
    sizes = {"bitmap_bits": 9000, "bloom_bits": 9000}
    assert of(urls, 0.3, **sizes)[1] == of(urls, 0.3, **sizes)[1]


@pytest.mark.parametrize(
    ("count", "ends"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (9, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (10, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (15, [1, 3, 4, 6, 7, 9, 10, 12, 13, 15]),
    ],
)
def test_a_row_for_each_tenth(count: int, ends: list[int]) -> None:
    assert [row.read for row in of(numbered(count))[1]] == ends


def test_the_exact_set_is_the_judge() -> None:
    # One bit: the first URL sets it, and whatever is new later looks seen.
    rows = list(compare([b"a", b"a", b"b", b"c", b"b"], 5, [ExactSet(), ClassicFilter(1, 1)]))
    assert [row.different for row in rows] == [1, 1, 2, 3, 3]
    assert [row.wrong for row in rows] == [(0, 0), (0, 0), (0, 1), (0, 2), (0, 2)]


def test_no_more_urls_are_read_than_were_counted() -> None:
    urls = iter(numbered(8))
    assert [row.read for row in compare(urls, 5, [ExactSet()])] == [1, 2, 3, 4, 5]
    assert len(list(urls)) == 3


def test_fewer_urls_than_were_counted() -> None:
    with pytest.raises(BloomError, match="ended after 4, and there were 5 .* give a file"):
        list(compare(numbered(4), 5, [ExactSet()]))


def test_progress_is_told() -> None:
    told: list[int] = []
    list(compare(numbered(250), 250, [ExactSet()], told.append))
    assert told == [100, 200]


def test_the_memory_of_the_sets() -> None:
    urls = [b"http://example.com/" + b"x" * length for length in range(1000)]
    exact, md5 = ExactSet(), Md5Set()
    for url in urls + urls:
        exact.add(url)
        md5.add(url)
    assert exact.nbytes == sys.getsizeof(set(urls)) + sum(map(sys.getsizeof, urls))
    digest = hashlib.md5(b"").digest()
    assert md5.nbytes == sys.getsizeof(set(urls)) + 1000 * sys.getsizeof(digest)


@pytest.mark.parametrize("hashes", [1, 2, 3, 64])
def test_a_classic_filter_never_forgets_and_sets_so_many_bits(hashes: int) -> None:
    small = ClassicFilter(100_003, hashes)
    urls = numbered(200)
    assert [small.add(url) for url in urls] == [True] * 200
    assert [small.add(url) for url in urls] == [False] * 200
    expected = 100_003 * -math.expm1(-200 * hashes / 100_003)
    assert small._bits.count() == pytest.approx(expected, abs=4 * math.sqrt(expected) + 1)
    assert small.nbytes == 12_501
    assert not small._bits[100_003:].any()


@given(st.integers(1, 10**6), st.integers(1, 64), st.integers(0, 3000))
def test_classic_false_drops_is_the_sum_over_the_urls(bits: int, hashes: int, count: int) -> None:
    total = math.fsum((-math.expm1(-hashes * i / bits)) ** hashes for i in range(count))
    assert classic_false_drops(bits, hashes, count) == pytest.approx(total, abs=1)


@pytest.mark.parametrize("hashes", [1, 3, 20, 64])
def test_both_forms_of_classic_false_drops_meet(hashes: int) -> None:
    # Either side of a fill ratio of 0.9, where it changes from one to the other.
    bits = 10**9
    count = round(-math.log(0.1) * bits / hashes)
    below, above = (classic_false_drops(bits, hashes, count + by) for by in (-1, 1))
    assert above - below == pytest.approx(2 * 0.9**hashes, rel=0.001)


def test_counters_are_told_from_bits() -> None:
    ours = contestants(CountingBloomFilter(1000, 1e-3, salt=SALT))[4]
    assert ours.details.startswith("65,536 counters, ")
    assert ours.memory.nbytes == 32_768


def test_the_lines_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "urls"
    path.write_bytes(b"\n  http://a/ \r\n\r\n\t\nhttp://b/\xff\xfe\nhttp://a/")
    assert list(urls_in(path)) == [b"http://a/", b"http://b/\xff\xfe", b"http://a/"]
    assert count_urls(path) == 3
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert count_urls(path) == 3


@pytest.mark.parametrize("content", [b"", b"\n", b" \r\n\t\n"])
def test_a_file_without_urls(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "urls").write_bytes(content)
    with pytest.raises(BloomError, match="has no URLs in it: give a file"):
        count_urls(tmp_path / "urls")
